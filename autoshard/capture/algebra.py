"""Ops that torch_xla computes on the CPU, or wrongly, written in ops that it lowers: for `decompositions.py`."""

from __future__ import annotations

import math
from typing import Any

import torch


def median(x: torch.Tensor) -> torch.Tensor:
    """The lower one of the two in the middle."""
    return torch.kthvalue(x.reshape(-1), (x.numel() + 1) // 2)[0]


def median_dim(x: torch.Tensor, dim: int, keepdim: bool = False) -> Any:
    """Along one dim, and where it lies."""
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
    """How many elements of the last dim of a sorted sequence are smaller (`right`: not larger) than each value."""
    if sorter is not None:
        sorted_sequence = sorted_sequence.gather(-1, sorter)
    if not isinstance(value, torch.Tensor):
        value = torch.tensor(value, device=sorted_sequence.device)
    if sorted_sequence.dim() > 1 and value.dim():
        sorted_sequence = sorted_sequence.unsqueeze(-2)
    value = value.unsqueeze(-1)
    before = sorted_sequence <= value if right or side == "right" else sorted_sequence < value
    return before.sum(-1).to(torch.int32 if out_int32 else torch.int64)


def logcumsumexp(x: torch.Tensor, dim: int) -> torch.Tensor:
    """By doubling: after step k each position holds the sum of the 2^k before it, so that nothing overflows."""
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


def diagonal(x: torch.Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> torch.Tensor:
    """A diagonal of two dims, as a last dim; torch_xla gives another length where it begins lower down."""
    dim1, dim2 = dim1 % x.dim(), dim2 % x.dim()
    rows, columns = x.shape[dim1], x.shape[dim2]
    row, column = torch.arange(rows, device=x.device), torch.arange(columns, device=x.device)
    x = x.permute([*(d for d in range(x.dim()) if d not in (dim1, dim2)), dim1, dim2])
    only = torch.where(column == row.unsqueeze(-1) + offset, x, torch.zeros_like(x))
    taken = only.any(-1) if x.dtype == torch.bool else only.sum(-1).to(x.dtype)
    first = max(-offset, 0)
    return taken.narrow(-1, first, max(min(rows - first, columns - max(offset, 0)), 0))


def diagonal_scatter(x: torch.Tensor, src: torch.Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> torch.Tensor:
    """`x` with `src` on a diagonal of two of its dims; torch_xla fails where these are not the last ones."""
    rank, dim1, dim2 = x.dim(), dim1 % x.dim(), dim2 % x.dim()
    rows, columns = x.shape[dim1], x.shape[dim2]
    row, column = torch.arange(rows, device=x.device), torch.arange(columns, device=x.device)
    on = column == row.unsqueeze(-1) + offset
    # Element (i, i + offset) is number i of the diagonal, or i + offset where that is negative: it starts lower down.
    spread = torch.index_select(src, -1, (row + min(offset, 0)).clamp(0, src.shape[-1] - 1)).unsqueeze(-1)
    order = [d for d in range(rank) if d not in (dim1, dim2)] + [dim1, dim2]
    made = torch.where(on, spread, x.permute(order))
    return made.permute([order.index(d) for d in range(rank)])


def diagonal_backward(grad_output: torch.Tensor, input_sizes: Any, offset: int, dim1: int, dim2: int) -> torch.Tensor:
    """The gradient of a diagonal."""
    zeros = torch.zeros(input_sizes, dtype=grad_output.dtype, device=grad_output.device)
    return diagonal_scatter(zeros, grad_output, offset, dim1, dim2)


def cholesky_ex(x: torch.Tensor, *, upper: bool = False, check_errors: bool = False) -> Any:
    """The factor, and that nothing went wrong: XLA gives numbers that are none where something did."""
    made = torch.ops.aten.cholesky.default(x, upper)
    return made, torch.zeros(x.shape[:-2], dtype=torch.int32, device=x.device)


def solve_triangular(
    a: torch.Tensor, b: torch.Tensor, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> torch.Tensor:
    """X with a X = b, or X a = b where not `left`."""
    if not left:
        return solve_triangular(a.mT, b.mT, upper=not upper, unitriangular=unitriangular).mT
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    a, b = a.expand(*batch, *a.shape[-2:]), b.expand(*batch, *b.shape[-2:])
    solved: torch.Tensor = torch.ops.aten.triangular_solve.default(b, a, upper, False, unitriangular)[0]
    return solved


def huber_loss_backward(
    grad_output: torch.Tensor, self: torch.Tensor, target: torch.Tensor, reduction: int, delta: float
) -> torch.Tensor:
    """Of `F.huber_loss`: the difference, no longer than `delta`; reduction 1 is the mean."""
    slope = (self - target).clamp(-delta, delta) * grad_output
    return slope / self.numel() if reduction == 1 else slope
