"""Memory prices by cutting planes, and choices between those that two prices make cheapest.

Where few memory rows bind, the Lagrangian relaxation is the problem without rows at other node costs, and is solved
nearly exactly. Each solution is a cut of the concave dual, by its cost and usage; the next prices maximise the least of
the cuts (Kelley, J. SIAM 1960). Equal layers turn to less memory at one price, all at once. So the parts in which two
solutions differ, and which no edge joins, follow one or the other, by a small integer program.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.solver.network import Network
from autoshard.solver.problem import Array

ROUNDS = 10
"""Prices that are tried at most."""
FIRST_PRICE, DEARER = 0.1, 4.0
"""First upper limit of a price, as a fraction of the cost for all the memory; factor on it where that is not enough."""

NODES, PRECISE = 100, 1e-4
"""Nodes of the integer program's search tree at most, and its gap."""
SAME = 1e-3
"""Prices that differ by no more than this share are not tried again."""

Minimum = Callable[[Network, bool], tuple[list[int], float]]
"""A cheap choice of a network without memory rows, and a lower bound of its cost; whether both are worth more time."""


@dataclass(frozen=True)
class Cut:
    """A choice of the network: its cost, and per memory row the bytes above the limit."""

    choice: list[int]
    cost: float
    over: Array


class Crossing:
    """The search over prices.

    Attributes:
        bound: of the network's cost.
        best: the cheapest choice found that fits.
        prices: of the best bound, in cost per byte of each memory row.
    """

    def __init__(self, net: Network, minimum: Minimum) -> None:
        """Start without prices."""
        self._net, self._minimum = net, minimum
        self._cuts: list[Cut] = []
        self._rows: list[int] = []
        self._top = FIRST_PRICE
        self._unit = max(1.0, float(np.abs(net.room).max(initial=0.0)))
        self.prices = np.zeros(len(net.room))
        self.bound = -np.inf
        self.best: Cut | None = None
        self._deadline = np.inf

    def run(self, deadline: float, close: float) -> None:
        """Try prices until the gap is at most `close`, or time is over; those that repeat for longer, once."""
        self._deadline = deadline
        prices, tried = self.prices, list[Array]()
        while len(tried) < ROUNDS and time.process_time() < deadline:
            again = sum(np.allclose(prices, other, rtol=SAME, atol=0.0) for other in tried)
            if again > 1:
                return
            cut = self._try(prices, again > 0)
            tried.append(prices)
            if self.best is not None and self.best.cost - self.bound <= close * abs(self.bound):
                return
            worst = int(cut.over.argmax())
            if cut.over[worst] > 0.0 and worst not in self._rows:
                self._rows.append(worst)
            prices = self._next()

    def _try(self, prices: Array, longer: bool) -> Cut:
        choice, bound = self._minimum(self._net.priced(prices), longer)
        if bound > self.bound:
            self.bound, self.prices = bound, prices
        cut = self._cut(choice)
        self._cuts.append(cut)
        self._keep(cut)
        for other in [each for each in self._cuts if not _fits(each)]:
            if self.best is not None:
                self._keep(self._cut(self._between(self.best, other)))
        return cut

    def _cut(self, choice: list[int]) -> Cut:
        return Cut(choice, self._net.value(choice), self._net.usage(choice) - self._net.room - self._net.slack)

    def _keep(self, cut: Cut) -> None:
        if _fits(cut) and (self.best is None or cut.cost < self.best.cost):
            self.best = cut

    def _next(self) -> Array:
        """The prices that maximise the least of all cuts."""
        from scipy.optimize import linprog

        prices = np.zeros(len(self._net.room))
        if not self._rows:
            return prices
        scale = abs(self._cuts[0].cost) or 1.0
        left = np.array([[1.0, *(-cut.over[self._rows] / self._unit)] for cut in self._cuts])
        right = np.array([cut.cost / scale for cut in self._cuts])
        found = linprog(
            [-1.0, *[0.0] * len(self._rows)], left, right, bounds=[(None, None), *[(0.0, self._top)] * len(self._rows)]
        )
        if found.x is not None:
            prices[self._rows] = found.x[1:] * scale / self._unit
            self._top *= DEARER if found.x[1:].max() >= self._top else 1.0
        return prices

    def _between(self, less: Cut, more: Cut) -> list[int]:
        """A choice that fits: parts of `more` in `less`, which fits, by a small integer program."""
        from scipy.optimize import Bounds, LinearConstraint, milp

        parts = self._parts(less.choice, more.choice)
        changes = [self._change(part, less.choice, more.choice) for part in parts]
        costs, used = np.array([cost for cost, _ in changes]), np.array([change for _, change in changes]).T
        binding = np.flatnonzero(less.over + np.maximum(used, 0.0).sum(axis=1) > 0.0)
        scale = float(np.abs(costs).max()) or 1.0
        rows, same = np.unique(used[binding] / self._unit, axis=0, return_inverse=True)
        room = np.full(len(rows), np.inf)
        np.minimum.at(room, same.ravel(), -less.over[binding] / self._unit)
        kept = _unimplied(rows, room)
        left = max(0.0, self._deadline - time.process_time())
        found = milp(
            costs / scale,
            integrality=np.ones(len(parts), np.int64),
            bounds=Bounds(0.0, 1.0),
            constraints=LinearConstraint(rows[kept], ub=room[kept]),
            options={"node_limit": NODES, "mip_rel_gap": PRECISE, "time_limit": left},
        )
        choice, over = list(less.choice), less.over.copy()
        for part, change, share in zip(parts, used.T, () if found.x is None else found.x, strict=False):
            if share > 0.5 and np.all(over + change <= 0.0):  # the integer program has tolerances
                over += change
                for node in part:
                    choice[node] = more.choice[node]
        return choice

    def _parts(self, one: Sequence[int], two: Sequence[int]) -> list[list[int]]:
        """The connected components of the nodes in which two choices differ."""
        differ = {node for node in self._net.alive if one[node] != two[node]}
        parts = []
        while differ:
            part = [differ.pop()]
            for node in part:
                joined = differ.intersection(self._net.adj[node])
                differ -= joined
                part += joined
            parts.append(sorted(part))
        return parts

    def _change(self, part: Sequence[int], one: Sequence[int], two: Sequence[int]) -> tuple[float, Array]:
        """By how much cost, and usage of every row, change where the nodes of `part` turn from `one` to `two`."""
        net, inside = self._net, set(part)
        cost, change = 0.0, np.zeros(len(net.room) + 1)

        def spend(terms: dict[tuple[int, int], Array], before: tuple[int, ...], after: tuple[int, ...]) -> None:
            for (first, last), amount in terms.items():
                more = float(amount[after] - amount[before])
                change[first] += more
                change[last] -= more

        for u in part:
            cost += float(net.costs(u)[two[u]] - net.costs(u)[one[u]])
            spend(net.node_terms[u], (one[u],), (two[u],))
            for v, matrix in net.adj[u].items():
                if v in inside and v < u:
                    continue
                after = two[v] if v in inside else one[v]
                cost += float(matrix[two[u], after] - matrix[one[u], one[v]])
                pairs = (one[u], one[v]), (two[u], after)
                spend(net.pair_terms(u, v), *(pairs if u < v else [pair[::-1] for pair in pairs]))
        used: Array = np.cumsum(change)[:-1]
        return cost, used


def _unimplied(rows: Array, room: Array) -> Array:
    """Which of these distinct constraints `rows` @ x <= `room`, x >= 0, no other implies: each layer repeats many."""
    kept = np.ones(len(rows), dtype=bool)
    for row in np.argsort(-room):
        kept[row] = (np.all(rows[kept] >= rows[row], axis=1) & (room[kept] <= room[row])).sum() == 1
    return kept


def _fits(cut: Cut) -> bool:
    return bool(np.all(cut.over <= 0.0)) and bool(np.isfinite(cut.cost))
