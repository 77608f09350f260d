"""XLA's latency hiding scheduler: collectives beside the kernels that neither make nor read them.

It goes from the end of the step backwards (xla/service/latency_hiding_scheduler.cc). On GPUs one collective at a time
is in flight (`parallel_collective_overlap_limit`), on TPUs so many of a kind: its end is placed as soon as all that
reads its result stands behind it, its start once the kernels placed since take as long as it does. Of the kernels that
could come next it takes, in this order of reasons:

1. what keeps nobody waiting: a kernel is due a microsecond after what reads it (`kLessStall`);
2. a start for which another collective waits, and no start before which there is no other collective;
3. what waits for the most seconds of collectives, one behind the other (`kAsyncDepth`);
4. while something is not due yet, what takes about as long as that is away (`kAvoidWaste`);
5. what a collective's result is read by, what lets more kernels be placed, and what stood last.

So gathers move to the front one behind the other, and gradients of weights wait for gaps in the chain of the others.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from autoshard.cost.compiler.schedule import Dependencies

EDGE = 1e-6
"""Seconds between a kernel and what reads it, counted from the reader (`kLowLatency`)."""


@dataclass(frozen=True)
class Rules:
    """How a target's scheduler differs.

    Attributes:
        edge: seconds between a kernel and what reads it.
        elements: whether a kernel that reads an element of a tuple lets that be placed, whatever else is of the tuple.
        at_once: kind -> how many collectives of that kind are in flight at once, counted by itself; else 1.
        viewing: seconds of an instruction through which results are read.
    """

    edge: float = EDGE
    elements: bool = False
    at_once: Mapping[str, int] = field(default_factory=dict)
    viewing: float = 0.0


GPU_RULES = Rules()


def overlapped(
    order: Sequence[int],
    deps: Dependencies,
    takes: Sequence[float],
    moves: Sequence[bool],
    views: Sequence[bool] | None = None,
    kinds: Sequence[str] | None = None,
    rules: Rules = GPU_RULES,
) -> list[tuple[int, bool]]:
    """An order of (kernel, whether it is its end); a collective appears twice, as its start and as its end.

    Args:
        order: the kernels in the order that is changed.
        takes: seconds of each kernel.
        moves: whether a kernel is a collective.
        views: whether a kernel's results are read through an instruction of no cost, such as an element of a tuple;
            None for no kernel.
        kinds: the kind of each kernel; None: all collectives are of one kind, one at a time.
    """
    count = len(takes)
    return _Backwards(order, deps, takes, moves, views or [False] * count, kinds or [""] * count, rules).placed()


_Rank = tuple[bool, int, int]


class _Due:
    """Kernels that are due: of those that take equally long the one of the least rank is found at once."""

    def __init__(self) -> None:
        self.rank: dict[int, _Rank] = {}
        self.heaps: dict[float, list[tuple[_Rank, int]]] = {}  # by seconds; what has another rank now is no entry

    def put(self, number: int, takes: float, rank: _Rank) -> None:
        """Add a kernel, or change its rank."""
        self.rank[number] = rank
        heapq.heappush(self.heaps.setdefault(takes, []), (rank, number))

    def firsts(self) -> Iterator[tuple[float, tuple[_Rank, int]]]:
        """(seconds, (rank, kernel)) of the first of those that take so long."""
        for takes, heap in list(self.heaps.items()):
            while heap and self.rank.get(heap[0][1]) != heap[0][0]:
                heapq.heappop(heap)
            if heap:
                yield takes, heap[0]
            else:
                del self.heaps[takes]


class _Backwards:
    """The state of the scheduler. An entry is a kernel and whether it is a collective's start."""

    def __init__(
        self,
        order: Sequence[int],
        deps: Dependencies,
        takes: Sequence[float],
        moves: Sequence[bool],
        views: Sequence[bool],
        kinds: Sequence[str],
        rules: Rules,
    ) -> None:
        self.viewing, self.at_once, self.kinds = rules.viewing, rules.at_once, kinds
        self.deps, self.takes, self.moves, self.views = deps, takes, moves, views
        self.edge, self.elements = rules.edge, rules.elements
        self.place = {number: position for position, number in enumerate(order)}
        self.before = [0.0] * len(takes)  # seconds of collectives that a kernel waits for, one behind the other
        self.behind = [0.0] * len(takes)  # and those that what reads it waits for
        for number in order:
            self.before[number] = max((self.behind[maker] for maker in deps.waits[number]), default=0.0)
            self.behind[number] = self.before[number] + (takes[number] if moves[number] else 0.0)
        self.waiting = [len(after) for after in deps.frees]
        self.placed_at = [0.0] * len(takes)
        self.is_placed = [False] * len(takes)
        self.now = 0.0
        self.flying: dict[int, float] = {}  # collectives whose starts are not placed, and when these are due
        self.ends: dict[str, dict[int, float]] = {}  # by kind, collectives of which all readers are placed: when due
        self.stalled: list[tuple[float, int, int]] = []  # a heap of kernels by when they are due
        self.due: dict[float, _Due] = {}  # kernels that are due, by the seconds of collectives before them
        self.awaited: list[float] = []  # a heap of when what was not due yet will be
        self.found: list[tuple[int, bool]] = []

        for number in order:
            if not self.waiting[number]:
                self._release(number)

    def placed(self) -> list[tuple[int, bool]]:
        """All kernels."""
        while True:
            self._move_due()
            ends = {one: due for kind, some in self.ends.items() if self._may_end(kind) for one, due in some.items()}
            several = len(self.flying) > 1
            start = min(self.flying, key=self._start_rank) if several else next(iter(self.flying), None)
            if ends:
                self._end(ends)
            elif start is not None and self._start_is_next(start):
                self._start(start)
            elif self.due:
                self._kernel(self._best(max(self.due)))
            elif self.stalled:
                self._kernel(self._least_stalled())
            elif start is not None:
                self._start(start)
            else:
                return self.found[::-1]

    def _may_end(self, kind: str) -> bool:
        """Whether one more collective of a kind may be in flight."""
        return sum(self.kinds[one] == kind for one in self.flying) < self.at_once.get(kind, 1)

    def _awaits_start(self, number: int) -> bool:
        """Whether a collective of its kind waits for one in flight to start."""
        return any(due <= self.now for due in self.ends.get(self.kinds[number], {}).values())

    def _start_rank(self, number: int) -> tuple[float, bool, float, _Rank]:
        """By what the starts of those in flight are compared."""
        stall = max(self.flying[number] - self.now, 0.0)
        return stall, not self._awaits_start(number), -self.before[number], self._unlocks(number)

    def _move_due(self) -> None:
        while self.stalled and self.stalled[0][0] <= self.now:
            number = heapq.heappop(self.stalled)[2]
            self.due.setdefault(self.before[number], _Due()).put(number, self.takes[number], self._unlocks(number))

    def _start_is_next(self, number: int) -> bool:
        """Whether the start of what is in flight comes before every kernel that could be placed."""
        when = self.flying[number]
        if when > self.now:
            return not self.due and not (self.stalled and self.stalled[0][0] < when)
        if self._awaits_start(number) or not self.due:
            return True
        if self.before[number] != max(self.due) or not self.before[number]:
            return 0 < self.before[number] > max(self.due)
        other = self._best(self.before[number])
        if self.awaited and self._waste(self.takes[other]) < self._waste(self.edge):
            return False
        return self._unlocks(number) < self._unlocks(other)

    def _best(self, before: float) -> int:
        """Of kernels that are due, and wait for the same collectives."""
        return min((self._waste(takes), *first) for takes, first in self.due[before].firsts())[2]

    def _waste(self, takes: float) -> float:
        """By how many seconds what takes so long misses the moment when something else is due."""
        return abs(self.awaited[0] - self.now - takes) if self.awaited else 0.0

    def _unlocks(self, number: int) -> _Rank:
        """Less for what a collective's end waits for, for what more kernels wait for, and for what stood later."""
        makers = self.deps.waits[number]
        ends = any(self.moves[maker] for maker in makers)
        freed = sum(self.waiting[maker] == 1 or (self.elements and self.views[maker]) for maker in makers)
        return not ends, -freed, -self.place[number]

    def _unlocks_more(self, number: int) -> None:
        """Another kernel waits for this one alone now."""
        alike = self.due.get(self.before[number])
        if alike is not None and number in alike.rank:
            alike.put(number, self.takes[number], self._unlocks(number))

    def _least_stalled(self) -> int:
        when = self.stalled[0][0]
        alike = [number for due, _, number in self.stalled if due == when]
        deepest = max(self.before[number] for number in alike)
        deep = [number for number in alike if self.before[number] == deepest]
        return min(deep, key=lambda number: (self._waste(self.takes[number]), self._unlocks(number)))

    def _end(self, ends: Mapping[int, float]) -> None:
        number = min(ends, key=lambda one: (max(ends[one] - self.now, 0.0), -self.behind[one], -self.place[one]))
        self.now = max(self.now, self.ends[self.kinds[number]].pop(number))
        self.found.append((number, True))
        self.flying[number] = self.now + self.takes[number]
        self._pass(self.edge)
        self._await(self.flying[number])

    def _start(self, number: int) -> None:
        self._place(number, self.flying.pop(number), self.edge)

    def _kernel(self, number: int) -> None:
        if (alike := self.due.get(self.before[number])) is not None and number in alike.rank:
            del alike.rank[number]
            if not alike.rank:
                del self.due[self.before[number]]
            self._place(number, self.now, self.takes[number])
        else:
            entry = next(entry for entry in self.stalled if entry[2] == number)
            self.stalled.remove(entry)
            heapq.heapify(self.stalled)
            self._place(number, entry[0], self.takes[number])

    def _place(self, number: int, due: float, takes: float) -> None:
        self.found.append((number, False))
        self.is_placed[number] = True
        self.now = max(self.now, due)
        self.placed_at[number] = self.now
        self._pass(takes)
        for maker in self.deps.waits[number]:
            self.waiting[maker] -= 1
            if not self.waiting[maker]:
                self._release(maker)
            elif self.waiting[maker] == 1:
                self._unlocks_more(next(reader for reader in self.deps.frees[maker] if not self.is_placed[reader]))

    def _pass(self, takes: float) -> None:
        self.now += takes
        while self.awaited and self.awaited[0] < self.now:
            heapq.heappop(self.awaited)

    def _release(self, number: int) -> None:
        """All that reads a kernel is placed."""
        readers = self.deps.frees[number]
        due = max(self.now, max((self.placed_at[reader] for reader in readers), default=-math.inf) + self.edge)
        if readers and self.views[number]:  # which is placed at once
            self.now = due
            self._pass(self.viewing)
            due += self.edge
        if self.moves[number]:
            self.ends.setdefault(self.kinds[number], {})[number] = due
        else:
            heapq.heappush(self.stalled, (due, -self.place[number], number))
        self._await(due)

    def _await(self, due: float) -> None:
        if due > self.now:
            heapq.heappush(self.awaited, due)
