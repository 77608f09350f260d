"""A first bound from each table's minimum, and first choices that may be feasible."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from autoshard.solver.problem import Array, Problem


def least_sum(problem: Problem) -> float:
    """A lower bound on the cost of every choice: the sum of the minima of nodes and edges."""
    known: dict[int, float] = {}

    def least(values: Array) -> float:
        if id(values) not in known:
            known[id(values)] = float(values.min())
        return known[id(values)]

    return sum(map(least, problem.node_costs)) + sum(map(least, problem.edge_costs))


def first_choices(problem: Problem) -> Iterator[list[int]]:
    """Choices of least memory (the first strategy of equals, then the cheapest) and of least cost, node by node."""
    used = [np.where(np.isfinite(cost), 0.0, np.inf) for cost in problem.node_costs]
    for usage in problem.node_usages:
        if usage.start < usage.end:
            used[usage.index] = used[usage.index] + usage.amount
    yield [int(np.argmin(u)) for u in used]
    yield [int(np.lexsort((c, u))[0]) for u, c in zip(used, problem.node_costs, strict=True)]
    yield [int(np.argmin(c)) for c in problem.node_costs]
