"""Evaluates host reads at capture where they are known: `.item()`, `if t:`, `.tolist()`, `nonzero()`.

A captured step has no values, but some reads depend only on what capture was given: sample inputs, constants, and
weights where the model has them. Ops are recorded by number, and those that a value depends on are replayed on the CPU
only when it is read. Capture continues with the result and records it (`Program.reads`): another batch may give another
value and so another program, which lowering then refuses with that value in its error.

Random numbers are never known. A data-dependent *shape* is accepted only from integers and bools of the inputs (masks,
counts, tokens): one from parameters or floats differs in every step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from autoshard.frontends.tracing.device import is_xla, names_it, tensor_id
from autoshard.frontends.tracing.sequence import Call, Producer, outputs_of
from autoshard.program import ArgumentRole

CPU = torch.device("cpu")
MAX_LISTED_ELEMENTS = 16
"""Most elements of a read tensor that are listed; of more, a hash."""
_ON_THE_CPU = {"xla.max_pool2d_forward.default": torch.ops.aten.max_pool2d.default}
"""torch_xla's own ops, which have no CPU kernel -> ops of the same arguments that do."""

Kinds = frozenset[str]
"""What values depend on: roles of arguments; `floats` for non-integer inputs."""


class UnknownValueError(Exception):
    """A value that does not follow from what capture was given; the message says what it depends on instead."""


@dataclass(frozen=True)
class Read:
    """Stands for a tensor among the arguments of a recorded op: its producer, or the id of a host tensor."""

    producer: Producer
    ident: int


