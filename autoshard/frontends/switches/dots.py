"""Products that keep the dims of their operands: linear layers, matmul, attention."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from autoshard.frontends.switches.handlers import UNTOUCHED, on_xla, replaces
from autoshard.frontends.tracing import ops


def autocasts() -> bool:
    """Whether autocast is on for XLA devices; without torch_xla too, see `autocast.py`."""
    return bool(torch.is_autocast_enabled("xla"))


def same_dtype(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Cast the operands of a dot as autocast does."""
    if autocasts():
        dtype = torch.get_autocast_dtype("xla")
        return [t.to(dtype) if t.is_floating_point() else t for t in tensors]
    return list(tensors)


_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


@replaces("linear", F.linear)
def _linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
    if weight.dim() != 2 or input.dim() < 1:
        return UNTOUCHED
    if input.shape[-1] != weight.shape[1]:
        raise RuntimeError(
            f"linear of {weight.shape[1]} input features was given a tensor of shape {tuple(input.shape)}, "
            f"whose last dim is {input.shape[-1]}"
        )
    return _project(input, weight, bias, "oi")


def _project(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, weight_dims: str) -> torch.Tensor:
    free = _LETTERS[15 : 15 + input.dim() - 1]
    input, weight = same_dtype(input, weight)
    out = ops.einsum(f"{free}i,{weight_dims}->{free}o", input, weight, bias is not None)
    return out if bias is None else out + bias.to(out.dtype)


@contextlib.contextmanager
def conv1d() -> Iterator[None]:
    """Replace transformers' Conv1D.forward, which flattens its input before `addmm`."""
    utilities = sys.modules.get("transformers.pytorch_utils")
    if utilities is None:
        yield
        return
    native = utilities.Conv1D.forward

    def forward(self: Any, x: torch.Tensor) -> Any:
        if not on_xla(x) or x.shape[-1] != self.weight.shape[0]:
            return native(self, x)
        return _project(x, self.weight, self.bias, "io")

    utilities.Conv1D.forward = forward
    try:
        yield
    finally:
        utilities.Conv1D.forward = native


@replaces("matmul", torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__)
def matmul(input: torch.Tensor, other: torch.Tensor) -> Any:
    """`torch.matmul` of at least one tensor of three dims or more, as one dot that keeps its batch dims."""
    a, b = input, other
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        return UNTOUCHED
    if a.dim() < 2 or b.dim() < 2 or max(a.dim(), b.dim()) < 3:
        return UNTOUCHED
    if a.shape[-1] != b.shape[-2] or (a.dtype != b.dtype and not autocasts()):
        return UNTOUCHED
    rank = max(a.dim(), b.dim()) - 2
    batch = _LETTERS[:rank]
    a, a_batch = _drop_broadcast(a, b, batch)
    b, b_batch = _drop_broadcast(b, input, batch)
    if any(input.shape[-3 - n] == 1 == other.shape[-3 - n] for n in range(min(input.dim(), other.dim()) - 2)):
        a, b, a_batch, b_batch = input, other, batch[rank - input.dim() + 2 :], batch[rank - other.dim() + 2 :]
    sizes: dict[str, int] = {}
    for letter, size in (*zip(a_batch, a.shape[:-2], strict=True), *zip(b_batch, b.shape[:-2], strict=True)):
        if sizes.setdefault(letter, size) != size:
            return UNTOUCHED
    a, b = same_dtype(a, b)
    return ops.einsum(f"{a_batch}mk,{b_batch}kn->{batch}mn".translate(_MATRIX), a, b)


_MATRIX = str.maketrans({"m": "M", "k": "K", "n": "N"})


def _drop_broadcast(x: torch.Tensor, other: torch.Tensor, batch: str) -> tuple[torch.Tensor, str]:
    """Drop batch dims of size 1 that `other` broadcasts: dot dims that one operand lacks are its free dims."""
    kept = batch[len(batch) - (x.dim() - 2) :]
    for position in reversed(range(x.dim() - 2)):
        from_right = x.dim() - position
        if x.shape[position] == 1 and other.dim() >= from_right and other.shape[-from_right] != 1:
            x, kept = x.squeeze(position), kept[:position] + kept[position + 1 :]
    return x, kept


@replaces("matmul", torch.einsum)
def _einsum(equation: Any, *operands: Any) -> Any:
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = tuple(operands[0])
    if not isinstance(equation, str) or len(operands) != 2 or "." in equation:
        return UNTOUCHED
    left, arrow, out = equation.replace(" ", "").partition("->")
    parts = left.split(",")
    if len(parts) != 2:
        return UNTOUCHED
    if not arrow:
        out = "".join(sorted(i for i in set(left) - {","} if left.count(i) == 1))
    a, b = parts
    if any(len(set(part)) != len(part) for part in (a, b, out)) or len(a) != operands[0].dim():
        return UNTOUCHED
    if len(b) != operands[1].dim() or any((i in a) + (i in b) + (i in out) < 2 for i in set(a + b + out)):
        return UNTOUCHED
    sizes = dict(zip(a, operands[0].shape, strict=True))
    if any(sizes.get(i, size) != size for i, size in zip(b, operands[1].shape, strict=True)):
        return UNTOUCHED
    x, y = same_dtype(*operands)
    if not x.is_floating_point() and not x.is_complex():
        return _of_integers(x, y, a, b, out)
    return ops.einsum(f"{a},{b}->{out}", x, y)


def _of_integers(x: torch.Tensor, y: torch.Tensor, a: str, b: str, out: str) -> torch.Tensor:
    """An einsum as a product of elements: a TPU has no dot of 64-bit integers."""
    summed = "".join(sorted(set(a + b) - set(out)))
    x, y = (
        each.permute([own.index(i) for i in out + summed if i in own])[
            tuple(slice(None) if i in own else None for i in out + summed)
        ]
        for each, own in ((x, a), (y, b))
    )
    product = x * y
    return product.sum(list(range(len(out), product.dim())), dtype=product.dtype) if summed else product


@replaces("matmul", F.scaled_dot_product_attention)
def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """`F.scaled_dot_product_attention` written out; a query that may read no key attends to nothing, as in torch."""
    if query.dim() < 3 or key.shape[:-3] != query.shape[:-3]:
        return UNTOUCHED
    if enable_gqa and query.shape[-3] != key.shape[-3]:
        groups = query.shape[-3] // key.shape[-3]
        key, value = (t.repeat_interleave(groups, -3) for t in (key, value))
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = matmul(query * scale, key.transpose(-2, -1))
    if scores is UNTOUCHED:
        return UNTOUCHED
    if is_causal:
        allowed = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
        scores = scores.masked_fill(~allowed, -math.inf)
    reads_none = None
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        reads_none = ~attn_mask.any(-1, keepdim=True)
        scores = scores.masked_fill(~(attn_mask | reads_none), -math.inf)
    elif attn_mask is not None:
        reads_none = (attn_mask == -math.inf).all(-1, keepdim=True)
        scores = scores + attn_mask.masked_fill(reads_none, 0.0)
    weights = torch.softmax(scores, -1)
    if dropout_p > 0:
        weights = torch.dropout(weights, dropout_p, True)
    out = matmul(weights.to(value.dtype), value)
    return out if reads_none is None else out.masked_fill(reads_none, 0.0)
