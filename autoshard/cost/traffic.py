"""Bytes of device memory that kernels read and write."""

from __future__ import annotations

from autoshard.cost.kernels import Kernel
from autoshard.cost.lowered import COLLECTIVES, SLICE, Lowered

PARTIAL = frozenset({"slice", "dynamic_slice", "gather", SLICE})
"""Kinds that read of their first operand only what they take."""


def kernel_bytes(kernel: Kernel, program: Lowered) -> int:
    """Bytes that one kernel reads and writes; collectives move theirs over links, and count nothing here."""
    if kernel.kind in COLLECTIVES:
        return 0
    arrays, steps = program.arrays, program.steps
    read: dict[int, int] = dict.fromkeys(kernel.reads, 0)
    for number in kernel.steps:
        step = steps[number]
        for place, array in enumerate(step.reads):
            if array not in read:
                continue
            whole = arrays[array].bytes
            if step.kind in PARTIAL and place == 0:
                read[array] += sum(arrays[made].bytes for made in step.writes)
            elif step.kind == "scatter" and place == 0:
                continue  # updated in place
            else:
                read[array] = whole
    total = sum(min(amount, arrays[array].bytes) for array, amount in read.items())
    if kernel.kind == "end":  # of a collective
        return 0
    if not kernel.steps:  # copies that a combination needs
        written = sum(arrays[array].bytes for array in kernel.writes)
        return 2 * written
    if kernel.kind == "scatter":
        updates = steps[kernel.steps[-1]].reads[-1]
        return total + 2 * arrays[updates].bytes
    return total + sum(arrays[array].bytes for array in kernel.writes)
