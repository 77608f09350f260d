"""What a TPU's gathers and scatters of rows need beside them: kernels that lay their indices out flat.

As compiled for single gathers and scatters (libtpu 0.0.51, v5e and v5p alike): indices of several dims are copied to
lie by rows, unless they do, and reshaped, unless rows are whole lanes; a gather's are clamped, by a kernel of its own;
a scatter's are numbered, sorted and clamped where they are few for the table and not too few (what it scatters onto is
cleared in its own kernel then).
"""

from __future__ import annotations

import math
from dataclasses import replace

from autoshard.cost.compiler.lowered import Lowered, Step, updates_of
from autoshard.cost.compiler.tpu.layout import row_major, tiled
from autoshard.cost.machine.tiles import LANES

SORTED = 0.029, 0.25
"""For each row of the table, how many indices of a scatter are sorted at least and at most. As seen: 3,000 for 100,000
rows, 65,536 for 2,000,000, 8,192 for 93,145 are; not 2,049 for 100,000, 8,192 for 286,181, 8,192 for 14,992."""

BYTES = 4
"""Of an index, whatever the program says."""


def flattened_indices(program: Lowered) -> Lowered:
    """Gathers and scatters with the kernels that prepare their indices."""
    steps = [_prepared(program, step) if step.kind in ("gather", "scatter") else step for step in program.steps]
    return replace(program, steps=steps)


def _prepared(program: Lowered, step: Step) -> Step:
    shape = _indices(program, step)
    if shape is None:
        return step
    flat = math.prod(shape)
    moved, kernels = _flattening(shape)
    if step.kind == "gather":
        moved, kernels = moved + 2 * flat, kernels + 1
    elif SORTED[0] <= flat * _row(program, step) / max(1, program.arrays[step.writes[0]].bytes) <= SORTED[1]:
        moved, kernels = moved + 7 * flat, kernels + 2
    size, count = step.inner
    return replace(step, inner=(size + BYTES * moved, count + kernels))


def _row(program: Lowered, step: Step) -> float:
    """Bytes of a row that is scattered."""
    shape = program.graph.type_of(program.graph.ops[step.op].operands[0]).shape
    updates, whole = updates_of(program, step), _indices(program, step)
    return updates.bytes / max(1, math.prod(whole or shape))


def _flattening(shape: tuple[int, ...]) -> tuple[int, int]:
    """Elements that are moved to lay indices out flat, and by how many kernels."""
    wide = [size for size in shape if size > 1]
    flat = math.prod(shape)
    if len(wide) < 2 or wide[-1] == LANES:
        return 0, 0
    if not wide[-1] % LANES:
        return 2 * flat, 1
    least, by_rows = tiled(tuple(wide)), row_major(tuple(wide))
    if by_rows <= least:
        return by_rows + flat, 1
    return least + 2 * by_rows + flat, 2


def _indices(program: Lowered, step: Step) -> tuple[int, ...] | None:
    """The shape of the indices of whole rows; None for other gathers and scatters."""
    op = program.graph.ops[step.op]
    if op.kind != step.kind or len(step.reads) < 2:
        return None
    name = "start_index_map" if step.kind == "gather" else "scatter_dims"
    if len(op.attrs.get(name, ())) != 1:
        return None
    shape = program.arrays[step.reads[1]].shape
    return program.graph.type_of(op.operands[1]).shape if shape is None else shape
