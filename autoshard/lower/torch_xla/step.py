"""Annotates a step as it is dispatched: copies before an op, pins after it, write-backs of arguments.

Shared by running steps (`annotator.Annotator`) and traced ones (`retrace.annotated_program`).

**In-place ops.** torch_xla functionalizes: `a.add_(b)` arrives as `new = add(a, b)` and a write-back
`_propagate_xla_data(a, new)`, which records the donation of `a` and annotates `new` like `a`. For parameters, buffers
and states that ties one step to the next, and is kept. For a value inside the step the write-back would override its
pin, and is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_map

from autoshard.frontends.tracing.device import is_xla, tensor_id
from autoshard.frontends.tracing.sequence import Call, Producer
from autoshard.lower.torch_xla import runtime
from autoshard.lower.torch_xla.schedule import Schedule, Shared, beginnings


class StepWriter:
    """Writes a schedule onto one step.

    Args:
        schedule: the plan by aten op.
        producer: the producer of a tensor, by the sequence that dispatches the step.
        stand_ins: whether several tensors may stand for one value; each then has copies of its own.
    """

    def __init__(
        self, schedule: Schedule, producer: Callable[[torch.Tensor], Producer], *, stand_ins: bool = False
    ) -> None:
        """Begin with the first step."""
        self.schedule = schedule
        self._producer = producer
        self._stand_ins = stand_ins
        self._copies: dict[Shared, torch.Tensor] = {}
        self._copied: dict[Producer, int] = {}
        self._roots: dict[int, torch.Tensor] = {}
        self.replaced: dict[str, torch.Tensor] = {}
        """Argument name -> its original value, of those written in the step."""
        self.comes_again = False
        """Whether the ops of this micro-step run once more in the step, on the same parameters."""

    def restart(self) -> None:
        """Release everything of the last step."""
        self._copies.clear()
        self._copied.clear()
        self._roots.clear()
        self.replaced.clear()
        self.comes_again = False

    def before(self, call: Call) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """The arguments of an op, with planned copies in place of values."""
        reads = self.schedule.reads.get(call.index)
        if not reads:
            return call.args, call.kwargs
        swaps = {id(call.tensors[i]): self._copy(shared, call.tensors[i]) for i, shared in reads.items()}
        args, kwargs = tree_map(lambda leaf: swaps.get(id(leaf), leaf), (call.args, dict(call.kwargs)))
        return args, kwargs

    def after(self, call: Call, outputs: tuple[torch.Tensor, ...]) -> None:
        """Pin the outputs of an op, and release copies after their last reader."""
        read = {tensor_id(tensor) for tensor in call.tensors if is_xla(tensor)}
        for j, tensor in enumerate(outputs):
            spec = self.schedule.pins.get((call.index, j))
            if spec is not None and is_xla(tensor) and tensor_id(tensor) not in read:
                runtime.pin(tensor, self.schedule.mesh, spec)
        for shared in self.schedule.reads.get(call.index, {}).values():
            for each in beginnings(shared):
                again = self.comes_again and self._stays(each)
                if self.schedule.last_read[each] == call.index and not again:
                    self._copies.pop(each, None)

    def next_micro_step(self) -> None:
        """Release what the last micro-step read and made; parameters stay."""
        for each in [each for each in self._copies if not self._stays(each)]:
            del self._copies[each]
        self._copied.clear()

    def _stays(self, copied: Shared) -> bool:
        """Whether what is copied is the same in each micro-step."""
        return isinstance(copied[0], str) and not self.schedule.is_input(copied[0])

    def write_back(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run a write-back `(old, new)` of an argument; drop that of any other value."""
        old, new = args[0], args[1]
        root = self._roots.pop(tensor_id(old), old)
        name = self._producer(root)
        if not isinstance(name, str):
            return None
        self.replaced.setdefault(name, root)
        self._roots[tensor_id(new)] = root
        made = self._producer(new)
        pinned = self.schedule.pins.get(made) if isinstance(made, tuple) else None
        argument = self.schedule.arguments.get(name)
        if pinned is not None and argument is not None and pinned != argument.spec:
            return None  # on its way to the argument's new value, which a later write-back ties to the old one
        return func(root, new, *args[2:], **kwargs)

    def argument_written(self, args: tuple[Any, ...]) -> str | None:
        """The name of the argument that a write-back is for, or None."""
        name = self._producer(self._roots.get(tensor_id(args[0]), args[0]))
        return name if isinstance(name, str) else None

    def _copy(self, shared: Shared, tensor: torch.Tensor) -> torch.Tensor:
        if self._stand_ins and self._copied.setdefault(shared[0], tensor_id(tensor)) != tensor_id(tensor):
            self._copied[shared[0]] = tensor_id(tensor)
            for other in [each for each in self._copies if each[0] == shared[0]]:
                del self._copies[other]
        for each in beginnings(shared):
            if each not in self._copies:
                self._copies[each] = runtime.annotated_copy(tensor, self.schedule.mesh, each[1][-1])
            tensor = self._copies[each]
        return tensor
