"""Common subexpression elimination on TPU: equal ops with equal operands and annotations become one.

XLA's `HloCSE` runs before sharding propagation there (libtpu 0.0.51, dumped between passes) and treats annotations as
ops: of two norms of one value, every op and every annotation of the second is merged away.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import replace

from autoshard.cost.partitioner.passes.simplify import fold
from autoshard.graph.annotations import Annotations
from autoshard.graph.groups import ELEMENTWISE, free_ops
from autoshard.graph.ops import Graph, Op, Value
from autoshard.mesh import Spec

EXPRESSIONS = ELEMENTWISE | {"broadcast_in_dim", "slice"}
"""Kinds that keep constant expressions constant (`HloConstantSplitter`)."""

MERGED = EXPRESSIONS | {
    "iota", "reshape", "transpose", "dot_general", "gather", "pad", "concatenate", "reverse", "reduce",
}  # fmt: skip
"""Kinds whose equal ops are merged: `Op.attrs` describes them completely."""

COMMUTES = frozenset({"add", "multiply", "maximum", "minimum", "and", "or", "xor"})


def equal_ops(graph: Graph, annotations: Annotations) -> dict[Value, Value]:
    """Value -> the first equal value with the same pin; constant expressions are left out."""
    return _Equal(graph, annotations).found


def merged(graph: Graph, annotations: Annotations, equal: Mapping[Value, Value]) -> tuple[Graph, Annotations]:
    """The graph in which users of the later values read the first, and nothing computes the later ones.

    Op numbers stay: the op of a later value becomes an unused constant.
    """

    def first(value: Value) -> Value:
        return equal.get(value, value)

    ops: list[Op] = []
    for op in graph.ops:
        if Value(op.id) in equal:
            op = replace(op, kind="constant", operands=(), attrs={"value": 0})
        elif any(value in equal for value in op.operands):
            op = replace(op, operands=tuple(map(first, op.operands)))
        ops.append(op)
    outputs = tuple(map(first, graph.outputs))
    pins = {value: spec for value, spec in annotations.pins.items() if value not in equal}
    copies = {(first(value), aten): spec for (value, aten), spec in annotations.copies.items()}
    hops = {(first(value), spec): through for (value, spec), through in annotations.hops.items()}
    return replace(graph, ops=tuple(ops), outputs=outputs), Annotations(pins, copies, hops)


class _Equal:
    def __init__(self, graph: Graph, annotations: Annotations) -> None:
        self.graph, self.annotations = graph, annotations
        self.folded = fold(graph)
        self.found: dict[Value, Value] = {}
        self.same: dict[Value, Value] = {}  # `found`, and constant expressions
        self.copies: dict[Value, dict[int | None, tuple[Spec, ...]]] = {}  # value -> consumer -> its annotations
        for (value, aten), spec in annotations.copies.items():
            self.copies.setdefault(value, {})[aten] = annotations.chain(value, spec)
        self.read = {(value, aten): chain for value, own in self.copies.items() for aten, chain in own.items()}
        self.consumers: dict[Value, set[int | None]] = {}
        free, known = free_ops(graph), dict[Hashable, Value]()
        for op in graph.ops:
            value = Value(op.id)
            key = self._key(op)
            if key is None:
                continue
            before = known.setdefault(key, value)
            if before != value and self._alike(before, value):
                self._join(before, value)
                self.same[value] = before
                if op.id not in free:
                    self.found[value] = before

    def _key(self, op: Op) -> Hashable:
        """What equal ops have in common; None for an op that is never merged."""
        value = Value(op.id)
        if len(op.results) != 1:
            return None
        if value in self.folded.splat:
            return "splat", repr(self.folded.splat[value]), op.results
        if op.kind not in MERGED or op.attrs.get("reducer") == "other":
            return None
        read = [self._read(operand, op.reader(operand)) for operand in op.operands]
        return (
            op.kind,
            op.results,
            tuple(op.attrs.items()),
            tuple(sorted(read, key=repr) if op.kind in COMMUTES else read),
        )

    def _read(self, value: Value, aten: int | None) -> Hashable:
        """A value as an op of `aten` reads it: the first equal value, and its copy."""
        copy = self.read.get((value, aten))
        if copy is None and value not in self.annotations.pins and value in self.folded.same:
            return self._read(self.folded.same[value], None)
        return self.same.get(value, value), copy

    def _alike(self, before: Value, value: Value) -> bool:
        """Whether two equal values are pinned alike, and no op that uses both reads them under two shardings."""
        pins = self.annotations.pins
        if pins.get(before) != pins.get(value):
            return False
        one, other = self.copies.get(before, {}), self.copies.get(value, {})
        if any(one.get(aten) != other.get(aten) for aten in self._consumers(before) & self._consumers(value)):
            return False
        ways = {chain[-1]: chain for chain in one.values()}
        return all(ways.get(chain[-1], chain) == chain for chain in other.values())

    def _consumers(self, value: Value) -> set[int | None]:
        """The aten ops that use a value or one equal to it."""
        if value not in self.consumers:
            self.consumers[value] = {op.reader(value) for op in self.graph.readers(value)}
        return self.consumers[value]

    def _join(self, before: Value, value: Value) -> None:
        """Let the users of the later value read the first."""
        self._consumers(before).update(self._consumers(value))
        if value in self.copies:
            self.copies.setdefault(before, {}).update(self.copies[value])
