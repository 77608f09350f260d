"""Very large neighbourhoods: moves of regions, compiled by numba. Names and array layout are those of `kernels.py`.

The labels of a region (a ball around a node, hundreds of nodes) are re-optimised exactly, all else fixed, by bucket
elimination (Bertelè and Brioschi, 1972). Where a table would get too large, nodes are conditioned on: held at the
labels they have (cutset conditioning, Dechter, 1990), a few per cent of them, others each time.

Local node t of a region is `members[t]`. Table j is over the local nodes `scope[j, :dims[j]]`, the last one fastest,
with its values in `pool` from `place[j]` on (-1 - e: those of edge e). `head`, `link` and `item` are linked lists of
each local node's tables.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from autoshard.solver.kernels import F, Graph, I, Memory, compiled
from autoshard.solver.kernels_tree import label_costs, random_below

DIMS = 12
"""Nodes of a table at most."""
DRAWN = 8
"""Of so many nodes drawn at random, that with the largest table is held."""
OPEN, GONE, HELD = 0, 1, 2


class Workspace(NamedTuple):
    """Workspace of region moves.

    Per node of the graph: `stamp`, the number of its latest region, and `place_of`, its local node. Per local node: its
    node in `members`, its number of labels, whether it is open, `gone` (eliminated) or held; its tables; the
    elimination order; `estimate`, additions to eliminate it (negative: unknown), and the marks `seen`; the `own_dims`
    nodes `own_scope` that its best label depends on, that label from `own_place` of `follow` on; its `new` label. Per
    table: see the module's docstring; `alive` until a node of it is eliminated.
    """

    state: I
    marks: I
    stamp: I
    members: I
    place_of: I
    size: I
    now: I
    head: I
    order: I
    seen: I
    new: I
    own_dims: I
    own_place: I
    estimate: F
    scope: I
    own_scope: I
    dims: I
    place: I
    alive: Any
    link: I
    item: I
    around: I
    stride: I
    at_label: I
    filled: I
    pool: F
    follow: I


class Rule(NamedTuple):
    """Which moves are accepted: where `strict`, no memory row becomes violated or more violated; costs fall by more
    than `smallest`. Tables have up to `largest` entries."""

    strict: bool
    smallest: float
    largest: int


TABLES, LINKS, USED, FOLLOWED, TICK = range(5)
"""Of `Workspace.filled`: numbers of tables and links, entries used of `pool` and `follow`, the mark of `seen`."""


def bench(nodes: int, edges: int, entries: int, seed: int = 0) -> Workspace:
    """A workspace for regions of up to all `nodes`, with tables of at most `entries` numbers."""
    tables = edges + nodes
    lists = (edges * 2 + nodes * DIMS) if nodes else 1
    arrays: list[Any] = [np.array([2 * seed + 0x9E3779B97F4A7C15], np.uint64), np.zeros(1, np.int64)]
    arrays += [np.full(nodes, -1, np.int64), *(np.zeros(nodes, np.int64) for _ in range(10)), np.zeros(nodes)]
    arrays += [np.zeros((tables, DIMS), np.int64), np.zeros((nodes, DIMS), np.int64)]
    arrays += [np.zeros(tables, np.int64), np.zeros(tables, np.int64), np.zeros(tables, np.bool_)]
    arrays += [np.zeros(lists, np.int64), np.zeros(lists, np.int64), *(np.zeros(DIMS, np.int64) for _ in range(3))]
    arrays += [np.zeros(5, np.int64), np.empty(entries), np.empty(entries, np.int32)]
    return Workspace(*arrays)


@compiled
def _ball(seed: int, most: int, mark: int, graph: Graph, bench: Workspace) -> int:
    """The nodes nearest to `seed`, up to `most`, stamped with `mark`; how many."""
    low, high, first, edge, side = graph.low, graph.high, graph.first, graph.edge, graph.side
    stamp, members, state = bench.stamp, bench.members, bench.state
    members[0] = seed
    stamp[seed] = mark
    count, at = 1, 0
    while at < count and count < most:
        v = members[at]
        degree = first[v + 1] - first[v]
        offset = random_below(state, degree) if degree else 0
        for step in range(degree):
            q = first[v] + (offset + step) % degree
            u = high[edge[q]] if side[q] == 0 else low[edge[q]]
            if stamp[u] != mark:
                stamp[u] = mark
                members[count] = u
                count += 1
                if count == most:
                    break
        at += 1
    return count


@compiled
def _estimate(t: int, bench: Workspace) -> float:
    """Additions per table to eliminate local node t; infinite with too many neighbours."""
    size, seen, dims, scope = bench.size, bench.seen, bench.dims, bench.scope
    product, n = float(size[t]), 0
    bench.filled[TICK] += 1
    tick = bench.filled[TICK]
    seen[t] = tick
    at = bench.head[t]
    while at >= 0:
        j = bench.item[at]
        if bench.alive[j]:
            for d in range(dims[j]):
                u = scope[j, d]
                if bench.now[u] == OPEN and seen[u] != tick:
                    seen[u] = tick
                    product *= size[u]
                    n += 1
        at = bench.link[at]
    return product if n < DIMS else np.inf


@compiled
def _link(t: int, j: int, bench: Workspace) -> None:
    """Add table j to those of local node t."""
    links = bench.filled[LINKS]
    bench.link[links], bench.item[links] = bench.head[t], j
    bench.head[t] = links
    bench.filled[LINKS] += 1


@compiled
def _begin(count: int, mark: int, x: I, graph: Graph, bench: Workspace) -> Any:
    """Nothing eliminated yet: costs of every local node's labels, and the region's edges as tables."""
    bench.filled[:] = 0
    widest = 1
    for t in range(count):
        v = bench.members[t]
        bench.place_of[v] = t
        bench.size[t] = graph.noff[v + 1] - graph.noff[v]
        widest = max(widest, bench.size[t])
        bench.head[t], bench.now[t], bench.seen[t] = -1, OPEN, -1
        bench.own_dims[t], bench.estimate[t] = 0, -1.0
    theta = np.empty((count, widest))
    for t in range(count):
        v = bench.members[t]
        label_costs(v, mark, bench.stamp, x, graph, theta[t])
        for q in range(graph.first[v], graph.first[v + 1]):
            e = graph.edge[q]
            if graph.side[q] != 0 or bench.stamp[graph.high[e]] != mark:
                continue
            s, j = bench.place_of[graph.high[e]], bench.filled[TABLES]
            bench.scope[j, 0], bench.scope[j, 1] = t, s
            bench.dims[j], bench.place[j], bench.alive[j] = 2, -1 - e, True  # an edge's values are read in place
            _link(t, j, bench)
            _link(s, j, bench)
            bench.filled[TABLES] += 1
    return theta


@compiled
def _next(count: int, largest: int, bench: Workspace) -> int:
    """The local node to eliminate next; -1 - v where node v is to be held instead."""
    now, size, estimate = bench.now, bench.size, bench.estimate
    entries = len(bench.pool)
    v = -1
    for t in range(count):
        if now[t] != OPEN:
            continue
        if estimate[t] < 0.0:
            estimate[t] = _estimate(t, bench)
        if v < 0 or estimate[t] < estimate[v]:
            v = t
    made = estimate[v] / size[v]
    if bench.filled[USED] + made > entries or bench.filled[FOLLOWED] + made > entries:
        return -1 - v
    if estimate[v] <= largest:
        return v
    for _ in range(DRAWN):
        t = random_below(bench.state, count)
        while now[t] != OPEN:
            t = (t + 1) % count
        if estimate[t] > estimate[v] and size[t] > 1:
            v = t
    return -1 - v


@compiled
def _hold(v: int, x: I, bench: Workspace) -> None:
    """Condition on local node v: it keeps its present label."""
    bench.now[v] = HELD
    at = bench.head[v]
    while at >= 0:
        j = bench.item[at]
        if bench.alive[j]:
            for d in range(bench.dims[j]):
                bench.estimate[bench.scope[j, d]] = -1.0
        at = bench.link[at]
    bench.new[v] = x[bench.members[v]]


@compiled
def _look_around(v: int, bench: Workspace) -> Any:
    """The open neighbours `around` local node v: their number, and their number of joint labels."""
    bench.filled[TICK] += 1
    tick = bench.filled[TICK]
    bench.seen[v] = tick
    n, product = 0, 1
    at = bench.head[v]
    while at >= 0:
        j = bench.item[at]
        if bench.alive[j]:
            for d in range(bench.dims[j]):
                u = bench.scope[j, d]
                if bench.now[u] == OPEN and bench.seen[u] != tick:
                    bench.seen[u] = tick
                    bench.around[n] = u
                    n += 1
                    product *= bench.size[u]
        at = bench.link[at]
    return n, product


@compiled
def _minimise_out(v: int, x: I, graph: Graph, bench: Workspace, theta: Any, buffer: F) -> None:
    """Eliminate local node v: replace its tables by their minimum over its labels, a table over its neighbours."""
    n, product = _look_around(v, bench)
    k, around = bench.size[v], bench.around
    for p in range(product):
        for a in range(k):
            buffer[p * k + a] = theta[v, a]
    at = bench.head[v]
    while at >= 0:
        j = bench.item[at]
        at = bench.link[at]
        if not bench.alive[j]:
            continue
        bench.alive[j] = False
        if bench.place[j] < 0:
            _add_edge(j, v, n, product, x, graph, bench, buffer)
        else:
            _add_table(j, v, n, product, x, bench, buffer)
    used, followed = bench.filled[USED], bench.filled[FOLLOWED]
    bench.own_dims[v], bench.own_place[v] = n, followed
    for d in range(n):
        bench.own_scope[v, d] = around[d]
        bench.estimate[around[d]] = -1.0
    for p in range(product):
        base, best = p * k, 0
        for a in range(1, k):
            if buffer[base + a] < buffer[base + best]:
                best = a
        bench.follow[followed + p] = best
        if n == 1:
            theta[around[0], p] += buffer[base + best]
        elif n > 1:
            bench.pool[used + p] = buffer[base + best]
    bench.filled[FOLLOWED] += product
    if n > 1:
        j = bench.filled[TABLES]
        bench.place[j], bench.dims[j], bench.alive[j] = used, n, True
        for d in range(n):
            bench.scope[j, d] = around[d]
            _link(around[d], j, bench)
        bench.filled[USED] += product
        bench.filled[TABLES] += 1
    bench.now[v] = GONE


@compiled
def _best_labels(count: int, mark: int, x: I, graph: Graph, bench: Workspace, largest: int) -> None:
    """The region's optimal labels `new`, held nodes excepted, all else fixed."""
    theta = _begin(count, mark, x, graph, bench)
    buffer = np.empty(largest + theta.shape[1])
    order, size, new = bench.order, bench.size, bench.new
    for ordered in range(count):
        v = _next(count, largest, bench)
        if v < 0:
            v = -1 - v
            _hold(v, x, bench)
        else:
            _minimise_out(v, x, graph, bench, theta, buffer)
        order[ordered] = v
    for o in range(count - 1, -1, -1):
        v = order[o]
        if bench.now[v] == GONE:
            p = 0
            for d in range(bench.own_dims[v]):
                p = p * size[bench.own_scope[v, d]] + new[bench.own_scope[v, d]]
            new[v] = bench.follow[bench.own_place[v] + p]


