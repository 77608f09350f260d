"""Presolve: exact reductions of a `Network`. Each keeps an optimal choice; `Network.expand` undoes them.

arc consistency    drops strategies and pairs in no finite choice (also those that alone violate a memory row)
memory rows        drops redundant rows: those that cannot be violated, or that another row implies
contraction        merges a node whose strategy is a function of a neighbour's (as in a tie) into that neighbour
dominance          drops a strategy if another costs no more whatever the neighbours do, and uses no more at any time
modular edges      turns a matrix that is a row vector plus a column vector into node costs
low degree         eliminates a node with at most two neighbours and no memory (min-plus product)
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial

import numpy as np

from autoshard.solver.eliminate import joint_classes, merge_classes
from autoshard.solver.network import ImpossibleError, Network
from autoshard.solver.problem import Array

REDUCTION_ROUNDS, LEAST_REDUCED = 20, 1e-3
"""Most rounds of all reductions, and the share of strategies, nodes, edges or memory terms that a round which is worth
another drops.
"""
ROWS_KEPT = 0.98
"""Memory rows are looked through again while more than the rest of them go."""
HUB = 16
"""A node with more neighbours joins only a node with as many."""
COMPARED = 400
"""A node whose strategies some neighbour tells apart into more classes is not searched for dominated ones."""
MODULAR_ROUNDING = 1e-14
"""A matrix counts as modular when it is, to this fraction of its largest entry (a few units of float64 rounding)."""


def reduce(net: Network, *, eliminate: bool = True, dominance: bool = True, deadline: float = np.inf) -> None:
    """Apply all reductions until little changes, or until `deadline` (of `time.process_time`).

    Raises:
        ImpossibleError: the network is infeasible.
    """
    steps: list[Callable[..., None]] = [tighten_rows, arc_consistency, contract_functions, drop_modular_edges]
    steps += [remove_dominated] * dominance + [eliminate_low_degree] * eliminate
    for _ in range(REDUCTION_ROUNDS):
        before = _measure(net)
        for step in steps:
            step(net, deadline=deadline)
            if time.process_time() > deadline:
                return
        if not any(was - now > LEAST_REDUCED * was for was, now in zip(before, _measure(net), strict=True)):
            break
    arc_consistency(net, deadline=deadline)


def _measure(net: Network) -> tuple[int, int, int, int]:
    alive = net.alive
    terms = sum(len(net.node_terms[i]) for i in alive) + sum(len(t) for t in net.edge_terms.values())
    return len(alive), sum(net.size(i) for i in alive), sum(len(net.adj[i]) for i in alive), terms + len(net.room)


# --- memory rows -----------------------------------------------------------------------------------------------------
def tighten_rows(net: Network, *, deadline: float = np.inf) -> None:
    """Drop redundant memory rows; forbid strategies that alone violate one.

    Raises:
        ImpossibleError: a row is violated by every choice.
    """
    if (net.room < -net.slack).any():
        raise ImpossibleError(time=int(net.times[np.argmin(net.room)]))
    drop_rows(net, deadline=deadline)
    if len(net.room) and time.process_time() < deadline:
        _forbid_overflowing(net)


def drop_rows(net: Network, *, deadline: float = np.inf) -> None:
    """Drop redundant memory rows: those that cannot be violated, or that earlier or later rows imply.

    Row r implies a later row s when room grows from r to s by at least as much as usage can; the sum over the rows
    between of how much usage can rise bounds the latter. Likewise backward.
    """
    while len(net.room) and time.process_time() < deadline:
        count = len(net.room)
        net.keep_rows(_most_used(net) > net.room + net.slack)
        least = np.minimum.accumulate(net.room - np.cumsum(_rises(net)))
        net.keep_rows(np.append(True, least[1:] < least[:-1])[: len(least)])
        least = np.minimum.accumulate((net.room + np.cumsum(_rises(net, backward=True)))[::-1])[::-1]
        net.keep_rows(np.append(least[:-1] < least[1:], True)[: len(least)])
        if len(net.room) > ROWS_KEPT * count:
            break


def _most_used(net: Network) -> Array:
    """Per memory row the sum of the terms' largest amounts."""
    change = np.zeros(len(net.room) + 1)
    for terms in itertools.chain(net.node_terms, net.edge_terms.values()):
        for (first, last), amount in terms.items():
            high = net.memo.get(("max",), (amount,), _largest)
            change[first] += high
            change[last] -= high
    used: Array = np.cumsum(change)[:-1]
    return used


