"""Attention kept as one op: a manual region that lowering writes, on each device's part (`stablehlo/attention.py`).

The region takes operands as its results are split, over batch, heads and queries; it sums partial gradients of keys and
values itself, by a reduce-scatter where their annotation splits them along keys by the same axes.
"""

from __future__ import annotations

import math
from dataclasses import replace

from autoshard.attention.dims import SPLIT, AttentionDims
from autoshard.attention.form import Form
from autoshard.cost.machine.compute import attention_share
from autoshard.cost.partitioner.context import Context
from autoshard.cost.partitioner.partitioned import Emission, Tilings
from autoshard.cost.partitioner.reshard.emitted import Step
from autoshard.cost.partitioner.tiling import Tiling
from autoshard.dtypes import dtype_bytes
from autoshard.graph.ops import Op


def fused_attention(context: Context, op: Op, reads: Tilings, results: Tilings) -> Emission:
    """The emission of an attention, or of its gradient, whose first result says how it is split."""
    shapes = [context.graph.type_of(value).shape for value in op.operands]
    dims = AttentionDims.of(op.kind, Form.of(op.attrs), shapes)
    split = {
        letter: axes
        for letter, axes, size in zip(dims.results[0], results[0], op.results[0].shape, strict=True)
        if letter in SPLIT and size % context.subaxes.ways(axes) == 0
    }

    def tiling(letters: str) -> Tiling:
        return tuple(split.get(letter, ()) for letter in letters)

    own: list[Step] = []
    number: list[int] = []
    for result, wanted in enumerate(results):
        kind, made = op.results[result], tiling(dims.results[result])
        axes = tuple(axis for letter in dims.summed(result) for axis in split.get(letter, ()))
        size = math.prod(context.subaxes.shard(kind.shape, made)) * dtype_bytes(kind.dtype)
        steps: list[Step] = []
        if axes and result:
            scattered = tuple((*each, *axes) if letter == "t" else each for letter, each in zip(
                dims.results[result], made, strict=True))  # fmt: skip
            names = context.resharder.names(axes)
            if wanted == scattered:
                made = scattered
                steps.append(("reduce-scatter", names, size))
            else:
                steps.append(("all-reduce", names, size))
        if made != wanted:
            steps.extend(context.resharder.reshard(kind.shape, kind.dtype, made, wanted))
        own += steps
        number += [result] * len(steps)
    share = 1.0 / math.prod(context.subaxes.ways(axes) for axes in split.values())
    share *= attention_share(op, context.subaxes.ways(split.get("s", ())), context.target)
    emission = context.moved(op, reads, tuple(tiling(letters) for letters in dims.operands), share, own)
    return replace(emission, of_result=tuple(number))
