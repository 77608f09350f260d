"""Lagrangian dual bound for problems of any size: TRW-S messages and one multiplier per memory row.

Relaxing memory row r with a multiplier lambda_r >= 0 adds lambda_r * usage to the costs and subtracts lambda_r * room
from the bound. What remains is a pairwise energy, whose local polytope TRW-S (Kolmogorov, PAMI 2006) bounds. Dual
ascent alternates a sweep of messages and a step of the multipliers (`multipliers.py`). The bound is valid for any
messages and multipliers.

From the same state `fix` does reduced-cost fixing: it forbids labels and pairs that provably cost more than the
incumbent.
"""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np

from autoshard.solver.eliminate import merge_classes
from autoshard.solver.multipliers import Ascent
from autoshard.solver.network import Network
from autoshard.solver.problem import Array

LARGEST_PAIRS = 80_000_000
"""Pairs are fixed only when there are at most this many of them: memory."""
LARGEST_MATRIX = 40_000
"""In larger matrices only whole strategies are forbidden: a mask of pairs would make each edge's matrix its own."""
REPAIRS = 400
"""Most moves of one repair: a choice that needs more is better rounded anew."""
CHECKED = 100
"""Sweeps after which the ascent ends unless they helped."""
STEPS, PASSES = 40, 200
"""Moves of a repair between two looks at the clock; most passes of local search over all nodes."""


