"""`F.multi_head_attention_forward` (`nn.MultiheadAttention`) with batch, heads and positions as dims of their own."""

from __future__ import annotations

import inspect
import math
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from autoshard.frontends.switches.handlers import UNTOUCHED, replaces


@replaces("multihead", F.multi_head_attention_forward)
def multi_head_attention(*args: Any, **named: Any) -> Any:
    """Attention of `(positions, batch, features)` with all dims kept; its products are dispatched to other handlers.

    torch's own runs unbatched calls, biases of keys, appended zeros, static keys, and masks of other dtypes.
    """
    call = inspect.signature(F.multi_head_attention_forward).bind(*args, **named)
    call.apply_defaults()
    asked = SimpleNamespace(**call.arguments)
    query, heads = asked.query, asked.num_heads
    if asked.key.dim() != 3 or asked.value.shape[:2] != asked.key.shape[:2] or query.shape[-1] % heads:
        return UNTOUCHED
    if query.dim() != 3 or query.shape[-1] != asked.embed_dim_to_check or query.shape[1] != asked.key.shape[1]:
        return UNTOUCHED
    if any(each is not None for each in (asked.bias_k, asked.bias_v, asked.static_k, asked.static_v)):
        return UNTOUCHED
    if asked.add_zero_attn or (asked.is_causal and asked.attn_mask is None):
        return UNTOUCHED
    masked = _mask(asked)
    if masked is UNTOUCHED:
        return UNTOUCHED
    mask, causal = masked
    q, k, v = (each.unflatten(-1, (heads, -1)).permute(1, 2, 0, 3) for each in _projected(asked))
    dropout, weights = asked.dropout_p if asked.training else 0.0, None
    if asked.need_weights:
        scores = (q * math.sqrt(1.0 / q.shape[-1])) @ k.transpose(-2, -1)
        weights = torch.softmax(scores if mask is None else scores + mask, -1)
        weights = torch.dropout(weights, dropout, True) if dropout > 0 else weights
        attended = weights @ v
        weights = weights.mean(1) if asked.average_attn_weights else weights
    else:
        attended = F.scaled_dot_product_attention(q, k, v, mask, dropout, causal)
    out = attended.permute(2, 0, 1, 3).flatten(2)
    return F.linear(out, asked.out_proj_weight, asked.out_proj_bias), weights


def _projected(asked: SimpleNamespace) -> tuple[torch.Tensor, ...]:
    """Queries, keys and values, `(positions, batch, features)`: of one tensor by one product, as torch does."""
    given, width = (asked.query, asked.key, asked.value), asked.query.shape[-1]
    biases = (None,) * 3 if asked.in_proj_bias is None else asked.in_proj_bias.chunk(3)
    if asked.use_separate_proj_weight:
        weights = asked.q_proj_weight, asked.k_proj_weight, asked.v_proj_weight
    elif asked.query is asked.key and asked.key is asked.value:
        return tuple(F.linear(asked.query, asked.in_proj_weight, asked.in_proj_bias).split(width, -1))
    else:
        weights = asked.in_proj_weight.chunk(3)
    return tuple(map(F.linear, given, weights, biases))


def _mask(asked: SimpleNamespace) -> Any:
    """What is added to the scores, `(batch or 1, heads or 1, queries, keys)`, and whether they are causal."""
    mask, padding = asked.attn_mask, asked.key_padding_mask
    (queries, batch, _), keys = asked.query.shape, asked.key.shape[0]
    shapes = (queries, keys), (batch * asked.num_heads, queries, keys)
    if (mask is not None and mask.shape not in shapes) or (padding is not None and padding.shape != (batch, keys)):
        return UNTOUCHED
    dtypes = (torch.bool, asked.query.dtype, *(() if asked.need_weights else (torch.float32,)))
    if any(each is not None and each.dtype not in dtypes for each in (mask, padding)):
        return UNTOUCHED
    if asked.is_causal and padding is None and not asked.need_weights:
        return None, True
    mask, padding = (None if each is None else _added(each, asked.query.dtype) for each in (mask, padding))
    if mask is not None:
        mask = mask.expand(1, 1, -1, -1) if mask.dim() == 2 else mask.unflatten(0, (batch, -1))
    if padding is not None:
        padding = padding.view(batch, 1, 1, keys)
        mask = padding.expand(-1, -1, queries, -1) if mask is None else mask + padding
    return mask, asked.is_causal and padding is None


def _added(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A mask as a number for each score: minus infinity where it is true."""
    if mask.is_floating_point():
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -math.inf)
