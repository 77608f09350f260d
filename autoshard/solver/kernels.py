"""The hot loops of dual ascent and local search, compiled by numba over flat arrays.

Node i has labels `noff[i]:noff[i+1]` of `unary`. Edge e joins `low[e] < high[e]`; side 0 is its lower end. Labels with
equal rows of a matrix share a *class* (a reshard cost depends on the sharding of one tensor: hundreds of strategies, a
dozen classes): label a of side s has class `kind[koff[2 e + s] + a]`; the matrix by class is `pairwise[eoff[e]:]`,
row-major, a row of `width[e]` entries per class of the lower end. Entry q of `first[i]:first[i+1]` is an edge
`edge[q]` of node i, with `side[q]` 0 when i is its lower end. `message[moff[2 e + side]:]` is the message, by class,
that arrives at that end. Memory item t (a term of a node or of an edge) adds `amount[aoff[t]:]`, by label or pair of
classes, to rows `start[t]:stop[t]`; items `ifirst[o]:ifirst[o + 1]` are those of owner o.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numba
import numpy as np

T = TypeVar("T")


def compiled(function: Callable[..., T]) -> Callable[..., T]:
    """`function` compiled by numba without the GIL and cached on disk: dual ascent and search run in two threads."""
    made: Callable[..., T] = numba.njit(cache=True, nogil=True)(function)
    return made


def inlined(function: Callable[..., T]) -> Callable[..., T]:
    """`compiled`, and inlined by its callers: for small functions in the hottest loops."""
    made: Callable[..., T] = numba.njit(cache=True, nogil=True, forceinline=True)(function)
    return made


F = Any  # a float64 vector; numba infers the types
I = Any  # noqa: E741 - an int64 vector


class Graph(NamedTuple):
    """A network as arrays; see the module's docstring."""

    noff: I
    unary: F
    low: I
    high: I
    eoff: I
    pairwise: F
    width: I
    koff: I
    kind: I
    first: I
    edge: I
    side: I
    moff: I


class Items(NamedTuple):
    """Memory items of all nodes, or of all edges; see the module's docstring."""

    ifirst: I
    start: I
    stop: I
    aoff: I
    amount: F


class Memory(NamedTuple):
    """Right-hand side of each memory row in bytes, and the terms of nodes and edges."""

    room: F
    node_items: Items
    edge_items: Items


@compiled
def _widest(noff: I) -> int:
    widest = 1
    for i in range(len(noff) - 1):
        widest = max(widest, noff[i + 1] - noff[i])
    return widest


@compiled
def _pair(e: int, a: int, b: int, width: I, koff: I, kind: I) -> int:
    """Index into edge e's matrix of labels a (lower end) and b (higher end)."""
    place: int = kind[koff[2 * e] + a] * width[e] + kind[koff[2 * e + 1] + b]
    return place


@inlined
def least(values: F, count: int) -> int:
    """Argmin of the first `count` values, the first of equals."""
    place = 0
    for a in range(1, count):
        if values[a] < values[place]:
            place = a
    return place


@inlined
def _received(i: int, backward: bool, graph: Graph, message: F, x: I, theta: F, rounding: F) -> int:
    """`theta`: node i's costs plus messages; `rounding`: costs given earlier nodes, plus later messages."""
    eoff, pairwise, width, koff, kind, moff = (
        graph.eoff,
        graph.pairwise,
        graph.width,
        graph.koff,
        graph.kind,
        graph.moff,
    )
    k = graph.noff[i + 1] - graph.noff[i]
    later = 0
    for a in range(k):
        theta[a] = graph.unary[graph.noff[i] + a]
        rounding[a] = theta[a]
    for q in range(graph.first[i], graph.first[i + 1]):
        e, s = graph.edge[q], graph.side[q]
        m, c = moff[2 * e + s], koff[2 * e + s]
        if (s == 0) != backward:
            later += 1
            for a in range(k):
                t = message[m + kind[c + a]]
                theta[a] += t
                rounding[a] += t
            continue
        for a in range(k):
            theta[a] += message[m + kind[c + a]]
        if s == 1:
            base = eoff[e] + kind[koff[2 * e] + x[graph.low[e]]] * width[e]
            for a in range(k):
                rounding[a] += pairwise[base + kind[c + a]]
        else:
            base = eoff[e] + kind[koff[2 * e + 1] + x[graph.high[e]]]
            for a in range(k):
                rounding[a] += pairwise[base + kind[c + a] * width[e]]
    return later


