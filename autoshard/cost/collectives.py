"""Collectives: what the partitioner inserts, and what each takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

CollectiveKind = Literal["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"]


@dataclass(frozen=True)
class Collective:
    """One collective of a step.

    Attributes:
        kind: XLA's name for it.
        axes: the mesh axes it runs over, in mesh order.
        bytes: the larger of operand and result payload per device, for one execution.
        count: executions per step.
        op: graph op that it is attributed to.
    """

    kind: CollectiveKind
    axes: tuple[str, ...]
    bytes: int
    count: int = 1
    op: int | None = None
