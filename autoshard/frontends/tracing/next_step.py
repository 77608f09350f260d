"""Checks that the next step is the captured program, where the forward pass changed module attributes.

A captured step threads parameters, buffers and optimizer states. State kept elsewhere (a hidden state in an attribute,
a counter, a list) is constant in it, so it may be right only once; so are random numbers that the host draws. Where the
first pass changed attributes or drew such numbers, the forward pass is traced again from there, and both are compared:
op by op, constant by constant. Attributes that nothing reads, or that are equal in every step (a cached mask), and
numbers that change nothing (dropped layers at a rate of 0) are no difference.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from autoshard.frontends.tracing.attributes import Attributes
from autoshard.frontends.tracing.device import is_xla, tensor_id
from autoshard.frontends.tracing.known import KnownValues, Read
from autoshard.frontends.tracing.sequence import AtenSequence, Producer, draws

OWN = frozenset(torch.nn.Module().__dict__)
"""Attributes of every module, torch's own."""
RANDOM_NUMBERS = "random numbers"
FILLS = frozenset(
    f"aten.{name}.default"
    for name in (
        *("zeros_like", "ones_like", "full_like", "empty_like"),
        *("new_zeros", "new_ones", "new_full", "new_empty"),
    )
)
"""Ops whose results depend on no element of their operands."""


@dataclass(frozen=True)
class Change:
    """An attribute that a pass changed: its module's path, its name, before and after."""

    path: str
    name: str
    was: Any
    now: Any

    def __str__(self) -> str:
        """`attribute count of module a.b (1, then 2)`."""
        where = f"attribute {self.name} of {f'module {self.path}' if self.path else 'the model'}"
        plain = all(isinstance(value, int | float | str | None) for value in (self.was, self.now))
        return f"{where} ({self.was!r}, then {self.now!r})" if plain else where


@dataclass(frozen=True)
class Expression:
    """How a value is computed: a digest equal for equal computations, and a bit set of what it depends on."""

    digest: bytes
    follows_from: int


class Expressions:
    """Expressions of all values of a traced pass."""

    def __init__(self, values: KnownValues, kept: Mapping[str, Expression] | None = None) -> None:
        """Work it out for every op, in their order."""
        self._values, self._kept = values, kept or {}
        self._bits: dict[str, int] = {}
        self._made: list[Expression] = []
        for call in values.calls:
            self._made.append(self._of_call(*call))

    def of(self, producer: Producer, ident: int) -> Expression:
        """Of what a producer made; `ident` is the tensor's, where nobody is known."""
        if isinstance(producer, tuple):
            made = self._made[producer[0]]
            return Expression(b"%s.%d" % (made.digest, producer[1]), made.follows_from)
        if producer is None:
            return Expression(_content(self._values.host.get(ident)), 0)
        return self._kept.get(producer) or Expression(producer.encode(), self._bit(producer))

    def names(self, expression: Expression) -> set[str]:
        """The arguments that a value follows from, and `RANDOM_NUMBERS`."""
        return {name for name, bit in self._bits.items() if expression.follows_from & bit}

    def _bit(self, name: str) -> int:
        return self._bits.setdefault(name, 1 << len(self._bits))

    def _of_call(self, func: Any, args: Any, kwargs: Any, inputs: tuple[Producer, ...]) -> Expression:
        digest, bits = sha256(str(func).encode()), self._bit(RANDOM_NUMBERS) if draws(func) else 0
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Read):
                read = self.of(leaf.producer, leaf.ident)
                digest.update(read.digest)
                bits |= read.follows_from
            elif isinstance(leaf, torch.Tensor):
                digest.update(_content(leaf))
            else:
                digest.update(repr(leaf).encode() if _is_plain(leaf) else type(leaf).__name__.encode())
            digest.update(b";")
        return Expression(digest.digest(), 0 if str(func) in FILLS else bits)


def _is_plain(leaf: Any) -> bool:
    return isinstance(leaf, int | float | complex | str | None | torch.dtype | torch.layout | torch.memory_format)


def _content(tensor: torch.Tensor | None) -> bytes:
    """What a tensor of the host holds."""
    if tensor is None or tensor.layout is not torch.strided or is_xla(tensor) or tensor.is_meta:
        return b"?"
    held = tensor.detach().contiguous().reshape(-1)
    return str((tensor.dtype, tuple(tensor.shape))).encode() + sha256(held.view(torch.uint8).numpy().tobytes()).digest()


