"""Kernels of several results on a TPU: products and loops with what reads their results, and sums over them.

As compiled (libtpu 0.0.51, v5e and v5p; read off the kernels of four transformers under three plans, and single ops in
tests): sums over what a product or a loop makes, over rows and over columns alike, are further results of that kernel,
as is what is elementwise and reads it; sums that read one array are one kernel; not so what needs another sum first, as
a variance needs the mean. Nets of convolutions are left as they are: theirs lie in strips, and were not read off.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable

from autoshard.cost.kernels import Kernel
from autoshard.cost.loops_tpu import is_loop
from autoshard.cost.lowered import Lowered
from autoshard.cost.multi_output import merged_outputs
from autoshard.cost.rewrite_tpu import convolved
from autoshard.graph.groups import ELEMENTWISE


def several_results(kernels: list[Kernel], program: Lowered) -> list[Kernel]:
    """Merge kernels of products with what reads these; then loops with sums, and sums that read one array."""
    kinds = Counter(step.kind for step in program.steps)
    if kinds["convolution"] > kinds["dot_general"]:
        return kernels
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


def _leave_out(kernels: list[Kernel], program: Lowered) -> None:
    """What only the kernel reads that makes it is not written."""
    read = {array for kernel in kernels for array in kernel.reads}
    for kernel in kernels:
        arrays = ((array, program.arrays[array]) for array in kernel.writes)
        needed = tuple(array for array, found in arrays if array in read or found.returned or not found.readers)
        kernel.writes = needed or kernel.writes
