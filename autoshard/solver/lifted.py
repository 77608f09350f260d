"""Lifted message passing (Kersting, Ahmadi and Natarajan, UAI 2009): messages computed once per class of equal nodes.

The repeated layers of a deep model give a quotient network: a node per class of nodes, an edge per class of edges,
each weighted with its number. TRW-S on the quotient costs as much as on the few layers that differ. Its messages,
divided by the weights, are messages of the whole network. Any messages give a valid bound; near the ends of a stack,
where nodes that are not quite equal share a class, a few sweeps of the whole network correct them.
"""

from __future__ import annotations

import numpy as np

from autoshard.solver.dual import Dual
from autoshard.solver.kernels import F, Graph, compiled, least, min_sum

REDUCED_COLOR_ROUNDS = 6
"""Radius, in edges, of colour refinement. The ends of a stack of layers differ from its middle as far as this; much
less
puts unlike ops of one layer into one class, much more leaves no two layers equal."""
MAX_QUOTIENT_SHARE = 0.2
"""Largest share of the nodes that the quotient may have."""
QUOTIENT_SWEEPS, BETWEEN, SETTLED = 400, 25, 1e-3
"""Most sweeps of the quotient, which ends when in so many no message changes by more than this fraction of the largest.
"""


def warm_start(dual: Dual) -> bool:
    """Warm-start `dual` with the messages of its quotient; whether there is a quotient that is small enough."""
    classes = alike(dual)
    if len(classes) == 0 or classes.max() + 1 > MAX_QUOTIENT_SHARE * len(classes):
        return False
    quotient = _Quotient(dual, classes)
    quotient.ascend()
    quotient.give()
    return True


