"""Lowerings of aten ops to jax: plain StableHLO, as torch_xla writes it.

torchax lowers these through jax.numpy, whose gathers check bounds, whose sums upcast, whose pads nest. GSPMD partitions
the plain form better, and both front ends give equal plans. Shapes, indices and sorts are in `aten_index.py`, windows
and random numbers in `aten_window.py`, losses in `aten_losses.py`.

A lowering takes the output types and the op's arguments: arrays for tensors, the rest as in torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autoshard.attention.form import FORWARD, GRADIENT, Form
from autoshard.frontends.tracing.ops import dot_dims

Types = tuple[jax.ShapeDtypeStruct, ...]
Lowering = Callable[..., Any]

LOWERINGS: dict[str, Lowering] = {}
"""Name of an overload (`aten.add.Tensor`) -> its lowering."""
NUMBERS_ARE_OPERANDS: set[str] = set()
"""Ops whose numbers torch_xla passes as arguments of the program: an optimizer's counters change with every step."""


def lowers(names: str, numbers: bool = False) -> Callable[[Lowering], Lowering]:
    """Register a lowering for overloads of aten, `default` where none is named."""

    def register(lowering: Lowering) -> Lowering:
        for name in names.split():
            full = name if "." in name else f"{name}.default"
            full = full if "::" in full else f"aten.{full}"
            full = full.replace("::", ".")
            LOWERINGS[full] = lowering
            if numbers:
                NUMBERS_ARE_OPERANDS.add(full)
        return lowering

    return register


# Dtypes and shapes.


def cast(x: Any, dtype: Any) -> Any:
    """Cast an array or number; to bool as in torch: whether it is not 0."""
    x = jnp.asarray(x, dtype) if isinstance(x, bool | int | float | complex) else x
    if x.dtype == dtype:
        return x
    return lax.ne(x, lax.full_like(x, 0)) if dtype == jnp.bool_ else lax.convert_element_type(x, dtype)


def spread(x: Any, shape: Sequence[int]) -> Any:
    """Broadcast as in torch: drops an operand's dims of size 1 first, for XLA."""
    shape = tuple(shape)
    if x.shape == shape:
        return x
    behind = len(shape) - x.ndim
    kept = [d for d in range(x.ndim) if not (x.shape[d] == 1 and shape[d + behind] != 1)]
    if len(kept) != x.ndim:
        x = lax.reshape(x, [x.shape[d] for d in kept])
    return lax.broadcast_in_dim(x, shape, [d + behind for d in kept])


def _common(*operands: Any) -> Any:
    """The promoted dtype: operands without dims count only if of a higher category."""
    arrays = [x for x in operands if not isinstance(x, bool | int | float)]
    with_dims = [x.dtype for x in arrays if x.ndim] or [x.dtype for x in arrays]
    found = with_dims[0]
    for dtype in with_dims[1:]:
        found = jnp.promote_types(found, dtype)
    for x in arrays:
        if _category(x.dtype) > _category(found):
            found = x.dtype
    for x in operands:
        if isinstance(x, float) and _category(found) < 2:
            found = jnp.dtype(jnp.float32)
        elif isinstance(x, int) and not isinstance(x, bool) and _category(found) < 1:
            found = jnp.dtype(jnp.int64)
    return found


def _category(dtype: Any) -> int:
    if dtype == jnp.bool_:
        return 0
    return 1 if jnp.issubdtype(dtype, jnp.integer) else 2 if jnp.issubdtype(dtype, jnp.floating) else 3


def full(value: Any, out: jax.ShapeDtypeStruct) -> Any:
    """A tensor filled with one number."""
    return lax.full(out.shape, value, out.dtype)


def _dims(dims: Any, rank: int) -> list[int]:
    if dims is None or (isinstance(dims, tuple | list) and not dims):
        return list(range(rank))
    return sorted({d % max(rank, 1) for d in (dims if isinstance(dims, tuple | list) else [dims])} if rank else set())


# Elementwise ops.


def _unary(names: str, function: Callable[[Any], Any]) -> None:
    def lowering(out: Types, x: Any, *_: Any, **__: Any) -> Any:
        return function(cast(x, out[0].dtype))

    lowers(names)(lowering)


def _reciprocal(x: Any) -> Any:
    return lax.div(lax.full_like(x, 1), x)


