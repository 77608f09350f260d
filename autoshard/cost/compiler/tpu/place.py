"""Inputs and outputs of memory space assignment for a TPU's program.

`on_chip.py` assigns on-chip memory to one value after the other; here are the gain of each, its prefetches, and the
buffers left in device memory.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence, Set
from functools import cache, partial

from autoshard.cost.compiler.backend import Placement
from autoshard.cost.compiler.kernels import Kernel
from autoshard.cost.compiler.lowered import ATTENTION, COLLECTIVES, SLICE, Array, Lowered, Step, updates_of
from autoshard.cost.compiler.schedule import Liveness
from autoshard.cost.compiler.tpu.gathers import JOINED, joined_bytes
from autoshard.cost.compiler.tpu.on_chip import Life, off_chip
from autoshard.cost.compiler.tpu.sparse_copies import COPIED
from autoshard.cost.compiler.tpu.strips import passes_of
from autoshard.cost.machine.compute import CONTRACTIONS
from autoshard.cost.machine.device import Device
from autoshard.cost.machine.figures import figure, table, whole
from autoshard.graph.groups import BARRIER, ELEMENTWISE, INDEXED

TUPLE_BYTES = whole("tuple_table")
SLICES, SLICED = whole("copy_slices"), whole("sliced_copy")

LONGEST_WAIT = figure("longest_wait")

SHARE, SHARE_OF_CORES = table("counted_bandwidth")["other"], table("counted_bandwidth")["cores"]

ROWS = 8
"""Sublanes of a tile: a gather of a table's rows reads all tiles that hold them, a scatter also writes these."""

BESIDE = whole("gather_beside")

TILE_FLOPS = figure("convolved_tile") * 4 * 2 * 128 * 128
"""FLOP of a core, in four units of 128 x 128, while it works on a tile between convolutions."""

ALLOCATED = "allocate"
"""The kind of a kernel that allocates the buffer a loop adds up in."""

STILL = COLLECTIVES | {BARRIER, ALLOCATED, COPIED}
"""Kinds whose device memory traffic is not reported: a link is slower, or nothing moves. The compiler's clock and gains
count them, except barriers and allocations.
"""

VIEWS = frozenset({"reshape", "transpose", "broadcast_in_dim"})
"""Kinds whose results have their operands' layout, in other dims."""

LOOPS_OF_CORES = ELEMENTWISE | {"reduce", "broadcast_in_dim", "slice", "pad", "iota", SLICE}
"""Kinds that two cores split, with their results in on-chip memory."""