def alike(dual: Dual) -> np.ndarray:
    """A class per node, numbered by first appearance, by colour refinement over costs and matrices."""
    known: dict[tuple[int, int], int] = {}
    colours = np.array(
        [known.setdefault((id(dual.net.cost[int(v)]), 0), len(known)) for v in dual.nodes], dtype=np.uint64
    )
    looks = np.unique(_looks(dual), axis=0, return_inverse=True)[1].ravel().astype(np.uint64)
    for _ in range(REDUCED_COLOR_ROUNDS):
        around = np.zeros(len(colours), dtype=np.uint64)
        for side, (mine, other) in enumerate(((dual.low, dual.high), (dual.high, dual.low))):
            np.add.at(around, mine, _mixed(_mixed(looks * np.uint64(2) + np.uint64(side)) + colours[other]))
        refined = np.unique(np.stack((colours, around), axis=1), axis=0, return_inverse=True)[1].ravel()
        if len(colours) and refined.max() == colours.max():
            break
        colours = refined.astype(np.uint64)
    _, first, inverse = np.unique(colours, return_index=True, return_inverse=True)
    rank = np.empty(len(first), np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    return np.asarray(rank[inverse.ravel()])


def _looks(dual: Dual) -> np.ndarray:
    """A number per edge and direction, equal where the matrices are."""
    return np.stack((dual.eoff, dual.koff[::2], dual.koff[1::2]), axis=1)


def _mixed(numbers: np.ndarray) -> np.ndarray:
    """Well mixed 64-bit words (the finaliser of Steele, Lea and Flood's SplittableRandom, OOPSLA 2014)."""
    words = numbers + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


@compiled
def sweep(backward: bool, graph: Graph, portion: F, message: F) -> None:
    """`kernels.sweep` of a quotient, messages only: each member of a class has `portion[q]` edges of entry q."""
    noff, unary, eoff, pairwise = graph.noff, graph.unary, graph.eoff, graph.pairwise
    koff, kind, first, edge, side, moff = graph.koff, graph.kind, graph.first, graph.edge, graph.side, graph.moff
    n = len(noff) - 1
    widest = 1
    for i in range(n):
        widest = max(widest, noff[i + 1] - noff[i])
    theta, given, out = np.empty(widest), np.empty(widest), np.empty(widest)
    for step in range(n):
        i = n - 1 - step if backward else step
        k = noff[i + 1] - noff[i]
        later = earlier = 0.0
        for a in range(k):
            theta[a] = unary[noff[i] + a]
        for q in range(first[i], first[i + 1]):
            m, c = moff[2 * edge[q] + side[q]], koff[2 * edge[q] + side[q]]
            for a in range(k):
                theta[a] += message[m + kind[c + a]]
            if (side[q] == 0) != backward:
                later += portion[q]
            else:
                earlier += portion[q]
        gamma = 1.0 / max(1.0, later, earlier)
        for q in range(first[i], first[i + 1]):
            e, s = edge[q], side[q]
            if (s == 0) == backward:
                continue
            m, c, o = moff[2 * e + s], koff[2 * e + s], moff[2 * e + 1 - s]
            mine, other = moff[2 * e + s + 1] - m, moff[2 * e + 2 - s] - o
            for a in range(mine):
                given[a] = np.inf
            for a in range(k):
                given[kind[c + a]] = min(given[kind[c + a]], gamma * portion[q] * theta[a])
            for a in range(mine):
                given[a] -= message[m + a]
            min_sum(eoff[e], s, mine, other, pairwise, given, out)
            lowest = out[least(out, other)]
            for b in range(other):
                message[o + b] = out[b] - lowest


class _Quotient:
    """The quotient of a network by its classes, as arrays of the form of `kernels.py`.

    Edges keep their direction in the network: an edge from one layer to the next leads back to a class already visited,
    and its message counts from the next sweep on. So every class divides its costs among edges as its members do, which
    no order of the classes would achieve.
    """

    def __init__(self, dual: Dual, classes: np.ndarray) -> None:
        self.dual = dual
        count = int(classes.max()) + 1
        members = np.bincount(classes, minlength=count)
        first = np.full(count, len(classes))
        np.minimum.at(first, classes, np.arange(len(classes)))
        self.noff = np.concatenate(([0], np.cumsum(np.diff(dual.noff)[first]))).astype(np.int64)
        self.unary = np.concatenate(
            [dual.unary[dual.noff[v] : dual.noff[v + 1]] * n for v, n in zip(first, members, strict=True)]
        )
        keys = np.concatenate((_looks(dual), np.stack((classes[dual.low], classes[dual.high]), axis=1)), axis=1)
        _, one, of, self.weight = np.unique(keys, axis=0, return_index=True, return_inverse=True, return_counts=True)
        self.of = of.ravel()
        self.low, self.high = classes[dual.low[one]], classes[dual.high[one]]
        self.width = dual.width[one]
        self.koff = np.stack((dual.koff[2 * one], dual.koff[2 * one + 1]), axis=1).ravel()
        sizes = np.diff(dual.moff).reshape(-1, 2)[one]
        self.moff = np.concatenate(([0], np.cumsum(sizes.ravel()))).astype(np.int64)
        entries = sizes[:, 0] * sizes[:, 1]
        self.eoff = np.concatenate(([0], np.cumsum(entries)))[:-1].astype(np.int64)
        self.pairwise = np.concatenate(
            [
                dual.pairwise[dual.eoff[e] : dual.eoff[e] + n] * k
                for e, n, k in zip(one, entries, self.weight, strict=True)
            ]
        )
        ends = np.concatenate((self.low, self.high))
        order = np.argsort(ends, kind="stable")
        self.first = np.searchsorted(ends[order], np.arange(count + 1)).astype(np.int64)
        self.edge = (order % len(one)).astype(np.int64)
        self.side = (order >= len(one)).astype(np.int64)
        self.portion = self.weight[self.edge] / members[ends[order]]
        """Per end of an edge, how many such edges each member of its class has."""
        self.message = np.zeros(int(self.moff[-1]))

    def ascend(self) -> None:
        """Run sweeps of the quotient."""
        matrices = self.eoff, self.pairwise, self.width, self.koff, self.dual.kind
        graph = Graph(
            self.noff, self.unary, self.low, self.high, *matrices, self.first, self.edge, self.side, self.moff
        )
        for _ in range(QUOTIENT_SWEEPS // BETWEEN):
            before = self.message.copy()
            for backward in (False, True) * BETWEEN:
                sweep(backward, graph, self.portion, self.message)
            known = np.isfinite(self.message) & np.isfinite(before)
            now = self.message[known]
            if np.abs(now - before[known]).max(initial=0.0) <= SETTLED * np.abs(now).max(initial=0.0):
                break

    def give(self) -> None:
        """Divide the messages of each class of edges among its members."""
        dual = self.dual
        parts = self.message / np.repeat(self.weight, np.diff(self.moff[::2]))
        for e, number in enumerate(self.of):
            dual.message[dual.moff[2 * e] : dual.moff[2 * e + 2]] = parts[
                self.moff[2 * number] : self.moff[2 * number + 2]
            ]
