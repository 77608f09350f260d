"""Synthetic problems with the shape of a sharded transformer training step, for measuring and testing the solver."""

from __future__ import annotations

import itertools

import numpy as np

from autoshard.solver.problem import Problem, Usage


def transformer_like(
    layers: int = 12, axes: tuple[int, ...] = (2, 4), seed: int = 0, limit_share: float | None = None
) -> Problem:
    """A stack of repeated layers, forward and backward, with parameters tied to their updated values.

    A node is an op with four factors; a strategy gives each mesh axis to a factor or to none; an edge costs what
    changing the sharding of one tensor (two of the factors) costs. `limit_share` sets the limit between the smallest
    and the largest sum of usages.
    """
    rng = np.random.default_rng(seed)
    factors = 4
    strategies = list(itertools.product(range(-1, factors), repeat=len(axes)))
    k = len(strategies)
    pieces = np.array([np.prod([axes[i] for i, f in enumerate(s) if f >= 0] or [1]) for s in strategies], float)

    def spec(s: tuple[int, ...], dims: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(f if f in dims else -1 for f in s)

    def change(a: tuple[int, ...], b: tuple[int, ...], size: float) -> float:
        cost = 0.0
        for axis, (x, y) in enumerate(zip(a, b, strict=True)):
            n = axes[axis]
            if x != y and x >= 0:
                cost += size * ((n - 1) / n if y < 0 else (n - 1) / n**2) / 100 + 1e-6
        return cost

    matrices: dict[tuple[object, ...], np.ndarray] = {}

    def matrix(out: tuple[int, ...], into: tuple[int, ...], size: float) -> np.ndarray:
        key = (out, into, size)
        if key not in matrices:
            rename = dict(zip(into, out, strict=True))
            matrices[key] = np.array(
                [
                    [change(spec(a, out), tuple(rename.get(f, -1) for f in b), size) for b in strategies]
                    for a in strategies
                ]
            )
        return matrices[key]

    costs: list[np.ndarray] = []
    edges: list[tuple[int, int]] = []
    edge_costs: list[np.ndarray] = []
    usages: list[Usage] = []
    total = layers * 60 + 60

    def node(work: float, reduce_size: float, fixed: np.ndarray, start: int, end: int, size: float) -> int:
        split_k = np.array([sum(axes[i] - 1 for i, f in enumerate(s) if f == 3) for s in strategies], float)
        costs.append(work / pieces + split_k * reduce_size / 100 + fixed * work * 0.05)
        shards = np.array([np.prod([axes[i] for i, f in enumerate(s) if 0 <= f < 3] or [1]) for s in strategies])
        usages.append(Usage(len(costs) - 1, start, end, np.round(size * 1e6 / shards)))
        return len(costs) - 1

    def connect(u: int, v: int, dims: tuple[int, int], size: float) -> None:
        pairs = [(0, 1), (0, 3), (1, 2), (0, 2)]
        edges.append((u, v))
        edge_costs.append(matrix(dims, pairs[(u + v) % 4], size))

    works = rng.uniform(0.001, 0.02, 30)
    sizes = rng.choice([0.1, 0.4, 0.8], 30)
    fixed = rng.uniform(0, 1, (30, k))
    tie = np.where(np.eye(k) > 0, 0.0, np.inf)
    forward: list[list[int]] = []
    clock = itertools.count()
    previous = None
    for _ in range(layers):
        layer: list[int] = []
        residual = last = previous
        for j in range(25):
            t = next(clock)
            heavy = j % 4 == 1
            i = node(works[j] if heavy else works[j] / 10, sizes[j] if heavy else 0.0, fixed[j], t, total - t, sizes[j])
            if heavy:  # a weight, live throughout
                w = node(0.0001, 0.0, fixed[j], 0, total, 2 * sizes[j])
                connect(w, i, (0, 1), 2 * sizes[j])
                layer.append(w)
            if last is not None:
                connect(last, i, (0, 1), sizes[j])
            if j in (12, 24) and residual is not None:
                connect(residual, i, (0, 2), 0.4)
                residual = i
            layer.append(i)
            last = i
        previous = last
        forward.append(layer)
    gradient = previous
    for layer in reversed(forward):
        for j, i in enumerate(reversed(layer)):
            t = next(clock)
            heavy = j % 4 == 1
            b = node(
                works[j % 30] if heavy else works[j % 30] / 10,
                sizes[j % 30],
                fixed[j % 30],
                min(t, total - 2),
                total,
                0.1,
            )
            assert gradient is not None
            connect(gradient, b, (0, 1), sizes[j % 30])
            if j % 3 == 0:
                connect(i, b, (0, 1), sizes[j % 30])
            if heavy:  # an updated parameter, tied to the layer's weight
                edges.append((b, layer[2]))
                edge_costs.append(tie if j == 1 else matrix((0, 1), (0, 1), 0.4))
            gradient = b
    problem = Problem(costs, edges, edge_costs, usages)
    if limit_share is None:
        return problem
    low = sum(float(u.amount.min()) for u in usages)
    high = sum(float(u.amount.max()) for u in usages)
    return Problem(costs, edges, edge_costs, usages, (), round(low + limit_share * (high - low)))