def _rises(net: Network, *, backward: bool = False) -> Array:
    """Per memory row an upper bound on its usage minus that of the row before (`backward`: the row after)."""
    sign = -1.0 if backward else 1.0
    rise = np.zeros(len(net.room) + 1)
    for terms in itertools.chain(net.node_terms, net.edge_terms.values()):
        changes: dict[int, Array] = {}
        for (first, last), amount in terms.items():
            changes[first] = changes[first] + amount if first in changes else amount
            changes[last] = changes[last] - amount if last in changes else -amount
        for row, change in changes.items():
            rise[row] += float((sign * change).max())
    return rise[:-1]


def _forbid_overflowing(net: Network) -> None:
    largest = float(net.room.max()) + net.slack

    def too_much(first: int, last: int, amount: Array) -> Array | None:
        # `largest` first: a minimum over a span is costly when there are many rows
        room = float(net.room[first:last].min()) + net.slack
        return np.where(amount > room, np.inf, 0.0) if room <= largest and bool((amount > room).any()) else None

    for node in net.alive:
        for (first, last), amount in net.node_terms[node].items():
            extra = too_much(first, last, amount)
            if extra is not None:
                net.add_node_cost(node, extra)
    for (u, v), terms in net.edge_terms.items():
        for (first, last), amount in terms.items():
            extra = too_much(first, last, amount)
            if extra is not None:
                net.join(u, v, net.memo.intern(extra))


class _Queue:
    """A FIFO queue of distinct nodes (the front of a dict gets slow to find)."""

    def __init__(self, nodes: Iterable[int]) -> None:
        self._nodes = deque(nodes)
        self._waiting = set(self._nodes)

    def __bool__(self) -> bool:
        return bool(self._nodes)

    def add(self, node: int) -> None:
        if node not in self._waiting:
            self._waiting.add(node)
            self._nodes.append(node)

    def pop(self) -> int:
        node = self._nodes.popleft()
        self._waiting.remove(node)
        return node


# --- forbidden choices -----------------------------------------------------------------------------------------------
def _finite(net: Network, matrix: Array) -> np.ndarray | None:
    """Mask of the finite entries, or None when all are."""

    def make(matrix: Array) -> np.ndarray | None:
        mask = np.isfinite(matrix)
        return None if mask.all() else mask

    return net.memo.get(("finite",), (matrix,), make)


def arc_consistency(net: Network, *, deadline: float = np.inf) -> None:
    """Drop strategies that are in no finite pair with some neighbour, to a fixpoint.

    Raises:
        ImpossibleError: a node has no strategy left.
    """
    keep = {i: np.isfinite(net.costs(i)) for i in net.alive}
    queue = _Queue(keep)  # of nodes whose neighbours are to be revised
    while queue and time.process_time() < deadline:
        u = queue.pop()
        if not keep[u].any():
            raise ImpossibleError(node=u)
        kept = keep[u].tobytes()
        for v, matrix in net.adj[u].items():
            found = net.memo.get(("supported", kept), (matrix,), partial(_supported, keep[u]))
            if found is None:
                continue
            supported = keep[v] & found
            if supported.sum() < keep[v].sum():
                keep[v] = supported
                queue.add(v)
    for i, mask in keep.items():
        if not mask.all():
            net.restrict(i, np.flatnonzero(mask))


def _supported(keep: np.ndarray, matrix: Array) -> np.ndarray | None:
    """Mask of the columns that have a finite entry in one of the rows to keep, or None when all have."""
    found = np.isfinite(matrix[keep]).any(axis=0)
    return None if found.all() else found


def settle(net: Network, node: int) -> None:
    """Move the edges of a node with one strategy into its neighbours' costs."""
    for v, matrix in list(net.adj[node].items()):
        terms = net.take_pair_terms(node, v)
        net.cut(node, v)
        net.add_node_cost(v, matrix[0])
        for span, amount in terms:
            net.add_node_term(v, span, net.memo.intern(amount[0]))


