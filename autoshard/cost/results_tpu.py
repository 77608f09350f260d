"""Kernels of several results on a TPU: products and loops with what reads their results, and sums over them.

As compiled (libtpu 0.0.51, v5e and v5p; read off the kernels of four transformers under three plans, and single ops in
tests): sums over what a product or a loop makes, over rows and over columns alike, are further results of that kernel,
as is what is elementwise and reads it; sums that read one array are one kernel; not so what needs another sum first, as
a variance needs the mean. In nets of convolutions sums over what a convolution makes whole are results of its kernel,
and sums over what lies whole run together and with what makes it elementwise. So do those of strips, but these are left
alone: they stand for copies where strips end that are not predicted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable

from autoshard.cost.conv_loops_tpu import ring
from autoshard.cost.kernels import Kernel
from autoshard.cost.loops_tpu import is_loop
from autoshard.cost.lowered import Lowered, Step
from autoshard.cost.multi_output import merged_outputs
from autoshard.cost.rewrite_tpu import convolved
from autoshard.graph.groups import ELEMENTWISE

_MASKS = frozenset({"mask", "broadcast_in_dim"})


def several_results(kernels: list[Kernel], program: Lowered) -> list[Kernel]:
    """Merge kernels of products with what reads these; then loops with sums, and sums that read one array."""
    kinds = Counter(step.kind for step in program.steps)
    if kinds["convolution"] > kinds["dot_general"]:
        return _beside_convolutions(kernels, program)
    around = convolved(program)
    sums = {array for kernel in kernels if kernel.kind == "reduce" for array in kernel.writes}
    products = {array for kernel in kernels if kernel.flops for array in kernel.writes}

    def size(kernel: Kernel) -> Hashable:
        """The elements that a kernel goes over; None where it runs alone."""
        if not kernel.steps or not around.keys().isdisjoint((*kernel.reads, *kernel.writes)):
            return None
        if kernel.flops and any(is_loop(program, program.steps[number]) for number in kernel.steps):
            return None
        last = program.steps[kernel.steps[-1]]
        if last.kind == "reduce" and last.reads:
            return program.arrays[last.reads[0]].elements
        if kernel.kind not in ELEMENTWISE and kernel.kind != "dot_general":
            return None
        sizes = {program.arrays[array].elements for array in kernel.writes}
        return sizes.pop() if len(sizes) == 1 else None

    kernels = merged_outputs(
        kernels,
        size,
        products.__contains__,
        hero=lambda kernel: id(kernel) if kernel.flops else None,
        passes=lambda array: array not in sums,
        siblings=False,
    )
    kernels = merged_outputs(
        kernels,
        lambda kernel: None if kernel.flops else size(kernel),
        lambda array: True,
        alike=lambda one, other: "reduce" in (one.kind, other.kind),
        passes=lambda array: array not in sums,
    )
    _leave_out(kernels, program)
    return kernels


def _beside_convolutions(kernels: list[Kernel], program: Lowered) -> list[Kernel]:
    """Sums over activations that lie whole as further results: of convolutions that make them, and of loops."""
    arrays, steps = program.arrays, program.steps
    sums = {array for kernel in kernels if kernel.kind == "reduce" for array in kernel.writes}
    products = {array for kernel in kernels if kernel.flops for array in kernel.writes}

    def summed(kernel: Kernel) -> int | None:
        last = steps[kernel.steps[-1]] if kernel.steps else None
        return last.reads[0] if last is not None and last.kind == "reduce" and last.reads else None

    def direct(kernel: Kernel) -> Hashable:
        """The array that a convolution makes, or that a kernel sums and does nothing else with."""
        if kernel.flops:
            made = [array for array in kernel.writes if arrays[array].tiles and not arrays[array].strips]
            return made[0] if len(made) == 1 and ring_of(kernel) is None else None
        array = summed(kernel)
        return array if len([one for one in kernel.steps if steps[one].kind not in _MASKS]) == 1 else None

    def ring_of(kernel: Kernel) -> Step | None:
        found = (ring(program, steps[number]) for number in kernel.steps)
        return next((one for one in found if one is not None), None)

    def size(kernel: Kernel) -> Hashable:
        """The tiles of activations that lie whole that a kernel goes over; None where it runs alone."""
        array = None if kernel.flops else summed(kernel)
        if array is not None:
            return None if arrays[array].strips else tiles_of(array)
        if not kernel.steps or kernel.flops or kernel.kind not in ELEMENTWISE:
            return None
        sizes = {0 if arrays[array].strips else tiles_of(array) for array in kernel.writes}
        return sizes.pop() or None if len(sizes) == 1 else None

    def tiles_of(array: int) -> int:
        """Tiles of an activation; of what runs inside its readers those of what it is made of."""
        found = arrays[array]
        if found.tiles or found.maker < 0 or steps[found.maker].kind not in ELEMENTWISE:
            return found.tiles
        read = steps[found.maker].reads
        return max((tiles_of(one) for one in read if not arrays[one].strips), default=0)

    kernels = merged_outputs(
        kernels,
        direct,
        products.__contains__,
        hero=lambda kernel: id(kernel) if kernel.flops else None,
        siblings=False,
    )
    kernels = merged_outputs(
        kernels,
        size,
        lambda array: True,
        alike=lambda one, other: "reduce" in (one.kind, other.kind),
        passes=lambda array: array not in sums,
    )
    _leave_out(kernels, program)
    return kernels


def _leave_out(kernels: list[Kernel], program: Lowered) -> None:
    """What only the kernel reads that makes it is not written."""
    read = {array for kernel in kernels for array in kernel.reads}
    for kernel in kernels:
        arrays = ((array, program.arrays[array]) for array in kernel.writes)
        needed = tuple(array for array, found in arrays if array in read or found.returned or not found.readers)
        kernel.writes = needed or kernel.writes
