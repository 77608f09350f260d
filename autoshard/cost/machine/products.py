"""Seconds of a matrix product on a GPU, by a model fitted to measured kernels (`measured.toml`).

A library computes a product in tiles. A device's multiprocessors work on tiles of `batch` x m x n, of k split into up
to 16 parts, in waves; a tile takes the longer of its multiply-adds and of its operands from L2, and a time to store it;
a product takes the longer of its waves and its traffic, plus one launch. Which tile is used follows from what the
library expects, in a softmin over all. Operands that L2 still holds are read faster: what was measured reads another
weight (k x n) every time, and the same activation (m x k). Long kernels run at lower clocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autoshard.cost.machine.device import Device
from autoshard.dtypes import dtype_bytes

Array = npt.NDArray[np.float64]

SPLITS = np.array([1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 16.0])
STEP = 32
"""Multiply-adds of k that a tile takes at a time."""
FALL = 8.0
"""How sharply hits of L2 fall where a working set exceeds it."""


@dataclass(frozen=True)
class Constants:
    """The model of one device; rates as shares of the datasheet's.

    Attributes:
        launch: seconds.
        sharp: exponent of the norm that stands for "the longer of"; `spread` that of the softmin over tiles.
        whole: how far a last wave that is not full takes as long as a full one, 0 to 1.
        read, write, warm, tiles: rates of device memory, and those of L2 for operands that it holds and for tiles, as
            multiples of that of device memory.
        cache: bytes of L2 that a working set may fill; `others`: weights and results that pass between two uses.
        store, hidden: stores of a tile as a multiple of its bytes, and the share that hides behind the next tile.
        split, split_store: seconds, and traffic, of adding the parts of a split k.
        expected_split, expected_part: seconds, and share per doubling, that the library expects of them.
        slower, slower_after: the share by which kernels are slower that take much longer than these seconds.
        shapes: rows, columns, rate, and the rate that the library expects.
    """

    launch: float
    sharp: float
    spread: float
    whole: float
    read: float
    write: float
    warm: float
    tiles: float
    cache: float
    others: float
    store: float
    hidden: float
    split: float
    split_store: float
    expected_split: float
    expected_part: float
    slower: float
    slower_after: float
    shapes: tuple[tuple[float, float, float, float], ...]


def product_seconds(
    batch: Array, m: Array, n: Array, k: Array, constants: Constants, device: Device, dtype: str
) -> Array:
    """Seconds of `batch` products [m, k] x [k, n]; arrays of one shape [products]."""
    peak, item, processors = device.peak_flops(dtype), dtype_bytes(dtype), device.multiprocessors
    batch, m, n, k = (each[:, None, None] for each in (batch, m, n, k))
    of = constants
    rows, columns, rate, expected = (np.array(each)[None, :, None] for each in zip(*_both_ways(of.shapes), strict=True))
    reading = device.memory_bandwidth * of.read
    cached = reading * of.tiles
    left, right, out = (item * batch * size for size in (m * k, k * n, m * n))
    again = _missed(left + right + out, of.cache)
    anew = _missed(left + of.others * (right + out), of.cache)
    flows = ((left, again, reading), (right, anew, reading), (out, anew, device.memory_bandwidth * of.write))
    times = [size * (missed / rate + (1 - missed) / (reading * of.warm)) for size, missed, rate in flows]
    moving = times[0] + times[1] + times[2]
    parts = SPLITS[None, None, :]
    depth = np.ceil(k / parts / STEP) * STEP
    waves = batch * np.ceil(m / rows) * np.ceil(n / columns) * parts / processors
    waves = of.whole * np.ceil(waves) + (1 - of.whole) * np.maximum(waves, 1)
    loading = item * (np.minimum(rows, m) + np.minimum(columns, n)) * depth / (cached / processors)
    storing = of.store * item * rows * columns / (cached / processors)
    working = 2 * rows * columns * depth / (peak / processors)
    adding = 2 * item * of.split_store * batch * m * n * parts / cached

    def seconds(rate: Array, start: float, part: float) -> Array:
        busy = _longer(_longer(working / rate, loading, of.sharp), of.hidden * storing, of.sharp)
        whole = _longer(waves * (busy + (1 - of.hidden) * storing) + of.hidden * storing, moving, of.sharp)
        return np.where(parts > 1, (whole + start + adding) * (1 + part) ** np.log2(parts), whole)

    score = np.where(depth * (parts - 1) < k, seconds(expected, of.expected_split, of.expected_part), np.inf)
    weight = (score / score.min(axis=(1, 2), keepdims=True)) ** (-1 / of.spread)
    found = (weight * seconds(rate, of.split, 0.0)).sum(axis=(1, 2)) / weight.sum(axis=(1, 2))
    least = (2 * batch * m * n * k / peak)[:, 0, 0]
    return np.asarray(of.launch + np.maximum(least, found * (1 + of.slower * least / (least + of.slower_after))))


def _both_ways(shapes: tuple[tuple[float, float, float, float], ...]) -> list[tuple[float, ...]]:
    turned = [(columns, rows, *rates) for rows, columns, *rates in shapes if rows != columns]
    return [*shapes, *turned]


def _missed(working_set: Array, cache: float) -> Array:
    """The share of reads that L2 does not hold."""
    filled = np.minimum(working_set / cache, 1e6) ** FALL
    return np.asarray(filled / (1 + filled))


def _longer(one: Array, other: Array, sharp: float) -> Array:
    """About the larger of two times."""
    most = np.maximum(one, other)
    return np.asarray(most * (1 + (np.minimum(one, other) / most) ** sharp) ** (1 / sharp))
