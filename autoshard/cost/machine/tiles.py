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
