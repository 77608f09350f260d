"""A target's compiler, from one device's program to kernels, their schedule and their memory.

Each target family has a subclass of `Backend` in a module of its own; `backends.py` finds it.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar

import numpy as np

from autoshard.cost.compiler.heap import best_fit, packed
from autoshard.cost.compiler.kernels import Fusion, Kernel
from autoshard.cost.compiler.list_schedule import greedy
from autoshard.cost.compiler.lowered import Array, Lowered
from autoshard.cost.compiler.memory_order import FromResults
from autoshard.cost.compiler.schedule import (
    Dependencies,
    Liveness,
    Reads,
    beside_results,
    breadth_first,
    dependencies,
    liveness,
)
from autoshard.cost.compiler.traffic import touched
from autoshard.cost.machine.collectives import Collective
from autoshard.cost.machine.device import Device
from autoshard.cost.passes import Passes

Traffic = tuple[Mapping[int, float], Mapping[int, float]]
"""Array -> bytes that move beside a kernel's products, and bytes that stand for work after them."""


@dataclass(frozen=True)
class Placement:
    """Memory space assignment: which temporaries are in device memory, which on chip.

    Attributes:
        blocks: (first kernel, last kernel, bytes) of each temporary in device memory.
        bookkeeping: further bytes of device memory.
        touched: per kernel in the schedule, array -> the bytes of it that it reads and writes in device memory.
        copied: per kernel, array -> bytes copied to on-chip memory for its operands, or from there for its results.
    """

    blocks: tuple[tuple[int, int, int], ...] = field(repr=False)
    bookkeeping: int
    touched: tuple[Mapping[int, int], ...] = field(repr=False)
    copied: tuple[Mapping[int, int], ...] = field(repr=False)

    @cached_property
    def bytes(self) -> int:
        """Bytes of device memory for temporaries, fragmentation included."""
        return packed(self.blocks) + self.bookkeeping


@dataclass(frozen=True)
class Compiled:
    """A scheduled program of one device.

    Attributes:
        program: its steps and arrays.
        kernels: in schedule order.
        live: temporary memory over the schedule.
        argument_bytes, output_bytes: of arguments, and of results that alias no argument.
        placement: memory space assignment, for a device with on-chip memory.
        gaps: whether fragmentation counts as memory.
        unscheduled: the kernels before they were scheduled.
        sequence: their order by the memory scheduler, before collectives run beside kernels.
    """

    program: Lowered = field(repr=False)
    kernels: tuple[Kernel, ...] = field(repr=False)
    live: Liveness = field(repr=False)
    argument_bytes: int
    output_bytes: int
    placement: Placement | None = None
    gaps: bool = False
    unscheduled: tuple[Kernel, ...] = field(default=(), repr=False)
    sequence: tuple[int, ...] = field(default=(), repr=False)

    @property
    def flops(self) -> float:
        """FLOPs of dots and convolutions on one device."""
        return sum(kernel.flops for kernel in self.kernels)

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """The collectives of the kernels, in their order."""
        steps = [self.program.steps[number] for kernel in self.kernels for number in kernel.steps]
        return tuple(step.collective for step in steps if step.collective is not None)

    @property
    def touched(self) -> tuple[Mapping[int, int], ...]:
        """Per kernel, array -> the bytes of it that it reads and writes in device memory; none for collectives."""
        if self.placement is not None:
            return self.placement.touched
        return tuple(touched(kernel, self.program) for kernel in self.kernels)

    @property
    def copied(self) -> tuple[Mapping[int, int], ...]:
        """Per kernel, array -> bytes of copies between device and on-chip memory for its operands and results."""
        if self.placement is not None:
            return self.placement.copied
        return ({},) * len(self.kernels)

    @property
    def moved_bytes(self) -> int:
        """Bytes of device memory that one device's kernels and copies read and write, without collectives.

        Loops and branches included.
        """
        inner = sum(self.program.steps[number].inner[0] for kernel in self.kernels for number in kernel.steps)
        return round(inner) + sum(size for kernel in (*self.touched, *self.copied) for size in kernel.values())

    @cached_property
    def temporary_bytes(self) -> int:
        """Bytes of device memory for temporaries: neither arguments nor results."""
        if self.placement is not None:
            return self.placement.bytes
        live = self.live
        if not self.gaps:
            return live.peak
        return best_fit([(*span, live.sizes[array]) for array, span in live.spans.items()], live.peak)

    @property
    def peak_bytes(self) -> int:
        """Peak memory of one device: arguments (donated ones once), results and temporaries."""
        return self.argument_bytes + self.output_bytes + self.temporary_bytes


