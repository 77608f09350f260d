"""The hot loops of the bound and of the local search, compiled by numba over flat arrays.

Node i has labels `noff[i]:noff[i+1]` of `unary`. Edge e joins `low[e] < high[e]`; its matrix is
`pairwise[eoff[e]:]`, row-major with `low` slow. Entry q of `first[i]:first[i+1]` is an edge `edge[q]` of node i, with
`side[q]` 0 when i is its lower end. `message[moff[2 e + side]:]` is the message that arrives at that end.
Memory item t (a term of a node or of an edge) adds `amount[aoff[t]:]`, by label or pair, to rows `start[t]:stop[t]`;
items `ifirst[o]:ifirst[o + 1]` are those of owner o.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np

T = TypeVar("T")


def compiled(function: Callable[..., T]) -> Callable[..., T]:
    """`function` compiled by numba, kept on disk between processes."""
    made: Callable[..., T] = numba.njit(cache=True)(function)
    return made


F = Any  # a float64 vector; numba infers the types
I = Any  # noqa: E741 - an int64 vector


@compiled
def sweep(
    backward: bool,
    noff: I,
    unary: F,
    low: I,
    high: I,
    eoff: I,
    pairwise: F,
    first: I,
    edge: I,
    side: I,
    moff: I,
    message: F,
    x: I,
) -> float:
    """One pass of TRW-S (Kolmogorov, PAMI 2006) in the order of nodes or against it; returns a valid bound.

    Reparametrised, the cost is sum_i theta_i + sum_e theta_e with theta_i = unary + messages and
    theta_e = pairwise - both messages. Each node gives the share gamma of theta_i to each later edge; the bound is the
    sum of the minima of what nodes and edges then have, and holds for any messages. `x` becomes the rounded choice.
    """
    n = len(noff) - 1
    bound = 0.0
    widest = 0
    for i in range(n):
        widest = max(widest, noff[i + 1] - noff[i])
    theta, taste, out = np.empty(widest), np.empty(widest), np.empty(widest)
    for step in range(n):
        i = n - 1 - step if backward else step
        k = noff[i + 1] - noff[i]
        later = 0
        for a in range(k):
            theta[a] = unary[noff[i] + a]
            taste[a] = theta[a]
        for q in range(first[i], first[i + 1]):
            e, s = edge[q], side[q]
            m = moff[2 * e + s]
            for a in range(k):
                theta[a] += message[m + a]
            if (s == 0) != backward:
                later += 1
                for a in range(k):
                    taste[a] += message[m + a]
            elif s == 1:
                base = eoff[e] + x[low[e]] * k
                for a in range(k):
                    taste[a] += pairwise[base + a]
            else:
                kj = noff[high[e] + 1] - noff[high[e]]
                base = eoff[e] + x[high[e]]
                for a in range(k):
                    taste[a] += pairwise[base + a * kj]
        best = 0
        least = theta[0]
        for a in range(1, k):
            if taste[a] < taste[best]:
                best = a
            least = min(least, theta[a])
        x[i] = best
        gamma = 1.0 / max(1, later, first[i + 1] - first[i] - later)
        bound += (1.0 - later * gamma) * least
        for q in range(first[i], first[i + 1]):
            e, s = edge[q], side[q]
            if (s == 0) == backward:
                continue
            m = moff[2 * e + s]
            o = moff[2 * e + 1 - s]
            j = high[e] if s == 0 else low[e]
            kj = noff[j + 1] - noff[j]
            base = eoff[e]
            if s == 0:
                for b in range(kj):
                    out[b] = np.inf
                for a in range(k):
                    t = gamma * theta[a] - message[m + a]
                    row = base + a * kj
                    for b in range(kj):
                        out[b] = min(out[b], t + pairwise[row + b])
            else:
                for b in range(kj):
                    row = base + b * k
                    value = np.inf
                    for a in range(k):
                        value = min(value, gamma * theta[a] - message[m + a] + pairwise[row + a])
                    out[b] = value
            least = out[0]
            for b in range(1, kj):
                least = min(least, out[b])
            bound += least
            for b in range(kj):
                message[o + b] = out[b] - least
    return bound


@compiled
def slacks(
    noff: I,
    unary: F,
    low: I,
    high: I,
    eoff: I,
    pairwise: F,
    first: I,
    edge: I,
    side: I,
    moff: I,
    message: F,
    poff: I,
    node_slack: F,
    pair_slack: F,
) -> float:
    """By how much each label and pair exceeds the bound at least, and the bound (of these messages, any messages).

    The reparametrisation of a forward `sweep`: `node_slack` is what lies on the node and its edges; `pair_slack` what
    lies on the pair, both its nodes and all their edges (edge e from `poff[e]` on, where `pairwise` may be shared).
    """
    n = len(noff) - 1
    bound = 0.0
    node_slack[:] = 0.0
    for i in range(n):  # first: what nodes keep, and the share they give to later edges
        k = noff[i + 1] - noff[i]
        theta = unary[noff[i] : noff[i + 1]].copy()
        later = 0
        for q in range(first[i], first[i + 1]):
            m = moff[2 * edge[q] + side[q]]
            for a in range(k):
                theta[a] += message[m + a]
            if side[q] == 0:
                later += 1
        gamma = 1.0 / max(1, later, first[i + 1] - first[i] - later)
        least = theta.min()
        keep = 1.0 - later * gamma
        bound += keep * least
        for a in range(k):
            node_slack[noff[i] + a] += keep * (theta[a] - least)
        for q in range(first[i], first[i + 1]):
            if side[q] == 1:
                continue
            e = edge[q]
            j = high[e]
            kj = noff[j + 1] - noff[j]
            lowest = np.inf
            for a in range(k):
                t = gamma * theta[a] - message[moff[2 * e] + a]
                for b in range(kj):
                    p = poff[e] + a * kj + b
                    pair_slack[p] = t + pairwise[eoff[e] + a * kj + b] - message[moff[2 * e + 1] + b]
                    lowest = min(lowest, pair_slack[p])
            bound += lowest
            for p in range(poff[e], poff[e] + k * kj):
                pair_slack[p] -= lowest
    for e in range(len(low)):  # then: the least an edge adds to each label of its ends
        i, j = low[e], high[e]
        k, kj = noff[i + 1] - noff[i], noff[j + 1] - noff[j]
        for a in range(k):
            least = np.inf
            for b in range(kj):
                least = min(least, pair_slack[poff[e] + a * kj + b])
            node_slack[noff[i] + a] += least
        for b in range(kj):
            least = np.inf
            for a in range(k):
                least = min(least, pair_slack[poff[e] + a * kj + b])
            node_slack[noff[j] + b] += least
    for e in range(len(low)):  # at last: a pair has its own excess and that of its ends' other edges
        i, j = low[e], high[e]
        k, kj = noff[i + 1] - noff[i], noff[j + 1] - noff[j]
        row_least, column_least = np.full(k, np.inf), np.full(kj, np.inf)
        for a in range(k):
            for b in range(kj):
                value = pair_slack[poff[e] + a * kj + b]
                row_least[a] = min(row_least[a], value)
                column_least[b] = min(column_least[b], value)
        for a in range(k):
            for b in range(kj):
                others = node_slack[noff[i] + a] - row_least[a] + node_slack[noff[j] + b] - column_least[b]
                pair_slack[poff[e] + a * kj + b] += others
    return bound


@compiled
def price(weight: F, start: I, stop: I, aoff: I, amount: F, target: I, values: F) -> None:
    """Add `amount` times the summed row weights (`weight` is a prefix sum) of every memory item to its labels."""
    for t in range(len(start)):
        w = weight[stop[t]] - weight[start[t]]
        if w != 0.0:
            for a in range(aoff[t + 1] - aoff[t]):
                values[target[t] + a] += w * amount[aoff[t] + a]


@compiled
def usage_of(x: I, rows: int, node_items: Any, edge_items: Any, noff: I, low: I, high: I) -> F:
    """Bytes per memory row under the choice `x`."""
    change = np.zeros(rows + 1)
    ifirst, start, stop, aoff, amount = node_items
    for i in range(len(noff) - 1):
        for t in range(ifirst[i], ifirst[i + 1]):
            u = amount[aoff[t] + x[i]]
            change[start[t]] += u
            change[stop[t]] -= u
    ifirst, start, stop, aoff, amount = edge_items
    for e in range(len(low)):
        kj = noff[high[e] + 1] - noff[high[e]]
        for t in range(ifirst[e], ifirst[e + 1]):
            u = amount[aoff[t] + x[low[e]] * kj + x[high[e]]]
            change[start[t]] += u
            change[stop[t]] -= u
    return np.cumsum(change)[:-1]


@compiled
def _shift(
    i: int,
    label: int,
    sign: float,
    x: I,
    used: F,
    node_items: Any,
    edge_items: Any,
    noff: I,
    low: I,
    high: I,
    first: I,
    edge: I,
) -> None:
    """Add `sign` times what node i (with label `label`) and its edges use to `used`."""
    ifirst, start, stop, aoff, amount = node_items
    for t in range(ifirst[i], ifirst[i + 1]):
        u = sign * amount[aoff[t] + label]
        if u != 0.0:
            for r in range(start[t], stop[t]):
                used[r] += u
    ifirst, start, stop, aoff, amount = edge_items
    for q in range(first[i], first[i + 1]):
        e = edge[q]
        kj = noff[high[e] + 1] - noff[high[e]]
        pair = label * kj + x[high[e]] if low[e] == i else x[low[e]] * kj + label
        for t in range(ifirst[e], ifirst[e + 1]):
            u = sign * amount[aoff[t] + pair]
            if u != 0.0:
                for r in range(start[t], stop[t]):
                    used[r] += u


@compiled
def _label_costs(
    i: int, skip: int, x: I, noff: I, unary: F, low: I, high: I, eoff: I, pairwise: F, first: I, edge: I, out: F
) -> None:
    """Cost of each label of node i given its neighbours, the edge `skip` left out."""
    k = noff[i + 1] - noff[i]
    for a in range(k):
        out[a] = unary[noff[i] + a]
    for q in range(first[i], first[i + 1]):
        e = edge[q]
        if e == skip:
            continue
        if low[e] == i:
            kj = noff[high[e] + 1] - noff[high[e]]
            for a in range(k):
                out[a] += pairwise[eoff[e] + a * kj + x[high[e]]]
        else:
            for a in range(k):
                out[a] += pairwise[eoff[e] + x[low[e]] * k + a]


@compiled
def descend(
    x: I,
    room: F,
    node_items: Any,
    edge_items: Any,
    noff: I,
    unary: F,
    low: I,
    high: I,
    eoff: I,
    pairwise: F,
    first: I,
    edge: I,
    smallest: float,
    rounds: int,
) -> None:
    """Improve a feasible choice in place by moves of one node and of the two nodes of an edge, until none is left."""
    widest = 0
    for i in range(len(noff) - 1):
        widest = max(widest, noff[i + 1] - noff[i])
    mine, other = np.empty(widest), np.empty(widest)
    used = usage_of(x, len(room), node_items, edge_items, noff, low, high)
    for _ in range(rounds):
        moved = False
        for i in range(len(noff) - 1):
            k = noff[i + 1] - noff[i]
            _label_costs(i, -1, x, noff, unary, low, high, eoff, pairwise, first, edge, mine)
            old = x[i]
            while True:  # from the cheapest label on
                a = 0
                for b in range(1, k):
                    if mine[b] < mine[a]:
                        a = b
                if not mine[a] < mine[old] - smallest:
                    break
                _shift(i, old, -1.0, x, used, node_items, edge_items, noff, low, high, first, edge)
                _shift(i, a, 1.0, x, used, node_items, edge_items, noff, low, high, first, edge)
                if np.all(used <= room):
                    x[i] = a
                    moved = True
                    break
                _shift(i, a, -1.0, x, used, node_items, edge_items, noff, low, high, first, edge)
                _shift(i, old, 1.0, x, used, node_items, edge_items, noff, low, high, first, edge)
                mine[a] = np.inf
        if moved:
            continue
        for e in range(len(low)):
            i, j = low[e], high[e]
            k, kj = noff[i + 1] - noff[i], noff[j + 1] - noff[j]
            _label_costs(i, e, x, noff, unary, low, high, eoff, pairwise, first, edge, mine)
            _label_costs(j, e, x, noff, unary, low, high, eoff, pairwise, first, edge, other)
            now = mine[x[i]] + other[x[j]] + pairwise[eoff[e] + x[i] * kj + x[j]]
            for a in range(k):
                for b in range(kj):
                    value = mine[a] + other[b] + pairwise[eoff[e] + a * kj + b]
                    if value < now - smallest and (a != x[i] or b != x[j]):
                        old, before = x[i], x[j]
                        _shift(i, old, -1.0, x, used, node_items, edge_items, noff, low, high, first, edge)
                        _shift(i, a, 1.0, x, used, node_items, edge_items, noff, low, high, first, edge)
                        x[i] = a
                        _shift(j, before, -1.0, x, used, node_items, edge_items, noff, low, high, first, edge)
                        _shift(j, b, 1.0, x, used, node_items, edge_items, noff, low, high, first, edge)
                        x[j] = b
                        if np.all(used <= room):
                            now = value
                            moved = True
                        else:
                            _shift(j, b, -1.0, x, used, node_items, edge_items, noff, low, high, first, edge)
                            _shift(j, before, 1.0, x, used, node_items, edge_items, noff, low, high, first, edge)
                            x[j] = before
                            _shift(i, a, -1.0, x, used, node_items, edge_items, noff, low, high, first, edge)
                            _shift(i, old, 1.0, x, used, node_items, edge_items, noff, low, high, first, edge)
                            x[i] = old
        if not moved:
            break


@compiled
def repair(
    x: I,
    room: F,
    node_items: Any,
    edge_items: Any,
    noff: I,
    unary: F,
    low: I,
    high: I,
    eoff: I,
    pairwise: F,
    first: I,
    edge: I,
    steps: int,
) -> bool:
    """Bring a choice within the room in place: again and again the move with the least cost per byte taken off the
    overflowing rows (never one that raises the overflow). Whether it succeeded."""
    widest = 0
    for i in range(len(noff) - 1):
        widest = max(widest, noff[i + 1] - noff[i])
    mine = np.empty(widest)
    rows = len(room)
    used = usage_of(x, rows, node_items, edge_items, noff, low, high)
    banned = np.zeros(len(noff) - 1, np.bool_)
    overflow = np.maximum(used - room, 0.0).sum()
    for _ in range(steps):
        if overflow == 0.0:
            return True
        weight = np.zeros(rows + 1)
        for r in range(rows):
            weight[r + 1] = weight[r] + (1.0 if used[r] > room[r] else 0.0)
        best_i, best_a, best_ratio = -1, -1, np.inf
        for i in range(len(noff) - 1):
            if banned[i]:
                continue
            touches = False  # most nodes use nothing where it overflows: their labels need no look
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
            _label_costs(i, -1, x, noff, unary, low, high, eoff, pairwise, first, edge, mine)
            for a in range(k):
                gain = 0.0
                ifirst, start, stop, aoff, amount = node_items
                for t in range(ifirst[i], ifirst[i + 1]):
                    w = weight[stop[t]] - weight[start[t]]
                    gain += w * (amount[aoff[t] + x[i]] - amount[aoff[t] + a])
                ifirst, start, stop, aoff, amount = edge_items
                for q in range(first[i], first[i + 1]):
                    e = edge[q]
                    kj = noff[high[e] + 1] - noff[high[e]]
                    for t in range(ifirst[e], ifirst[e + 1]):
                        w = weight[stop[t]] - weight[start[t]]
                        if low[e] == i:
                            p, c = aoff[t] + x[i] * kj + x[high[e]], aoff[t] + a * kj + x[high[e]]
                        else:
                            p, c = aoff[t] + x[low[e]] * kj + x[i], aoff[t] + x[low[e]] * kj + a
                        gain += w * (amount[p] - amount[c])
                if gain > 0.0:
                    ratio = (mine[a] - mine[x[i]]) / gain
                    if ratio < best_ratio:
                        best_i, best_a, best_ratio = i, a, ratio
        if best_i < 0:
            return False
        old = x[best_i]
        _shift(best_i, old, -1.0, x, used, node_items, edge_items, noff, low, high, first, edge)
        _shift(best_i, best_a, 1.0, x, used, node_items, edge_items, noff, low, high, first, edge)
        now = np.maximum(used - room, 0.0).sum()
        if now < overflow:
            x[best_i] = best_a
            overflow = now
        else:  # it only moves the overflow elsewhere
            _shift(best_i, best_a, -1.0, x, used, node_items, edge_items, noff, low, high, first, edge)
            _shift(best_i, old, 1.0, x, used, node_items, edge_items, noff, low, high, first, edge)
            banned[best_i] = True
    return bool(np.all(used <= room))
