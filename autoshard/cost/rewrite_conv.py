"""Rewrites of convolutions and of pooling's gradients that XLA's CPU compiler does before it fuses."""

from __future__ import annotations

import math
from dataclasses import replace

from autoshard.cost.lowered import Array, Step
from autoshard.cost.rewrite import Rewriter, transposed
from autoshard.graph.ops import Op

INDEX_BYTES = 4
"""Of an index: s32."""


def canonical_convolution(rewriter: Rewriter, step: Step, op: Op) -> None:
    """`ConvCanonicalization`: channels last, (batch, spatial, features) x (spatial, in, out features).

    Operands that lie in another order are copied; so is the result where no loop reads it.
    """
    attrs = op.attrs
    lhs, rhs, out = (tuple(attrs[name]) for name in ("lhs", "rhs", "out"))
    orders = [(lhs[0], *lhs[2:], lhs[1]), (*rhs[2:], rhs[1], rhs[0])]
    reads = list(step.reads)
    if len(reads) == 2:
        for place, dims in enumerate(orders):
            if _moves(rewriter.arrays[reads[place]].shape, dims):
                reads[place] = transposed(rewriter, step, place, dims)
    made = rewriter.arrays[step.writes[0]].shape
    order = (out[0], *out[2:], out[1])
    if not _moves(made, order):
        rewriter.emit(replace(step, reads=tuple(reads)))
        return
    shape = None if made is None or len(made) != len(order) else tuple(made[dim] for dim in order)
    canonical = rewriter.array(step.writes[0], shape=shape)
    rewriter.emit(replace(step, reads=tuple(reads), writes=(canonical,)))
    rewriter.emit(Step("transpose", step.op, (canonical,), step.writes))


def _moves(shape: tuple[int, ...] | None, order: tuple[int, ...]) -> bool:
    """Whether putting dims into this order moves any element."""
    if shape is not None and len(shape) == len(order):  # what is read may be a view of an array of another rank
        order = tuple(dim for dim in order if shape[dim] > 1)
    return list(order) != sorted(order)


def expanded_select_and_scatter(rewriter: Rewriter, step: Step, op: Op) -> None:
    """`SelectAndScatterExpander`: windows reduced to the places that they select, and a scatter to those.

    Per dim of the operand there is an array of positions, and one of those that are selected; they are put together
    as rows of indices. Positions depend on nothing: they are made at the start of the program.
    """
    shape = rewriter.arrays[step.reads[0]].shape
    if shape is None or len(step.reads) < 2:
        rewriter.emit(step)
        return
    operand, source = step.reads[:2]
    sources = rewriter.arrays[source].shape or ()
    rank = len(op.results[0].shape)
    positions = [_iota(rewriter, step, shape, dim) for dim in range(rank)]
    value = rewriter.array(operand, math.prod(sources) * _width(rewriter, operand), sources)
    selected = [_indices(rewriter, sources) for _ in range(rank)]
    rewriter.emit(Step("reduce_window", step.op, (operand, *positions), (value, *selected)))
    rows = _indices(rewriter, (math.prod(sources), rank))
    rewriter.emit(Step("concatenate", step.op, tuple(selected), (rows,)))
    cleared = rewriter.array(step.writes[0])
    rewriter.emit(Step("broadcast_in_dim", step.op, (), (cleared,)))
    rewriter.emit(Step("scatter", step.op, (cleared, rows, source), step.writes))


def _width(rewriter: Rewriter, array: int) -> int:
    found = rewriter.arrays[array]
    return found.bytes // max(1, math.prod(found.shape or ()))


def _indices(rewriter: Rewriter, shape: tuple[int, ...]) -> int:
    rewriter.arrays.append(Array(shape, "i32", math.prod(shape) * INDEX_BYTES, -1))
    return len(rewriter.arrays) - 1


def _iota(rewriter: Rewriter, step: Step, shape: tuple[int, ...], dim: int) -> int:
    """The positions along a dim of an array of this shape; made once."""
    if (shape, dim) not in rewriter.positions:
        rewriter.positions[shape, dim] = _indices(rewriter, shape)
        rewriter.emit(Step("iota", step.op, (), (rewriter.positions[shape, dim],)))
    return rewriter.positions[shape, dim]