def _in_heap(size: int) -> int:
    """Bytes of a buffer in the heap."""
    return -(-size // TUPLE_BYTES) * TUPLE_BYTES


class Placing:
    """Memory space assignment of one program's values.

    A gain is XLA's (`CostAnalysis::GetMemoryBoundedness`): seconds that producer and users save. As logged by libtpu,
    prefetches cost nothing: arguments come before others of equal gain, so an optimizer's moments are prefetched before
    all-reduced gradients get room. An all-reduce's operands gain on chip; its result does only if it reduces one value
    (two combined gradients of 16 MB are read on chip and written to device memory; single ones of 23 MB stay on chip).
    """

    def __init__(
        self,
        device: Device,
        buffer_bytes: Callable[[Array], int],
        kernels: Sequence[Kernel],
        program: Lowered,
        live: Liveness,
    ) -> None:
        """`kernels` in schedule order; `live` their live memory."""
        self.device, self.buffer_bytes = device, buffer_bytes
        self.kernels, self.program, self.live = kernels, program, live
        self.slices = any(step.kind == SLICE for step in program.steps)
        self.touched = [self._touched(kernel) for kernel in kernels]
        self.reads = [frozenset(kernel.reads) for kernel in kernels]  # there may be thousands
        self.rate = (SHARE if device.cores == 1 else SHARE_OF_CORES) * device.memory_bandwidth
        self.counted = [self._counted(kernel, sizes) for kernel, sizes in zip(kernels, self.touched, strict=True)]
        self.clock = self._clock()
        self.uses = {array: [start] for array, (start, _) in live.spans.items()}
        self.read: dict[int, list[int]] = {}  # argument -> position of its prefetch, then of its uses
        self.gains: dict[int, float] = {}
        self.written: list[Life] = []
        self._count()

    def _count(self) -> None:
        """Collect each value's gain and uses."""
        for position, (kernel, sizes) in enumerate(zip(self.kernels, self.counted, strict=True)):
            saved = self._bound_by_memory(kernel, sum(sizes.values()))
            for array, size in sizes.items():
                gain = min(size / self.rate, saved)
                if kernel.kind == "all-reduce" and not (array in self.reads[position] or len(kernel.writes) == 1):
                    gain = 0.0
                held = self.live.buffers.get(array)
                if held is not None:
                    self.gains[held] = _and_gain(self.gains.get(held), gain)
                    if self.uses[held][-1] < position:
                        self.uses[held].append(position)
                elif array in self.reads[position]:
                    self.gains[array] = _and_gain(self.gains.get(array), gain)
                    fetched = self._fetched(position, self.touched[position][array])
                    self.read.setdefault(array, [fetched]).append(position)
                else:
                    self.written.append(Life(self.touched[position][array], (position, position + 1), gain))
        for array in self.uses:
            self.gains.setdefault(array, 0.0)

    def placement(self) -> Placement:
        """On-chip memory by gain, the rest in a heap; arguments stay on chip where there is room."""
        live, read, uses = self.live, self.read, self.uses
        far = {
            live.buffers.get(array, array)
            for kernel in self.kernels
            if self._writes_far(kernel)
            for array in kernel.writes
        }
        lives = [self._argument(array, at) for array, at in read.items()]  # first of equal gain
        lives += [Life(live.sizes[array], tuple(at), self.gains[array], array in far) for array, at in uses.items()]
        off = off_chip([*lives, *self.written], self.device.on_chip_bytes, self.clock, self._longest(), self.rate)
        beside = {array: off[place] for place, array in enumerate((*read, *uses)) if place in off}
        moved, copied = [], []
        for position, (kernel, sizes) in enumerate(zip(self.kernels, self.touched, strict=True)):
            far_off, copies = {}, {}
            parts = self._moved(kernel, sizes)
            for array, size in sizes.items():
                held = live.buffers.get(array, array)
                known = held in uses or held in read
                reads = array in self.reads[position]
                if known and held in beside and (position in beside[held].fetched if reads else beside[held].evicted):
                    copies[array] = size
                    continue
                near = known and (held not in beside or (reads and position in beside[held].near))
                if not near and kernel.kind not in STILL:
                    far_off[array] = parts[array]
            moved.append(far_off)
            copied.append(copies)
        spans = {array: (at[0], beside[array].until) for array, at in uses.items() if array in beside}
        _take_over(spans, {array for array in beside if beside[array].evicted}, live, self.kernels, self.program)
        blocks = tuple((*span, _in_heap(live.sizes[array])) for array, span in spans.items())
        tables = sum(self._tables(life, off[place].copies) for place, life in enumerate(lives) if place in off)
        tables += sum(place not in off for place in range(len(lives), len(lives) + len(self.written)))
        tables += sum(len(kernel.writes) > 1 for kernel in self.kernels)
        return Placement(blocks, tables * TUPLE_BYTES, tuple(moved), tuple(copied))

    def _argument(self, array: int, at: Sequence[int]) -> Life:
        size = self.buffer_bytes(self.program.arrays[array])
        half = self._fetched(at[0], size) if at[0] and self._in_slices(size) else None
        return Life(size, tuple(dict.fromkeys(at)), self.gains[array], far=True, half=half, argument=True)

    def _fetched(self, position: int, size: int) -> int:
        """The position at which a prefetch of an argument must start to end by `position`."""
        copied = size / self.rate
        start = max(position - 1, 0)
        while start and self.clock[position] - self.clock[start] < copied and not self._moves(start):
            start -= 1
        return start

    def _moves(self, position: int) -> bool:
        return self.kernels[position].kind in COLLECTIVES

    def _tables(self, life: Life, count: int) -> int:
        """Bookkeeping tables for `count` copies of a value between device and on-chip memory."""
        return count * (2 * SLICES if self._in_slices(life.bytes) else 1)

    def _in_slices(self, size: int) -> bool:
        return size >= SLICED and self.device.cores == 1

    def _writes_far(self, kernel: Kernel) -> bool:
        """Whether a kernel on a device of two cores writes its results to device memory.

        Loops and reductions are split between the cores; results of other kernels must be where both reach them.
        """
        return self.device.cores > 1 and not _split_between_cores(kernel, self.program)

    def _clock(self) -> list[float]:
        """Seconds at which each kernel begins, and the end, by the compiler's clock: everything in device memory.

        A collective takes as long as its operands and results in memory; links do not count.
        """
        takes = [self._takes(kernel, sizes) for kernel, sizes in zip(self.kernels, self.counted, strict=True)]
        for position in self._overlapped_gathers():
            takes[position] *= BESIDE
        return list(itertools.accumulate(takes, initial=0.0))

    def _takes(self, kernel: Kernel, sizes: dict[int, int]) -> float:
        """Seconds of a kernel with everything in device memory."""
        if kernel.kind in (BARRIER, ALLOCATED):
            return 0.0
        tiles = max((self.program.arrays[array].tiles for array in sizes), default=0)
        flops = max(kernel.flops, tiles * passes_of(kernel, self.program) * TILE_FLOPS) if tiles else kernel.flops
        return max(sum(sizes.values()) / self.rate, flops / self.device.peak_flops("bf16"))

    def _overlapped_gathers(self) -> set[int]:
        """On one core, all-gathers with a contraction since the previous all-gather, which they overlap."""
        found: set[int] = set()
        product = False
        for position, kernel in enumerate(self.kernels if self.device.cores == 1 else ()):
            if kernel.kind == "all-gather":
                found.update([position] if product else ())
                product = False
            product = product or bool(kernel.flops)
        return found

    def _counted(self, kernel: Kernel, sizes: dict[int, int]) -> dict[int, int]:
        """Array -> bytes that the compiler counts for it: for gathered rows of a table, their tiles."""
        moves = (self.program.steps[number] for number in kernel.steps)
        step = next((step for step in moves if step.kind == kernel.kind), None)
        if step is None or kernel.kind not in ("gather", "scatter") or not step.reads:
            return sizes
        table = step.reads[0]
        rank = len(self.program.graph.type_of(self.program.graph.ops[step.op].operands[0]).shape)
        tile = ROWS if rank <= 2 else 1
        taken = step.writes if kernel.kind == "gather" else step.reads[1:]
        rows = tile * sum(sizes.get(array, 0) for array in taken)
        if kernel.kind == "gather":
            return {array: rows if array == table else size for array, size in sizes.items()}
        if tile > 1 and self._zeros(table) and sum(sizes.get(array, 0) for array in step.writes) < 2 * rows:
            return {array: size if array in step.writes else 0 for array, size in sizes.items()}
        return {array: rows if array in (table, *step.writes) else size for array, size in sizes.items()}

    def _zeros(self, array: int) -> bool:
        """Whether an array is a constant written for a scatter: small ones fuse into it."""
        maker = self.program.arrays[array].maker
        return maker >= 0 and self.program.steps[maker].kind == "broadcast_in_dim"

    def _longest(self) -> float:
        """Seconds that a value may stay on chip between two uses."""
        return LONGEST_WAIT * self.device.on_chip_bytes / self.rate

    def _touched(self, kernel: Kernel) -> dict[int, int]:
        """Array -> bytes of it that a kernel reads or writes; of partial reads, as much as it returns."""
        if kernel.kind == JOINED:
            return joined_bytes(kernel, self.program, self.buffer_bytes)
        sizes = {array: self.buffer_bytes(self.program.arrays[array]) for array in kernel.writes}
        most = sum(sizes.values()) if kernel.kind in INDEXED else None
        sliced = self._dynamic_slices(kernel) if most is None and self.slices else {}
        for array in kernel.reads:
            size = self.buffer_bytes(self.program.arrays[array])
            taken = sliced.get(array) if most is None else most
            sizes[array] = size if taken is None else min(size, taken)
        return sizes

    def _moved(self, kernel: Kernel, sizes: Mapping[int, int]) -> Mapping[int, int]:
        """Reported bytes of a kernel: for a scatter's operand as much as its updates.

        An attention kernel reads keys and values again for each block of rows, unless they are one block.
        """
        if kernel.kind == ATTENTION:
            step = self.program.steps[kernel.steps[-1]]
            return {array: size * step.turns if array in step.reads[1:] else size for array, size in sizes.items()}
        if kernel.kind != "scatter":
            return sizes
        scatter = self.program.steps[kernel.steps[-1]]
        added = self.buffer_bytes(updates_of(self.program, scatter))
        within = (scatter.reads[0], *scatter.writes)
        return {array: min(size, added) if array in within else size for array, size in sizes.items()}

    def _dynamic_slices(self, kernel: Kernel) -> dict[int, int]:
        """Array -> bytes of a device's dynamic-slice, if the kernel reads nothing else of the array."""
        found: dict[int, int] = {}
        whole: set[int] = set()
        for number in kernel.steps:
            step = self.program.steps[number]
            if step.kind == SLICE:
                made = sum(self.buffer_bytes(self.program.arrays[array]) for array in step.writes)
                for array in dict.fromkeys(step.reads):
                    found[array] = found.get(array, 0) + made
            else:
                whole.update(step.reads)
        return {array: size for array, size in found.items() if array not in whole}

    def _bound_by_memory(self, kernel: Kernel, size: int) -> float:
        """Seconds that a kernel's traffic takes longer than its contractions; negative if shorter."""
        if kernel.kind in (BARRIER, ALLOCATED):
            return 0.0
        return size / self.rate - kernel.flops / self.device.peak_flops("bf16")


def _take_over(
    spans: dict[int, tuple[int, int]],
    evicted: Set[int],
    live: Liveness,
    kernels: Sequence[Kernel],
    program: Lowered,
) -> None:
    """Merge live ranges of results that take over an operand's buffer in device memory.

    All-reduces do, and kernels that read an array of the same size elementwise (XLA's `HeapSimulator`), also
    contractions that add it; not if it is a tuple element, since its user does not use the kernel itself, nor if
    operand or result are buffers of scatters. In 82 plans compiled with libtpu 0.0.51 (`aliasing_operands`), of 0.5 MB
    and more: 112 share such a buffer, 4 that should do not.
    """
    together = {held for array, held in live.buffers.items() if array != held}
    single = {kernel.writes[0] for kernel in kernels if len(kernel.writes) == 1} - together
    for position, kernel in enumerate(kernels):
        if kernel.kind == "all-reduce":
            for number in kernel.steps:
                step = program.steps[number]
                before, after = (live.buffers.get(array) for array in (step.reads[0], step.writes[0]))
                if before is not None and after is not None:
                    _join(spans, before, after, live)
            continue
        ends = [one for one in kernel.reads if one in single and spans.get(one, (0, -1))[1] == position]
        made_of = cache(partial(_by_element, kernel=kernel, program=program))
        for after in kernel.writes if ends else ():
            if after not in spans or after in together or after in evicted:
                continue
            before = next((one for one in ends if live.sizes[one] == live.sizes[after] and after in made_of(one)), None)
            if before is not None:
                _join(spans, before, after, live)
                ends.remove(before)


def _join(spans: dict[int, tuple[int, int]], before: int, after: int, live: Liveness) -> None:
    """Merge the live ranges of two arrays of one size in device memory, if one ends where the other is produced."""
    if before not in spans or after not in spans or live.sizes[before] != live.sizes[after]:
        return
    if spans[before][1] == spans[after][0]:
        spans[after] = (spans.pop(before)[0], spans[after][1])


def _by_element(before: int, kernel: Kernel, program: Lowered) -> Set[int]:
    """Arrays that a kernel computes elementwise from `before`; none if it contracts that."""
    found = {before}
    for number in kernel.steps:
        step = program.steps[number]
        if found.isdisjoint(step.reads):
            continue
        if step.kind in ELEMENTWISE or (step.kind in VIEWS and _same_elements(program, step)):
            found.update(step.writes)
        elif step.kind != "reduce":
            return frozenset()
    return found


def _same_elements(program: Lowered, step: Step) -> bool:
    shapes = [program.arrays[array].shape for array in (*step.reads, *step.writes)]
    return None not in shapes and len({math.prod(shape or ()) for shape in shapes}) == 1


def _and_gain(before: float | None, gain: float) -> float:
    """The seconds that uses of one value save together: a kernel that is not bound by memory adds nothing."""
    if before is None:
        return gain
    return before + gain if before > 0 and gain > 0 else max(before, gain)


def multiplies_matrices(program: Lowered, step: Step) -> bool:
    """Whether both operands of a contraction have free dims: a TPU runs others as loops in f32, and reduces."""
    op = program.graph.ops[step.op]
    if op.kind != "dot_general":
        return True
    for value, side in zip(op.operands, ("lhs", "rhs"), strict=True):
        taken = {*op.attrs[f"{side}_batch"], *op.attrs[f"{side}_contract"]}
        shape = program.graph.type_of(value).shape
        if all(size == 1 for dim, size in enumerate(shape) if dim not in taken):
            return False
    lhs = program.graph.type_of(op.operands[0]).shape
    return any(lhs[dim] > 1 for dim in op.attrs["lhs_contract"])


def product_with_vectors(kernel: Kernel, program: Lowered) -> Step | None:
    """The contraction that a kernel runs as a loop: an outer or a matrix-vector product."""
    for number in kernel.steps:
        step = program.steps[number]
        if step.kind in CONTRACTIONS:
            return None if multiplies_matrices(program, step) else step
    return None


def _split_between_cores(kernel: Kernel, program: Lowered) -> bool:
    """Whether two cores split a kernel: a loop or reduction without matrix products (libtpu on a v5p).

    Only of several ops: a single one is no fusion, and runs whole (35 programs for v5p: of single ops of 1 kB and more
    none of 1,260 results is on chip; of fused loops and reductions 2,605 of 3,186).
    """
    if len(kernel.steps) == 1:
        return False
    if kernel.flops and product_with_vectors(kernel, program) is None:
        return False
    return kernel.kind in LOOPS_OF_CORES or bool(kernel.flops)