@inlined
def min_sum(base: int, s: int, mine: int, other: int, pairwise: F, given: F, out: F) -> None:
    """Min-sum message: the least of `given` plus the matrix, per class of the other end; this end is side s."""
    if s == 0:
        for b in range(other):
            out[b] = np.inf
        for a in range(mine):
            t, row = given[a], base + a * other
            for b in range(other):
                out[b] = min(out[b], t + pairwise[row + b])
    else:
        for b in range(other):
            row = base + b * mine
            one = two = three = four = np.inf  # each waits for the one before it: four at a time
            for a in range(0, mine - 3, 4):
                one = min(one, given[a] + pairwise[row + a])
                two = min(two, given[a + 1] + pairwise[row + a + 1])
                three = min(three, given[a + 2] + pairwise[row + a + 2])
                four = min(four, given[a + 3] + pairwise[row + a + 3])
            for a in range(mine - mine % 4, mine):
                one = min(one, given[a] + pairwise[row + a])
            out[b] = min(min(one, two), min(three, four))


@compiled
def sweep(backward: bool, graph: Graph, message: F, x: I, share: F, picked: I) -> float:
    """One TRW-S pass (Kolmogorov, PAMI 2006) in the order of nodes or against it; returns a valid bound.

    The reparametrised cost is sum_i theta_i + sum_e theta_e with theta_i = unary + messages and
    theta_e = pairwise - both messages. Each node gives the fraction gamma of theta_i to each later edge; the bound is
    the
    sum of the minima over nodes and edges. Their argmins, the fraction `share` of each label and the pairs `picked[e]`,
    are a supergradient of the bound. `x` receives the rounded choice.
    """
    noff, eoff, pairwise, koff, kind, moff = graph.noff, graph.eoff, graph.pairwise, graph.koff, graph.kind, graph.moff
    n = len(noff) - 1
    bound = 0.0
    widest = _widest(noff)
    theta, rounding, out, given = np.empty(widest), np.empty(widest), np.empty(widest), np.empty(widest)
    holder = np.empty(widest, np.int64)
    share[:] = 0.0
    for step in range(n):
        i = n - 1 - step if backward else step
        k, edges = noff[i + 1] - noff[i], graph.first[i + 1] - graph.first[i]
        later = _received(i, backward, graph, message, x, theta, rounding)
        x[i] = least(rounding, k)
        cheapest = least(theta, k)
        gamma = 1.0 / max(1, later, edges - later)
        bound += (1.0 - later * gamma) * theta[cheapest]
        share[noff[i] + cheapest] += 1.0 - later * gamma
        for q in range(graph.first[i], graph.first[i + 1]):
            e, s = graph.edge[q], graph.side[q]
            if (s == 0) == backward:
                continue
            m, c, o = moff[2 * e + s], koff[2 * e + s], moff[2 * e + 1 - s]
            mine, other = moff[2 * e + s + 1] - m, moff[2 * e + 2 - s] - o
            for a in range(mine):
                given[a] = np.inf
            for a in range(k):
                if gamma * theta[a] < given[kind[c + a]]:
                    given[kind[c + a]] = gamma * theta[a]
                    holder[kind[c + a]] = a
            for a in range(mine):
                given[a] -= message[m + a]
            min_sum(eoff[e], s, mine, other, pairwise, given, out)
            b = least(out, other)
            lowest = out[b]
            bound += lowest
            at, row, a = (eoff[e] + b, other, 0) if s == 0 else (eoff[e] + b * mine, 1, 0)
            for d in range(1, mine):
                if given[d] + pairwise[at + d * row] < given[a] + pairwise[at + a * row]:
                    a = d
            share[noff[i] + holder[a]] += gamma
            picked[e] = at + a * row - eoff[e]
            for b in range(other):
                message[o + b] = out[b] - lowest
    return bound


