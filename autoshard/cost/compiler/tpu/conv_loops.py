"""Convolutions as windowed einsums on TPU: loops that permute shards of the kernel.

A loop (`cost/partitioner/ops/conv.py`) reads materialised images and materialises its result: nothing fuses into it. If
shards split the contracted features (an input gradient, a transposed convolution), every iteration adds to one result.
The buffer for that has no operands, so the latency hiding scheduler, which works backwards, allocates it only in a gap
without other work: among the permutes before the loops. Of these at most `IN_FLIGHT` are in flight; one more starts
after each loop, and half of the others run in one gap (libtpu 0.0.51 on v5e: with 3, 4, 6, 9, 12, 13 and 16 rings the
gap is before loop 1, 1, 2, 5, 5, 6 and 9; predicted 1, 1, 2, 4, 5, 6 and 7). On two cores each buffer is allocated
right before its loop.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from autoshard.cost.compiler.kernels import Kernel
from autoshard.cost.compiler.lowered import Array, Lowered, Step
from autoshard.cost.machine.figures import whole

IN_FLIGHT = whole("ring_in_flight")

ALLOCATED = "allocate"
"""The kind of a kernel that allocates a loop's buffer."""


def ring(program: Lowered, step: Step) -> Step | None:
    """The permute of a convolution's kernel if it is a windowed einsum; else None."""
    for array in step.reads[1:] if step.kind == "convolution" else ():
        maker = program.arrays[array].maker
        if maker >= 0 and program.steps[maker].kind == "collective-permute" and program.steps[maker].op == step.op:
            return program.steps[maker]
    return None


def adds_up(program: Lowered, step: Step) -> bool:
    """Whether the permuted shards split the features that the convolution contracts."""
    permute = ring(program, step)
    if permute is None:
        return False
    op = program.graph.ops[step.op]
    moved = program.arrays[permute.reads[0]]
    whole, part = program.graph.type_of(op.operands[1]).shape, moved.logical if moved.shape is None else moved.shape
    within = op.attrs["rhs"][1]
    return part is not None and len(part) == len(whole) and part[within] < whole[within]


def turns(program: Lowered, step: Step) -> int:
    """How many shards of its kernel a convolution works through, one after another; 1 if it is no windowed einsum."""
    permute = ring(program, step)
    part = 0 if permute is None else program.arrays[permute.reads[0]].elements
    if not part:
        return 1
    return math.prod(program.graph.type_of(program.graph.ops[step.op].operands[1]).shape) // part


def passes(program: Lowered, step: Step) -> int:
    """How often a convolution works on each tile of its images: once per iteration, twice if it does not accumulate.

    As seen in loops of 8 iterations, cycles per tile and iteration: 37 for slices of the result, 12 to accumulate.
    """
    rounds = turns(program, step)
    return rounds if rounds == 1 or adds_up(program, step) else 2 * rounds


def allocated_early(kernels: list[Kernel], order: Sequence[int], program: Lowered) -> tuple[list[Kernel], list[int]]:
    """Allocate results of accumulating loops in the gap, if they run after it."""
    loops: dict[int, Step] = {}
    for number, kernel in enumerate(kernels):
        for one in kernel.steps:
            if ring(program, program.steps[one]) is not None:
                loops[number] = program.steps[one]
    if not loops:
        return kernels, list(order)
    rings = {_kernel(program, step) for step in loops.values()}
    before = -(-max(0, len(rings) - IN_FLIGHT) // 2)
    running = [number for number in order if number in loops]
    found, allocated = list(kernels), list[int]()
    for number in running[before:]:
        if adds_up(program, loops[number]):
            made = loops[number].writes[0]
            kind = program.arrays[made]
            program.arrays.append(Array(kind.shape, kind.dtype, kind.bytes, kind.maker, tiles=kind.tiles))
            buffer = len(program.arrays) - 1
            kernel = found[number]
            allocated.append(len(found))
            found.append(Kernel((), (), (buffer,), ALLOCATED, kernel.place))
            displaced = kernel.displaced | set(kernel.reads)
            found[number] = replace(kernel, reads=(*kernel.reads, buffer), shares=True, displaced=frozenset(displaced))
    if not allocated:
        return kernels, list(order)
    gap = running[before]
    return found, [each for number in order for each in ((*allocated, number) if number == gap else (number,))]


def _kernel(program: Lowered, step: Step) -> int:
    """The kernel of a looped convolution, before transposes and reversals."""
    permute = ring(program, step)
    array = step.reads[1] if permute is None else permute.reads[0]
    while (maker := program.arrays[array].maker) >= 0 and program.steps[maker].kind in ("transpose", "reverse"):
        array = program.steps[maker].reads[0]
    return array
