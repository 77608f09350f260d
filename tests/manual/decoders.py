"""Decoders as teams write them, small: Llama, latent attention (MLA), layers of experts; under several names."""

from __future__ import annotations

from types import MappingProxyType

import torch
from torch import nn

from autoshard.sources import Source
from tests.manual.models import likelihood, sgd

VOCABULARY, WIDTH, HEADS, HEAD, HIDDEN, EXPERTS, LATENT = 256, 64, 8, 8, 128, 8, 24

META = MappingProxyType({
    "table": "tok_embeddings", "blocks": "layers", "attention": "attention", "q": "wq", "k": "wk", "v": "wv", "o": "wo",
    "q_down": "wq_a", "q_up": "wq_b", "kv_down": "wkv_a", "kv_up": "wkv_b", "ffn": "feed_forward", "gate": "w1",
    "down": "w2", "up": "w3", "before_attention": "attention_norm", "before_ffn": "ffn_norm", "last": "norm",
    "head": "output",
})  # fmt: skip
"""Names of Meta's Llama and of torchtitan."""
HF = MappingProxyType({
    "table": "embed_tokens", "blocks": "layers", "attention": "self_attn", "q": "q_proj", "k": "k_proj", "v": "v_proj",
    "o": "o_proj", "q_down": "q_a_proj", "q_up": "q_b_proj", "kv_down": "kv_a_proj_with_mqa", "kv_up": "kv_b_proj",
    "ffn": "mlp", "gate": "gate_proj", "down": "down_proj", "up": "up_proj", "before_attention": "input_layernorm",
    "before_ffn": "post_attention_layernorm", "last": "norm", "head": "lm_head",
})  # fmt: skip
"""Names of transformers."""
OWN = MappingProxyType({role: f"m{number}" for number, role in enumerate(META)})
"""Names that say nothing."""


def linear(inside: int, outside: int) -> nn.Linear:
    """Without a bias."""
    return nn.Linear(inside, outside, bias=False)


class Named(nn.Module):
    """Its children go by the names that a style gives their roles."""

    def __init__(self, names, **children: nn.Module):
        super().__init__()
        self.names = names
        for role, child in children.items():
            self.add_module(names[role], child)

    def part(self, role: str) -> nn.Module:
        return getattr(self, self.names[role])


def attended(q, k, v):
    """Causal attention of (batch, sequence, heads, features), heads joined again."""
    heads = nn.functional.scaled_dot_product_attention(
        *(each.transpose(1, 2) for each in (q, k, v)), is_causal=True, enable_gqa=q.shape[2] != k.shape[2]
    )
    return heads.transpose(1, 2).flatten(2)


def turned(x):
    """Half of the features of every head turned by its position, as RoPE does."""
    seq, half = x.shape[1], x.shape[-1] // 2
    angle = torch.arange(seq, device=x.device, dtype=x.dtype)[:, None, None] / torch.arange(
        1, half + 1, device=x.device, dtype=x.dtype
    )
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()), dim=-1)