@compiled
def slacks(graph: Graph, message: F, poff: I, node_slack: F, pair_slack: F) -> float:
    """Reduced costs (a lower bound of the excess over the bound) of labels and pairs of classes, and the bound.

    Uses the reparametrisation of a backward `sweep`: after one, the bound equals that sweep's. `node_slack` counts what
    lies on the node and its edges; `pair_slack` the pair, both its nodes and all their edges (edge e from `poff[e]` on,
    where `pairwise` may be shared).
    """
    bound = _own_slacks(graph, message, poff, node_slack, pair_slack)
    noff, low, high, koff, kind = graph.noff, graph.low, graph.high, graph.koff, graph.kind
    widest = _widest(noff)
    row_least, column_least, row_node, column_node = (
        np.empty(widest), np.empty(widest), np.empty(widest), np.empty(widest),
    )  # fmt: skip
    for e in range(len(low)):  # the least an edge adds to each label of its ends
        _edge_least(e, graph, poff, pair_slack, row_least, column_least)
        for a in range(noff[low[e] + 1] - noff[low[e]]):
            node_slack[noff[low[e]] + a] += row_least[kind[koff[2 * e] + a]]
        for b in range(noff[high[e] + 1] - noff[high[e]]):
            node_slack[noff[high[e]] + b] += column_least[kind[koff[2 * e + 1] + b]]
    for e in range(len(low)):  # last: a pair has its own excess and that of its ends' other edges
        other = graph.width[e]
        mine = (poff[e + 1] - poff[e]) // other
        _edge_least(e, graph, poff, pair_slack, row_least, column_least)
        row_node[:mine], column_node[:other] = np.inf, np.inf
        for a in range(noff[low[e] + 1] - noff[low[e]]):
            t = kind[koff[2 * e] + a]
            row_node[t] = min(row_node[t], node_slack[noff[low[e]] + a])
        for b in range(noff[high[e] + 1] - noff[high[e]]):
            t = kind[koff[2 * e + 1] + b]
            column_node[t] = min(column_node[t], node_slack[noff[high[e]] + b])
        for a in range(mine):
            for b in range(other):
                others = row_node[a] - row_least[a] + column_node[b] - column_least[b]
                pair_slack[poff[e] + a * other + b] += others
    return bound


@compiled
def _own_slacks(graph: Graph, message: F, poff: I, node_slack: F, pair_slack: F) -> float:
    """Reduced costs of nodes and of the shares they give to edges to earlier nodes; returns the sum of the minima."""
    noff, unary, eoff, pairwise, koff = graph.noff, graph.unary, graph.eoff, graph.pairwise, graph.koff
    kind, first, edge, side, moff = graph.kind, graph.first, graph.edge, graph.side, graph.moff
    bound = 0.0
    node_slack[:] = 0.0
    given = np.empty(_widest(noff))
    for i in range(len(noff) - 1):
        k = noff[i + 1] - noff[i]
        theta = unary[noff[i] : noff[i + 1]].copy()
        earlier = 0
        for q in range(first[i], first[i + 1]):
            m, c = moff[2 * edge[q] + side[q]], koff[2 * edge[q] + side[q]]
            for a in range(k):
                theta[a] += message[m + kind[c + a]]
            if side[q] == 1:
                earlier += 1
        gamma = 1.0 / max(1, earlier, first[i + 1] - first[i] - earlier)
        cheapest = theta.min()
        keep = 1.0 - earlier * gamma
        bound += keep * cheapest
        for a in range(k):
            node_slack[noff[i] + a] += keep * (theta[a] - cheapest)
        for q in range(first[i], first[i + 1]):
            if side[q] == 0:
                continue
            e = edge[q]
            c = koff[2 * e + 1]
            other, mine = moff[2 * e + 1] - moff[2 * e], moff[2 * e + 2] - moff[2 * e + 1]
            given[:mine] = np.inf
            for a in range(k):
                given[kind[c + a]] = min(given[kind[c + a]], gamma * theta[a])
            for a in range(k):  # a label keeps its excess over the best of its class
                node_slack[noff[i] + a] += gamma * theta[a] - given[kind[c + a]]
            for a in range(mine):
                given[a] -= message[moff[2 * e + 1] + a]
            lowest = np.inf
            for b in range(other):
                for a in range(mine):
                    p = poff[e] + b * mine + a
                    pair_slack[p] = given[a] + pairwise[eoff[e] + b * mine + a] - message[moff[2 * e] + b]
                    lowest = min(lowest, pair_slack[p])
            bound += lowest
            for p in range(poff[e], poff[e + 1]):
                pair_slack[p] -= lowest
    return bound


