"""All-gathers that compilers move to where they are smaller: before a conversion or a broadcast."""

from __future__ import annotations

import itertools
import math

from autoshard.cost.partitioner.context import Context
from autoshard.cost.partitioner.reshard.emitted import Step
from autoshard.cost.partitioner.tiling import Tiling
from autoshard.dtypes import dtype_bytes
from autoshard.graph.ops import Value


def before_convert(context: Context, value: Value, copy: int | None, steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """`CollectiveQuantizer`, on GPU: a conversion to a wider dtype follows the all-gather or all-to-all of its operand.

    So does one of an annotated copy with the same sharding. Collectives after an all-to-all stay behind the conversion,
    since the transpose that ends the all-to-all stops it.
    """
    op = context.graph.ops[value.op]
    if not context.compiler.gathers_before_widening or op.kind != "convert":
        return steps
    while copy is not None:
        if context.shardings.copied[copy] != context.shardings.made[value]:
            return steps
        copy = context.shardings.copies[copy].source
    narrow, wide = (dtype_bytes(kind.dtype) for kind in (context.graph.type_of(op.operands[0]), op.results[0]))
    if narrow >= wide:
        return steps
    gathers = len([*itertools.takewhile(lambda step: step[0] == "all-gather", steps)])
    moved = gathers + (steps[gathers : gathers + 1] != () and steps[gathers][0] == "all-to-all")
    return (*((kind, axes, size * narrow // wide) for kind, axes, size in steps[:moved]), *steps[moved:])


def before_broadcast(
    context: Context, value: Value, source: Tiling, target: Tiling, steps: tuple[Step, ...]
) -> tuple[Step, ...]:
    """`AllGatherBroadcastReorder`, on GPU and TPU: a broadcast follows the all-gather of its operand.

    Along a dim that the broadcast adds, a GPU gathers nothing at all; a TPU gathers one copy of the operand per shard,
    if the broadcast adds another dim, too (libtpu 0.0.51). Of scalars nothing is exchanged.
    """
    if not context.compiler.gathers_before_broadcasts:
        return steps
    op = context.graph.ops[value.op]
    while op.kind == "broadcast_in_dim" and op.results[0] == context.graph.type_of(op.operands[0]):
        op = context.graph.ops[op.operands[0].op]
    if op.kind != "broadcast_in_dim" or 0 in op.results[0].shape:
        return steps
    small, large = context.graph.type_of(op.operands[0]).shape, op.results[0].shape
    if any(step[0] != "all-gather" for step in steps):
        return steps if small else ()
    carried = {to for size, to in zip(small, op.attrs["dims"], strict=True) if size == large[to]}
    gathered = {dim for dim, (before, after) in enumerate(zip(source, target, strict=True)) if before != after}
    if gathered <= carried:
        factor = math.prod(large) // math.prod(small)
        return tuple((kind, axes, size // factor) for kind, axes, size in steps)
    if gathered & carried:
        return steps
    if context.compiler.gathers_no_repeats:
        return ()
    if all(size == 1 or dim in carried | gathered for dim, size in enumerate(large)):
        return steps
    parts = math.prod(context.subaxes.ways(source[dim]) // context.subaxes.ways(target[dim]) for dim in gathered)
    return tuple((kind, axes, size * math.prod(small) * parts // math.prod(large)) for kind, axes, size in steps)
