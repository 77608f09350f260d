"""Exact dynamic programming over a `Network`: min-plus bucket elimination (Bertelè and Brioschi, 1972).

A table over several nodes is indexed by *classes* of their strategies: strategies with equal slices share a class. A
reshard cost depends on the sharding of one tensor alone, so a node with 60 strategies often has a dozen classes, and a
table over five nodes 10^5 entries instead of 10^9.
"""

from __future__ import annotations

import heapq
import math
import time
from collections import defaultdict
from dataclasses import dataclass
from functools import partial

import numpy as np

from autoshard.solver.network import Network
from autoshard.solver.problem import Array

HASHED = 20_000
"""Tables of at least so many entries find equal rows and columns by hashing."""
CROWDED = 200
"""A node in more tables than this goes last: its estimate would be looked up anew for each of its neighbours."""


@dataclass(frozen=True)
class Table:
    """`values[maps[0][s_0], maps[1][s_1], …]` is the cost when node `scope[i]` takes strategy s_i."""

    scope: tuple[int, ...]
    maps: tuple[np.ndarray, ...]
    values: Array


def exact_minimum(
    net: Network, *, largest: int = 2_000_000, work: float = 4e8, deadline: float = np.inf
) -> tuple[list[int], float] | None:
    """The cheapest choice of `net` without its memory rows, and its cost; None where the tree width is too large.

    Args:
        net: not modified.
        largest: most entries of a table.
        work: most additions in all.
        deadline: `time.process_time()` at which to give up.
    """
    order = elimination_order(net)
    tables: defaultdict[int, dict[int, Table]] = defaultdict(dict)  # per node the tables over it, by number
    serial = 0
    for u in net.alive:
        for v, matrix in net.adj[u].items():
            if u < v:
                table = net.memo.get(("classes",), (matrix,), merge_classes)
                tables[u][serial] = tables[v][serial] = Table((u, v), table[1], table[0])
                serial += 1
    done: list[tuple[int, list[Table]]] = []
    total = net.offset
    pending = _Heap(net, tables, order)
    budget = _Budget(largest, work, deadline)
    while (node := pending.pop()) is not None:
        mine = tables.pop(node, {})
        around = sorted({v for t in mine.values() for v in t.scope if v != node})
        done.append((node, list(mine.values())))
        places = {v: place for place, v in enumerate([node, *around])}
        scopes = tuple(tuple(places[v] for v in t.scope) for t in mine.values())
        arrays = [array for t in mine.values() for array in (t.values, *t.maps)]
        try:  # the same for all copies of a layer
            values, maps = net.memo.get(
                ("without", scopes), (net.costs(node), *arrays), partial(_without, scopes, budget)
            )
        except _TooMuchError:
            return None
        for number, t in mine.items():
            for v in t.scope:
                if v != node:
                    del tables[v][number]
        if not around:
            total += float(values)
            continue
        new = Table(tuple(around), maps, values)
        for v in around:
            tables[v][serial] = new
        serial += 1
        pending.update(around)
    choice = [0] * len(net.cost)
    for node, mine_list in reversed(done):
        total_of = net.costs(node).copy()
        for t in mine_list:
            position = t.scope.index(node)
            index = [m if i == position else m[choice[v]] for i, (v, m) in enumerate(zip(t.scope, t.maps, strict=True))]
            total_of += t.values[tuple(index)]
        choice[node] = int(np.argmin(total_of))
    return choice, total


class _TooMuchError(Exception):
    """One table, or all together, would get too large, or the deadline has passed."""


@dataclass
class _Budget:
    largest: int
    work: float
    deadline: float

    def spend(self, entries: float, additions: float) -> None:
        """Charge a table's work to the budget."""
        self.work -= additions
        if entries > self.largest or self.work < 0 or time.process_time() > self.deadline:
            raise _TooMuchError


def _without(
    scopes: tuple[tuple[int, ...], ...], budget: _Budget, costs: Array, *arrays: Array
) -> tuple[Array, tuple[np.ndarray, ...]]:
    """Eliminate node 0: sum the tables over it and its neighbours (1, 2, …) and minimise; a table over the neighbours.

    Args:
        scopes: nodes of each table.
        budget: raises `_TooMuchError` when it is exceeded.
        costs: of the eliminated node's strategies.
        arrays: of each table its values and then its maps.
    """
    tables: list[Table] = []
    start = 0
    for scope in scopes:
        tables.append(Table(scope, arrays[start + 1 : start + 1 + len(scope)], arrays[start]))
        start += 1 + len(scope)
    around = sorted({v for scope in scopes for v in scope} - {0})
    joint = {v: joint_classes([t.maps[t.scope.index(v)] for t in tables if v in t.scope]) for v in around}
    own, own_first = joint_classes([t.maps[t.scope.index(0)] for t in tables] or [np.zeros(len(costs), int)])
    shape = tuple(len(first) for _, first in joint.values())
    entries = float(np.prod(shape, dtype=np.float64))
    budget.spend(entries, entries * len(own_first) * max(1, len(tables)))
    cost = np.full(len(own_first), np.inf)
    np.minimum.at(cost, own, costs)
    best = np.full(shape, np.inf)
    views = [_align(t, 0, around, joint, own_first) for t in tables]
    for s, own_cost in enumerate(cost):
        value: Array | float = float(own_cost)
        for view in views:
            value = value + view[s]
        np.minimum(best, value, out=best)
    merged, again = merge_classes(best)
    return merged, tuple(m[joint[v][0]] for v, m in zip(around, again, strict=True))


