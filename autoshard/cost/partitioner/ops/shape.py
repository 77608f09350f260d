"""What GSPMD emits for ops that move elements, and for windows: reshape, slice, pad, concatenate, reverse, pooling.

Each function gets the partitioner, the op, the shardings its operands are found under and the one its result is wanted
under. They follow `HandleReshape`, `HandleSlice`, `HandlePad`, `HandleReduceWindow` and so on of XLA
(xla/service/spmd/spmd_partitioner.cc).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from autoshard.cost.partitioner.ops.halo import Exchange, Window, exchange, exchange_all, halos
from autoshard.cost.partitioner.reshard.emitted import Step
from autoshard.cost.partitioner.tiling import Tiling
from autoshard.dtypes import dtype_bytes
from autoshard.graph.ops import Op
from autoshard.program import TensorType

if TYPE_CHECKING:
    from autoshard.cost.partitioner.emission import Emission
    from autoshard.cost.partitioner.partition import Partitioner

Shape = tuple[int, ...]
Dim = tuple[int, ...]


def reshape(owner: Partitioner, op: Op, source: Tiling, result: Tiling) -> Emission:
    """Through the operand sharding that the result's becomes, or the result sharding that the operand's becomes."""
    kind = owner.graph.type_of(op.operands[0])
    shape, into = kind.shape, op.results[0].shape
    subaxes = owner.subaxes
    share = owner.share(op, result)
    if not any(result):
        return owner.moved(op, (source,), (owner.nothing(shape),), share)
    back = subaxes.reshape(into, shape, result)
    if subaxes.tiles(back) == subaxes.tiles(result):
        return owner.moved(op, (source,), (back,), share)
    forth = subaxes.reshape(shape, into, source)
    if any(forth):
        again = subaxes.reshape(into, shape, forth)
        if subaxes.tiles(again) == subaxes.tiles(forth):
            own = owner.resharder.reshard(into, kind.dtype, forth, result)
            if subaxes.tiles(forth) == subaxes.tiles(source):
                return owner.moved(op, (source,), (again,), share, own)
    # Dims that carry over stay split, the others are gathered; the result is sliced from there.
    kept = subaxes.reshape(into, shape, forth)
    own = owner.resharder.reshard(into, kind.dtype, forth, result)
    return owner.moved(op, (source,), (kept,), share, own)


def slice_(owner: Partitioner, op: Op, source: Tiling, result: Tiling) -> Emission:
    """Under the operand's sharding if it has more tiles, else under the result's; then resharded to the result's."""
    attrs = op.attrs
    shape = owner.graph.type_of(op.operands[0]).shape
    windows = tuple(
        Window(size, count, start, stride)
        for size, count, start, stride in zip(shape, op.results[0].shape, attrs["start"], attrs["stride"], strict=True)
    )
    run_as = source if owner.subaxes.tiles(source) > owner.subaxes.tiles(result) else result
    return _windowed(owner, op, source, result, run_as, windows, resharded=True)


def pad(owner: Partitioner, op: Op, reads: Sequence[Tiling], result: Tiling) -> Emission:
    """Under the result's sharding; dims with interior padding are gathered where they are split."""
    attrs = op.attrs
    shape = owner.graph.type_of(op.operands[0]).shape
    if any(interior and axes for interior, axes in zip(attrs["interior"], result, strict=True)):
        whole = tuple(() if interior else axes for interior, axes in zip(attrs["interior"], result, strict=True))
        return owner.moved(op, tuple(reads), (whole, *reads[1:]), owner.share(op, result))
    windows = tuple(
        Window(size, count, -low) for size, count, low in zip(shape, op.results[0].shape, attrs["low"], strict=True)
    )
    return _windowed(owner, op, reads[0], result, result, windows)


def reduce_window(owner: Partitioner, op: Op, reads: Sequence[Tiling], results: Sequence[Tiling]) -> Emission:
    """Under the result's sharding, as a window over the operand; a replicated result is computed whole everywhere."""
    attrs = op.attrs
    shape, result = owner.graph.type_of(op.operands[0]).shape, results[0]
    if len(results) > 1 or not any(result):
        whole = tuple(owner.nothing(owner.graph.type_of(value).shape) for value in op.operands)
        return owner.moved(op, tuple(reads), whole, 1.0)
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
    return _windowed(owner, op, reads[0], result, result, windows)


