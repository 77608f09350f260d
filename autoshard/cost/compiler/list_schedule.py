"""XLA's greedy schedule (`ListMemoryScheduler`): always the ready instruction that frees most bytes.

Instructions are kernels, and the get-tuple-elements and bitcasts through which others read. An element of a tuple
counts as a use of all of it, and XLA updates priorities only among users of one instruction. So what reads an element
that is taken before the tuple's last one may count no freed bytes for as long as it waits: gradients that leave a
barrier stay until the end of the step.
"""

from __future__ import annotations

import heapq
from collections.abc import Container, Sequence

from autoshard.cost.compiler.kernels import Kernel
from autoshard.cost.compiler.lowered import Array
from autoshard.cost.compiler.schedule import Dependencies, Reads, passes
from autoshard.graph.orders import post_order


def greedy(
    kernels: Sequence[Kernel],
    deps: Dependencies,
    arrays: Sequence[Array],
    reads: Reads | None = None,
    *,
    listed: Sequence[int] = (),
    started: Container[str] = (),
    late: bool = False,
) -> list[int]:
    """The schedule: kernel numbers in order; of kernels that free as much, those with most users come first.

    Args:
        reads: default: through elements of tuples, without bitcasts.
        listed: kernels in the order of the program's text, that of users; default their own.
        started: kinds of kernels that are asynchronous: their done is their only user.
        late: whether a kernel without operands (zeros for a scatter) runs right before its user, which counts its bytes
            until then.
    """
    return _List(kernels, deps, arrays, reads or Reads.of_arrays(kernels), listed, started, late).schedule()


