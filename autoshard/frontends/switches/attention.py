"""Attention kept as one op, `autoshard::attention`; what no kernel computes is written out (`dots.py`)."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from autoshard.attention.form import FORWARD, Form
from autoshard.attention.kernels import Part, Platform, kernel_name
from autoshard.cost.machine.device import load_device
from autoshard.frontends.switches import dots
from autoshard.frontends.switches.handlers import replaces
from autoshard.frontends.switches.transformers_library import masked_as
from autoshard.frontends.tracing import attention as fused
from autoshard.frontends.tracing.device import tensor_type

_kinds: list[tuple[Platform, str]] = []
_noted: list[Callable[[str], None]] = []


@contextlib.contextmanager
def kernels_of(kind: str) -> Iterator[None]:
    """Keep those attentions as one op that this kind of device, `tpu-v5e`, has a fused kernel for."""
    _kinds.append((load_device(kind).target, kind))
    try:
        yield
    finally:
        _kinds.pop()


@contextlib.contextmanager
def noting(note: Callable[[str], None]) -> Iterator[None]:
    """Have `note` told why an attention is written out."""
    _noted.append(note)
    try:
        yield
    finally:
        _noted.remove(note)


@replaces("attention", F.scaled_dot_product_attention)
def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    if query.dim() not in (3, 4) or query.dim() != key.dim() or key.shape[:-1] != value.shape[:-1]:
        return dots.attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    why = _why_written_out(query, key, attn_mask, dropout_p, enable_gqa)
    if not why:
        heads, kv_heads = (query.shape[1], key.shape[1]) if query.dim() == 4 else (1, 1)
        query, key, value = dots.same_dtype(query, key, value)
        k, v = (each if each.dim() == 4 else each.unsqueeze(1) for each in (key, value))
        q = query.reshape(query.shape[0], kv_heads, heads // kv_heads, *query.shape[-2:])
        known = masked_as(attn_mask)
        bias = None if attn_mask is None or known is not None else _bias(attn_mask, q, query.dim() == 4)
        causal, window = known or (is_causal, None)
        scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
        form = Form(scale, causal, window, bias is not None)
        types = [tensor_type(each) for each in (q, k, v, bias) if each is not None]
        platform, kind = _kinds[-1]
        why = kernel_name(Part(FORWARD, form, tuple(types), q.shape[3], 1, platform, kind))[1]
    if why:
        for note in _noted:
            note(why)
        return dots.attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    out = fused.attention(q, k, v, form, bias)
    return out.reshape(*query.shape[:-1], value.shape[-1])


def _why_written_out(
    query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, dropout: float, grouped: bool
) -> str:
    """Why no kernel computes an attention; empty if one does."""
    if dropout > 0:
        return "dropout of its weights: the kernels draw other random numbers than PyTorch"
    if mask is not None and mask.requires_grad:
        return "its bias has a gradient, which the kernels do not compute"
    if query.shape[0] != key.shape[0]:
        return "queries and keys have different batches"
    shares = grouped or key.shape[1] == 1
    if query.dim() == 4 and (query.shape[1] % key.shape[1] if shares else query.shape[1] != key.shape[1]):
        return "heads of queries are no multiple of those of keys"
    return ""


def _bias(mask: torch.Tensor, q: torch.Tensor, heads: bool) -> torch.Tensor:
    """A mask or bias as it is added to scores: `(batch, kv heads, group, queries, keys)`, any dim may be 1.

    Args:
        heads: whether queries were given with a dim of heads; else a mask of three dims begins with the batch.
    """
    if mask.dim() == 3 and not heads:
        mask = mask.unsqueeze(1)
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, -math.inf)
    mask = mask.reshape(*[1] * (4 - mask.dim()), *mask.shape)
    batch, own = mask.shape[:2]
    kv_heads, group = (1, 1) if own == 1 else q.shape[1:3]
    return mask.to(q.dtype).reshape(batch, kv_heads, group, *mask.shape[2:])
