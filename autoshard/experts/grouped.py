"""Products of rows that are sorted into groups with a matrix per group.

| platform | how |
|---|---|
| TPU | jax's Pallas megablox: XLA's ragged dot is refused by GSPMD's partitioner |
| GPU | Triton kernels written in Pallas: XLA would write a ragged dot as products of all rows with all matrices |
| CPU | `jax.lax.ragged_dot_general`, which does so |

Rows behind the last group belong to none: what they become is undefined.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any, NamedTuple

from autoshard.regions.kernel import Platform

_WARPS, _STAGES = 8, 3
_ROWS, _COLUMNS, _DEPTH = 128, 128, 64
"""Tile of a program of a Triton kernel, and how much it contracts at once."""
_LEAST = 128
"""Fewest rows of a tile of megablox."""


class Groups(NamedTuple):
    """How rows are grouped.

    Attributes:
        sizes: rows of each group, int32.
        ways: one row in so many is expected to belong to a group.
    """

    sizes: Any
    ways: int = 1


def product(rows: Any, matrices: Any, groups: Groups, platform: Platform, *, across: bool = False) -> Any:
    """Each row times its group's matrix, or its transpose.

    Args:
        rows: `(m, k)`, those of group 0 first.
        matrices: `(groups, n, k)`; `(groups, k, n)` where `across`.
        groups: of the rows.
        platform: whose kernel.
        across: contract the matrices' middle dim.

    Returns:
        `(m, n)`.
    """
    from jax import lax

    if platform == "tpu":
        return _megablox_product(rows, matrices, groups, across)
    if platform == "gpu":
        return _triton_product(rows, matrices, groups, across)
    dims = lax.RaggedDotDimensionNumbers((((1,), (1 if across else 2,)), ((), ())), (0,), (0,))
    return lax.ragged_dot_general(rows, matrices, groups.sizes, dims)


def outer(one: Any, other: Any, groups: Groups, platform: Platform) -> Any:
    """Per group the sum over its rows of outer products: `(m, n)` and `(m, k)` give `(groups, n, k)`."""
    from jax import lax

    if platform == "tpu":
        return _megablox_outer(one, other, groups)
    if platform == "gpu":
        return _triton_outer(one, other, groups)
    dims = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())
    return lax.ragged_dot_general(one, other, groups.sizes, dims)


NAMED = re.compile(r"grouped_(?:product|outer)_of_(\d+)")
"""Names of kernels that say `Groups.ways`: XLA and who reads its text cannot see how many rows count."""


def named(what: str, ways: int) -> str:
    """Such a name: of a Triton kernel, or a frontend attribute of a Pallas call."""
    return f"{what}_of_{ways}"


# ---- TPU: megablox -------------------------------------------------------------------------------------------------


def _megablox_product(rows: Any, matrices: Any, groups: Groups, across: bool, interpret: bool = False) -> Any:
    from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm
    from jax.experimental.xla_metadata import set_xla_metadata

    made = matrices.shape[2 if across else 1]
    padded = _padded(rows)
    tiling = _megablox_tiling(padded, rows.shape[1], made)
    with set_xla_metadata(**{named("grouped_product", groups.ways): "1"}):
        found = gmm(padded, matrices, groups.sizes, rows.dtype, tiling, transpose_rhs=not across, interpret=interpret)
    return found[: rows.shape[0]]


def _megablox_outer(one: Any, other: Any, groups: Groups, interpret: bool = False) -> Any:
    from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm
    from jax.experimental.xla_metadata import set_xla_metadata

    padded = _padded(one)
    tiling = _megablox_tiling(padded, one.shape[1], other.shape[1])
    with set_xla_metadata(**{named("grouped_outer", groups.ways): "1"}):
        return tgmm(padded.T, _padded(other), groups.sizes, one.dtype, tiling, interpret=interpret)


def _padded(rows: Any) -> Any:
    """With so many rows that a tile of `_LEAST` divides them."""
    import jax.numpy as jnp

    more = -rows.shape[0] % _LEAST
    return jnp.pad(rows, ((0, more), (0, 0))) if more else rows


def _megablox_tiling(rows: Any, depth: int, made: int) -> tuple[int, int, int]:
    """Rows, contracted and made dims of a tile: what fits on chip twice."""
    of_rows = next(size for size in (4 * _LEAST, 2 * _LEAST, _LEAST) if rows.shape[0] % size == 0)
    most = 2048 // rows.dtype.itemsize
    return of_rows, min(depth, most), min(made, most)


# ---- GPU: Triton ---------------------------------------------------------------------------------------------------


def _tiles(sizes: Any, most: int) -> tuple[Any, Any, Any]:
    """Of each of `most` tiles of `_ROWS` rows its group, its first row and the group's end; tiles of none are empty."""
    import jax.numpy as jnp

    ends = jnp.cumsum(sizes)
    number = (sizes + _ROWS - 1) // _ROWS
    last = jnp.cumsum(number)
    tile = jnp.arange(most, dtype=jnp.int32)
    group = jnp.minimum((tile[:, None] >= last[None]).sum(1), sizes.size - 1).astype(jnp.int32)
    first = (ends - sizes)[group] + (tile - (last - number)[group]) * _ROWS
    end = jnp.where(tile < last[-1], ends[group], 0)
    return group, first.astype(jnp.int32), end.astype(jnp.int32)


