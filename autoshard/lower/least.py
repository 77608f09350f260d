"""The least annotations: a minimal subset that propagation completes to all of them.

A plan has a sharding for every output of every aten op. Most repeat what GSPMD's propagation would choose. Only
arguments, reshards, and values where propagation would choose otherwise must be annotated.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from autoshard.cost.machine.device import load_device
from autoshard.cost.partitioner.propagate import Shardings, propagate
from autoshard.graph.annotations import Annotations
from autoshard.graph.ops import Graph, Value
from autoshard.mesh import Mesh


def least(graph: Graph, annotations: Annotations, mesh: Mesh) -> Annotations:
    """A subset of `annotations` under which every op of `graph` has the same operand and result shardings as under all.

    Pins are added where propagation first differs until nothing does, then removed in halves down to single ones while
    that changes nothing: no single pin added is redundant. Propagation is modelled (`cost/partitioner/propagate.py`):
    compile to be sure.
    """
    target = load_device(mesh.device).target
    wanted = propagate(graph, annotations, mesh, target)
    arguments = set(graph.arguments)
    optional = [
        value
        for value in sorted(annotations.pins)
        if value.op not in arguments and wanted.read(None, value) == wanted.made[value]
    ]

    def with_pins(kept: Collection[Value]) -> Annotations:
        left_out = set(optional).difference(kept)
        pins = {value: spec for value, spec in annotations.pins.items() if value not in left_out}
        return replace(annotations, pins=pins)

    def astray(kept: Collection[Value]) -> set[int]:
        return _differing(graph, wanted, propagate(graph, with_pins(kept), mesh, target))

    kept: list[Value] = []
    while differing := astray(kept):
        missing = [value for value in optional if value not in set(kept)]
        roots = {op for op in differing if not any(value.op in differing for value in graph.ops[op].operands)}
        around = differing | {value.op for op in differing for value in graph.ops[op].operands}
        new = next((found for ops in (roots, differing, around) if (found := _made_by(ops, missing))), None)
        if new is None:
            return annotations
        kept = sorted({*kept, *new})
    return with_pins(_without_needless(kept, lambda some: not astray(some)))


def _differing(graph: Graph, wanted: Shardings, found: Shardings) -> set[int]:
    """Ops with other operand or result shardings than wanted."""
    return {
        op.id
        for op in graph.ops
        if any(found.made[Value(op.id, i)] != wanted.made[Value(op.id, i)] for i in range(len(op.results)))
        or any(found.read(op.id, value) != wanted.read(op.id, value) for value in op.operands)
    } | {value.op for value in graph.outputs if found.read(None, value) != wanted.read(None, value)}


def _made_by(ops: Collection[int], values: Sequence[Value]) -> list[Value]:
    return [value for value in values if value.op in ops]


def _without_needless(kept: list[Value], enough: Callable[[Collection[Value]], bool]) -> list[Value]:
    """Remove ever smaller runs of pins while the rest is `enough`; in the end no single one is redundant."""
    size = len(kept)
    while kept:
        before = len(kept)
        start = 0
        while start < len(kept):
            rest = kept[:start] + kept[start + size :]
            if enough(rest):
                kept = rest
            else:
                start += size
        if size == 1 and len(kept) == before:
            break
        size = max(size // 2, 1)
    return kept
