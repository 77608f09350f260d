"""Annotations as the partitioner sees them: pinned values and consumer-specific copies.

Lowering, prediction and verification share this one description of what lowering writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from autoshard.fused import KINDS, dims_of_attrs
from autoshard.graph.ops import Graph, Op, Value
from autoshard.mesh import Spec


@dataclass(frozen=True)
class Annotations:
    """What lowering writes onto a graph.

    Attributes:
        pins: value -> spec: arguments carry it as their sharding, other values pass through `custom_call @Sharding`,
            and every consumer reads the annotated value.
        copies: (value, consumer aten op) -> spec: all HLO ops of that aten op read a second annotated copy of the
            value (a clone after the pin). Equal copies of one value are written once and shared.
        hops: (value, spec of a copy) -> intermediate specs between the pin and the copy, each annotated too, if that is
            faster than the partitioner's direct reshard. Equal prefixes are shared.
    """

    pins: Mapping[Value, Spec] = field(default_factory=dict)
    copies: Mapping[tuple[Value, int], Spec] = field(default_factory=dict)
    hops: Mapping[tuple[Value, Spec], tuple[Spec, ...]] = field(default_factory=dict)

    def chain(self, value: Value, spec: Spec) -> tuple[Spec, ...]:
        """The annotations on the way to a copy of `value`, one after the other; `spec` last."""
        return (*self.hops.get((value, spec), ()), spec)

    def read(self, value: Value, op: Op) -> Spec | None:
        """The annotation of `value` that an op reads, if there is one."""
        reader = op.reader(value)
        copy = None if reader is None else self.copies.get((value, reader))
        return self.pins.get(value) if copy is None else copy


def with_regions(graph: Graph, annotations: Annotations, specs: Mapping[Value, Spec]) -> Annotations:
    """`annotations` with all that lowering splits manual regions by: their results', and operands' that say how.

    Args:
        specs: of the values as propagated.
    """
    regions = [op for op in graph.ops if op.kind in KINDS]
    results = (Value(op.id, number) for op in regions for number in range(len(op.results)))
    missing = {value: specs[value] for value in results if value not in annotations.pins and graph.is_read(value)}
    annotations = replace(annotations, pins={**annotations.pins, **missing}) if missing else annotations
    reads = {
        (value, op.aten): specs[value] for op in regions for value in saying(graph, op)
        if op.aten is not None and annotations.read(value, op) is None
    }  # fmt: skip
    return replace(annotations, copies={**annotations.copies, **reads}) if reads else annotations


def saying(graph: Graph, op: Op) -> tuple[Value, ...]:
    """The operands whose shardings say how a manual region is split."""
    dims = dims_of_attrs(op.kind, op.attrs, [graph.type_of(value).shape for value in op.operands])
    return tuple(op.operands[place] for place in dims.operands_say)
