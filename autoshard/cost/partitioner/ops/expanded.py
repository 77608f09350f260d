"""Ops that a TPU's compiler runs split where those of CPU and GPU gather what they read (measured, docs/rules.md).

Batch normalisation is expanded into sums before it is partitioned there, and a top-k runs on each device's rows. Custom
calls run as their rules say, on all targets.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from autoshard.cost.partitioner.reshard.emitted import Step
from autoshard.cost.partitioner.tiling import Tiling
from autoshard.dtypes import dtype_bytes
from autoshard.graph.ops import DimFactors, Op
from autoshard.graph.rules.table import rule_for

if TYPE_CHECKING:
    from autoshard.cost.partitioner.emission import Emission
    from autoshard.cost.partitioner.partition import Partitioner


def top_k(owner: Partitioner, op: Op, reads: tuple[Tiling, ...], result: Tiling) -> Emission:
    """Rows are independent."""
    return owner.moved(op, reads, ((*result[:-1], ()),), owner.share(op, result))


def batch_norm(owner: Partitioner, op: Op, reads: tuple[Tiling, ...], results: tuple[Tiling, ...]) -> Emission:
    """Tensors are split as the first result, vectors along features; two vectors of sums are reduced."""
    feature = op.attrs["feature_dim"]
    run_as = results[0]
    wanted = tuple(run_as if len(tiling) == len(run_as) else (run_as[feature],) for tiling in reads)
    axes = tuple(axis for dim, split in enumerate(run_as) if dim != feature for axis in split)
    own: list[Step] = []
    for number, result in enumerate(results[1:], 1):
        kind = op.results[number]
        made = (run_as[feature],)
        if axes:
            size = math.prod(owner.subaxes.shard(kind.shape, made)) * dtype_bytes(kind.dtype)
            own.append(("all-reduce", owner.resharder.names(axes), size))
        if made != result:
            own.extend(owner.resharder.reshard(kind.shape, kind.dtype, made, result))
    return owner.moved(op, reads, wanted, owner.share(op, run_as), own)


def custom_call(owner: Partitioner, op: Op, reads: tuple[Tiling, ...], results: tuple[Tiling, ...]) -> Emission:
    """On parts of what its rule lets be split, as the first result is, or whole; terms of sums are reduced."""
    rule = rule_for(op, owner.graph)
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
        size = math.prod(owner.subaxes.shard(kind.shape, made)) * dtype_bytes(kind.dtype)
        own.extend(owner.sums(summed, size, owner.cuts.cut(kind.shape, made, result)))
        if made != result:
            own.extend(owner.resharder.reshard(kind.shape, kind.dtype, made, result))
    share = 1.0 / math.prod(owner.subaxes.ways(axes) for axes in split.values())
    return owner.moved(op, reads, wanted_reads, share, own)