def _relu(x: Any) -> Any:
    return lax.max(x, lax.full_like(x, 0))


for _names, _function in {
    "neg": lax.neg, "rsqrt": lax.rsqrt, "sqrt": lax.sqrt, "exp": lax.exp, "log": lax.log, "tanh": lax.tanh,
    "sigmoid": lax.logistic, "erf": lax.erf, "abs": lax.abs, "sin": lax.sin, "cos": lax.cos, "floor": lax.floor,
    "ceil": lax.ceil, "expm1": lax.expm1, "log1p": lax.log1p, "reciprocal": _reciprocal, "relu": _relu,
    "sign": lax.sign, "bitwise_not": lax.bitwise_not, "logical_not": lax.bitwise_not,
    "silu": lambda x: lax.mul(x, lax.logistic(x)), "clone": lambda x: x, "_to_copy": lambda x: x,
    "square": lambda x: lax.mul(x, x),
}.items():  # fmt: skip
    _unary(_names, _function)


def _binary(names: str, function: Callable[[Any, Any], Any]) -> None:
    def lowering(out: Types, x: Any, y: Any, alpha: Any = 1) -> Any:
        dtype, shape = out[0].dtype, out[0].shape
        y = cast(y, dtype)
        made = _OF_BOOLS.get(function, function) if dtype == jnp.bool_ else function
        if not (isinstance(alpha, int | float) and alpha == 1):
            y = lax.mul(y, spread(cast(alpha, dtype), y.shape))
        return made(spread(cast(x, dtype), shape), spread(y, shape))

    lowers(names, numbers=True)(lowering)


def _power(x: Any, y: Any) -> Any:
    """Powers of two arrays of one dtype and shape; lax has none of integers."""
    return jnp.power(x, y) if jnp.issubdtype(x.dtype, jnp.integer) else lax.pow(x, y)


_OF_BOOLS = {lax.add: lax.bitwise_or, lax.mul: lax.bitwise_and, lax.max: lax.bitwise_or, lax.min: lax.bitwise_and}
"""Arithmetic of bools in torch."""

for _names, _function2 in {
    "add.Tensor add.Scalar": lax.add, "sub.Tensor sub.Scalar": lax.sub, "mul.Tensor mul.Scalar": lax.mul,
    "div.Tensor div.Scalar": lax.div, "maximum": lax.max, "minimum": lax.min,
    "pow.Tensor_Tensor pow.Scalar": _power, "atan2": lax.atan2, "fmod.Tensor fmod.Scalar": lax.rem,
    "bitwise_and.Tensor bitwise_and.Scalar": lax.bitwise_and, "bitwise_or.Tensor bitwise_or.Scalar": lax.bitwise_or,
    "bitwise_xor.Tensor bitwise_xor.Scalar": lax.bitwise_xor,
    "logical_and": lax.bitwise_and, "logical_or": lax.bitwise_or, "logical_xor": lax.bitwise_xor,
}.items():  # fmt: skip
    _binary(_names, _function2)


@lowers("rsub.Scalar rsub.Tensor", numbers=True)
def _rsub(out: Types, x: Any, y: Any, alpha: Any = 1) -> Any:
    x = cast(x, out[0].dtype)
    if not (isinstance(alpha, int | float) and alpha == 1):
        x = lax.mul(x, spread(cast(alpha, x.dtype), x.shape))
    return lax.sub(spread(cast(y, x.dtype), out[0].shape), spread(x, out[0].shape))


@lowers("pow.Tensor_Scalar")
def _pow(out: Types, x: Any, exponent: Any) -> Any:
    x = cast(x, out[0].dtype)
    if isinstance(exponent, int) and exponent >= 0 and jnp.issubdtype(x.dtype, jnp.integer):
        return lax.integer_pow(x, exponent)
    return _power(x, spread(cast(exponent, x.dtype), x.shape))


def _compare(names: str, function: Callable[[Any, Any], Any]) -> None:
    def lowering(out: Types, x: Any, y: Any) -> Any:
        dtype = _common(x, y)
        return function(spread(cast(x, dtype), out[0].shape), spread(cast(y, dtype), out[0].shape))

    lowers(names, numbers=True)(lowering)


