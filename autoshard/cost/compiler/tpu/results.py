"""Multi-output fusion on TPU: contractions and loops with users of their results, reductions of these, slices.

As compiled (libtpu 0.0.51, v5e and v5p; transformers under three plans, and single ops in tests): row and column
reductions of a contraction's or a loop's result are further results of its kernel, as are elementwise users; reductions
of one array are one kernel; not so one that needs another reduction first, as a variance needs the mean. Convolutions
count as contractions, and reductions over their strips do too (batch norms); not windowed einsums. Slices of one array,
such as queries, keys and values of one projection, are one kernel.
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
    """Merge contractions with their users; then loops with reductions, reductions of one array, and slices of one."""
    arrays, steps = program.arrays, program.steps
    sums = {array for kernel in kernels if kernel.kind == "reduce" for array in kernel.writes}
    products = {array for kernel in kernels if kernel.flops for array in kernel.writes}

    def size(kernel: Kernel) -> Hashable:
        """(elements, strips) that a kernel iterates over; None for kernels that never merge."""
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
    kernels = merged_outputs(kernels, lambda kernel: _sliced(kernel, program), lambda array: True)
    _leave_out(kernels, program)
    return kernels


def _sliced(kernel: Kernel, program: Lowered) -> Hashable:
    """Elements of each result of a kernel that slices and transposes an array; None for other kernels."""
    kinds = {program.steps[number].kind for number in kernel.steps}
    if not kinds or not kinds <= {"slice", "transpose"} or "slice" not in kinds:
        return None
    return tuple(program.arrays[array].elements for array in kernel.writes)


def _alone(program: Lowered, step: Step) -> bool:
    """Whether a contraction is a windowed einsum."""
    return is_loop(program, step) or ring(program, step) is not None


def _leave_out(kernels: list[Kernel], program: Lowered) -> None:
    """Drop results whose only user is their own kernel."""
    read = {array for kernel in kernels for array in kernel.reads}
    for kernel in kernels:
        arrays = ((array, program.arrays[array]) for array in kernel.writes)
        needed = tuple(array for array, found in arrays if array in read or found.returned or not found.readers)
        kernel.writes = needed or kernel.writes
