"""Dispatch mode that annotates an ordinary training step as planned, and refuses any other program.

Around aten op k it checks that the op is the planned one, passes it the planned copies, and pins its outputs
(`step.StepWriter`), below autograd.

**Values read on the host** (`.item()`, `if t:`, `nonzero()`) are the running step's own: torch_xla runs what they
depend on at once. They are compared with those at capture.

**Micro-batches.** Of a step of several, the plan has two micro-steps and the update; the ops of the second run once
for each micro-batch after the first, on what the one before has left. Ops between micro-steps (a sum of losses) are
ignored.

**Another order.** An op that is planned for later, with all that it reads, runs in its turn of the plan: a model that
loops over a set has another order in each process.

**Another program** is refused at the first op that differs, before it runs; tensors of the model and the optimizer then
get back the values and gradients from before the step. The error names the last host value that differs from capture, a
possible cause.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from autoshard.frontends.tracing.device import is_xla, tensor_id, tensor_type
from autoshard.frontends.tracing.known import described
from autoshard.frontends.tracing.sequence import WRITES_BACK, AtenSequence, Call, Producer, tensors_in
from autoshard.frontends.tracing.trace import takes_values
from autoshard.lower.torch_xla import runtime
from autoshard.lower.torch_xla.regions import executing, platform_here
from autoshard.lower.torch_xla.schedule import Schedule, describe
from autoshard.lower.torch_xla.step import StepWriter
from autoshard.plans.value import PlanMismatchError, format_type

_ON_HOST = " It reads a tensor of the host: are all inputs moved to the device, .to('xla')?"


class Annotator(AtenSequence):
    """Annotates step after step; a step begins when the mode is entered, or where op 0 follows the last op.

    After the last op of the program, ops are ignored (logging a running loss, say) unless they belong to a backward
    pass or write a parameter, buffer or state: such a longer program is refused.

    Args:
        schedule: the plan by aten op.
        arguments: returns the present tensors of parameters, buffers and optimizer state by name.
        remember: called at the beginning of a step; its result is called before another program is refused, with the
            original values, by name, of arguments written in the step.
    """

    def __init__(
        self,
        schedule: Schedule,
        arguments: Callable[[], Mapping[str, torch.Tensor]],
        remember: Callable[[], Callable[[Mapping[str, torch.Tensor]], None]] = lambda: lambda before: None,
    ) -> None:
        """Nothing is read of the model yet."""
        self._schedule = schedule
        self._arguments = arguments
        self._remember = remember
        self._restore: Callable[[Mapping[str, torch.Tensor]], None] = lambda before: None
        self._writer = StepWriter(schedule, self.producer)
        self.left_alone = False
        """Whether the ops are of an optimizer's first steps, which are not planned."""
        self._other_value = ""
        self._reads_host = False
        self._micro_step = 1
        self._left: dict[Producer, Producer] = {}
        self._ran: set[int] = set()  # planned ops that ran before their turn
        self._order: list[int] = []  # of the second micro-step's ops
        self._turn = -1  # the op whose turn it was, while one ahead of it runs
        super().__init__()

    @property
    def steps_end(self) -> bool:
        """Whether the last op of the program has run."""
        return self.next_index >= len(self._schedule.ops)

    def leave_alone(self) -> None:
        """Neither check nor annotate ops from here on; write-backs of arguments continue."""
        self.left_alone = True

    def finish(self) -> None:
        """Mark the step as complete, and check the next one."""
        self.left_alone = False
        self.next_index = len(self._schedule.ops)

    def __enter__(self) -> Annotator:
        """Begin a step."""
        self._begin()
        super().__enter__()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        """End the step, which must be complete unless it ended in an error."""
        super().__exit__(kind, error, trace)
        if kind is None and 0 < self.next_index < len(self._schedule.ops):
            self._refuse(f"the step ended there; {self._expected(self.next_index)} should follow", self.next_index)
        self._writer.restart()

    def _begin(self) -> None:
        self._other_value, self._reads_host = "", False
        self._micro_step = 1
        self._left.clear()
        self._ran.clear()
        self._order.clear()
        self._turn = -1
        self._writer.restart()
        self._restore = self._remember()
        self.restart(self._arguments())

    # The mode.

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Begin the next step where its first op comes, and annotate."""
        if self.steps_end and str(func) == self._schedule.ops[0].name and not _in_backward():
            self._begin_again(args, kwargs or {})
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _begin_again(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Begin a step if this op reads what op 0 reads (and is not, say, the sum of losses that a loop keeps)."""
        tensors = tensors_in((args, kwargs))
        arguments = {tensor_id(t): name for name, t in self._arguments().items()}
        reads = tuple(arguments.get(tensor_id(t)) if is_xla(t) else None for t in tensors)
        made_here = any(isinstance(self.producer(t), tuple) and r is None for t, r in zip(tensors, reads, strict=True))
        of_inputs = (
            p in self._schedule.inputs or p not in self._schedule.arguments for p in self._schedule.ops[0].inputs
        )
        planned = zip(self._schedule.ops[0].inputs, of_inputs, strict=True)
        wanted = tuple(None if of_input and isinstance(p, str) else p for p, of_input in planned)
        if reads == wanted and not made_here:
            self._begin()

    def skip(self, func: Any, inputs: tuple[Producer, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """After the program's last op: ignore ops that are not part of a longer program."""
        if self.left_alone:
            return True
        if self.steps_end and _in_backward():
            self._refuse(f"the step goes on with {func} in a backward pass", self.next_index)
        if self.steps_end or (self._between() and not self._follows(func, inputs)):
            return True
        if self._micro_step > 2 or not self._follows(func, inputs):
            self._run_ahead(Call(-1, func, tensors_in((args, kwargs)), inputs, args, kwargs))
        return False

    def _run_ahead(self, call: Call) -> None:
        """Give a call the number of the op that it is in the plan, if that is a later one of its micro-step.

        Micro-steps after the second have its order.
        """
        several = self._schedule.micro_steps
        ends = (several.second, several.update) if several is not None else ()
        if several is not None and several.second <= self.next_index < several.update and self._micro_step > 2:
            found = self._order[len(self._ran)]
        else:
            end = min((end for end in ends if end > self.next_index), default=len(self._schedule.ops))
            planned = self._planned(call)
            if planned is None or not self.next_index < planned < end:
                return
            found = planned
        self._ran.add(found)
        self._turn, self.next_index = self.next_index, found

    def _planned(self, call: Call) -> int | None:
        """The first planned op that matches, and that has not run before its turn."""
        reads = tuple(None if self._may_be_input(p) else self._schedule.same(p) for p in call.inputs)
        for index in self._schedule.by_reads.get((call.name, reads), ()):
            planned = self._schedule.ops[index]
            if index < self._earliest or index in self._ran or planned.options != call.options:
                continue
            if all(map(self._is_read, call.tensors, call.inputs, planned.inputs)):
                return index
        return None

    @property
    def _earliest(self) -> int:
        """The first op that may still have to run."""
        return self.next_index

    def _may_be_input(self, producer: Producer) -> bool:
        return producer is None or self._schedule.is_input(producer)

    def _is_read(self, tensor: torch.Tensor, found: Producer, wanted: Producer) -> bool:
        """Whether a tensor is what a planned op reads; an input is recognised by type at its first reader."""
        if not isinstance(wanted, str) or found == wanted or not self._schedule.is_input(wanted):
            return self._schedule.same(found) == self._schedule.same(wanted)
        if found is not None:
            return self._same_input(found, wanted)
        argument = self._schedule.arguments.get(wanted)
        return argument is None or format_tensor(tensor) == f"{argument.dtype}[{','.join(map(str, argument.shape))}]"

    def run(self, call: Call) -> Any:
        """Check the op, pass it its copies, run it."""
        self._bind_inputs(call)
        self._check(call)
        args, kwargs = self._writer.before(call)
        with executing(self._schedule, call, platform_here()):
            return call.func(*args, **kwargs)

    def after(self, call: Call, outputs: tuple[torch.Tensor, ...]) -> None:
        """Check the op's outputs, pin them, and release copies after their last reader."""
        planned = self._schedule.ops[call.index].outputs
        seen = tuple(format_tensor(t) for t in outputs)
        if seen != planned:
            self._refuse(f"{self._expected(call.index)} expected, {_op(call.name, seen)} seen", call.index)
        self._writer.after(call, outputs)

    def made(self, call: Call, outputs: tuple[torch.Tensor, ...]) -> None:
        """Record the outputs; after the last op of a micro-step the next one begins."""
        super().made(call, outputs)
        if self._micro_step == 2:
            self._order.append(call.index)
        if self._turn >= 0:
            self._turn, self.next_index = -1, self._turn
        while self.next_index in self._ran:
            self.next_index += 1
        several = self._schedule.micro_steps
        if several is None or self.next_index not in (several.second, several.update):
            return
        if self.next_index == several.second:
            self._micro_step = 2
        elif self._micro_step < several.count:
            self._micro_step += 1
            self.next_index = several.second
            self._ran.clear()
            self._writer.next_micro_step()
        self._writer.comes_again = self._micro_step < several.count

    def uncounted(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Keep write-backs of arguments, and drop those of other values."""
        if takes_values(func, args, kwargs):
            return self._looked_at(func, func(*args, **kwargs))
        if str(func) not in WRITES_BACK or not is_xla(args[0]):
            return func(*args, **kwargs)
        name = self._writer.argument_written(args)
        if (self.steps_end or self._between()) and name is not None and self.producer(args[1]) is None:
            self._refuse(f"the step goes on and writes {name}", self.next_index)
        return self._writer.write_back(func, args, kwargs)

    def host(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Host computations, from the step's own values."""
        return self._looked_at(func, super().host(func, args, kwargs))

    # Its parts.

    def _looked_at(self, func: Any, value: Any) -> Any:
        """Compare a host value with that at capture."""
        planned = [v for v in self._schedule.values if (v.before, v.op) == (self.next_index, str(func))]
        if planned and described(value) not in {v.value for v in planned}:
            where = f" in {planned[0].module}" if planned[0].module else ""
            self._other_value = (
                f" Before op {self.next_index}{where} the step reads a value ({func}), which is {described(value)}; "
                f"it was {planned[0].value} in the step that was planned, and the program may follow from it."
            )
        return value

    def _bind_inputs(self, call: Call) -> None:
        """Recognize the step's inputs at their first reader, and shard them."""
        planned = self._schedule.ops[call.index]
        if planned.name != call.name or len(planned.inputs) != len(call.tensors):
            return
        for tensor, name, seen in zip(call.tensors, planned.inputs, call.inputs, strict=True):
            if seen is not None or not isinstance(name, str) or not is_xla(tensor):
                continue
            if name not in self._schedule.arguments:  # an input on which only host values depend
                self.name(tensor, name)
            elif name in self._schedule.inputs:
                want = self._schedule.arguments[name]
                wanted = f"{want.dtype}[{','.join(map(str, want.shape))}]"
                if format_tensor(tensor) != wanted:
                    self._refuse(f"input {name} is {format_tensor(tensor)}, the plan has {wanted}", call.index)
                runtime.shard_data(tensor, self._schedule.mesh, want.spec, f"input {name}")
                self.name(tensor, name)

    def _check(self, call: Call) -> None:
        """Refuse an op that is not the planned one, or has other producers."""
        planned = self._schedule.ops[call.index]
        self._reads_host = any(t.dim() and not is_xla(t) for t in call.tensors)
        if planned.name != call.name:
            self._refuse(f"{self._expected(call.index)} expected, {_op(call.name, ())} seen", call.index)
        seen = tuple(self.producer(t) for t in call.tensors)
        if len(seen) != len(planned.inputs):
            what = f"{call.name} reads {len(seen)} tensors, planned were {len(planned.inputs)}"
            self._refuse(what, call.index)
        for found, wanted in zip(seen, planned.inputs, strict=True):
            if self._schedule.same(found) == self._schedule.same(wanted):
                continue
            if not self._same_input(found, wanted) and not self._left_before(found, wanted):
                what = f"{call.name} reads {describe(found)}, planned was {describe(wanted)}"
                self._refuse(what, call.index)
        if (options := call.options) != planned.options:
            what = f"{call.name} is called with {options or 'defaults'}, planned was {planned.options or 'defaults'}"
            self._refuse(what, call.index)

    def _left_before(self, found: Producer, wanted: Producer) -> bool:
        """Whether the micro-step before has left what the second one reads of the first."""
        several = self._schedule.micro_steps
        if several is None or self._micro_step < 3 or not isinstance(found, tuple) or not isinstance(wanted, tuple):
            return False
        if wanted[0] >= several.second or not several.second <= found[0] < several.update:
            return False
        types = [self._schedule.ops[op].outputs[j] for op, j in (found, wanted)]
        return types[0] == types[1] and self._left.setdefault(wanted, found) == found

    def _between(self) -> bool:
        """Whether a micro-step has ended, and what follows it has not begun."""
        several = self._schedule.micro_steps
        if several is None or self.left_alone or _in_backward():
            return False
        return self.next_index in (several.second, several.update)

    def _follows(self, func: Any, inputs: tuple[Producer, ...]) -> bool:
        """Whether an op may be the first of what follows a micro-step; inputs are not known yet."""
        planned = self._schedule.ops[self.next_index]
        if str(func) != planned.name or len(inputs) != len(planned.inputs):
            return False
        pairs = zip(inputs, planned.inputs, strict=True)
        return all(found == wanted or (found is None and wanted in self._schedule.inputs) for found, wanted in pairs)

    def _same_input(self, found: Producer, wanted: Producer) -> bool:
        """Whether two inputs may be one tensor (`labels=input_ids`), which is split as the first is."""
        if found not in self._schedule.inputs or wanted not in self._schedule.inputs:
            return False
        a, b = self._schedule.arguments[str(found)], self._schedule.arguments[str(wanted)]
        return (a.shape, a.dtype) == (b.shape, b.dtype)

    def _expected(self, index: int) -> str:
        planned = self._schedule.ops[index]
        return _op(planned.name, planned.outputs)

    def _refuse(self, difference: str, index: int) -> None:
        before = dict(self._writer.replaced)
        self._writer.restart()
        self._restore(before)
        raise PlanMismatchError(
            f"this step is not the one the plan is for; first difference at op {index}: {difference}."
            f"{_ON_HOST if self._reads_host else ''}{self._other_value} Parameters and optimizer state are as before "
            "the step; plan the step as it is now (clipped gradients with clip_grad_norm=), or use "
            "zero_grad(set_to_none=True) and keep what is not part of it outside annotate()"
        )


def format_tensor(tensor: torch.Tensor) -> str:
    """`f32[8,512,768]`."""
    return format_type(tensor_type(tensor))


def _op(name: str, outputs: tuple[str, ...]) -> str:
    return f"{name} -> {', '.join(outputs)}" if outputs else name


def _in_backward() -> bool:
    return torch._C._current_autograd_node() is not None
