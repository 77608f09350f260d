"""Gathers and scatters of long rows on a TPU: in pieces, and in a loop.

libtpu's passes `tpu_gather_split` and `concat-decomposer`, read off compiled single gathers (libtpu 0.0.51; v5e, v5p
and v6e, f32 and bf16): a row of more than 2^18 numbers, tiles filled up, is gathered in so many pieces that none is
longer (2^19 on v6e). The table is cut up first, whole. Up to four pieces that one step reads are put together inside of
that; more, or for several readers, one after the other are written into their place in an array.

Rows of more than 1.34 million numbers (1,280 x 1,024 are not, 1,344 are; on v6e 2,048 x 1,024 are not, 4,096 are) are
scattered one by one, in a loop of three kernels: of a table in device memory each reads a row, and writes it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from autoshard.cost.compiler.kernels import Kernel
from autoshard.cost.compiler.lowered import Array, Lowered, Step, updates_of
from autoshard.cost.compiler.rewrite import Rewriter
from autoshard.cost.compiler.tpu.layout import row_major

PIECE = 2**18
"""Numbers of a row that are gathered at once."""

LONGER = {"tpu-v6e": 2**19}
"""On other device kinds."""

SCATTERED, SCATTERED_LONGER = 1.34e6, {"tpu-v6e": 2.7e6}
"""Numbers of the longest row that is scattered at once, and on other device kinds."""

TURN = 3
"""Kernels in which the loop over longer ones adds one."""

INSIDE = 4
"""Pieces that are put together inside of what reads them."""

JOINED = "joined"
"""Kind of the step that writes the others into their places."""


def gathered_in_pieces(program: Lowered, kind: str) -> Lowered:
    """`program` with gathers of long rows in pieces, for a device kind.

    What is written into an array is gathered right before, so that one piece lies beside it: here one gather of that
    size stands for all, and the traffic of the others is counted where they are written (`joined_bytes`).
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


def scattered_in_turns(program: Lowered, kind: str) -> Lowered:
    """`program`, in which scatters of long rows know how many kernels they run; for a device kind."""
    longest = SCATTERED_LONGER.get(kind, SCATTERED)
    turns = [_turns(program, step, longest) for step in program.steps]
    steps = [
        replace(step, turns=count, inner=(0.0, TURN * count - 1.0)) if count else step
        for step, count in zip(program.steps, turns, strict=True)
    ]
    return replace(program, steps=steps)


def _turns(program: Lowered, step: Step, longest: float) -> int:
    """How many rows a step scatters one by one; 0 where it is no scatter of longer ones."""
    if step.kind != "scatter" or len(step.reads) < 2 or len(step.writes) > 1:
        return 0
    updates = updates_of(program, step).shape
    window = program.graph.ops[step.op].attrs["window_dims"]
    if updates is None or max(window, default=0) >= len(updates):
        return 0
    row = math.prod(updates[dim] for dim in window)
    return math.prod(updates) // row if row > longest else 0


def turned_bytes(kernel: Kernel, program: Lowered, sizes: Callable[[Array], int]) -> dict[int, int] | None:
    """Array -> bytes of it that a loop over rows to scatter reads and writes; None for any other kernel."""
    if kernel.kind != "scatter":
        return None
    last = program.steps[kernel.steps[-1]]
    if not last.turns:
        return None
    moved = sizes(updates_of(program, last))
    around = dict.fromkeys((last.reads[0], *last.writes), moved)
    return {array: sizes(program.arrays[array]) for array in kernel.reads} | around


def joined_bytes(kernel: Kernel, program: Lowered, sizes: Callable[[Array], int]) -> dict[int, int]:
    """Array -> bytes that such a kernel reads and writes: each piece is read and written, and gathered but for one."""
    (piece,), (made,) = kernel.reads, kernel.writes
    return {made: 3 * sizes(program.arrays[made]) - sizes(program.arrays[piece])}


def _pieces(program: Lowered, step: Step, kind: str) -> int:
    """In how many pieces a step gathers each row; 1 where that is no gather of such rows."""
    if step.kind != "gather" or len(step.reads) < 2:
        return 1
    made = program.arrays[step.writes[0]].shape
    window = program.graph.ops[step.op].attrs["offset_dims"]
    if made is None or not window or max(window) >= len(made):
        return 1
    row = [made[dim] for dim in window]
    if len(row) > 2:  # these are copied by a loop
        return 1
    return -(-row_major((*(1,) * (2 - len(row)), *row)) // LONGER.get(kind, PIECE))
