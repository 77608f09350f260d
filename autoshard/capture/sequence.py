"""The sequence of aten ops that a program dispatches, numbered the same way at capture and in every training step.

`AtenSequence` is a dispatch mode. It gives op k its number, and says of each tensor an op reads who produced it: an
argument of the program (by name), output j of op i, or nobody it knows. Capture builds on it to label the HLO,
lowering to annotate outputs; what both must agree on is therefore here, once.

torch_xla functionalizes: what arrives here writes nothing in place, and views are `_copy` ops.

**Which ops are counted.** An op is counted when a tensor it reads, or the device it is asked to make one on, is XLA's,
except those that a training loop adds around the step, or that compute nothing:

- aliases (`detach_copy`, `alias_copy`, `lift_fresh`): their result is who their operand was; write-backs
  (`_propagate_xla_data`);
- transfers between host and device (a loader's `.to(device)`, logging's `.cpu()`), and reads of a value (`.item()`);
- clearing (`zero`, as `zero_grad(set_to_none=False)` does), what reads cleared tensors only, and `add` of a term to a
  cleared tensor: autograd adds where, with gradients None, it would have handed the term over. The sum is who the
  term was.

Ops on CPU tensors alone (step counters of optimizers, schedulers, a loader's collate) are never counted.

**Outputs of an op** are the tensors it returns, in order, then those it writes in place without returning them
(`native_batch_norm` writes its running statistics).

**Identity.** A tensor is known by torch_xla's own tensor id. It survives autograd's saved tensors, `detach` and
`.data`, which are new Python objects; writing in place gives a new one; none is ever used twice. So nothing is kept
alive here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Producer = tuple[int, int] | str | None
"""Who made a tensor: `(k, j)` for output j of op k, the name of an argument, or None when nobody here knows."""

ALIASES = frozenset(
    f"aten.{name}.default"
    for name in ("detach", "detach_copy", "alias", "alias_copy", "lift_fresh", "lift_fresh_copy", "lift")
)
WRITES_BACK = frozenset({"aten._propagate_xla_data.default"})
TRANSFERS = frozenset({"aten._to_copy.default", "aten.copy_.default", "aten.copy.default", "aten._copy_from.default"})
CLEARS = frozenset(f"aten.{name}.default" for name in ("zero", "zero_", "_foreach_zero", "_foreach_zero_"))
ACCUMULATES = frozenset({"aten.add.Tensor", "aten.add_.Tensor"})
READS_VALUE = frozenset(
    f"aten.{name}.default" for name in ("_local_scalar_dense", "item", "equal", "is_nonzero", "allclose")
)
UNDECLARED_WRITES = {"aten.native_batch_norm.default": ("running_mean", "running_var")}


@dataclass(frozen=True)
class Call:
    """One counted op, before it runs.

    Attributes:
        index: k, its number.
        func: the overload; `str(func)` is its name, such as `aten.addmm.default`.
        tensors: the tensors it reads, in the order of its flattened arguments.
        inputs: who produced each of them.
        args, kwargs: as dispatched.
    """

    index: int
    func: Any
    tensors: tuple[torch.Tensor, ...]
    inputs: tuple[Producer, ...]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Such as `aten.addmm.default`."""
        return str(self.func)


