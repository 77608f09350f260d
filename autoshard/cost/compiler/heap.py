"""Heap simulation: offsets of buffers with known live ranges, and the heap's bytes, fragmentation included."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np

Block = tuple[int, int, int]
"""A live range: (first position, last position, bytes)."""


def best_fit(blocks: Sequence[Block], peak: int = 0) -> int:
    """Bytes of a heap filled largest buffers first, or longest live ranges first: whichever is smaller.

    Each buffer takes the tightest gap between buffers that are live with it, or the top (XLA's
    `GlobalDecreasingSizeBestFitHeap`, which its CPU and GPU compilers use for temporaries).

    Args:
        peak: of live bytes, where it is known; no heap is smaller.
    """
    largest = _tightest(sorted(blocks, key=lambda block: (-block[2], block[0] - block[1])))
    if largest <= peak:
        return peak
    longest = sorted(blocks, key=lambda block: (block[0] - block[1], -block[2]))
    return max(peak, min(largest, _tightest(longest)))


def _tightest(blocks: Sequence[Block]) -> int:
    """Bytes of a heap in which each buffer, in this order, takes the tightest gap over its live range."""
    starts, ends, sizes = np.array(blocks, dtype=np.int64).reshape(-1, 3).T
    offsets = np.zeros_like(starts)
    for number, (start, end, size) in enumerate(blocks):
        beside = np.flatnonzero((starts[:number] <= end) & (ends[:number] >= start))
        if not len(beside):
            continue
        beside = beside[np.argsort(offsets[beside], kind="stable")]
        tops = np.maximum.accumulate(offsets[beside] + sizes[beside])
        below = np.concatenate(([0], tops[:-1]))
        gaps = offsets[beside] - below
        fits = np.flatnonzero(gaps >= size)
        offsets[number] = below[fits[np.argmin(gaps[fits])]] if len(fits) else tops[-1]
    return int((offsets + sizes).max()) if len(blocks) else 0


def packed(blocks: Sequence[Block]) -> int:
    """Bytes of a heap filled in allocation order, each buffer into the tightest gap at that time.

    As libtpu does in device memory: fragmentation makes the heap larger than the peak of live bytes.
    """
    height = 0
    offsets: list[int] = []  # of live buffers, ascending
    tops: dict[int, int] = {}  # by offset
    gaps: list[tuple[int, int]] = []  # bytes and offset of each gap below a live buffer, ascending
    ends: list[tuple[int, int]] = []  # heap of last positions and offsets
    for start, end, size in sorted(blocks, key=lambda block: block[0]):
        while ends and ends[0][0] < start:
            _release(heapq.heappop(ends)[1], offsets, tops, gaps)
        if not size:
            continue
        found = bisect_left(gaps, (size, 0))
        if found < len(gaps):
            room, where = gaps.pop(found)
            if room > size:
                insort(gaps, (room - size, where + size))
        else:
            where = tops[offsets[-1]] if offsets else 0
        insort(offsets, where)
        tops[where] = where + size
        heapq.heappush(ends, (end, where))
        height = max(height, where + size)
    return height


def _release(offset: int, offsets: list[int], tops: dict[int, int], gaps: list[tuple[int, int]]) -> None:
    """Free a buffer: merge the gaps on both sides, or lower the top."""
    place = bisect_left(offsets, offset)
    del offsets[place]
    below, top = tops[offsets[place - 1]] if place else 0, tops.pop(offset)
    if offset > below:
        del gaps[bisect_left(gaps, (offset - below, below))]
    if place < len(offsets):
        above = offsets[place]
        if above > top:
            del gaps[bisect_left(gaps, (above - top, top))]
        insort(gaps, (above - below, below))
