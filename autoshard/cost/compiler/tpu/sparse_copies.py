"""Work of a TPU's sparse cores, which overlaps independent kernels: layout copies of tables, and lookups.

libtpu offloads transposing copies of tables (pass `sparsecore-data-format-offloader`): matrices of 32-bit elements, at
most 64 to a row, larger than `sparse_copy_bytes` of a device kind; and gathers of more than 1,024 rows
(`offload-gather-to-sparsecore`), unless the table has at most half as many, or rows of less than 512 bytes in tiles.
The latency hiding scheduler then places starts and dones, backwards; as seen in compiled programs (libtpu 0.0.51, v5p):

1. one copy or lookup is in flight at a time; its done is placed as soon as all users of its result are;
2. its start is placed once the kernels placed since take as long as it does, or if nothing else can run;
3. first comes the last user of another's result, whose done can be placed then; a start that another done waits for
   comes before all other kernels;
4. else the latest kernel in the program.

Operands are live until the done, results from the start. So tables with little work to read them are copied one after
the other at the start of the program, and all copies are live before the first use; and a gradient is scattered while
the previous one is copied back. A copy by the other cores is live until its lookup is done, beside that for the next.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence

from autoshard.cost.compiler.kernels import Kernel
from autoshard.cost.compiler.lowered import COLLECTIVES, END, Lowered
from autoshard.cost.compiler.schedule import Dependencies, dependencies
from autoshard.cost.machine.device import Device
from autoshard.cost.machine.figures import figure, table, whole
from autoshard.cost.machine.tiles import LANES

COPIED = "copied"
"""The kind of the done of such a copy or lookup."""

MOST_COLUMNS = whole("sparse_columns")

FEWEST = whole("sparse_lookups")

LEAST_ROW = whole("sparse_row")

RATES = table("sparse_rates")

UNIT = figure("sparse_unit")

FREE = frozenset({"copy", "scatter", "broadcast_in_dim", "iota", END})
"""Kinds of kernels that take no time."""


def by_sparse_cores(kernels: Sequence[Kernel], program: Lowered, device: Device) -> dict[int, float]:
    """Kernels offloaded to sparse cores -> the seconds that the scheduler assumes."""
    if not device.sparse_copy_bytes:
        return {}
    found: dict[int, float] = {}
    for number, kernel in enumerate(kernels):
        if kernel.kind == "copy" and (size := _table(kernel, program)) > device.sparse_copy_bytes:
            found[number] = size / (RATES["copies"] * device.memory_bandwidth)
        elif kernel.kind == "gather" and _looks_up(kernel, program):
            size = sum(program.arrays[array].bytes for array in kernel.writes)
            found[number] = size / (RATES["lookups"] * device.memory_bandwidth)
    return found


def _table(kernel: Kernel, program: Lowered) -> int:
    """Bytes without padding of the narrow table that a kernel copies; 0 for other kernels."""
    for number in (*kernel.reads, *kernel.writes):
        array = program.arrays[number]
        if array.shape is not None and len(array.shape) == 2 and array.shape[-1] <= MOST_COLUMNS:
            return 4 * math.prod(array.shape) if array.dtype.endswith("32") else 0
    return 0


def _looks_up(kernel: Kernel, program: Lowered) -> bool:
    """Whether a kernel is a gather of many rows of a table with at least half as many."""
    step = program.steps[kernel.steps[-1]]
    if len(step.reads) < 2:  # constants are part of the kernel
        return False
    table, indices = program.arrays[step.reads[0]], program.arrays[step.reads[-1]]
    if table.shape is None and table.maker >= 0:  # a row-major copy
        table = program.arrays[program.steps[table.maker].reads[0]]
    attrs = program.graph.ops[step.op].attrs
    if table.shape is None or len(table.shape) != 2 or tuple(attrs["start_index_map"]) != (0,):
        return False
    item = table.bytes // max(1, math.prod(table.shape))
    row = -(-table.shape[1] // LANES) * LANES * item
    count = indices.bytes // 4 if indices.shape is None else math.prod(indices.shape)  # gathered: 32-bit indices
    return FEWEST < count < 2 * table.shape[0] and row >= LEAST_ROW


def beside_sparse_cores(
    kernels: list[Kernel], order: Sequence[int], program: Lowered, device: Device
) -> tuple[list[Kernel], list[int]]:
    """Kernels and schedule with dones of offloaded kernels; these are at their start's position."""
    apart = by_sparse_cores(kernels, program, device)
    if not apart:
        return kernels, list(order)
    joined = {array for step in program.steps if step.kind == "concatenate" for array in step.reads}
    takes = [_seconds(kernel, program, device, not joined.isdisjoint(kernel.writes)) for kernel in kernels]
    found, numbers = list(kernels), list[int]()
    for number, ends in _Backwards(order, dependencies(kernels), takes, apart).placed():
        if ends:
            kernel = kernels[number]
            numbers.append(len(found))
            found.append(Kernel((), (*kernel.reads, *kernel.writes), (), COPIED, kernel.place))
        else:
            numbers.append(number)
    return found, numbers


