"""Layouts of (8, 128) tiles, in which a TPU's arrays are."""

from __future__ import annotations

import itertools
import math
from functools import lru_cache

LANES, ROWS = 128, 8

MOST_PADDING = 2.0
"""Of a layout in which a reshape is a bitcast, over that of the least."""


def minor_dims(shape: tuple[int, ...], packed: int = 1) -> tuple[int, int]:
    """(lane, sublane) dims of the layout with least padding, in 128 lanes and 8 sublanes; the last two dims if equal.

    `packed` elements of a column share a 32-bit word, so no tile has fewer sublanes.
    """
    best = None
    for lane in reversed(range(len(shape))):
        for row in reversed(range(len(shape))):
            if lane == row:
                continue
            rows = max(packed, _rows(shape[row]))
            size = math.prod(shape) // (shape[lane] * shape[row]) * -(-shape[lane] // LANES) * LANES * rows
            if best is None or size < best[0]:
                best = size, lane, row
    assert best is not None
    return best[1:]


def _rows(size: int) -> int:
    """Sublanes with padding: tiles of 1, 2, 4 or 8."""
    return 1 << (size - 1).bit_length() if 0 < size < ROWS else -(-size // ROWS) * ROWS


def reshapes_in_place(before: tuple[int, ...], after: tuple[int, ...]) -> bool:
    """Whether some layout makes a reshape a bitcast: one dim stays as lanes, another as rows, or in whole tiles.

    A layout that pads to more than `MOST_PADDING` times what both sides may have is none: a copy costs less. Arrays of
    one dim lie in other tiles and are not looked at.
    """
    one, two = (tuple(size for size in shape if size != 1) for shape in (before, after))
    if len(one) < 2 or len(two) < 2 or 0 in one:
        return True
    stay, whole = [], []  # runs of dims that are one dim on both sides; others whose minor-most fill tiles
    start = other = 0
    for end in range(1, len(one) + 1):
        for last in range(other + 1, len(two) + 1):
            if math.prod(one[start:end]) == math.prod(two[other:last]):
                if end == start + 1 and last == other + 1:
                    stay.append(one[start])
                elif not (one[end - 1] % ROWS or two[last - 1] % ROWS):
                    whole.append(ROWS)
                start, other = end, last
                break
    pairs = [*itertools.permutations(stay, 2), *itertools.product(stay, whole[:1])]
    most = MOST_PADDING * max(_least_padding(one), _least_padding(two))
    return any(_padding(*pair) <= most for pair in pairs)


@lru_cache(maxsize=1 << 12)
def _least_padding(shape: tuple[int, ...]) -> float:
    return min(_padding(lanes, rows) for lanes, rows in itertools.permutations(shape, 2))


def _padding(lanes: int, rows: int) -> float:
    """Elements with padding over elements, of a layout with these two dims in tiles."""
    return -(-lanes // LANES) * LANES / lanes * _rows(rows) / rows


def copies_of_gathered(before: tuple[int, ...] | None, after: tuple[int, ...] | None) -> int:
    """How many copies put the shards of a gather along several dims side by side, in tiles.

    libtpu 0.0.51 gathers them one after the other. One copy moves rows of tiles; where a shard is wider than a tile,
    the next one moves tiles of fewer rows, as v5e, v5p and v6e compile single products.
    """
    if before is None or after is None or len(before) != len(after):
        return 0
    several = sum(one != other for one, other in zip(before, after, strict=True)) > 1
    return several + (several and before[-1] != after[-1] and before[-1] > LANES)
