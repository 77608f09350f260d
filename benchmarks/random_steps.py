"""Training steps of random nets: decoders, encoders, perceptrons and nets of convolutions, of drawn sizes.

What is fitted to compilers' estimates is fitted to these, and held against models that people have names for.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from random_nets import Net as Convolutions
from torch import nn
from torch.nn import functional

from autoshard import api
from autoshard.graph.ops import Graph
from autoshard.stablehlo.reader import build_graph


class Norm(nn.Module):  # type: ignore[misc]
    """RMSNorm as decoders write it."""

    def __init__(self, width: int) -> None:
        """Of the last dim's size."""
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of any shape `(..., width)`."""
        read = x.float()
        made = read * torch.rsqrt(read.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * made.to(x.dtype)


class Block(nn.Module):  # type: ignore[misc]
    """Attention, written out or as one op, and a perceptron, gated or not."""

    def __init__(self, of: random.Random, width: int, norm: Callable[[int], nn.Module]) -> None:
        """Of drawn sizes; blocks of one net draw alike."""
        super().__init__()
        self.size = of.choice((32, 64, 64, 96, 128))
        self.heads = max(1, width // self.size)
        self.keys = self.heads if of.random() < 0.6 else max(1, self.heads // 4)
        if self.heads % self.keys:
            self.keys = self.heads
        self.causal, self.whole, self.gated = of.random() < 0.6, of.random() < 0.5, of.random() < 0.5
        self.activation = of.choice((functional.gelu, functional.silu, functional.relu))
        inner, bias = of.choice((2, 3, 4)) * width + of.choice((0, 64, 160)), of.random() < 0.5
        self.query = nn.Linear(width, self.heads * self.size, bias=bias)
        self.key, self.value = (nn.Linear(width, self.keys * self.size, bias=bias) for _ in range(2))
        self.out = nn.Linear(self.heads * self.size, width, bias=bias)
        self.up, self.down = nn.Linear(width, inner, bias=bias), nn.Linear(inner, width, bias=bias)
        self.gate = nn.Linear(width, inner, bias=bias) if self.gated else None
        self.first, self.second = norm(width), norm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of `(batch, positions, width)`."""
        read = self.first(x)
        query, key, value = (
            project(read).unflatten(-1, (-1, self.size)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        if self.whole:
            made = functional.scaled_dot_product_attention(
                query, key, value, is_causal=self.causal, enable_gqa=self.keys != self.heads
            )
        else:
            key, value = (one.repeat_interleave(self.heads // self.keys, 1) for one in (key, value))
            scores = query @ key.transpose(-1, -2) / self.size**0.5
            if self.causal:
                positions = torch.arange(x.shape[1], device=x.device)
                scores = scores.masked_fill(positions[None, :] > positions[:, None], -1e9)
            made = torch.softmax(scores.float(), -1).to(value.dtype) @ value
        x = x + self.out(made.transpose(1, 2).flatten(2))
        read = self.second(x)
        made = self.up(read)
        made = self.activation(self.gate(read)) * made if self.gate is not None else self.activation(made)
        result: torch.Tensor = x + self.down(made)
        return result


class Decoder(nn.Module):  # type: ignore[misc]
    """Embeddings, one or two blocks and a head."""

    def __init__(self, of: random.Random) -> None:
        """With sizes drawn from `of`."""
        super().__init__()
        width = of.choice((256, 384, 512, 640, 768, 1024, 1152, 1536, 2048))
        self.words = of.choice((1000, 8192, 30522, 32000, 50257))
        norm = of.choice((nn.LayerNorm, Norm))
        self.embedding = nn.Embedding(self.words, width)
        state = of.getstate()
        blocks = []
        for _ in range(of.choice((1, 2))):
            of.setstate(state)
            blocks.append(Block(of, width, norm))
        self.blocks, self.norm = nn.Sequential(*blocks), norm(width)
        self.head = nn.Linear(width, self.words, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits, f32, of `(batch, positions)` tokens."""
        made: torch.Tensor = self.head(self.norm(self.blocks(self.embedding(tokens)))).float()
        return made.flatten(0, 1)


class Perceptron(nn.Module):  # type: ignore[misc]
    """Linear layers of drawn widths."""

    def __init__(self, of: random.Random) -> None:
        """With sizes drawn from `of`."""
        super().__init__()
        widths = [of.choice((64, 96, 200, 256, 500, 768, 1000, 2048, 4096, 8192)) for _ in range(of.randint(3, 6))]
        act = of.choice((nn.ReLU, nn.GELU, nn.Tanh))
        pairs = pairwise(widths)
        self.layers = nn.Sequential(*(layer for pair in pairs for layer in (nn.Linear(*pair), act())))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of `(batch, width)`."""
        made: torch.Tensor = self.layers(x)
        return made


def step(seed: int) -> Graph:
    """The training step of a seed."""
    of = random.Random(seed)
    kind = of.choice(("decoder", "decoder", "decoder", "convolutions", "perceptron"))
    dtype = of.choice((torch.float32, torch.bfloat16))
    inputs: tuple[Any, ...]
    loss: Callable[..., torch.Tensor]
    net: nn.Module
    with torch.device("meta"):
        if kind == "decoder":
            net = Decoder(of)
            rows, positions = 8 * of.choice((1, 1, 2, 4)), of.choice((128, 197, 256, 512, 1024))
            tokens = torch.empty(rows, positions, dtype=torch.int64)
            inputs, loss = (tokens, torch.empty(rows * positions, dtype=torch.int64)), functional.cross_entropy
        elif kind == "convolutions":
            net = Convolutions(of)
            size, rows = of.choice((32, 48, 64, 96)), 8 * of.choice((1, 2, 4, 8))
            inputs = (torch.empty(rows, net.first.in_channels, size, size, dtype=dtype),)
            loss = squared
        else:
            net = Perceptron(of)
            inputs = (torch.empty(8 * of.choice((16, 128, 512, 1024)), net.layers[0].in_features, dtype=dtype),)
            loss = squared
        net = net.to(dtype)
    optimizer = torch.optim.AdamW(net.parameters()) if of.random() < 0.7 else torch.optim.SGD(net.parameters(), 0.1)
    return build_graph(api.capture(net, inputs, loss_fn=loss, optimizer=optimizer))


def squared(made: torch.Tensor) -> torch.Tensor:
    """A loss without labels."""
    return (made.float() ** 2).mean()