def _seconds(kernel: Kernel, program: Lowered, device: Device, joined: bool) -> float:
    """A kernel's seconds as the scheduler assumes; `joined`: its result is concatenated with others."""
    least = UNIT * (joined + (kernel.kind == "gather"))
    if kernel.kind in FREE or kernel.kind == "gather":
        return least
    moved = sum(program.arrays[array].bytes for array in (*kernel.reads, *kernel.writes))
    if kernel.kind in COLLECTIVES:
        return moved / device.links[0].bandwidth
    seconds = max(
        moved / (RATES["moves"] * device.memory_bandwidth),
        kernel.flops / (RATES["products"] * device.peak_flops("bf16")),
    )
    return max(least, seconds if seconds >= UNIT else 0.0)


class _Backwards:
    """The scheduler's state; it schedules from the end of the program."""

    def __init__(
        self, order: Sequence[int], deps: Dependencies, takes: Sequence[float], apart: Mapping[int, float]
    ) -> None:
        """`takes`: seconds of kernels; `apart`: of offloaded ones, one at a time."""
        self.deps, self.takes, self.apart = deps, takes, apart
        self.place = {number: position for position, number in enumerate(order)}
        self.waiting = [len(after) for after in deps.frees]
        self.is_placed = [False] * len(takes)
        self.now = 0.0
        self.flying: tuple[int, float] | None = None  # in flight: the kernel, and when its start is due
        self.ends: list[tuple[int, int]] = []  # heap of those with all users placed
        self.ready: list[tuple[bool, int, int]] = []  # heap of ready kernels
        self.found: list[tuple[int, bool]] = []
        for number in order:
            if not self.waiting[number]:
                self._release(number)

    def placed(self) -> list[tuple[int, bool]]:
        """(kernel, whether it is the done of an offloaded one) of all, in order."""
        while True:
            if self.ends and self.flying is None:
                number = heapq.heappop(self.ends)[1]
                self.found.append((number, True))
                self.flying = number, self.now + self.apart[number]
            while self.ready and self.is_placed[self.ready[0][2]]:
                heapq.heappop(self.ready)
            if self.flying is not None and self._starts(*self.flying):
                number, due = self.flying
                self.now, self.flying = max(self.now, due), None
                self._put(number)
            elif self.ready:
                number = heapq.heappop(self.ready)[2]
                self.now += self.takes[number]
                self._put(number)
            else:
                return self.found[::-1]

    def _starts(self, number: int, due: float) -> bool:
        """Whether a start comes before all ready kernels."""
        if not self.ready:
            return True
        return due <= self.now and (bool(self.ends) or (True, -self.place[number]) < self.ready[0][:2])

    def _put(self, number: int) -> None:
        self.found.append((number, False))
        self.is_placed[number] = True
        for maker in self.deps.waits[number]:
            self.waiting[maker] -= 1
            if not self.waiting[maker]:
                self._release(maker)
            elif self.waiting[maker] == 1 and maker in self.apart:
                last = next(reader for reader in self.deps.frees[maker] if not self.is_placed[reader])
                if not self.waiting[last] and last not in self.apart:
                    self._release(last)

    def _release(self, number: int) -> None:
        """Make a kernel ready: all its users are placed."""
        if number in self.apart:
            heapq.heappush(self.ends, (-self.place[number], number))
            return
        unlocks = any(self.waiting[maker] == 1 for maker in self.deps.waits[number] if maker in self.apart)
        heapq.heappush(self.ready, (not unlocks, -self.place[number], number))
