"""Annotations as the partitioner sees them: pinned values and consumer-specific copies.

This is the one description of "what lowering writes" that lowering, prediction and verification share.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autoshard.graph.ops import Value
from autoshard.mesh import Spec


@dataclass(frozen=True)
class Annotations:
    """What lowering writes onto a graph.

    Attributes:
        pins: value -> spec: arguments carry it as their sharding, other values pass through `custom_call @Sharding`,
            and every consumer reads the annotated value.
        copies: (value, consumer aten op) -> spec: all HLO ops of that aten op read a second annotated copy of the
            value (a clone after the pin). Equal copies of one value are written once and shared.
        hops: (value, spec of a copy) -> the specs that the copy passes through on its way from the pin, each annotated
            too: a detour that takes less than what the partitioner does at once. Equal beginnings are shared.
    """

    pins: Mapping[Value, Spec] = field(default_factory=dict)
    copies: Mapping[tuple[Value, int], Spec] = field(default_factory=dict)
    hops: Mapping[tuple[Value, Spec], tuple[Spec, ...]] = field(default_factory=dict)

    def chain(self, value: Value, spec: Spec) -> tuple[Spec, ...]:
        """What a copy of `value` is annotated with, one after the other; `spec` last."""
        return (*self.hops.get((value, spec), ()), spec)
