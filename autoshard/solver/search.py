"""Large neighbourhood search: tree moves from a feasible choice under oscillating memory multipliers.

With the dual's multipliers in the costs, moves free memory where it buys little; then, without them, moves spend it
where it buys most. Each round starts from the best choice with multipliers scaled otherwise (strategic oscillation,
Glover, 1977).
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from autoshard.solver.dual import Dual
from autoshard.solver.problem import Array

TREE = 100
"""Nodes of a tree at most."""
LADDERS = ((1.0, 0.8, 0.6, 0.4, 0.2), (0.5, 0.25), (2.0, 1.4, 1.0, 0.7, 0.5, 0.3, 0.15), (0.8,))
"""Factors on the multipliers, falling so that free memory goes where it buys most; one ladder per round in turn."""
PATIENCE = 10
"""Rounds without a better choice after which the search ends."""
PRICE_NOISE = 0.2
"""Standard deviation of the logarithm of the prices' random factors."""
MAX_TREE_PASSES = 50
"""Passes at most until no tree helps any more."""
MIN_IMPROVEMENT = 1e-12
"""What falls by less than this share of the cost is rounding."""
TREES_PER_NODE, LEAST_TREES, CHUNK = 2, 200, 2000
"""Trees of one pass, per node and at least; trees between two looks at the clock."""


class TreeSearch:
    """The search over the network of a `Dual`, whose best multipliers and arrays it uses.

    Attributes:
        best: what `improve` has found so far, per node of the network.
    """

    def __init__(self, dual: Dual, seed: int = 0) -> None:
        """Start without a choice."""
        from autoshard.solver import kernels_tree

        self._dual, self._kernels = dual, kernels_tree
        self._rng = np.random.default_rng(seed)
        self._state = np.array([2 * seed + 0x9E3779B97F4A7C15], np.uint64)
        self._memory = dual.memory()
        self._plain = dual.priced(np.zeros(len(self._memory.room)))
        self._step = 0.0
        self.best: list[int] | None = None

    def improve(self, choice: list[int], *, deadline: float, patience: int = PATIENCE) -> list[int]:
        """Search from a feasible choice; return the best one found, per node of the network.

        Ends after `patience` rounds without a better one.
        """
        dual = self._dual
        best = np.array([choice[int(v)] for v in dual.nodes], np.int64)
        if not len(best):
            return choice
        start = dual.net.value(choice)
        self._step = MIN_IMPROVEMENT * (abs(start) if np.isfinite(start) else dual.forbidden)
        self._descend(best, deadline)
        self.best = dual.named(best)
        value, stalled, turn = dual.net.value(self.best), 0, 0
        while stalled < patience and time.process_time() < deadline:
            x = best.copy()
            prices = dual.best_multipliers
            prices = prices * np.exp(PRICE_NOISE * self._rng.standard_normal(len(prices)))
            for height in LADDERS[turn % len(LADDERS)]:
                self._moves(x, dual.priced(prices * height), deadline)
            self._descend(x, deadline)
            found = dual.net.value(dual.named(x))
            turn += 1
            stalled += 1
            if found < value - self._step:
                best, value, stalled = x, found, 0
                self.best = dual.named(best)
        return self.best

    def _descend(self, x: np.ndarray, deadline: float) -> None:
        """Tree moves without multipliers, until a pass gains nothing."""
        for _ in range(MAX_TREE_PASSES):
            if self._moves(x, self._plain, deadline) <= 0.0 or time.process_time() > deadline:
                break

    def _moves(self, x: np.ndarray, graph: Any, deadline: float) -> float:
        """One pass of tree moves over all nodes; returns by how much the costs of `graph` fell."""
        gained, left = 0.0, max(LEAST_TREES, TREES_PER_NODE * len(x))
        used: Array = self._dual.usage(x)
        while left > 0:
            trials = min(CHUNK, left)
            gained += self._kernels.move_trees(x, self._memory, graph, used, self._state, trials, TREE, self._step)
            left -= trials
            if time.process_time() > deadline:
                break
        return gained