class Pass:
    """One forward pass: what it changed in attributes, and how what it gave is computed.

    Args:
        roots: prefix -> module.
    """

    def __init__(self, roots: Mapping[str, torch.nn.Module]) -> None:
        """Before it runs."""
        self.before = Attributes()
        self.paths: dict[int, str] = {}
        for prefix, root in roots.items():
            for path, module in root.named_modules():
                self.paths.setdefault(id(module), ".".join(part for part in (prefix, path) if part))
                self.before.save(module)
        self.drawn = _random_state()

    def ran(self, labels: AtenSequence, values: KnownValues, given: Iterable[torch.Tensor]) -> bool:
        """Look at what the pass left, right behind it: whether attributes changed, or the host drew random numbers.

        Args:
            labels, values: under which it ran.
            given: what it returned, and the buffers as they are now.
        """
        self.changes = [
            Change(self.paths[id(module)], name, was, now)
            for module, name, was, now in self.before.changes()
            if name not in OWN
        ]
        self.after = _random_state()
        self.draws = _content_of(self.drawn) != _content_of(self.after)
        if not self.changes and not self.draws:
            return False
        expressions = Expressions(values)
        self.expressions = expressions
        self.given = [expressions.of(labels.producer(tensor), tensor_id(tensor)) for tensor in given]
        self.kept: dict[str, tuple[Change, torch.Tensor, Expression]] = {}
        for change in self.changes:
            for tensor in _tensors(change.now):
                expression = expressions.of(labels.producer(tensor), tensor_id(tensor))
                self.kept[f"{change} {len(self.kept)}"] = change, tensor, expression
        return True

    def compare(
        self,
        labels: AtenSequence,
        values: KnownValues,
        given: Iterable[torch.Tensor],
        updated: Collection[str],
        inputs: Collection[str],
        anew: bool = False,
    ) -> str:
        """Hold a second pass, from what this one left, against this one: what it computes else, or nothing.

        Args:
            labels, values: under which the second ran.
            given: as for `ran`.
            updated, inputs: the arguments that differ from one step to the next.
            anew: whether the host drew other random numbers than in the first.
        """
        read = {producer for _, _, _, producers in values.calls for producer in producers}
        differing = {*updated, *inputs, RANDOM_NUMBERS}
        for name, (change, tensor, expression) in self.kept.items():
            if name in read and self.expressions.names(expression) & differing:
                if tensor.requires_grad:
                    return ""  # with its graph it belongs to its own step: a loop clears it before the next
                return (
                    f"the forward pass reads what the pass before it left in {change}. Keep it in a buffer: "
                    "register_buffer before capture, and write it with copy_"
                )
        expressions = Expressions(values, {name: expression for name, (_, _, expression) in self.kept.items()})
        again = [expressions.of(labels.producer(tensor), tensor_id(tensor)) for tensor in given]
        if [each.digest for each in again] != [each.digest for each in self.given]:
            if anew:
                return (
                    "it computes with random numbers that the host drew (torch.rand() and its like without device=, "
                    "NumPy's, Python's), which are constants in it. Draw them on the inputs' device, or give them as "
                    "an input"
                )
            return (
                "the forward pass computes something else when it runs once more, for it changes "
                f"{', '.join(map(str, self.changes[:3]))}. Keep such state in a buffer and compute with tensors, or "
                "capture the model when it does not change any more"
            )
        return ""


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor) and is_xla(leaf)]


def _random_state() -> tuple[Any, ...]:
    """What the host's generators of random numbers would give next."""
    numpy = sys.modules.get("numpy")
    return torch.get_rng_state(), random.getstate(), None if numpy is None else numpy.random.get_state()


def _content_of(state: tuple[Any, ...]) -> bytes:
    torch_state, python, numpy = state
    of_numpy = [each.tolist() if hasattr(each, "tolist") else each for each in numpy or ()]
    return _content(torch_state) + repr((python, of_numpy)).encode()


def draw_again(state: tuple[Any, ...]) -> tuple[Any, ...]:
    """Set the host's generators back; returns what they were."""
    now = _random_state()
    torch.set_rng_state(state[0])
    random.setstate(state[1])
    if state[2] is not None:
        sys.modules["numpy"].random.set_state(state[2])
    return now
