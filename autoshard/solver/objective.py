"""Evaluates a choice directly on the problem: cost, peak usage, violated constraints.

Deliberately shares no code with the search: `solve` checks every answer with it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from autoshard.solver.problem import Problem

LIMIT_SLACK = 1e-12
"""Relative slack of the limit when usages are not whole bytes: the rounding of a float64 sum."""


@dataclass(frozen=True)
class Evaluation:
    """Attributes.

    objective: the summed costs (infinite when a forbidden strategy or pair is chosen).
    peak: the highest usage over time, in bytes per device (0 when nothing uses memory).
    peak_time: the first time at which it is reached, or None.
    violations: one sentence per violated constraint; empty for a feasible choice.
    """

    objective: float
    peak: float
    peak_time: int | None
    violations: tuple[str, ...]

    @property
    def feasible(self) -> bool:
        """Whether nothing is violated."""
        return not self.violations


def evaluate(problem: Problem, choice: Sequence[int]) -> Evaluation:
    """Objective, peak usage and violations of `choice` (one strategy index per node).

    Raises:
        ValueError: the choice has the wrong length or an index out of range.
    """
    if len(choice) != len(problem.node_costs):
        raise ValueError(f"the choice has {len(choice)} entries, the problem has {len(problem.node_costs)} nodes")
    for i, (s, cost) in enumerate(zip(choice, problem.node_costs, strict=True)):
        if not 0 <= s < len(cost):
            raise ValueError(f"node {_name(problem, i)}: strategy {s} does not exist, it has {len(cost)}")
    wrong: list[str] = []
    terms: list[float] = []
    for i, cost in enumerate(problem.node_costs):
        terms.append(float(cost[choice[i]]))
        if math.isinf(terms[-1]):
            wrong.append(f"node {_name(problem, i)}: strategy {choice[i]} is forbidden")
    for (u, v), matrix in zip(problem.edges, problem.edge_costs, strict=True):
        terms.append(float(matrix[choice[u], choice[v]]))
        if math.isinf(terms[-1]):
            pair = f"{_name(problem, u)} and {_name(problem, v)}"
            wrong.append(f"nodes {pair}: strategies {choice[u]} and {choice[v]} may not be combined")
    objective = math.inf if any(map(math.isinf, terms)) else math.fsum(terms)

    peak, peak_time, whole = _peak(problem, choice)
    if problem.limit is not None:
        slack = 0.0 if whole else abs(problem.limit) * LIMIT_SLACK
        if peak > problem.limit + slack:
            wrong.append(f"usage is {peak:.0f} bytes at time {peak_time}, the limit is {problem.limit:.0f}")
    return Evaluation(objective, peak, peak_time, tuple(wrong))


def _peak(problem: Problem, choice: Sequence[int]) -> tuple[float, int | None, bool]:
    """The highest usage, its first time, and whether all amounts were whole numbers."""
    change: defaultdict[int, list[float]] = defaultdict(list)
    whole = True
    for usage in problem.node_usages:
        amount = float(usage.amount[choice[usage.index]])
        whole = whole and amount.is_integer()
        if usage.start < usage.end:
            change[usage.start].append(amount)
            change[usage.end].append(-amount)
    for usage in problem.edge_usages:
        u, v = problem.edges[usage.index]
        amount = float(usage.amount[choice[u], choice[v]])
        whole = whole and amount.is_integer()
        if usage.start < usage.end:
            change[usage.start].append(amount)
            change[usage.end].append(-amount)
    now, peak, peak_time = 0.0, 0.0, None
    for time in sorted(change):
        now += math.fsum(change[time])
        if now > peak:
            peak, peak_time = now, time
    return peak, peak_time, whole


def _name(problem: Problem, node: int) -> str:
    return repr(problem.names[node]) if problem.names else str(node)
