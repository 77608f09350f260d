"""libtpu's criterion to choose one of the memory scheduler's schedules.

`DefaultMemoryScheduler` of libtpu 0.0.51 logs the peak of each schedule and its choice
(`TPU_VMODULE=hlo_memory_scheduler=5`); the schedule is among the pass dumps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from autoshard.cost.compiler.kernels import Kernel
from autoshard.cost.compiler.lowered import Array, Lowered

Rounded = Callable[[Array], int]
"""Bytes of an array's buffer."""


def counted_peak(kernels: Sequence[Kernel], order: Sequence[int], program: Lowered, rounded: Rounded) -> int:
    """Peak of a schedule by the scheduler's count, without arguments (`MinimumMemoryForModule`).

    Donated arguments die at their last user, beside the result that replaces them; only all-reduces take over a buffer.
    This count agrees with libtpu's log for six scheduled modules.
    """
    arrays = program.arrays
    last = {array: position for position, number in enumerate(order) for array in kernels[number].reads}
    change = np.zeros(len(order) + 1, dtype=np.int64)
    for position, number in enumerate(order):
        kernel = kernels[number]
        ending = [
            rounded(arrays[array])
            for array in (kernel.reads if kernel.kind == "all-reduce" else ())
            if last[array] == position and arrays[array].maker >= 0 and not arrays[array].returned
        ]
        for array in kernel.writes:
            size = rounded(arrays[array])
            taken = size in ending
            if taken:
                ending.remove(size)
                change[position + 1] += size
            else:
                change[position] += size
            change[len(order) if arrays[array].returned else last.get(array, position) + 1] -= size
    for result, argument in program.updates.items():
        if arrays[result].maker >= 0:
            change[last.get(argument, -1) + 1] -= rounded(arrays[argument])
    return int(np.cumsum(change[:-1]).max(initial=0))
