"""A strategy-selection problem: pick one strategy per node.

minimise   sum_i cost_i[s_i] + sum_e cost_e[s_u(e), s_v(e)]
subject to, at every time t: sum of the usages live at t <= limit.

Nodes and edges both may use memory (an edge: the temporary of a reshard). Infinite costs are forbidden choices; a tie
(two nodes that must take matching strategies) is an edge whose cost is 0 on matches and infinite elsewhere.
"""

from __future__ import annotations

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
        names: per node what to call it in messages; may be empty.
    """

    node_costs: Sequence[Array]
    edges: Sequence[tuple[int, int]] = ()
    edge_costs: Sequence[Array] = ()
    node_usages: Sequence[Usage] = ()
    edge_usages: Sequence[Usage] = ()
    limit: float | None = None
    names: Sequence[str] = field(default=(), repr=False)
