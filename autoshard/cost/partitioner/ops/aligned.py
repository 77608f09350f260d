"""GSPMD's handlers of elementwise and other ops on aligned shards, of reductions and of random numbers."""

from __future__ import annotations

import math
from dataclasses import replace

from autoshard.cost.partitioner.context import Context
from autoshard.cost.partitioner.partitioned import Emission, Tilings
from autoshard.cost.partitioner.reshard.emitted import Step
from autoshard.cost.partitioner.tiling import Tiling, carried
from autoshard.cost.partitioner.transfer import followed
from autoshard.dtypes import dtype_bytes
from autoshard.graph.groups import ELEMENTWISE
from autoshard.graph.ops import Op


def aligned(context: Context, op: Op, reads: Tilings, results: Tilings) -> Emission:
    """Reshard operands to the result's sharding; if all operands of an elementwise op agree, reshard the result."""
    if op.kind in ELEMENTWISE and len(reads) > 1 and all(tiling == reads[0] for tiling in reads[1:]):
        made = op.results[0]
        own = context.resharder.reshard(made.shape, made.dtype, reads[0], results[0])
        return context.moved(op, reads, reads, context.share(op, reads[0]), own)
    return context.moved(op, reads, _wanted(context, op, reads, results), context.share(op, results[0]))


def _wanted(context: Context, op: Op, reads: Tilings, results: Tilings) -> Tilings:
    """Per operand the sharding under which an op on aligned shards reads it."""
    kind, result = op.kind, results[0]
    wanted = []
    for place, tiling in enumerate(reads):
        shape = context.graph.type_of(op.operands[place]).shape
        if kind in ELEMENTWISE or kind == "optimization_barrier":
            mine = results[place] if kind == "optimization_barrier" else result
            wanted.append(mine if len(shape) == len(mine) else tiling)
            continue
        dims = context.transfers.dim_map(op, place)
        if dims is None:
            wanted.append(((),) * len(shape))
            continue
        wanted.append(carried(result, followed(dims), len(shape)))
    return tuple(wanted)


def reduce(context: Context, op: Op, reads: Tilings, results: Tilings) -> Emission:
    """`HandleReduce`: kept dims follow the result; a split reduced dim leaves partial sums for an all-reduce."""
    count = len(results)
    inputs = op.operands[:count]
    reduced = op.attrs["dims"]
    shape = context.graph.type_of(inputs[0]).shape
    base = reads[0]
    wanted: list[Tiling] = []
    for place, tiling in enumerate(reads):
        wanted.append(base if 0 < place < count else tiling)
    partial = tuple(axes for dim, axes in enumerate(base) if dim in reduced and axes)
    made_as = tuple(axes for dim, axes in enumerate(base) if dim not in reduced)
    own: list[Step] = []
    kept = tuple(size for dim, size in enumerate(shape) if dim not in reduced)
    for number, result in enumerate(results):
        dtype = op.results[number].dtype
        elements = math.prod(context.subaxes.shard(kept, made_as))
        if count > 1 and partial:
            for axes in partial:
                size = elements * context.subaxes.ways(axes) * dtype_bytes(dtype)
                own.append(("all-gather", context.resharder.names(axes), size))
        else:
            own.extend(
                context.sums(partial[::-1], elements * dtype_bytes(dtype), context.cuts.cut(kept, made_as, result))
            )
        if made_as != result:
            own.extend(context.resharder.reshard(kept, dtype, made_as, result))
    whole = math.prod(shape)
    share = math.prod(context.subaxes.shard(shape, base)) / whole if whole else 1.0
    emission = context.moved(op, reads, tuple(wanted), share, own)
    return replace(emission, order=context.order_of(partial[::-1]))


def rng(context: Context, op: Op, reads: Tilings, results: Tilings) -> Emission:
    """`HandleRng`: one of the devices that hold a shard draws it, and an all-reduce copies it to the others."""
    kind, (result,) = op.results[0], results
    used = {axis for dim in result for axis in dim}
    idle = tuple(axis for axis in range(len(context.subaxes.sizes)) if axis not in used)
    size = math.prod(context.subaxes.shard(kind.shape, result)) * dtype_bytes(kind.dtype)
    own: list[Step] = [("all-reduce", context.resharder.names(idle), size)] if idle else []
    return Emission((), tuple(own), context.share(op, result), reads)
