"""The emission of a contraction: the plan of `dot.py` or `conv.py`, as collectives of a target."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from functools import partial

from autoshard.cost.partitioner.context import Context
from autoshard.cost.partitioner.ops import rounded as spmd_rounded
from autoshard.cost.partitioner.ops.conv import ConvolutionPartitioner
from autoshard.cost.partitioner.ops.dot import DotPartitioner
from autoshard.cost.partitioner.ops.dot_plan import Halo, Hides, Loop, Sum
from autoshard.cost.partitioner.ops.dot_plan import Move as Resharded
from autoshard.cost.partitioner.partitioned import Dim, Emission, MoveKey, Ring, Tilings
from autoshard.cost.partitioner.reshard.emitted import Step
from autoshard.dtypes import dtype_bytes
from autoshard.graph.ops import Op, Value


def contraction(context: Context, op: Op, reads: Tilings, results: Tilings) -> Emission:
    """The emission of a `dot_general` or a convolution under these operand and result tilings."""
    lhs, rhs = (context.graph.type_of(value) for value in op.operands[:2])
    out, (result,) = op.results[0], results
    partitioner = _partitioner(context, op)
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
            steps = tuple(context.permutes(step.moved, step.tiling, kind.dtype))
            moves.append((step.place, (step.key, None, step.tiling), steps))
        elif isinstance(step, Loop):
            kind = out if step.place == 2 else (lhs, rhs)[step.place]
            width = 2 if step.place < 2 and kind.dtype == "f32" else dtype_bytes(kind.dtype)
            permute: Step = ("collective-permute", context.resharder.names(step.axes), step.part * width)
            if step.place == 2:
                rounds = len(own), step.parts + 1
                own.append(permute)
            else:
                ring = Ring(step.outer, step.parts)
                moves.append((step.place, (ring, step.source, context.nothing(kind.shape)), (permute,)))
        elif isinstance(step, Sum):
            cut = None
            if any(step.kept):
                parts = tuple(context.subaxes.ways(dim) for dim in step.kept)
                cut = context.cuts.cut(parts, context.nothing(parts), step.kept, step.outer)
                cut = None if cut is None else replace(cut, shape=step.made)
            elif isinstance(then, Resharded) and then.place == 2:
                cut = context.cuts.cut(then.shape, then.source, then.target, then.outer)
            if cut is not None and context.compiler.turns_products and is_transposed(context, op):
                cut = replace(cut, factors=cut.factors[::-1], places=cut.places[:, ::-1], shape=cut.shape[::-1])
            size = math.prod(step.made) * dtype_bytes(out.dtype)
            own.extend(context.sums(step.axes, size, cut, context.rules.lies_row_major(op.kind, step.made)))
            order = context.order_of(step.axes)
        elif step.place == 2:
            dtype = "bf16" if spmd_rounded.rounds(context, Value(op.id), None) else out.dtype
            own.extend(context.resharder.reshard(step.shape, dtype, step.source, step.target, step.outer))
        else:
            kind = lhs if step.place == 0 else rhs
            moves.append((step.place, *_moved(context, op, step, kind.dtype)))
    whole = partitioner.whole_macs(lhs.shape, rhs.shape, out.shape)
    share = plan.macs / whole if whole else 1.0
    return Emission(tuple(moves), tuple(own), share, reads, plan.overcounted, order, rounds=rounds)


def is_transposed(context: Context, op: Op) -> bool:
    """Whether a product's only user is a transpose: compilers compute the transposed product at once.

    Not where an annotation stands between them.
    """
    value = Value(op.id)
    if op.kind != "dot_general" or len(op.results[0].shape) != 2:
        return False
    if value in context.graph.returned or value in context.shardings.pins or value in context.copies_of:
        return False
    readers = [(reader.kind, tuple(reader.attrs.get("permutation", ()))) for reader in context.graph.readers(value)]
    return readers == [("transpose", (1, 0))]


def _partitioner(context: Context, op: Op) -> DotPartitioner:
    dims = context.transfers.contraction(op)
    hides: Hides | None = partial(_hides, context, op) if context.compiler.windowed_einsums else None
    if op.kind == "convolution":
        return ConvolutionPartitioner(dims, context.subaxes, op.attrs, op.results[0].shape, hides, context.may_loop(op))
    return DotPartitioner(dims, context.subaxes, hides, context.may_loop(op))


def _hides(context: Context, op: Op, macs: int, elements: int, axes: Dim) -> bool:
    """See `CollectiveRules.hides`."""
    size = elements * dtype_bytes(op.results[0].dtype)
    return context.rules.hides(2 * macs, size, context.resharder.names(axes), context.subaxes.mesh)


def _moved(context: Context, op: Op, move: Resharded, dtype: str) -> tuple[MoveKey, tuple[Step, ...]]:
    """The reshard of an operand: its key and its collectives."""
    steps = context.resharder.reshard(move.shape, dtype, move.source, move.target, move.outer)
    summed = any(each[0] == "all-reduce" for each in steps)
    if (
        context.compiler.rounds_for_products
        and dtype == "f32"
        and not summed
        and spmd_rounded.multiplies_matrices(context, op)
    ):
        # It multiplies f32 in bf16 passes, and rounds f32 operands before their all-gather.
        dtype = "bf16"
        steps = tuple((name, axes, size // 2) for name, axes, size in steps)
    end = context.resharder.destination(move.shape, dtype, move.source, move.target, move.outer)
    return (move.outer, move.source, end), tuple(steps)
