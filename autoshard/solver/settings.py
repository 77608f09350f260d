"""Time limit, seed, backend and goal of the solver, one value for every solve of a plan."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass

from autoshard.solver.problem import Problem, Solution
from autoshard.solver.solve import solve

LEAST_TIME_S = 1.0
"""Seconds that a problem solved again has, whatever time its first solution took."""


@dataclass(frozen=True)
class Settings:
    """Limits and options of the solver.

    Attributes:
        deadline: on the clock of `time.process_time`, so that a busy machine finds the same plan; every solve has
            `LEAST_TIME_S` at least.
        seed, backend: as for `solve`.
        goal: objective, in seconds of a step, that the plan must undercut.
    """

    deadline: float
    seed: int = 0
    backend: str = "auto"
    goal: float = math.inf

    def solve(self, problem: Problem, starts: Iterable[list[int]] = ()) -> Solution:
        """Solve a problem in the time that is left.

        Raises:
            GoalOutOfReachError: the bound proves that no choice undercuts the goal.
        """
        left = max(LEAST_TIME_S, self.deadline - time.process_time())
        return solve(
            problem,
            time_limit=left,
            seed=self.seed,
            backend=self.backend,
            goal=self.goal,
            starts=starts,
        )
