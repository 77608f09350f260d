"""Attention as two torch ops, `autoshard::attention` and `autoshard::attention_grad` (`form.py`).

They are differentiable once. On an XLA device they are what `executed_by` says: a custom call at capture, a region in a
running plan. Elsewhere they are computed as written out here.
"""

from __future__ import annotations

from typing import Any

import torch

from autoshard.attention.form import FORWARD, GRADIENT, Form
from autoshard.frontends.tracing.regions import executed, library, meta

_MASKED = "Tensor? bias, Tensor? q_segments, Tensor? kv_segments, bool causal, int? window, float scale"
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
) -> torch.Tensor:
    """The attention of `form.py`, differentiable in q, k and v."""
    q_segments, kv_segments = segments or (None, None)
    masked = (bias, q_segments, kv_segments, form.causal, form.window, form.scale)
    out: torch.Tensor = torch.ops.autoshard.attention(q, k, v, *masked)[0]
    return out


def scores(
    q: torch.Tensor,
    k: torch.Tensor,
    bias: torch.Tensor | None,
    q_segments: torch.Tensor | None,
    kv_segments: torch.Tensor | None,
    causal: bool,
    window: int | None,
    scale: float,
) -> torch.Tensor:
    """Scaled and masked scores, f32 or f64: `(batch, kv heads, group, queries, keys)`."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    found = torch.einsum("bkgsd,bktd->bkgst", q.to(wide) * scale, k.to(wide))
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
    return found if bias is None else found + bias.to(wide)


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *masked: Any) -> tuple[torch.Tensor, torch.Tensor]:
    found = scores(q, k, *masked)
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
    found = scores(q, k, *masked)
    wide, scale = found.dtype, masked[-1]
    weights = torch.exp(found - _finite(lse.to(wide))[..., None])
    grad, q_wide, k_wide = grad.to(wide), q.to(wide), k.to(wide)
    delta = (grad * out.to(wide)).sum(-1, keepdim=True)
    slopes = weights * (torch.einsum("bkgse,bkte->bkgst", grad, v.to(wide)) - delta) * scale
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
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> tuple[Any, ...]:
        q, k, v, out, lse, *masks = ctx.saved_tensors
        made = torch.ops.autoshard.attention_grad(q, k, v, out, lse, grad, *masks, *ctx.options)
        return *made, None, None, None, None, None, None


def _differentiable(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *masked: Any) -> Any:
    if torch.is_grad_enabled() and any(each.requires_grad for each in (q, k, v)):
        return _Attention.apply(q, k, v, *masked)
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.autoshard.attention(q, k, v, *masked)


def _form(bias: Any, q_segments: Any, kv_segments: Any, causal: bool, window: int | None, scale: float) -> Form:
    return Form(scale, causal, window, bias is not None, q_segments is not None)


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
