"""Strategic oscillation about the memory limit (Glover, 1977), by moves of regions.

Region moves (`kernels_region.py`) improve a choice under costs plus multipliers times usage; memory rows may be
violated. Multipliers of violated rows rise, the others fall. Each time the choice is about to become infeasible, its
last feasible state is improved within the limit, under falling multipliers, so that free memory goes where it buys
most.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from autoshard.solver.dual import Dual
from autoshard.solver.problem import Array

REGIONS = (400, 400, 1000, 200)
"""Nodes of a region at most, in turn."""
LARGEST = 20_000
"""Numbers of the largest table while a region is solved (times the node that is minimised out)."""
ENTRIES = 8_000_000
"""Numbers of all tables of a region: 96 MB."""
COVER = 2.0
"""Regions of one pass, together, have so many nodes per node of the network; at least one region."""
CHUNK = 4
"""Regions between two looks at the clock."""
LIFT, RISE, FALL, SINK, LEAST = 0.05, 4.0, 1.0, 0.95, 1e-2
"""Multipliers of violated rows change by the factor exp(LIFT + RISE * violation), of others by exp(-FALL * free), in
fractions of the largest room, and once all rows hold by the factor SINK as well; the least multiplier of a violated
row, as a fraction of the mean."""
HEIGHTS, PASSES = (0.7, 0.4, 0.2), 5
"""Factors on the prices within the limit; passes at most without prices after that."""
MAX_COST_RATIO = 1.03
"""What costs more than this times the best is not improved within the limit."""
NOISE, TIRED = 0.3, 60
"""After TIRED rounds without a better choice the search restarts from the best, at multipliers times random factors
whose logarithm has this standard deviation; every other time from the dual's multipliers."""
MIN_IMPROVEMENT = 1e-12
"""What falls by less than this share of the cost is rounding."""


class Oscillation:
    """A resumable search over the network of a `Dual`."""

    def __init__(self, dual: Dual, seed: int = 0) -> None:
        """Start at the choice and the multipliers of the dual's best bound."""
        from autoshard.solver import kernels_region

        self._dual, self._kernels = dual, kernels_region
        self._rng = np.random.default_rng(seed)
        self._memory = dual.memory()
        self._limit = self._memory.room
        count = len(dual.nodes)
        self._bench = kernels_region.bench(count, len(dual.low), ENTRIES, seed)
        self._plain = dual.priced(np.zeros(len(self._limit)))
        self._x = dual.x.copy()
        self._multipliers: Array = dual.best_multipliers.copy()
        self._prices: Array = self._multipliers
        self._best: np.ndarray | None = None
        self._fitting: np.ndarray | None = None
        self._turn = self._stalled = 0
        self._smallest = MIN_IMPROVEMENT * (abs(dual.bound) if np.isfinite(dual.bound) else dual.forbidden)
        self.value = np.inf

    @property
    def best(self) -> list[int] | None:
        """The best choice so far, per node of the network."""
        return None if self._best is None else self._dual.named(self._best)

    def learn(self, choice: list[int]) -> None:
        """Take over a feasible choice if it is better."""
        self._keep(np.array([choice[int(v)] for v in self._dual.nodes], np.int64))

    def exchange(self) -> None:
        """Copy the dual's best multipliers: it may go on ascending while the search runs."""
        self._multipliers = self._dual.best_multipliers.copy()

    def run(self, rounds: int, deadline: float) -> None:
        """Search for `rounds` updates of the multipliers."""
        largest = float(self._limit.max(initial=1.0))
        for _ in range(rounds if len(self._x) else 0):
            self._moves(self._x, self._prices, deadline, strict=False)
            over = (self._dual.usage(self._x) - self._limit) / largest
            fits = float(over.max(initial=-1.0)) <= 0.0
            before = self.value
            if fits:
                self._keep(self._x.copy())
                self._fitting = self._x.copy()
            if self._fitting is not None and (not fits or before == np.inf):  # the best on this side of the limit
                if self._cost(self._fitting) < MAX_COST_RATIO * self.value:
                    self._within(self._fitting, deadline)
                self._fitting = None
            if time.process_time() > deadline:
                break
            self._stalled = 0 if self.value < before else self._stalled + 1
            if self._stalled and self._stalled % TIRED == 0 and self._best is not None:
                self._restart()
            floor = LEAST * float(self._prices.mean()) if len(self._prices) else 0.0
            risen = np.maximum(self._prices, floor) * np.exp(np.minimum(LIFT + RISE * over, 1.0))
            fallen = self._prices * np.exp(FALL * np.minimum(over, 0.0))
            prices = np.where(over > 0.0, risen, fallen * (SINK if fits else 1.0))
            self._prices = np.minimum(prices, self._dual.forbidden)  # no choice can cost more

    def _restart(self) -> None:
        assert self._best is not None
        self._x = self._best.copy()
        prices = self._prices if self._stalled // TIRED % 2 else self._multipliers
        self._prices = prices * np.exp(NOISE * self._rng.standard_normal(len(prices)))

    def _within(self, x: np.ndarray, deadline: float) -> None:
        """Improve a feasible choice, and keep it if it is the best."""
        for height in HEIGHTS:
            self._moves(x, self._prices * height, deadline, strict=True)
        for _ in range(PASSES):
            if self._moves(x, None, deadline, strict=True) <= 0.0:
                break
        self._keep(x)

    def _keep(self, x: np.ndarray) -> None:
        cost = self._cost(x)
        if cost < self.value - MIN_IMPROVEMENT * abs(cost):
            self._best, self.value = x, cost

    def _cost(self, x: np.ndarray) -> float:
        return self._dual.net.value(self._dual.named(x))

    def _moves(self, x: np.ndarray, prices: Array | None, deadline: float, *, strict: bool) -> float:
        """One pass of region moves over all nodes; returns by how much the costs fell."""
        graph: Any = self._plain if prices is None else self._dual.priced(prices)
        size = min(len(x), REGIONS[self._turn % len(REGIONS)])
        self._turn += 1
        used = self._dual.usage(x)
        rule = self._kernels.Rule(strict, self._smallest, LARGEST)
        gained, left = 0.0, max(1, int(COVER * len(x) / size))
        while left > 0:
            trials = min(CHUNK, left)
            gained += self._kernels.move_regions(x, self._memory, graph, used, self._bench, trials, size, rule)
            left -= trials
            if time.process_time() > deadline:
                break
        return gained
