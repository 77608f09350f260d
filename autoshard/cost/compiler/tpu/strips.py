"""Space-to-batch on TPU: convolutions of few images run on a larger batch of spatial strips.

A tile has 8 sublanes, so fewer images are split into strips (XLA's `SpaceToBatchConverter`: 4 images become 32).
Elementwise values around a convolution stay in strips; not all of those for the backward pass do, and no collective's.
As seen in compiled steps of ResNet (libtpu 0.0.51, 4 images per device):

- An activation that a collective moves is put together before it, or cut into strips after, by copies and reshapes that
  read and write it whole (`AROUND`); on the other side of an all-to-all its parts are put in order.
- Where strips end, or are of two widths, what is elementwise reads copies that lie whole: so a convolution of stride 2
  has all that the backward pass needs in front of it copied, the mask of a ReLU and what a norm centres and scales
  (`_recut`). A convolution of more than one tap reads the edges of strips from kernels of their own (`_with_edges`).
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping
from dataclasses import replace

from autoshard.cost.compiler.kernels import Kernel
from autoshard.cost.compiler.lowered import COLLECTIVES, Array, Lowered, Step
from autoshard.cost.compiler.rewrite import Rewriter
from autoshard.cost.compiler.tpu.conv_loops import passes
from autoshard.cost.compiler.tpu.layout import for_convolution
from autoshard.cost.compiler.tpu.rewrite import KEEPS_DIMS
from autoshard.cost.compiler.tpu.strip_widths import (
    FEW,
    SPLITS,
    annotated_view,
    as_annotated,
    taps_of,
    with_images_apart,
)
from autoshard.cost.machine.figures import table
from autoshard.cost.machine.tiles import ROWS
from autoshard.graph.groups import ELEMENTWISE

AROUND = table("copies_around")

MASK = "mask"
"""The kind of a step that makes the mask of padded strips for a reduction."""

EDGES = "edges"
"""The kind of a step that cuts out, or pads, a strip's halo for a convolution."""

READ_WHOLE = frozenset({"reduce_window", "select_and_scatter", "pad"})
"""Kinds that read merged strips, if they end a chain."""

MOVING = COLLECTIVES - {"all-reduce"}


def few(program: Lowered) -> list[int]:
    """Activations of fewer images per device than a tile has sublanes."""
    if not any(step.kind == "convolution" for step in program.steps):
        return []
    arrays = program.arrays
    return [array for array, dim in _batch_dims(program).items() if (arrays[array].shape or (FEW,))[dim] < FEW]


def _batch_dims(program: Lowered) -> dict[int, int]:
    """Operands and results of convolutions, and elementwise values between them -> their batch dim."""
    computed, found = _computed(program.steps), dict[int, int]()
    shapes = [array.shape or () for array in program.arrays]
    for step in program.steps:
        if step.kind == "convolution" and len(step.reads) == 2 and step.reads[1] not in computed:
            attrs = program.graph.ops[step.op].attrs
            for array, name in ((step.reads[0], "lhs"), (step.writes[0], "out")):
                if len(shapes[array]) == len(attrs[name]):
                    found.setdefault(array, attrs[name][0])
    elementwise = [step for step in program.steps if step.kind in KEEPS_DIMS and step.kind not in COLLECTIVES]
    for step in (*elementwise, *elementwise[::-1]):
        around = (*step.reads, *step.writes)
        known = next((array for array in around if array in found), None)
        if known is not None:
            dim, rank, size = found[known], len(shapes[known]), shapes[known][found[known]]
            for array in around:
                if len(shapes[array]) == rank and shapes[array][dim] == size:
                    found.setdefault(array, dim)
    return found


def _computed(steps: Iterable[Step]) -> set[int]:
    """Descendants of convolutions."""
    found: set[int] = set()
    for step in steps:
        if step.kind == "convolution" or not found.isdisjoint(step.reads):
            found.update(step.writes)
    return found


def cut_into_strips(program: Lowered, widths: Mapping[int, int]) -> Lowered:
    """Mark activations in strips; merge strips before a collective, and split again after it."""
    strips = few(program)
    if any(step.kind in MOVING and _moves(step, strips) for step in program.steps):
        program = _merged_for_collectives(program, strips)
    widths = dict(widths)
    program = _reduced_per_image(_recut(_merged_for_pooling(_masked(program, widths), widths), widths), widths)
    for array, width in widths.items():
        program.arrays[array].strips = width
    for number, step in enumerate(program.steps):
        if step.kind == "convolution":
            program.steps[number] = replace(step, flops=step.flops * padded(program, step))
    return program