@compiled
def _edge_least(e: int, graph: Graph, poff: I, pair_slack: F, row_least: F, column_least: F) -> None:
    """The least slack of edge e's pairs, per class of its lower end and of its higher one."""
    other = graph.width[e]
    mine = (poff[e + 1] - poff[e]) // other
    row_least[:mine], column_least[:other] = np.inf, np.inf
    for a in range(mine):
        for b in range(other):
            value = pair_slack[poff[e] + a * other + b]
            row_least[a] = min(row_least[a], value)
            column_least[b] = min(column_least[b], value)


@compiled
def price(weight: F, start: I, stop: I, aoff: I, amount: F, target: I, values: F) -> None:
    """Add `amount` times the multipliers of its rows (`weight`: their prefix sum) to every memory item's labels."""
    for t in range(len(start)):
        w = weight[stop[t]] - weight[start[t]]
        if w != 0.0:
            for a in range(aoff[t + 1] - aoff[t]):
                values[target[t] + a] += w * amount[aoff[t] + a]


@compiled
def usage_shared(share: F, picked: I, rows: int, noff: I, node_items: Items, edge_items: Items) -> F:
    """Usage per memory row of the supergradient of `sweep`'s bound: shares of labels and the pairs `picked`."""
    change = np.zeros(rows + 1)
    ifirst, start, stop, aoff, amount = node_items
    for i in range(len(noff) - 1):
        for t in range(ifirst[i], ifirst[i + 1]):
            u = 0.0
            for a in range(aoff[t + 1] - aoff[t]):
                u += share[noff[i] + a] * amount[aoff[t] + a]
            change[start[t]] += u
            change[stop[t]] -= u
    ifirst, start, stop, aoff, amount = edge_items
    for e in range(len(picked)):
        for t in range(ifirst[e], ifirst[e + 1]):
            change[start[t]] += amount[aoff[t] + picked[e]]
            change[stop[t]] -= amount[aoff[t] + picked[e]]
    return np.cumsum(change)[:-1]


@compiled
def usage_of(x: I, rows: int, graph: Graph, node_items: Items, edge_items: Items) -> F:
    """Bytes per memory row under the choice `x`."""
    noff, low, high, width, koff, kind = graph.noff, graph.low, graph.high, graph.width, graph.koff, graph.kind
    change = np.zeros(rows + 1)
    ifirst, start, stop, aoff, amount = node_items
    for i in range(len(noff) - 1):
        for t in range(ifirst[i], ifirst[i + 1]):
            u = amount[aoff[t] + x[i]]
            change[start[t]] += u
            change[stop[t]] -= u
    ifirst, start, stop, aoff, amount = edge_items
    for e in range(len(low)):
        if ifirst[e] < ifirst[e + 1]:
            p = _pair(e, x[low[e]], x[high[e]], width, koff, kind)
            for t in range(ifirst[e], ifirst[e + 1]):
                u = amount[aoff[t] + p]
                change[start[t]] += u
                change[stop[t]] -= u
    return np.cumsum(change)[:-1]


@compiled
def shift(i: int, label: int, sign: float, x: I, used: F, graph: Graph, node_items: Items, edge_items: Items) -> None:
    """Add `sign` times the usage of node i (at `label`) and its edges to `used`."""
    low, high, width = graph.low, graph.high, graph.width
    koff, kind, first, edge = graph.koff, graph.kind, graph.first, graph.edge
    ifirst, start, stop, aoff, amount = node_items
    for t in range(ifirst[i], ifirst[i + 1]):
        u = sign * amount[aoff[t] + label]
        if u != 0.0:
            for r in range(start[t], stop[t]):
                used[r] += u
    ifirst, start, stop, aoff, amount = edge_items
    for q in range(first[i], first[i + 1]):
        e = edge[q]
        if ifirst[e] == ifirst[e + 1]:
            continue
        a, b = (label, x[high[e]]) if low[e] == i else (x[low[e]], label)
        p = _pair(e, a, b, width, koff, kind)
        for t in range(ifirst[e], ifirst[e + 1]):
            u = sign * amount[aoff[t] + p]
            if u != 0.0:
                for r in range(start[t], stop[t]):
                    used[r] += u