def _call(kernel: Any, ways: int, grid: tuple[int, ...], shape: Any, dtype: Any, operands: Any, interpret: bool) -> Any:
    import jax
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    return pl.pallas_call(
        kernel,
        grid=grid,
        out_shape=jax.ShapeDtypeStruct(shape, dtype),
        compiler_params=triton.CompilerParams(num_warps=_WARPS, num_stages=_STAGES),
        interpret=interpret,
        name=named(kernel.func.__name__.strip("_"), ways),
    )(*operands)


def _triton_product(rows: Any, matrices: Any, groups: Groups, across: bool, interpret: bool = False) -> Any:
    from jax.experimental import pallas as pl

    made = matrices.shape[2 if across else 1]
    most = pl.cdiv(rows.shape[0], _ROWS) + groups.sizes.size
    operands = (*_tiles(groups.sizes, most), rows, matrices)
    kernel = partial(_grouped_product, across=across)
    grid, shape = (most, pl.cdiv(made, _COLUMNS)), (rows.shape[0], made)
    return _call(kernel, groups.ways, grid, shape, rows.dtype, operands, interpret)


def _grouped_product(groups: Any, firsts: Any, ends: Any, rows: Any, matrices: Any, out: Any, *, across: bool) -> None:
    """One tile of rows times the same columns of its group's matrix."""
    import jax.numpy as jnp
    from jax import lax
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    depth, width = rows.shape[1], out.shape[1]
    group, first, end = groups[pl.program_id(0)], firsts[pl.program_id(0)], ends[pl.program_id(0)]
    own = (first + jnp.arange(_ROWS) < end)[:, None]
    column = pl.program_id(1) * _COLUMNS
    columns = pl.ds(column, _COLUMNS)
    inside = column + jnp.arange(_COLUMNS) < width

    def add(step: Any, total: Any) -> Any:
        at = pl.ds(step * _DEPTH, _DEPTH)
        deep = step * _DEPTH + jnp.arange(_DEPTH) < depth
        left = triton.load(rows.at[pl.ds(first, _ROWS), at], mask=own & deep[None], other=0.0)
        place, allowed = ((at, columns), deep[:, None] & inside[None])
        if not across:
            place, allowed = ((columns, at), inside[:, None] & deep[None])
        right = triton.load(matrices.at[(group, *place)], mask=allowed, other=0.0)
        return total + triton.dot(left, right if across else right.T)

    @pl.when(first < end)  # type: ignore[untyped-decorator]
    def _() -> None:
        total = lax.fori_loop(0, pl.cdiv(depth, _DEPTH), add, jnp.zeros((_ROWS, _COLUMNS), jnp.float32))
        triton.store(out.at[pl.ds(first, _ROWS), columns], total.astype(out.dtype), mask=own & inside[None])


def _triton_outer(one: Any, other: Any, groups: Groups, interpret: bool = False) -> Any:
    import jax.numpy as jnp
    from jax.experimental import pallas as pl

    sizes, ends = groups.sizes, jnp.cumsum(groups.sizes)
    shape = (sizes.size, one.shape[1], other.shape[1])
    grid = (sizes.size, pl.cdiv(shape[1], _ROWS), pl.cdiv(shape[2], _COLUMNS))
    operands = ((ends - sizes).astype(jnp.int32), ends.astype(jnp.int32), one, other)
    return _call(partial(_grouped_outer), groups.ways, grid, shape, one.dtype, operands, interpret)


def _grouped_outer(firsts: Any, ends: Any, one: Any, other: Any, out: Any) -> None:
    """One tile of a group's sum of outer products."""
    import jax.numpy as jnp
    from jax import lax
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    group = pl.program_id(0)
    first, end = firsts[group], ends[group]
    left_at, right_at = pl.program_id(1) * _ROWS, pl.program_id(2) * _COLUMNS
    left_in = left_at + jnp.arange(_ROWS) < one.shape[1]
    right_in = right_at + jnp.arange(_COLUMNS) < other.shape[1]

    def add(step: Any, total: Any) -> Any:
        row = first + step * _DEPTH
        own = (row + jnp.arange(_DEPTH) < end)[:, None]
        rows = pl.ds(row, _DEPTH)
        left = triton.load(one.at[rows, pl.ds(left_at, _ROWS)], mask=own & left_in[None], other=0.0)
        right = triton.load(other.at[rows, pl.ds(right_at, _COLUMNS)], mask=own & right_in[None], other=0.0)
        return total + triton.dot(left.T, right)

    steps = lax.div(end - first + (_DEPTH - 1), jnp.int32(_DEPTH))
    total = lax.fori_loop(0, steps, add, jnp.zeros((_ROWS, _COLUMNS), jnp.float32))
    place = (group, pl.ds(left_at, _ROWS), pl.ds(right_at, _COLUMNS))
    triton.store(out.at[place], total.astype(out.dtype), mask=left_in[:, None] & right_in[None])
