"""Three small programs, between them with a form for every plan written by hand; each plan trains one of them."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn

from autoshard.mesh import Mesh
from autoshard.sources import Source

MESH = Mesh((2, 4), ("data", "model"))
VOCABULARY, WIDTH = 10_240, 16


class Block(nn.Module):
    """A feed-forward block beside a residual path."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up_proj = nn.Linear(WIDTH, 4 * WIDTH)
        self.down_proj = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down_proj(torch.tanh(self.up_proj(self.norm(x))))


class Language(nn.Module):
    """A table of tokens tied to the head, and a block; it carries a tensor parallel plan, as transformers' do."""

    tp_plan: ClassVar = {
        "embed_tokens": "embedding_rowwise",
        "layers.*.norm": "sequence_parallel",
        "layers.*.up_proj": "colwise",
        "layers.*.down_proj": "rowwise",
        "lm_head": "colwise_gather_output",
    }

    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([Block()])
        self.norm = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.lm_head.weight = self.embed_tokens.weight

    def forward(self, tokens):
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


class Stack(nn.Module):
    """Experts that every token visits, summed by a router's weights."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, 8)
        self.wi = nn.Parameter(0.1 * torch.randn(8, WIDTH, 32))
        self.wo = nn.Parameter(0.1 * torch.randn(8, 32, WIDTH))

    def forward(self, x):
        inside = torch.tanh(torch.einsum("bsm,emh->ebsh", x, self.wi))
        made = torch.einsum("ebsh,ehm->ebsm", inside, self.wo)
        return torch.einsum("bse,ebsm->bsm", torch.softmax(self.router(x), -1), made)


class Images(nn.Module):
    """Two convolutions at full height, one where four devices have nothing to split; a classifier."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.MaxPool2d(2), nn.ReLU(),
            nn.MaxPool2d(4), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        )  # fmt: skip
        self.head = nn.Linear(16, 10)

    def forward(self, x):
        return self.head(self.body(x))


def likelihood(logits, labels):
    """Mean cross entropy, over tokens where there are any."""
    return nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten())


def squares(output):
    """Mean square."""
    return output.square().mean()


def sgd(parameters):
    """With momentum, so that there are states."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def source(name: str) -> Source:
    """The program called `name`: a model with weights, inputs on meta."""
    torch.manual_seed(0)

    def like(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    if name == "experts":
        return Source(Stack(), (like(16, 8, WIDTH),), squares, sgd, train=True)
    if name == "images":
        batch = (like(16, 3, 16, 16), like(16, dtype=torch.int64))
        return Source(Images(), batch, likelihood, sgd, train=True)
    batch = (like(8, 8, dtype=torch.int64), like(8, 8, dtype=torch.int64))
    return Source(Language(), batch, likelihood, sgd, train=True)


TRIED = {
    **dict.fromkeys(
        (
            *("dp", "zero1", "zero2", "fsdp", "fsdpv2", "hsdp", "context", "megatron", "sequence", "fsdp-tp", "vocab"),
            *("torchtitan", "maxtext", "hf-tp"),
        ),
        "language",
    ),
    "embedding": "language",
    "expert": "experts",
    "spatial": "images",
}
"""Plan -> the program that it is tried on."""
