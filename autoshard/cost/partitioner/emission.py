"""What the partitioner emits for one op."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autoshard.cost.machine.collectives import Collective
from autoshard.cost.partitioner.reshard.emitted import Step
from autoshard.cost.partitioner.tiling import Tiling

Dim = tuple[int, ...]
Tilings = tuple[Tiling, ...]
"""One per operand, or per result."""
MoveKey = tuple[Any, Tiling | None, Tiling]
"""Names what a move makes of a value; the last part is how that is split."""


@dataclass(frozen=True)
class Ring:
    """Names what goes round a ring of `parts` devices within the groups `outer`, beside what is gathered there."""

    outer: Dim
    parts: int


@dataclass(frozen=True)
class Emission:
    """The collectives of one op, before it is known which of its reshards were made earlier.

    Attributes:
        moves: of each reshard (operand, (axes that group the devices, source, where communication ends), collectives).
        own: the op's own collectives.
        order: the subaxes of the last sum among them, in the order of its devices.
        inner: of the bodies of a loop or branch.
        rounds: (place among `own`, number) of the permutes in which a loop sums partial results, which are one step.
    """

    moves: tuple[tuple[int, MoveKey, tuple[Step, ...]], ...]
    own: tuple[Step, ...]
    share: float
    reads: tuple[Tiling, ...]
    overcounted: bool = False
    order: Dim = ()
    inner: tuple[Collective, ...] = ()
    rounds: tuple[int, int] | None = None