def padded(program: Lowered, step: Step) -> float:
    """Positions of a convolution with padding of strips, as a multiple of those of the images.

    Of its result; of a kernel's gradient, those that it contracts.
    """
    operands, made = step.shapes[:2], step.shapes[2:]
    arrays = zip((step.writes[0], *step.reads[1::-1]), (*made, *operands[::-1]), strict=False)
    strips, wide = next(((cut, shape[-1]) for array, shape in arrays if (cut := program.arrays[array].strips)), (0, 1))
    return max(1.0, SPLITS * strips / wide)


def _recut(program: Lowered, widths: dict[int, int]) -> Lowered:
    """Copies where strips begin and end, and where a convolution needs another width.

    A slice drops the padding after the copy that merges strips, and a pad adds it before the copy that splits; `widths`
    gets the new strips.
    """
    if not widths:
        return program
    rewriter = Rewriter(program)
    computed = _computed(program.steps)
    for array, width in widths.items():
        program.arrays[array].strips = width
    free = with_images_apart(program)
    whole: dict[int, int] = {}  # strips -> their merged copy
    strips: dict[tuple[int, int], int] = {}  # array and width -> its copy in strips

    def padded(array: int, width: int) -> tuple[int, ...] | None:
        shape = program.arrays[array].shape or ()
        return (*shape[:-1], SPLITS * width) if SPLITS * width > shape[-1] else None

    def merge(step: Step, array: int) -> int:
        if array in free and widths[array] % ROWS == 0 and padded(array, widths[array]) is None:
            return array  # its tiles do not cross strips
        if array not in whole:
            shape, size = padded(array, widths[array]), program.arrays[array].bytes
            if shape is not None:
                size = size * shape[-1] // (program.arrays[array].shape or shape)[-1]
            into = rewriter.array(array, size, shape or program.arrays[array].shape)
            made = whole[array] = rewriter.copy(array, step.op, into)
            if shape is not None:
                whole[array] = rewriter.array(array)
                rewriter.emit(Step("slice", step.op, (made,), (whole[array],)))
        return whole[array]

    def cut(step: Step, array: int, width: int) -> int:
        if (array, width) not in strips:
            source = merge(step, array) if array in widths else array
            shape = padded(array, width)
            if shape is not None:
                size = program.arrays[array].bytes * shape[-1] // (program.arrays[array].shape or shape)[-1]
                wider = rewriter.array(array, size, shape)
                rewriter.emit(Step("pad", step.op, (source,), (wider,)))
                source = wider
            made = strips[array, width] = rewriter.copy(source, step.op, rewriter.array(array))
            widths[made] = width
        return strips[array, width]

    for step in program.steps:
        reads = list(step.reads)
        for place, array in enumerate(step.reads):
            if program.arrays[array].shape is None:
                continue
            needed = _read_as(program, step, place, widths, computed)
            if needed == 0 and array in widths:
                reads[place] = merge(step, array)
            elif needed and widths.get(array, 0) != needed:
                reads[place] = cut(step, array, needed)
        if reads != [*step.reads]:
            step = replace(step, reads=tuple(reads))
        rewriter.emit(_with_edges(rewriter, step, widths))
    return rewriter.result()


def _with_edges(rewriter: Rewriter, step: Step, widths: Mapping[int, int]) -> Step:
    """Add halos from neighbouring strips to a convolution's operands.

    One kernel cuts them out and one per side pads them. For the gradient of a kernel, one kernel per tap shifts the
    strips, and one concatenates them.
    """
    program = rewriter.source
    array = step.reads[0] if step.reads else -1
    if step.kind != "convolution" or len(step.reads) != 2 or array not in widths:
        return step
    taps, gradient = taps_of(program, step)
    if taps == 1 or (step.writes[0] not in widths and not gradient):
        return step
    found = rewriter.arrays[array]
    size = found.bytes // 2 if found.dtype == "f32" else found.bytes

    def emit(reads: tuple[int, ...], size: int) -> int:
        rewriter.arrays.append(Array(None, "bf16", size, -1))
        rewriter.emit(Step(EDGES, step.op, reads, (len(rewriter.arrays) - 1,)))
        return len(rewriter.arrays) - 1

    if gradient:
        shifted = [emit((array,), size) for _ in range(taps - 1)]
        return replace(step, reads=(emit((array, *shifted), taps * size), step.reads[1]))
    edge = size * (taps - 1) // (2 * widths[array])
    cut = emit((array,), 2 * edge)
    return replace(step, reads=(*step.reads, *(emit((cut,), edge) for _ in range(2))))


