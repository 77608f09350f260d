"""Windowed einsums (collective matmuls): a contraction and its all-gather or reduce-scatter as one loop, on TPU.

`GetWindowedEinsumConfiguration` (xla/service/spmd/dot_handler.cc): where all devices of a group split one operand and
the result alike and the other operand would be gathered, the loop permutes its shards while it multiplies; where a
reduce-scatter follows a contraction over all of them, it permutes partial sums. `CollectiveRules.hides` says when that
pays. An operand that another contraction needs gathered too is gathered once for both.
"""

from __future__ import annotations

import math
from dataclasses import replace

from autoshard.cost.partitioner.ops.dot_plan import Contraction, Goal, Loop, Shape, Side


def looped(owner: Contraction, lhs: Side, rhs: Side, goal: Goal) -> Shape | None:
    """The local shape of the result if the contraction runs as a windowed einsum; None if it does not.

    Shards go both ways round the ring: one permute more than there are devices.
    """
    count = owner.subaxes.ways(goal.devices)
    if owner.hides is None or count < 4 or not any(goal.out):
        return None
    d = owner.dims
    free = owner.ways(goal.out, (m[1] for m in d.left)), owner.ways(goal.out, (n[1] for n in d.right))
    for side, other, kept in ((lhs, rhs, free[0]), (rhs, lhs, free[1])):
        if not (kept == owner.subaxes.tiles(other.tiling) == count and owner.may_loop[other.place]):
            continue
        if owner.as_out(side, len(goal.out)) != goal.out:
            continue
        whole = replace(other, tiling=((),) * len(other.tiling))
        pair = (side, whole) if side is lhs else (whole, side)
        if owner.hides(_macs(owner, *pair), math.prod(other.shape), goal.devices):
            part = math.prod(owner.subaxes.shard(other.shape, other.tiling))
            owner.result.steps.append(Loop(other.place, goal.devices, count, part, other.tiling, goal.outer))
            return owner.make(*pair, owner.leaf)
    summed = owner.ways(lhs.tiling, (k[0] for k in d.contract)), owner.ways(rhs.tiling, (k[1] for k in d.contract))
    size = math.prod(goal.shape)
    if summed == (count, count) and count in free and owner.hides(_macs(owner, lhs, rhs), size, goal.devices):
        owner.make(lhs, rhs, owner.leaf)
        made = owner.subaxes.shard(goal.shape, goal.out)
        owner.result.steps.append(Loop(2, goal.devices, count, math.prod(made), goal.out, goal.outer))
        return made
    return None


def _macs(owner: Contraction, lhs: Side, rhs: Side) -> int:
    """Multiply-adds of the local contraction."""
    before = owner.result.macs
    owner.make(lhs, rhs, owner.leaf)
    macs, owner.result.macs = owner.result.macs - before, before
    return owner.computed(macs, lhs, rhs)