class _List:
    """The scheduler's state.

    Attributes:
        listed: all instructions in the order of the program's text.
        operands, users: of every instruction, other instructions, arguments among the operands.
        fans: how many users an instruction has.
        waiting: predecessors that are not scheduled; -1 once the instruction itself is.
        uses: the buffers of its operands, which a barrier's results share with them.
        left: buffer -> its users that are not scheduled; results of the program have one more.
        outdated: ready instructions that would free more than their priority says.
    """

    def __init__(
        self,
        kernels: Sequence[Kernel],
        deps: Dependencies,
        arrays: Sequence[Array],
        reads: Reads,
        listed: Sequence[int],
        started: Container[str],
        late: bool,
    ) -> None:
        self.kernels, self.deps = kernels, deps
        self.operands = [
            list(reads.of[number]) if number < len(kernels) else [] if viewed is None else [viewed]
            for number, viewed in enumerate(reads.viewed)
        ]
        self.users: list[list[int]] = [[] for _ in reads.viewed]
        self.listed = post_order(listed or range(len(kernels)), self.operands.__getitem__)
        for number in self.listed:
            for one in self.operands[number]:
                self.users[one].append(number)
        self.fans = [len(users) for users in self.users]
        self.fans[: len(kernels)] = [
            min(fan, 1) if kernel.kind in started else fan for fan, kernel in zip(self.fans, kernels, strict=False)
        ]
        is_argument = [number >= len(kernels) and not each for number, each in enumerate(self.operands)]
        self.waiting = [sum(not is_argument[one] for one in operands) for operands in self.operands]
        self.after: list[Sequence[int]] = [()] * len(kernels)  # control successors
        for number, maker in enumerate(deps.makers):
            before = set(deps.waits[number]).difference(maker)
            self.waiting[number] += len(before)
            for one in before:
                self.after[one] = (*self.after[one], number)
        self.buffers = self._buffers(arrays)
        self.uses = [list(dict.fromkeys(self._used(number, reads))) for number in range(len(reads.viewed))]
        self.readers: dict[int, list[int]] = {buffer: [] for buffer in self.buffers.values()}
        for number, used in enumerate(self.uses):
            for buffer in used:
                self.readers[buffer].append(number)
        self.left = {buffer: len(reading) for buffer, reading in self.readers.items()}
        for array, buffer in self.buffers.items():
            self.left[buffer] += arrays[array].returned
        self.size = {buffer: arrays[buffer].bytes for buffer in self.left}
        self.made = [0] * len(reads.viewed)
        made = [kernel.writes for kernel in kernels]
        made += [(array,) for array in reads.arrays[len(kernels) :] if array is not None]
        self.scalar = [
            not is_argument[n] and all(arrays[each].bytes <= 8 for each in made[n]) for n in range(len(made))
        ]
        for number, kernel in enumerate(kernels):
            self.made[number] = 0 if passes(kernel) else sum(arrays[array].bytes for array in kernel.writes)
        self.zeros = {
            number
            for number, kernel in enumerate(kernels)
            if late and not kernel.reads and deps.frees[number] and not self.scalar[number]
        }
        for number in self.zeros:
            for user in (*self.users[number], *self.after[number]):
                self.waiting[user] -= 1
        self.outdated: set[int] = set()
        self.current: dict[int, tuple[float, float]] = {}
        self.heap: list[tuple[float, float, int, int]] = []
        self.stamp = 0

    def _buffers(self, arrays: Sequence[Array]) -> dict[int, int]:
        """Array -> the array whose buffer it has."""
        found = {array: array for kernel in self.kernels for array in kernel.writes}
        for kernel in self.kernels:
            if passes(kernel):
                found.update(zip(kernel.writes, (found.get(each, each) for each in kernel.reads), strict=True))
        return {array: buffer for array, buffer in found.items() if arrays[buffer].maker >= 0}

    def _used(self, number: int, reads: Reads) -> list[int]:
        of = reads.viewed[number]
        if number < len(self.kernels):
            used: Sequence[int | None] = self.kernels[number].reads
        elif of is not None and of < len(self.kernels):
            used = self.kernels[of].writes
        else:
            used = (reads.arrays[number],)
        return [self.buffers[array] for array in used if array is not None and array in self.buffers]

    def schedule(self) -> list[int]:
        """All kernels in order."""
        for number in self.listed:
            is_argument = number >= len(self.kernels) and not self.operands[number]
            if not self.waiting[number] and not is_argument and number not in self.zeros:
                self._push(number)
        found = []
        while self.heap:
            *priority, _, number = heapq.heappop(self.heap)
            if self.waiting[number] < 0 or self.current[number] != tuple(priority):
                continue
            before = self._unfilled(number)
            if before is None:
                self._take(number)
            else:
                self.waiting[before] = -1
                del self.current[number]
                for user in (*self.users[before], *self.after[before]):
                    if not self.waiting[user]:
                        self._push(user)
            if number < len(self.kernels):
                found.append(number if before is None else before)
        return found

    def _push(self, number: int) -> None:
        """Make an instruction ready, or give it another priority."""
        self.outdated.discard(number)
        found = self._priority(number)
        if self.current.get(number) != found:
            self.current[number] = found
            self.stamp += 1
            heapq.heappush(self.heap, (*found, -self.stamp, number))  # of equal ones the latest: the end of a multimap

    def _priority(self, number: int) -> tuple[float, float]:
        """Bytes that the instruction adds, and minus the number of its users."""
        if self.scalar[number]:
            return float("-inf"), 0.0
        before = self._unfilled(number)
        if before is not None:
            return self.made[before], -self.fans[before]
        freed = sum(self.size[buffer] for buffer in self.uses[number] if self.left[buffer] == 1)
        return self.made[number] - freed, -self.fans[number]

    def _unfilled(self, number: int) -> int | None:
        """The kernel of zeros that still has to run right before this one."""
        if not self.zeros or number >= len(self.kernels):
            return None
        waits = self.deps.waits[number]
        return next((maker for maker in waits if maker in self.zeros and self.waiting[maker] >= 0), None)

    def _take(self, number: int) -> None:
        """Schedule an instruction: others become ready, or free more."""
        self.waiting[number] = -1
        changed = False
        for buffer in self.uses[number]:
            self.left[buffer] -= 1
            if self.left[buffer] == 1:
                changed = True
                self.outdated.update(one for one in self.readers[buffer] if self.waiting[one] == 0)
        for user in (*self.users[number], *(self.after[number] if number < len(self.kernels) else ())):
            self.waiting[user] -= 1
            if not self.waiting[user]:
                self._push(user)
        if changed:
            read = set(self.operands[number])
            for one in [one for one in self.outdated if not read.isdisjoint(self.operands[one])]:
                self._push(one)
