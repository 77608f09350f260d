"""Lowerings of aten ops to jax: shapes, indices, sorts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autoshard.frontends.torchax.aten import Types, cast, full, highest, is_one, lowers, lowest, reduced, spread

# Shapes.


@lowers("view_copy _unsafe_view _reshape_alias_copy unsqueeze_copy squeeze_copy squeeze_copy.dim squeeze_copy.dims")
def _reshape(out: Types, x: Any, *_: Any, **__: Any) -> Any:
    return lax.reshape(x, out[0].shape)


@lowers("expand_copy")
def _expand(out: Types, x: Any, *_: Any, **__: Any) -> Any:
    return spread(x, out[0].shape)


@lowers("permute_copy")
def _permute(out: Types, x: Any, dims: Sequence[int]) -> Any:
    return lax.transpose(x, [d % x.ndim for d in dims])


@lowers("transpose_copy.int t_copy")
def _transpose(out: Types, x: Any, first: int = 0, second: int = 1) -> Any:
    if x.ndim < 2:
        return x
    order = list(range(x.ndim))
    order[first], order[second] = order[second], order[first]
    return lax.transpose(x, order)


@lowers("view_as_complex_copy")
def _complex(out: Types, x: Any) -> Any:
    parts = (lax.reshape(lax.slice_in_dim(x, at, at + 1, 1, x.ndim - 1), out[0].shape) for at in range(2))
    return lax.complex(*parts)


@lowers("view_as_real_copy")
def _real(out: Types, x: Any) -> Any:
    parts = [lax.reshape(part, (*x.shape, 1)) for part in (lax.real(x), lax.imag(x))]
    return lax.concatenate(parts, x.ndim)


def _range(size: int, start: Any, end: Any) -> tuple[int, int]:
    start = 0 if start is None else min(max(start + size if start < 0 else start, 0), size)
    end = size if end is None else min(max(end + size if end < 0 else end, start), size)
    return start, end


@lowers("slice_copy.Tensor")
def _slice(out: Types, x: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    start, end = _range(x.shape[dim], start, end)
    return lax.slice_in_dim(x, start, end, step, dim)


@lowers("select_copy.int")
def _select(out: Types, x: Any, dim: int, index: int) -> Any:
    index %= x.shape[dim]
    return lax.reshape(lax.slice_in_dim(x, index, index + 1, 1, dim), out[0].shape)


@lowers("split_copy.Tensor split_with_sizes_copy unbind_copy.int")
def _split(out: Types, x: Any, *rest: Any, dim: int | None = None) -> Any:
    unbinds = len(out) and len(out[0].shape) < x.ndim
    dim = dim if dim is not None else rest[-1] if len(rest) > 1 or (unbinds and rest) else 0
    parts, start = [], 0
    for each in out:
        size = 1 if unbinds else each.shape[dim]
        parts.append(lax.reshape(lax.slice_in_dim(x, start, start + size, 1, dim), each.shape))
        start += size
    return parts


def _placed(x: Any, into: Any, dim: int, start: int, step: int) -> Any:
    """Write `x` into every step-th position of a dim."""
    size, count = into.shape[dim], x.shape[dim]
    if step == 1 and count == size:
        return x
    edges = [(0, 0, 0)] * x.ndim
    edges[dim] = (start, size - start - ((count - 1) * step + 1), step - 1)
    padded = lax.pad(x, np.array(0, x.dtype), edges)
    places = lax.pad(lax.full(x.shape, True), jnp.asarray(False), edges)
    return lax.select(places, padded, into)


@lowers("slice_scatter")
def _slice_scatter(
    out: Types, x: Any, src: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Any:
    start, _ = _range(x.shape[dim], start, end)
    return _placed(cast(src, x.dtype), x, dim, start, step) if src.size else x


@lowers("select_scatter")
def _select_scatter(out: Types, x: Any, src: Any, dim: int, index: int) -> Any:
    return _one_placed(cast(src, x.dtype), x, dim, index)


def _one_placed(src: Any, into: Any, dim: int, index: int) -> Any:
    """Overwrite one position of a dim of `into`."""
    dim %= into.ndim
    starts = [0] * into.ndim
    starts[dim] = index % into.shape[dim]
    one = lax.reshape(src, [n if d != dim else 1 for d, n in enumerate(into.shape)])
    return lax.dynamic_update_slice(into, one, starts)


def _in_zeros(x: Any, out: jax.ShapeDtypeStruct, dim: int, start: int, step: int) -> Any:
    edges = [(0, 0, 0)] * x.ndim
    used = (x.shape[dim] - 1) * step + 1 if x.shape[dim] else 0
    edges[dim] = (start, out.shape[dim] - start - used, step - 1)
    return lax.pad(x, np.array(0, x.dtype), edges)


@lowers("slice_backward")
def _slice_backward(out: Types, grad: Any, sizes: Any, dim: int, start: int, end: int, step: int) -> Any:
    return _in_zeros(grad, out[0], dim % grad.ndim, _range(sizes[dim], start, end)[0], step)


@lowers("select_backward")
def _select_backward(out: Types, grad: Any, sizes: Any, dim: int, index: int) -> Any:
    return _one_placed(grad, full(0, out[0]), dim, index)


@lowers("cat")
def _cat(out: Types, tensors: Sequence[Any], dim: int = 0) -> Any:
    kept = [cast(t, out[0].dtype) for t in tensors if not (t.ndim == 1 and t.shape[0] == 0 and len(out[0].shape) > 1)]
    return lax.concatenate(kept, dim % kept[0].ndim)


@lowers("stack")
def _stack(out: Types, tensors: Sequence[Any], dim: int = 0) -> Any:
    dim %= len(out[0].shape)
    one = [n if d != dim else 1 for d, n in enumerate(out[0].shape)]
    return lax.concatenate([lax.reshape(cast(t, out[0].dtype), one) for t in tensors], dim)


@lowers("flip")
def _flip(out: Types, x: Any, dims: Sequence[int]) -> Any:
    return lax.rev(x, [d % x.ndim for d in dims])


@lowers("replication_pad1d_backward replication_pad2d_backward replication_pad3d_backward")
def _replication_pad_backward(out: Types, grad: Any, x: Any, padding: Sequence[int]) -> Any:
    edges = [(padding[2 * i], padding[2 * i + 1]) for i in reversed(range(len(padding) // 2))]
    edges = [(0, 0)] * (x.ndim - len(edges)) + edges
    made = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.linear_transpose(lambda each: jnp.pad(each, edges, mode="edge"), made)(grad)[0]


@lowers("constant_pad_nd")
def _pad(out: Types, x: Any, amounts: Sequence[int], value: Any = 0) -> Any:
    edges = [(0, 0, 0)] * x.ndim
    for n in range(len(amounts) // 2):
        edges[x.ndim - 1 - n] = (amounts[2 * n], amounts[2 * n + 1], 0)
    return lax.pad(x, jnp.asarray(value, x.dtype), edges)


@lowers("repeat")
def _repeat(out: Types, x: Any, repeats: Sequence[int]) -> Any:
    x = lax.reshape(x, (1,) * (len(repeats) - x.ndim) + x.shape)
    for dim, count in enumerate(repeats):
        if not count:
            return full(0, out[0])
        x = lax.concatenate([x] * count, dim) if count > 1 else x
    return x


# Indices.


def _wrapped(index: Any, size: int) -> Any:
    """Wrap negative indices."""
    negative = lax.lt(index, lax.full_like(index, 0))
    return lax.select(negative, lax.add(index, lax.full_like(index, size)), index)


def _located(x: Any, indices: Sequence[Any], wrap: bool) -> tuple[list[int], Any, tuple[int, ...], int]:
    """Of an index with tensors for some dims: those dims, the tensors stacked, their broadcast shape, its position."""
    given = [(d, index) for d, index in enumerate(indices) if index is not None]
    dims = [d for d, _ in given]
    shape = np.broadcast_shapes(*(index.shape for _, index in given))
    whole = [(d, index if index.dtype == jnp.uint32 else cast(index, jnp.int64)) for d, index in given]
    counted = [_wrapped(index, x.shape[d]) if wrap else index for d, index in whole]
    columns = [lax.reshape(spread(index, shape), (*shape, 1)) for index in counted]
    together = dims == list(range(dims[0], dims[0] + len(dims)))
    return dims, lax.concatenate(columns, len(shape)), shape, dims[0] if together else 0


@lowers("index.Tensor")
def index(out: Types, x: Any, indices: Sequence[Any], wrap: bool = True) -> Any:
    """Gather elements or slices by index tensors; `wrap` counts negative indices from the end."""
    dims, where, shape, at = _located(x, indices, wrap)
    rank = len(shape) + x.ndim - len(dims)
    numbers = lax.GatherDimensionNumbers(
        offset_dims=tuple(d for d in range(rank) if not at <= d < at + len(shape)),
        collapsed_slice_dims=tuple(dims),
        start_index_map=tuple(dims),
    )
    sizes = [1 if d in dims else n for d, n in enumerate(x.shape)]
    return lax.gather(x, where, numbers, sizes, mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS)


@lowers("index_put _unsafe_index_put _index_put_impl")
def _index_put(out: Types, x: Any, indices: Sequence[Any], values: Any, accumulate: bool = False, *_: Any) -> Any:
    return index_put(x, indices, values, accumulate)


def index_put(x: Any, indices: Sequence[Any], values: Any, accumulate: bool = False, wrap: bool = True) -> Any:
    """Write or add to the indexed elements; `wrap` counts negative indices from the end."""
    dims, where, shape, at = _located(x, indices, wrap)
    rest = [n for d, n in enumerate(x.shape) if d not in dims]
    target = [*rest[:at], *shape, *rest[at:]]
    numbers = lax.ScatterDimensionNumbers(
        update_window_dims=tuple(d for d in range(len(target)) if not at <= d < at + len(shape)),
        inserted_window_dims=tuple(dims),
        scatter_dims_to_operand_dims=tuple(dims),
    )
    scatter = lax.scatter_add if accumulate else lax.scatter
    updates = spread(cast(values, x.dtype), target)
    return scatter(x, where, updates, numbers, mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS)


@lowers("put")
def _put(out: Types, x: Any, at: Any, values: Any, accumulate: bool = False) -> Any:
    """Write or add to elements of the flattened tensor; one that is named twice is added to twice."""
    flat = index_put(lax.reshape(x, (x.size,)), [lax.reshape(at, (at.size,))], values.ravel(), accumulate)
    return lax.reshape(flat, x.shape)


@lowers("autoshard::embedding")
def _own_embedding(out: Types, weight: Any, indices: Any, padding_idx: int) -> Any:
    return index(out, weight, [indices])


@lowers("embedding")
def _embedding(out: Types, weight: Any, indices: Any, *_: Any) -> Any:
    return index(out, weight, [indices])


@lowers("autoshard::embedding_grad")
def _embedding_grad(out: Types, grad: Any, indices: Any, rows: int, padding_idx: int) -> Any:
    if padding_idx >= 0:
        padded = spread(
            lax.reshape(lax.eq(indices, lax.full_like(indices, padding_idx)), (*indices.shape, 1)), grad.shape
        )
        grad = lax.select(padded, lax.full_like(grad, 0), grad)
    return index_put(full(0, out[0]), [indices], grad, True)


@lowers("embedding_dense_backward")
def _embedding_dense_backward(out: Types, grad: Any, indices: Any, rows: int, padding_idx: int, *_: Any) -> Any:
    return _embedding_grad(out, grad, indices, rows, padding_idx)


@lowers("index_select")
def _index_select(out: Types, x: Any, dim: int, at: Any) -> Any:
    if not x.ndim:
        return x
    rows = cast(lax.reshape(at, (at.size,)), jnp.uint32)
    return index(out, x, [None] * (dim % x.ndim) + [rows], wrap=False)


def _along(x: Any, dim: int, at: Any) -> list[Any]:
    """The index of a gather along one dim, with iotas for the others; aten has no negative ones here."""
    return [at if d == dim % x.ndim else lax.broadcasted_iota(jnp.int64, at.shape, d) for d in range(x.ndim)]


@lowers("gather")
def _gather(out: Types, x: Any, dim: int, at: Any, sparse_grad: bool = False) -> Any:
    return index(out, x, _along(x, dim, at), wrap=False) if x.ndim else x


@lowers("scatter.src scatter.value")
def _scatter(out: Types, x: Any, dim: int, at: Any, src: Any) -> Any:
    return index_put(x, _along(x, dim, at), _cut(src, at, x.dtype), wrap=False)


def scatter_add(x: Any, dim: int, at: Any, src: Any) -> Any:
    """Scatter-add along one dim."""
    return index_put(x, _along(x, dim, at), _cut(src, at, x.dtype), True, wrap=False)


lowers("scatter_add")(lambda out, x, dim, at, src: scatter_add(x, dim, at, src))


def _cut(src: Any, at: Any, dtype: Any) -> Any:
    """Slice the source to the shape of the indices."""
    src = cast(src, dtype)
    return lax.slice(src, [0] * src.ndim, at.shape) if src.shape != at.shape and src.ndim else src


@lowers("index_add")
def _index_add(out: Types, x: Any, dim: int, at: Any, src: Any, alpha: Any = 1) -> Any:
    src = src if is_one(alpha) else lax.mul(src, spread(cast(alpha, src.dtype), src.shape))
    return index_put(x, [None] * (dim % x.ndim) + [at], src, True, wrap=False)


def _max_unpool(out: Types, x: Any, at: Any, rank: int) -> Any:
    lead = x.ndim - rank
    flat = full(0, jax.ShapeDtypeStruct((*x.shape[:lead], math.prod(out[0].shape[lead:])), x.dtype))
    at, x = (lax.reshape(each, (*each.shape[:lead], math.prod(each.shape[lead:]))) for each in (at, x))
    return lax.reshape(index_put(flat, _along(flat, lead, at), x, wrap=False), out[0].shape)


lowers("max_unpool2d")(lambda out, x, at, *_: _max_unpool(out, x, at, 2))
lowers("max_unpool3d")(lambda out, x, at, *_: _max_unpool(out, x, at, 3))


# Sorts.


def _backwards(x: Any) -> Any:
    """What sorts the other way round, of the least integers and unsigned ones too; its own inverse."""
    return lax.neg(x) if jnp.issubdtype(x.dtype, jnp.floating) else lax.bitwise_not(x)


@lowers("topk")
def _topk(out: Types, x: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    if not x.ndim:
        return (x, np.zeros((), np.int64)) if k else (full(0, out[0]), full(0, out[1]))
    dim %= x.ndim
    order = [d for d in range(x.ndim) if d != dim] + [dim]
    back = [order.index(d) for d in range(x.ndim)]
    turned = lax.transpose(x, order)
    values, places = lax.top_k(turned if largest else _backwards(turned), k)
    values = values if largest else _backwards(values)
    return lax.transpose(values, back), cast(lax.transpose(places, back), jnp.int64)


@lowers("sort sort.stable")
def _sort(out: Types, x: Any, dim: int = -1, descending: bool = False, stable: Any = None) -> Any:
    if not x.ndim:
        return x, np.zeros((), np.int64)
    places = lax.broadcasted_iota(jnp.int64, x.shape, dim % x.ndim)
    keys = _backwards(x) if descending else x
    keys, values, places = lax.sort((keys, x, places), dimension=dim % x.ndim, num_keys=1, is_stable=True)
    return values, places


def _arg(out: Types, x: Any, dim: Any, smallest: bool) -> Any:
    flat = x if dim is not None else lax.reshape(x, (x.size,))
    places = lax.argmin if smallest else lax.argmax
    return lax.reshape(places(flat, dim % flat.ndim if dim is not None else 0, jnp.int64), out[0].shape)


lowers("argmax")(lambda out, x, dim=None, keepdim=False: _arg(out, x, dim, False))
lowers("argmin")(lambda out, x, dim=None, keepdim=False: _arg(out, x, dim, True))


@lowers("max.dim")
def _max_dim(out: Types, x: Any, dim: int, keepdim: bool = False) -> Any:
    return reduced(x, out[0], dim, lowest(x.dtype), lax.max), _arg(out[1:], x, dim, False)


@lowers("min.dim")
def _min_dim(out: Types, x: Any, dim: int, keepdim: bool = False) -> Any:
    return reduced(x, out[0], dim, highest(x.dtype), lax.min), _arg(out[1:], x, dim, True)