for _name, _function2 in {"eq": lax.eq, "ne": lax.ne, "lt": lax.lt, "le": lax.le, "gt": lax.gt, "ge": lax.ge}.items():
    _compare(f"{_name}.Tensor {_name}.Scalar", _function2)


@lowers("where.self where.ScalarOther where.ScalarSelf where.Scalar", numbers=True)
def _where(out: Types, condition: Any, x: Any, y: Any) -> Any:
    x, y = (spread(cast(each, out[0].dtype), out[0].shape) for each in (x, y))
    return lax.select(spread(cast(condition, jnp.bool_), out[0].shape), x, y)


@lowers("masked_fill.Scalar masked_fill.Tensor", numbers=True)
def _masked_fill(out: Types, x: Any, mask: Any, value: Any) -> Any:
    return _where(out, mask, value, x)


@lowers("addcmul", numbers=True)
def _addcmul(out: Types, x: Any, a: Any, b: Any, value: Any = 1) -> Any:
    return _added(out, x, lax.mul(*(spread(cast(each, out[0].dtype), out[0].shape) for each in (a, b))), value)


@lowers("addcdiv", numbers=True)
def _addcdiv(out: Types, x: Any, a: Any, b: Any, value: Any = 1) -> Any:
    return _added(out, x, lax.div(*(spread(cast(each, out[0].dtype), out[0].shape) for each in (a, b))), value)


def _added(out: Types, x: Any, term: Any, value: Any) -> Any:
    if not (isinstance(value, int | float) and value == 1):
        term = lax.mul(term, spread(cast(value, term.dtype), term.shape))
    return lax.add(spread(cast(x, out[0].dtype), out[0].shape), term)


@lowers("lerp.Scalar lerp.Tensor", numbers=True)
def _lerp(out: Types, x: Any, end: Any, weight: Any) -> Any:
    x, end, weight = (spread(cast(each, out[0].dtype), out[0].shape) for each in (x, end, weight))
    return lax.add(x, lax.mul(weight, lax.sub(end, x)))


@lowers("clamp clamp.Tensor clamp_min clamp_min.Tensor", numbers=True)
def _clamp(out: Types, x: Any, min: Any = None, max: Any = None) -> Any:
    x = cast(x, out[0].dtype)
    low, high = lowest(x.dtype) if min is None else min, highest(x.dtype) if max is None else max
    low, x, high = (spread(cast(each, x.dtype), out[0].shape) for each in (low, x, high))
    return lax.clamp(low, x, high)


@lowers("clamp_max clamp_max.Tensor", numbers=True)
def _clamp_max(out: Types, x: Any, max: Any) -> Any:
    return _clamp(out, x, None, max)


@lowers("hardtanh", numbers=True)
def _hardtanh(out: Types, x: Any, low: Any = -1, high: Any = 1) -> Any:
    return _clamp(out, x, low, high)


@lowers("gelu")
def _gelu(out: Types, x: Any, approximate: str = "none") -> Any:
    half = lax.mul(x, lax.full_like(x, 0.5))
    inner = lax.tanh(_gelu_inner(x)) if approximate == "tanh" else _gelu_erf(x)
    return lax.mul(half, lax.add(lax.full_like(x, 1), inner))


def _gelu_erf(x: Any) -> Any:
    return lax.erf(lax.mul(x, lax.full_like(x, math.sqrt(0.5))))


def _gelu_inner(x: Any) -> Any:
    cube = lax.mul(lax.full_like(x, 0.044715), _pow((x,), x, 3))
    return lax.mul(lax.full_like(x, math.sqrt(2 / math.pi)), lax.add(x, cube))


@lowers("gelu_backward")
def _gelu_backward(out: Types, grad: Any, x: Any, approximate: str = "none") -> Any:
    grad, x = spread(grad, out[0].shape), spread(x, out[0].shape)

    def number(value: float) -> Any:
        return lax.full_like(x, value)

    if approximate == "tanh":
        tanh = lax.tanh(_gelu_inner(x))
        left = lax.mul(number(0.5), lax.add(number(1), tanh))
        slope = lax.add(number(1), lax.mul(number(3 * 0.044715), _pow((x,), x, 2)))
        slope = lax.mul(number(math.sqrt(2 / math.pi)), slope)
        right = lax.mul(lax.mul(number(0.5), x), lax.sub(number(1), lax.mul(tanh, tanh)))
        right = lax.mul(right, slope)
    else:
        left = lax.mul(number(0.5), lax.add(number(1), _gelu_erf(x)))
        power = lax.exp(lax.mul(lax.mul(x, x), number(-0.5)))
        right = lax.mul(lax.mul(x, power), number(math.sqrt(0.5 / math.pi)))
    return lax.mul(cast(grad, x.dtype), lax.add(left, right))


