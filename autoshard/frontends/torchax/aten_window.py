"""Lowerings of aten ops to jax: convolutions, pools, random numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src.lax.windowed_reductions import _select_and_scatter

from autoshard.frontends.torchax.aten import Types, cast, lowers, lowest, spread
from autoshard.frontends.torchax.aten_index import scatter_add


def _each(value: Any, rank: int) -> list[int]:
    values: list[int] = list(value) if isinstance(value, tuple | list) else [value]
    return values * rank if len(values) == 1 else values


def _convolver(out_shape: Sequence[int], settings: Sequence[Any]) -> Callable[[Any, Any], Any]:
    """The convolution of aten's stride, padding, dilation, transposed, output padding and groups."""
    stride, padding, dilation, transposed, _, groups = settings

    def forward(x: Any, w: Any) -> Any:
        rank = x.ndim - 2
        edges = [(p, p) for p in _each(padding, rank)]
        return lax.conv_general_dilated(
            x, w, _each(stride, rank), edges, rhs_dilation=_each(dilation, rank), feature_group_count=groups
        )

    def backward(x: Any, w: Any) -> Any:
        made = jax.ShapeDtypeStruct(tuple(out_shape), x.dtype)
        return jax.linear_transpose(lambda each: forward(each, w), made)(x)[0]

    return backward if transposed else forward


@lowers("convolution")
def _convolution(out: Types, x: Any, w: Any, bias: Any, *settings: Any) -> Any:
    if x.ndim == 3:
        made = _convolution((_flat(out[0]),), *map(_flat, (x, w)), bias, *_flat_settings(settings))
        return lax.reshape(made, out[0].shape)
    made = _convolver(out[0].shape, settings)(x, w)
    if bias is None:
        return made
    shape = (made.shape[0], *made.shape[2:], made.shape[1])
    wide = lax.broadcast_in_dim(bias, shape, [made.ndim - 1])
    return lax.add(made, lax.transpose(wide, [0, made.ndim - 1, *range(1, made.ndim - 1)]))


