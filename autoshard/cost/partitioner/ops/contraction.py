"""What the partitioner emits for a contraction: the plan of `dot.py` or `conv.py`, as collectives of a target."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from autoshard.cost.partitioner import tpu as tiles_tpu
from autoshard.cost.partitioner.emission import Emission, MoveKey
from autoshard.cost.partitioner.ops import rounded as spmd_rounded
from autoshard.cost.partitioner.ops.conv import ConvolutionPartitioner
from autoshard.cost.partitioner.ops.dot import DotPartitioner, Halo, Sum
from autoshard.cost.partitioner.ops.dot import Move as Resharded
from autoshard.cost.partitioner.ops.looped import Hides, Loop, Ring
from autoshard.cost.partitioner.reshard.emitted import Step
from autoshard.cost.partitioner.tiling import Tiling
from autoshard.dtypes import dtype_bytes
from autoshard.graph.ops import Op, Value

if TYPE_CHECKING:
    from autoshard.cost.partitioner.partition import Partitioner

Dim = tuple[int, ...]


def contraction(owner: Partitioner, op: Op, reads: tuple[Tiling, ...], result: Tiling) -> Emission:
    """The emission of a `dot_general` or a convolution whose operands and result are split so."""
    lhs, rhs = (owner.graph.type_of(value) for value in op.operands[:2])
    out = op.results[0]
    partitioner = _partitioner(owner, op)
    plan = partitioner.plan(
        (lhs.shape, reads[0], dtype_bytes(lhs.dtype)),
        (rhs.shape, reads[1], dtype_bytes(rhs.dtype)),
        (out.shape, result),
    )
    moves: list[tuple[int, MoveKey, tuple[Step, ...]]] = []
    own: list[Step] = []
    order: Dim = ()
    rounds: tuple[int, int] | None = None
    for step, then in itertools.zip_longest(plan.steps, plan.steps[1:]):
        if isinstance(step, Halo):
            kind = lhs if step.place == 0 else rhs
            steps = tuple(owner.permutes(step.moved, step.tiling, kind.dtype))
            moves.append((step.place, (step.key, None, step.tiling), steps))
        elif isinstance(step, Loop):
            kind = out if step.place == 2 else (lhs, rhs)[step.place]
            width = 2 if step.place < 2 and kind.dtype == "f32" else dtype_bytes(kind.dtype)
            permute: Step = ("collective-permute", owner.resharder.names(step.axes), step.part * width)
            if step.place == 2:
                rounds = len(own), step.parts + 1
                own.append(permute)
            else:
                ring = Ring(step.outer, step.parts)
                moves.append((step.place, (ring, step.source, owner.nothing(kind.shape)), (permute,)))
        elif isinstance(step, Sum):
            cut = None
            if any(step.kept):
                parts = tuple(owner.subaxes.ways(dim) for dim in step.kept)
                cut = owner.cuts.cut(parts, owner.nothing(parts), step.kept, step.outer)
                cut = None if cut is None else replace(cut, shape=step.made)
            elif isinstance(then, Resharded) and then.place == 2:
                cut = owner.cuts.cut(then.shape, then.source, then.target, then.outer)
            if cut is not None and owner.target == "tpu" and is_transposed(owner, op):
                cut = replace(cut, factors=cut.factors[::-1], places=cut.places[:, ::-1], shape=cut.shape[::-1])
            size = math.prod(step.made) * dtype_bytes(out.dtype)
            own.extend(owner.sums(step.axes, size, cut, tiles_tpu.lies_row_major(op.kind, step.made)))
            order = owner.order_of(step.axes)
        elif step.place == 2:
            dtype = "bf16" if spmd_rounded.rounds(owner, Value(op.id), None) else out.dtype
            own.extend(owner.resharder.reshard(step.shape, dtype, step.source, step.target, step.outer))
        else:
            kind = lhs if step.place == 0 else rhs
            moves.append((step.place, *_moved(owner, op, step, kind.dtype)))
    whole = partitioner.whole_macs(lhs.shape, rhs.shape, out.shape)
    share = plan.macs / whole if whole else 1.0
    return Emission(tuple(moves), tuple(own), share, reads, plan.overcounted, order, rounds=rounds)


def may_loop(owner: Partitioner, op: Op) -> tuple[bool, ...]:
    """Per operand whether it may go round a ring while it is multiplied."""
    return (False,) * len(op.operands) if owner.gathering is None else owner.gathering.alone(op)


def is_transposed(owner: Partitioner, op: Op) -> bool:
    """Whether nothing but a transpose reads a product of matrices: compilers make the transposed product at once.

    Not where an annotation stands between them.
    """
    value = Value(op.id)
    if op.kind != "dot_general" or len(op.results[0].shape) != 2:
        return False
    if value in owner.graph.returned or value in owner.shardings.pins or value in owner.copies_of:
        return False
    readers = [(reader.kind, tuple(reader.attrs.get("permutation", ()))) for reader in owner.graph.readers(value)]
    return readers == [("transpose", (1, 0))]


def _partitioner(owner: Partitioner, op: Op) -> DotPartitioner:
    dims = owner.transfers.contraction(op)
    hides: Hides | None = partial(_hides, owner, op) if owner.target == "tpu" else None
    if op.kind == "convolution":
        return ConvolutionPartitioner(dims, owner.subaxes, op.attrs, op.results[0].shape, hides, may_loop(owner, op))
    return DotPartitioner(dims, owner.subaxes, hides, may_loop(owner, op))


def _hides(owner: Partitioner, op: Op, macs: int, elements: int, axes: Dim) -> bool:
    """See `tiles_tpu.hides`."""
    size = elements * dtype_bytes(op.results[0].dtype)
    return tiles_tpu.hides(2 * macs, size, owner.resharder.names(axes), owner.subaxes.mesh)


def _moved(owner: Partitioner, op: Op, move: Resharded, dtype: str) -> tuple[MoveKey, tuple[Step, ...]]:
    """The reshard of an operand: its name and its collectives."""
    steps = owner.resharder.reshard(move.shape, dtype, move.source, move.target, move.outer)
    summed = any(each[0] == "all-reduce" for each in steps)
    if owner.target == "tpu" and dtype == "f32" and not summed and spmd_rounded.multiplies_matrices(owner, op):
        # It multiplies f32 in bf16 passes, and rounds what it gathers for that before it gathers.
        dtype = "bf16"
        steps = tuple((name, axes, size // 2) for name, axes, size in steps)
    end = owner.resharder.destination(move.shape, dtype, move.source, move.target, move.outer)
    return (move.outer, move.source, end), tuple(steps)
