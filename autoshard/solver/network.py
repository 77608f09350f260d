"""The working form of a problem: a graph of cost tables that presolve shrinks, with the undo stack of its steps.

Arrays in a `Network` are immutable by convention: every step makes new ones, and results are memoised by the
identity of their inputs, so that the equal matrices of repeated layers stay one object and are processed once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import numpy as np

from autoshard.solver.objective import LIMIT_SLACK
from autoshard.solver.problem import Array, Problem

Span = tuple[int, int]
"""Memory rows `first <= row < last`."""
Undo = Callable[[list[int]], None]
"""Turns a choice of the smaller network into one of the larger, in place."""
T = TypeVar("T")


class ImpossibleError(Exception):
    """The network is infeasible: at `node`, or at point of time `time`; both None if only as a whole."""

    def __init__(self, *, node: int | None = None, time: int | None = None) -> None:
        """Name the place."""
        super().__init__("no choice exists")
        self.node, self.time = node, time


class Memo:
    """Memo of pure functions of arrays, keyed by the identity of the arrays (which it keeps alive)."""

    def __init__(self, parent: Memo | None = None) -> None:
        """An empty memo that also looks things up in `parent`, to which it adds nothing."""
        self._known: dict[tuple[Any, ...], tuple[tuple[Array, ...], Any]] = {}
        self._parent = parent

    def _find(self, key: tuple[Any, ...]) -> tuple[tuple[Array, ...], Any] | None:
        hit = self._known.get(key)
        return self._parent._find(key) if hit is None and self._parent is not None else hit

    def get(self, key: tuple[Any, ...], arrays: tuple[Array, ...], make: Callable[..., T]) -> T:
        """`make(*arrays)`, memoised; `key` names the function and its other parameters."""
        full = (*key, *map(id, arrays))
        hit = self._known.get(full) if self._parent is None else self._find(full)
        if hit is None:
            hit = (arrays, make(*arrays))
            self._known[full] = hit
        value: T = hit[1]
        return value

    def transposed(self, matrix: Array) -> Array:
        """`matrix.T`, the same object every time (and back)."""

        def make(matrix: Array) -> Array:
            other = np.ascontiguousarray(matrix.T)
            self._known[("T", id(other))] = ((other,), matrix)
            return other

        return self.get(("T",), (matrix,), make)

    def intern(self, array: Array) -> Array:
        """One object for all arrays of equal bytes."""
        key = ("same", array.shape, array.tobytes())
        hit = self._find(key)
        if hit is None:
            hit = self._known[key] = ((array,), array)
        value: Array = hit[1]
        return value


class Network:
    """Nodes with cost vectors, at most one cost matrix per pair of nodes, memory terms on nodes and pairs.

    Attributes:
        cost: per node a vector over its strategies, or None once the node is eliminated.
        adj: `adj[u][v]` has shape (strategies of u, strategies of v); `adj[v][u]` is its transpose.
        node_terms: per node, bytes by span of memory rows; every vector has minimum 0.
        edge_terms: per pair u < v, bytes by span of memory rows, shape as `adj[u][v]`.
        room: per memory row its right-hand side: the bytes left to the terms.
        times: per memory row the point of time it stands for.
        offset: constant term of the cost.
    """

    def __init__(self) -> None:
        """Empty; use `Network.of`."""
        self.cost: list[Array | None] = []
        self.adj: list[dict[int, Array]] = []
        self.node_terms: list[dict[Span, Array]] = []
        self.edge_terms: dict[tuple[int, int], dict[Span, Array]] = {}
        self.room: Array = np.empty(0)
        self.times: np.ndarray = np.empty(0, np.int64)
        self.slack = 0.0
        self.offset = 0.0
        self.memo = Memo()
        self._undo: list[Undo] = []

    @classmethod
    def of(cls, problem: Problem, *, memory: bool = True) -> Network:
        """The network of a problem; `memory=False` drops the memory rows."""
        net = cls()
        intern = net.memo.intern
        seen: dict[int, Array] = {}  # by identity first: hashing the bytes of each of many shared matrices is slow

        def array(given: Array) -> Array:
            if id(given) not in seen:
                seen[id(given)] = intern(np.ascontiguousarray(given, dtype=np.float64))
            return seen[id(given)]

        net.cost = [array(c) for c in problem.node_costs]
        net.adj = [{} for _ in net.cost]
        net.node_terms = [{} for _ in net.cost]
        for (u, v), matrix in zip(problem.edges, problem.edge_costs, strict=True):
            net.join(u, v, array(matrix))
        if memory and problem.limit is not None:
            net._read_usages(problem, array)
        return net

    def _read_usages(self, problem: Problem, array: Callable[[Array], Array]) -> None:
        """One memory row per segment of time between consecutive starts and ends of usages."""
        assert problem.limit is not None
        usages = [u for u in (*problem.node_usages, *problem.edge_usages) if u.start < u.end and np.any(u.amount)]
        if not usages:
            return
        whole = all(bool(np.all(u.amount == np.floor(u.amount))) for u in usages)
        self.slack = 0.0 if whole else abs(problem.limit) * LIMIT_SLACK
        bounds = np.unique(np.array([(u.start, u.end) for u in usages], dtype=np.int64))
        self.times = bounds[:-1]
        self.room = np.full(len(self.times), float(problem.limit))
        for usages_of, on_edges in ((problem.node_usages, False), (problem.edge_usages, True)):
            for usage in usages_of:
                if usage.start >= usage.end or not np.any(usage.amount):
                    continue
                first, last = (int(x) for x in np.searchsorted(bounds, (usage.start, usage.end)))
                if on_edges:
                    u, v = problem.edges[usage.index]
                    self.add_edge_term(u, v, (first, last), array(usage.amount))
                else:
                    self.add_node_term(usage.index, (first, last), array(usage.amount))

    def copy(self, *, memory: bool = True, passing: bool = False) -> Network:
        """An independent network over the same arrays, with an empty undo stack.

        What is memoised on a `passing` copy is dropped with it.
        """
        other = Network()
        other.cost = list(self.cost)
        other.adj = [dict(a) for a in self.adj]
        other.offset, other.memo, other.slack = self.offset, Memo(self.memo) if passing else self.memo, self.slack
        other.node_terms = [dict(t) if memory else {} for t in self.node_terms]
        if memory:
            other.edge_terms = {pair: dict(t) for pair, t in self.edge_terms.items()}
            other.room, other.times = self.room.copy(), self.times
        return other

    def priced(self, prices: Array) -> Network:
        """The Lagrangian relaxation: memory rows move into the costs, at `prices[row]` per byte.

        Its minimum is a lower bound for this network when no price is negative.
        """
        other = self.copy(memory=False)
        weight = np.concatenate(([0.0], np.cumsum(prices)))
        for i in self.alive:
            for (first, last), amount in self.node_terms[i].items():
                if weight[last] > weight[first]:
                    other.add_node_cost(i, amount * (weight[last] - weight[first]))
        for (u, v), terms in self.edge_terms.items():
            extra = sum((a * (weight[last] - weight[first]) for (first, last), a in terms.items()), np.zeros(()))
            if np.any(extra):
                other.join(u, v, other.memo.intern(np.asarray(extra)))
        other.offset -= float(prices @ (self.room + self.slack))
        return other

    # --- reading -----------------------------------------------------------------------------------------------------
    @property
    def alive(self) -> list[int]:
        """Nodes not eliminated, in order."""
        return [i for i, c in enumerate(self.cost) if c is not None]

    def costs(self, node: int) -> Array:
        """The cost vector of a node that is not eliminated."""
        cost = self.cost[node]
        assert cost is not None
        return cost

    def size(self, node: int) -> int:
        """Number of strategies."""
        return len(self.costs(node))

    def has_memory(self, node: int) -> bool:
        """Whether the node occurs in any memory row."""
        return bool(self.node_terms[node]) or any(self.pair_terms(node, v) for v in self.adj[node])

    def pair_terms(self, u: int, v: int) -> dict[Span, Array]:
        """Memory terms of a pair, oriented as (smaller node, larger node)."""
        return self.edge_terms.get((min(u, v), max(u, v)), {})

    def expand(self, choice: Iterable[int]) -> list[int]:
        """Postsolve: extend a choice of the present network (any value for eliminated nodes) to the original one."""
        full = list(choice)
        for undo in reversed(self._undo):
            undo(full)
        return full

    def value(self, choice: list[int]) -> float:
        """Cost of a choice of the present network, `offset` included."""
        total = self.offset
        for i in self.alive:
            total += float(self.costs(i)[choice[i]])
            total += sum(float(m[choice[i], choice[j]]) for j, m in self.adj[i].items() if j > i)
        return total

    def usage(self, choice: list[int]) -> Array:
        """Bytes used per memory row, to compare with `room`."""
        change = np.zeros(len(self.room) + 1)
        for i in self.alive:
            for (first, last), amount in self.node_terms[i].items():
                change[first] += amount[choice[i]]
                change[last] -= amount[choice[i]]
        for (u, v), terms in self.edge_terms.items():
            for (first, last), matrix in terms.items():
                change[first] += matrix[choice[u], choice[v]]
                change[last] -= matrix[choice[u], choice[v]]
        used: Array = np.cumsum(change)[:-1]
        return used

    def fits(self, choice: list[int]) -> bool:
        """Whether every memory row holds."""
        return bool(np.all(self.usage(choice) <= self.room + self.slack))

    # --- steps -------------------------------------------------------------------------------------------------------
    def join(self, u: int, v: int, matrix: Array) -> None:
        """Add a cost matrix (strategies of u, strategies of v); parallel edges merge."""
        old = self.adj[u].get(v)
        if old is not None:
            a, b = (old, matrix) if id(old) < id(matrix) else (matrix, old)
            matrix = self.memo.get(("add",), (a, b), self._sum)
        self.adj[u][v] = matrix
        self.adj[v][u] = self.memo.transposed(matrix)

    def _sum(self, a: Array, b: Array) -> Array:
        return self.memo.intern(a + b)

    def cut(self, u: int, v: int) -> None:
        """Remove the cost matrix of a pair (its memory terms, if any, must be gone)."""
        del self.adj[u][v], self.adj[v][u]

    def add_node_cost(self, node: int, extra: Array) -> None:
        """Add a vector to a node's costs."""
        self.cost[node] = self.memo.intern(self.costs(node) + extra)

    def add_node_term(self, node: int, span: Span, amount: Array) -> None:
        """Add a memory term; its minimum moves into `room`."""
        low = float(amount.min())
        if low != 0.0:
            self.room[span[0] : span[1]] -= low
            amount = self.memo.get(("less", low), (amount,), lambda a: self.memo.intern(a - low))
        if amount.any():
            old = self.node_terms[node].get(span)
            if old is not None:
                total = old + amount
                del self.node_terms[node][span]
                self.add_node_term(node, span, self.memo.intern(total))
            else:
                self.node_terms[node][span] = amount

    def add_edge_term(self, u: int, v: int, span: Span, amount: Array) -> None:
        """Add a memory term of a pair, `amount` of shape (strategies of u, strategies of v)."""
        if u > v:
            u, v, amount = v, u, self.memo.transposed(amount)
        if v not in self.adj[u]:
            self.join(u, v, self.memo.intern(np.zeros((self.size(u), self.size(v)))))
        terms = self.edge_terms.setdefault((u, v), {})
        old = terms.pop(span, None)
        if old is not None:
            a, b = old, amount
            amount = self.memo.get(("add",), (a, b), self._sum)
        # A pair's terms that depend on one node only move to that node, so as not to keep the other from elimination.
        rows = amount.min(axis=1)
        rest = amount - rows[:, None]
        columns = rest.min(axis=0)
        rest = self.memo.intern(rest - columns[None, :])
        if rest.any():
            terms[span] = rest
        if not terms:
            del self.edge_terms[u, v]
        self.add_node_term(u, span, self.memo.intern(rows))
        self.add_node_term(v, span, self.memo.intern(columns))

    def take_pair_terms(self, u: int, v: int) -> list[tuple[Span, Array]]:
        """Remove and return the memory terms of a pair, as (strategies of u, strategies of v)."""
        terms = self.edge_terms.pop((min(u, v), max(u, v)), {})
        return [(span, m if u < v else self.memo.transposed(m)) for span, m in terms.items()]

    def restrict(self, node: int, keep: np.ndarray) -> None:
        """Restrict a node to these strategies (increasing indices)."""
        if len(keep) == self.size(node):
            return
        if len(keep) == 0:
            raise ImpossibleError(node=node)
        key = keep.tobytes()
        self.cost[node] = self.memo.intern(self.costs(node)[keep])
        for v, matrix in list(self.adj[node].items()):
            small = self.memo.get(("rows", key), (matrix,), lambda m: self.memo.intern(m[keep]))
            self.adj[node][v] = small
            self.adj[v][node] = self.memo.transposed(small)
        terms, self.node_terms[node] = self.node_terms[node], {}
        for span, amount in terms.items():
            self.add_node_term(node, span, self.memo.intern(amount[keep]))
        for v in list(self.adj[node]):
            for span, amount in self.take_pair_terms(node, v):
                self.add_edge_term(node, v, span, self.memo.intern(amount[keep]))

        def undo(choice: list[int]) -> None:
            choice[node] = int(keep[choice[node]])

        self._undo.append(undo)

    def contract(self, node: int, into: int, follow: np.ndarray) -> None:
        """Eliminate `node`, which takes strategy `follow[s]` whenever `into` takes s; `into` takes over its terms."""
        between = self.adj[into][node]
        picks = np.arange(len(follow))
        self.add_node_cost(into, self.costs(node)[follow] + between[picks, follow])
        inner = self.take_pair_terms(into, node)
        self.cut(into, node)
        terms, self.node_terms[node] = self.node_terms[node], {}
        for span, amount in inner:
            self.add_node_term(into, span, self.memo.intern(amount[picks, follow]))
        for span, amount in terms.items():
            self.add_node_term(into, span, self.memo.intern(amount[follow]))
        key = follow.tobytes()
        for v, matrix in list(self.adj[node].items()):
            outer = self.take_pair_terms(node, v)
            self.cut(node, v)
            moved = self.memo.get(("rows", key), (matrix,), lambda m: self.memo.intern(m[follow]))
            self.join(into, v, moved)
            for span, amount in outer:
                self.add_edge_term(into, v, span, self.memo.intern(amount[follow]))
        self.cost[node] = None

        def undo(choice: list[int]) -> None:
            choice[node] = int(follow[choice[into]])

        self._undo.append(undo)

    def remove(self, node: int, undo: Undo) -> None:
        """Eliminate a node whose costs and edges the caller has moved elsewhere; `undo` goes on the stack."""
        for v in list(self.adj[node]):
            self.cut(node, v)
        self.cost[node] = None
        self._undo.append(undo)

    def keep_rows(self, keep: np.ndarray) -> None:
        """Drop the memory rows that are not in the mask `keep`."""
        if keep.all():
            return
        position = np.concatenate(([0], np.cumsum(keep)))

        def shrink(terms: dict[Span, Array]) -> dict[Span, Array]:
            out: dict[Span, Array] = {}
            for (first, last), amount in terms.items():
                span = int(position[first]), int(position[last])
                if span[0] < span[1]:
                    out[span] = self.memo.intern(out[span] + amount) if span in out else amount
            return out

        self.room, self.times = self.room[keep], self.times[keep]
        self.node_terms = [shrink(t) for t in self.node_terms]
        self.edge_terms = {pair: small for pair, t in self.edge_terms.items() if (small := shrink(t))}
        for node, terms in enumerate(self.node_terms):  # merged terms may have a common part again
            self.node_terms[node] = {}
            for span, amount in terms.items():
                self.add_node_term(node, span, amount)


def least(values: Array) -> float:
    """Minimum; infinite for empty arrays."""
    return float(values.min()) if values.size else math.inf
