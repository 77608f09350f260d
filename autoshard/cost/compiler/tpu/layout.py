"""How many elements arrays take on a TPU, in tiles of 8 x 128."""

from __future__ import annotations

import math
from collections.abc import Collection
from functools import lru_cache

from autoshard.cost.machine.tiles import LANES, ROWS


@lru_cache(maxsize=1 << 12)
def tiled(shape: tuple[int, ...]) -> int:
    """Elements of an array in tiles of 8 x 128, its dims laid out as to pad least."""
    if not shape:
        return 1
    if len(shape) == 1:
        return -(-shape[0] // 128) * 128
    total = math.prod(shape)
    best = None
    for lane, across in enumerate(shape):
        for row, along in enumerate(shape):
            if lane != row and across and along:
                size = total // (across * along) * (-(-across // 128) * 128) * (-(-along // 8) * 8)
                best = size if best is None or size < best else best
    return best or 0


def tiles(shape: tuple[int, ...]) -> int:
    """Tiles of such an array."""
    return tiled(shape) // (LANES * ROWS)


def row_major(shape: tuple[int, ...]) -> int:
    """Elements of an array in tiles of 8 x 128 whose last dim is the innermost."""
    if len(shape) < 2:
        return tiled(shape)
    return math.prod(shape[:-2]) * (-(-shape[-2] // 8) * 8) * (-(-shape[-1] // 128) * 128)


def for_convolution(shape: tuple[int, ...], within: Collection[int]) -> int:
    """Elements of an operand of a convolution: the two dims `within`, which are no spatial ones, make its tiles.

    Either may be the inner one; tiles have as many rows as the other needs: 2, 4 or 8.
    """
    return _for_convolution(shape, tuple(within))[0]


def convolution_tiles(shape: tuple[int, ...], within: Collection[int]) -> int:
    """Tiles of such an operand: of few rows there are as many as of 8."""
    return _for_convolution(shape, tuple(within))[1]


@lru_cache(maxsize=1 << 12)
def _for_convolution(shape: tuple[int, ...], within: tuple[int, ...]) -> tuple[int, int]:
    sizes = [shape[dim] for dim in within]
    around = math.prod(shape) // max(1, math.prod(sizes))
    found = []
    for rows, lanes in (sizes, sizes[::-1]):
        across = -(-lanes // LANES)
        found.append((around * _rows(rows) * across * LANES, around * -(-rows // ROWS) * across))
    return min(found)


def _rows(size: int) -> int:
    """Rows with padding: in tiles of 2, 4 or 8."""
    return max(2, 1 << (size - 1).bit_length()) if size < ROWS else -(-size // ROWS) * ROWS
