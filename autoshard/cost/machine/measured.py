"""Models fitted to measured kernels and collectives, `measured.toml`: `benchmarks/fit_kernels.py` writes it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from autoshard.attention.form import FORWARD, Form
from autoshard.attention.form import KINDS as ATTENTIONS
from autoshard.cost.machine import cycles, fused_attention, products
from autoshard.cost.machine.device import Device, measured_document
from autoshard.cost.machine.fused_attention import Shape
from autoshard.dtypes import dtype_bytes
from autoshard.graph.contraction import matrices
from autoshard.graph.ops import Op

KNOTS = (2**17, 2**20, 2**22, 2**23, 2**25)
"""Bytes at which the slope of a collective's seconds changes: NCCL takes another protocol or more channels."""

TIMED = frozenset({"dot_general", *ATTENTIONS})
"""Kinds of ops that `matrix_seconds` knows more of than their FLOP."""


@dataclass(frozen=True)
class Curve:
    """Seconds of a collective: a start, and seconds per byte up to each of `KNOTS` and beyond the last."""

    start: float
    slopes: tuple[float, ...]

    def seconds(self, size: float) -> float:
        """Seconds of a collective of `size` bytes."""
        found, below = self.start, 0.0
        for slope, knot in zip(self.slopes, (*KNOTS, math.inf), strict=True):
            if size <= below:
                break
            found += slope * (min(size, knot) - below)
            below = knot
        return found


@dataclass(frozen=True)
class Measured:
    """What was measured on one kind of device.

    Attributes:
        products: the model of matrix products.
        attention: that of fused attention, by head size.
        collectives: kind -> group size -> seconds.
        most: of each model's sizes the largest that was measured.
        errors: name of a set of rows that were not fitted -> rows, and the median, 90th percentile and largest of
            relative errors.
        source: whose measurements, in words.
    """

    products: products.Constants
    attention: Mapping[int, fused_attention.Constants]
    collectives: Mapping[str, Mapping[int, Curve]]
    most: Mapping[str, float]
    errors: Mapping[str, Mapping[str, float]]
    source: str = field(repr=False)

    def of_head(self, features: Any) -> fused_attention.Constants:
        """Of the smallest measured head size that holds `features`, else of the largest."""
        size = min((size for size in self.attention if size >= features), default=max(self.attention))
        return self.attention[size]


@lru_cache
def measured(kind: str) -> Measured | None:
    """What was measured on devices of `kind`; None for a kind that nothing was."""
    found = measured_document().get(kind)
    if found is None:
        return None
    shapes = tuple(tuple(shape) for shape in found["products"]["shapes"])
    return Measured(
        products.Constants(**{**found["products"], "shapes": shapes}),
        {int(size): fused_attention.Constants(**values) for size, values in found["attention"].items()},
        {
            kind: {int(size): Curve(start, tuple(slopes)) for size, (start, *slopes) in sizes.items()}
            for kind, sizes in found["collectives"].items()
        },
        found["most"],
        found["errors"],
        found["source"],
    )


@lru_cache(maxsize=1 << 15)
def product_seconds(batch: int, m: int, n: int, k: int, dtype: str, device: Device) -> float:
    """Seconds of `batch` products [m, k] x [k, n], with their launch, on a device that was measured."""
    b, rows, columns, depth = np.array([[float(size)] for size in (batch, m, n, k)])
    return float(products.product_seconds(b, rows, columns, depth, _of(device).products, device, dtype)[0])


def matrices_seconds(batch: int, m: int, n: int, k: int, dtype: str, device: Device) -> float:
    """`product_seconds` without the launch."""
    return product_seconds(batch, m, n, k, dtype, device) - _of(device).products.launch


@lru_cache(maxsize=1 << 15)
def attention_seconds(shape: Shape, dtype: str, device: Device) -> float:
    """Seconds of a fused attention, forward, with its launch, on a device that was measured."""
    return float(fused_attention.attention_seconds(shape, _of(device).of_head(shape.features), device, dtype))


def is_timed(op: Op, device: Device) -> bool:
    """Whether more is known of an op's seconds on a device than its FLOP."""
    return op.kind in TIMED if device.measured else op.kind in cycles.TIMED and cycles.model_of(device) is not None


def matrix_seconds(op: Op, shapes: Sequence[Sequence[int]], flops: float, dtype: str, device: Device) -> float:
    """Seconds of one device's part of a product or attention, without its launch.

    An attention's gradient takes as much longer than the attention as it has more FLOP. What was not measured takes its
    FLOP at the achievable rate.

    Args:
        shapes: of the operands and then the result of one device; empty if unknown.
        flops: of that device.
    """
    known = is_timed(op, device) and (bool(device.measured) or dtype in cycles.DTYPES)
    if not shapes or not flops or not known:
        return flops / device.reachable_flops(dtype)
    if not device.measured:
        narrow = dtype_bytes(op.results[0].dtype) < 4
        lhs, rhs, *_, made = map(tuple, shapes)
        if op.kind == "convolution":
            return cycles.product_seconds(cycles.convolved(rhs, made, op.attrs, narrow), device)
        wide = 2 if dtype == "f32" else 0
        return cycles.product_seconds(cycles.Products(*matrices(lhs, rhs, op.attrs), narrow, wide=wide), device)
    if op.kind == "dot_general":
        return matrices_seconds(*matrices(tuple(shapes[0]), tuple(shapes[1]), op.attrs), dtype, device)
    (batch, kv_heads, group, queries, features), (*_, keys, _), (*_, value_features) = shapes[:3]
    sizes = (batch, kv_heads * group, kv_heads, queries, keys, features, value_features)
    return fused_seconds(sizes, Form.of(op.attrs), flops, op.kind == FORWARD, dtype, device)


def fused_seconds(sizes: tuple[int, ...], form: Form, flops: float, forward: bool, dtype: str, device: Device) -> float:
    """Seconds of one device's fused attention, without its launch, on a device that was measured.

    Args:
        sizes: batch, heads, kv_heads, queries, keys, features of keys and of values.
        flops: of all its products.
    """
    batch, heads, kv_heads, queries, keys, features, value_features = sizes
    of_forward = 2 * (features + value_features)
    own = of_forward if forward else 2 * (3 * features + 2 * value_features)
    longest = keys if form.window is None else min(keys, form.window * (1 if form.causal else 2))
    size = (features + value_features) / 2
    shape = Shape(batch, heads, kv_heads, queries, keys, size, flops / (batch * heads * own), longest)
    alone = attention_seconds(shape, dtype, device) - _of(device).of_head(size).launch
    return alone * own / of_forward


def _of(device: Device) -> Measured:
    found = measured(device.measured)
    assert found is not None, f"{device.name} names {device.measured!r}, of which nothing was measured"
    return found


@lru_cache
def curve(kind: str, group: int, device: Device) -> Curve | None:
    """Seconds of a collective between `group` devices of one host; None where it was not measured.

    Between sizes that were measured, constants are interpolated by the logarithm of the size.
    """
    known = measured(device.measured)
    sizes = known.collectives.get(kind, {}) if known is not None else {}
    below = max((size for size in sizes if size <= group), default=0)
    above = min((size for size in sizes if size >= group), default=0)
    if not below or not above:
        return None
    far = math.log(group / below) / math.log(above / below) if above > below else 0.0
    low, high = sizes[below], sizes[above]
    slopes = tuple((1 - far) * one + far * two for one, two in zip(low.slopes, high.slopes, strict=True))
    return Curve((1 - far) * low.start + far * high.start, slopes)