class _Heap:
    """Elimination order: nodes by the estimated size of the table that eliminating them makes, kept up to date."""

    def __init__(self, net: Network, tables: defaultdict[int, dict[int, Table]], order: dict[int, int]) -> None:
        self._net, self._tables, self._order = net, tables, order
        self._value: dict[int, float] = {}
        self._heap: list[tuple[float, int, int]] = []
        self.update(net.alive)

    def update(self, nodes: list[int]) -> None:
        for v in nodes:
            self._value[v] = self._estimate(v)
            heapq.heappush(self._heap, (self._value[v], self._order[v], v))

    def pop(self) -> int | None:
        while self._heap:
            value, _, node = heapq.heappop(self._heap)
            if self._value.get(node) == value:
                del self._value[node]
                return node
        return None

    def _estimate(self, node: int) -> float:
        if len(self._tables[node]) > CROWDED:
            return math.inf
        classes: dict[int, int] = {}
        for t in self._tables[node].values():
            for v, size in zip(t.scope, t.values.shape, strict=True):
                classes[v] = min(classes.get(v, 1) * size, self._net.size(v))
        size = 1.0
        for v, c in classes.items():
            if v != node:
                size *= c
        return size


def elimination_order(net: Network) -> dict[int, int]:
    """Rank of each node for breaking ties: node numbers, which follow the program."""
    return {v: i for i, v in enumerate(net.alive)}


def joint_classes(maps: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The coarsest common refinement of `maps`: (map from strategies to classes, first strategy of each class)."""
    key = maps[0].astype(np.int64)
    for m in maps[1:]:
        key = key * (int(m.max()) + 1) + m
        _, key = np.unique(key, return_inverse=True)
    _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
    return inverse, first


def _align(
    t: Table, node: int, around: list[int], joint: dict[int, tuple[np.ndarray, np.ndarray]], own_first: np.ndarray
) -> Array:
    """The table with axes (node, *around), length 1 where it does not depend on a neighbour."""
    index = [m[own_first] if v == node else m[joint[v][1]] for v, m in zip(t.scope, t.maps, strict=True)]
    picked = t.values[np.ix_(*index)]
    order = [node, *around]
    axes = sorted(range(len(t.scope)), key=lambda i: order.index(t.scope[i]))
    picked = picked.transpose(axes)
    shape = [1] * len(order)
    for i, axis in enumerate(axes):
        shape[order.index(t.scope[axis])] = picked.shape[i]
    return np.ascontiguousarray(picked.reshape(shape))


def merge_classes(values: Array) -> tuple[Array, tuple[np.ndarray, ...]]:
    """Merge equal slices along every dimension: (smaller table, per dimension the map to its classes)."""
    return _merge_by_hash(values) if values.ndim == 2 and values.size >= HASHED else _merge_by_bytes(values)


def _merge_by_hash(values: Array) -> tuple[Array, tuple[np.ndarray, ...]]:
    """For large matrices: whole-number sums of rows and columns under random weights, checked afterwards."""
    bits = np.ascontiguousarray(values).view(np.uint64)
    rng = np.random.default_rng(0)
    rows, columns = (rng.integers(0, 2**64, n, np.uint64) for n in bits.shape)
    firsts, maps = [], []
    for sums in (bits @ columns, rows @ bits):
        _, first, inverse = np.unique(sums, return_index=True, return_inverse=True)
        order = np.argsort(first)  # classes by first appearance
        rank = np.empty_like(order)
        rank[order] = np.arange(len(order))
        firsts.append(first[order])
        maps.append(rank[inverse])
    small = np.ascontiguousarray(values[np.ix_(*firsts)])
    if not np.array_equal(small[np.ix_(*maps)], values):
        return _merge_by_bytes(values)
    return small, tuple(maps)


def _merge_by_bytes(values: Array) -> tuple[Array, tuple[np.ndarray, ...]]:
    maps: list[np.ndarray] = []
    for axis in range(values.ndim):
        rows = np.moveaxis(values, axis, 0)
        seen: dict[bytes, int] = {}
        first: list[int] = []
        map_ = np.empty(len(rows), np.int64)
        for i, row in enumerate(rows):
            known = seen.setdefault(row.tobytes(), len(seen))
            if known == len(first):
                first.append(i)
            map_[i] = known
        if len(first) < len(rows):
            values = np.ascontiguousarray(np.take(values, first, axis=axis))
        maps.append(map_)
    return values, tuple(maps)
