"""Ops that a TPU's compiler runs split where those of CPU and GPU gather what they read (measured, docs/rules.md).

Batch normalisation is expanded into sums before it is partitioned there, and a top-k runs on each device's rows.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from autoshard.cost.spmd_reshard import Step
from autoshard.graph.ops import Op
from autoshard.graph.tiling import Tiling
from autoshard.graph.transfer import bytes_of

if TYPE_CHECKING:
    from autoshard.cost.spmd import Emission, Partitioner


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
            size = math.prod(owner.subaxes.shard(kind.shape, made)) * bytes_of(kind.dtype)
            own.append(("all-reduce", owner.resharder.names(axes), size))
        if made != result:
            own.extend(owner.resharder.reshard(kind.shape, kind.dtype, made, result))
    return owner.moved(op, reads, wanted, owner.share(op, run_as), own)
