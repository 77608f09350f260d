"""Bytes of device memory that kernels read and write."""

from __future__ import annotations

from autoshard.cost.compiler.kernels import Kernel
from autoshard.cost.compiler.lowered import COLLECTIVES, END, SLICE, Lowered
from autoshard.graph.groups import BARRIER

PARTIAL = frozenset({"slice", "dynamic_slice", "gather", SLICE})
"""Kinds that read of their first operand only as much as they return."""


def touched(kernel: Kernel, program: Lowered) -> dict[int, int]:
    """Array -> bytes of it that one kernel reads and writes; none for collectives, which use links."""
    if kernel.kind in COLLECTIVES or kernel.kind in (BARRIER, END):
        return {}
    arrays, steps = program.arrays, program.steps
    if not kernel.steps:  # copies around a combined collective
        return {array: 2 * arrays[array].bytes for array in kernel.writes}
    found: dict[int, int] = dict.fromkeys(kernel.reads, 0)
    for number in kernel.steps:
        step = steps[number]
        for place, array in enumerate(step.reads):
            if array not in found:
                continue
            whole = arrays[array].bytes
            if step.kind in PARTIAL and place == 0:
                found[array] += sum(arrays[made].bytes for made in step.writes)
            elif step.kind == "scatter" and place == 0:
                continue  # updated in place
            else:
                found[array] = whole
    for array, size in found.items():
        found[array] = min(size, arrays[array].bytes)
    if kernel.kind == "scatter":
        scatter = steps[kernel.steps[-1]]
        target, updates = scatter.reads[0], scatter.reads[-1]
        changed = arrays[updates].bytes
        if updates not in found:  # fused updates: repeated ones hit the caches
            changed = min(changed, arrays[target].bytes)
        found[updates] = found.get(updates, 0) + 2 * changed
        return found
    for array in kernel.writes:
        found[array] = found.get(array, 0) + arrays[array].bytes
    return found
