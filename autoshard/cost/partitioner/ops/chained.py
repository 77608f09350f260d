"""Scatter-adds that compilers merge before they partition: an embedding that is looked up twice has two gradients.

A scatter-add into zeros whose result is added to another value scatters into that value instead; two scatters in a row
with the same dimension numbers become one, with concatenated indices and updates. So a table that encoder and decoder
share needs one all-reduce of its gradient, and the gradient of a head tied to the embedding is gathered as the
scatter's operand unless a cheaper way keeps it sharded. Seen on GPU and TPU (T5), where the updates of both are fewer
elements than the table. Scatters with annotated results stay; their all-reduce and that of the other term merge as
those of any two terms do.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace

from autoshard.cost.partitioner.context import Context
from autoshard.cost.partitioner.ops.index import indexed
from autoshard.cost.partitioner.ops.reorder import before_convert
from autoshard.cost.partitioner.ops.shape import concatenated
from autoshard.cost.partitioner.partitioned import OpRun
from autoshard.cost.partitioner.reshard.emitted import Step
from autoshard.graph.groups import unscaled
from autoshard.graph.ops import Op, Value

_EQUAL_ATTRS = (
    "reducer",
    "window_dims",
    "inserted_dims",
    "scatter_dims",
    "index_vector_dim",
    "operand_batch_dims",
)


def chained_scatters(runs: list[OpRun], context: Context) -> list[OpRun]:
    """Merge every scatter-add whose result is another's operand into that one: one all-reduce, two concatenations."""
    last: dict[int, Op] = {}  # an add -> the scatter-add it is merged into
    for op in context.graph.ops:
        if op.kind != "add" or op.operands[0] == op.operands[1]:
            continue
        for value, other in (op.operands, op.operands[::-1]):
            scatter = _scatter_of(context, value)
            if scatter is None:
                continue
            last[op.id] = scatter
            before = _scatter_of(context, other)
            if before is None and _has_one_user(context, other) and not _is_copied(context, other):
                before = last.get(other.op)
            if before is None:
                _add_operand_reshard(context, runs, scatter, other, op)
            else:
                first, last[op.id] = sorted((before, scatter), key=lambda one: one.id)
                _sum_once(runs, first, last[op.id])
                if all(before.attrs[name] == scatter.attrs[name] for name in _EQUAL_ATTRS):
                    _merge(context, runs, first, last[op.id])
            break
    return runs


def _add_operand_reshard(context: Context, runs: list[OpRun], scatter: Op, other: Value, add: Op) -> None:
    """Price the reshard of the value that becomes a scatter's operand in place of zeros, which every device has."""
    if other.op in context.free or is_annotated(context, scatter):
        return
    reads = (
        context.shardings.read(add.id, other),
        *(context.shardings.read(scatter.id, v) for v in scatter.operands[1:]),
    )
    onto = indexed(context, scatter, reads, (context.shardings.made[Value(scatter.id)],))
    moved_onto = tuple(step for place, _, steps in onto.moves if place == 0 for step in steps)
    steps = before_convert(context, other, context.shardings.copy_read(add.id, other), moved_onto)
    run = runs[scatter.id]
    moved = len([each for move in run.moves for each in move.collectives])
    added = tuple(context.collective(step, scatter.id) for step in steps)
    runs[scatter.id] = replace(run, collectives=(*run.collectives[:moved], *added, *run.collectives[moved:]))


def _scatter_of(context: Context, value: Value) -> Op | None:
    """The scatter-add whose value reaches only this reader, through products with 1 or transposes that move nothing."""
    while _has_one_user(context, value):
        *_, value = unscaled(context.graph, value)
        op = context.graph.ops[value.op]
        if op.kind != "transpose" or op.attrs["permutation"] != tuple(range(len(op.results[0].shape))):
            break
        value = op.operands[0]
    op = context.graph.ops[value.op]
    return op if op.kind == "scatter" and op.attrs["reducer"] == "add" and _has_one_user(context, value) else None


def _has_one_user(context: Context, value: Value) -> bool:
    return len(context.graph.readers(value)) == 1 and value not in context.graph.returned


def _sum_once(runs: list[OpRun], before: Op, scatter: Op) -> None:
    """Drop the all-reduce of a scatter to whose result another one adds, which has an equal one."""
    sums = [runs[op.id].collectives[-1:] for op in (before, scatter)]
    if all(found and found[0].kind in ("all-reduce", "reduce-scatter") for found in sums):
        (first,), (second,) = sums
        if (first.kind, first.axes, first.bytes) == (second.kind, second.axes, second.bytes):
            runs[before.id] = replace(runs[before.id], collectives=runs[before.id].collectives[:-1])


def _merge(context: Context, runs: list[OpRun], before: Op, scatter: Op) -> None:
    """Merge two scatters: add the reshards of the concatenations."""
    updates = sum(math.prod(context.graph.type_of(op.operands[2]).shape) for op in (before, scatter))
    small = updates < math.prod(scatter.results[0].shape)
    if not small or is_annotated(context, before) or is_annotated(context, scatter):
        return
    context.joined[before.id] = scatter.id
    steps = [
        *_concatenation(context, before, scatter, 1, (scatter.attrs["index_vector_dim"],)),
        *_concatenation(context, before, scatter, 2, scatter.attrs["window_dims"]),
    ]
    moved = len([each for move in runs[scatter.id].moves for each in move.collectives])
    ours = runs[scatter.id].collectives
    added = tuple(context.collective(step, scatter.id) for step in steps)
    runs[scatter.id] = replace(runs[scatter.id], collectives=(*ours[:moved], *added, *ours[moved:]))


def is_annotated(context: Context, scatter: Op) -> bool:
    """Whether an annotation stands between a scatter and the add that uses its result."""
    value: Value | None = Value(scatter.id)
    while value is not None:
        if _is_copied(context, value):
            return True
        reader = next(iter(context.graph.readers(value)), None)
        value = Value(reader.id) if reader is not None and reader.kind in ("multiply", "transpose") else None
    return False


def _is_copied(context: Context, value: Value) -> bool:
    """Whether a value itself, or a copy of it, is annotated."""
    return context.shardings.copy_read(None, value) is not None or bool(context.copies_of.get(value))


def _concatenation(context: Context, before: Op, scatter: Op, place: int, apart: Collection[int]) -> list[Step]:
    """Reshards for `concatenated` of operand `place` of both scatters, along its first dim not in `apart`."""
    kinds = [context.graph.type_of(op.operands[place]) for op in (before, scatter)]
    splits = [context.shardings.read(op.id, op.operands[place]) for op in (before, scatter)]
    dim = next(dim for dim in range(len(kinds[0].shape)) if dim not in apart)
    extent = sum(kind.shape[dim] for kind in kinds)
    shape = tuple(extent if at == dim else size for at, size in enumerate(kinds[0].shape))
    wanted = max(splits, key=context.subaxes.tiles)
    reads, own = concatenated(context, kinds, shape, splits, wanted, dim)
    reshard = context.resharder.reshard
    steps = [
        step
        for kind, split, read in zip(kinds, splits, reads, strict=True)
        for step in reshard(kind.shape, kind.dtype, split, read)
    ]
    return [*steps, *own]
