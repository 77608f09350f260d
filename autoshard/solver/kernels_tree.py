"""Moves of induced trees, compiled by numba. Names and array layout are those of `kernels.py`."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from autoshard.solver.kernels import F, Graph, I, Memory, compiled, inlined, least, shift


@compiled
def random_below(state: I, below: int) -> int:
    """The next whole number in [0, below) of Marsaglia's xorshift64 (2003)."""
    s = state[0]
    s ^= s << np.uint64(13)
    s ^= s >> np.uint64(7)
    s ^= s << np.uint64(17)
    state[0] = s
    drawn: int = int(np.int64(s >> np.uint64(1)) % below)
    return drawn


class Tree(NamedTuple):
    """An induced tree, parents before children.

    `parent` is an index into the members, `by` the edge to it, `new` the new labels; `stamp` of a node is the number of
    its latest tree.
    """

    members: I
    parent: I
    by: I
    new: I
    stamp: I


@compiled
def _grow(seed: int, most: int, state: I, graph: Graph, mark: int, tree: Tree) -> int:
    """Grow tree number `mark` around `seed` to at most `most` members; return its size.

    A node joins when exactly one member is its neighbour.
    """
    low, high, first, edge, side = graph.low, graph.high, graph.first, graph.edge, graph.side
    members, parent, by, _, stamp = tree
    members[0], parent[0], by[0] = seed, -1, -1
    stamp[seed] = mark
    count, at = 1, 0
    while at < count and count < most:
        v = members[at]
        degree = first[v + 1] - first[v]
        offset = random_below(state, degree) if degree else 0
        for step in range(degree):
            q = first[v] + (offset + step) % degree
            u = high[edge[q]] if side[q] == 0 else low[edge[q]]
            if stamp[u] == mark:
                continue
            known = 0
            for r in range(first[u], first[u + 1]):
                w = high[edge[r]] if side[r] == 0 else low[edge[r]]
                known += stamp[w] == mark
                if known > 1:
                    break
            if known == 1:
                members[count], parent[count], by[count] = u, at, edge[q]
                stamp[u] = mark
                count += 1
                if count == most:
                    break
        at += 1
    return count


@inlined
def label_costs(v: int, mark: int, stamp: I, x: I, graph: Graph, out: F) -> None:
    """Cost of each label of node v given its neighbours outside the tree `mark`."""
    noff, eoff, pairwise, width, koff, kind = (
        graph.noff, graph.eoff, graph.pairwise, graph.width, graph.koff, graph.kind,
    )  # fmt: skip
    k = noff[v + 1] - noff[v]
    for a in range(k):
        out[a] = graph.unary[noff[v] + a]
    for q in range(graph.first[v], graph.first[v + 1]):
        e = graph.edge[q]
        lower = graph.side[q] == 0
        u = graph.high[e] if lower else graph.low[e]
        if stamp[u] == mark:
            continue
        if lower:
            base, c = eoff[e] + kind[koff[2 * e + 1] + x[u]], koff[2 * e]
            for a in range(k):
                out[a] += pairwise[base + kind[c + a] * width[e]]
        else:
            base, c = eoff[e] + kind[koff[2 * e] + x[u]] * width[e], koff[2 * e + 1]
            for a in range(k):
                out[a] += pairwise[base + kind[c + a]]