class Backend:
    """The passes of one compiler that decide about memory; subclasses override what differs."""

    alignment = 64
    """Bytes to which buffers are rounded up."""
    gaps = False
    """Whether fragmentation counts as memory."""
    reuses_results = True
    """Whether temporaries share buffers of results that are produced later."""
    started: Container[str] = ()
    """Kinds of collectives that are asynchronous before the memory scheduler runs."""
    fills_late = False
    """Whether a scatter's operand is zero-filled right before it."""

    combined_up_to: ClassVar[Mapping[str, float]] = {}
    """Kinds of collectives whose independent ones are combined -> maximal bytes of combined results."""
    copies_of_combined: ClassVar[Mapping[str, int]] = {}
    """Reads and writes of a combined collective's data in memory beside those of the collective itself."""

    def __init__(self, device: Device) -> None:
        """For one device kind."""
        self.device = device

    def buffer_bytes(self, array: Array) -> int:
        """Bytes of an array's buffer."""
        return -(-array.bytes // self.alignment) * self.alignment

    def layouts(self, program: Lowered) -> Mapping[int, Callable[[tuple[int, ...]], int]]:
        """Arrays in layouts that may pad them -> elements, padding included, under a shape of their rank."""
        return {}

    def kernel_seconds(self, compiled: Compiled) -> list[float | None]:
        """Per kernel its seconds, copies included, by a model of this compiler's kernels; None: the roofline's."""
        return [None] * len(compiled.kernels)

    def timed_as_traffic(self, compiled: Compiled) -> Sequence[Traffic]:
        """Per kernel the bytes whose transfer takes as long as the kernel does."""
        return [(touched, {}) for touched in compiled.touched]

    @property
    def rewrites(self) -> Passes[Lowered]:
        """Passes before fusion: layouts, copies, padding."""
        return Passes()

    def fusion(self, program: Lowered) -> Fusion:
        """The fusion pass of this compiler."""
        return Fusion(program)

    def store(self, kernels: Sequence[Kernel], program: Lowered) -> None:
        """Set the dtypes and sizes in which kernels store their results."""

    def combine(self, kernels: list[Kernel], program: Lowered) -> list[Kernel]:
        """The kernels with collectives combined."""
        return kernels

    def order(self, kernels: Sequence[Kernel], deps: Dependencies, program: Lowered) -> list[int]:
        """The schedule: kernel numbers in order."""
        return breadth_first(deps)

    def reads(self, kernels: Sequence[Kernel], program: Lowered) -> Reads:
        """The instructions that kernels read."""
        return Reads.of_arrays(kernels)

    def lowest_peak(self, kernels: Sequence[Kernel], deps: Dependencies, program: Lowered) -> list[int]:
        """The one with the lowest peak of three schedules (`DefaultMemoryScheduler`)."""
        arrays, reads = program.arrays, self.reads(kernels, program)
        found = FromResults(kernels, deps, reads, arrays, program.results, self.buffer_bytes)
        last = found.post_order()
        first = greedy(kernels, deps, arrays, reads, listed=last, started=self.started, late=self.fills_late)
        orders = [first, found.depth_first(), last]
        return min(orders, key=lambda order: liveness(kernels, order, arrays, self.buffer_bytes, results=True).peak)

    def place(self, kernels: Sequence[Kernel], program: Lowered, live: Liveness) -> Placement | None:
        """Memory space assignment of scheduled kernels; None: all temporaries in device memory."""
        return None

    def overlap(
        self, kernels: list[Kernel], order: list[int], deps: Dependencies, program: Lowered
    ) -> tuple[list[Kernel], list[int]]:
        """Kernels and schedule with asynchronous collectives that overlap kernels."""
        return kernels, order

    def compile(self, program: Lowered) -> Compiled:
        """Kernels, schedule and memory of one device's program."""
        return self.scheduled(*self.fused(program))

    def fused(self, program: Lowered) -> tuple[list[Kernel], Lowered]:
        """The kernels of one device's program before they are scheduled, and the program rewritten for them."""
        program = self.rewrites(program)
        kernels = self.fusion(program).kernels()
        self.store(kernels, program)
        return self.combine(kernels, program), program

    def listed(self, program: Lowered) -> Compiled:
        """The kernels without schedule and memory; as scheduled for a device that places values on chip."""
        if self.device.on_chip_bytes:
            return self.compile(program)
        kernels, program = self.fused(program)
        return Compiled(program, tuple(kernels), Liveness(np.zeros(0), {}, {}, {}), 0, 0)

    def scheduled(self, kernels: list[Kernel], program: Lowered, sequence: Sequence[int] = ()) -> Compiled:
        """The schedule of a program's kernels, and its memory.

        Args:
            sequence: the order by the memory scheduler, where it is known.
        """
        unscheduled = tuple(kernels)
        deps = dependencies(kernels)
        sequence = tuple(sequence or self.order(kernels, deps, program))
        kernels, order = self.overlap(kernels, list(sequence), deps, program)
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
        found = Compiled(program, ordered, live, arguments, outputs, None, self.gaps, unscheduled, sequence)
        return self.placed(found)

    def placed(self, compiled: Compiled) -> Compiled:
        """The same kernels and schedule, with memory space assignment anew for this device."""
        return replace(compiled, placement=self.place(compiled.kernels, compiled.program, compiled.live))
