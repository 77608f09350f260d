"""Elements of arrays in TPU layouts of (8, 128) tiles, padding included."""

from __future__ import annotations

import math
from collections.abc import Collection
from functools import lru_cache

from autoshard.cost.machine.tiles import LANES, ROWS


@lru_cache(maxsize=1 << 12)
def tiled(shape: tuple[int, ...], within: tuple[int, ...] | None = None) -> int:
    """Elements of an array in tiles of 8 x 128, in the layout with least padding.

    Args:
        within: the dims that may be in tiles; None: any.
    """
    if not shape:
        return 1
    if len(shape) == 1:
        return -(-shape[0] // 128) * 128
    total = math.prod(shape)
    best = None
    for lane, across in enumerate(shape):
        for row, along in enumerate(shape):
            if lane != row and across and along and (within is None or {lane, row} <= {*within}):
                size = total // (across * along) * (-(-across // 128) * 128) * (-(-along // 8) * 8)
                best = size if best is None or size < best else best
    return best or 0


def tiles(shape: tuple[int, ...]) -> int:
    """Tiles of such an array."""
    return tiled(shape) // (LANES * ROWS)


def row_major(shape: tuple[int, ...]) -> int:
    """Elements of an array in tiles of 8 x 128, its last dim minor-most."""
    if len(shape) < 2:
        return tiled(shape)
    return math.prod(shape[:-2]) * (-(-shape[-2] // 8) * 8) * (-(-shape[-1] // 128) * 128)


def for_convolution(shape: tuple[int, ...], within: Collection[int]) -> int:
    """Elements of a convolution's operand: the two dims `within`, batch and features, are lanes and sublanes.

    Either may be the lanes; tiles have 2, 4 or 8 sublanes as the other needs.
    """
    return _for_convolution(shape, tuple(within))[0]


def convolution_tiles(shape: tuple[int, ...], within: Collection[int]) -> int:
    """Tiles of such an operand; with few sublanes as many as with 8."""
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
    """Sublanes with padding: in tiles of 2, 4 or 8."""
    return max(2, 1 << (size - 1).bit_length()) if size < ROWS else -(-size // ROWS) * ROWS