class Attention(Named):
    """Grouped queries: two of them to a key."""

    def __init__(self, names):
        width = HEADS * HEAD
        super().__init__(
            names,
            q=linear(WIDTH, width),
            k=linear(WIDTH, width // 2),
            v=linear(WIDTH, width // 2),
            o=linear(width, WIDTH),
        )

    def forward(self, x):
        q, k, v = (self.part(role)(x).unflatten(-1, (-1, HEAD)) for role in "qkv")
        return self.part("o")(attended(turned(q), turned(k), v))


class LatentAttention(Named):
    """Queries, and keys with values, through narrow products; one key of positions for all heads (MLA)."""

    def __init__(self, names):
        super().__init__(
            names,
            q_down=linear(WIDTH, LATENT),
            q_up=linear(LATENT, HEADS * 2 * HEAD),
            kv_down=linear(WIDTH, LATENT + HEAD),
            kv_up=linear(LATENT, HEADS * 2 * HEAD),
            o=linear(HEADS * HEAD, WIDTH),
        )
        self.q_norm, self.kv_norm = nn.RMSNorm(LATENT), nn.RMSNorm(LATENT)

    def forward(self, x):
        q = self.part("q_up")(self.q_norm(self.part("q_down")(x))).unflatten(-1, (HEADS, 2 * HEAD))
        q = torch.cat((q[..., :HEAD], turned(q[..., HEAD:])), dim=-1)
        latent, position = self.part("kv_down")(x).split((LATENT, HEAD), dim=-1)
        kv = self.part("kv_up")(self.kv_norm(latent)).unflatten(-1, (HEADS, 2 * HEAD))
        position = turned(position.unsqueeze(2)).expand(-1, -1, HEADS, -1)
        k = torch.cat((kv[..., :HEAD], position), dim=-1)
        return self.part("o")(attended(q, k, kv[..., HEAD:]))


class FeedForward(Named):
    """SwiGLU."""

    def __init__(self, names, hidden: int = HIDDEN):
        super().__init__(names, gate=linear(WIDTH, hidden), up=linear(WIDTH, hidden), down=linear(hidden, WIDTH))

    def forward(self, x):
        return self.part("down")(nn.functional.silu(self.part("gate")(x)) * self.part("up")(x))


class Experts(nn.Module):
    """SwiGLU of every expert for every token, one weight for all experts each."""

    def __init__(self, names):
        super().__init__()
        self.names = names
        for role, shape in {"gate": (HIDDEN, WIDTH), "up": (HIDDEN, WIDTH), "down": (WIDTH, HIDDEN)}.items():
            self.register_parameter(names[role], nn.Parameter(0.1 * torch.randn(EXPERTS, *shape)))

    def forward(self, x):
        gate, up, down = (getattr(self, self.names[role]) for role in ("gate", "up", "down"))
        inside = nn.functional.silu(torch.einsum("bsm,ehm->ebsh", x, gate)) * torch.einsum("bsm,ehm->ebsh", x, up)
        return torch.einsum("ebsh,emh->ebsm", inside, down)


class MixtureOfExperts(nn.Module):
    """The best two experts of every token, and one that every token visits where there is one."""

    def __init__(self, names, shared: bool):
        super().__init__()
        self.router = linear(WIDTH, EXPERTS)
        self.experts = Experts(names)
        self.shared_experts = FeedForward(names) if shared else None

    def forward(self, x):
        scores = torch.softmax(self.router(x), -1)
        least = torch.topk(scores, 2, -1).values[..., 1:]
        weights = torch.where(scores >= least, scores, torch.zeros_like(scores))
        made = torch.einsum("bse,ebsm->bsm", weights, self.experts(x))
        return made if self.shared_experts is None else made + self.shared_experts(x)


class DecoderBlock(Named):
    """Attention and a feed-forward layer, each behind a norm and beside a residual path."""

    def __init__(self, names, attention: type[Named], ffn: nn.Module):
        super().__init__(
            names,
            before_attention=nn.RMSNorm(WIDTH),
            attention=attention(names),
            before_ffn=nn.RMSNorm(WIDTH),
            ffn=ffn,
        )

    def forward(self, x):
        x = x + self.part("attention")(self.part("before_attention")(x))
        return x + self.part("ffn")(self.part("before_ffn")(x))


class Decoder(Named):
    """Logits of (batch, sequence) tokens."""

    def __init__(self, names, blocks: list[DecoderBlock]):
        super().__init__(
            names,
            table=nn.Embedding(VOCABULARY, WIDTH),
            blocks=nn.ModuleList(blocks),
            last=nn.RMSNorm(WIDTH),
            head=linear(WIDTH, VOCABULARY),
        )

    def forward(self, tokens):
        x = self.part("table")(tokens)
        for block in self.part("blocks"):
            x = block(x)
        return self.part("head")(self.part("last")(x))


def llama(names=META) -> Decoder:
    """Grouped-query attention and SwiGLU."""
    return Decoder(names, [DecoderBlock(names, Attention, FeedForward(names)) for _ in range(2)])


def mixtral(names=META) -> Decoder:
    """Grouped-query attention and experts."""
    return Decoder(names, [DecoderBlock(names, Attention, MixtureOfExperts(names, shared=False)) for _ in range(2)])


def deepseek(names=META) -> Decoder:
    """Latent attention; a dense block, then one of experts with a shared one."""
    layers = (FeedForward(names), MixtureOfExperts(names, shared=True))
    return Decoder(names, [DecoderBlock(names, LatentAttention, ffn) for ffn in layers])


DECODERS = {"llama": llama, "mixtral": mixtral, "deepseek": deepseek}


def source(name: str, names=META, batch: int = 8, seq: int = 16, optimizer=sgd) -> Source:
    """The training step of a decoder: a model with weights, inputs on meta."""
    torch.manual_seed(0)
    tokens = tuple(torch.empty(batch, seq, dtype=torch.int64, device="meta") for _ in range(2))
    return Source(DECODERS[name](names), tokens, likelihood, optimizer, train=True)