@compiled
def _label_costs(i: int, skip: int, x: I, graph: Graph, out: F) -> None:
    """Cost of each label of node i given its neighbours, the edge `skip` left out."""
    noff, unary, low, high, eoff = graph.noff, graph.unary, graph.low, graph.high, graph.eoff
    pairwise, width, koff, kind, first, edge = (
        graph.pairwise,
        graph.width,
        graph.koff,
        graph.kind,
        graph.first,
        graph.edge,
    )
    k = noff[i + 1] - noff[i]
    for a in range(k):
        out[a] = unary[noff[i] + a]
    for q in range(first[i], first[i + 1]):
        e = edge[q]
        if e == skip:
            continue
        if low[e] == i:
            base, c = eoff[e] + kind[koff[2 * e + 1] + x[high[e]]], koff[2 * e]
            for a in range(k):
                out[a] += pairwise[base + kind[c + a] * width[e]]
        else:
            base, c = eoff[e] + kind[koff[2 * e] + x[low[e]]] * width[e], koff[2 * e + 1]
            for a in range(k):
                out[a] += pairwise[base + kind[c + a]]


@compiled
def _best_of_classes(costs: F, k: int, classes: int, base: int, kind: I, best: I) -> None:
    """The cheapest label of every class."""
    best[:classes] = -1
    for a in range(k):
        c = kind[base + a]
        if best[c] < 0 or costs[a] < costs[best[c]]:
            best[c] = a


@compiled
def descend(x: I, memory: Memory, graph: Graph, smallest: float) -> bool:
    """A pass of local search over a feasible choice, in place: moves of a node, else of an edge's two. Whether any."""
    noff, low, high = graph.noff, graph.low, graph.high
    eoff, pairwise, koff, kind = graph.eoff, graph.pairwise, graph.koff, graph.kind
    moff = graph.moff
    room, node_items, edge_items = memory
    widest = _widest(noff)
    mine, other = np.empty(widest), np.empty(widest)
    rows, columns = np.empty(widest, np.int64), np.empty(widest, np.int64)
    used = usage_of(x, len(room), graph, node_items, edge_items)
    moved = False
    for i in range(len(noff) - 1):
        k = noff[i + 1] - noff[i]
        _label_costs(i, -1, x, graph, mine)
        old = x[i]
        while True:  # from the cheapest label on
            a = 0
            for b in range(1, k):
                if mine[b] < mine[a]:
                    a = b
            if not mine[a] < mine[old] - smallest:
                break
            shift(i, old, -1.0, x, used, graph, node_items, edge_items)
            shift(i, a, 1.0, x, used, graph, node_items, edge_items)
            if np.all(used <= room):
                x[i] = a
                moved = True
                break
            shift(i, a, -1.0, x, used, graph, node_items, edge_items)
            shift(i, old, 1.0, x, used, graph, node_items, edge_items)
            mine[a] = np.inf
    if moved:
        return True
    for e in range(len(low)):
        i, j = low[e], high[e]
        k, kj = noff[i + 1] - noff[i], noff[j + 1] - noff[j]
        _label_costs(i, e, x, graph, mine)
        _label_costs(j, e, x, graph, other)
        ci, cj = moff[2 * e + 1] - moff[2 * e], moff[2 * e + 2] - moff[2 * e + 1]
        _best_of_classes(mine, k, ci, koff[2 * e], kind, rows)
        _best_of_classes(other, kj, cj, koff[2 * e + 1], kind, columns)
        now = mine[x[i]] + other[x[j]]
        now += pairwise[eoff[e] + kind[koff[2 * e] + x[i]] * cj + kind[koff[2 * e + 1] + x[j]]]
        for c in range(ci):
            for d in range(cj):
                a, b = rows[c], columns[d]
                value = mine[a] + other[b] + pairwise[eoff[e] + c * cj + d]
                if value < now - smallest and (a != x[i] or b != x[j]):
                    old, before = x[i], x[j]
                    shift(i, old, -1.0, x, used, graph, node_items, edge_items)
                    shift(i, a, 1.0, x, used, graph, node_items, edge_items)
                    x[i] = a
                    shift(j, before, -1.0, x, used, graph, node_items, edge_items)
                    shift(j, b, 1.0, x, used, graph, node_items, edge_items)
                    x[j] = b
                    if np.all(used <= room):
                        now = value
                        moved = True
                    else:
                        shift(j, b, -1.0, x, used, graph, node_items, edge_items)
                        shift(j, before, 1.0, x, used, graph, node_items, edge_items)
                        x[j] = before
                        shift(i, a, -1.0, x, used, graph, node_items, edge_items)
                        shift(i, old, 1.0, x, used, graph, node_items, edge_items)
                        x[i] = old
    return moved


