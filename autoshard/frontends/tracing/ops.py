"""Custom ops used by capture switches: one annotatable op where torch_xla would merge dims.

- `autoshard::einsum(equation, a, b)`: one XLA dot_general, no reshape; both gradients are einsums again. (torch_xla's
  own `torch.einsum` passes a dispatch mode unseen, so it can carry neither label nor annotation.)
- `autoshard::embedding(weight, indices, padding_idx)` and its gradient: a gather and a scatter-add that keep the dims
  of `indices`, where torch_xla's embedding flattens them.
- `autoshard::barrier(values, after)`: an `optimization_barrier`: returns `values`, available no earlier than `after`
  (`checkpoints.py`).

They are registered with `torch.library.Library` and an autograd kernel, which costs no import of torch's compiler.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

_library = torch.library.Library("autoshard", "FRAGMENT")
_library.define("einsum(str equation, Tensor a, Tensor b) -> Tensor")
_library.define("embedding(Tensor weight, Tensor indices, int padding_idx) -> Tensor")
_library.define("embedding_grad(Tensor grad, Tensor indices, int rows, int padding_idx) -> Tensor")
_library.define("barrier(Tensor[] values, Tensor[] after) -> Tensor[]")


DimPair = tuple[list[int], list[int]]


@cache
def dot_dims(equation: str) -> tuple[tuple[DimPair, DimPair], list[int] | None]:
    """The dot_general of `"bsi,oi->bso"`: contracting dims of a and b, batch dims of both, permutation of its result.

    Every index must be in two of the three operands. The permutation is None when none is needed.
    """
    a, b, out = equation.replace(",", "->").split("->")
    batch = [i for i in a if i in b and i in out]
    contracted = [i for i in a if i in b and i not in out]
    natural = batch + [i for i in a if i not in b] + [i for i in b if i not in a]
    dims = (
        ([a.index(i) for i in contracted], [b.index(i) for i in contracted]),
        ([a.index(i) for i in batch], [b.index(i) for i in batch]),
    )
    order = [natural.index(i) for i in out]
    return dims, None if order == sorted(order) else order


def gradient_equations(equation: str) -> tuple[str, str]:
    """The equations of both gradients, to be called with (gradient, b) and (gradient, a).

    The result's free dims come from the operand that is named first, so that no transpose follows the dot.
    """
    a, b, out = equation.replace(",", "->").split("->")
    return f"{out},{b}->{a}", f"{out},{a}->{b}"


def _einsum_any(equation: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.einsum(equation, a, b)


def _einsum_xla(equation: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    import torch_xla

    dims, order = dot_dims(equation)
    out = torch_xla._XLAC._xla_dot_general(a, b, dims)
    return out if order is None else out.permute(order)


class _Einsum(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, equation: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        ctx.equation = equation
        ctx.save_for_backward(a, b)
        with torch._C._AutoDispatchBelowAutograd():
            out: torch.Tensor = torch.ops.autoshard.einsum(equation, a, b)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        a, b = (each.conj() if each.is_complex() else each for each in ctx.saved_tensors)
        for_a, for_b = gradient_equations(ctx.equation)
        grad_a = torch.ops.autoshard.einsum(for_a, grad, b) if ctx.needs_input_grad[1] else None
        grad_b = _product(for_b, grad, a) if ctx.needs_input_grad[2] else None
        return None, grad_a, grad_b


def _product(equation: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`einsum(equation, a, b)` with operands ordered so that the result needs no transpose, where possible."""
    if dot_dims(equation)[1] is not None:
        first, second, out = equation.replace(",", "->").split("->")
        swapped = f"{second},{first}->{out}"
        if dot_dims(swapped)[1] is None:
            equation, a, b = swapped, b, a
    out_tensor: torch.Tensor = torch.ops.autoshard.einsum(equation, a, b)
    return out_tensor


def _einsum_autograd(equation: str, a: torch.Tensor, b: torch.Tensor) -> Any:
    if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad):
        return _Einsum.apply(equation, a, b)
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.autoshard.einsum(equation, a, b)


def _embedding(weight: torch.Tensor, indices: torch.Tensor, padding_idx: int) -> torch.Tensor:
    return weight[indices]


def _embedding_grad(grad: torch.Tensor, indices: torch.Tensor, rows: int, padding_idx: int) -> torch.Tensor:
    if padding_idx >= 0:
        grad = torch.where((indices == padding_idx).unsqueeze(-1), torch.zeros_like(grad), grad)
    return torch.zeros((rows, grad.shape[-1]), dtype=grad.dtype, device=grad.device).index_put(
        (indices,), grad, accumulate=True
    )


class _Embedding(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, indices: torch.Tensor, padding_idx: int) -> torch.Tensor:
        ctx.rows, ctx.padding_idx = weight.shape[0], padding_idx
        ctx.save_for_backward(indices)
        with torch._C._AutoDispatchBelowAutograd():
            out: torch.Tensor = torch.ops.autoshard.embedding(weight, indices, padding_idx)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        (indices,) = ctx.saved_tensors
        return torch.ops.autoshard.embedding_grad(grad, indices, ctx.rows, ctx.padding_idx), None, None


