"""Attention as two torch ops, `autoshard::attention` and `autoshard::attention_grad` (`form.py`).

They are differentiable once. On an XLA device they are what `executed_by` says: a custom call at capture, a region in a
running plan. Elsewhere they are computed as written out here.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from autoshard.attention.form import FORWARD, GRADIENT, Form
from autoshard.frontends.tracing.regions import executed, library, meta

_FEATURES = 8
"""Features of values come in multiples of this on GPUs."""
_MASKED = (
    "Tensor? bias, Tensor? q_segments, Tensor? kv_segments, bool causal, int? window, float scale, float? soft_cap"
)
library.define(f"attention(Tensor q, Tensor k, Tensor v, {_MASKED}) -> (Tensor, Tensor)")
library.define(
    f"attention_grad(Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor grad, {_MASKED})"
    " -> (Tensor, Tensor, Tensor)"
)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    form: Form,
    bias: torch.Tensor | None = None,
    segments: tuple[torch.Tensor, torch.Tensor] | None = None,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The attention of `form.py`, `(out, lse)`, differentiable in q, k, v and sinks.

    Args:
        sinks: f32 `(kv heads, group)`: per head the score of one more key, whose value is 0; the log-sum-exp is then
            over that key too, and has no gradient.
    """
    q_segments, kv_segments = segments or (None, None)
    masked = (bias, q_segments, kv_segments, form.causal, form.window, form.scale, form.soft_cap)
    if sinks is not None:
        made: tuple[torch.Tensor, torch.Tensor] = _WithSinks.apply(q, k, v, sinks, *masked)
        return made
    out, lse = torch.ops.autoshard.attention(q, k, v, *masked)
    return out, lse