class KnownValues:
    """The recorded ops of a step, evaluated on demand.

    Holds no device tensor, directly or indirectly: a placeholder must not outlive its capture.

    Args:
        data_of: copies a user's tensor, not on meta, to the CPU.
    """

    def __init__(self, data_of: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """An empty record."""
        self.data_of = data_of
        self.states: Callable[[Callable[[str], torch.Tensor]], dict[str, torch.Tensor]] | None = None
        """From stand-ins of parameters to the values of the optimizer's state after a step."""
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], tuple[Producer, ...]]] = []
        self._arguments: dict[str, tuple[ArgumentRole, torch.Tensor | None]] = {}
        self.host: dict[int, torch.Tensor] = {}
        self._made: dict[int, tuple[tuple[torch.Tensor, ...], Kinds]] = {}
        self._given: dict[str, tuple[torch.Tensor, Kinds]] = {}

    def as_given(self) -> KnownValues:
        """The same arguments, before any op has run."""
        fresh = KnownValues(self.data_of)
        fresh._arguments = self._arguments
        return fresh

    def argument(self, name: str, role: ArgumentRole, like: torch.Tensor | None) -> None:
        """Record the source of an argument's values: the user's tensor, or None."""
        self._arguments[name] = (role, like)

    @property
    def read(self) -> frozenset[str]:
        """The arguments whose values were read."""
        return frozenset(self._given)

    def from_host(self, tensor: torch.Tensor, source: torch.Tensor) -> None:
        """Record a tensor that came from the host in the step, and its content."""
        self.host[tensor_id(tensor)] = source

    def same(self, tensor: torch.Tensor, source: torch.Tensor) -> bool:
        """Record that a tensor equals another, if that came from the host."""
        found = self.host.get(tensor_id(source))
        if found is not None:
            self.host[tensor_id(tensor)] = found
        return found is not None

    def keep(self, call: Call) -> None:
        """Record a counted op."""
        producers = iter(call.inputs)
        args, kwargs = _kept(call.args, producers), _kept(dict(call.kwargs), producers)
        self.calls.append((call.func, args, kwargs, call.inputs))

    def of(self, producer: Producer, tensor: torch.Tensor) -> tuple[torch.Tensor, Kinds]:
        """Evaluate a device tensor on the CPU; its value and what that depends on.

        Raises:
            UnknownValueError: it does not follow from what capture was given.
        """
        wanted = Read(producer, tensor_id(tensor))
        for index in self._needed(wanted):
            self._made[index] = self._run(index)
        return self._value(wanted)

    def _needed(self, wanted: Read) -> list[int]:
        """The ops that a value depends on and that have not been replayed, in order."""
        found: set[int] = set()
        left = [wanted.producer]
        while left:
            producer = left.pop()
            if isinstance(producer, tuple) and producer[0] not in found and producer[0] not in self._made:
                found.add(producer[0])
                left += self.calls[producer[0]][3]
        return sorted(found)

    def _run(self, index: int) -> tuple[tuple[torch.Tensor, ...], Kinds]:
        func, args, kwargs, _ = self.calls[index]
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise UnknownValueError("random numbers")
        kinds: Kinds = frozenset()

        def placed(leaf: Any) -> Any:
            nonlocal kinds
            if not isinstance(leaf, Read):
                return leaf
            value, of = self._value(leaf)
            kinds |= of
            return value

        args, kwargs = tree_map(placed, (args, kwargs))
        if func._schema.is_mutable or str(func).startswith("aten.native_batch_norm"):
            args, kwargs = tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, (args, kwargs))
        try:
            result = _ON_THE_CPU.get(str(func), func)(*args, **kwargs)
        except Exception as error:  # an op that only the device has
            raise UnknownValueError(f"{func}, which does not run on the CPU") from error
        call = Call(index, func, (), (), args, kwargs)
        return outputs_of(call, result), kinds

    def _value(self, read: Read) -> tuple[torch.Tensor, Kinds]:
        if isinstance(read.producer, tuple):
            outputs, kinds = self._made[read.producer[0]]
            return outputs[read.producer[1]], kinds
        if read.producer is None:
            if read.ident not in self.host:
                raise UnknownValueError("a tensor that nothing here made")
            return self.host[read.ident], frozenset()
        if read.producer not in self._given:
            role, like = self._arguments[read.producer]
            if role == "optimizer_state" and self.states is not None:
                self._given.update(
                    (name, (value, frozenset({role}))) for name, value in self.states(self._stand_in).items()
                )
                self.states = None
                if read.producer in self._given:
                    return self._given[read.producer]
            if like is None or like.is_meta:
                raise UnknownValueError(f"{role.replace('_', ' ')} {read.producer}, which has no values here")
            floats = role == "input" and (like.is_floating_point() or like.is_complex())
            self._given[read.producer] = (self.data_of(like), frozenset({"floats" if floats else role}))
        return self._given[read.producer]

    def _stand_in(self, name: str) -> torch.Tensor:
        """A parameter's values, or zeros if it has none."""
        like = self._arguments[name][1]
        assert like is not None
        return torch.zeros(like.shape, dtype=like.dtype) if like.is_meta else self.data_of(like)


def _kept(part: Any, producers: Iterator[Producer]) -> Any:
    """An op's arguments without device tensors."""
    kind = type(part)
    if isinstance(part, torch.Tensor):
        producer = next(producers)
        if not is_xla(part):
            return part
        return Read(producer, tensor_id(part) if producer is None else 0)
    if kind is tuple:
        return tuple(_kept(each, producers) for each in part)
    if kind is list:
        return [_kept(each, producers) for each in part]
    if kind is dict:
        return {key: _kept(each, producers) for key, each in part.items()}
    return CPU if kind is torch.device and names_it(part) else part


SHAPING: Kinds = frozenset({"input"})
"""What a shape may depend on, beside constants."""


def described(value: Any) -> str:
    """A short description of a read value: `True`, `3`, `[1, 2]`, or a tensor's hash."""
    leaves = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    if not leaves:
        return repr(value)
    tensor = leaves[0].detach()
    if tensor.numel() <= MAX_LISTED_ELEMENTS:
        return repr(tensor.tolist())
    wide = tensor.float() if tensor.dtype == torch.bfloat16 else tensor
    digest = sha256(wide.contiguous().numpy().tobytes()).hexdigest()[:12]
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} {digest}"


__all__ = ["SHAPING", "KnownValues", "UnknownValueError", "described"]