def select_and_scatter(owner: Partitioner, op: Op, reads: Sequence[Tiling], result: Tiling) -> Emission:
    """Operand and source under the result's sharding; halos of both along split dims that windows cover."""
    attrs = op.attrs
    shapes = [owner.graph.type_of(value).shape for value in op.operands]
    wanted = (result, result, owner.nothing(shapes[2]))
    own: list[Step] = []
    local = [list(owner.subaxes.shard(shape, result)) for shape in shapes[:2]]
    for dim, axes in enumerate(result):
        if not axes:
            continue
        data, source = _scattered(shapes[0][dim], shapes[1][dim], owner.subaxes.ways(axes), attrs, dim)
        for place, found in ((1, source), (0, data)):
            done = exchange_all(local[place], [(dim, found)])
            if done is None:
                whole = tuple(owner.nothing(shape) for shape in shapes)
                return owner.moved(op, tuple(reads), whole, 1.0)
            local[place] = list(done[0])
            own.extend(owner.permutes(done[1], result, op.results[0].dtype))
    return owner.moved(op, tuple(reads), wanted, owner.share(op, result), own)


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
    owner: Partitioner,
    op: Op,
    source: Tiling,
    result: Tiling,
    run_as: Tiling,
    windows: tuple[Window, ...],
    *,
    resharded: bool = False,
) -> Emission:
    """`ReshardAsWindowedInput`: reshard to `run_as`, exchange halos along each dim that is split and moved.

    An operand that is whole along those dims is padded and sliced where it is, unless it is `resharded` in any case:
    `HandleSlice` does that first, and then exchanges.
    """
    kind = owner.graph.type_of(op.operands[0])
    subaxes = owner.subaxes
    own: list[Step] = []
    busy = [dim for dim, window in enumerate(windows) if run_as[dim] and not window.trivial]
    whole = tuple(() if dim in busy else axes for dim, axes in enumerate(run_as))
    target = run_as
    if busy and not resharded and (not any(source) or source == whole):
        target = source  # every device pads and slices what it has
    elif busy:
        found = [(dim, exchange(windows[dim], subaxes.ways(run_as[dim]))) for dim in busy]
        done = exchange_all(subaxes.shard(kind.shape, run_as), found)
        if done is None:
            own = list(owner.resharder.reshard(kind.shape, kind.dtype, run_as, whole))
        else:
            own = owner.permutes(done[1], run_as, kind.dtype)
    own.extend(owner.resharder.reshard(op.results[0].shape, kind.dtype, run_as, result))
    reads = tuple(owner.nothing(owner.graph.type_of(value).shape) for value in op.operands[1:])
    return owner.moved(op, (source, *reads), (target, *reads), owner.share(op, run_as), own)


def concatenate(owner: Partitioner, op: Op, reads: Sequence[Tiling], result: Tiling) -> Emission:
    """See `concatenated`."""
    kinds = [owner.graph.type_of(value) for value in op.operands]
    wanted, own = concatenated(owner, kinds, op.results[0].shape, reads, result, op.attrs["dim"])
    run_as = wanted[0] if wanted else result
    return owner.moved(op, tuple(reads), tuple(wanted), owner.share(op, run_as), own)


def concatenated(
    owner: Partitioner, kinds: Sequence[TensorType], into: Shape, reads: Sequence[Tiling], result: Tiling, dim: int
) -> tuple[list[Tiling], list[Step]]:
    """How the operands of a concatenation are read, and what follows.

    A split concatenated dim gives its axes to the first dim that they divide, and takes them back afterwards. Of two
    operands of one row to a device, a TPU's compiler sends each row to where it belongs (libtpu 0.0.51, v5e 2x4: exact
    over two and eight devices, over four of eight it sends 6 rows rather than 4).
    """
    ways = owner.subaxes.ways(result[dim])
    single = len(kinds) == 2 and all(kind.shape[dim] == ways for kind in kinds)
    if owner.target == "tpu" and ways > 1 and single and all(read == result for read in reads):
        row = math.prod(owner.subaxes.shard(kinds[0].shape, result)) * dtype_bytes(kinds[0].dtype)
        # Each device keeps two rows of one operand; the first (last) of all keeps one that it has.
        step: Step = ("collective-permute", owner.subaxes.axes(result[dim]), row)
        return [result, result], [step] * (2 if ways == 2 else 4)
    run_as = moved_off(owner, into, result, dim)
    return [run_as] * len(kinds), list(owner.resharder.reshard(into, kinds[0].dtype, run_as, result))


def sort(owner: Partitioner, op: Op, reads: Sequence[Tiling], results: Sequence[Tiling]) -> Emission:
    """As a concatenation, with the sorted dim (`HandleSort`); every operand and result is split alike."""
    run_as = moved_off(owner, op.results[0].shape, results[0], op.attrs["dim"])
    own: list[Step] = []
    for kind, result in zip(op.results, results, strict=True):
        own.extend(owner.resharder.reshard(kind.shape, kind.dtype, run_as, result))
    return owner.moved(op, tuple(reads), (run_as,) * len(reads), owner.share(op, run_as), own)


def moved_off(owner: Partitioner, shape: Shape, tiling: Tiling, dim: int) -> Tiling:
    """`tiling` with `dim` whole: its axes go to the first dim that they divide evenly, else they are dropped."""
    axes = tiling[dim]
    if not axes:
        return tiling
    result = list(tiling)
    result[dim] = ()
    for other, size in enumerate(shape):
        if other != dim and size % owner.subaxes.ways((*tiling[other], *axes)) == 0:
            result[other] = (*tiling[other], *axes)
            break
    return tuple(result)


def reverse(owner: Partitioner, op: Op, source: Tiling, result: Tiling) -> Emission:
    """Shards trade places along reversed dims that are split."""
    kind = op.results[0]
    own: list[Step] = []
    turned = tuple(axis for dim in op.attrs["dims"] for axis in result[dim])
    if turned:
        size = math.prod(owner.subaxes.shard(kind.shape, result)) * dtype_bytes(kind.dtype)
        own.append(("collective-permute", owner.subaxes.axes(turned), size))
    return owner.moved(op, (source,), (result,), owner.share(op, result), own)