@compiled
def _best_labels(count: int, mark: int, x: I, graph: Graph, tree: Tree) -> Any:
    """Optimal labels `new` of a tree, all else fixed, by dynamic programming; (their cost, the present labels')."""
    noff, low, high, eoff, pairwise = graph.noff, graph.low, graph.high, graph.eoff, graph.pairwise
    width, koff, kind, moff = graph.width, graph.koff, graph.kind, graph.moff
    members, parent, by, new, stamp = tree
    widest = 1
    for t in range(count):
        widest = max(widest, noff[members[t] + 1] - noff[members[t]])
    theta = np.empty((count, widest))
    follow = np.empty((count, widest), np.int64)
    given, holder = np.empty(widest), np.empty(widest, np.int64)
    old = 0.0
    for t in range(count):
        label_costs(members[t], mark, stamp, x, graph, theta[t])
        old += theta[t, x[members[t]]]
        if t > 0:
            e = by[t]
            old += pairwise[eoff[e] + kind[koff[2 * e] + x[low[e]]] * width[e] + kind[koff[2 * e + 1] + x[high[e]]]]
    for t in range(count - 1, 0, -1):
        i, p, e = members[t], parent[t], by[t]
        s = 0 if low[e] == i else 1
        c, d = koff[2 * e + s], koff[2 * e + 1 - s]
        mine = moff[2 * e + s + 1] - moff[2 * e + s]
        given[:mine] = np.inf
        for a in range(noff[i + 1] - noff[i]):
            if theta[t, a] < given[kind[c + a]]:
                given[kind[c + a]] = theta[t, a]
                holder[kind[c + a]] = a
        down, across = (width[e], 1) if s == 0 else (1, width[e])
        other = moff[2 * e + 2 - s] - moff[2 * e + 1 - s]
        out = np.empty(other)
        for b in range(other):
            best = 0
            for a in range(1, mine):
                if given[a] + pairwise[eoff[e] + a * down + b * across] < (
                    given[best] + pairwise[eoff[e] + best * down + b * across]
                ):
                    best = a
            out[b] = given[best] + pairwise[eoff[e] + best * down + b * across]
            follow[t, b] = holder[best]
        for a in range(noff[members[p] + 1] - noff[members[p]]):
            theta[p, a] += out[kind[d + a]]
    new[0] = least(theta[0], noff[members[0] + 1] - noff[members[0]])
    for t in range(1, count):
        e = by[t]
        d = koff[2 * e + 1] if low[e] == members[t] else koff[2 * e]
        new[t] = follow[t, kind[d + new[parent[t]]]]
    return theta[0, new[0]], old


@inlined
def _swap(t: int, tree: Tree, x: I, used: F, graph: Graph, memory: Memory) -> None:
    """Exchange the present and the new label of member `t`; `used` follows. Its own inverse."""
    i, new = tree.members[t], tree.new
    if new[t] != x[i]:
        old = x[i]
        shift(i, old, -1.0, x, used, graph, memory.node_items, memory.edge_items)
        x[i] = new[t]
        shift(i, new[t], 1.0, x, used, graph, memory.node_items, memory.edge_items)
        new[t] = old


@inlined
def _take(count: int, tree: Tree, x: I, used: F, graph: Graph, memory: Memory) -> bool:
    """Move the tree to its new labels where that is feasible (`used` follows)."""
    for t in range(count):
        _swap(t, tree, x, used, graph, memory)
    fits = True
    for r in range(len(used)):
        if used[r] > memory.room[r]:
            fits = False
            break
    if fits:
        return True
    for t in range(count - 1, -1, -1):
        _swap(t, tree, x, used, graph, memory)
    return False


@compiled
def move_trees(x: I, memory: Memory, graph: Graph, used: F, state: I, trials: int, most: int, smallest: float) -> float:
    """Improve a feasible choice in place: `trials` random trees of up to `most` nodes get their optimal labels.

    A tree whose move is infeasible is tried again at half its size. `graph` holds the costs, which may include
    multipliers times usage; `used` is the usage of `x` and follows it. Returns by how much the costs fell.
    """
    n = len(graph.noff) - 1
    members, parent = np.empty(most, np.int64), np.empty(most, np.int64)
    by, new = np.empty(most, np.int64), np.empty(most, np.int64)
    tree = Tree(members, parent, by, new, np.full(n, -1, np.int64))
    gained, mark = 0.0, 0
    for _ in range(trials):
        seed = random_below(state, n)
        size = 1 + random_below(state, most)
        while size > 0:
            count = _grow(seed, size, state, graph, mark, tree)
            cost, old = _best_labels(count, mark, x, graph, tree)
            mark += 1
            if not cost < old - smallest:
                break
            if _take(count, tree, x, used, graph, memory):
                gained += old - cost
                break
            size = min(size, count) // 2
    return gained