@compiled
def _add_edge(j: int, v: int, n: int, product: int, x: I, graph: Graph, bench: Workspace, buffer: F) -> None:
    """Add table j of local node v, an edge's costs, to `buffer`, over the `n` nodes around it and (fastest) v."""
    eoff, pairwise, width, koff, kind = graph.eoff, graph.pairwise, graph.width, graph.koff, graph.kind
    size, around = bench.size, bench.around
    e, k = -1 - bench.place[j], size[v]
    lower = bench.scope[j, 0] == v
    u = bench.scope[j, 1] if lower else bench.scope[j, 0]
    mine, other = (koff[2 * e], koff[2 * e + 1]) if lower else (koff[2 * e + 1], koff[2 * e])
    down, across = (width[e], 1) if lower else (1, width[e])
    if bench.now[u] == HELD:
        base = eoff[e] + kind[other + x[bench.members[u]]] * across
        for a in range(k):
            extra = pairwise[base + kind[mine + a] * down]
            for p in range(product):
                buffer[p * k + a] += extra
        return
    inner = 1
    for d in range(n - 1, -1, -1):
        if around[d] == u:
            break
        inner *= size[around[d]]
    for p in range(product):
        b = (p // inner) % size[u]
        base = eoff[e] + kind[other + b] * across
        for a in range(k):
            buffer[p * k + a] += pairwise[base + kind[mine + a] * down]


@compiled
def _add_table(j: int, v: int, n: int, product: int, x: I, bench: Workspace, buffer: F) -> None:
    """Add table j to `buffer`, over the `n` nodes around v and (fastest) v."""
    size, around, stride, at_label = bench.size, bench.around, bench.stride, bench.at_label
    pool, k = bench.pool, bench.size[v]
    base, step, own = bench.place[j], 1, 0
    for d in range(n):
        stride[d], at_label[d] = 0, 0
    for d in range(bench.dims[j] - 1, -1, -1):
        u = bench.scope[j, d]
        if u == v:
            own = step
        elif bench.now[u] == HELD:
            base += x[bench.members[u]] * step
        else:
            for z in range(n):
                if around[z] == u:
                    stride[z] = step
        step *= size[u]
    for p in range(product):
        for a in range(k):
            buffer[p * k + a] += pool[base + a * own]
        d = n - 1
        while d >= 0:
            at_label[d] += 1
            base += stride[d]
            if at_label[d] < size[around[d]]:
                break
            base -= stride[d] * size[around[d]]
            at_label[d] = 0
            d -= 1


@compiled
def _change(i: int, label: int, sign: float, x: I, change: F, graph: Graph, memory: Memory) -> None:
    """Add `sign` times the usage of node i (at `label`) and its edges to `change`, a difference array over rows."""
    low, high, width, koff = graph.low, graph.high, graph.width, graph.koff
    kind, first, edge = graph.kind, graph.first, graph.edge
    ifirst, start, stop, aoff, amount = memory.node_items
    for t in range(ifirst[i], ifirst[i + 1]):
        u = sign * amount[aoff[t] + label]
        change[start[t]] += u
        change[stop[t]] -= u
    ifirst, start, stop, aoff, amount = memory.edge_items
    for q in range(first[i], first[i + 1]):
        e = edge[q]
        if ifirst[e] == ifirst[e + 1]:
            continue
        a, b = (label, x[high[e]]) if low[e] == i else (x[low[e]], label)
        p = kind[koff[2 * e] + a] * width[e] + kind[koff[2 * e + 1] + b]
        for t in range(ifirst[e], ifirst[e + 1]):
            u = sign * amount[aoff[t] + p]
            change[start[t]] += u
            change[stop[t]] -= u


@compiled
def _edges_cost(i: int, x: I, graph: Graph) -> float:
    """What node i and its edges cost."""
    noff, unary, low, high, eoff = graph.noff, graph.unary, graph.low, graph.high, graph.eoff
    pairwise, width, koff, kind = graph.pairwise, graph.width, graph.koff, graph.kind
    first, edge = graph.first, graph.edge
    cost: float = unary[noff[i] + x[i]]
    for q in range(first[i], first[i + 1]):
        e = edge[q]
        cost += pairwise[eoff[e] + kind[koff[2 * e] + x[low[e]]] * width[e] + kind[koff[2 * e + 1] + x[high[e]]]]
    return cost


@compiled
def _connected(seed: int, mark: int, graph: Graph, bench: Workspace, part: I, stack: I) -> int:
    """The local nodes that change (`part` 0) and are connected with `seed`, in `stack`; their number. Sets `part`."""
    stack[0] = seed
    part[seed] = 1
    size, at = 1, 0
    while at < size:
        v = bench.members[stack[at]]
        at += 1
        for q in range(graph.first[v], graph.first[v + 1]):
            u = graph.high[graph.edge[q]] if graph.side[q] == 0 else graph.low[graph.edge[q]]
            if bench.stamp[u] == mark and part[bench.place_of[u]] == 0:
                part[bench.place_of[u]] = 1
                stack[size] = bench.place_of[u]
                size += 1
    return size


@compiled
def _take(count: int, x: I, used: F, memory: Memory, graph: Graph, bench: Workspace, rule: Rule) -> float:
    """Move the region to its new labels, each connected component of the change by itself, where `rule` accepts it.

    Components do not touch, so their costs add up; `used` follows. Returns by how much the costs fell.
    """
    members, part, stack, new = bench.members, bench.head, bench.order, bench.new
    limit, rows = memory.room, len(used)
    for t in range(count):
        part[t] = 0 if new[t] != x[members[t]] else -1
    gained = 0.0
    change = np.zeros(rows + 1)
    for seed in range(count):
        if part[seed] != 0:
            continue
        size = _connected(seed, bench.marks[0], graph, bench, part, stack)
        change[:] = 0.0
        fall = 0.0
        for z in range(size):  # one by one: each step counts its own edges before and after
            t = stack[z]
            v = members[t]
            fall += _edges_cost(v, x, graph)
            _change(v, x[v], -1.0, x, change, graph, memory)
            x[v], new[t] = new[t], x[v]
            fall -= _edges_cost(v, x, graph)
            _change(v, x[v], 1.0, x, change, graph, memory)
        fits = fall > rule.smallest
        more = 0.0
        if fits:
            for r in range(rows):
                more += change[r]
                if rule.strict and more > 0.0 and used[r] + more > limit[r]:
                    fits = False
                    break
        if fits:
            more = 0.0
            for r in range(rows):
                more += change[r]
                used[r] += more
            gained += fall
        else:
            for z in range(size - 1, -1, -1):
                t = stack[z]
                x[members[t]], new[t] = new[t], x[members[t]]
    return gained


@compiled
def move_regions(
    x: I, memory: Memory, graph: Graph, used: F, bench: Workspace, trials: int, most: int, rule: Rule
) -> float:
    """Improve a choice in place: `trials` random regions of up to `most` nodes get their optimal labels.

    `graph` holds the costs, which may include multipliers times usage; `used` is the usage of `x` and follows it.
    Returns by how much the costs fell.
    """
    n = len(graph.noff) - 1
    gained = 0.0
    for _ in range(trials):
        bench.marks[0] += 1
        count = _ball(random_below(bench.state, n), most, bench.marks[0], graph, bench)
        _best_labels(count, bench.marks[0], x, graph, bench, rule.largest)
        gained += _take(count, x, used, memory, graph, bench, rule)
    return gained