def scores(q: torch.Tensor, k: torch.Tensor, *masked: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Masked scores, f32 or f64, `(batch, kv heads, group, queries, keys)`, and those before they are masked."""
    bias, q_segments, kv_segments, causal, window, scale, soft_cap = masked
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    found = torch.einsum("bkgsd,bktd->bkgst", q.to(wide) * scale, k.to(wide))
    capped = found = found if soft_cap is None else soft_cap * torch.tanh(found / soft_cap)
    rows = torch.arange(q.shape[3], device=q.device).unsqueeze(1)
    columns = torch.arange(k.shape[2], device=q.device)
    if causal:
        found = found.masked_fill(columns > rows, float("-inf"))
    if window is not None:
        found = found.masked_fill(rows - columns >= window, float("-inf"))
        if not causal:
            found = found.masked_fill(columns - rows >= window, float("-inf"))
    if q_segments is not None and kv_segments is not None:
        other = q_segments[:, None, None, :, None] != kv_segments[:, None, None, None, :]
        found = found.masked_fill(other, float("-inf"))
    return found if bias is None else found + bias.to(wide), capped


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *masked: Any) -> tuple[torch.Tensor, torch.Tensor]:
    found, _ = scores(q, k, *masked)
    lse = torch.logsumexp(found, -1)
    out = torch.einsum("bkgst,bkte->bkgse", torch.exp(found - _finite(lse)[..., None]), v.to(found.dtype))
    return out.to(q.dtype), lse.to(torch.float32)


def _finite(lse: torch.Tensor) -> torch.Tensor:
    """Log-sum-exps with 0 for queries that attend to nothing, whose weights are then 0."""
    return lse.masked_fill(lse == float("-inf"), 0.0)


def _attention_grad(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, grad: torch.Tensor,
    *masked: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    found, capped = scores(q, k, *masked)
    wide, (scale, soft_cap) = found.dtype, masked[-2:]
    weights = torch.exp(found - _finite(lse.to(wide))[..., None])
    grad, q_wide, k_wide = grad.to(wide), q.to(wide), k.to(wide)
    delta = (grad * out.to(wide)).sum(-1, keepdim=True)
    slopes = weights * (torch.einsum("bkgse,bkte->bkgst", grad, v.to(wide)) - delta) * scale
    if soft_cap is not None:
        slopes = slopes * (1 - (capped / soft_cap).square())
    dq = torch.einsum("bkgst,bktd->bkgsd", slopes, k_wide)
    dk = torch.einsum("bkgst,bkgsd->bktd", slopes, q_wide)
    dv = torch.einsum("bkgst,bkgse->bkte", weights, grad)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


class _Attention(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, *masked: Any) -> tuple[torch.Tensor, torch.Tensor]:
        with torch._C._AutoDispatchBelowAutograd():
            out, lse = torch.ops.autoshard.attention(q, k, v, *masked)
        ctx.options = masked[3:]
        ctx.save_for_backward(q, k, v, out, lse, *masked[:3])
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: torch.Tensor | None, of_lse: torch.Tensor | None) -> tuple[Any, ...]:
        q, k, v, out, lse, *masks = ctx.saved_tensors
        grad = torch.zeros_like(out) if grad is None else grad
        values = v.shape[-1]
        if of_lse is not None:  # a feature more, which is 0 of all values, adds it to each query's sum of out * grad
            v = F.pad(v, (0, _FEATURES))
            out = F.pad(F.pad(out, (0, 1), value=1.0), (0, _FEATURES - 1))
            grad = F.pad(torch.cat([grad, -of_lse[..., None].to(grad.dtype)], -1), (0, _FEATURES - 1))
        dq, dk, dv = torch.ops.autoshard.attention_grad(q, k, v, out, lse, grad, *masks, *ctx.options)
        return dq, dk, dv[..., :values], *[None] * 7


class _WithSinks(torch.autograd.Function):  # type: ignore[misc]
    """The op, and its result scaled by the share that sinks leave of each query's weights.

    Under the log-sum-exp over keys and sink, the op's gradient is that of the scaled result.
    """

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, sinks: Any, *masked: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = torch.ops.autoshard.attention(q, k, v, *masked)
        total = torch.logaddexp(lse, sinks[..., None])
        made = (out * torch.exp(lse - total)[..., None]).to(out.dtype)
        ctx.options = masked[3:]
        ctx.save_for_backward(q, k, v, sinks, made, total, *masked[:3])
        ctx.mark_non_differentiable(total)
        return made, total

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> tuple[Any, ...]:
        q, k, v, sinks, made, total, *masks = ctx.saved_tensors
        of_keys = torch.ops.autoshard.attention_grad(q, k, v, made, total, grad, *masks, *ctx.options)
        lost = (grad.to(sinks.dtype) * made).sum(-1)
        of_sinks = -(torch.exp(sinks[..., None] - total) * lost).sum((0, 3))
        return *of_keys, of_sinks, *[None] * 7


def _differentiable(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *masked: Any) -> Any:
    if torch.is_grad_enabled() and any(each.requires_grad for each in (q, k, v)):
        return _Attention.apply(q, k, v, *masked)
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.autoshard.attention(q, k, v, *masked)


def _form(bias: Any, q_segments: Any, kv_segments: Any, causal: bool, window: Any, scale: float, cap: Any) -> Form:
    return Form(scale, causal, window, bias is not None, q_segments is not None, cap)


def _attention_xla(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *masked: Any) -> Any:
    like = (meta(q, v.shape[-1]), meta(q).new_empty(q.shape[:-1], dtype=torch.float32))
    operands = [each for each in (q, k, v, *masked[:3]) if each is not None]
    made = executed(FORWARD, _form(*masked), operands, like)
    return _attention(q, k, v, *masked) if made is None else made


def _attention_grad_xla(q: Any, k: Any, v: Any, out: Any, lse: Any, grad: Any, *masked: Any) -> Any:
    operands = [each for each in (q, k, v, *masked[:3], out, lse, grad) if each is not None]
    made = executed(GRADIENT, _form(*masked), operands, (meta(q), meta(k), meta(v)))
    return _attention_grad(q, k, v, out, lse, grad, *masked) if made is None else made


library.impl("attention", _attention, "CompositeExplicitAutograd")
library.impl("attention", _attention_xla, "XLA")
library.impl("attention", _differentiable, "Autograd")
library.impl("attention_grad", _attention_grad, "CompositeExplicitAutograd")
library.impl("attention_grad", _attention_grad_xla, "XLA")