def contract_functions(net: Network, *, deadline: float = np.inf) -> None:
    """Merge every node whose strategy is a function of a neighbour's into that neighbour. Expects arc consistency."""

    def functional(matrix: Array) -> np.ndarray | None:
        mask = _finite(net, matrix)
        if matrix.shape[1] > 1:
            if mask is None or bool((mask.sum(axis=1) != 1).any()):
                return None
            return np.asarray(mask.argmax(axis=1))
        return np.zeros(matrix.shape[0], np.int64) if mask is None else None

    for node in net.alive:
        if net.size(node) == 1 and net.adj[node]:
            settle(net, node)
    queue = _Queue(net.alive)
    while queue and time.process_time() < deadline:
        u = queue.pop()
        if net.cost[u] is None:
            continue
        for v in list(net.adj[u]):
            if v not in net.adj[u]:
                continue
            matrix = net.adj[u][v]
            follow = net.memo.get(("functional",), (matrix,), functional)
            if follow is None:
                continue
            gone, kept = v, u
            if len(net.adj[v]) > max(HUB, len(net.adj[u])):  # moving a hub is costly: rather the other way round
                back = net.memo.get(("functional",), (net.adj[v][u],), functional)
                if back is None:
                    continue
                gone, kept, follow = u, v, back
            touched = list(net.adj[gone])
            net.contract(gone, kept, follow)
            for w in (kept, *touched):
                if net.cost[w] is not None:
                    queue.add(w)
            if gone == u:
                break


# --- dominance -------------------------------------------------------------------------------------------------------
def _worst_by_class(matrix: Array) -> tuple[Array, np.ndarray]:
    """(`[c, d]`: the most by which rows of class d exceed rows of class c, over the columns; class per row)."""
    matrix, (kind, _) = merge_classes(matrix)  # many strategies, few shardings of one tensor
    return _worst_change_of_classes(matrix), kind


def _worst_change(net: Network, matrix: Array) -> Array:
    """`[a, b]`: the most by which row b exceeds row a (memoised by class: that table is small)."""
    table, kind = net.memo.get(("worst",), (matrix,), _worst_by_class)
    worst: Array = table[np.ix_(kind, kind)]
    return worst


def _worst_change_of_classes(matrix: Array) -> Array:
    rows = len(matrix)
    out = np.empty((rows, rows))
    finite = np.isfinite(matrix)
    if finite.all():
        for b in range(rows):
            out[:, b] = (matrix[b] - matrix).max(axis=1)
    else:
        held = np.where(finite, matrix, 0.0)
        for b in range(rows):
            change = np.where(finite[b], held[b], np.inf) - held
            out[:, b] = np.where(finite, change, -np.inf).max(axis=1)
    return out


def merge_twins(net: Network, *, deadline: float = np.inf) -> None:
    """Of strategies with equal rows in every edge and memory term, keep the cheapest (the first of equals)."""
    for i in net.alive:
        if time.process_time() > deadline:
            break
        if net.size(i) < 2:
            continue
        ends, arrays = _around(net, i)
        keep = net.memo.get(("twins", *ends), arrays, partial(_cheapest_twins, net, ends))
        if len(keep) < net.size(i):
            net.restrict(i, keep)


def _around(net: Network, node: int) -> tuple[tuple[int, int, int], tuple[Array, ...]]:
    """A node's costs, matrices, own memory terms and pair terms (either way); how many there are of the middle three.

    The arrays of all copies of a layer are the same objects.
    """
    terms = net.node_terms[node].values()
    pairs: tuple[list[Array], list[Array]] = [], []
    for v in net.adj[node]:
        pairs[0 if node < v else 1].extend(net.pair_terms(node, v).values())
    ends = len(net.adj[node]), len(terms), len(pairs[0])
    return ends, (net.costs(node), *net.adj[node].values(), *terms, *pairs[0], *pairs[1])


def _cheapest_twins(net: Network, ends: tuple[int, int, int], cost: Array, *arrays: Array) -> np.ndarray:
    """The strategies to keep; `ends` and `arrays` as from `_around`."""
    matrices, terms, below = ends
    maps = [_classes(net, m)[1][0] for m in arrays[:matrices]]
    maps += [np.unique(a, return_inverse=True)[1] for a in arrays[matrices : matrices + terms]]
    maps += [_classes(net, term)[1][0 if place < below else 1] for place, term in enumerate(arrays[matrices + terms :])]
    kind, _ = joint_classes(maps or [np.zeros(len(cost), np.int64)])
    order = np.argsort(cost, kind="stable")
    _, first = np.unique(kind[order], return_index=True)
    return np.sort(order[first])


def remove_dominated(net: Network, *, deadline: float = np.inf) -> None:
    """Drop dominated strategies: another costs no more and uses no more, whatever the neighbours do."""
    merge_twins(net, deadline=deadline)
    for i in net.alive:
        if time.process_time() > deadline:
            break
        if net.size(i) < 2 or any(len(_classes(net, m)[0]) > COMPARED for m in net.adj[i].values()):
            continue
        ends, arrays = _around(net, i)
        keep = net.memo.get(("dominated", *ends), arrays, partial(_undominated, net, ends))
        if not keep.all():
            net.restrict(i, np.flatnonzero(keep))


