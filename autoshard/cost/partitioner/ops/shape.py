"""GSPMD's handlers of ops that move elements, and of windows: reshape, slice, pad, concatenate, reverse, pooling.

Each function gets the partitioner, the op, its operands' tilings and the tiling wanted of its result. They follow
`HandleReshape`, `HandleSlice`, `HandlePad`, `HandleReduceWindow` and so on of XLA
(xla/service/spmd/spmd_partitioner.cc).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from autoshard.cost.partitioner.context import Context
from autoshard.cost.partitioner.ops.halo import Exchange, Window, exchange, exchange_all, halos
from autoshard.cost.partitioner.partitioned import Emission, Tilings
from autoshard.cost.partitioner.reshard.emitted import Step
from autoshard.cost.partitioner.tiling import Tiling
from autoshard.cost.partitioner.top_k import sorts_parts, top_k_sorts
from autoshard.dtypes import dtype_bytes
from autoshard.graph.ops import Op
from autoshard.graph.rules.shape import spreads
from autoshard.program import TensorType

Shape = tuple[int, ...]
Dim = tuple[int, ...]


def reshape(context: Context, op: Op, reads: Tilings, results: Tilings) -> Emission:
    """Reshard the operand to the sharding that reshapes to the result's, or the result from the operand's, reshaped."""
    (source,), (result,) = reads, results
    kind = context.graph.type_of(op.operands[0])
    shape, into = kind.shape, op.results[0].shape
    subaxes = context.subaxes
    share = context.share(op, result)
    if not any(result):
        return context.moved(op, reads, (context.nothing(shape),), share)
    back = subaxes.reshape(into, shape, result)
    if subaxes.tiles(back) == subaxes.tiles(result):
        return context.moved(op, reads, (back,), share)
    forth = subaxes.reshape(shape, into, source)
    if any(forth):
        again = subaxes.reshape(into, shape, forth)
        if subaxes.tiles(again) == subaxes.tiles(forth):
            own = context.resharder.reshard(into, kind.dtype, forth, result)
            if subaxes.tiles(forth) == subaxes.tiles(source):
                return context.moved(op, reads, (again,), share, own)
    # Gather the dims that do not carry over, then slice the result.
    kept = subaxes.reshape(into, shape, forth)
    own = context.resharder.reshard(into, kind.dtype, forth, result)
    return context.moved(op, reads, (kept,), share, own)


def slice_(context: Context, op: Op, reads: Tilings, results: Tilings) -> Emission:
    """Slice under the sharding, operand's or result's, with more tiles; then reshard to the result's."""
    (source,), (result,) = reads, results
    attrs = op.attrs
    shape = context.graph.type_of(op.operands[0]).shape
    windows = tuple(
        Window(size, count, start, stride)
        for size, count, start, stride in zip(shape, op.results[0].shape, attrs["start"], attrs["stride"], strict=True)
    )
    maker = context.graph.ops[op.operands[0].op]
    if maker.kind == "sort" and _in_parts(context, maker, source):
        return _first_of_parts(context, op, maker, source, result)
    run_as = source if context.subaxes.tiles(source) > context.subaxes.tiles(result) else result
    return _windowed(context, op, source, result, run_as, windows, resharded=True)


def _in_parts(context: Context, op: Op, tiling: Tiling) -> bool:
    """Whether a sort is a top-k call on parts of the sorted dim (`Propagation`)."""
    axes, k = tiling[op.attrs["dim"]], top_k_sorts(context.graph).get(op.id)
    calls = context.compiler.calls_top_k and context.subaxes.tiles(tiling) == context.subaxes.devices
    return bool(calls and axes and k is not None and sorts_parts(op, k, context.subaxes.ways(axes)))


def _first_of_parts(context: Context, op: Op, sort: Op, source: Tiling, result: Tiling) -> Emission:
    """The first of each part are gathered along the sorted dim and sorted again; then the result is resharded."""
    dim, kind = sort.attrs["dim"], op.results[0]
    rows = (*source[:dim], (), *source[dim + 1 :])
    size = math.prod(context.subaxes.shard(kind.shape, rows)) * dtype_bytes(kind.dtype)
    gathered: Step = ("all-gather", context.resharder.names(source[dim]), size * context.subaxes.ways(source[dim]))
    own = [gathered, *context.resharder.reshard(kind.shape, kind.dtype, rows, result)]
    return context.moved(op, (source,), (source,), context.share(op, rows), own)


