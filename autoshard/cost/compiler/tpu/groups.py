"""Statistics of groups of features on a TPU: what a group norm's sums and broadcasts are beside convolutions.

Activations have their features in the lanes of tiles, and a sum over a group of them would split these. So what is
summed over space and groups is summed over space first, copied with the groups as a dim of their own, and summed again;
what is broadcast over groups is broadcast over the features of each, copied back, and broadcast over space. As compiled
(libtpu 0.0.51, a convolution of 64 features and a norm, v5e and v5p, 2 and 8 images to a device): for 2 and 32 groups,
with four small kernels for each statistic beside the sum and what is computed of it; none of them for one group or one
for each feature. Views that a plan annotates stay as they are, and what is summed of them or broadcast for them is too.
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
    """Sums over groups of features, and broadcasts over them, in two steps with a copy between."""
    around = convolved(program)
    if not around:
        return program
    views = _views(program)

    def viewed(step: Step) -> bool:
        """Whether a step sums an annotated view, or broadcasts for one."""
        if step.kind == "reduce":
            return program.arrays[step.reads[0]].maker in views
        return any(reader in views for reader in program.arrays[step.writes[0]].readers)

    found = {number for number, step in enumerate(program.steps) if _features(program, step, around)}
    found = {number for number in found if not viewed(program.steps[number])}
    if not found:
        return program
    rewriter = Rewriter(program)
    spread: dict[tuple[int, int], int] = {}  # what differs between groups, and features -> the same for each feature
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
    """Steps that make an annotated view of what convolutions read or make, and what is elementwise in such views."""
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
    """Images and features of what a step sums over groups of, or broadcasts over them; empty for all other steps."""
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
        return ()  # whole features
    apart, left = divmod(groups.elements, images)
    if left or not 1 < apart < features or features % apart or math.prod(groups.shape[:1]) != images:
        return ()
    return images, features
