"""A strategy-selection problem: pick one strategy per node.

minimise   sum_i cost_i[s_i] + sum_e cost_e[s_u(e), s_v(e)]
subject to, at every time t: sum of the usages live at t <= limit.

Nodes and edges both may use memory (an edge: the temporary of a reshard). Infinite costs are forbidden choices; a tie
(a hard equality constraint between two nodes) is an edge of cost 0 on matches and infinite elsewhere.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Usage:
    """Memory that node or edge `index` uses while `start <= t < end`, in bytes per device.

    `amount` has shape (strategies of the node,), or (strategies of u, strategies of v) for an edge.
    """

    index: int
    start: int
    end: int
    amount: Array


@dataclass(frozen=True)
class Problem:
    """See the module's docstring.

    Attributes:
        node_costs: per node an array of shape (strategies,), in seconds (any unit will do).
        edges: (u, v) per edge; parallel edges and both directions may occur, u != v.
        edge_costs: per edge an array of shape (strategies of u, strategies of v).
        node_usages, edge_usages: several per node or edge may occur, they add.
        limit: bytes per device, or None.
        names: per node its name in messages; may be empty.
    """

    node_costs: Sequence[Array]
    edges: Sequence[tuple[int, int]] = ()
    edge_costs: Sequence[Array] = ()
    node_usages: Sequence[Usage] = ()
    edge_usages: Sequence[Usage] = ()
    limit: float | None = None
    names: Sequence[str] = field(default=(), repr=False)


class Status(enum.Enum):
    """The outcome of a solve."""

    OPTIMAL = "optimal"
    """The bound meets the objective (to the rounding of float64 sums, see `solve.GAP_TOLERANCE`)."""
    FEASIBLE = "feasible"
    """A choice within the limit, not proven best; the search ended by itself."""
    TIME_LIMIT = "time_limit"
    """A choice within the limit, not proven best, because time ran out."""
    INTERRUPTED = "interrupted"
    """A choice within the limit, not proven best, because someone ended the solve."""
    INFEASIBLE = "infeasible"
    """Proven: no choice exists; `Solution.message` says why."""
    UNKNOWN = "unknown"
    """Time ran out before any choice within the limit was found, or none was proven impossible."""


@dataclass(frozen=True)
class LeastUsage:
    """The least peak usage that any choice reaches, in bytes per device.

    No choice has a peak below `bound`; `reached` (infinite if none was found) is the peak of a choice that exists.
    They are equal where the minimisation was exact.
    """

    bound: float
    reached: float


@dataclass(frozen=True)
class Solution:
    """The outcome of `solve`.

    Attributes:
        choice: one strategy index per node; empty when none was found.
        status: see `Status`.
        objective: of `choice`, re-evaluated by `evaluate`; infinite without a choice.
        bound: proven lower bound on the objective of the whole problem.
        backend: what found the choice, for example "dynamic programming" or "highs".
        least_usage: with status INFEASIBLE because of the memory limit (or UNKNOWN), the least peak that is possible.
        message: for a person, when there is no choice; otherwise empty.
    """

    choice: tuple[int, ...]
    status: Status
    objective: float
    bound: float
    backend: str
    least_usage: LeastUsage | None = None
    message: str = ""

    @property
    def gap(self) -> float:
        """(objective - bound) / |objective|, never negative; 0 when both are equal, infinite without a choice."""
        if not self.choice and self.objective == float("inf"):
            return float("inf")
        difference = max(0.0, self.objective - self.bound)
        return 0.0 if difference == 0.0 else difference / max(abs(self.objective), 1e-300)