@compiled
def repair(x: I, banned: Any, memory: Memory, graph: Graph, steps: int) -> int:
    """Repair a choice in place, greedily: the move with the least cost per byte taken off violated rows (never one that
    raises the violation; `banned` nodes do not move). 1: feasible, 0: out of `steps`, -1: no move is left."""
    noff, low, high, width = graph.noff, graph.low, graph.high, graph.width
    koff, kind, first, edge = graph.koff, graph.kind, graph.first, graph.edge
    room, node_items, edge_items = memory
    mine = np.empty(_widest(noff))
    rows = len(room)
    used = usage_of(x, rows, graph, node_items, edge_items)
    overflow = np.maximum(used - room, 0.0).sum()
    for _ in range(steps):
        if overflow == 0.0:
            return 1
        weight = np.zeros(rows + 1)
        for r in range(rows):
            weight[r + 1] = weight[r] + (1.0 if used[r] > room[r] else 0.0)
        best_i, best_a, best_ratio = -1, -1, np.inf
        for i in range(len(noff) - 1):
            if banned[i]:
                continue
            touches = False  # most nodes use nothing in violated rows: skip them
            ifirst, start, stop, aoff, amount = node_items
            for t in range(ifirst[i], ifirst[i + 1]):
                touches = touches or weight[stop[t]] > weight[start[t]]
            ifirst, start, stop, aoff, amount = edge_items
            for q in range(first[i], first[i + 1]):
                for t in range(ifirst[edge[q]], ifirst[edge[q] + 1]):
                    touches = touches or weight[stop[t]] > weight[start[t]]
            if not touches:
                continue
            k = noff[i + 1] - noff[i]
            _label_costs(i, -1, x, graph, mine)
            for a in range(k):
                gain = 0.0
                ifirst, start, stop, aoff, amount = node_items
                for t in range(ifirst[i], ifirst[i + 1]):
                    w = weight[stop[t]] - weight[start[t]]
                    gain += w * (amount[aoff[t] + x[i]] - amount[aoff[t] + a])
                ifirst, start, stop, aoff, amount = edge_items
                for q in range(first[i], first[i + 1]):
                    e = edge[q]
                    if ifirst[e] == ifirst[e + 1]:
                        continue
                    old, new = (x[i], x[high[e]]), (a, x[high[e]])
                    if low[e] != i:
                        old, new = (x[low[e]], x[i]), (x[low[e]], a)
                    p, c = _pair(e, *old, width, koff, kind), _pair(e, *new, width, koff, kind)
                    for t in range(ifirst[e], ifirst[e + 1]):
                        w = weight[stop[t]] - weight[start[t]]
                        gain += w * (amount[aoff[t] + p] - amount[aoff[t] + c])
                if gain > 0.0:
                    ratio = (mine[a] - mine[x[i]]) / gain
                    if ratio < best_ratio:
                        best_i, best_a, best_ratio = i, a, ratio
        if best_i < 0:
            return -1
        old_label = x[best_i]
        shift(best_i, old_label, -1.0, x, used, graph, node_items, edge_items)
        shift(best_i, best_a, 1.0, x, used, graph, node_items, edge_items)
        now = np.maximum(used - room, 0.0).sum()
        if now < overflow:
            x[best_i] = best_a
            overflow = now
        else:  # it only moves the violation elsewhere
            shift(best_i, best_a, -1.0, x, used, graph, node_items, edge_items)
            shift(best_i, old_label, 1.0, x, used, graph, node_items, edge_items)
            banned[best_i] = True
    return 1 if np.all(used <= room) else 0