def pad(context: Context, op: Op, reads: Tilings, results: Tilings) -> Emission:
    """Pad under the result's sharding; gather split dims with interior padding, but those spread in place."""
    (result,) = results
    attrs = op.attrs
    shape = context.graph.type_of(op.operands[0]).shape
    spread = [spreads(*each) for each in zip(attrs["low"], attrs["high"], attrs["interior"], strict=True)]
    gathered = [
        interior > 0 and not (each and size % context.subaxes.ways(axes) == 0)
        for interior, each, size, axes in zip(attrs["interior"], spread, shape, result, strict=True)
    ]
    if any(here and axes for here, axes in zip(gathered, result, strict=True)):
        whole = tuple(() if interior else axes for interior, axes in zip(attrs["interior"], result, strict=True))
        return context.moved(op, reads, (whole, *reads[1:]), context.share(op, result))
    windows = tuple(
        Window(size, size, 0) if each else Window(size, count, -low)
        for size, count, low, each in zip(shape, op.results[0].shape, attrs["low"], spread, strict=True)
    )
    return _windowed(context, op, reads[0], result, result, windows)


def reduce_window(context: Context, op: Op, reads: Tilings, results: Tilings) -> Emission:
    """Run under the result's sharding, with halos of the operand; each device computes all of a replicated result."""
    attrs = op.attrs
    shape, result = context.graph.type_of(op.operands[0]).shape, results[0]
    if len(results) > 1 or not any(result):
        whole = tuple(context.nothing(context.graph.type_of(value).shape) for value in op.operands)
        return context.moved(op, reads, whole, 1.0)
    windows = tuple(
        Window(size, count, -low, stride, taps, dilation, base)
        for size, count, (low, _), stride, taps, dilation, base in zip(
            shape,
            op.results[0].shape,
            attrs["padding"],
            attrs["stride"],
            attrs["window"],
            attrs["window_dilation"],
            attrs["base_dilation"],
            strict=True,
        )
    )
    return _windowed(context, op, reads[0], result, result, windows)


def select_and_scatter(context: Context, op: Op, reads: Tilings, results: Tilings) -> Emission:
    """Run under the result's sharding, with halos of operand and source along split dims that windows cover."""
    (result,) = results
    attrs = op.attrs
    shapes = [context.graph.type_of(value).shape for value in op.operands]
    wanted = (result, result, context.nothing(shapes[2]))
    own: list[Step] = []
    local = [list(context.subaxes.shard(shape, result)) for shape in shapes[:2]]
    for dim, axes in enumerate(result):
        if not axes:
            continue
        data, source = _scattered(shapes[0][dim], shapes[1][dim], context.subaxes.ways(axes), attrs, dim)
        for place, found in ((1, source), (0, data)):
            done = exchange_all(local[place], [(dim, found)])
            if done is None:
                whole = tuple(context.nothing(shape) for shape in shapes)
                return context.moved(op, reads, whole, 1.0)
            local[place] = list(done[0])
            own.extend(context.permutes(done[1], result, op.results[0].dtype))
    return context.moved(op, reads, wanted, context.share(op, result), own)


