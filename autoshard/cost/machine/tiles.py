"""Layouts of (8, 128) tiles, in which a TPU's arrays are."""

from __future__ import annotations

import math

LANES, ROWS = 128, 8


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

    Arrays of one dim lie in other tiles and are not looked at.
    """
    one, two = ([size for size in shape if size != 1] for shape in (before, after))
    if len(one) < 2 or len(two) < 2 or 0 in one:
        return True
    stay = whole = start = other = 0  # runs of dims that are one dim on both sides; others whose minor-most fill tiles
    for end in range(1, len(one) + 1):
        for last in range(other + 1, len(two) + 1):
            if math.prod(one[start:end]) == math.prod(two[other:last]):
                kept = end == start + 1 and last == other + 1
                stay += kept
                whole += not kept and not (one[end - 1] % ROWS or two[last - 1] % ROWS)
                start, other = end, last
                break
    return stay > 1 or bool(stay and whole)


def copies_of_gathered(before: tuple[int, ...] | None, after: tuple[int, ...] | None) -> int:
    """How many copies put the shards of a gather along several dims side by side, in tiles.

    libtpu 0.0.51 gathers them one after the other. One copy moves rows of tiles; where a shard is wider than a tile,
    the next one moves tiles of fewer rows, as v5e, v5p and v6e compile single products.
    """
    if before is None or after is None or len(before) != len(after):
        return 0
    several = sum(one != other for one, other in zip(before, after, strict=True)) > 1
    return several + (several and before[-1] != after[-1] and before[-1] > LANES)
