"""Rewrites of convolutions, and of pooling gradients, that XLA's CPU and GPU compilers do before fusion."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from autoshard.cost.compiler.lowered import COLLECTIVES, SLICE, Array, Lowered, Step
from autoshard.cost.compiler.rewrite import Rewriter, transposed
from autoshard.graph.ops import Op

INDEX_BYTES = 4
"""Bytes of an index: s32."""


def canonical_convolution(rewriter: Rewriter, step: Step, op: Op) -> None:
    """`ConvCanonicalization`: channels last, (batch, spatial, features) x (spatial, in, out features).

    Operands in another layout are copied; so is the result if no loop reads it.
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


@dataclass(frozen=True)
class Kernel:
    """The kernel operand of a convolution, traced to its source.

    Attributes:
        source: the operand before reversals and transposes, but after an all-gather.
        shape: of that, as laid out in memory.
        dims: per dim of the kernel its dim in `shape`.
        reversal: whether it is reversed: the convolution computes an input gradient.
        folded: numbers of the steps that reverse and transpose it.
    """

    source: int
    shape: tuple[int, ...]
    dims: tuple[int, ...]
    reversal: bool
    folded: tuple[int, ...]


def kernel_of(program: Lowered, step: Step) -> Kernel | None:
    """The kernel of a convolution; None if unknown."""
    shape = program.arrays[step.reads[1]].shape if len(step.reads) == 2 else None
    if shape is None or len(shape) != len(program.graph.ops[step.op].attrs["rhs"]):
        return None
    array, source, dims, reversal = step.reads[1], step.reads[1], tuple(range(len(shape))), False
    folded = []
    while (number := program.arrays[array].maker) >= 0:
        maker = program.steps[number]
        if not maker.reads:  # a reversed constant
            break
        order = program.graph.ops[maker.op].attrs.get("permutation", ())
        if maker.kind == "transpose" and len(order) == len(dims):
            dims = tuple(order[dim] for dim in dims)
        elif maker.kind == "reverse":
            reversal = not reversal
        elif maker.kind != "all-gather":
            break
        if maker.kind != "all-gather":
            folded.append(number)
            source = maker.reads[0] if source == array else source
        array = maker.reads[0]
    whole = [0] * len(dims)
    for dim, size in zip(dims, shape, strict=True):
        whole[dim] = size
    return Kernel(source, tuple(whole), dims, reversal, tuple(folded))


def folded_kernels(program: Lowered) -> set[int]:
    """Steps that reverse or transpose the kernel of one convolution and have no other user."""
    found: set[int] = set()
    for step in program.steps:
        kernel = kernel_of(program, step) if step.kind == "convolution" else None
        for number in kernel.folded if kernel is not None else ():
            made = program.arrays[program.steps[number].writes[0]]
            if len(made.readers) == 1 and not made.returned:
                found.add(number)
    return found


def cudnn_convolution(rewriter: Rewriter, step: Step, op: Op) -> None:
    """cuDNN reads kernels as (out features, spatial, in features), for an input gradient as in the forward pass.

    A kernel in another layout is copied once for both passes. The convolution itself transposes and reverses the kernel
    of a gradient. Image arguments, read channels last, are copied likewise. Temporaries have the layout that is read.
    """
    if len(step.reads) == 2:  # constant images or kernels have no array
        step = replace(step, reads=(_features_last(rewriter, step), step.reads[1]))
    kernel = kernel_of(rewriter.source, step)
    if kernel is None:
        rewriter.emit(step)
        return
    out, within, *spatial = (kernel.dims[dim] for dim in op.attrs["rhs"])
    order = (within, *spatial, out) if kernel.reversal else (out, *spatial, within)
    source = rewriter.instead.get(kernel.source, kernel.source)
    if _moves(kernel.shape, order) and _has_layout(rewriter.source, kernel.source):
        if (source, order) not in rewriter.transposes:
            rewriter.transposes[source, order] = rewriter.array(source)
            rewriter.emit(Step("transpose", step.op, (source,), (rewriter.transposes[source, order],)))
        source = rewriter.transposes[source, order]
    rewriter.emit(replace(step, reads=(step.reads[0], source)))


def _features_last(rewriter: Rewriter, step: Step) -> int:
    """The images of a convolution, channels last: an argument is copied once for both passes."""
    array = step.reads[0]
    shape = rewriter.source.arrays[array].shape
    if shape is None or len(shape) < 3 or not _has_layout(rewriter.source, array):
        return array
    order = (0, *range(2, len(shape)), 1)
    if not _moves(shape, order):
        return array
    if (array, order) not in rewriter.transposes:
        rewriter.transposes[array, order] = rewriter.array(array)
        rewriter.emit(Step("transpose", step.op, (array,), (rewriter.transposes[array, order],)))
    return rewriter.transposes[array, order]


def _has_layout(program: Lowered, number: int) -> bool:
    """Whether an array has an argument's layout: it is one, a shard of one, or a transpose or reversal.

    Others have the layout that is read.
    """
    while (maker := program.arrays[number].maker) >= 0:
        step = program.steps[maker]
        if step.kind not in (SLICE, "transpose", "reverse", *COLLECTIVES) or not step.reads:
            return False
        number = step.reads[0]
    return True


def _moves(shape: tuple[int, ...] | None, order: tuple[int, ...]) -> bool:
    """Whether this permutation moves any element."""
    if shape is not None and len(shape) == len(order):  # a bitcast may have another rank
        order = tuple(dim for dim in order if shape[dim] > 1)
    return list(order) != sorted(order)


def expanded_select_and_scatter(rewriter: Rewriter, step: Step, op: Op) -> None:
    """`SelectAndScatterExpander`: a reduce-window that finds the selected positions, and a scatter to these.

    Per dim of the operand there is an iota, and an array of selected positions; these are concatenated to rows of
    indices. Iotas run at the start of the program.
    """
    shape = rewriter.arrays[step.reads[0]].shape if len(step.reads) > 1 else None
    if shape is None:
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
    """An iota along a dim of this shape; emitted once."""
    if (shape, dim) not in rewriter.positions:
        rewriter.positions[shape, dim] = _indices(rewriter, shape)
        rewriter.emit(Step("iota", step.op, (), (rewriter.positions[shape, dim],)))
    return rewriter.positions[shape, dim]
