"""Ops that torch_xla computes on the CPU, or wrongly, in ops that it lowers; for `decompositions.py`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from autoshard.frontends.tracing import ops


def median(x: torch.Tensor) -> torch.Tensor:
    """The lower median."""
    return torch.kthvalue(x.reshape(-1), (x.numel() + 1) // 2)[0]


def median_dim(x: torch.Tensor, dim: int, keepdim: bool = False) -> Any:
    """Median along one dim, and its position."""
    return torch.kthvalue(x, (x.shape[dim] + 1) // 2, dim, keepdim)


def searchsorted(
    sorted_sequence: torch.Tensor,
    value: Any,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: torch.Tensor | None = None,
) -> torch.Tensor:
    """Number of smaller (`right`: not larger) elements in a sorted last dim, per value."""
    if sorter is not None:
        sorted_sequence = sorted_sequence.gather(-1, sorter)
    if not isinstance(value, torch.Tensor):
        value = torch.tensor(value, device=sorted_sequence.device)
    if sorted_sequence.dim() > 1 and value.dim():
        sorted_sequence = sorted_sequence.unsqueeze(-2)
    value = value.unsqueeze(-1)
    before = sorted_sequence <= value if right or side == "right" else sorted_sequence < value
    return before.sum(-1).to(torch.int32 if out_int32 else torch.int64)


def divided(a: Any, b: Any, *, rounding: str, **_named: Any) -> torch.Tensor:
    """A quotient of 32- or 64-bit integers, rounded by `floor` or `trunc`.

    It adds up float32 quotients of what is left, until nothing is.
    """
    dtype = torch.result_type(a, b)
    a, b = (each.to(dtype) if isinstance(each, torch.Tensor) else each for each in (a, b))
    if not isinstance(a, torch.Tensor):
        a = torch.full_like(b, a)
    left = a - (torch.remainder(a, b) if rounding == "floor" else torch.fmod(a, b))
    divisor = b.to(torch.float32) if isinstance(b, torch.Tensor) else float(b)
    found = None
    for _ in range(2 if dtype is torch.int32 else 3):  # each leaves 2^-23 of it
        part = (left.to(torch.float32) / divisor).round().to(dtype)
        left = left - part * b
        found = part if found is None else found + part
    assert found is not None
    return found


def remainder_of_number(number: float, divisor: torch.Tensor) -> torch.Tensor:
    """`torch.remainder` of a Python number."""
    return torch.remainder(torch.full_like(divisor, number, dtype=torch.result_type(number, divisor)), divisor)


def logcumsumexp(x: torch.Tensor, dim: int) -> torch.Tensor:
    """By doubling (after step k each position holds the sum of 2^k elements), so that nothing overflows."""
    size = x.shape[dim] if x.dim() else 1
    reach = 1
    while reach < size:
        nothing = torch.full_like(x.narrow(dim, 0, reach), -math.inf)
        shifted = torch.cat([nothing, x.narrow(dim, 0, size - reach)], dim)
        larger = torch.maximum(x, shifted)
        apart = torch.where(larger == -math.inf, 0.0, (x - shifted).abs())
        x = larger + torch.log1p(torch.exp(-apart))
        x = torch.where(larger == -math.inf, larger, x)
        reach *= 2
    return x


def cummin(x: torch.Tensor, dim: int) -> Any:
    """`torch.cummin`, as the maximum in reverse order."""
    turned = torch.bitwise_not if not x.is_floating_point() else torch.neg
    values, places = torch.cummax(turned(x), dim)
    return turned(values), places


def diagonal(x: torch.Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> torch.Tensor:
    """`torch.diagonal`; torch_xla's length is wrong where it begins lower down."""
    dim1, dim2 = dim1 % x.dim(), dim2 % x.dim()
    rows, columns = x.shape[dim1], x.shape[dim2]
    row, column = torch.arange(rows, device=x.device), torch.arange(columns, device=x.device)
    x = x.permute([*(d for d in range(x.dim()) if d not in (dim1, dim2)), dim1, dim2])
    only = torch.where(column == row.unsqueeze(-1) + offset, x, torch.zeros_like(x))
    taken = only.any(-1) if x.dtype == torch.bool else only.sum(-1).to(x.dtype)
    first = max(-offset, 0)
    return taken.narrow(-1, first, max(min(rows - first, columns - max(offset, 0)), 0))


