"""Dims of a contraction (a `dot_general`, or a convolution): batch, contracted, free or spatial."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Dims:
    """Dims of a contraction, as (lhs, rhs, out) or those sides that have it.

    Attributes:
        batch: (lhs, rhs, out).
        contract: (lhs, rhs).
        left, right: (operand, out) of free dims of lhs and of rhs.
        spatial: (lhs, rhs, out, number of the window dim) of dims that a kernel slides over.
    """

    batch: tuple[tuple[int, int, int], ...]
    contract: tuple[tuple[int, int], ...]
    left: tuple[tuple[int, int], ...]
    right: tuple[tuple[int, int], ...]
    spatial: tuple[tuple[int, int, int, int], ...] = ()


def dot_dims(lhs_rank: int, rhs_rank: int, attrs: Mapping[str, Any]) -> Dims:
    """The dims of a `dot_general` (result: batch, free dims of lhs, free dims of rhs)."""
    batch = tuple((a, b, i) for i, (a, b) in enumerate(zip(attrs["lhs_batch"], attrs["rhs_batch"], strict=True)))
    contract = tuple(zip(attrs["lhs_contract"], attrs["rhs_contract"], strict=True))
    left = [d for d in range(lhs_rank) if d not in attrs["lhs_batch"] and d not in attrs["lhs_contract"]]
    right = [d for d in range(rhs_rank) if d not in attrs["rhs_batch"] and d not in attrs["rhs_contract"]]
    start = len(batch)
    return Dims(
        batch,
        contract,
        tuple((d, start + i) for i, d in enumerate(left)),
        tuple((d, start + len(left) + i) for i, d in enumerate(right)),
    )


class Matrices(NamedTuple):
    """The matrices of a `dot_general`: `batch` times (m, k) x (k, n). Dims of each kind are merged."""

    batch: int
    m: int
    n: int
    k: int


def matrices(lhs: Shape, rhs: Shape, attrs: Mapping[str, Any]) -> Matrices:
    """The matrices of a `dot_general` of operands of these shapes.

    Shapes are global or local, as the dot reads them, not as a bitcast's buffer has them. If one operand is split along
    a shared dim and the other is not, as in a windowed einsum, the smaller shard is multiplied.
    """
    dims = dot_dims(len(lhs), len(rhs), attrs)
    return Matrices(
        math.prod(min(lhs[a], rhs[b]) for a, b, _ in dims.batch),
        math.prod(lhs[a] for a, _ in dims.left),
        math.prod(rhs[b] for b, _ in dims.right),
        math.prod(min(lhs[a], rhs[b]) for a, b in dims.contract),
    )


def convolution_dims(lhs: Shape, rhs: Shape, attrs: Mapping[str, Any]) -> Dims:
    """The dims of a convolution, classified as by XLA's `ParseConvolutionDimsInfo`.

    A spatial dim whose window is one element is free in the input, one whose window is the whole input is contracted
    (the weight gradient of a 1 x 1 kernel), and so on; all others are `spatial`.
    """
    return _convolution_dims(lhs, rhs, tuple((name, attrs[name]) for name in _READ))


_READ = ("lhs", "rhs", "out", "stride", "padding", "lhs_dilation", "rhs_dilation", "reversal")


@lru_cache(maxsize=4096)
def _convolution_dims(lhs: Shape, rhs: Shape, items: tuple[tuple[str, Any], ...]) -> Dims:
    attrs = dict(items)
    (lhs_batch, lhs_feature, *lhs_spatial) = attrs["lhs"]
    (rhs_out, rhs_in, *rhs_spatial) = attrs["rhs"]
    (out_batch, out_feature, *out_spatial) = attrs["out"]
    batch, spatial = [], []
    contract, left, right = [(lhs_feature, rhs_in)], [(lhs_batch, out_batch)], [(rhs_out, out_feature)]
    for i, (a, b, o) in enumerate(zip(lhs_spatial, rhs_spatial, out_spatial, strict=True)):
        size, taps, padding = lhs[a], rhs[b], tuple(attrs["padding"][i])
        stride, base, window = attrs["stride"][i], attrs["lhs_dilation"][i], attrs["rhs_dilation"][i]
        reversal = bool(attrs["reversal"][i])
        if _is_batch(size, taps, padding, stride, base, window, reversal):
            batch.append((a, b, o))
        elif size == taps and base == window == 1 and padding == (0, 0) and not reversal:
            contract.append((a, b))
        elif stride == base == window == 1 and taps == 1 and padding == (0, 0) and not reversal:
            left.append((a, o))
        elif stride == base == window == size == 1 and padding == (taps - 1, taps - 1) and reversal:
            right.append((b, o))
        else:
            spatial.append((a, b, o, i))
    return Dims(tuple(batch), tuple(contract), tuple(left), tuple(right), tuple(spatial))


def _is_batch(size: int, taps: int, padding: Shape, stride: int, base: int, window: int, reversal: bool) -> bool:
    """Whether a window reads element i of both sides for position i: a batch dim written as a spatial one."""
    if size != taps:
        return False
    if reversal:
        return padding == (size - 1, size - 1) and window == 1 and stride == size and base == size - 1
    step = max(1, size - 1)
    return padding == (0, 0) and base == size and ((stride, window) == (step, 1) or (stride, window) == (1, step))


def kernel_is_small(rhs: Shape, out: Shape, attrs: Mapping[str, Any]) -> bool:
    """Whether a convolution's kernel is smaller than its result, so that the result is worth splitting."""
    taps, positions = 1, 1
    for i, (b, o) in enumerate(zip(attrs["rhs"][2:], attrs["out"][2:], strict=True)):
        taps, positions = taps * rhs[b], positions * out[o]
        if rhs[b] >= out[o] and (i < 2 or rhs[b] > 3 or taps >= positions):
            return False
    return True