class AtenSequence(TorchDispatchMode):  # type: ignore[misc]
    """Numbers the aten ops that run under it, and knows who produced each of their tensors.

    Override `run` to do something around an op (capture enters a label), `after` to do something with its outputs
    (lowering annotates them), `skip` to leave further ops out of the numbering, `uncounted` to look at the rest.

    Args:
        arguments: name -> tensor, the tensors that exist before the step: parameters, buffers, inputs, states.
    """

    def __init__(self, arguments: Mapping[str, torch.Tensor] | None = None) -> None:
        """Start at op 0, knowing `arguments`."""
        super().__init__()
        self._producers: dict[int, Producer] = {}
        self._cleared: set[int] = set()
        self.next_index = 0
        self.restart(arguments or {})

    def restart(self, arguments: Mapping[str, torch.Tensor]) -> None:
        """Begin a new step: count from 0, forget who produced what, and know these tensors as arguments."""
        self._producers.clear()
        self._cleared.clear()
        self.next_index = 0
        for name, tensor in arguments.items():
            self.name(tensor, name)

    def name(self, tensor: torch.Tensor, name: str) -> None:
        """Know `tensor`, as it now is, as the argument `name`; the first name of a shared tensor stays."""
        self._producers.setdefault(tensor_id(tensor), name)

    def producer(self, tensor: torch.Tensor) -> Producer:
        """Who made `tensor` as it now is."""
        return self._producers.get(tensor_id(tensor)) if is_xla(tensor) else None

    # What a subclass may override.

    def run(self, call: Call) -> Any:
        """Run one counted op and return what it returns."""
        return call.func(*call.args, **call.kwargs)

    def after(self, call: Call, outputs: tuple[torch.Tensor, ...]) -> None:
        """Look at the outputs of a counted op (annotating one in place keeps its identity)."""

    def skip(self, func: Any, inputs: tuple[Producer, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Leave this op, which the rule would count, out of the numbering."""
        return False

    def uncounted(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run an op that is not counted and return what it returns."""
        return func(*args, **kwargs)

    # The mode.

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Number the op, or run it uncounted."""
        kwargs = kwargs or {}
        tensors = tuple(t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor))
        name = str(func)
        if not counts(name, tensors, kwargs) or self._only_clears(name, tensors):
            result = self.uncounted(func, args, kwargs)
            self._follow(name, tensors, result)
            return result
        inputs = tuple(self.producer(t) for t in tensors)
        if self.skip(func, inputs, args, kwargs):
            return self.uncounted(func, args, kwargs)
        call = Call(self.next_index, func, tensors, inputs, args, kwargs)
        self.next_index += 1
        result = self.run(call)
        outputs = outputs_of(call, result)
        self.after(call, outputs)
        for j, tensor in enumerate(outputs):
            if is_xla(tensor):
                self._producers[tensor_id(tensor)] = (call.index, j)
        return result

    def _is_cleared(self, tensor: torch.Tensor) -> bool:
        return bool(self._cleared) and is_xla(tensor) and tensor_id(tensor) in self._cleared

    def _only_clears(self, name: str, tensors: tuple[torch.Tensor, ...]) -> bool:
        """Whether the op reads cleared tensors only, or accumulates into one."""
        if not self._cleared or not tensors or not self._is_cleared(tensors[0]):
            return False
        return name in ACCUMULATES or all(self._is_cleared(t) for t in tensors)

    def _follow(self, name: str, tensors: tuple[torch.Tensor, ...], result: Any) -> None:
        """Keep track of tensors through an uncounted op."""
        made = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor) and is_xla(t)]
        if name in CLEARS or (tensors and all(self._is_cleared(t) for t in tensors)):
            self._cleared.update(tensor_id(t) for t in made)
        elif made and tensors and (name in ALIASES or name in ACCUMULATES):
            producer = self.producer(tensors[0] if name in ALIASES else tensors[-1])
            if producer is not None:
                self._producers.setdefault(tensor_id(made[0]), producer)


def is_xla(tensor: torch.Tensor) -> bool:
    """Whether a tensor lives on an XLA device."""
    return bool(tensor.device.type == "xla")


def tensor_id(tensor: torch.Tensor) -> int:
    """torch_xla's id of the value that an XLA tensor holds now."""
    import torch_xla

    return int(torch_xla._XLAC._xla_get_tensor_id(getattr(tensor, "global_tensor", tensor)))


def counts(name: str, tensors: tuple[torch.Tensor, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether the op is counted, by the rule in this module's docstring (clearing and accumulation apart)."""
    asked = kwargs.get("device")
    to_xla = asked is not None and torch.device(asked).type == "xla"
    if not to_xla and not any(is_xla(t) for t in tensors):
        return False
    if name in ALIASES or name in WRITES_BACK or name in CLEARS or name in READS_VALUE:
        return False
    if name in TRANSFERS:
        ends = {t.device.type for t in tensors} | ({torch.device(asked).type} if asked is not None else set())
        return len(ends) == 1
    return True


def outputs_of(call: Call, result: Any) -> tuple[torch.Tensor, ...]:
    """The outputs of an op that has run: what it returned, then what it wrote in place and did not return."""
    outputs = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
    seen = {id(t) for t in outputs}
    for t in _written(call):
        if id(t) not in seen:
            seen.add(id(t))
            outputs.append(t)
    return tuple(outputs)


def _written(call: Call) -> list[torch.Tensor]:
    """The arguments that the op writes in place, in the order of its schema."""
    undeclared = UNDECLARED_WRITES.get(call.name, ())
    written: list[torch.Tensor] = []
    for position, argument in enumerate(call.func._schema.arguments):
        if argument.is_write or argument.name in undeclared:
            value = call.args[position] if position < len(call.args) else call.kwargs.get(argument.name)
            written += [t for t in tree_leaves(value) if isinstance(t, torch.Tensor)]
    return written