class Dual:
    """Messages and multipliers of a network (which does not change), and the best of them so far.

    Attributes:
        bound: the best lower bound on the network's cost so far.
        x: primal rounding of the latest sweep (after `ascend`: of the best bound's sweep); it may violate memory rows.
    """

    def __init__(self, net: Network) -> None:
        """Start at zero messages and multipliers."""
        from autoshard.solver import kernels  # numba: imported only when a bound is asked for

        self._kernels: Any = kernels
        self.net = net
        self.nodes = np.array(net.alive, np.int64)
        n = len(self.nodes)
        position = {int(v): i for i, v in enumerate(self.nodes)}
        self.noff = np.concatenate(([0], np.cumsum([net.size(int(v)) for v in self.nodes]))).astype(np.int64)
        self.unary = np.concatenate([net.costs(int(v)) for v in self.nodes]) if n else np.empty(0)
        pairs = [(u, int(v)) for v in self.nodes for u in sorted(net.adj[int(v)]) if u < v]
        self.low = np.array([position[u] for u, _ in pairs], np.int64)
        self.high = np.array([position[v] for _, v in pairs], np.int64)
        self._edges = pairs
        self._read_matrices()
        self._read_rows()
        ends = np.concatenate((self.low, self.high))
        order = np.argsort(ends, kind="stable")
        self.first = np.searchsorted(ends[order], np.arange(n + 1)).astype(np.int64)
        self.edge = (order % max(1, len(pairs))).astype(np.int64)
        self.side = (order >= len(pairs)).astype(np.int64)
        self.message = np.zeros(int(self.moff[-1]))
        self.multipliers = np.zeros(len(self.room))
        self.x = np.zeros(n, np.int64)
        self._share, self._picked = np.zeros(len(self.unary)), np.zeros(len(pairs), np.int64)
        self.bound = -math.inf
        self._best = (self.message.copy(), self.multipliers.copy(), self.x.copy())
        self._latest = self.x.copy()
        self._ascent = Ascent()
        self._halted = False

    def _read_matrices(self) -> None:
        """Pool the matrices by class, each distinct one once, except those that memory terms make unique."""
        place: dict[int, tuple[int, int, int, tuple[int, int]]] = {}
        chunks: list[Array] = []
        kinds: list[np.ndarray] = []
        self._amounts: dict[int, list[Array]] = {}
        size = labels = 0
        count = len(self._edges)
        self.eoff, self.width = np.zeros(count, np.int64), np.zeros(count, np.int64)
        self.koff, classes = np.zeros(2 * count, np.int64), np.zeros(2 * count, np.int64)
        for i, (u, v) in enumerate(self._edges):
            matrix = self.net.adj[u][v]
            terms = self.net.edge_terms.get((u, v))
            known = None if terms else place.get(id(matrix))
            if known is None:
                if terms:
                    stack = [matrix, *(amount for _, amount in sorted(terms.items(), key=lambda item: item[0]))]
                    maps = tuple(self._joint(stack, axis) for axis in (0, 1))
                    first = [np.unique(m, return_index=True)[1] for m in maps]
                    small, *self._amounts[i] = [a[np.ix_(*first)] for a in stack]
                else:
                    small, maps = self.net.memo.get(("classes",), (matrix,), merge_classes)
                known = (size, labels, labels + len(maps[0]), small.shape)
                chunks.append(small.ravel())
                kinds += maps
                size, labels = size + small.size, labels + len(maps[0]) + len(maps[1])
                if not terms:
                    place[id(matrix)] = known
            self.eoff[i], self.koff[2 * i], self.koff[2 * i + 1], (classes[2 * i], classes[2 * i + 1]) = known
            self.width[i] = classes[2 * i + 1]
        self.kind = np.concatenate(kinds).astype(np.int64) if kinds else np.empty(0, np.int64)
        self.moff = np.concatenate(([0], np.cumsum(classes))).astype(np.int64)
        self.pairwise = np.concatenate(chunks) if chunks else np.empty(0)
        finite = [float(np.abs(c[np.isfinite(c)]).max(initial=0.0)) for c in chunks]
        # A value above the cost of any complete choice stands for infinity, which would make NaNs.
        unary = float(np.abs(self.unary[np.isfinite(self.unary)]).sum())
        self.forbidden = 4.0 * (unary + len(self._edges) * max(finite, default=0.0)) or 1e9
        self.unary = np.minimum(self.unary, self.forbidden)
        np.minimum(self.pairwise, self.forbidden, out=self.pairwise)

    def _joint(self, matrices: list[Array], axis: int) -> np.ndarray:
        """The coarsest classes of the labels along `axis` that keep the rows of all `matrices` apart."""
        maps = [self.net.memo.get(("classes",), (m,), merge_classes)[1][axis] for m in matrices]
        return np.unique(np.stack(maps), axis=1, return_inverse=True)[1].ravel()

    def _read_rows(self) -> None:
        net = self.net
        self.unit = max(1.0, float(np.abs(net.room).max(initial=0.0)))
        self.room = (net.room + net.slack) / self.unit

        def flat(
            groups: list[dict[tuple[int, int], Array]], at: np.ndarray, by_class: dict[int, list[Array]]
        ) -> tuple[Any, np.ndarray]:
            counts = [len(g) for g in groups]
            items: list[tuple[tuple[int, int], Array]] = []
            for i, group in enumerate(groups):
                spans = sorted(group)
                items += zip(spans, by_class.get(i, [group[s] for s in spans]), strict=True)
            ifirst = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
            start = np.array([s[0] for s, _ in items], np.int64)
            stop = np.array([s[1] for s, _ in items], np.int64)
            aoff = np.concatenate(([0], np.cumsum([a.size for _, a in items]))).astype(np.int64)
            amount = np.concatenate([a.ravel() for _, a in items]) / self.unit if items else np.empty(0)
            return self._kernels.Items(ifirst, start, stop, aoff, amount), np.repeat(at, counts).astype(np.int64)

        self.node_items, self._node_target = flat([net.node_terms[int(v)] for v in self.nodes], self.noff[:-1], {})
        self.edge_items, self._edge_target = flat(
            [net.edge_terms.get(p, {}) for p in self._edges], self.eoff, self._amounts
        )

    # --- ascent ------------------------------------------------------------------------------------------------------
    def _graph(self) -> Any:
        return self.priced(self.multipliers)

    def priced(self, multipliers: Array) -> Any:
        """The arrays of the Lagrangian relaxation (see `kernels.py`): costs plus multipliers times usage."""
        prefix: Array = np.concatenate(([0.0], np.cumsum(multipliers)))
        return self._shape(self._unary(prefix), self._pairwise(prefix))

    def _shape(self, unary: Array, pairwise: Array) -> Any:
        ends = (self.width, self.koff, self.kind, self.first, self.edge, self.side, self.moff)
        return self._kernels.Graph(self.noff, unary, self.low, self.high, self.eoff, pairwise, *ends)

    def _unary(self, prefix: Array) -> Array:
        values = self.unary.copy()
        if len(self.room):
            self._kernels.price(prefix, *self.node_items[1:], self._node_target, values)
        return values

    def _pairwise(self, prefix: Array) -> Array:
        if not len(self._edge_target):
            return self.pairwise
        values = self.pairwise.copy()
        self._kernels.price(prefix, *self.edge_items[1:], self._edge_target, values)
        return values

    def sweep(self) -> float:
        """Run a forward and a backward TRW-S pass; return the better bound, remembered where it is the best."""
        graph = self._graph()
        paid = float(self.multipliers @ self.room)
        bound = -math.inf
        for backward in (False, True):
            found = self._kernels.sweep(backward, graph, self.message, self.x, self._share, self._picked)
            found += self.net.offset - paid
            bound = max(bound, found)
        if bound > self.bound:
            self.bound = bound
            self._best = (self.message.copy(), self.multipliers.copy(), self.x.copy())
        return bound

    def ascend(self, sweeps: int, upper: float, *, deadline: float = math.inf, precision: float = 1e-7) -> None:
        """Dual ascent for up to `sweeps` sweeps; `upper` is the incumbent's cost (infinite without one).

        Stops early once the bound meets `upper`, or rises by less than `precision` of the gap in `CHECKED` sweeps.
        """
        checkpoint = self.bound
        self._halted = False
        for step in range(sweeps):
            bound = self.sweep()
            if self.bound >= upper or self.impossible or time.process_time() > deadline or self._halted:
                break
            gap = upper - bound if math.isfinite(upper) else 0.02 * abs(bound)
            if len(self.room):
                self._step(gap, upper)
            if (step + 1) % CHECKED == 0:
                if self.bound - checkpoint < precision * max(abs(gap), 1e-12 * abs(bound)):
                    break
                checkpoint = self.bound
        self._latest = self.x.copy()
        self._restore()

    @property
    def impossible(self) -> bool:
        """Whether the bound exceeds the cost of every choice of finite cost: the network is infeasible."""
        return self.bound - self.net.offset > 0.5 * self.forbidden

    def halt(self) -> None:
        """Stop an `ascend` that runs in another thread after its current sweep; the next `ascend` is not affected."""
        self._halted = True

    def _step(self, gap: float, upper: float) -> None:
        best_gap = upper - self.bound if math.isfinite(upper) else 0.02 * abs(self.bound)
        if self._ascent.trial_over(self.bound, best_gap):
            self._restore()
        used = self.usage() if self._ascent.rounded else self.shared()
        scale = max(abs(upper) if math.isfinite(upper) else abs(self.bound), best_gap)
        self.multipliers = self._ascent.step(self.multipliers, used - self.room, max(gap, 1e-3 * best_gap), scale)

    def _restore(self) -> None:
        message, multipliers, x = self._best
        self.message, self.multipliers, self.x = message.copy(), multipliers.copy(), x.copy()

    # --- choices -----------------------------------------------------------------------------------------------------
    def usage(self, x: np.ndarray | None = None) -> Array:
        """Usage per memory row of a choice (by default the rounded one), in units of `self.unit`."""
        x = self.x if x is None else x
        used: Array = self._kernels.usage_of(x, len(self.room), self._costs(), self.node_items, self.edge_items)
        return used

    @property
    def best_multipliers(self) -> Array:
        """The multipliers of the best bound, in cost per `self.unit`."""
        return self._best[1]

    def shared(self) -> Array:
        """Usage per memory row in the latest pass's relaxed solution, in units of `self.unit`: the supergradient."""
        used: Array = self._kernels.usage_shared(
            self._share, self._picked, len(self.room), self.noff, self.node_items, self.edge_items
        )
        return used

    def prices(self, times: np.ndarray) -> Array:
        """The best multipliers, in cost per byte, of the memory rows at these points of time (else 0)."""
        by_time = dict(zip(self.net.times.tolist(), (self._best[1] / self.unit).tolist(), strict=True))
        return np.array([by_time.get(t, 0.0) for t in times.tolist()])

    def memory(self) -> Any:
        """Room per memory row for local search, and the memory terms of nodes and edges."""
        # Local search keeps running sums; their rounding must not admit a violation.
        room = self.room * (1.0 - 1e-12) if self.net.slack else self.room + 0.25 / self.unit
        return self._kernels.Memory(room, self.node_items, self.edge_items)

    def rounded(self, *, deadline: float = math.inf) -> list[int] | None:
        """The cheaper of two primal roundings after local search, of the best bound and of the latest sweep; or None.

        The multiplier rule on trial may have led the latest sweep astray; the best bound may be many sweeps old.
        """
        one = self._improve(self.x.copy(), deadline)
        if np.array_equal(self._latest, self.x) or time.process_time() > deadline:
            return one
        two = self._improve(self._latest.copy(), deadline)
        return one if two is None or (one is not None and self.net.value(one) <= self.net.value(two)) else two

    def improved(self, choice: list[int], *, deadline: float = math.inf) -> list[int] | None:
        """Repair a choice until it is feasible and improve it by local moves; None where repair fails."""
        return self._improve(np.array([choice[int(v)] for v in self.nodes], np.int64), deadline)

    def _improve(self, x: np.ndarray, deadline: float) -> list[int] | None:
        if not self._repair(x, deadline):
            return None
        smallest = 1e-13 * max(abs(self.bound), 1e-300) if math.isfinite(self.bound) else 0.0
        for _ in range(PASSES):
            moved = self._kernels.descend(x, self.memory(), self._costs(), smallest)
            if not moved or time.process_time() > deadline:
                break
        return self.named(x)

    def repaired(self, *, deadline: float = math.inf) -> list[int]:
        """The rounded choice with its memory violation reduced as far as moves of single nodes do."""
        x = self.x.copy()
        self._repair(x, deadline)
        return self.named(x)

    def _repair(self, x: np.ndarray, deadline: float) -> bool:
        """Repair `x` in place; return whether it is feasible."""
        banned = np.zeros(len(x), np.bool_)
        left = min(2 * len(x) + 16, REPAIRS)
        while left > 0:
            steps = min(STEPS, left)
            outcome = self._kernels.repair(x, banned, self.memory(), self._costs(), steps)
            left -= steps
            if outcome != 0 or time.process_time() > deadline:
                return bool(outcome > 0)
        return False

    def _costs(self) -> Any:
        return self._shape(self.unary, self.pairwise)

    def named(self, x: np.ndarray) -> list[int]:
        """Translate a choice by position into one per node of the network (0 for eliminated nodes)."""
        out = [0] * len(self.net.cost)
        for v, s in zip(self.nodes, x, strict=True):
            out[int(v)] = int(s)
        return out

    # --- fixing ------------------------------------------------------------------------------------------------------
    def fix(self, net: Network, upper: float) -> int:
        """Reduced-cost fixing: forbid in `net`, from which this was built, what no choice below `upper` contains.

        Returns the number of labels and pairs forbidden. Every choice that costs less than `upper` survives.
        """
        found = self._slacks(upper)
        if found is None:
            return 0
        classes, poff, node_slack, pair_slack, allowed = found
        count = 0
        keep = {int(v): node_slack[self.noff[p] : self.noff[p + 1]] <= allowed for p, v in enumerate(self.nodes)}
        for v, mask in keep.items():
            count += int((~mask).sum())
            net.restrict(v, np.flatnonzero(mask))
        for e, (u, v) in enumerate(self._edges):
            bad = pair_slack[poff[e] : poff[e + 1]].reshape(classes[e]) > allowed
            if not bad.any() or net.adj[u][v].size > LARGEST_MATRIX:
                continue
            sides = [self.kind[self.koff[2 * e + s] :][: len(keep[w])][keep[w]] for s, w in enumerate((u, v))]
            mask = bad[np.ix_(*sides)]
            mask &= np.isfinite(net.adj[u][v])
            if mask.any():
                count += int(mask.sum())
                net.join(u, v, net.memo.intern(np.where(mask, np.inf, 0.0)))
        return count

    def share(self, upper: float) -> float:
        """The fraction of labels that survives fixing at `upper`."""
        found = self._slacks(upper) if math.isfinite(upper) else None
        return 1.0 if found is None else float((found[2] <= found[4]).mean())

    def _slacks(self, upper: float) -> tuple[np.ndarray, np.ndarray, Array, Array, float] | None:
        """(classes per edge, offsets of pairs, reduced cost per label, reduced cost per pair of classes, threshold)."""
        self._restore()
        classes = np.diff(self.moff).reshape(-1, 2)
        poff = np.concatenate(([0], np.cumsum(classes[:, 0] * classes[:, 1]))).astype(np.int64)
        if poff[-1] > LARGEST_PAIRS:
            return None
        node_slack, pair_slack = np.zeros(int(self.noff[-1])), np.zeros(int(poff[-1]))
        bound = self._kernels.slacks(self._graph(), self.message, poff, node_slack, pair_slack)
        bound += self.net.offset - float(self.multipliers @ self.room)
        return classes, poff, node_slack, pair_slack, upper - bound
