"""Ops whose operands a TPU's compiler keeps sharded where those of CPU and GPU gather them (docs/rules.md).

On TPU batch normalisation is expanded into reductions before partitioning, and a top-k runs on each device's rows.
Custom calls run as their rules say, on all targets.
"""

from __future__ import annotations

import math

from autoshard.cost.partitioner.context import Context
from autoshard.cost.partitioner.partitioned import Emission, Tilings
from autoshard.cost.partitioner.reshard.emitted import Step
from autoshard.cost.partitioner.tiling import Tiling
from autoshard.dtypes import dtype_bytes
from autoshard.graph.ops import DimFactors, Op
from autoshard.graph.rules.table import rule_for


def top_k(context: Context, op: Op, reads: Tilings, results: Tilings) -> Emission:
    """Rows are independent."""
    return context.moved(op, reads, ((*results[0][:-1], ()),), context.share(op, results[0]))


def batch_norm(context: Context, op: Op, reads: Tilings, results: Tilings) -> Emission:
    """Tensors are split as the first result, vectors along features; two vectors of partial sums are all-reduced."""
    feature = op.attrs["feature_dim"]
    run_as = results[0]
    wanted = tuple(run_as if len(tiling) == len(run_as) else (run_as[feature],) for tiling in reads)
    axes = tuple(axis for dim, split in enumerate(run_as) if dim != feature for axis in split)
    own: list[Step] = []
    for number, result in enumerate(results[1:], 1):
        kind = op.results[number]
        made = (run_as[feature],)
        if axes:
            size = math.prod(context.subaxes.shard(kind.shape, made)) * dtype_bytes(kind.dtype)
            own.append(("all-reduce", context.resharder.names(axes), size))
        if made != result:
            own.extend(context.resharder.reshard(kind.shape, kind.dtype, made, result))
    return context.moved(op, reads, wanted, context.share(op, run_as), own)


def custom_call(context: Context, op: Op, reads: Tilings, results: Tilings) -> Emission:
    """Run a custom call on shards along dims that its rule allows, as the first result; all-reduce partial sums."""
    rule = rule_for(op, context.graph)
    split: dict[int, tuple[int, ...]] = {}
    if rule is not None:
        tensors = zip((*results, *reads), (*rule.results, *rule.operands), strict=True)
        for place, (tilings, dims) in enumerate(tensors):
            for axes, factors in zip(tilings, dims, strict=True):
                for factor in factors:
                    wanted = "parallel" if place < len(results) else "reduce"
                    if rule.factors[factor].kind == wanted:
                        split.setdefault(factor, axes)
    used: set[int] = set()
    for factor, axes in split.items():
        split[factor] = () if used.intersection(axes) else axes
        used.update(split[factor])

    def tiling(dims: DimFactors) -> Tiling:
        return tuple(tuple(axis for factor in dim for axis in split.get(factor, ())) for dim in dims)

    whole = tuple(((),) * len(each) for each in reads)
    wanted_reads = whole if rule is None else tuple(tiling(dims) for dims in rule.operands)
    summed = tuple(split[f] for f in split if rule is not None and rule.factors[f].kind == "reduce" and split[f])
    own: list[Step] = []
    for number, result in enumerate(results):
        kind = op.results[number]
        made = ((),) * len(result) if rule is None else tiling(rule.results[number])
        size = math.prod(context.subaxes.shard(kind.shape, made)) * dtype_bytes(kind.dtype)
        own.extend(context.sums(summed[::-1], size, context.cuts.cut(kind.shape, made, result)))
        if made != result:
            own.extend(context.resharder.reshard(kind.shape, kind.dtype, made, result))
    share = 1.0 / math.prod(context.subaxes.ways(axes) for axes in split.values())
    return context.moved(op, reads, wanted_reads, share, own)
