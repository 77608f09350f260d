"""Tiles of 8 x 128, in which a TPU's arrays lie."""

from __future__ import annotations

import math

LANES, ROWS = 128, 8


def minor_dims(shape: tuple[int, ...], packed: int = 1) -> tuple[int, int]:
    """(lane, row): the dims along the 128 lanes and the 8 rows of a tile, as to pad least; else the last two.

    `packed` numbers of a column take one place of 32 bits: there are no fewer rows.
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
    """Rows with padding: tiles of 1, 2, 4 or 8."""
    return 1 << (size - 1).bit_length() if 0 < size < ROWS else -(-size // ROWS) * ROWS
