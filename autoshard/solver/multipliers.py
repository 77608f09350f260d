"""Subgradient steps of the memory rows' multipliers: a portfolio of first-order rules, each with its own step length.

No single rule suits all problems. Where few of thousands of rows bind, exponentiated gradients (Kivinen and Warmuth,
1997) find them fast; where many bind, additive steps of Polyak's length along an averaged direction (Barahona and
Anbil's volume algorithm, 2000) do. The direction is either the supergradient of the bound, or the usage of the rounded
choice, which is no supergradient but leads messages that have not converged. Each trial starts
from the best multipliers and messages; what raises the bound most per sweep is tried most.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from autoshard.solver.problem import Array

TRIAL = 50
"""Sweeps of one trial."""
LOOK_AROUND = 4
"""Every so many trials the rule that was not tried for longest is."""
LONGER, SHORTER, SHORTEST = 1.3, 0.6, 1e-4
"""Factors on a rule's step length after a trial that helped and one that did not; the least length."""
HELPED = 1e-3
"""A trial that closes less than this share of the gap did not help."""
LARGEST_EXPONENT = 0.5
FIRST_MASS, LEAST_MASS = 1e-2, 1e-6
"""Sum of multipliers that exponentiated steps start with, and never go below, as fractions of the cost."""


@dataclass
class Rule:
    """A step rule. `worth` is the gain of the bound per sweep, averaged over trials; `tried` the latest trial."""

    exponential: bool
    rounded: bool
    length: float
    worth: float = math.inf
    tried: int = -1


class Ascent:
    """The state of the portfolio: which rule is on trial, and its averaged direction."""

    def __init__(self) -> None:
        """Start without a trial."""
        self._rules = [Rule(e, r, 0.2 if e else 0.1) for e in (True, False) for r in (True, False)]
        self._rule: Rule | None = None
        self._direction: Array | None = None
        self._trials, self._left, self._start = 0, 0, -math.inf

    def trial_over(self, bound: float, gap: float) -> bool:
        """Count a sweep; at a trial's end score its rule and choose the next; whether to restart from the best.

        Args:
            bound: the best so far.
            gap: between the cost of a choice and the bound.
        """
        self._left -= 1
        if self._left > 0:
            return False
        before, helped = self._rule, False
        if before is not None:
            gain = bound - self._start
            helped = gain > HELPED * gap
            worth = gain / TRIAL
            before.worth = worth if math.isinf(before.worth) else 0.5 * (before.worth + worth)
            before.length *= LONGER if helped else SHORTER
            before.length = max(SHORTEST, min(before.length, LARGEST_EXPONENT if before.exponential else math.inf))
        look_around = self._trials % LOOK_AROUND == LOOK_AROUND - 1
        self._rule = max(self._rules, key=lambda rule: -rule.tried if look_around else rule.worth)
        self._rule.tried = self._trials
        self._trials += 1
        self._left, self._start = TRIAL, bound
        back = not (helped and self._rule is before)
        if back:
            self._direction = None
        return back

    @property
    def rounded(self) -> bool:
        """Whether the rule on trial steps along the usage of the rounded choice."""
        return self._rule is not None and self._rule.rounded

    def step(self, multipliers: Array, over: Array, gap: float, scale: float) -> Array:
        """The next multipliers.

        Args:
            multipliers: per row.
            over: usage minus room (the violation), per row.
            gap: between the cost of a choice and the present bound.
            scale: magnitude of the cost.
        """
        rule = self._rule
        assert rule is not None
        keep = 0.8 if rule.exponential else 0.9
        self._direction = over if self._direction is None else keep * self._direction + (1.0 - keep) * over
        if rule.exponential:
            largest = float(np.abs(self._direction).max())
            mass = FIRST_MASS if float(multipliers.sum()) <= 0.1 * FIRST_MASS * scale else LEAST_MASS
            if largest == 0.0:
                return multipliers
            grown: Array = np.maximum(multipliers, mass * scale / len(over))
            return grown * np.exp(self._direction * (rule.length / largest))
        direction = np.where((multipliers <= 0.0) & (self._direction < 0.0), 0.0, self._direction)
        norm = float(direction @ direction)
        if norm == 0.0:
            return multipliers
        stepped: Array = np.maximum(0.0, multipliers + direction * (rule.length * gap / norm))
        return stepped