@lowers("silu_backward")
def _silu_backward(out: Types, grad: Any, x: Any) -> Any:
    grad, x = spread(grad, out[0].shape), spread(x, out[0].shape)
    one, s = lax.full_like(x, 1), lax.logistic(x)
    return lax.mul(lax.mul(grad, s), lax.add(one, lax.mul(x, lax.sub(one, s))))


@lowers("sigmoid_backward")
def _sigmoid_backward(out: Types, grad: Any, y: Any) -> Any:
    grad, y = spread(grad, out[0].shape), spread(y, out[0].shape)
    return lax.mul(lax.mul(grad, lax.sub(lax.full_like(y, 1), y)), y)


@lowers("tanh_backward")
def _tanh_backward(out: Types, grad: Any, y: Any) -> Any:
    grad, y = spread(grad, out[0].shape), spread(y, out[0].shape)
    return lax.mul(grad, lax.sub(lax.full_like(y, 1), lax.mul(y, y)))


@lowers("threshold_backward")
def _threshold_backward(out: Types, grad: Any, x: Any, threshold: Any) -> Any:
    grad, x = spread(grad, out[0].shape), spread(x, out[0].shape)
    return lax.select(lax.gt(x, lax.full_like(x, threshold)), cast(grad, x.dtype), lax.full_like(x, 0))


@lowers("hardtanh_backward")
def _hardtanh_backward(out: Types, grad: Any, x: Any, low: Any, high: Any) -> Any:
    grad, x = spread(grad, out[0].shape), spread(x, out[0].shape)
    inside = lax.bitwise_and(lax.gt(x, lax.full_like(x, low)), lax.lt(x, lax.full_like(x, high)))
    return lax.select(inside, grad, lax.full_like(grad, 0))


@lowers("leaky_relu", numbers=True)
def _leaky_relu(out: Types, x: Any, slope: Any = 0.01) -> Any:
    return _leaks(x, x, slope)


@lowers("leaky_relu_backward", numbers=True)
def _leaky_relu_backward(out: Types, grad: Any, x: Any, slope: Any, is_result: bool) -> Any:
    grad, x = spread(grad, out[0].shape), spread(x, out[0].shape)
    return _leaks(grad, x, slope)


def _leaks(value: Any, x: Any, slope: Any) -> Any:
    """`value` where `x` is positive, `slope` times it elsewhere."""
    less = lax.mul(spread(cast(slope, value.dtype), value.shape), value)
    return lax.select(lax.gt(x, lax.full_like(x, 0)), value, less)


@lowers("log_sigmoid_forward")
def _log_sigmoid(out: Types, x: Any) -> Any:
    least = lax.max(lax.neg(x), lax.full_like(x, 0))
    buffer = lax.add(lax.exp(lax.neg(least)), lax.exp(lax.sub(lax.neg(x), least)))
    made = lax.neg(lax.add(least, lax.log(buffer)))
    return (made, buffer) if out[1].shape == x.shape else (made, full(0, out[1]))


@lowers("log_sigmoid_backward")
def _log_sigmoid_backward(out: Types, grad: Any, x: Any, buffer: Any) -> Any:
    one, negative = lax.full_like(x, 1), lax.lt(x, lax.full_like(x, 0))
    if buffer.shape != x.shape:
        return lax.mul(grad, lax.logistic(lax.neg(x)))
    slope = lax.select(negative, one, lax.full_like(x, 0))
    sign = lax.select(negative, one, lax.neg(one))
    return lax.mul(grad, lax.sub(slope, lax.mul(sign, lax.div(lax.sub(buffer, one), buffer))))


def _by_reduction(out: Types, losses: Any, reduction: int) -> Any:
    """The reduction modes of losses: none, mean, sum."""
    if reduction == 0:
        return losses
    return (_mean if reduction == 1 else _sum)(out, losses)


