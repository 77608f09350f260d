"""Repeated parts decide together: the quotient of a problem by classes of nodes that take the same strategy.

A fold restricts the choices, so that what it finds is feasible for the whole problem, and its bound is not a bound of
the whole problem. Memory is not folded: every usage keeps its own interval.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from autoshard.solver.problem import Array, Problem, Usage

COLOR_ROUNDS = 4
"""Edges that colours look along. The ends of a stack of layers differ from its middle as far as this; much fewer, and
unlike ops of one layer fall together; much more, and no two layers are alike."""


def classes_of(problem: Problem, rounds: int = COLOR_ROUNDS) -> tuple[int, ...]:
    """A class per node, by colour refinement (Weisfeiler and Lehman, 1968), numbered by first appearance.

    Nodes are in one class when their costs and the amounts they use are equal, and so are, with direction and costs,
    the edges around them for `rounds` steps. When memory is live does not matter: layers run at different times.
    """
    known: dict[tuple[object, ...], int] = {}
    by_identity: dict[int, int] = {}

    def number(array: Array) -> int:
        if id(array) not in by_identity:
            key = ("array", np.shape(array), np.ascontiguousarray(array).tobytes())
            by_identity[id(array)] = known.setdefault(key, len(known))
        return by_identity[id(array)]

    uses: defaultdict[int, list[int]] = defaultdict(list)
    for usage in problem.node_usages:
        if usage.start < usage.end:
            uses[usage.index].append(number(usage.amount))
    edge_uses: defaultdict[int, list[int]] = defaultdict(list)
    for usage in problem.edge_usages:
        if usage.start < usage.end:
            edge_uses[usage.index].append(number(usage.amount))
    around: list[list[tuple[int, object]]] = [[] for _ in problem.node_costs]
    for e, ((u, v), matrix) in enumerate(zip(problem.edges, problem.edge_costs, strict=True)):
        look = known.setdefault(("edge", number(matrix), *sorted(edge_uses[e])), len(known))
        around[u].append((v, ("to", look)))
        around[v].append((u, ("from", look)))
    colours = _numbered([(number(c), *sorted(uses[i])) for i, c in enumerate(problem.node_costs)])
    for _ in range(rounds):
        refined = _numbered(
            [(colours[i], tuple(sorted((look, colours[j]) for j, look in near))) for i, near in enumerate(around)]
        )
        if max(refined, default=0) == max(colours, default=0):
            break
        colours = refined
    return tuple(colours)


def _numbered(keys: Sequence[tuple[object, ...]]) -> list[int]:
    seen: dict[tuple[object, ...], int] = {}
    return [seen.setdefault(key, len(seen)) for key in keys]


def fold(problem: Problem, classes: Sequence[int]) -> tuple[Problem, Callable[[Sequence[int]], list[int]]]:
    """The problem in which the nodes of a class take one strategy, and the way back for its choices.

    Args:
        problem: left as it is.
        classes: per node its class, 0 … number of classes - 1; nodes of a class have equally many strategies.

    Raises:
        ValueError: `classes` does not fit the problem.
    """
    if len(classes) != len(problem.node_costs):
        raise ValueError(f"{len(classes)} classes for {len(problem.node_costs)} nodes")
    count = max(classes, default=-1) + 1
    if sorted(set(classes)) != list(range(count)):
        raise ValueError("classes must be numbered 0, 1, 2, … without gaps")
    costs: list[Array | None] = [None] * count
    names = [""] * count
    for i, (c, cost) in enumerate(zip(classes, problem.node_costs, strict=True)):
        old = costs[c]
        if old is not None and len(old) != len(cost):
            raise ValueError(f"class {c} has nodes with {len(old)} and with {len(cost)} strategies")
        costs[c] = cost if old is None else old + cost
        if problem.names and not names[c]:
            names[c] = problem.names[i]
    edges: dict[tuple[int, int], int] = {}
    matrices: list[Array] = []
    node_usages = [replace(u, index=classes[u.index]) for u in problem.node_usages]
    edge_usages: list[Usage] = []

    def place(u: int, v: int, matrix: Array) -> tuple[int, Array]:
        """Index of the folded edge, and the matrix in its direction."""
        if u > v:
            u, v, matrix = v, u, matrix.T
        return edges.setdefault((u, v), len(edges)), matrix

    for (u, v), matrix in zip(problem.edges, problem.edge_costs, strict=True):
        a, b = classes[u], classes[v]
        if a == b:
            held = costs[a]
            assert held is not None
            costs[a] = held + np.diagonal(matrix)
            continue
        at, oriented = place(a, b, matrix)
        if at == len(matrices):
            matrices.append(oriented)
        else:
            matrices[at] = matrices[at] + oriented
    for usage in problem.edge_usages:
        u, v = problem.edges[usage.index]
        a, b = classes[u], classes[v]
        if a == b:
            node_usages.append(Usage(a, usage.start, usage.end, np.diagonal(usage.amount).copy()))
        else:
            at, oriented = place(a, b, usage.amount)
            edge_usages.append(Usage(at, usage.start, usage.end, oriented))
    whole = [c for c in costs if c is not None]
    folded = Problem(
        whole, list(edges), matrices, node_usages, edge_usages, problem.limit, names if problem.names else ()
    )

    def expand(choice: Sequence[int]) -> list[int]:
        return [choice[c] for c in classes]

    return folded, expand
