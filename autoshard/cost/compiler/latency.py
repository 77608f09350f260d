"""XLA's latency hiding scheduler: it overlaps collectives with independent kernels.

It schedules from the end of the step (xla/service/latency_hiding_scheduler.cc). On GPU one collective at a time is in
flight (`parallel_collective_overlap_limit`), on TPU a number per kind. It places a done once all users of the result
are scheduled, and the start once the kernels scheduled since take as long as the collective. Among ready kernels its
criteria are, in this order:

1. least stall: a kernel is ready a microsecond after its users (`kLessStall`);
2. a start that lets another collective's done be placed; starts with no other collective before them come last;
3. most seconds of collectives before it, in sequence (`kAsyncDepth`);
4. least waste: while something is not ready yet, a kernel that takes about the time until then (`kAvoidWaste`);
5. users of a collective's result, then kernels that make more kernels ready, then the latest in the program.

So all-gathers move to the front in sequence, and weight gradients fill gaps in the chain of the other gradients.

Before all of these comes memory, where there is a limit: what would exceed it gives way to the best that does not
(`kMemoryPeakOverLimit`); past it, what adds least is first (`kDecreaseMemoryOverLimit`).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from autoshard.cost.compiler.schedule import Dependencies, Reads

EDGE = 1e-6
"""Seconds between a kernel and its user (`kLowLatency`)."""


LOOP, INSIDE = "loop", 2
"""The kind of a loop with permutes inside, and how many are in flight at once."""


@dataclass(frozen=True)
class Rules:
    """A target's scheduler settings.

    Attributes:
        edge: seconds between a kernel and its user.
        at_once: kind -> limit of collectives of that kind in flight; else 1.
        viewing: seconds of a get-tuple-element or bitcast.
        aggressive: `aggressive_scheduling_policies`; without them criteria 3, 4 and the second of 5 are left out, and
            starts with no collective before them do not come last.
    """

    edge: float = EDGE
    at_once: Mapping[str, int] = field(default_factory=dict)
    viewing: float = 0.0
    aggressive: bool = True


GPU_RULES = Rules()


class Pressure:
    """Memory at the start of what is scheduled so far, from the end; ready kernels and collectives by what each adds.

    A collective's operands are held until its done, its results from its start.
    """

    def __init__(
        self, limit: float, reads: Sequence[Sequence[int]], makes: Sequence[Sequence[int]], sizes: Mapping[int, int]
    ) -> None:
        """For kernels that read and make buffers of these sizes, each once."""
        self.limit, self.reads, self.makes, self.sizes = limit, reads, makes, sizes
        self.users: dict[int, list[int]] = {}
        for number, read in enumerate(reads):
            for buffer in read:
                self.users.setdefault(buffer, []).append(number)
        self.live: set[int] = set()
        self.usage = 0
        self.ready: dict[int, tuple[bool, int]] = {}  # whether it is a collective, rank
        self.heaps: tuple[list[tuple[int, int, int]], ...] = [], []

    def added(self, number: int) -> int:
        """Bytes that a kernel adds, or a collective whose start follows at once."""
        return self._read(number) - self.made(number)

    def peak(self, number: int) -> int:
        """Bytes that it adds at most, before its results are given back."""
        return self._read(number)

    def _read(self, number: int) -> int:
        return sum(self.sizes[each] for each in self.reads[number] if each not in self.live)

    def made(self, number: int) -> int:
        """Bytes of its results, which its start gives back."""
        return sum(self.sizes[each] for each in self.makes[number] if each in self.live)

    def end(self, number: int) -> None:
        """Schedule what needs a kernel's operands: its end, or a collective's done."""
        self.usage += self._read(number)
        self.ready.pop(number, None)
        for each in self.reads[number]:
            if each not in self.live:
                self.live.add(each)
                for user in self.users[each]:
                    if user in self.ready:
                        self.release(user, *self.ready[user])

    def start(self, number: int) -> None:
        """Schedule what makes a kernel's results: its start, or a collective's."""
        self.usage -= self.made(number)
        self.live.difference_update(self.makes[number])

    def release(self, number: int, moves: bool, rank: int) -> None:
        """Make a kernel or collective ready."""
        self.ready[number] = moves, rank
        heapq.heappush(self.heaps[moves], (self.added(number), rank, number))

    def least(self, moves: bool) -> tuple[int, int] | None:
        """(bytes that it adds, kernel or collective) of the ready one that adds least; None without any."""
        heap = self.heaps[moves]
        while heap:
            added, _, number = heap[0]
            if number in self.ready and self.added(number) == added:
                return added, number
            heapq.heappop(heap)
        return None


def overlapped(
    order: Sequence[int],
    deps: Dependencies,
    takes: Sequence[float],
    moves: Sequence[bool],
    reads: Reads,
    kinds: Sequence[str] | None = None,
    rules: Rules = GPU_RULES,
    pressure: Pressure | None = None,
) -> list[tuple[int, bool]]:
    """The schedule of (kernel, whether it is a done); a collective appears twice, as its start and its done.

    Args:
        order: the schedule to change.
        takes: seconds of each kernel.
        moves: whether a kernel is a collective.
        reads: what kernels read.
        kinds: the kind of each kernel; None: all collectives are of one kind, one at a time. Those of kind `LOOP` are
            scheduled as a done is.
        pressure: of nothing scheduled; None: there is no memory limit.
    """
    kinds = kinds or [""] * len(takes)
    return _Backwards(order, deps, takes, moves, reads, kinds, rules, pressure).placed()


_Rank = tuple[bool, int, int]
_Entry = tuple[Callable[[int], None], int]


class _Due:
    """Ready kernels by duration; within each duration the least rank is found at once."""

    def __init__(self) -> None:
        self.rank: dict[int, _Rank] = {}
        self.heaps: dict[float, list[tuple[_Rank, int]]] = {}  # by seconds; entries with an old rank are stale

    def put(self, number: int, takes: float, rank: _Rank) -> None:
        """Add a kernel, or change its rank."""
        self.rank[number] = rank
        heapq.heappush(self.heaps.setdefault(takes, []), (rank, number))

    def firsts(self) -> Iterator[tuple[float, tuple[_Rank, int]]]:
        """(seconds, (rank, kernel)) of the least rank for each duration."""
        for takes, heap in list(self.heaps.items()):
            while heap and self.rank.get(heap[0][1]) != heap[0][0]:
                heapq.heappop(heap)
            if heap:
                yield takes, heap[0]
            else:
                del self.heaps[takes]


class _Backwards:
    """The scheduler's state. A schedule entry is a kernel and whether it is a collective's done."""

    def __init__(
        self,
        order: Sequence[int],
        deps: Dependencies,
        takes: Sequence[float],
        moves: Sequence[bool],
        reads: Reads,
        kinds: Sequence[str],
        rules: Rules,
        pressure: Pressure | None,
    ) -> None:
        self.pressure, self.reads = pressure, reads
        self.readers: list[list[int]] = [[] for _ in reads.viewed]
        self.views = [False] * len(reads.viewed)  # whether users read elements or bitcasts of it
        self.left = [0] * len(reads.viewed)  # users of each instruction that are not placed
        for number, read in enumerate(reads.of):
            for one in read:
                self.readers[one].append(number)
                self.left[one] += 1
        for viewed in reads.viewed:
            if viewed is not None:
                self.left[viewed] += 1
                self.views[viewed] = True
        self.viewing, self.at_once, self.kinds = rules.viewing, rules.at_once, kinds
        self.deps, self.takes, self.moves = deps, takes, moves
        self.edge, self.aggressive = rules.edge, rules.aggressive
        self.place = {number: position for position, number in enumerate(order)}
        self.before = [0.0] * len(takes)  # seconds of collectives before a kernel, in sequence
        self.through = [0.0] * len(takes)  # the same with its own
        for number in order if self.aggressive else ():
            self.before[number] = max((self.through[maker] for maker in deps.waits[number]), default=0.0)
            self.through[number] = self.before[number] + (takes[number] if moves[number] else 0.0)
        self.waiting = [len(after) for after in deps.frees]
        self.placed_at = [0.0] * len(takes)
        self.is_placed = [False] * len(takes)
        self.now = 0.0
        self.flying: dict[int, float] = {}  # in flight: collective -> when its start is due
        self.ends: dict[str, dict[int, float]] = {}  # by kind: collective with all users placed -> when due
        self.stalled: list[tuple[float, int, int]] = []  # heap of kernels that are not ready yet, by when
        self.due: dict[float, _Due] = {}  # ready kernels by seconds of collectives before them
        self.awaited: list[float] = []  # heap of times at which something becomes ready
        self.found: list[tuple[int, bool]] = []

        for number in order:
            if not self.waiting[number]:
                self._release(number)

    def placed(self) -> list[tuple[int, bool]]:
        """Schedule everything."""
        while (entry := self._next()) is not None:
            place, number = entry if self.pressure is None else self._within_limit(*entry, self.pressure)
            place(number)
        return self.found[::-1]

    def _next(self) -> _Entry | None:
        """What comes next without a memory limit."""
        self._move_due()
        ends = {one: due for kind, some in self.ends.items() if self._may_end(kind) for one, due in some.items()}
        several = len(self.flying) > 1
        start = min(self.flying, key=self._start_rank) if several else next(iter(self.flying), None)
        if ends:
            return self._end, min(ends, key=lambda one: self._end_rank(one, ends[one]))
        if start is not None and self._start_is_next(start):
            return self._start, start
        if self.due:
            return self._kernel, self._best(max(self.due))
        if self.stalled:
            return self._kernel, self._least_stalled()
        return None if start is None else (self._start, start)

    def _within_limit(self, place: Callable[[int], None], number: int, pressure: Pressure) -> _Entry:
        """This, or where it would exceed the limit the best that does not; past the limit, what adds least."""
        usage, limit = pressure.usage, pressure.limit
        if usage >= limit:
            return self._least(place, number, pressure)
        if place == self._start or usage + pressure.peak(number) <= limit:
            return place, number
        return self._best_of(lambda one: usage + pressure.peak(one) <= limit) or (place, number)

    def _least(self, place: Callable[[int], None], number: int, pressure: Pressure) -> _Entry:
        """What adds least memory; of equal ones this."""
        first = -pressure.made(number) if place == self._start else pressure.added(number)
        found: list[tuple[int, int, _Entry]] = [(first, 0, (place, number))]
        found += [(-pressure.made(one), 1, (self._start, one)) for one in self.flying]
        if (kernel := pressure.least(moves=False)) is not None:
            found.append((kernel[0], 2, (self._kernel, kernel[1])))
        if (ends := pressure.least(moves=True)) is not None and self._may_end(self.kinds[ends[1]]):
            found.append((ends[0], 3, (self._end, ends[1])))
        return min(found, key=lambda each: each[:2])[2]

    def _best_of(self, fits: Callable[[int], bool]) -> _Entry | None:
        """The best of all that may come next and fit; starts do."""
        ends = [one for kind, some in self.ends.items() if self._may_end(kind) for one in some if fits(one)]
        if ends:
            return self._end, min(ends, key=lambda one: self._end_rank(one, self.ends[self.kinds[one]][one]))
        found: list[tuple[tuple[object, ...], _Entry]] = []
        for one, due in self.flying.items():
            awaited = self._awaits_start(one)
            last = not self.before[one] and not awaited
            order = last, not awaited, -self.before[one], self._waste(self.edge), self._unlocks(one)
            found.append(((max(due - self.now, 0.0), *order), (self._start, one)))
        ready = [(0.0, one) for some in self.due.values() for one in some.rank]
        for due, one in (*ready, *((max(due - self.now, 0.0), one) for due, _, one in self.stalled)):
            if fits(one):
                order = False, True, -self.before[one], self._waste(self.takes[one]), self._unlocks(one)
                found.append(((due, *order), (self._kernel, one)))
        return min(found, key=lambda each: each[0])[1] if found else None

    def _may_end(self, kind: str) -> bool:
        """Whether one more collective of a kind may be in flight; a loop has several inside."""
        inside = kind == LOOP
        of = "collective-permute" if inside else kind
        flying = sum(self.kinds[one] == of for one in self.flying)
        return flying + (INSIDE if inside else 1) <= self.at_once.get(of, 1)

    def _awaits_start(self, number: int) -> bool:
        """Whether a collective of its kind must wait for its start."""
        return any(due <= self.now for due in self.ends.get(self.kinds[number], {}).values())

    def _start_rank(self, number: int) -> tuple[float, bool, float, _Rank]:
        """The order of the starts of those in flight."""
        stall = max(self.flying[number] - self.now, 0.0)
        return stall, not self._awaits_start(number), -self.before[number], self._unlocks(number)

    def _move_due(self) -> None:
        while self.stalled and self.stalled[0][0] <= self.now:
            number = heapq.heappop(self.stalled)[2]
            self.due.setdefault(self.before[number], _Due()).put(number, self.takes[number], self._unlocks(number))

    def _start_is_next(self, number: int) -> bool:
        """Whether the start of a collective in flight comes before every ready kernel."""
        when = self.flying[number]
        if when > self.now:
            return not self.due and not (self.stalled and self.stalled[0][0] < when)
        if self._awaits_start(number) or not self.due:
            return True
        if self.aggressive and (self.before[number] != max(self.due) or not self.before[number]):
            return 0 < self.before[number] > max(self.due)
        other = self._best(self.before[number])
        if self.awaited and self._waste(self.takes[other]) < self._waste(self.edge):
            return False
        return self._unlocks(number) < self._unlocks(other)

    def _best(self, before: float) -> int:
        """The best of the ready kernels with the same collectives before them."""
        return min((self._waste(takes), *first) for takes, first in self.due[before].firsts())[2]

    def _waste(self, takes: float) -> float:
        """Seconds between the end of a kernel of this duration and the next time something becomes ready."""
        return abs(self.awaited[0] - self.now - takes) if self.awaited and self.aggressive else 0.0

    def _unlocks(self, number: int) -> _Rank:
        """Rank: less for users of a collective, for kernels that make more others ready, and for later ones."""
        ends = any(self.moves[maker] for maker in self.deps.waits[number])
        freed = sum(self.left[one] == 1 for one in self.reads.of[number]) if self.aggressive else 0
        return not ends, -freed, -self.place[number]

    def _unlocks_more(self, number: int) -> None:
        """Update the rank of a ready kernel: one more operand has it as its only unplaced user."""
        alike = self.due.get(self.before[number])
        if alike is not None and number in alike.rank:
            alike.put(number, self.takes[number], self._unlocks(number))

    def _least_stalled(self) -> int:
        when = self.stalled[0][0]
        alike = [number for due, _, number in self.stalled if due == when]
        deepest = max(self.before[number] for number in alike)
        deep = [number for number in alike if self.before[number] == deepest]
        return min(deep, key=lambda number: (self._waste(self.takes[number]), self._unlocks(number)))

    def _end_rank(self, number: int, due: float) -> tuple[float, float, int]:
        """The order of the dones."""
        return max(due - self.now, 0.0), -self.through[number], -self.place[number]

    def _end(self, number: int) -> None:
        if self.pressure is not None:
            self.pressure.end(number)
        due = self.ends[self.kinds[number]].pop(number)
        if self.kinds[number] == LOOP:
            self._place(number, due, self.takes[number])
            return
        self.now = max(self.now, due)
        self.found.append((number, True))
        self.flying[number] = self.now + self.takes[number]
        self._pass(self.edge)
        self._await(self.flying[number])

    def _start(self, number: int) -> None:
        if self.pressure is not None:
            self.pressure.start(number)
        self._place(number, self.flying.pop(number), self.edge)

    def _kernel(self, number: int) -> None:
        if self.pressure is not None:
            self.pressure.start(number)
            self.pressure.end(number)
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
        for one in self.reads.of[number]:
            self._read_once(one)

    def _read_once(self, instruction: int) -> None:
        """One user of an instruction is placed; with the last, a view is."""
        self.left[instruction] -= 1
        if self.left[instruction] == 1:
            for reader in self.readers[instruction]:
                if not self.is_placed[reader]:
                    self._unlocks_more(reader)
        viewed = self.reads.viewed[instruction]
        if not self.left[instruction] and viewed is not None:
            self._read_once(viewed)

    def _pass(self, takes: float) -> None:
        self.now += takes
        while self.awaited and self.awaited[0] < self.now:
            heapq.heappop(self.awaited)

    def _release(self, number: int) -> None:
        """Make a kernel ready: all its users are placed."""
        if self.pressure is not None:
            self.pressure.release(number, self.moves[number], -self.place[number])
        readers = self.deps.frees[number]
        due = max(self.now, max((self.placed_at[reader] for reader in readers), default=-math.inf) + self.edge)
        if readers and self.views[number]:  # a no-op, placed at once
            self.now = due
            self._pass(self.viewing)
            due += self.edge
        if self.moves[number] or self.kinds[number] == LOOP:
            self.ends.setdefault(self.kinds[number], {})[number] = due
        else:
            heapq.heappush(self.stalled, (due, -self.place[number], number))
        self._await(due)

    def _await(self, due: float) -> None:
        if due > self.now:
            heapq.heappush(self.awaited, due)
