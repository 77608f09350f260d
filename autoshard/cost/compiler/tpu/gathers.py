"""Gathers of long rows on TPU: in pieces.

libtpu's passes `tpu_gather_split` and `concat-decomposer`, as compiled for single gathers (libtpu 0.0.51; v5e, v5p and
v6e, f32 and bf16): rows of more than 2^18 elements, tile padding included, are gathered in the fewest pieces that are
not longer (2^19 on v6e). The whole table is sliced first. Up to four pieces with one user concatenate inside of it;
more, or with several users, one after the other update slices of an array (dynamic-update-slice).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from autoshard.cost.compiler.kernels import Kernel
from autoshard.cost.compiler.lowered import Array, Lowered, Step
from autoshard.cost.compiler.rewrite import Rewriter
from autoshard.cost.compiler.tpu.layout import row_major
from autoshard.cost.machine.figures import of_kind, whole

INSIDE = whole("gathered_inside")

JOINED = "joined"
"""Kind of the step that writes the other pieces into the array."""


def gathered_in_pieces(program: Lowered, kind: str) -> Lowered:
    """`program` with gathers of long rows in pieces, for a device kind.

    A piece is gathered right before its dynamic-update-slice, so one is live beside the array: here one gather of that
    size stands for all, and the others' traffic counts where they are written (`joined_bytes`).
    """
    pieces = {number: count for number, step in enumerate(program.steps) if (count := _pieces(program, step, kind)) > 1}
    if not pieces:
        return program
    rewriter = Rewriter(program)
    for number, step in rewriter.changing(pieces):
        table, made = step.reads[0], step.writes[0]
        found = program.arrays[made]
        inside = pieces[number] <= INSIDE and len(found.readers) + found.returned == 1
        slices, part = rewriter.array(table), rewriter.array(made, found.bytes // (1 if inside else pieces[number]))
        rewriter.copy(table, step.op, slices)
        rewriter.emit(replace(step, reads=(slices, *step.reads[1:]), writes=(part,)))
        rewriter.emit(Step("concatenate" if inside else JOINED, step.op, (part,), (made,)))
    return rewriter.result()


def joined_bytes(kernel: Kernel, program: Lowered, sizes: Callable[[Array], int]) -> dict[int, int]:
    """Array -> bytes that such a kernel reads and writes: per piece a read and a write, and all gathers but one."""
    (piece,), (made,) = kernel.reads, kernel.writes
    return {made: 3 * sizes(program.arrays[made]) - sizes(program.arrays[piece])}


def _pieces(program: Lowered, step: Step, kind: str) -> int:
    """The number of pieces in which a step gathers each row; 1 if it is no gather of long rows."""
    if step.kind != "gather" or len(step.reads) < 2:
        return 1
    made = program.arrays[step.writes[0]].shape
    window = program.graph.ops[step.op].attrs["offset_dims"]
    if made is None or not window or max(window) >= len(made):
        return 1
    row = [made[dim] for dim in window]
    if len(row) > 2:  # a loop copies these
        return 1
    return -(-row_major((*(1,) * (2 - len(row)), *row)) // of_kind("gathered_piece", kind))