@lowers("mse_loss")
def _mse_loss(out: Types, x: Any, target: Any, reduction: int = 1) -> Any:
    difference = lax.sub(*(spread(cast(each, out[0].dtype), np.broadcast_shapes(x.shape, target.shape))
                           for each in (x, target)))  # fmt: skip
    return _by_reduction(out, lax.mul(difference, difference), reduction)


@lowers("mse_loss_backward")
def _mse_loss_backward(out: Types, grad: Any, x: Any, target: Any, reduction: int) -> Any:
    shape, dtype = out[0].shape, out[0].dtype
    difference = lax.sub(*(spread(cast(each, dtype), shape) for each in (x, target)))
    grad = cast(grad, dtype)
    if reduction == 1:
        grad = lax.mul(grad, lax.full_like(grad, 1 / math.prod(shape)))
    return lax.mul(lax.mul(lax.full_like(difference, 2), difference), spread(grad, shape))


# Factories.


@lowers(
    "zeros zeros_like new_zeros empty.memory_format empty_like new_empty new_empty_strided empty_strided "
    "empty_permuted zero _efficientzerotensor"
)
def _zeros(out: Types, *_: Any, **__: Any) -> Any:
    return full(0, out[0])


@lowers("ones ones_like new_ones")
def _ones(out: Types, *_: Any, **__: Any) -> Any:
    return full(1, out[0])


@lowers("full", numbers=False)
def _full_op(out: Types, size: Any, value: Any, **_: Any) -> Any:
    return full(value, out[0])


@lowers("new_full")
def _new_full(out: Types, x: Any, size: Any, value: Any, **_: Any) -> Any:
    return full(value, out[0])


@lowers("full_like fill.Scalar fill.Tensor", numbers=True)
def _fill(out: Types, x: Any, value: Any, **_: Any) -> Any:
    return spread(cast(value, out[0].dtype), out[0].shape)


@lowers("scalar_tensor", numbers=True)
def _scalar_tensor(out: Types, value: Any, **_: Any) -> Any:
    return cast(value, out[0].dtype)


@lowers("copy")
def _copy(out: Types, x: Any, y: Any, *_: Any) -> Any:
    return spread(cast(y, out[0].dtype), out[0].shape)


def _arange(out: Types, start: Any, step: Any) -> Any:
    counted = lax.iota(out[0].dtype, out[0].shape[0])
    if step != 1:
        counted = lax.mul(counted, lax.full_like(counted, step))
    return counted if start == 0 else lax.add(counted, lax.full_like(counted, start))


lowers("arange")(lambda out, end, **_: _arange(out, 0, 1))
lowers("arange.start")(lambda out, start, end, **_: _arange(out, start, 1))
lowers("arange.start_step")(lambda out, start, end, step=1, **_: _arange(out, start, step))


def _triangle(out: Types, x: Any, diagonal: int, lower: bool) -> Any:
    rows, columns = x.shape[-2:]
    row = lax.broadcasted_iota(jnp.int32, (rows, columns), 0)
    column = lax.broadcasted_iota(jnp.int32, (rows, columns), 1)
    row = lax.add(row, lax.full_like(row, diagonal))
    keep = lax.ge(row, column) if lower else lax.le(row, column)
    return lax.select(spread(keep, x.shape), x, lax.full_like(x, 0))


lowers("tril")(lambda out, x, diagonal=0: _triangle(out, x, diagonal, True))
lowers("triu")(lambda out, x, diagonal=0: _triangle(out, x, diagonal, False))


# Reductions.


def reduced(x: Any, out: jax.ShapeDtypeStruct, dims: Any, start: Any, function: Any) -> Any:
    """Reduce dims; the output's shape decides whether they are kept."""
    return lax.reshape(lax.reduce(x, np.array(start, x.dtype), function, _dims(dims, x.ndim)), out.shape)


