"""Seconds of a fused causal attention kernel on a GPU, by a model fitted to measured kernels (`measured.toml`).

A block of queries of one head goes through the keys that its rows attend to. A kernel takes the longer of all blocks on
all multiprocessors and of its longest block, and the traffic of queries, keys, values and results, plus one launch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from autoshard.cost.machine.device import Device
from autoshard.dtypes import dtype_bytes

Array = npt.NDArray[np.float64]
Number = float | Array


@dataclass(frozen=True)
class Constants:
    """The model of one device and head size; rates as shares of the datasheet's.

    Attributes:
        launch, block: seconds per kernel, and per block of queries.
        rows: queries of a block.
        rate, read: of multiply-adds and of device memory.
        sharp, beside: exponents of the norms that stand for "the longer of", between blocks and with traffic.
        diagonal, edge: keys per query beyond those it attends to, at the diagonal and where a window ends.
        again: traffic of keys and values as a multiple of their bytes.
    """

    launch: float
    block: float
    rows: float
    rate: float
    read: float
    sharp: float
    beside: float
    diagonal: float
    edge: float
    again: float


class Shape(NamedTuple):
    """What a kernel computes; numbers, or arrays of one shape.

    Attributes:
        batch, heads, kv_heads, queries, keys: sizes.
        features: of a head; of keys and of values in the mean.
        attended: pairs of a query and a key that the mask leaves, of one head.
        longest: keys that a query attends to, at most.
    """

    batch: Number
    heads: Number
    kv_heads: Number
    queries: Number
    keys: Number
    features: Number
    attended: Number
    longest: Number


def attention_seconds(shape: Shape, constants: Constants, device: Device, dtype: str) -> Array:
    """Seconds of fused attention kernels, forward, with their launch."""
    batch, heads, kv_heads, queries, keys, features, attended, longest = shape
    of, processors = constants, device.multiprocessors
    peak = device.peak_flops(dtype)
    masked = np.where(longest < keys, of.edge, 0.0)
    blocks = batch * heads * np.ceil(queries / of.rows)
    work = 4 * features / (peak * of.rate)
    together = batch * heads * (attended + queries * (of.diagonal + masked)) * work + blocks * of.block / processors
    one = np.minimum(queries, of.rows) * (longest + of.diagonal) * work * processors + of.block
    kept = 2 * kv_heads * keys * of.again + 2 * heads * queries
    moving = dtype_bytes(dtype) * batch * features * kept / (device.memory_bandwidth * of.read)
    least = 4 * batch * heads * attended * features / peak
    return np.asarray(of.launch + np.maximum(least, _norm(_norm(together, one, of.sharp), moving, of.beside)))


def _norm(one: Number, other: Number, sharp: float) -> Array:
    most = np.maximum(one, other)
    return np.asarray(most * (1 + (np.minimum(one, other) / most) ** sharp) ** (1 / sharp))
