"""Annotations as the partitioner sees them: pinned values and consumer-specific copies.

Lowering, prediction and verification share this one description of what lowering writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from autoshard.attention.form import KINDS
from autoshard.graph.ops import Graph, Value
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


def with_attentions(graph: Graph, annotations: Annotations, specs: Mapping[Value, Spec]) -> Annotations:
    """`annotations` with pins on all results of attentions kept as one op, which lowering splits by them.

    Args:
        specs: of the values as propagated.
    """
    results = (Value(op.id, number) for op in graph.ops if op.kind in KINDS for number in range(len(op.results)))
    missing = {value: specs[value] for value in results if value not in annotations.pins and graph.is_read(value)}
    return replace(annotations, pins={**annotations.pins, **missing}) if missing else annotations