def _read_as(
    program: Lowered, step: Step, place: int, widths: Mapping[int, int], computed: Container[int]
) -> int | None:
    """The strip width in which a step reads an operand; 0: merged, None: any."""
    array, made = step.reads[place], widths.get(step.writes[0], 0) if step.writes else 0
    if step.kind == "convolution" and len(step.reads) == 2:
        if step.reads[1] in computed:  # gradient of a kernel
            return None if all(one in widths for one in step.reads) else 0
        attrs = program.graph.ops[step.op].attrs
        needed = made * attrs["stride"][-1] // max(1, attrs["lhs_dilation"][-1])
        copied = program.arrays[array].maker
        if place or (copied >= 0 and program.steps[copied].kind == "copy" and array not in widths):
            return None  # images are copied as needed
        return int(needed)
    if step.kind in ("reduce", "copy", *READ_WHOLE):
        return None
    if step.kind in ELEMENTWISE and made:
        return None
    return 0


def _merged_for_pooling(program: Lowered, widths: Mapping[int, int]) -> Lowered:
    """Merge strips for pooling outside of a chain and for reshapes: one copy for both passes (`BatchToSpace`)."""
    copies: dict[int, int] = {}
    rewriter = Rewriter(program)
    for step in program.steps:
        view = annotated_view(program, step)
        if not (view or step.kind in READ_WHOLE) or step.writes[0] in widths:
            rewriter.emit(step)
            continue
        for array in step.reads:
            if array in widths and array not in copies:
                found = program.arrays[array]
                item = found.bytes // _count(found)
                size = item * as_annotated(program, step, found.shape or ()) if view else found.bytes
                copies[array] = rewriter.copy(array, step.op, rewriter.array(array, size))
        rewriter.emit(replace(step, reads=tuple(copies.get(array, array) for array in step.reads)))
    return rewriter.result() if copies else program


def _masked(program: Lowered, widths: Mapping[int, int]) -> Lowered:
    """Reductions over images mask the padding of strips; strips of one shape share a mask."""
    masks: dict[tuple[int, ...], int] = {}
    rewriter = Rewriter(program)
    for step in program.steps:
        shape = program.arrays[step.reads[0]].shape if step.reads else None
        width = widths.get(step.reads[0], 0) if step.reads else 0
        if not shape or width * SPLITS <= shape[-1] or step.kind != "reduce" or not _over_images(program, step):
            rewriter.emit(step)
            continue
        key = shape[0], shape[-1], width
        if key not in masks:
            size = shape[0] * SPLITS * width
            rewriter.arrays.append(Array((shape[0] * SPLITS, width), "i1", size, -1))
            masks[key] = len(rewriter.arrays) - 1
            rewriter.emit(Step(MASK, step.op, (), (masks[key],)))
        rewriter.emit(replace(step, reads=(*step.reads, masks[key])))
    return rewriter.result() if masks else program


def _reduced_per_image(program: Lowered, widths: Mapping[int, int]) -> Lowered:
    """Reductions per image merge strips first: padded ones in a copy; others reduce each strip, then again.

    As compiled (a convolution of 64 features and a group norm, 2 images per device, v5e and v5p): of 64 positions, 8
    strips of 9, both sums read a copy without padding; of 32 positions of stride 2, 8 strips of 4, the convolution's
    kernel sums its strips. A negation moves behind the sum.
    """
    rewriter = Rewriter(program)
    for step in program.steps:
        if step.kind == "reduce" and step.reads and _negated(program, step.reads[0]) in widths:
            step = replace(step, reads=(_negated(program, step.reads[0]), *step.reads[1:]))
        width = widths.get(step.reads[0], 0) if step.kind == "reduce" and step.reads else 0
        shape = program.arrays[step.reads[0]].shape if width else None
        if shape is None or len(shape) < 3 or _over_images(program, step) or not _over_space(program, step):
            rewriter.emit(step)
            continue
        read = program.arrays[step.reads[0]]
        item = read.bytes // max(1, read.elements)
        cut = (SPLITS * shape[0], *shape[1:-1], width)
        if width * SPLITS > shape[-1]:
            copy = rewriter.array(step.reads[0], item * for_convolution(cut, (0, 1)))
            rewriter.arrays[copy].shape = None
            rewriter.emit(Step("copy", step.op, (step.reads[0],), (copy,)))
            rewriter.emit(replace(step, reads=(copy, *step.reads[1:])))
        else:
            made = program.arrays[step.writes[0]]
            each = rewriter.array(step.writes[0], SPLITS * made.bytes, (SPLITS, *(made.shape or ())))
            rewriter.emit(replace(step, writes=(each,)))
            rewriter.emit(Step("copy", step.op, (each,), step.writes))
    return rewriter.result()