def _embedding_autograd(weight: torch.Tensor, indices: torch.Tensor, padding_idx: int) -> Any:
    if torch.is_grad_enabled() and weight.requires_grad:
        return _Embedding.apply(weight, indices, padding_idx)
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.autoshard.embedding(weight, indices, padding_idx)


class _EmbeddingGrad(torch.autograd.Function):  # type: ignore[misc]
    """Linear in the gradient: what differentiates gradients (a penalty on them, MAML) looks rows up again."""

    @staticmethod
    def forward(ctx: Any, grad: torch.Tensor, indices: torch.Tensor, rows: int, padding_idx: int) -> torch.Tensor:
        ctx.padding_idx = padding_idx
        ctx.save_for_backward(indices)
        with torch._C._AutoDispatchBelowAutograd():
            out: torch.Tensor = torch.ops.autoshard.embedding_grad(grad, indices, rows, padding_idx)
        return out

    @staticmethod
    def backward(ctx: Any, table: torch.Tensor) -> tuple[Any, ...]:
        (indices,) = ctx.saved_tensors
        grad = torch.ops.autoshard.embedding(table, indices, ctx.padding_idx)
        if ctx.padding_idx >= 0:
            grad = grad.masked_fill((indices == ctx.padding_idx).unsqueeze(-1), 0.0)
        return grad, None, None, None


def _embedding_grad_autograd(grad: torch.Tensor, indices: torch.Tensor, rows: int, padding_idx: int) -> Any:
    if torch.is_grad_enabled() and grad.requires_grad:
        return _EmbeddingGrad.apply(grad, indices, rows, padding_idx)
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.autoshard.embedding_grad(grad, indices, rows, padding_idx)


def _barrier_any(values: list[torch.Tensor], after: list[torch.Tensor]) -> list[torch.Tensor]:
    return [value.clone() for value in values]


def _barrier_xla(values: list[torch.Tensor], after: list[torch.Tensor]) -> list[torch.Tensor]:
    import torch_xla

    made = [value.clone() for value in (*values, *after)]
    torch_xla._XLAC._xla_optimization_barrier_(made)
    return made[: len(values)]


_library.impl("einsum", _einsum_any, "CompositeExplicitAutograd")
_library.impl("einsum", _einsum_xla, "XLA")
_library.impl("einsum", _einsum_autograd, "Autograd")
_library.impl("embedding", _embedding, "CompositeExplicitAutograd")
_library.impl("embedding", _embedding_autograd, "Autograd")
_library.impl("embedding_grad", _embedding_grad, "CompositeExplicitAutograd")
_library.impl("embedding_grad", _embedding_grad_autograd, "Autograd")
_library.impl("barrier", _barrier_any, "CompositeExplicitAutograd")
_library.impl("barrier", _barrier_xla, "XLA")


_biased = False


def einsum(equation: str, a: torch.Tensor, b: torch.Tensor, biased: bool = False) -> torch.Tensor:
    """`torch.einsum` of two operands whose every index is in two of the three tensors, as one dot.

    `biased`: a bias is added to the result next.
    """
    global _biased
    _biased = biased
    return _product(equation, a, b)


def instead_of(op: Any, args: tuple[Any, ...]) -> tuple[Sequence[Any], tuple[Any, ...]]:
    """The overloads of aten of which eager PyTorch runs one where an op of ours runs, and their tensors."""
    if op is torch.ops.autoshard.einsum.default:
        together = bool(dot_dims(args[0])[0][1][0])
        found = torch.ops.aten.bmm if together else torch.ops.aten.addmm if _biased else torch.ops.aten.mm
        return (found.default,), args[1:]
    if op is torch.ops.autoshard.attention.default:
        kinds = ("flash", "efficient", "cudnn", "fused")
        names = (f"_scaled_dot_product_{kind}_attention" for kind in kinds)
        packets = [getattr(torch.ops.aten, name) for name in names if hasattr(torch.ops.aten, name)]
        return [packet.default for packet in packets], args[:3]
    return (), ()


def embedding(weight: torch.Tensor, indices: torch.Tensor, padding_idx: int | None = None) -> torch.Tensor:
    """Rows of `weight` of shape `(rows, features)`: shape `indices.shape + (features,)`."""
    out: torch.Tensor = torch.ops.autoshard.embedding(weight, indices, -1 if padding_idx is None else padding_idx)
    return out


def barrier(values: list[torch.Tensor], after: list[torch.Tensor]) -> list[torch.Tensor]:
    """The values behind a barrier that also waits for `after`; no gradients."""
    out: list[torch.Tensor] = torch.ops.autoshard.barrier(values, after)
    return out
