"""Scatters that compilers put together before they partition: an embedding that is looked up twice has two gradients.

A scatter-add into zeros whose result is added to something scatters onto that instead, and a scatter onto the result of
another one with the same dims is one scatter, of indices and updates end to end. So the gradients of a table that
encoder and decoder share are summed over devices once. Compiled so for GPUs (T5). A TPU's compiler keeps two scatters,
whose sums are one as those of any two terms are.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING

from autoshard.cost.spmd_reshard import Step
from autoshard.cost.spmd_shape import moved_off
from autoshard.graph.groups import unscaled
from autoshard.graph.ops import Op, Value

if TYPE_CHECKING:
    from autoshard.cost.spmd import OpRun, Partitioner

_SAME = ("reducer", "window_dims", "inserted_dims", "scatter_dims", "index_vector_dim", "operand_batch_dims")


def chained_scatters(owner: Partitioner, runs: list[OpRun]) -> None:
    """Let every scatter-add that scatters onto another one's result be part of it: one sum, two concatenations."""
    last: dict[int, Op] = {}  # an add -> the scatter-add that it is part of
    for op in owner.graph.ops:
        if op.kind != "add" or op.operands[0] == op.operands[1]:
            continue
        for value, other in (op.operands, op.operands[::-1]):
            scatter = _scatter_of(owner, value)
            if scatter is None:
                continue
            last[op.id] = scatter
            before = _scatter_of(owner, other) or (last.get(other.op) if _alone(owner, other) else None)
            if before is not None and all(before.attrs[name] == scatter.attrs[name] for name in _SAME):
                _join(owner, runs, before, scatter)
            break


def _scatter_of(owner: Partitioner, value: Value) -> Op | None:
    """The scatter-add whose result alone a value is: times 1 perhaps, or transposed to the order that it has."""
    while _alone(owner, value):
        *_, value = unscaled(owner.graph, value)
        op = owner.graph.ops[value.op]
        if op.kind != "transpose" or op.attrs["permutation"] != tuple(range(len(op.results[0].shape))):
            break
        value = op.operands[0]
    op = owner.graph.ops[value.op]
    return op if op.kind == "scatter" and op.attrs["reducer"] == "add" and _alone(owner, value) else None


def _alone(owner: Partitioner, value: Value) -> bool:
    return len(owner.readers.get(value, ())) == 1 and value not in owner.results


def _join(owner: Partitioner, runs: list[OpRun], before: Op, scatter: Op) -> None:
    """Price the two as one: the earlier one's sum is dropped, the reshards of the concatenations are added."""
    sums = [runs[op.id].collectives[-1:] for op in (before, scatter)]
    if all(found and found[0].kind in ("all-reduce", "reduce-scatter") for found in sums):
        (first,), (second,) = sums
        if (first.kind, first.axes, first.bytes) == (second.kind, second.axes, second.bytes):
            runs[before.id] = replace(runs[before.id], collectives=runs[before.id].collectives[:-1])
    if owner.target == "tpu":
        return
    steps = [
        *_end_to_end(owner, before, scatter, 1, (scatter.attrs["index_vector_dim"],)),
        *_end_to_end(owner, before, scatter, 2, scatter.attrs["window_dims"]),
    ]
    moved = len([each for move in runs[scatter.id].moves for each in move.collectives])
    ours = runs[scatter.id].collectives
    added = tuple(owner.collective(step, scatter.id) for step in steps)
    runs[scatter.id] = replace(runs[scatter.id], collectives=(*ours[:moved], *added, *ours[moved:]))


def _end_to_end(owner: Partitioner, before: Op, scatter: Op, place: int, apart: Collection[int]) -> list[Step]:
    """Reshards around the concatenation of one operand of both, along its first dim that is not in `apart`.

    A split dim gives way to another one while its parts are put together (see `spmd_shape.concatenate`).
    """
    kinds = [owner.graph.type_of(op.operands[place]) for op in (before, scatter)]
    splits = [owner.shardings.read(op.id, op.operands[place]) for op in (before, scatter)]
    dim = next(dim for dim in range(len(kinds[0].shape)) if dim not in apart)
    extent = sum(kind.shape[dim] for kind in kinds)
    shape = tuple(extent if at == dim else size for at, size in enumerate(kinds[0].shape))
    wanted = max(splits, key=owner.subaxes.tiles)
    run_as = moved_off(owner, shape, wanted, dim)
    reshard = owner.resharder.reshard
    steps = [
        step
        for kind, split in zip(kinds, splits, strict=True)
        for step in reshard(kind.shape, kind.dtype, split, run_as)
    ]
    return [*steps, *reshard(shape, kinds[0].dtype, run_as, wanted)]
