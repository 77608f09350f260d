"""Halo exchange: what GSPMD emits where the shards of a result need elements from the operand's neighbouring shards.

This follows `ReshardAsWindowedInput`, `ExchangeHalo` and `ExchangeHaloCompact` of XLA (xla/service/spmd/
spmd_partitioner.cc and spmd_partitioner_util.cc): permutes between neighbours that move the largest halo of any shard,
or, where halos are far larger than a result's shard, permutes of exactly the pieces that are needed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True)
class Window:
    """What a result reads of one dim of its operand: position i reads `taps` elements from `start + i * stride` on.

    Attributes:
        size: the operand's extent.
        count: the result's extent.
        start: may be negative (padding).
        taps: elements read, `dilation` (window dilation) apart.
        base: base dilation: the operand's elements are this far apart, with holes between them.
    """

    size: int
    count: int
    start: int
    stride: int = 1
    taps: int = 1
    dilation: int = 1
    base: int = 1

    @property
    def trivial(self) -> bool:
        """Whether the result is the operand."""
        return self.size == self.count and self.start == 0 and self.stride == self.taps == self.base == 1


@dataclass(frozen=True)
class Permute:
    """One collective permute of a halo.

    Attributes:
        extent: how many entries of the dim it moves.
        pairs: (source shard, target shard).
    """

    extent: int
    pairs: tuple[tuple[int, int], ...]


Exchange = tuple[int, tuple[Permute, ...]]
"""Extent of every shard along the dim afterwards, and the permutes."""


@lru_cache(maxsize=4096)
def exchange(window: Window, shards: int) -> Exchange | None:
    """The permutes by which each of `shards` shards of a dim gets the elements of its windows.

    None where the partitioner gathers the dim instead.
    """
    per_shard = -(-window.count // shards)
    shard = -(-window.size // shards)
    reach = (window.taps - 1) * window.dilation + 1
    if window.count < shards or (window.stride > 1 and window.stride * per_shard % window.base):
        return None
    # Whole strides of padding become elements of their own; the op keeps the remainder as padding.
    padding = int(-window.start / window.base)
    rest = -window.start - padding * window.base
    first = [(window.stride * per_shard * i + window.base - 1 - rest) // window.base for i in range(shards)]
    length = window.stride * (per_shard - 1) + reach
    limit = [(window.stride * per_shard * i + length + window.base - 1 - rest) // window.base for i in range(shards)]
    left = [shard * i + padding - first[i] for i in range(shards)]
    right = [limit[i] - shard * (i + 1) - padding for i in range(shards)]
    extent = max(end - start for start, end in zip(first, limit, strict=True))
    return halos(window.size, shard, extent, left, right)


def halos(size: int, shard: int, extent: int, left: Sequence[int], right: Sequence[int]) -> Exchange | None:
    """The exchange for shards of `shard` elements that lack `left` and `right` elements and read `extent` in all.

    None where halos are so large that the partitioner gathers the dim instead.
    """
    shards = len(left)
    if max(*left, *right) > 2 * extent:
        if extent * 2 >= shards * shard:
            return None
        return extent, _compact(size, shard, left, right)
    permutes = _plain(shard, left, right)
    return None if permutes is None else (extent, permutes)


@dataclass(frozen=True)
class Moved:
    """A collective permute of an array's halo.

    Attributes:
        dim: along which it moves.
        pairs: (source shard, target shard) of that dim.
        elements: sent per device.
    """

    dim: int
    pairs: tuple[tuple[int, int], ...]
    elements: int


def exchange_all(
    local: Sequence[int], found: Sequence[tuple[int, Exchange | None]]
) -> tuple[tuple[int, ...], tuple[Moved, ...]] | None:
    """Halos of several dims, one after the other: (the local shape afterwards, the permutes); None if any dim has none.

    Args:
        local: one device's shape before.
        found: (dim, its exchange).
    """
    shape = list(local)
    moved = []
    for dim, one in found:
        if one is None:
            return None
        extent, permutes = one
        for permute in permutes:
            shape[dim] = permute.extent
            moved.append(Moved(dim, permute.pairs, math.prod(shape)))
        shape[dim] = extent
    return tuple(shape), tuple(moved)


def _plain(shard: int, left: Sequence[int], right: Sequence[int]) -> tuple[Permute, ...] | None:
    """`ExchangeHalo`: every shard gets as many elements from its neighbours as the largest halo has."""
    shards = len(left)
    most_left, most_right = max(left[1:], default=0), max(right[:-1], default=0)
    if most_left + most_right + shard >= shard * shards and (most_left > shard or most_right > shard):
        return None
    left_bound, right_bound = -max(left), shard + max(right)
    if left_bound >= right_bound:
        return None
    permutes = []
    for hop in reversed(range(max(0, -(-most_left // shard)))):
        if (-hop - 1) * shard >= right_bound:
            break
        extent = min(most_left - shard * hop, shard) - max(-hop * shard - right_bound, 0)
        permutes.append(Permute(extent, tuple((i - hop - 1, i) for i in range(hop + 1, shards))))
    skipped = min(max(left_bound - shard, 0), max(most_right, 0)) // shard
    for hop in range(skipped, max(0, -(-most_right // shard))):
        extent = min(shard, most_right - shard * hop) - max(left_bound - (hop + 1) * shard, 0)
        permutes.append(Permute(extent, tuple((i, i - hop - 1) for i in range(hop + 1, shards))))
    return tuple(permute for permute in permutes if permute.extent > 0 and permute.pairs)


@dataclass
class _Piece:
    target: int
    start: int
    limit: int
    offset: int
    source: int


def _compact(size: int, shard: int, left: Sequence[int], right: Sequence[int]) -> tuple[Permute, ...]:
    """`ExchangeHaloCompact`: each piece once, as many disjoint ones as possible in one permute."""
    shards = len(left)
    from_shard: list[list[_Piece]] = [[] for _ in range(shards)]
    for target in range(shards):
        start = target * shard - left[target]
        limit = (target + 1) * shard + right[target]
        at = start
        while at < limit:
            if at < 0:
                at = min(limit, 0)
                continue
            if at >= size:
                break
            length = min(shard - at % shard, limit - at)
            source = at // shard
            if source != target:
                begin = at % shard
                from_shard[source].append(_Piece(target, begin, begin + length, at - start, source))
            at += length
    for pieces in from_shard:
        pieces.sort(key=lambda piece: piece.offset)
    following = [0] * shards
    permutes: list[Permute] = []
    while True:
        pairs: list[tuple[int, int]] = []
        taken: set[int] = set()
        start, limit = shard, 0
        for source, pieces in enumerate(from_shard):
            if following[source] == len(pieces):
                continue
            piece = pieces[following[source]]
            apart = (start > piece.limit and limit == shard and piece.start == 0) or (
                limit < piece.start and start == 0 and piece.limit == shard
            )
            if pairs and (piece.target in taken or apart):
                continue
            following[source] += 1
            taken.add(piece.target)
            pairs.append((source, piece.target))
            start, limit = min(start, piece.start), max(limit, piece.limit)
        if not pairs:
            return tuple(permutes)
        permutes.append(Permute(limit - start, tuple(pairs)))
