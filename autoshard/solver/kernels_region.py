"""Moves of whole regions, compiled by numba: the names and the layout of arrays are those of `kernels.py`.

The labels of a region (a ball around a node, hundreds of nodes) are chosen anew, exactly, all else fixed, by bucket
elimination (Bertelè and Brioschi, 1972). Where a table would get too large, nodes of the region are held at the labels
they have (conditioning on a cutset, Dechter, 1990): a few per cent of them, others each time.

Local node t of a region is `members[t]`. Table j is over the local nodes `scope[j, :dims[j]]`, the last one fastest,
with its values in `pool` from `place[j]` on (-1 - e: those of edge e). `head`, `link` and `item` are linked lists of
each local node's tables.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from autoshard.solver.kernels import F, Graph, I, compiled
from autoshard.solver.kernels_tree import random_below

DIMS = 12
"""Nodes of a table at most."""
DRAWN = 8
"""Of so many nodes drawn at random, that with the largest table is held."""
OPEN, GONE, HELD = 0, 1, 2


def bench(nodes: int, edges: int, entries: int) -> tuple[Any, ...]:
    """Room to work in: for regions of up to all `nodes`, whose tables have `entries` numbers at most."""
    tables = edges + nodes
    lists = (edges * 2 + nodes * DIMS) if nodes else 1
    per_node = [np.zeros(nodes, np.int64) for _ in range(7)]
    stamp = np.full(nodes, -1, np.int64)
    scope, own_scope = np.zeros((tables, DIMS), np.int64), np.zeros((nodes, DIMS), np.int64)
    per_table = np.zeros(tables, np.int64), np.zeros(tables, np.int64), np.zeros(tables, np.bool_)
    links = np.zeros(lists, np.int64), np.zeros(lists, np.int64)
    pools = np.empty(entries), np.empty(entries, np.int32)
    return stamp, *per_node, np.zeros(nodes), scope, own_scope, *per_table, *links, *pools


@compiled
def _ball(seed: int, most: int, state: I, graph: Graph, stamp: I, mark: int, members: I) -> int:
    """The nodes nearest to `seed`, up to `most`, stamped with `mark`; how many."""
    _, _, low, high, _, _, _, _, _, first, edge, side = graph
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
def _label_costs(v: int, mark: int, stamp: I, x: I, graph: Graph, out: F) -> None:
    """Cost of each label of node v and of its edges to nodes outside the region."""
    noff, unary, low, high, eoff, pairwise, width, koff, kind, first, edge, side = graph
    k = noff[v + 1] - noff[v]
    for a in range(k):
        out[a] = unary[noff[v] + a]
    for q in range(first[v], first[v + 1]):
        e = edge[q]
        u = high[e] if side[q] == 0 else low[e]
        if stamp[u] == mark:
            continue
        if side[q] == 0:
            base, c = eoff[e] + kind[koff[2 * e + 1] + x[u]], koff[2 * e]
            for a in range(k):
                out[a] += pairwise[base + kind[c + a] * width[e]]
        else:
            base, c = eoff[e] + kind[koff[2 * e] + x[u]] * width[e], koff[2 * e + 1]
            for a in range(k):
                out[a] += pairwise[base + kind[c + a]]


@compiled
def _estimate(t: int, size: I, now: I, seen: I, tick: int, head: I, link: I, item: I, work: Any) -> float:
    """Additions per table to minimise local node t out; infinite with too many neighbours."""
    scope, dims, alive = work
    product, n = float(size[t]), 0
    seen[t] = tick
    at = head[t]
    while at >= 0:
        j = item[at]
        if alive[j]:
            for d in range(dims[j]):
                u = scope[j, d]
                if now[u] == OPEN and seen[u] != tick:
                    seen[u] = tick
                    product *= size[u]
                    n += 1
        at = link[at]
    return product if n < DIMS else np.inf


@compiled
def _best_labels(count: int, mark: int, x: I, graph: Graph, state: I, limit: int, room: Any, new: I) -> None:
    """The cheapest labels `new` (per local node) of the region, but for nodes that are held, all else fixed."""
    stamp, members, place_of, size, now, head, order, seen, estimate = room[:9]
    scope, own_scope, dims, place, alive, link, item, pool, follow = room[9:]
    noff, _, _, high, _, _, _, _, _, first, edge, side = graph
    entries = len(pool)
    widest = 1
    for t in range(count):
        v = members[t]
        place_of[v] = t
        size[t] = noff[v + 1] - noff[v]
        widest = max(widest, size[t])
        head[t], now[t], seen[t] = -1, OPEN, -1
        estimate[t] = -1.0
    theta = np.empty((count, widest))
    buffer = np.empty(limit + widest)
    own_dims, own_place = np.zeros(count, np.int64), np.zeros(count, np.int64)
    around, stride, at_label = np.empty(DIMS, np.int64), np.empty(DIMS, np.int64), np.empty(DIMS, np.int64)
    tables = links = used = followed = 0
    for t in range(count):
        v = members[t]
        _label_costs(v, mark, stamp, x, graph, theta[t])
        for q in range(first[v], first[v + 1]):
            e = edge[q]
            if side[q] != 0 or stamp[high[e]] != mark:
                continue
            s = place_of[high[e]]
            scope[tables, 0], scope[tables, 1] = t, s
            dims[tables], place[tables], alive[tables] = 2, -1 - e, True  # values of edges stay where they are
            for w in (t, s):
                link[links], item[links] = head[w], tables
                head[w] = links
                links += 1
            tables += 1
    work = scope, dims, alive
    tick = ordered = 0
    while ordered < count:
        v = -1
        for t in range(count):
            if now[t] != OPEN:
                continue
            if estimate[t] < 0.0:
                tick += 1
                estimate[t] = _estimate(t, size, now, seen, tick, head, link, item, work)
            if v < 0 or estimate[t] < estimate[v]:
                v = t
        made = estimate[v] / size[v]
        full = used + made > entries or followed + made > entries
        if estimate[v] > limit or full:
            if not full:
                for _ in range(DRAWN):
                    t = random_below(state, count)
                    while now[t] != OPEN:
                        t = (t + 1) % count
                    if estimate[t] > estimate[v] and size[t] > 1:
                        v = t
            now[v] = HELD
            order[ordered] = v
            ordered += 1
            at = head[v]
            while at >= 0:
                j = item[at]
                if alive[j]:
                    for d in range(dims[j]):
                        estimate[scope[j, d]] = -1.0
                at = link[at]
            new[v] = x[members[v]]
            continue
        tick += 1
        seen[v] = tick
        n, product, k = 0, 1, size[v]
        at = head[v]
        while at >= 0:
            j = item[at]
            if alive[j]:
                for d in range(dims[j]):
                    u = scope[j, d]
                    if now[u] == OPEN and seen[u] != tick:
                        seen[u] = tick
                        around[n] = u
                        n += 1
                        product *= size[u]
            at = link[at]
        for p in range(product):
            for a in range(k):
                buffer[p * k + a] = theta[v, a]
        at = head[v]
        while at >= 0:
            j = item[at]
            at = link[at]
            if not alive[j]:
                continue
            alive[j] = False
            if place[j] < 0:
                _add_edge(j, -1 - place[j], v, n, product, around, scope, size, now, members, x, graph, buffer)
            else:
                _add_table(
                    j, v, n, product, around, stride, at_label, scope, dims, place, size, now, members, x, pool, buffer
                )
        own_dims[v], own_place[v] = n, followed
        for d in range(n):
            own_scope[v, d] = around[d]
            estimate[around[d]] = -1.0
        for p in range(product):
            base, best = p * k, 0
            for a in range(1, k):
                if buffer[base + a] < buffer[base + best]:
                    best = a
            follow[followed + p] = best
            if n == 1:
                theta[around[0], p] += buffer[base + best]
            elif n > 1:
                pool[used + p] = buffer[base + best]
        followed += product
        if n > 1:
            place[tables], dims[tables], alive[tables] = used, n, True
            for d in range(n):
                scope[tables, d] = around[d]
                link[links], item[links] = head[around[d]], tables
                head[around[d]] = links
                links += 1
            used += product
            tables += 1
        now[v] = GONE
        order[ordered] = v
        ordered += 1
    for o in range(count - 1, -1, -1):
        v = order[o]
        if now[v] == GONE:
            p = 0
            for d in range(own_dims[v]):
                p = p * size[own_scope[v, d]] + new[own_scope[v, d]]
            new[v] = follow[own_place[v] + p]


@compiled
def _add_edge(
    j: int,
    e: int,
    v: int,
    n: int,
    product: int,
    around: I,
    scope: I,
    size: I,
    now: I,
    members: I,
    x: I,
    graph: Graph,
    buffer: F,
) -> None:
    """Add the costs of edge e (table j) of local node v to `buffer`, over `around` and (fastest) v."""
    _, _, _, _, eoff, pairwise, width, koff, kind, _, _, _ = graph
    k = size[v]
    lower = scope[j, 0] == v
    u = scope[j, 1] if lower else scope[j, 0]
    mine, other = (koff[2 * e], koff[2 * e + 1]) if lower else (koff[2 * e + 1], koff[2 * e])
    down, across = (width[e], 1) if lower else (1, width[e])
    if now[u] == HELD:
        base = eoff[e] + kind[other + x[members[u]]] * across
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
def _add_table(
    j: int,
    v: int,
    n: int,
    product: int,
    around: I,
    stride: I,
    at_label: I,
    scope: I,
    dims: I,
    place: I,
    size: I,
    now: I,
    members: I,
    x: I,
    pool: F,
    buffer: F,
) -> None:
    """Add table j to `buffer`, over `around` and (fastest) v."""
    k = size[v]
    base, step, own = place[j], 1, 0
    for d in range(n):
        stride[d], at_label[d] = 0, 0
    for d in range(dims[j] - 1, -1, -1):
        u = scope[j, d]
        if u == v:
            own = step
        elif now[u] == HELD:
            base += x[members[u]] * step
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
def _change(i: int, label: int, sign: float, x: I, change: F, graph: Graph, node_items: Any, edge_items: Any) -> None:
    """Add `sign` times what node i (with `label`) and its edges use to `change`, the differences of rows."""
    _, _, low, high, _, _, width, koff, kind, first, edge, _ = graph
    ifirst, start, stop, aoff, amount = node_items
    for t in range(ifirst[i], ifirst[i + 1]):
        u = sign * amount[aoff[t] + label]
        change[start[t]] += u
        change[stop[t]] -= u
    ifirst, start, stop, aoff, amount = edge_items
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
    noff, unary, low, high, eoff, pairwise, width, koff, kind, first, edge, _ = graph
    cost: float = unary[noff[i] + x[i]]
    for q in range(first[i], first[i + 1]):
        e = edge[q]
        cost += pairwise[eoff[e] + kind[koff[2 * e] + x[low[e]]] * width[e] + kind[koff[2 * e + 1] + x[high[e]]]]
    return cost


@compiled
def _take(
    count: int, mark: int, x: I, used: F, limit: F, strict: bool, smallest: float, graph: Graph, items: Any, room: Any,
    new: I
) -> float:  # fmt: skip
    """Give the region its new labels, each connected part of the change by itself: what fits and helps.

    Parts do not touch, so that their costs add up; `used` follows. Returns by how much the costs fell.
    """
    stamp, members, place_of, _, _, part, stack, _, _ = room[:9]
    node_items, edge_items = items
    _, _, low, high, _, _, _, _, _, first, edge, side = graph
    rows = len(used)
    for t in range(count):
        part[t] = 0 if new[t] != x[members[t]] else -1
    gained = 0.0
    change = np.zeros(rows + 1)
    for seed in range(count):
        if part[seed] != 0:
            continue
        stack[0] = seed
        part[seed] = 1
        size, at = 1, 0
        while at < size:
            v = members[stack[at]]
            at += 1
            for q in range(first[v], first[v + 1]):
                u = high[edge[q]] if side[q] == 0 else low[edge[q]]
                if stamp[u] == mark and part[place_of[u]] == 0:
                    part[place_of[u]] = 1
                    stack[size] = place_of[u]
                    size += 1
        change[:] = 0.0
        fall = 0.0
        for z in range(size):  # one after the other: each step counts its own edges before and after
            t = stack[z]
            v = members[t]
            fall += _edges_cost(v, x, graph)
            _change(v, x[v], -1.0, x, change, graph, node_items, edge_items)
            x[v], new[t] = new[t], x[v]
            fall -= _edges_cost(v, x, graph)
            _change(v, x[v], 1.0, x, change, graph, node_items, edge_items)
        fits = fall > smallest
        more = 0.0
        if fits:
            for r in range(rows):
                more += change[r]
                if strict and more > 0.0 and used[r] + more > limit[r]:
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
    x: I,
    limit: F,
    items: Any,
    graph: Graph,
    used: F,
    strict: bool,
    state: I,
    marks: I,
    trials: int,
    most: int,
    entries: int,
    smallest: float,
    room: Any,
    new: I,
) -> float:
    """Improve a choice in place: `trials` random regions of up to `most` nodes are given their best labels.

    `graph` holds the costs to improve, which may contain prices of memory; `used` is the usage of `x` and follows it;
    where `strict`, it stays within `limit` (rows above it do not rise). Returns by how much the costs fell.
    """
    n = len(graph[0]) - 1
    gained = 0.0
    for _ in range(trials):
        marks[0] += 1
        count = _ball(random_below(state, n), most, state, graph, room[0], marks[0], room[1])
        _best_labels(count, marks[0], x, graph, state, entries, room, new)
        gained += _take(count, marks[0], x, used, limit, strict, smallest, graph, items, room, new)
    return gained
