"""Windowed einsums: a contraction and the gather or reduce-scatter around it as one loop, on TPU.

`GetWindowedEinsumConfiguration` (xla/service/spmd/dot_handler.cc): where the devices of a group all split one operand
and the result alike and the other operand would be gathered, its parts go round the ring while others are multiplied;
where a contraction over all of them is scattered, partial sums do. When that pays is in `tiles_tpu.hides`. An operand
that is gathered for another contraction too is gathered once for both.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from autoshard.cost.partitioner.tiling import Tiling

if TYPE_CHECKING:
    from autoshard.cost.partitioner.ops.dot import DotPartitioner, Side

Shape = tuple[int, ...]
Dim = tuple[int, ...]
Hides = Callable[[int, int, Dim], bool]
"""(multiply-adds of one device, elements communicated, axes) -> whether a loop of permutes is hidden beside them."""


@dataclass(frozen=True)
class Loop:
    """A windowed einsum over `axes`: permutes of operand `place` or of the result (2).

    Attributes:
        parts: devices in the ring. There is one permute more, that of the device's own part, before the loop.
        part: elements of one part.
        source, outer: name the gather that they replace.
    """

    place: int
    axes: Dim
    parts: int
    part: int
    source: Tiling
    outer: Dim


@dataclass(frozen=True)
class Ring:
    """Names what goes round a ring of `parts` devices within the groups `outer`, beside what is gathered there."""

    outer: Dim
    parts: int


def looped(
    owner: DotPartitioner, lhs: Side, rhs: Side, shape: Shape, out: Tiling, devices: Dim, outer: Dim
) -> Shape | None:
    """The shape of one device's result if the contraction runs as a loop; None if it does not.

    Parts go both ways round the ring: one permute more than there are devices.
    """
    count = owner.subaxes.ways(devices)
    if owner.hides is None or count < 4 or not any(out):
        return None
    d = owner.dims
    free = owner.ways(out, (m[1] for m in d.left)), owner.ways(out, (n[1] for n in d.right))
    for side, other, kept in ((lhs, rhs, free[0]), (rhs, lhs, free[1])):
        if not (kept == owner.subaxes.tiles(other.tiling) == count and owner.alone[other.place]):
            continue
        if owner.operand_as_out(side.place, side, len(out)) != out:
            continue
        whole = replace(other, tiling=((),) * len(other.tiling))
        pair = (side, whole) if side is lhs else (whole, side)
        if owner.hides(_macs(owner, *pair), math.prod(other.shape), devices):
            part = math.prod(owner.subaxes.shard(other.shape, other.tiling))
            owner.result.steps.append(Loop(other.place, devices, count, part, other.tiling, outer))
            return owner.make(*pair, owner.leaf)
    summed = owner.ways(lhs.tiling, (k[0] for k in d.contract)), owner.ways(rhs.tiling, (k[1] for k in d.contract))
    if summed == (count, count) and count in free and owner.hides(_macs(owner, lhs, rhs), math.prod(shape), devices):
        owner.make(lhs, rhs, owner.leaf)
        made = owner.subaxes.shard(shape, out)
        owner.result.steps.append(Loop(2, devices, count, math.prod(made), out, outer))
        return made
    return None


def _macs(owner: DotPartitioner, lhs: Side, rhs: Side) -> int:
    """Multiply-adds of the local contraction."""
    before = owner.result.macs
    owner.make(lhs, rhs, owner.leaf)
    macs, owner.result.macs = owner.result.macs - before, before
    return owner.computed(macs, lhs, rhs)