def _negated(program: Lowered, array: int) -> int:
    """The operand of a negation; -1 for other arrays."""
    maker = program.arrays[array].maker
    return program.steps[maker].reads[0] if maker >= 0 and program.steps[maker].kind == "negate" else -1


def _over_images(program: Lowered, step: Step) -> bool:
    """Whether a reduction keeps only the features."""
    made = program.arrays[step.writes[0]]
    read = (program.arrays[step.reads[0]].shape or ()) if step.reads else ()  # none: of a constant
    return 0 in program.graph.ops[step.op].attrs["dims"] and len(read) > 1 and _count(made) == read[1]


def _over_space(program: Lowered, step: Step) -> bool:
    """Whether a step is a single reduction, over more than the features."""
    read = program.arrays[step.reads[0]].shape or ()
    return len(step.writes) == 1 and _count(program.arrays[step.writes[0]]) * read[1] != math.prod(read)


def _count(array: Array) -> int:
    return math.prod(array.shape) if array.shape is not None else array.bytes // 4


def _merged_for_collectives(program: Lowered, strips: Container[int]) -> Lowered:
    rewriter = Rewriter(program)
    moving = {n for n, step in enumerate(program.steps) if step.kind in MOVING and _moves(step, strips)}
    for _, step in rewriter.changing(moving):
        read, made = step.reads[0], step.writes[0]
        parts = AROUND["parts"] if step.kind == "all-to-all" else 0
        before, after = (int(AROUND["strips"] if array in strips else parts) for array in (read, made))
        for _ in range(before):
            read = rewriter.copy(read, step.op)
        moved = rewriter.array(made) if after else made
        rewriter.emit(replace(step, reads=(read, *step.reads[1:]), writes=(moved,)))
        for left in reversed(range(after)):
            moved = rewriter.copy(moved, step.op, into=None if left else made)
    return rewriter.result()


def _moves(step: Step, strips: Container[int]) -> bool:
    return any(array in strips for array in (*step.reads, *step.writes))


def passes_of(kernel: Kernel, program: Lowered) -> int:
    """How often a kernel between convolutions iterates over its tiles, with the copies that it needs.

    A reduction per image merges strips first; one over all images fuses with the convolution before it.
    """
    steps = [program.steps[number] for number in kernel.steps]
    if kernel.kind == "reduce" and not any(step.kind == "convolution" for step in steps):
        sums = [step for step in steps if step.kind == "reduce"]
        if all(_over_images(program, step) for step in sums):
            return 0 if len(steps) == 1 and _convolved(program, steps[0].reads[0]) else 1
        return max(1, sum(program.arrays[array].strips > 0 for array in kernel.reads))
    return max((passes(program, step) * halo_passes(program, step) for step in steps), default=1)


def _convolved(program: Lowered, array: int) -> bool:
    """Whether an array is a convolution's result, perhaps with a bias."""
    maker = program.arrays[array].maker
    if maker < 0 or program.steps[maker].kind == "convolution":
        return maker >= 0
    if program.steps[maker].kind != "add":
        return False
    before = (program.arrays[one].maker for one in program.steps[maker].reads)
    return any(one >= 0 and program.steps[one].kind == "convolution" for one in before)


def halo_passes(program: Lowered, step: Step) -> int:
    """How often a convolution of strips iterates over its tiles: each strip is concatenated with its halo.

    As seen in kernels of 3 x 3 taps on v5e, cycles per tile: 18 for the convolution and 25 before it; for an input
    gradient 12 and 42, for a kernel gradient 9 and 98; 48 before a convolution without strips.
    """
    arrays = program.arrays
    strips = any(arrays[array].strips for array in (*step.reads, *step.writes))
    if step.kind != "convolution" or len(step.reads) < 2 or not strips:
        return 1
    taps, gradient = taps_of(program, step)
    if taps == 1:
        return 1
    return 6 if gradient else 2 if arrays[step.reads[0]].strips else 4
