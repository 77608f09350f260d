"""What a target's compiler makes of one device's program: kernels, their order, and the memory that they take.

One `Backend` per target family, in a module of its own; `backends.py` finds it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar

from autoshard.cost.compiler.heap import best_fit, packed
from autoshard.cost.compiler.kernels import Fusion, Kernel
from autoshard.cost.compiler.lowered import Array, Lowered
from autoshard.cost.compiler.schedule import (
    Dependencies,
    Liveness,
    beside_results,
    breadth_first,
    dependencies,
    depth_first,
    greedy,
    liveness,
    post_order,
    results_in_order,
)
from autoshard.cost.compiler.traffic import touched
from autoshard.cost.machine.device import Device
from autoshard.cost.passes import Passes


@dataclass(frozen=True)
class Placement:
    """Where a compiler with on-chip memory keeps temporaries.

    Attributes:
        blocks: (first kernel, last kernel, bytes) of what lies in device memory.
        bookkeeping: bytes of device memory beside it.
        touched: per kernel, in order, array -> the bytes of it that it reads and writes in device memory.
        copied: per kernel, array -> bytes that are copied on chip for it, or from there what it makes.
    """

    blocks: tuple[tuple[int, int, int], ...] = field(repr=False)
    bookkeeping: int
    touched: tuple[Mapping[int, int], ...] = field(repr=False)
    copied: tuple[Mapping[int, int], ...] = field(repr=False)

    @cached_property
    def bytes(self) -> int:
        """Of device memory for temporaries, gaps included."""
        return packed(self.blocks) + self.bookkeeping


@dataclass(frozen=True)
class Compiled:
    """A device's program as a compiler would run it.

    Attributes:
        program: its steps and arrays.
        kernels: in the order in which they run.
        live: temporary memory over that order.
        argument_bytes, output_bytes: of arguments, and of results that replace none.
        placement: where temporaries lie, of a device with on-chip memory.
        gaps: whether the gaps between temporaries count as memory.
    """

    program: Lowered = field(repr=False)
    kernels: tuple[Kernel, ...] = field(repr=False)
    live: Liveness = field(repr=False)
    argument_bytes: int
    output_bytes: int
    placement: Placement | None = None
    gaps: bool = False

    @property
    def flops(self) -> float:
        """FLOPs of dots and convolutions on one device."""
        return sum(kernel.flops for kernel in self.kernels)

    @property
    def touched(self) -> tuple[Mapping[int, int], ...]:
        """Per kernel, array -> the bytes of it that it reads and writes in device memory; none for collectives."""
        if self.placement is not None:
            return self.placement.touched
        return tuple(touched(kernel, self.program) for kernel in self.kernels)

    @property
    def copied(self) -> tuple[Mapping[int, int], ...]:
        """Per kernel, array -> bytes of copies between device and on-chip memory, for what it reads or makes."""
        if self.placement is not None:
            return self.placement.copied
        return ({},) * len(self.kernels)

    @property
    def moved_bytes(self) -> int:
        """Bytes of device memory that one device's kernels, and copies, read and write; collectives left out.

        Loops and branches included.
        """
        inner = sum(self.program.steps[number].inner[0] for kernel in self.kernels for number in kernel.steps)
        return round(inner) + sum(size for kernel in (*self.touched, *self.copied) for size in kernel.values())

    @cached_property
    def temporary_bytes(self) -> int:
        """Bytes of device memory for what is neither argument nor result."""
        if self.placement is not None:
            return self.placement.bytes
        live = self.live
        if not self.gaps:
            return live.peak
        return max(live.peak, best_fit([(*span, live.sizes[array]) for array, span in live.spans.items()]))

    @property
    def peak_bytes(self) -> int:
        """Arguments (donated ones once), results and temporaries: all that one device holds at most."""
        return self.argument_bytes + self.output_bytes + self.temporary_bytes


class Backend:
    """The passes of one compiler that decide what is in memory; subclasses say how theirs differ."""

    alignment = 64
    """Bytes to which buffers are rounded up."""
    gaps = False
    """Whether the gaps between temporaries count as memory."""
    reuses_results = True
    """Whether temporaries lie in buffers of results before these are made."""
    fills_late = False
    """Whether what is scattered into is cleared right before that."""

    combined_up_to: ClassVar[Mapping[str, float]] = {}
    """Kinds of collectives of which independent ones run as one, and up to how many bytes of results."""
    copies_of_combined: ClassVar[Mapping[str, int]] = {}
    """How often what is combined is read or written in memory beside what the collective itself does."""

    def __init__(self, device: Device) -> None:
        """For one device kind."""
        self.device = device

    def buffer_bytes(self, array: Array) -> int:
        """Bytes of an array's buffer."""
        return -(-array.bytes // self.alignment) * self.alignment

    def elements_made_by(self, kind: str) -> Callable[[tuple[int, ...]], int]:
        """Shape -> elements, padding included, of an array that an op of this StableHLO kind makes."""
        return math.prod

    def early_seconds(self, compiled: Compiled) -> float:
        """Seconds of copies that a program has as soon as it gathers anything."""
        return 0.0

    @property
    def rewrites(self) -> Passes[Lowered]:
        """What is rewritten before fusion: layouts, copies, padding."""
        return Passes()

    def fusion(self, program: Lowered) -> Fusion:
        """Which steps run as one."""
        return Fusion(program)

    def store(self, kernels: Sequence[Kernel], program: Lowered) -> None:
        """Change dtypes and sizes of the arrays that kernels write to those that they are kept in."""

    def combine(self, kernels: list[Kernel], program: Lowered) -> list[Kernel]:
        """Collectives merged."""
        return kernels

    def order(self, kernels: Sequence[Kernel], deps: Dependencies, program: Lowered) -> list[int]:
        """In which order the kernels run."""
        return breadth_first(deps)

    def lowest_peak(self, kernels: Sequence[Kernel], deps: Dependencies, program: Lowered) -> list[int]:
        """The order with the lowest peak of three (`DefaultMemoryScheduler`)."""
        arrays = program.arrays
        sizes = [sum(arrays[array].bytes for array in kernel.writes) for kernel in kernels]
        results = results_in_order(kernels, program)
        first = greedy(kernels, deps, arrays, late=self.fills_late)
        orders = [first, depth_first(deps, results, sizes), post_order(deps, results)]
        return min(orders, key=lambda order: liveness(kernels, order, arrays, self.buffer_bytes, results=True).peak)

    def place(self, kernels: Sequence[Kernel], program: Lowered, live: Liveness) -> Placement | None:
        """Where the temporaries of kernels in their order lie; None: all in device memory."""
        return None

    def overlap(
        self, kernels: list[Kernel], order: list[int], deps: Dependencies, program: Lowered
    ) -> tuple[list[Kernel], list[int]]:
        """Kernels and order once collectives run beside kernels."""
        return kernels, order

    def compile(self, program: Lowered) -> Compiled:
        """Kernels, order and memory of one device's program."""
        program = self.rewrites(program)
        kernels = self.fusion(program).kernels()
        self.store(kernels, program)
        kernels = self.combine(kernels, program)
        deps = dependencies(kernels)
        order = self.order(kernels, deps, program)
        kernels, order = self.overlap(kernels, order, deps, program)
        live = liveness(kernels, order, program.arrays, self.buffer_bytes)
        arguments = sum(self.buffer_bytes(array) for array in program.arrays if array.maker < 0)
        outputs = sum(
            self.buffer_bytes(array)
            for array in program.arrays
            if array.returned and not array.donated and array.maker >= 0
        )
        ordered = tuple(kernels[number] for number in order)
        if self.reuses_results:
            live = beside_results(live, ordered, program.arrays, self.buffer_bytes)
        return self.placed(Compiled(program, ordered, live, arguments, outputs, gaps=self.gaps))

    def placed(self, compiled: Compiled) -> Compiled:
        """The same kernels in the same order, with temporaries where this device has room for them."""
        return replace(compiled, placement=self.place(compiled.kernels, compiled.program, compiled.live))
