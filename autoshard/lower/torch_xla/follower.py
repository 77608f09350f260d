"""The dispatch mode that annotates what of a step is planned, and leaves the rest of it to XLA's propagation.

`annotator.Annotator` refuses a step that is not the planned one; this one never ends a step. An op is a planned one if
its name, its options and what its tensors follow from are the planned ones; in which order they come, and what is
between them, does not matter. Any other op (the sum of losses that a loop keeps, clipping) runs as it is, unpinned, and
what reads its result is no planned op either. Where it is written over a planned value, as clipping does with
gradients, the result stands for that value from then on.

The same goes for sums of gradients that are there when the step begins (cleared by `zero_grad`, or not) and of the
step's own.

Nothing of it can change a number: annotations do not, and what stands for a value has copies of its own.
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
"""Who made a value that no planned op made."""


class Follower(Annotator):
    """Annotates one step, as far as it is the planned one.

    Args:
        schedule: what to do.
        arguments: as `Annotator`'s.
        gradients: that there are when the step begins.
        differs: told what of the step is not the planned one, where it runs; every time.
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
        self._ran: set[int] = set()
        self._bound: dict[str, int] = {}
        self._unlike = -1
        self._foreign = False
        super().__init__(schedule, arguments)
        self._writer = StepWriter(schedule, self.producer, stand_ins=True)

    @property
    def steps_end(self) -> bool:
        """Whether every op of the program has run, or the step was ended."""
        return len(self._ran) == len(self._schedule.ops)

    def finish(self) -> None:
        """Take the step for complete."""
        self.left_alone = False
        self._ran = set(range(len(self._schedule.ops)))

    def complete(self) -> None:
        """The step has ended: say so if planned ops are missing."""
        missing = next((op for op in range(len(self._schedule.ops)) if op not in self._ran), None)
        if missing is not None and not self.left_alone:
            self._differs(f"the step ends without op {missing} of the plan, {self._expected(missing)}")

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        """End the step, whatever has run of it."""
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
        """Annotate; where that fails, the op runs as it is, and so does the rest of the step."""
        try:
            return AtenSequence.__torch_dispatch__(self, func, types, args, kwargs)
        except Exception as error:
            failed = error
        made = self.alone(func, args, kwargs or {})  # what the op itself raises is the loop's own
        if not self.left_alone:
            self.leave_alone()
            self._differs(f"{func} cannot be followed ({type(failed).__name__}: {_first_line(failed)})")
        return made

    def skip(self, func: Any, inputs: tuple[Producer, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Leave out what is not planned; what is has the number of the planned op."""
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
        """Know outputs by the planned op, if they are its."""
        if self._unlike != call.index:
            super().made(call, outputs)
        self._unlike = -1

    def uncounted(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Write-backs keep the tie of arguments; what is written over a planned value stands for it."""
        foreign, self._foreign = self._foreign, False
        if str(func) in WRITES_BACK and is_xla(args[0]):
            self._written_over(self.producer(args[0]), args[1])
            return self._writer.write_back(func, args, kwargs)
        made = func(*args, **kwargs)
        for tensor in tensors_in((made,)) if foreign else ():
            if is_xla(tensor):
                self._producers.setdefault(tensor_id(tensor), FOREIGN)
        return made

    def host(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """What the host computes."""
        return AtenSequence.host(self, func, args, kwargs)

    # Its parts.

    def _planned(self, call: Call) -> int | None:
        """The first planned op that has not run yet and is this one."""
        reads = tuple(None if self._may_be_input(p) else p for p in call.inputs)
        for index in self._schedule.by_reads.get((call.name, reads), ()):
            planned = self._schedule.ops[index]
            if index in self._ran or planned.options != call.options:
                continue
            if all(map(self._is_read, call.tensors, call.inputs, planned.inputs)):
                return index
        return None

    def _written_over(self, old: Producer, new: torch.Tensor) -> None:
        """Have what no planned op made, and a planned value is overwritten with, stand for that."""
        if not isinstance(old, tuple) or old == FOREIGN or self.producer(new) != FOREIGN:
            return
        if format_tensor(new) == self._schedule.ops[old[0]].outputs[old[1]]:
            self._producers[tensor_id(new)] = old

    def _may_be_input(self, producer: Producer) -> bool:
        return producer is None or self._schedule.is_input(producer)

    def _is_read(self, tensor: torch.Tensor, found: Producer, wanted: Producer) -> bool:
        """Whether a tensor is what a planned op reads; an input is known by its type where it is read first."""
        if found == wanted or not isinstance(wanted, str) or not self._schedule.is_input(wanted):
            return found == wanted
        if found is not None:
            return self._same_input(found, wanted)
        if wanted in self._bound:
            return self._bound[wanted] == tensor_id(tensor)
        argument = self._schedule.arguments.get(wanted)
        return argument is None or format_tensor(tensor) == f"{argument.dtype}[{','.join(map(str, argument.shape))}]"

    def _bind_inputs(self, call: Call) -> None:
        """Know inputs where they are read first, and shard them if they let themselves be."""
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
