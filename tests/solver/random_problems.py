"""Small random problems and their optimum by enumeration."""

from __future__ import annotations

import itertools
import math
import os

import numpy as np
from hypothesis import settings

from autoshard.solver.network import Network
from autoshard.solver.objective import evaluate
from autoshard.solver.problem import Problem, Usage


def examples(count: int) -> settings:
    """`count` random problems; `AUTOSHARD_EXAMPLES=20` tries twenty times as many, others each time."""
    more = int(os.environ.get("AUTOSHARD_EXAMPLES", "1"))
    return settings(max_examples=more * count, deadline=None, derandomize=more == 1)


def random_problem(seed: int, *, nodes: int = 6, strategies: int = 4, memory: bool | None = None) -> Problem:
    """Whole and fractional costs, forbidden strategies and pairs, ties, parallel edges, usages of nodes and edges."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, nodes))
    k = rng.integers(1, strategies, n)
    scale = 1.0 if rng.random() < 0.5 else 1e-3 / 3
    costs = [rng.integers(0, 10, size).astype(float) * scale for size in k]
    for c in costs:
        if rng.random() < 0.2:
            c[rng.integers(len(c))] = np.inf
    edges, edge_costs = [], []
    for _ in range(int(rng.integers(0, 2 * nodes)) if n > 1 else 0):
        u, v = (int(i) for i in rng.choice(n, 2, replace=False))
        matrix = rng.integers(0, 6, (k[u], k[v])).astype(float) * scale
        if rng.random() < 0.4:
            matrix[rng.random(matrix.shape) < 0.3] = np.inf
        if rng.random() < 0.2 and k[u] == k[v]:
            matrix = np.where(np.eye(k[u]) > 0, 0.0, np.inf)
        edges.append((u, v))
        edge_costs.append(matrix)

    def usage(index: int, shape: tuple[int, ...]) -> Usage:
        start = int(rng.integers(0, 6))
        return Usage(index, start, start + int(rng.integers(0, 5)), rng.integers(0, 9, shape).astype(float))

    node_usages = [usage(int(i), costs[i].shape) for i in rng.integers(0, n, rng.integers(0, 8))]
    edge_usages = [usage(int(e), edge_costs[e].shape) for e in rng.integers(0, len(edges), 3)] if edges else []
    if memory is None:
        memory = rng.random() < 0.7
    names = [f"op{i}" for i in range(n)]
    limit = float(rng.integers(2, 30)) if memory else None
    return Problem(costs, edges, edge_costs, node_usages, edge_usages, limit, names)


def best_by_enumeration(problem: Problem) -> float:
    """The least objective of all feasible choices; infinite if there is none."""
    best = math.inf
    for choice in itertools.product(*[range(len(c)) for c in problem.node_costs]):
        result = evaluate(problem, choice)
        if result.feasible:
            best = min(best, result.objective)
    return best


def least_peak_by_enumeration(problem: Problem) -> float:
    """The least peak of all choices that the costs allow; infinite if there is none."""
    best = math.inf
    for choice in itertools.product(*[range(len(c)) for c in problem.node_costs]):
        result = evaluate(problem, choice)
        if math.isfinite(result.objective):
            best = min(best, result.peak)
    return best


def best_of_network(net: Network) -> tuple[float, list[int]]:
    """The least cost of all choices of a network that fit its memory rows, and one that has it."""
    best, found = math.inf, [0] * len(net.cost)
    for picks in itertools.product(*[range(net.size(i)) for i in net.alive]):
        choice = [0] * len(net.cost)
        for i, s in zip(net.alive, picks, strict=True):
            choice[i] = s
        if net.value(choice) < best and net.fits(choice):
            best, found = net.value(choice), choice
    return best, found


def planted_problem(seed: int, nodes: int = 120, strategies: int = 8) -> Problem:
    """Of a tree width beyond dynamic programming; its relaxation is tight, and the optimum is 10 per node.

    Reduced costs, random but 0 in one choice, and on every edge a part of them that moves to its two nodes.
    """
    rng = np.random.default_rng(seed)
    best = rng.integers(0, strategies, nodes)
    costs = [10.0 + rng.exponential(0.01, strategies) * (np.arange(strategies) != label) for label in best]
    edges, matrices = [], []
    for u, v in [(u, int(v)) for u in range(nodes) for v in rng.choice(nodes, 2, replace=False) if u != v]:
        matrix, (row, column) = rng.exponential(0.01, (strategies,) * 2), rng.normal(0, 0.5, (2, strategies))
        matrix[best[u], best[v]] = 0.0
        costs[u], costs[v] = costs[u] - row, costs[v] - column
        edges.append((u, v))
        matrices.append(matrix + row[:, None] + column)
    return Problem(costs, edges, matrices)