def _classes(net: Network, matrix: Array) -> tuple[Array, tuple[np.ndarray, ...]]:
    found: tuple[Array, tuple[np.ndarray, ...]] = net.memo.get(("classes",), (matrix,), merge_classes)
    return found


def _undominated(net: Network, ends: tuple[int, int, int], cost: Array, *arrays: Array) -> np.ndarray:
    """Mask of the strategies to keep; `ends` and `arrays` as from `_around`."""
    matrices, terms, below = ends
    with np.errstate(invalid="ignore"):  # inf - inf: no comparison, NaN <= 0 is false
        worse: Array = cost[None, :] - cost[:, None]  # [a, b] <= 0: b replaces a
        for matrix in arrays[:matrices]:
            worse += _worst_change(net, matrix)
    better = worse <= 0.0
    np.fill_diagonal(better, False)
    keep = np.ones(len(cost), bool)
    if not better.any():
        return keep
    for amount in arrays[matrices : matrices + terms]:
        better &= amount[None, :] <= amount[:, None]
    for place, term in enumerate(arrays[matrices + terms :]):
        better &= _worst_change(net, term if place < below else net.memo.transposed(term)) <= 0.0
    for a in reversed(np.flatnonzero(better.any(axis=1)).tolist()):
        if (better[a] & keep).any():
            keep[a] = False
    return keep


def drop_modular_edges(net: Network, *, deadline: float = np.inf) -> None:
    """Turn modular matrices, r[a] + c[b], into node costs."""

    def split(matrix: Array) -> tuple[Array, Array] | None:
        if _finite(net, matrix) is not None:
            return None
        rows, columns = matrix[:, 0], matrix[0] - matrix[0, 0]
        error = np.abs(matrix - rows[:, None] - columns[None, :]).max()
        return (rows, columns) if error <= MODULAR_ROUNDING * np.abs(matrix).max() else None

    for u in net.alive:
        if time.process_time() > deadline:
            break
        for v, matrix in list(net.adj[u].items()):
            if v < u or net.pair_terms(u, v):
                continue
            parts = net.memo.get(("modular",), (matrix,), split)
            if parts is not None:
                net.cut(u, v)
                net.add_node_cost(u, parts[0])
                net.add_node_cost(v, parts[1])


def _largest(values: Array) -> float:
    return float(values.max())


# --- low degree ------------------------------------------------------------------------------------------------------
def _leaf(matrix: Array, cost: Array) -> Array:
    """`out[a] = min_b cost[b] + matrix[b, a]`."""
    return np.asarray((matrix + cost[:, None]).min(axis=0))


def min_plus(left: Array, middle: Array, right: Array) -> Array:
    """`out[a, c] = min_b left[a, b] + middle[b] + right[b, c]`."""
    left = left + middle
    out = np.full((left.shape[0], right.shape[1]), np.inf)
    for b in range(left.shape[1]):
        np.minimum(out, left[:, b, None] + right[b], out=out)
    return out


def eliminate_low_degree(net: Network, *, deadline: float = np.inf) -> None:
    """Eliminate the nodes with at most two neighbours and no memory terms."""
    heap = [(len(net.adj[i]), i) for i in net.alive if len(net.adj[i]) <= 2]
    heapq.heapify(heap)
    while heap and time.process_time() < deadline:
        degree, node = heapq.heappop(heap)
        if net.cost[node] is None or len(net.adj[node]) != degree or net.has_memory(node):
            continue
        cost, around = net.costs(node), dict(net.adj[node])
        undo = _decide_last(node, cost, around)
        if degree == 0:
            net.offset += float(cost.min())
            net.remove(node, undo)
            continue
        if degree == 1:
            ((u, matrix),) = around.items()
            best = net.memo.get(("leaf",), (matrix, cost), _leaf)
            net.remove(node, undo)
            net.add_node_cost(u, best)
        else:
            (u, left), (w, right) = around.items()
            back = net.memo.transposed(left)
            table = net.memo.get(
                ("through",),
                (back, cost, right),
                min_plus,
            )
            net.remove(node, undo)
            net.join(u, w, table)
        for v in around:
            if len(net.adj[v]) <= 2:
                heapq.heappush(heap, (len(net.adj[v]), v))


def _decide_last(node: int, cost: Array, around: dict[int, Array]) -> Callable[[list[int]], None]:
    """The undo step of an elimination: the best strategy given the neighbours' (the first of equals)."""

    def undo(choice: list[int]) -> None:
        total = cost
        for v, matrix in around.items():
            total = total + matrix[:, choice[v]]
        choice[node] = int(np.argmin(total))

    return undo
