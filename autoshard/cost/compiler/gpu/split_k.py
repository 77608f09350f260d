"""Split-K of XLA's GPU compiler (`splitk_rewriter.cc`).

A dot with few output tiles leaves multiprocessors idle, so its contraction is split into parts that run as a batch
and are summed after: the compiler takes the power of two with the lowest cost under a model of waves of 128 x 128
tiles, memory traffic and the sum. Weights and constants are XLA's, by compute capability.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

TILE = 128
"""Rows and columns of an output tile."""
MAX_SPLITS = 2048
"""The largest number of parts tried."""
ALIGNMENT = 16
"""Each part's contraction is a multiple of so many bytes; operands are padded to that."""
COMPUTE = 100.0


@dataclass(frozen=True)
class Product:
    """One device's matrix product: `batch` times (m, k) x (k, n).

    Attributes:
        lhs_bytes, rhs_bytes, out_bytes: per element.
    """

    batch: int
    m: int
    n: int
    k: int
    lhs_bytes: int
    rhs_bytes: int
    out_bytes: int


def _weights(capability: float) -> tuple[float, float, float]:
    """Cost of a byte of the dot, of a byte of the sum, and of its launch, where a FLOP of a tile costs 100."""
    if capability >= 10:
        return 0.0848863, 189.711, 1.21563e8
    if capability >= 9:
        return 0.194136, 193.1384, 4.36e7
    return 0.0666955, 467.815, 5.65307e7


def _cost(product: Product, parts: int, multiprocessors: int, capability: float) -> float:
    byte, summed_byte, launch = _weights(capability)
    k = -(-product.k // parts)
    batch = product.batch * parts
    rows, columns = min(product.m, TILE), min(product.n, TILE)
    tiles = batch * -(-product.m // TILE) * -(-product.n // TILE)
    waves = max(1.0, tiles / (multiprocessors * TILE * TILE / (rows * columns)))
    accumulated = max(product.out_bytes, 4)
    read = product.batch * product.k * (product.m * product.lhs_bytes + product.n * product.rhs_bytes)
    written = product.m * product.n * batch * (accumulated if parts > 1 else product.out_bytes)
    cost = max(2.0 * rows * columns * k * waves * COMPUTE, (read + written) * byte)
    if parts == 1:
        return cost
    summed = product.m * product.n * (batch * accumulated + product.batch * product.out_bytes)
    return cost + launch + summed * summed_byte


@lru_cache(maxsize=4096)
def split_k(product: Product, multiprocessors: int, capability: float) -> tuple[int, int]:
    """(parts, padded contraction) of a dot; (1, k) if it is not split."""
    if not multiprocessors or not min(product.batch, product.m, product.n, product.k):
        return 1, product.k
    tried = [2**power for power in range(int(math.log2(MAX_SPLITS)) + 1)]
    parts = min(tried, key=lambda count: _cost(product, count, multiprocessors, capability))
    if parts == 1:
        return 1, product.k
    multiple = parts * ALIGNMENT // min(ALIGNMENT, product.lhs_bytes, product.rhs_bytes)
    return parts, -(-product.k // multiple) * multiple
