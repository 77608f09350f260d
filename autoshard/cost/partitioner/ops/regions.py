"""Ops that lowering writes as manual regions, in which each device computes its part (`stablehlo/regions.py`).

A region takes operands and makes results as it is split (`RegionDims.split`); it sums partial results itself, by a
reduce-scatter where their annotation splits them by the same axes. XLA:TPU compiles it as an all-reduce and a slice
where it would not form a reduce-scatter of these, whose layout is row-major (libtpu 0.0.51: small mixtures on v5e and
v5p, split in six ways).
"""

from __future__ import annotations

import math
from dataclasses import replace

from autoshard.cost.machine.compute import region_share
from autoshard.cost.partitioner.context import Context
from autoshard.cost.partitioner.partitioned import Emission, Tilings
from autoshard.cost.partitioner.reshard.emitted import Step
from autoshard.dtypes import dtype_bytes
from autoshard.fused import dims_of_attrs
from autoshard.graph.ops import Op


def region(context: Context, op: Op, reads: Tilings, results: Tilings) -> Emission:
    """The emission of such an op."""
    dims = dims_of_attrs(op.kind, op.attrs, [context.graph.type_of(value).shape for value in op.operands])
    split = dims.split(reads, results, context.subaxes.ways)
    own: list[Step] = []
    number: list[int] = []
    for result, wanted in enumerate(results):
        kind = op.results[result]
        made, axes, dim = dims.made(result, split, wanted)
        steps: list[Step] = []
        if axes:
            names = context.resharder.names(axes)
            before = dims.tiling(dims.results[result], split)
            summed = context.subaxes.shard(kind.shape, before)
            scatters = dim is not None and context.scatters_along(summed, dim, names, dtype_bytes(kind.dtype))
            size = math.prod(summed) * dtype_bytes(kind.dtype)
            steps.append(("reduce-scatter" if scatters else "all-reduce", names, size))
        if made != wanted:
            steps.extend(context.resharder.reshard(kind.shape, kind.dtype, made, wanted))
        own += steps
        number += [result] * len(steps)
    share = 1.0 / math.prod(map(context.subaxes.ways, split.values()))
    share *= region_share(op, context.subaxes.ways(split.get(dims.extras, ())), context.target)
    emission = context.moved(op, reads, tuple(dims.tiling(letters, split) for letters in dims.operands), share, own)
    return replace(emission, of_result=tuple(number))
