"""Kernels of several results on a TPU: products and loops with what reads their results, and sums over them.

As compiled (libtpu 0.0.51, v5e and v5p; read off the kernels of four transformers under three plans, and single ops in
tests): sums over what a product or a loop makes, over rows and over columns alike, are further results of that kernel,
as is what is elementwise and reads it; sums that read one array are one kernel; not so what needs another sum first, as
a variance needs the mean. Convolutions are products in this, and sums over the strips that they make no different
(ResNet's batch norms; not where a convolution is a loop).
"""

from __future__ import annotations

from collections.abc import Hashable

from autoshard.cost.compiler.kernels import Kernel
from autoshard.cost.compiler.lowered import Lowered, Step
from autoshard.cost.compiler.multi_output import merged_outputs
from autoshard.cost.compiler.tpu.conv_loops import ring
from autoshard.cost.compiler.tpu.loops import is_loop
from autoshard.cost.machine.compute import CONTRACTIONS
from autoshard.graph.groups import ELEMENTWISE


def several_results(kernels: list[Kernel], program: Lowered) -> list[Kernel]:
    """Merge kernels of products with what reads these; then loops with sums, and sums that read one array."""
    arrays, steps = program.arrays, program.steps
    sums = {array for kernel in kernels if kernel.kind == "reduce" for array in kernel.writes}
    products = {array for kernel in kernels if kernel.flops for array in kernel.writes}

    def size(kernel: Kernel) -> Hashable:
        """The elements that a kernel goes over, and the strips that these lie in; None where it runs alone."""
        if not kernel.steps:
            return None
        if kernel.flops and any(_alone(program, steps[number]) for number in kernel.steps):
            return None
        last = steps[kernel.steps[-1]]
        if last.kind == "reduce" and last.reads:
            found = arrays[last.reads[0]]
            return found.elements, found.strips
        if kernel.kind not in ELEMENTWISE and kernel.kind not in CONTRACTIONS:
            return None
        sizes = {(arrays[array].elements, arrays[array].strips) for array in kernel.writes}
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


def _alone(program: Lowered, step: Step) -> bool:
    """Whether a product is a loop."""
    return is_loop(program, step) or ring(program, step) is not None


def _leave_out(kernels: list[Kernel], program: Lowered) -> None:
    """What only the kernel reads that makes it is not written."""
    read = {array for kernel in kernels for array in kernel.reads}
    for kernel in kernels:
        arrays = ((array, program.arrays[array]) for array in kernel.writes)
        needed = tuple(array for array, found in arrays if array in read or found.returned or not found.readers)
        kernel.writes = needed or kernel.writes