def diagonal_scatter(x: torch.Tensor, src: torch.Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> torch.Tensor:
    """`torch.diagonal_scatter`; torch_xla fails unless these are the last dims."""
    rank, dim1, dim2 = x.dim(), dim1 % x.dim(), dim2 % x.dim()
    rows, columns = x.shape[dim1], x.shape[dim2]
    row, column = torch.arange(rows, device=x.device), torch.arange(columns, device=x.device)
    on = column == row.unsqueeze(-1) + offset
    # Element (i, i + offset) is number i of the diagonal, or i + offset for negative offsets: it starts lower down.
    spread = torch.index_select(src, -1, (row + min(offset, 0)).clamp(0, src.shape[-1] - 1)).unsqueeze(-1)
    order = [d for d in range(rank) if d not in (dim1, dim2)] + [dim1, dim2]
    made = torch.where(on, spread, x.permute(order))
    return made.permute([order.index(d) for d in range(rank)])


def diagonal_backward(grad_output: torch.Tensor, input_sizes: Any, offset: int, dim1: int, dim2: int) -> torch.Tensor:
    """The gradient of a diagonal."""
    zeros = torch.zeros(input_sizes, dtype=grad_output.dtype, device=grad_output.device)
    return diagonal_scatter(zeros, grad_output, offset, dim1, dim2)


def as_strided(
    x: torch.Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> torch.Tensor:
    """The elements at these strides, in XLA's row-major memory order; they may overlap."""
    flat = x.reshape(-1)
    offset = storage_offset or 0
    count = math.prod(size)
    if tuple(stride) == _contiguous(size):
        return flat[offset : offset + count].reshape(size)
    return torch.index_select(flat, 0, _strided(x, size, stride, offset)).reshape(size)


def puts_one(x: torch.Tensor, dim: int, index: torch.Tensor, src: torch.Tensor) -> bool:
    """Whether `torch.scatter` puts one element per row of `dim`, as the gradient of `max` does."""
    one = tuple(1 if at == dim % max(x.dim(), 1) else size for at, size in enumerate(x.shape))
    return x.dim() > 0 and tuple(index.shape) == tuple(src.shape) == one


def put(x: torch.Tensor, dim: int, index: torch.Tensor, src: torch.Tensor) -> torch.Tensor:
    """`torch.scatter` that `puts_one`, elementwise: XLA:GPU copies a shared `x` for all scatters at once."""
    shape = [1] * x.dim()
    shape[dim] = x.shape[dim]
    return torch.where(torch.arange(x.shape[dim], device=x.device).reshape(shape) == index, src, x)


def as_strided_scatter(
    x: torch.Tensor, src: torch.Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> torch.Tensor:
    """Replace the elements at these strides by `src`."""
    flat, offset, count = x.reshape(-1), storage_offset or 0, math.prod(size)
    if tuple(stride) == _contiguous(size):
        return torch.slice_scatter(flat, src.reshape(-1), 0, offset, offset + count).reshape(x.shape)
    return flat.index_copy(0, _strided(x, size, stride, offset), src.reshape(-1)).reshape(x.shape)


def _strided(x: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int) -> torch.Tensor:
    """Memory offsets of strided elements."""
    at = torch.full((1,), offset, device=x.device)
    for extent, step in zip(size, stride, strict=True):
        at = at.unsqueeze(-1) + torch.arange(extent, device=x.device) * step
    return at.reshape(-1)


def masked_scatter_backward(grad_output: torch.Tensor, mask: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """The gradient of the source of a masked scatter; unused elements have none."""
    count = math.prod(sizes)
    taken = mask.expand(grad_output.shape).reshape(-1)
    place = torch.where(taken, torch.cumsum(taken.to(torch.int64), 0) - 1, count)
    spread = torch.where(taken, grad_output.reshape(-1), torch.zeros_like(grad_output.reshape(-1)))
    return grad_output.new_zeros(count + 1).index_add(0, place, spread)[:count].reshape(sizes)


def _contiguous(size: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides."""
    return tuple(math.prod(size[dim + 1 :]) for dim in range(len(size)))


def cholesky_ex(x: torch.Tensor, *, upper: bool = False, check_errors: bool = False) -> Any:
    """The factor, and an error code of 0: XLA gives NaN on failure."""
    made = torch.ops.aten.cholesky.default(x, upper)
    return made, torch.zeros(x.shape[:-2], dtype=torch.int32, device=x.device)


def solve_triangular(
    a: torch.Tensor, b: torch.Tensor, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> torch.Tensor:
    """X with a X = b, or X a = b where not `left`; batched systems by products, whose batch can be split.

    XLA's partitioners split its triangular solve along no dim, batch dims included; its own expansion also inverts
    blocks and multiplies.
    """
    if not left:
        return solve_triangular(a.mT, b.mT, upper=not upper, unitriangular=unitriangular).mT
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    a, b = a.expand(*batch, *a.shape[-2:]), b.expand(*batch, *b.shape[-2:])
    if batch.numel() > 1:
        lower = _inverse_of_lower(a.mT if upper else a, unitriangular)
        return _product(lower.mT if upper else lower, b)
    solved: torch.Tensor = torch.ops.aten.triangular_solve.default(b, a, upper, False, unitriangular)[0]
    return solved


def cholesky_solve(b: torch.Tensor, factor: torch.Tensor, upper: bool = False) -> torch.Tensor:
    """X with A X = b, of A's Cholesky factor."""
    lower = factor.mT if upper else factor
    return solve_triangular(lower.mT, solve_triangular(lower, b, upper=False), upper=True)


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Batched matrix product."""
    batch = "".join(chr(ord("a") + dim) for dim in range(a.dim() - 2))
    return ops.einsum(f"{batch}xy,{batch}yz->{batch}xz", a, b)


def _inverse_of_lower(a: torch.Tensor, unit: bool) -> torch.Tensor:
    """Inverses of the lower triangles of `a`, `[*batch, n, n]`, by blocks of doubling size.

    As stable as substitution (Du Croz and Higham, "Stability of methods for matrix inversion", 1992, method 2C).
    """
    n = a.shape[-1]
    size = 1 << (n - 1).bit_length()
    if size > n:
        a = torch.nn.functional.pad(a, [0, size - n, 0, size - n])
    row = torch.arange(size, device=a.device)
    diagonal = torch.where(row.unsqueeze(-1) == row, a, torch.zeros_like(a)).sum(-1)
    ones = torch.ones_like(diagonal)
    made = (1 / (ones if unit else torch.where(row < n, diagonal, ones))).unsqueeze(-1).unsqueeze(-1)
    half = 1
    while half < size:
        blocks = size // (2 * half)
        at = torch.arange(blocks, device=a.device)
        own = (at.unsqueeze(-1) == at).reshape(blocks, 1, blocks, 1)
        parts = a.reshape(*a.shape[:-2], blocks, 2 * half, blocks, 2 * half)
        below = torch.where(own, parts, torch.zeros_like(parts)).sum(-2)[..., half:, :half]
        pairs = made.reshape(*a.shape[:-2], blocks, 2, half, half)
        first, second = pairs.select(-3, 0), pairs.select(-3, 1)
        left = -_product(_product(second, below), first)
        made = torch.cat([torch.cat([first, torch.zeros_like(first)], -1), torch.cat([left, second], -1)], -2)
        half *= 2
    return made.squeeze(-3).narrow(-2, 0, n).narrow(-1, 0, n)


def huber_loss_backward(
    grad_output: torch.Tensor, self: torch.Tensor, target: torch.Tensor, reduction: int, delta: float
) -> torch.Tensor:
    """Gradient of `F.huber_loss`: the clamped difference; reduction 1 is the mean."""
    slope = (self - target).clamp(-delta, delta) * grad_output
    return slope / self.numel() if reduction == 1 else slope


MAX_SQUARINGS = 16
"""Of a matrix exponential; it is right for matrices whose 1-norm is at most 2**16."""
TAYLOR_DEGREE = 15
"""Of a matrix exponential: what is left out is below 1/16! where the 1-norm is at most 1."""


def matrix_exp(input: torch.Tensor) -> Any:
    """`torch.matrix_exp` by scaling, a Taylor polynomial and squaring, as often as each matrix needs.

    Args:
        input: [*batch, n, n].
    """
    if input.dim() < 2 or not input.is_floating_point():
        return NotImplemented
    wide = input.to(torch.promote_types(input.dtype, torch.float32))
    norm = wide.detach().abs().sum(-2).amax(-1)[..., None, None]
    scale, squared = torch.ones_like(norm), []
    for _ in range(MAX_SQUARINGS):
        squared.append(norm * scale > 1)
        scale = torch.where(squared[-1], scale / 2, scale)
    x = wide * scale
    powers = [torch.eye(x.shape[-1], dtype=x.dtype, device=x.device).expand(x.shape), x]
    while len(powers) < 5:
        powers.append(powers[-1] @ x)
    made = x
    for first in range(TAYLOR_DEGREE // 4 * 4, -1, -4):
        terms = sum(powers[i] / math.factorial(first + i) for i in range(4))
        made = terms if first == TAYLOR_DEGREE // 4 * 4 else made @ powers[4] + terms
    for needed in reversed(squared):
        made = torch.where(needed, made @ made, made)
    return made.to(input.dtype)


def householder_product(input: torch.Tensor, tau: torch.Tensor) -> Any:
    """`torch.linalg.householder_product`, in the compact form I - V T V' (Schreiber and Van Loan, 1989).

    Args:
        input: [*batch, m, n], whose columns below the diagonal are the reflections' vectors.
        tau: [*batch, k].
    """
    if not input.is_floating_point():
        return NotImplemented
    (m, n), k = input.shape[-2:], tau.shape[-1]
    unit = torch.eye(m, max(n, k), dtype=input.dtype, device=input.device)
    vectors = input[..., :k].tril(-1) + unit[:, :k]
    between = torch.eye(k, dtype=input.dtype, device=input.device) + (
        tau.unsqueeze(-1) * (vectors.mT @ vectors).triu(1)
    )
    right = tau.unsqueeze(-1) * (vectors.mT @ unit[:, :n])
    return unit[:, :n] - vectors @ torch.linalg.solve_triangular(between, right, upper=True, unitriangular=True)
