"""Rewrites of a device's program that XLA's TPU compiler does before it fuses."""

from __future__ import annotations

import math
from dataclasses import replace

from autoshard.cost.lowered import Lowered, Step
from autoshard.cost.rewrite import Rewriter
from autoshard.cost.tpu_layout import row_major, tiled


def _constant(program: Lowered, scatter: Step) -> bool:
    """Whether a scatter writes into an array of one constant that it alone reads."""
    array = program.arrays[scatter.reads[0]]
    return array.maker >= 0 and not program.steps[array.maker].reads and len(array.readers) == 1


def scattered_onto(program: Lowered) -> Lowered:
    """`x + scatter(zeros, …)` is `scatter(x, …)`, also where the scatter's partial results are summed in between."""
    at: dict[int, tuple[int, list[Step]]] = {}  # sum -> (x, the steps that run in its place)
    gone: set[int] = set()
    for number, step in enumerate(program.steps):
        if step.kind != "scatter" or len(step.writes) != 1 or len(step.reads) != 3 or not _constant(program, step):
            continue
        chain, end = [number], step.writes[0]
        readers = program.arrays[end].readers
        if len(readers) == 1 and program.steps[readers[0]].kind == "all-reduce":
            chain.append(readers[0])
            end = program.steps[readers[0]].writes[0]
            readers = program.arrays[end].readers
        if len(readers) != 1 or any(program.arrays[program.steps[one].writes[0]].returned for one in chain):
            continue
        total = program.steps[readers[0]]
        others = [array for array in total.reads if array != end]
        if total.kind != "add" or len(others) != 1 or readers[0] in at:
            continue
        steps = [program.steps[one] for one in chain]
        steps[0] = replace(steps[0], reads=(others[0], *steps[0].reads[1:]))
        steps[-1] = replace(steps[-1], writes=total.writes)
        at[readers[0]] = others[0], steps
        gone.update((*chain, program.arrays[step.reads[0]].maker))
    if not at:
        return program
    rewriter = Rewriter(program)
    for number, step in enumerate(program.steps):
        if number in at:
            for one in at[number][1]:
                rewriter.emit(one)
        elif number not in gone:
            rewriter.emit(step)
    return rewriter.result()


def scattered_by_rows(program: Lowered) -> Lowered:
    """Rows are scattered into an array whose last dim is the innermost, which is copied to the layout that pads less.

    The rows of a narrow table take 128 numbers each while they are scattered.
    """
    narrow = {number for number, step in enumerate(program.steps) if _narrow(program, step)}
    if not narrow:
        return program
    fills = {program.arrays[program.steps[number].reads[0]].maker for number in narrow}
    fills = {fill for fill in fills if fill >= 0 and _fill(program, fill)}
    rewriter = Rewriter(program)
    for number, step in enumerate(program.steps):
        if number in fills:
            rewriter.instead[step.writes[0]] = _by_rows(rewriter, step.writes[0])
            rewriter.emit(replace(step, writes=(rewriter.instead[step.writes[0]],)))
        elif number in narrow:
            onto, made = step.reads[0], _by_rows(rewriter, step.writes[0])
            if program.arrays[onto].maker not in fills:
                onto = _by_rows(rewriter, step.writes[0])
                rewriter.emit(Step("copy", step.op, (step.reads[0],), (onto,)))
            rewriter.emit(replace(step, reads=(onto, *step.reads[1:]), writes=(made,)))
            rewriter.emit(Step("copy", step.op, (made,), step.writes))
        else:
            rewriter.emit(step)
    return rewriter.result()


def _narrow(program: Lowered, step: Step) -> bool:
    if step.kind != "scatter" or len(step.writes) != 1:
        return False
    shape = program.arrays[step.writes[0]].shape
    return shape is not None and row_major(shape) > tiled(shape)


def _fill(program: Lowered, number: int) -> bool:
    """Whether a step makes an array of one constant that one scatter alone reads."""
    array = program.arrays[program.steps[number].writes[0]]
    return len(array.readers) == 1 and _constant(program, program.steps[array.readers[0]])


def _by_rows(rewriter: Rewriter, like: int) -> int:
    """A new array like one that `like` names, its last dim the innermost."""
    shape = rewriter.arrays[like].shape or ()
    return rewriter.array(like, rewriter.arrays[like].bytes * row_major(shape) // max(1, math.prod(shape)))
