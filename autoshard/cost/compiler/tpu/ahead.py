"""What lies in a TPU's on-chip memory when a program begins: fetched as the program before it ends.

XLA's memory space assignment calls it cross-program prefetch: one argument, the largest that fits of those that the
program does not update or return and that only lookups and products read, by which it tells weights from activations
(`LooksLikeAnActivation`, xla/service/memory_space_assignment). So no step that trains all its parameters has one, and
nearly every forward pass does: of 62 compiled for v5e and v5p (libtpu 0.0.51) its size is this in 60, or there is none
as here; of several of that size it may be another one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autoshard.cost.compiler.kernels import Kernel
from autoshard.cost.compiler.lowered import SLICE, Array, Lowered
from autoshard.cost.compiler.tpu.loops import is_loop


def fetched_ahead(
    kernels: Sequence[Kernel], program: Lowered, buffer_bytes: Callable[[Array], int], capacity: int
) -> int | None:
    """The argument that is on chip before the first of `kernels`; of several of one size the one that is read last.

    Args:
        kernels: in the order in which they run.
        capacity: bytes of on-chip memory.
    """
    left_out = {*program.updates.values(), *program.results}
    last: dict[int, int] = {}
    for position, kernel in enumerate(kernels):
        for array in kernel.reads:
            if program.arrays[array].maker < 0 and array not in left_out:
                last[array] = position
                if not _as_weight(kernel, array, program):
                    left_out.add(array)
    sizes = {array: buffer_bytes(program.arrays[array]) for array in last if array not in left_out}
    fitting = [array for array, size in sizes.items() if size <= capacity]
    return max(fitting, key=lambda array: (sizes[array], last[array]), default=None)


def _as_weight(kernel: Kernel, array: int, program: Lowered) -> bool:
    """Whether a kernel looks up in an array, multiplies it or a part, not in a loop, or convolves with it."""
    steps = [program.steps[number] for number in kernel.steps]
    reads = [(step, place) for step in steps for place, read in enumerate(step.reads) if read == array]
    return bool(reads) and all(
        (step.kind, place) in (("gather", 0), ("convolution", 1))
        or (step.kind == "dot_general" and not is_loop(program, step))
        or (step.kind == SLICE and kernel.flops > 0)
        for step, place in reads
    )
