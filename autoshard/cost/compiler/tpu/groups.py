"""Reductions over groups of features on TPU: the statistics of a group norm beside convolutions.

Activations have their features in lanes, which a sum over a group of them would split. So a reduction over space and
groups first reduces space, is copied with the groups as a dim, and reduces again; a broadcast over groups first
broadcasts to the features of each, is copied back, and then broadcasts over space. As compiled (libtpu 0.0.51, a
convolution of 64 features and a norm, v5e and v5p, 2 and 8 images per device): for 2 and 32 groups, with four small
kernels per statistic; none for one group or one per feature. Reductions and broadcasts of annotated reshapes stay.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from autoshard.cost.compiler.lowered import Lowered, Step
from autoshard.cost.compiler.rewrite import Rewriter
from autoshard.cost.compiler.tpu.rewrite import Dims, convolved
from autoshard.cost.compiler.tpu.strip_widths import annotated_view
from autoshard.graph.groups import ELEMENTWISE


def in_groups(program: Lowered) -> Lowered:
    """Split reductions over feature groups, and broadcasts over them, in two with a copy in between."""
    around = convolved(program)
    if not around:
        return program
    views = _views(program)

    def viewed(step: Step) -> bool:
        """Whether a step reduces an annotated reshape, or broadcasts for one."""
        if step.kind == "reduce":
            return program.arrays[step.reads[0]].maker in views
        return any(reader in views for reader in program.arrays[step.writes[0]].readers)

    found = {number for number, step in enumerate(program.steps) if _features(program, step, around)}
    found = {number for number in found if not viewed(program.steps[number])}
    if not found:
        return program
    rewriter = Rewriter(program)
    spread: dict[tuple[int, int], int] = {}  # value per group, and features -> the value per feature
    for _, step in rewriter.changing(found):
        images, features = _features(program, step, around)
        reduces = step.kind == "reduce"
        groups = step.writes[0] if reduces else step.reads[0]
        apart = program.arrays[groups].elements // images
        shapes = (images, features), (images, apart, features // apart)
        size = images * features * program.arrays[groups].bytes // program.arrays[groups].elements
        if reduces:
            each, parted = (rewriter.array(groups, size, shape) for shape in shapes)
            rewriter.emit(replace(step, writes=(each,)))
            rewriter.emit(Step("copy", step.op, (each,), (parted,)))
            rewriter.emit(Step("copy", step.op, (parted,), step.writes))
            continue
        if (groups, features) not in spread:
            each, parted = (rewriter.array(groups, size, shape) for shape in shapes)
            rewriter.emit(Step("copy", step.op, (groups,), (parted,)))
            rewriter.emit(Step("copy", step.op, (parted,), (each,)))
            spread[groups, features] = each
        rewriter.emit(replace(step, reads=(spread[groups, features],)))
    return rewriter.result()


def _views(program: Lowered) -> set[int]:
    """Annotated reshapes of convolutions' operands and results, and elementwise steps on these."""
    found: set[int] = set()
    for number, step in enumerate(program.steps):
        if step.kind not in ELEMENTWISE:
            continue
        shape = program.arrays[step.writes[0]].shape
        apart = shape is not None and len(shape) != len(program.graph.ops[step.op].results[0].shape)
        if annotated_view(program, step) or (apart and any(program.arrays[one].maker in found for one in step.reads)):
            found.add(number)
    return found


def _features(program: Lowered, step: Step, around: Mapping[int, Dims]) -> tuple[int, ...]:
    """(images, features) of a step that reduces or broadcasts over feature groups; empty for all other steps."""
    if step.kind not in ("reduce", "broadcast_in_dim") or len(step.reads) != 1 or len(step.writes) != 1:
        return ()
    large, small = step.reads[0], step.writes[0]
    if step.kind == "broadcast_in_dim":
        large, small = small, large
    shape, groups = program.arrays[large].shape, program.arrays[small]
    if large not in around or shape is None or groups.shape is None or not all(shape):
        return ()
    images, features = (shape[dim] for dim in around[large])
    op = program.graph.ops[step.op]
    kind = program.graph.type_of(op.operands[0]) if step.kind == "reduce" else op.results[0]
    if len(kind.shape) == len(shape):
        return ()  # no groups
    apart, left = divmod(groups.elements, images)
    if left or not 1 < apart < features or features % apart or math.prod(groups.shape[:1]) != images:
        return ()
    return images, features
