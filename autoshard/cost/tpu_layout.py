"""How many elements arrays take on a TPU, in tiles of 8 x 128."""

from __future__ import annotations

import math
from functools import lru_cache


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


def row_major(shape: tuple[int, ...]) -> int:
    """Elements of an array in tiles of 8 x 128 whose last dim is the innermost."""
    if len(shape) < 2:
        return tiled(shape)
    return math.prod(shape[:-2]) * (-(-shape[-2] // 8) * 8) * (-(-shape[-1] // 128) * 128)