def _scattered(
    size: int, windows: int, shards: int, attrs: Mapping[str, Any], dim: int
) -> tuple[Exchange | None, Exchange | None]:
    """Halos of the operand and of the source of a select_and_scatter along one dim."""
    stride, low = attrs["stride"][dim], attrs["padding"][dim][0]
    taps = max(stride, attrs["window"][dim])
    shard, source = -(-size // shards), -(-windows // shards)
    first = [(shard * i + low - taps + stride) // stride for i in range(shards)]
    limit = [(shard * (i + 1) + low + stride - 1) // stride for i in range(shards)]
    most = max(end - start for start, end in zip(first, limit, strict=True))
    source_halos = halos(
        windows,
        source,
        most,
        [source * i - first[i] for i in range(shards)],
        [limit[i] - source * (i + 1) for i in range(shards)],
    )
    data_halos = halos(
        size,
        shard,
        (most - 1) * stride + taps,
        [shard * i + low - first[i] * stride for i in range(shards)],
        [limit[i] * stride - (shard * (i + 1) + stride + low - taps) for i in range(shards)],
    )
    return data_halos, source_halos


def _windowed(
    context: Context,
    op: Op,
    source: Tiling,
    result: Tiling,
    run_as: Tiling,
    windows: tuple[Window, ...],
    *,
    resharded: bool = False,
) -> Emission:
    """`ReshardAsWindowedInput`: reshard to `run_as`, then exchange halos along each split dim whose elements shift.

    Each device pads and slices an operand that is replicated along those dims, unless it is `resharded` first in any
    case, as `HandleSlice` does.
    """
    kind = context.graph.type_of(op.operands[0])
    subaxes = context.subaxes
    own: list[Step] = []
    busy = [dim for dim, window in enumerate(windows) if run_as[dim] and not window.trivial]
    whole = tuple(() if dim in busy else axes for dim, axes in enumerate(run_as))
    target = run_as
    if busy and not resharded and (not any(source) or source == whole):
        target = source  # every device pads and slices its shard
    elif busy:
        found = [(dim, exchange(windows[dim], subaxes.ways(run_as[dim]))) for dim in busy]
        done = exchange_all(subaxes.shard(kind.shape, run_as), found)
        if done is None:
            own = list(context.resharder.reshard(kind.shape, kind.dtype, run_as, whole))
        else:
            own = context.permutes(done[1], run_as, kind.dtype)
    own.extend(context.resharder.reshard(op.results[0].shape, kind.dtype, run_as, result))
    reads = tuple(context.nothing(context.graph.type_of(value).shape) for value in op.operands[1:])
    return context.moved(op, (source, *reads), (target, *reads), context.share(op, run_as), own)


def concatenate(context: Context, op: Op, reads: Tilings, results: Tilings) -> Emission:
    """See `concatenated`."""
    (result,) = results
    kinds = [context.graph.type_of(value) for value in op.operands]
    wanted, own = concatenated(context, kinds, op.results[0].shape, reads, result, op.attrs["dim"])
    run_as = wanted[0] if wanted else result
    return context.moved(op, reads, tuple(wanted), context.share(op, run_as), own)


def concatenated(
    context: Context, kinds: Sequence[TensorType], into: Shape, reads: Sequence[Tiling], result: Tiling, dim: int
) -> tuple[list[Tiling], list[Step]]:
    """(operand tilings, reshards of the result) of a concatenation along `dim`.

    The axes of a split `dim` move to the first dim that they divide, and back after the concatenation. For two operands
    with one row per device a TPU's compiler permutes each row to its device (libtpu 0.0.51, v5e 2x4: exact over two
    and eight devices, over four of eight it sends 6 rows rather than 4).
    """
    ways = context.subaxes.ways(result[dim])
    single = len(kinds) == 2 and all(kind.shape[dim] == ways for kind in kinds)
    if context.compiler.exchanges_rows and ways > 1 and single and all(read == result for read in reads):
        row = math.prod(context.subaxes.shard(kinds[0].shape, result)) * dtype_bytes(kinds[0].dtype)
        # Each device keeps two rows of one operand; the first (last) of all has one of them.
        step: Step = ("collective-permute", context.subaxes.axes(result[dim]), row)
        return [result, result], [step] * (2 if ways == 2 else 4)
    run_as = moved_off(context, into, result, dim)
    return [run_as] * len(kinds), list(context.resharder.reshard(into, kinds[0].dtype, run_as, result))


def sort(context: Context, op: Op, reads: Tilings, results: Tilings) -> Emission:
    """Move the sorted dim's axes as a concatenation does (`HandleSort`); all operands and results are split alike."""
    run_as = results[0]
    if reads[0] != run_as or not _in_parts(context, op, run_as):
        run_as = moved_off(context, op.results[0].shape, run_as, op.attrs["dim"])
    own: list[Step] = []
    for kind, result in zip(op.results, results, strict=True):
        own.extend(context.resharder.reshard(kind.shape, kind.dtype, run_as, result))
    return context.moved(op, reads, (run_as,) * len(reads), context.share(op, run_as), own)


def moved_off(context: Context, shape: Shape, tiling: Tiling, dim: int) -> Tiling:
    """`tiling` with `dim` replicated: its axes move to the first dim that they divide evenly, else they are dropped."""
    axes = tiling[dim]
    if not axes:
        return tiling
    result = list(tiling)
    result[dim] = ()
    for other, size in enumerate(shape):
        if other != dim and size % context.subaxes.ways((*tiling[other], *axes)) == 0:
            result[other] = (*tiling[other], *axes)
            break
    return tuple(result)


def reverse(context: Context, op: Op, reads: Tilings, results: Tilings) -> Emission:
    """Shards trade devices along reversed dims that are split, by a collective permute."""
    kind, (result,) = op.results[0], results
    own: list[Step] = []
    reversed_axes = tuple(axis for dim in op.attrs["dims"] for axis in result[dim])
    if reversed_axes:
        size = math.prod(context.subaxes.shard(kind.shape, result)) * dtype_bytes(kind.dtype)
        own.append(("collective-permute", context.subaxes.axes(reversed_axes), size))
    return context.moved(op, reads, results, context.share(op, result), own)