def _flat(x: Any) -> Any:
    """A 1-d convolution's operand, or its type, as 2-d, as torch passes it to devices."""
    shape = (*x.shape[:2], 1, *x.shape[2:])
    return jax.ShapeDtypeStruct(shape, x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else lax.reshape(x, shape)


def _flat_settings(settings: Sequence[Any]) -> tuple[Any, ...]:
    """A 1-d convolution's settings as 2-d."""
    stride, padding, dilation, transposed, out_padding, groups = settings
    steps, gaps = ([1, *_each(each, 1)] for each in (stride, dilation))
    edges, more = ([0, *_each(each, 1)] for each in (padding, out_padding))
    return steps, edges, gaps, transposed, more, groups


@lowers("convolution_backward")
def _convolution_backward(out: Types, grad: Any, x: Any, w: Any, bias_sizes: Any, *settings_and_mask: Any) -> Any:
    *settings, mask = settings_and_mask
    if x.ndim == 3:
        grad, flat, kernel = map(_flat, (grad, x, w))
        gradients = _convolution_backward(out, grad, flat, kernel, bias_sizes, *_flat_settings(settings), mask)
        whole = [each for each, wanted in zip((x, w, None), mask, strict=True) if wanted]
        return [g if like is None else lax.reshape(g, like.shape) for g, like in zip(gradients, whole, strict=True)]
    stride, padding, dilation, transposed, _, groups = settings
    convolve = _convolver(grad.shape, settings)
    plain = None if transposed or groups != 1 else [_each(each, x.ndim - 2) for each in (stride, padding, dilation)]
    made = []
    if mask[0] and plain is not None:
        made.append(_input_gradient(grad, x, w, *plain))
    elif mask[0]:
        made.append(jax.linear_transpose(lambda each: convolve(each, w), x)(grad)[0])
    if mask[1] and plain is not None:
        made.append(_kernel_gradient(grad, x, w, *plain))
    elif mask[1]:
        made.append(jax.linear_transpose(lambda each: convolve(x, each), w)(grad)[0])
    if mask[2]:
        made.append(lax.reduce(grad, np.array(0, grad.dtype), lax.add, [0, *range(2, grad.ndim)]))
    return made


def _input_gradient(
    grad: Any, x: Any, w: Any, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> Any:
    """As in XLA's own helper: kernel reversed, its features exchanged."""
    rank = x.ndim - 2
    space = "HWD"[:rank]
    edges = []
    for d in range(rank):
        reach = dilation[d] * (w.shape[2 + d] - 1)
        low = reach - padding[d]
        edges.append((low, x.shape[2 + d] - ((grad.shape[2 + d] - 1) * stride[d] + 1) - low + reach))
    turned = lax.rev(lax.transpose(w, [*range(2, w.ndim), 1, 0]), range(rank))
    names = (f"NC{space}", f"{space}OI", f"NC{space}")
    return lax.conv_general_dilated(
        grad, turned, [1] * rank, edges, lhs_dilation=stride, rhs_dilation=dilation, dimension_numbers=names
    )


def _kernel_gradient(
    grad: Any, x: Any, w: Any, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> Any:
    """As in XLA's own helper: batch and features exchanged, the kernel's dims first."""
    rank = x.ndim - 2
    space = "HWD"[:rank]
    edges = []
    for d in range(rank):
        reach = dilation[d] * (w.shape[2 + d] - 1) + (grad.shape[2 + d] - 1) * stride[d] + 1
        edges.append((padding[d], reach - x.shape[2 + d] - padding[d]))
    made = lax.conv_general_dilated(
        x, grad, dilation, edges, rhs_dilation=stride, dimension_numbers=(f"CN{space}", f"IO{space}", f"{space}NC")
    )
    return lax.transpose(made, [rank + 1, rank, *range(rank)])


# Pools.


def _window(
    x: Any, out: Any, kernel: Any, stride: Any, padding: Any, dilation: Any = 1
) -> tuple[list[int], list[int], list[tuple[int, int]], list[int]]:
    """Window, strides, padding and dilation over all dims; high padding follows the output size (ceil mode)."""
    rank = len(_each(kernel, 2)) if not isinstance(kernel, int) else x.ndim - 2
    size, pad, gap = _each(kernel, rank), _each(padding, rank), _each(dilation, rank)
    step = _each(stride, rank) if stride not in ((), [], None) else size
    lead = x.ndim - rank
    edges = [(0, 0)] * lead
    for d in range(rank):
        reach = (out.shape[lead + d] - 1) * step[d] + gap[d] * (size[d] - 1) + 1
        edges.append((pad[d], max(reach - x.shape[lead + d] - pad[d], -x.shape[lead + d])))
    return [1] * lead + size, [1] * lead + step, edges, [1] * lead + gap


def _max_pool(x: Any, window: Any) -> Any:
    size, step, edges, gap = window
    least = np.array(lowest(x.dtype), x.dtype)
    if any(edge != (0, 0) for edge in edges):
        x = lax.pad(x, least, [(*edge, 0) for edge in edges])
    return lax.reduce_window(x, least, lax.max, size, step, [(0, 0)] * x.ndim, None, gap)


@lowers("max_pool2d_with_indices max_pool3d_with_indices")
def _max_pool_indices(
    out: Types, x: Any, kernel: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1, ceil: bool = False
) -> Any:
    rank = len(kernel)
    window = _window(x, out[0], kernel, stride, padding, dilation)
    places = lax.reshape(lax.iota(jnp.int64, math.prod(x.shape[-rank:])), x.shape[-rank:])

    def larger(a: Any, b: Any) -> Any:
        first = lax.bitwise_or(lax.gt(a[0], b[0]), lax.bitwise_and(lax.eq(a[0], b[0]), lax.lt(a[1], b[1])))
        return lax.select(first, a[0], b[0]), lax.select(first, a[1], b[1])

    start = (jnp.asarray(lowest(x.dtype), x.dtype), jnp.asarray(jnp.iinfo(jnp.int64).max, jnp.int64))
    size, step, edges, gap = window
    _, found = lax.reduce_window((x, spread(places, x.shape)), start, larger, size, step, edges, None, gap)
    return _max_pool(x, window), found


@lowers("max_pool2d_with_indices_backward max_pool3d_with_indices_backward")
def _max_pool_backward(out: Types, grad: Any, x: Any, kernel: Any, *settings_and_indices: Any) -> Any:
    *settings, _, indices = settings_and_indices
    size, step, edges, gap = _window(x, grad, kernel, *settings)
    if all(each == 1 for each in gap):
        return _select_and_scatter(x, lax.ge, size, step, edges, grad, np.array(0, x.dtype), lax.add)
    rank = len(kernel)
    flat = (*x.shape[:-rank], math.prod(x.shape[-rank:]))
    into = lax.full(flat, 0, x.dtype)
    rows = (*grad.shape[:-rank], math.prod(grad.shape[-rank:]))
    return lax.reshape(scatter_add(into, -1, lax.reshape(indices, rows), lax.reshape(grad, rows)), x.shape)


@lowers("avg_pool2d avg_pool3d")
def _avg_pool(
    out: Types, x: Any, kernel: Any, stride: Any = (), padding: Any = 0, ceil: bool = False, counts_pads: bool = True,
    divisor: Any = None,
) -> Any:  # fmt: skip
    size, step, edges, _ = _window(x, out[0], kernel, stride, padding)
    zero = np.array(0, x.dtype)
    total = lax.reduce_window(x, zero, lax.add, size, step, edges)
    if divisor is not None:
        return lax.div(total, lax.full_like(total, divisor))
    if all(edge == (0, 0) for edge in edges):
        return lax.div(total, lax.full_like(total, math.prod(size)))
    ones = lax.full(x.shape, 1, x.dtype)
    if counts_pads:  # explicit padding counts, ceil mode's does not
        asked = [(low, min(low, high)) for low, high in edges]
        ones = lax.pad(ones, np.array(1, x.dtype), [(*edge, 0) for edge in asked])
        edges = [(0, high - more) for (_, high), (_, more) in zip(edges, asked, strict=True)]
    return lax.div(total, lax.reduce_window(ones, zero, lax.add, size, step, edges))


@lowers("avg_pool2d_backward avg_pool3d_backward")
def _avg_pool_backward(out: Types, grad: Any, x: Any, *settings: Any) -> Any:
    return jax.linear_transpose(lambda each: _avg_pool((grad,), each, *settings), x)(grad)[0]


def _adaptive(x: Any, sizes: Sequence[int]) -> Any:
    """Adaptive average: products with averaging matrices over torch's windows."""
    for dim, size in zip(range(x.ndim - len(sizes), x.ndim), sizes, strict=True):
        extent = x.shape[dim]
        if extent % size == 0:
            parted = lax.reshape(x, (*x.shape[:dim], size, extent // size, *x.shape[dim + 1 :]))
            total = lax.reduce(parted, np.array(0, x.dtype), lax.add, [dim + 1])
            x = lax.div(total, lax.full_like(total, extent // size))
            continue
        weights = [[0.0] * size for _ in range(extent)]
        for j in range(size):
            start, end = j * extent // size, -(-(j + 1) * extent // size)
            for i in range(start, end):
                weights[i][j] = 1 / (end - start)
        product = lax.dot_general(x, jnp.asarray(weights, x.dtype), (((dim,), (0,)), ((), ())))
        x = lax.transpose(product, [*range(dim), x.ndim - 1, *range(dim, x.ndim - 1)])
    return x


lowers("_adaptive_avg_pool2d _adaptive_avg_pool3d")(lambda out, x, sizes: _adaptive(x, sizes))


@lowers("_adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward")
def _adaptive_backward(out: Types, grad: Any, x: Any) -> Any:
    rank = x.ndim - 2
    return jax.linear_transpose(lambda each: _adaptive(each, grad.shape[-rank:]), x)(grad)[0]


# Random numbers: each op takes a seed and returns the next op's.


def _bits(seed: Any, shape: Sequence[int]) -> tuple[Any, Any]:
    """Uniform numbers in [0, 1) as float32, and the next seed."""
    low = lax.reshape(lax.convert_element_type(seed, jnp.uint32), (1,))
    key = lax.concatenate([low, lax.full((3,), 0, jnp.uint32)], 0)
    _, bits = lax.rng_bit_generator(key, tuple(shape), jnp.uint32)
    mantissa = lax.convert_element_type(lax.shift_right_logical(bits, lax.full_like(bits, 8)), jnp.float32)
    return lax.mul(mantissa, lax.full_like(mantissa, 2.0**-24)), lax.add(seed, lax.full_like(seed, 1))


@lowers("bernoulli.p bernoulli")
def _bernoulli(out: Types, x: Any, p: Any = None, *, seed: Any, generator: Any = None) -> Any:
    uniform, after = _bits(seed, out[0].shape)
    chance = lax.full_like(uniform, p) if p is not None else cast(x, jnp.float32)
    return cast(lax.lt(uniform, chance), out[0].dtype), after


@lowers("native_dropout")
def _dropout(out: Types, x: Any, p: float, train: Any = True, *, seed: Any) -> Any:
    if train is False or p == 0:
        return x, lax.full(x.shape, True), seed
    uniform, after = _bits(seed, x.shape)
    kept = lax.ge(uniform, lax.full_like(uniform, p))
    scale = lax.full_like(x, 1 / (1 - p) if p < 1 else 0.0)
    return lax.mul(lax.mul(x, cast(kept, x.dtype)), scale), kept, after


@lowers("rand rand_like")
def _rand(out: Types, *_: Any, seed: Any, **__: Any) -> Any:
    uniform, after = _bits(seed, out[0].shape)
    return cast(uniform, out[0].dtype), after


@lowers("uniform")
def _uniform(out: Types, x: Any, low: float = 0, high: float = 1, *, seed: Any, generator: Any = None) -> Any:
    uniform, after = _bits(seed, out[0].shape)
    spaced = lax.add(lax.mul(uniform, lax.full_like(uniform, high - low)), lax.full_like(uniform, low))
    return cast(spaced, out[0].dtype), after


def _gauss(out: Types, mean: float, deviation: float, seed: Any) -> Any:
    uniform, after = _bits(seed, out[0].shape)
    centered = lax.sub(lax.mul(uniform, lax.full_like(uniform, 2)), lax.full_like(uniform, 1 - 2.0**-24))
    normal = lax.mul(lax.erf_inv(centered), lax.full_like(uniform, math.sqrt(2) * deviation))
    return cast(lax.add(normal, lax.full_like(normal, mean)), out[0].dtype), after


lowers("randn randn_like")(lambda out, *_, seed, **__: _gauss(out, 0, 1, seed))
lowers("normal_functional")(
    lambda out, x, mean=0, deviation=1, *, seed, generator=None: _gauss(out, mean, deviation, seed)
)


def _integers(out: Types, low: int, high: int, seed: Any) -> Any:
    uniform, after = _bits(seed, out[0].shape)
    scaled = lax.floor(lax.mul(uniform, lax.full_like(uniform, high - low)))
    return lax.add(cast(scaled, out[0].dtype), lax.full(out[0].shape, low, out[0].dtype)), after


lowers("randint")(lambda out, high, size, *, seed, **_: _integers(out, 0, high, seed))
lowers("randint.low")(lambda out, low, high, size, *, seed, **_: _integers(out, low, high, seed))
lowers("randint_like")(lambda out, x, high, *, seed, **_: _integers(out, 0, high, seed))
lowers("randint_like.low_dtype")(lambda out, x, low, high, *, seed, **_: _integers(out, low, high, seed))
