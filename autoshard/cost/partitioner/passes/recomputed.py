"""Rematerialised ops: those that repeat an earlier op for activation checkpointing.

An optimization barrier passes its operands on. Of ops that would be equal without barriers, the one behind the fewest
barriers is the original and the others are recomputed. Random numbers count as those drawn before.
"""

from __future__ import annotations

from collections.abc import Hashable

from autoshard.graph.groups import BARRIER
from autoshard.graph.ops import Graph, Op, Value

_RANDOM = frozenset({"rng", "rng_bit_generator"})


def recomputed_ops(graph: Graph) -> frozenset[int]:
    """The ops of `graph` that recompute another op's result."""
    if all(op.kind != BARRIER for op in graph.ops):
        return frozenset()
    names: dict[Value, int] = {}  # equal values have equal names
    depths: dict[Value, int] = {}  # value -> the most barriers between it and an argument
    known: dict[Hashable, int] = {}
    found: list[tuple[int, Hashable, int]] = []
    least: dict[Hashable, int] = {}
    for op in graph.ops:
        results = [Value(op.id, i) for i in range(len(op.results))]
        depth = max((depths[value] for value in op.operands), default=0)
        if op.kind == BARRIER:
            for value, operand in zip(results, op.operands, strict=True):
                names[value], depths[value] = names[operand], depth + 1
            continue
        key = _key(op, names)
        for i, value in enumerate(results):
            names[value], depths[value] = known.setdefault((key, i), len(known)), depth
        found.append((op.id, key, depth))
        least[key] = min(depth, least.get(key, depth))
    return frozenset(number for number, key, depth in found if depth > least[key])


def _key(op: Op, names: dict[Value, int]) -> Hashable:
    """What equal ops have in common (NaN equals itself); an op of an unknown kind equals none."""
    if op.kind == "argument" or (op.kind == "constant" and op.attrs.get("value") is None):
        return op.id
    try:
        attrs = tuple((name, repr(value) if isinstance(value, float) else value) for name, value in op.attrs.items())
        hash(attrs)
    except TypeError:
        return op.id
    return op.kind, attrs, op.results, () if op.kind in _RANDOM else tuple(names[value] for value in op.operands)
