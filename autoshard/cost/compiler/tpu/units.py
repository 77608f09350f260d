"""Kernels as work of a TPU's matrix and vector units, and their seconds (`cost/machine/cycles.py`)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from autoshard.cost.compiler.backend import Compiled, Traffic
from autoshard.cost.compiler.kernels import Kernel
from autoshard.cost.compiler.lowered import COLLECTIVES, Lowered, Step, matrices_of
from autoshard.cost.compiler.tpu.conv_loops import adds_up, turns
from autoshard.cost.compiler.tpu.layout import tiled
from autoshard.cost.compiler.tpu.strips import padded
from autoshard.cost.machine.cycles import (
    CLASSES,
    DTYPES,
    TILE,
    Model,
    Products,
    away_share,
    class_of,
    convolved,
    kernel_cycles,
    product_cycles,
)
from autoshard.cost.machine.device import Device
from autoshard.cost.machine.tiles import LANES, ROWS
from autoshard.dtypes import dtype_bytes

ITS_OWN = frozenset(
    """gather scatter sort top_k reduce_window select_and_scatter rng_bit_generator while case fft cholesky
    triangular_solve custom_call dynamic_update_slice""".split()  # noqa: SIM905
)
"""Kinds that libtpu makes loops of, without an estimate."""

_PAGE = 4 * TILE
"""Bytes of a register."""


def kernel_seconds(
    kernels: Sequence[Kernel], moved: Sequence[float], program: Lowered, model: Model, device: Device
) -> list[float | None]:
    """Seconds of each kernel; None for one of which libtpu makes no estimate.

    Args:
        moved: bytes between each kernel and device memory.
    """
    timed = [number for number, kernel in enumerate(kernels) if _is_timed(kernel, program)]
    found: list[float | None] = [None] * len(kernels)
    if not timed:
        return found
    sizes = _Sizes(program)
    registers = np.array([sizes.registers(kernels[number]) for number in timed])
    away = np.array([moved[number] for number in timed])
    shares = away_share(registers, away)
    products, owners = [], []
    narrow = np.zeros(len(timed))
    for place, number in enumerate(timed):
        for one in sizes.products(kernels[number]):
            products.append(one.sizes(shares[place]))
            owners.append(place)
            narrow[place] = one.narrow
    of_products = np.zeros(len(timed))
    if products:
        np.add.at(of_products, owners, product_cycles(np.array(products).T, model.constants, device))
    busy = kernel_cycles(of_products, narrow, registers, away, model.constants, device)
    none = np.zeros(1)
    for place, number in enumerate(timed):
        for count, each in sizes.around(kernels[number]):
            busy[place] += count * kernel_cycles(none, none, np.array([each]), none, model.constants, device)[0]
    for number, cycles in zip(timed, busy.tolist(), strict=True):
        found[number] = cycles / device.clock
    return found


def _is_timed(kernel: Kernel, program: Lowered) -> bool:
    if not kernel.steps or kernel.kind in COLLECTIVES or not kernel.writes:
        return False
    for number in kernel.steps:
        step = program.steps[number]
        if step.kind in ITS_OWN or step.inner != (0.0, 0.0) or (step.flops and not _is_product(step)):
            return False
        if step.flops and step.reads and program.arrays[step.reads[0]].dtype not in DTYPES:
            return False
    return True


def _is_product(step: Step) -> bool:
    return len(step.shapes) == {"dot_general": 2, "convolution": 3}.get(step.kind)


class _Sizes:
    """Registers of the arrays of one program."""

    def __init__(self, program: Lowered) -> None:
        self.program = program
        self.known: dict[int, float] = {}

    def of(self, array: int) -> float:
        """Registers of an array's elements, padding included."""
        if array not in self.known:
            found = self.program.arrays[array]
            elements = found.elements if found.shape is None else tiled(found.shape)
            self.known[array] = found.tiles or elements / TILE
        return self.known[array]

    def bytes(self, array: int) -> float:
        found = self.program.arrays[array]
        if found.tiles:
            return found.bytes
        return self.of(array) * TILE * (found.bytes / max(found.elements, 1))

    def registers(self, kernel: Kernel) -> list[float]:
        """Of each of `CLASSES`."""
        found = dict.fromkeys(CLASSES, 0.0)
        for number in kernel.steps:
            step = self.program.steps[number]
            if step.kind == "reduce" and step.reads:
                source = self.program.arrays[step.reads[0]]
                dims = self.program.graph.ops[step.op].attrs.get("dims", ())
                lanes = source.shape is not None and len(source.shape) - 1 in dims
                found["summed_lanes" if lanes else "summed_rows"] += self.of(step.reads[0])
            elif step.writes and (kind := class_of(step.kind)) is not None:
                found[kind] += self.of(step.writes[0])
        found["tiles"] = max(map(self.of, (*kernel.reads, *kernel.writes)), default=0.0)
        found["read"] = sum(map(self.bytes, kernel.reads)) / _PAGE
        found["written"] = sum(map(self.bytes, kernel.writes)) / _PAGE
        return list(found.values())

    def products(self, kernel: Kernel) -> list[Products]:
        """A kernel's products and convolutions."""
        found = []
        largest = max(kernel.writes, key=lambda array: self.program.arrays[array].elements)
        narrow = dtype_bytes(self.program.arrays[largest].dtype) < 4
        for number in kernel.steps:
            step = self.program.steps[number]
            if step.flops and step.kind == "dot_general":
                one = Products(*matrices_of(self.program, step), narrow)
                found.append(replace(one, wide=self.wide(kernel, one)))
            elif step.flops:
                found.append(self.convolution(step, narrow))
        return found

    def wide(self, kernel: Kernel, product: Products) -> int:
        """How many operands of a product its kernel reads in f32, before it converts them."""
        operands = product.batch * product.m * product.k, product.batch * product.k * product.n
        read = [self.program.arrays[array] for array in kernel.reads]
        return sum(any(each.dtype == "f32" and each.elements == size for each in read) for size in operands)

    def convolution(self, step: Step, narrow: bool) -> Products:
        """A convolution, of strips with their padding, in a loop of permutes with one per shard of its kernel."""
        op, (_, kernel, made) = self.program.graph.ops[step.op], step.shapes
        one = convolved(kernel, made, op.attrs, narrow)
        strips = padded(self.program, step)
        if strips > 1:
            one = replace(one, m=one.m * strips, tiles=0.0) if one.taps else replace(one, k=one.k * strips)
        rounds = turns(self.program, step)
        if adds_up(self.program, step):
            return replace(one, batch=rounds, k=math.ceil(one.k / rounds))
        columns = math.ceil(one.n / rounds)
        tiles = one.tiles * math.ceil(columns / LANES) / math.ceil(one.n / LANES)
        return replace(one, batch=one.batch * rounds, n=columns, tiles=tiles)

    def around(self, kernel: Kernel) -> Iterator[tuple[int, list[float]]]:
        """Kernels of a loop that makes its result in parts, their number and registers of each of `CLASSES`.

        One fills the result; others put parts of it in place, two at a time.
        """
        for number in kernel.steps:
            step = self.program.steps[number]
            rounds = turns(self.program, step)
            if rounds == 1 or adds_up(self.program, step):
                continue
            one, result = self.convolution(step, False), step.writes[0]
            wide = math.ceil(one.n / LANES)
            moved = 2 * one.m / ROWS * wide
            fills = {"tiles": self.of(result), "written": self.bytes(result) / _PAGE}
            puts = {"tiles": 2 * one.tiles or moved, "read": moved, "written": moved}
            for count, each in ((1, fills), (rounds // 2, puts)):
                yield count, [each.get(name, 0.0) for name in CLASSES]


def as_traffic(compiled: Compiled, seconds: Sequence[float | None], model: Model, device: Device) -> list[Traffic]:
    """Bytes that device memory would move in the time that kernels take.

    Of kernels with a model and without products all bytes stand for their seconds; of those with products what they
    touch is beside these, and slow ops come on top.
    """
    program = compiled.program
    sizes = _Sizes(program)
    found: list[Traffic] = []
    rate, start = device.reachable_bandwidth, model.constants.start / device.clock
    for kernel, touched, taken in zip(compiled.kernels, compiled.touched, seconds, strict=True):
        if taken is None:
            found.append((touched, {}))
        elif kernel.flops:
            steps = [program.steps[number] for number in kernel.steps]
            slow = {step.writes[0]: step for step in steps if step.writes and class_of(step.kind) == "slow"}
            each = model.constants.fused * rate / device.clock
            found.append((touched, {array: each * sizes.of(array) for array in slow}))
        else:
            bytes_of = {array: sizes.bytes(array) for array in dict.fromkeys((*kernel.reads, *kernel.writes))}
            scale = (taken - start) * rate / (sum(bytes_of.values()) or 1.0)
            found.append(({array: size * scale for array, size in bytes_of.items()}, {}))
    return found
