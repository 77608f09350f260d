"""Dispatch mode that annotates the planned ops of a step, and leaves the rest to XLA's propagation.

Unlike `annotator.Annotator` it never ends a step. An op is planned if its name, its options and the producers of its
tensors are; order and other ops between do not matter. Any other op (a loop's sum of losses, clipping) runs without
annotation, and so do its readers. If its result overwrites a planned value, as in clipping of gradients, it stands for
that value from then on. So do sums of the step's gradients and gradients present at its beginning.

Annotations never change results, and a value's stand-in has copies of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from autoshard.frontends.tracing.device import is_xla, tensor_id
from autoshard.frontends.tracing.sequence import WRITES_BACK, AtenSequence, Call, Producer, tensors_in
from autoshard.lower.torch_xla import runtime
from autoshard.lower.torch_xla.annotator import Annotator, format_tensor
from autoshard.lower.torch_xla.schedule import Schedule
from autoshard.lower.torch_xla.step import StepWriter

FOREIGN = (-1, 0)
"""Producer of a value that no planned op made."""


class Follower(Annotator):
    """Annotates the planned ops of one step.

    Args:
        schedule: what to do.
        arguments: as `Annotator`'s.
        gradients: present when the step begins.
        differs: called with each deviation from the plan, where it runs.
    """

    def __init__(
        self,
        schedule: Schedule,
        arguments: Callable[[], Mapping[str, torch.Tensor]],
        gradients: Iterable[torch.Tensor],
        differs: Callable[[str], None],
    ) -> None:
        """Nothing has run yet."""
        self._gradients = {tensor_id(each) for each in gradients}
        self._differs = differs
        self._bound: dict[str, int] = {}
        self._unlike = -1
        self._foreign = False
        super().__init__(schedule, arguments)
        self._writer = StepWriter(schedule, self.producer, stand_ins=True)

    @property
    def steps_end(self) -> bool:
        """Whether every op of the program has run, or the step has ended."""
        return len(self._ran) == len(self._schedule.ops)

    def finish(self) -> None:
        """Mark the step as complete."""
        self.left_alone = False
        self._ran = set(range(len(self._schedule.ops)))

    def complete(self) -> None:
        """End the step: report missing planned ops."""
        missing = next((op for op in range(len(self._schedule.ops)) if op not in self._ran), None)
        if missing is not None and not self.left_alone:
            self._differs(f"the step ends without op {missing} of the plan, {self._expected(missing)}")

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        """End the step, complete or not."""
        AtenSequence.__exit__(self, kind, error, trace)
        self._writer.restart()

    def _begin(self) -> None:
        self._ran.clear()
        self._bound.clear()
        super()._begin()
        self._cleared_before = self._gradients

    # The mode.

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Annotate; where that fails, the rest of the step runs without annotations."""
        try:
            return AtenSequence.__torch_dispatch__(self, func, types, args, kwargs)
        except Exception as error:
            failed = error
        made = self.alone(func, args, kwargs or {})  # errors of the op itself belong to the loop
        if not self.left_alone:
            self.leave_alone()
            self._differs(f"{func} cannot be followed ({type(failed).__name__}: {_first_line(failed)})")
        return made

    def skip(self, func: Any, inputs: tuple[Producer, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Skip unplanned ops; number a planned op as in the plan."""
        if self.left_alone or self.steps_end:
            return True
        found = self._planned(Call(-1, func, tensors_in((args, kwargs)), inputs, args, kwargs))
        if found is None:
            self._foreign = True
            if torch.Tag.view_copy not in func.tags:  # a view computes nothing
                self._differs(f"{func} is no part of the step that was planned")
            return True
        self._ran.add(found)
        self.next_index = found
        return False

    def run(self, call: Call) -> Any:
        """Run the op, on its copies."""
        self._bind_inputs(call)
        args, kwargs = self._writer.before(call)
        return call.func(*args, **kwargs)

    def after(self, call: Call, outputs: tuple[torch.Tensor, ...]) -> None:
        """Pin what the op returned, if that is as planned."""
        if tuple(format_tensor(t) for t in outputs) == self._schedule.ops[call.index].outputs:
            self._writer.after(call, outputs)
            return
        self._ran.discard(call.index)
        self._unlike = call.index
        self._differs(f"{call.name} returns {', '.join(map(format_tensor, outputs))}, which is not as planned")

    def made(self, call: Call, outputs: tuple[torch.Tensor, ...]) -> None:
        """Record the outputs of the planned op."""
        if self._unlike != call.index:
            super().made(call, outputs)
        self._unlike = -1

    def uncounted(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Keep write-backs of arguments; a value that overwrites a planned one stands for it."""
        foreign, self._foreign = self._foreign, False
        if str(func) in WRITES_BACK and is_xla(args[0]):
            self._written_over(self.producer(args[0]), args[1])
            return self._writer.write_back(func, args, kwargs)
        made = func(*args, **kwargs)
        for tensor in tensors_in((made,)) if foreign else ():
            if is_xla(tensor):
                self.producers.setdefault(tensor_id(tensor), FOREIGN)
        return made

    def host(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Host computations."""
        return AtenSequence.host(self, func, args, kwargs)

    # Its parts.

    @property
    def _earliest(self) -> int:
        """Any op may still have to run."""
        return 0

    def _written_over(self, old: Producer, new: torch.Tensor) -> None:
        """Make an unplanned value that overwrites a planned one stand for it."""
        if not isinstance(old, tuple) or old == FOREIGN or self.producer(new) != FOREIGN:
            return
        if format_tensor(new) == self._schedule.ops[old[0]].outputs[old[1]]:
            self.producers[tensor_id(new)] = old

    def _is_read(self, tensor: torch.Tensor, found: Producer, wanted: Producer) -> bool:
        """As in a planned step; an input that has been recognised is that tensor."""
        if found is None and isinstance(wanted, str) and wanted in self._bound and self._schedule.is_input(wanted):
            return self._bound[wanted] == tensor_id(tensor)
        return super()._is_read(tensor, found, wanted)

    def _bind_inputs(self, call: Call) -> None:
        """Recognise inputs at their first reader, and shard them where possible."""
        for tensor, wanted, seen in zip(call.tensors, self._schedule.ops[call.index].inputs, call.inputs, strict=True):
            if seen is not None or not isinstance(wanted, str) or not is_xla(tensor):
                continue
            self.name(tensor, wanted)
            self._bound[wanted] = tensor_id(tensor)
            argument = self._schedule.arguments.get(wanted)
            if argument is not None:
                try:
                    runtime.shard_data(tensor, self._schedule.mesh, argument.spec, f"input {wanted}")
                except RuntimeError as error:
                    self._differs(_first_line(error))


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "")