@lowers("sum sum.dim_IntList")
def _sum(out: Types, x: Any, dims: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:
    return reduced(cast(x, out[0].dtype), out[0], dims, 0, lax.add)


@lowers("mean mean.dim")
def _mean(out: Types, x: Any, dims: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:
    count = math.prod(x.shape[d] for d in _dims(dims, x.ndim))
    total = reduced(cast(x, out[0].dtype), out[0], dims, 0, lax.add)
    return lax.mul(total, lax.full_like(total, 1 / count if count else math.nan))


def lowest(dtype: Any) -> Any:
    """The least number of a dtype."""
    return -math.inf if jnp.issubdtype(dtype, jnp.floating) else dtype == jnp.bool_ or jnp.iinfo(dtype).min


def highest(dtype: Any) -> Any:
    """The largest number of a dtype."""
    return math.inf if jnp.issubdtype(dtype, jnp.floating) else dtype == jnp.bool_ or jnp.iinfo(dtype).max


@lowers("amax max")
def _amax(out: Types, x: Any, dims: Any = None, keepdim: bool = False) -> Any:
    return reduced(x, out[0], dims, lowest(x.dtype), lax.max)


@lowers("amin min")
def _amin(out: Types, x: Any, dims: Any = None, keepdim: bool = False) -> Any:
    return reduced(x, out[0], dims, highest(x.dtype), lax.min)


@lowers("any any.dim any.dims")
def _any(out: Types, x: Any, dims: Any = None, keepdim: bool = False) -> Any:
    return reduced(cast(x, jnp.bool_), out[0], dims, False, lax.bitwise_or)


@lowers("all all.dim all.dims")
def _all(out: Types, x: Any, dims: Any = None, keepdim: bool = False) -> Any:
    return reduced(cast(x, jnp.bool_), out[0], dims, True, lax.bitwise_and)


@lowers("cumsum")
def _cumsum(out: Types, x: Any, dim: int, dtype: Any = None) -> Any:
    return _cumulative(lax.add, cast(x, out[0].dtype), dim, 0)


@lowers("cumprod")
def _cumprod(out: Types, x: Any, dim: int, dtype: Any = None) -> Any:
    return _cumulative(lax.mul, cast(x, out[0].dtype), dim, 1)


@lowers("cummax")
def _cummax(out: Types, x: Any, dim: int) -> Any:
    if not x.ndim:
        return x, np.zeros((), np.int64)
    least = -math.inf if jnp.issubdtype(x.dtype, jnp.floating) else jnp.iinfo(x.dtype).min
    found = _cumulative(lax.max, x, dim, least)
    places = lax.broadcasted_iota(np.int64, x.shape, dim % x.ndim)
    return found, _cumulative(lax.max, lax.select(lax.eq(x, found), places, lax.full_like(places, 0)), dim, 0)


def _cumulative(combine: Callable[[Any, Any], Any], x: Any, dim: int, start: Any) -> Any:
    if not x.size or not x.ndim:
        return x
    window, padding = [1] * x.ndim, [(0, 0)] * x.ndim
    window[dim], padding[dim] = x.shape[dim], (x.shape[dim] - 1, 0)
    return lax.reduce_window(x, np.array(start, x.dtype), combine, window, [1] * x.ndim, padding)


def _shifted(x: Any, dim: int) -> tuple[Any, Any, Any]:
    """x minus its maximum along a dim, the exponentials of that, and their sum."""
    shifted = lax.sub(x, _along(lax.reduce(x, np.array(-math.inf, x.dtype), lax.max, _dims(dim, x.ndim)), x, dim))
    powers = lax.exp(shifted)
    return shifted, powers, lax.reduce(powers, np.array(0, x.dtype), lax.add, _dims(dim, x.ndim))


def _along(total: Any, x: Any, dim: int) -> Any:
    """Broadcast a reduction of a dim of `x` along that dim."""
    return lax.broadcast_in_dim(total, x.shape, [d for d in range(x.ndim) if d != dim % x.ndim])


@lowers("_softmax")
def _softmax(out: Types, x: Any, dim: int, half_to_float: bool) -> Any:
    x = cast(x, out[0].dtype)
    if not x.ndim:
        return lax.full_like(x, 1)
    _, powers, total = _shifted(x, dim)
    return lax.div(powers, _along(total, x, dim))


@lowers("_log_softmax")
def _log_softmax(out: Types, x: Any, dim: int, half_to_float: bool) -> Any:
    x = cast(x, out[0].dtype)
    if not x.ndim:
        return lax.full_like(x, 0)
    shifted, _, total = _shifted(x, dim)
    return lax.sub(shifted, _along(lax.log(total), x, dim))


def _kept_sum(x: Any, dim: int) -> Any:
    return _along(lax.reduce(x, np.array(0, x.dtype), lax.add, _dims(dim, x.ndim)), x, dim)


@lowers("_softmax_backward_data")
def _softmax_backward(out: Types, grad: Any, y: Any, dim: int, dtype: Any) -> Any:
    return cast(lax.mul(lax.sub(grad, _kept_sum(lax.mul(grad, y), dim)), y), out[0].dtype)


@lowers("_log_softmax_backward_data")
def _log_softmax_backward(out: Types, grad: Any, y: Any, dim: int, dtype: Any) -> Any:
    return cast(lax.sub(grad, lax.mul(lax.exp(y), _kept_sum(grad, dim))), out[0].dtype)


# Products.


def _dot(out: jax.ShapeDtypeStruct, a: Any, b: Any, batch: int = 0) -> Any:
    """Contract the last dim of a with the first of b after `batch` leading batch dims."""
    shared = tuple(range(batch))
    return lax.dot_general(a, b, (((a.ndim - 1,), (batch,)), (shared, shared)), preferred_element_type=out.dtype)


lowers("mm mv dot")(lambda out, a, b: _dot(out[0], a, b))
lowers("bmm")(lambda out, a, b: _dot(out[0], a, b, 1))


@lowers("addmm addmv", numbers=True)
def _addmm(out: Types, x: Any, a: Any, b: Any, beta: Any = 1, alpha: Any = 1) -> Any:
    return _scaled_sum(out, x, _dot(out[0], a, b), beta, alpha)


@lowers("baddbmm", numbers=True)
def _baddbmm(out: Types, x: Any, a: Any, b: Any, beta: Any = 1, alpha: Any = 1) -> Any:
    return _scaled_sum(out, x, _dot(out[0], a, b, 1), beta, alpha)


def _scaled_sum(out: Types, x: Any, product: Any, beta: Any, alpha: Any) -> Any:
    product = product if is_one(alpha) else lax.mul(product, spread(cast(alpha, product.dtype), product.shape))
    x = cast(x, product.dtype)
    x = x if is_one(beta) else lax.mul(x, spread(cast(beta, x.dtype), x.shape))
    return lax.add(product, spread(x, product.shape))


def is_one(value: Any) -> bool:
    """Whether an argument is the number 1."""
    return isinstance(value, int | float) and value == 1


@lowers("autoshard::einsum")
def _einsum(out: Types, equation: str, a: Any, b: Any) -> Any:
    dims, order = dot_dims(equation)
    product = lax.dot_general(a, b, dims, preferred_element_type=out[0].dtype)
    return product if order is None else lax.transpose(product, order)


@lowers("autoshard::barrier")
def _barrier(out: Types, values: Any, after: Any) -> Any:
    return lax.optimization_barrier((*values, *after))[: len(values)]


@lowers("autoshard::attention")
def _attention(out: Types, q: Any, k: Any, v: Any, *masked: Any) -> Any:
    return _attention_call(FORWARD, out, (q, k, v), (), masked)


@lowers("autoshard::attention_grad")
def _attention_grad(out: Types, q: Any, k: Any, v: Any, made: Any, lse: Any, grad: Any, *masked: Any) -> Any:
    return _attention_call(GRADIENT, out, (q, k, v), (made, lse, grad), masked)


def _attention_call(kind: str, out: Types, first: Sequence[Any], last: Sequence[Any], masked: Sequence[Any]) -> Any:
    """The custom call of an attention (`attention/form.py`)."""
    *masks, causal, window, scale, soft_cap = masked
    form = Form(scale, causal, window, masks[0] is not None, masks[1] is not None, soft_cap)
    return _call(kind, out, form.text(), (*first, *(each for each in masks if each is not None), *last))


def _call(kind: str, out: Types, config: str, operands: Sequence[Any]) -> Any:
    return jax.ffi.ffi_call(
        f"autoshard.{kind}", out, custom_call_api_version=2, legacy_backend_config=config
    )(*operands)  # fmt: skip


@lowers("autoshard::experts")
def _experts(out: Types, *given: Any) -> Any:
    return _call("experts", out, given[-1], [each for each in given[:-1] if each is not None])


@lowers("autoshard::experts_grad")
def _experts_grad(out: Types, *given: Any) -> Any:
    return _call("experts_grad", out, given[-1], [each for each in given[:-1] if each is not None])
