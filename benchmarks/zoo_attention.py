"""Training steps for `coverage.py` with every form of attention: masks, heads, lengths, documents, other kernels."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

from benchmarks.zoo_entry import BATCH, SEQ, WIDTH, classes, entry, floats, tokens
from benchmarks.zoo_hf import build

HEADS = 4


class Attending(nn.Module):
    """A vector a token, attended to by heads, classified; `attend` is given `(batch, heads, tokens, features)`."""

    def __init__(self, attend: Callable[..., Tensor], kv_heads: int = HEADS) -> None:
        super().__init__()
        features = WIDTH // HEADS
        self.attend, self.heads = attend, (HEADS, kv_heads, kv_heads)
        self.norm, self.out, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 10)
        self.of = nn.ModuleList(nn.Linear(WIDTH, heads * features, bias=False) for heads in self.heads)

    def forward(self, x: Tensor, labels: Tensor, *more: Tensor, memory: Tensor | None = None) -> Tensor:
        given = (self.norm(x), *[self.norm(x if memory is None else memory)] * 2)
        q, k, v = (
            layer(t).unflatten(-1, (heads, -1)).transpose(1, 2)
            for layer, t, heads in zip(self.of, given, self.heads, strict=True)
        )
        made = x + self.out(self.attend(q, k, v, *more).transpose(1, 2).flatten(2))
        return F.cross_entropy(self.head(made.mean(1)), labels)


def attending(attend: Callable[..., Tensor], *more: Tensor, kv_heads: int = HEADS) -> Any:
    return Attending(attend, kv_heads), (floats(BATCH, SEQ, WIDTH), classes(), *more), None


@entry
def attention_under_a_mask() -> Any:
    kept = torch.rand(BATCH, 1, SEQ, SEQ, generator=torch.Generator().manual_seed(6)) < 0.7
    return attending(lambda q, k, v, mask: F.scaled_dot_product_attention(q, k, v, mask | mask.mT), kept)


@entry
def attention_with_a_bias_that_is_learned() -> Any:
    class Biased(Attending):
        def __init__(self) -> None:
            super().__init__(F.scaled_dot_product_attention)
            self.bias = nn.Parameter(0.1 * floats(HEADS, SEQ, SEQ))

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x, labels, self.bias)

    return Biased(), (floats(BATCH, SEQ, WIDTH), classes()), None


@entry
def attention_of_grouped_queries() -> Any:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    return attending(attend, kv_heads=2)


@entry
def attention_across_lengths() -> Any:
    class Crossed(Attending):
        def forward(self, x: Tensor, labels: Tensor, memory: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x, labels, memory=memory)

    inputs = floats(BATCH, SEQ, WIDTH), classes(), floats(BATCH, 24, WIDTH)
    return Crossed(F.scaled_dot_product_attention), inputs, None


@entry
def attention_with_a_scale() -> Any:
    return attending(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.1))


@entry
def attention_with_dropout() -> Any:
    return attending(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=0.2, is_causal=True))


def documents(device: Any) -> Tensor:
    """Of which document each token is: several of six tokens are packed into a sequence."""
    return torch.arange(SEQ, device=device).div(6, rounding_mode="floor").to(torch.int32).expand(BATCH, -1)


@entry
def packed_documents() -> Any:
    """transformers finds them by positions that begin anew."""

    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = build("llama", "AutoModelForCausalLM", lambda config: {}, attn_implementation="sdpa").model

        def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
            positions = torch.arange(SEQ, device=input_ids.device).remainder(6).expand(BATCH, -1)
            loss: Tensor = self.inner(input_ids=input_ids, position_ids=positions, labels=labels).loss
            return loss

    return Packed(), (tokens(BATCH, SEQ), tokens(BATCH, SEQ)), None


def near(q: Tensor, reach: int) -> Tensor:
    """Which keys are of a query's document, not after it, and at most so many tokens away."""
    rows, of = torch.arange(SEQ, device=q.device), documents(q.device)
    causal = (rows[:, None] >= rows) & (rows[:, None] - rows <= reach)
    return causal & (of[:, None, :, None] == of[:, None, None, :])


@entry
def flash_attention_of_torch_xla() -> Any:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if q.device.type != "xla":
            return F.scaled_dot_product_attention(q, k, v, near(q, SEQ), scale=0.2)
        from torch_xla.experimental.custom_kernel import flash_attention

        of = documents(q.device)
        made: Tensor = flash_attention(q, k, v, True, of, of, 0.2)
        return made

    return attending(attend)


@entry
def splash_attention_of_torch_xla() -> Any:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q = q * 0.25
        if q.device.type != "xla":
            return F.scaled_dot_product_attention(q, k, v, near(q, 5), scale=1.0, enable_gqa=True)
        from torch_xla.experimental.splash_attention import splash_attention

        config = json.dumps({"attentiontype_local_sliding": True, "slide_window_size": 5})
        made: Tensor = splash_attention(q, k, v, config, documents(q.device))
        return made

    return attending(attend, kv_heads=2)


@entry
def flex_attention_with_sinks() -> Any:
    """Of packed documents; results are scaled by the share of the weights that a learned sink leaves."""

    class Sinks(Attending):
        def __init__(self) -> None:
            super().__init__(self.attended)
            self.sinks = nn.Parameter(floats(HEADS))

        def attended(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            share = self.sinks[:, None]
            if q.device.type != "xla":
                scores = (q @ k.mT * 0.25).masked_fill(~near(q, SEQ), float("-inf"))
                lse = scores.logsumexp(-1)
                return (scores.softmax(-1) @ v) * torch.sigmoid(lse - share)[..., None]
            of = documents(q.device)

            def seen(b: Any, h: Any, i: Any, j: Any) -> Any:
                return (i >= j) & (of[b, i] == of[b, j])

            mask = create_block_mask(seen, BATCH, None, SEQ, SEQ, device=q.device)
            made, aux = flex_attention(q, k, v, block_mask=mask, scale=0.25, return_aux=AuxRequest(lse=True))
            scaled: Tensor = made * torch.sigmoid(aux.lse - share)[..., None]
            return scaled

    return Sinks(), (floats(BATCH, SEQ, WIDTH), classes()), None


@entry
def flex_attention_with_slopes() -> Any:
    """Scores less a learned multiple of the distance, grouped queries."""

    class Slopes(Attending):
        def __init__(self) -> None:
            super().__init__(self.attended, kv_heads=2)
            self.slopes = nn.Parameter(floats(HEADS))

        def attended(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if q.device.type != "xla":
                apart = torch.arange(SEQ)[:, None] - torch.arange(SEQ)
                bias = (-self.slopes[:, None, None] * apart).masked_fill(apart < 0, float("-inf"))
                return F.scaled_dot_product_attention(q, k, v, bias, enable_gqa=True)
            mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, SEQ, SEQ, device=q.device)
            made: Tensor = flex_attention(
                q, k, v, lambda score, b, h, i, j: score - self.slopes[h] * (i - j), mask, enable_gqa=True
            )
            return made

    return Slopes(), (floats(BATCH, SEQ, WIDTH), classes()), None
