"""Models that transformers does not have, as functions for `FILE.py:FUNCTION`: perceptron, DLRM, mixture of experts.

autoshard plan benchmarks/nets.py:dlrm --mesh 2x4 --train adamw
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn

CRITEO_ROWS = (
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194),
    *(27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572),
)
"""Distinct values of the 26 categorical features of the Criteo Kaggle data set (facebookresearch/dlrm)."""


class DLRM(nn.Module):
    """Naumov et al. 2019 (arXiv:1906.00091): a bottom MLP for dense features, one summed embedding bag per categorical
    feature, dot products of every pair of these vectors, a top MLP, one logit.
    """

    def __init__(
        self, dense: int, tables: Sequence[int], width: int, bottom: Sequence[int], top: Sequence[int]
    ) -> None:
        """`tables` are rows per embedding table, `width` the features of each, `bottom` and `top` hidden widths."""
        super().__init__()
        self.bottom = mlp([dense, *bottom, width], last=nn.ReLU)
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for rows in tables)
        vectors = len(tables) + 1
        row, column = torch.tril_indices(vectors, vectors, offset=-1, device="cpu").tolist()
        self.pairs = [i * vectors + j for i, j in zip(row, column, strict=True)]
        self.top = mlp([width + len(self.pairs), *top, 1])

    def forward(self, dense: torch.Tensor, categories: torch.Tensor) -> torch.Tensor:
        """Logits of shape (batch,) of dense features (batch, dense) and categories (batch, tables, values per bag)."""
        x = self.bottom(dense)
        bags = [table(categories[:, number]) for number, table in enumerate(self.tables)]
        vectors = torch.stack([x, *bags], 1)
        products = torch.matmul(vectors, vectors.transpose(1, 2)).flatten(1)
        pairs = products.index_select(1, torch.tensor(self.pairs, device=products.device))
        logits: torch.Tensor = self.top(torch.cat([x, pairs], 1))
        return logits.squeeze(1)


def mlp(widths: Sequence[int], last: type[nn.Module] | None = None) -> nn.Sequential:
    """Linear layers of these widths with ReLU between them."""
    layers: list[nn.Module] = []
    for number, (before, after) in enumerate(pairwise(widths)):
        layers.append(nn.Linear(before, after))
        if number < len(widths) - 2 or last is not None:
            layers.append(nn.ReLU())
    return nn.Sequential(*layers)


class WithLoss(nn.Module):
    """A model whose last input is the label; returns binary cross entropy."""

    def __init__(self, model: nn.Module) -> None:
        """Around `model`."""
        super().__init__()
        self.model = model

    def forward(self, dense: torch.Tensor, categories: torch.Tensor, clicked: torch.Tensor) -> torch.Tensor:
        """The mean loss."""
        return nn.functional.binary_cross_entropy_with_logits(self.model(dense, categories), clicked)


def perceptron(rows: int = 512, width: int = 1024, hidden: int = 4096) -> dict[str, Any]:
    """Two linear layers around a GELU; the mean square of what comes out."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))
        inputs = (torch.empty(rows, width),)
    return {"model": model, "inputs": inputs, "loss_fn": lambda out: out.square().mean()}


class Scales(nn.Module):
    """Many small parameters: vectors that scale and shift the features, one after the other, a tanh between them."""

    def __init__(self, count: int, width: int) -> None:
        """`count` vectors of `width` numbers."""
        super().__init__()
        self.vectors = nn.ParameterList(nn.Parameter(torch.empty(width)) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of the shape of `x` (rows, width)."""
        for number, vector in enumerate(self.vectors):
            x = torch.tanh(x * vector) if number % 2 else x + vector
        return x


def small_parameters(count: int = 5000, width: int = 256, rows: int = 512) -> dict[str, Any]:
    """5,000 vectors, as many parameters: what planning costs when nothing is large."""
    with torch.device("meta"):
        model = Scales(count, width)
        inputs = (torch.empty(rows, width),)
    return {"model": model, "inputs": inputs, "loss_fn": lambda out: out.square().mean()}


def dlrm(
    batch: int = 2048, width: int = 64, rows: int = 1_000_000, bag: int = 4, tables: int = 26, hidden: int = 512
) -> dict[str, Any]:
    """DLRM on Criteo's 13 dense and 26 categorical features, tables capped at `rows` rows, `bag` values each."""
    sizes = [min(rows, size) for size in CRITEO_ROWS[:tables]]
    with torch.device("meta"):
        model = WithLoss(DLRM(13, sizes, width, [hidden, hidden // 2], [hidden, hidden // 2]))
        inputs = (
            torch.empty(batch, 13),
            torch.empty(batch, tables, bag, dtype=torch.int64),
            torch.empty(batch),
        )
    return {"model": model, "inputs": inputs, "loss_fn": first}


def first(loss: torch.Tensor) -> torch.Tensor:
    """The model's output is its loss."""
    return loss


class Experts(nn.Module):
    """A feed-forward layer of experts, each token sent to its best two, as GShard does (arXiv:2006.16668, section 2.2):
    one-hot masks dispatch tokens into `capacity` places per expert and sequence, what finds no place is dropped.
    """

    def __init__(self, width: int, hidden: int, experts: int) -> None:
        """Weights of all experts in one tensor per layer."""
        super().__init__()
        self.experts = experts
        self.router = nn.Linear(width, experts, bias=False)
        self.wi = nn.Parameter(torch.empty(experts, width, hidden).normal_(std=width**-0.5))
        self.wo = nn.Parameter(torch.empty(experts, hidden, width).normal_(std=hidden**-0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The experts' weighted outputs, of the shape of `x` (batch, sequence, width)."""
        batch, seq, _ = x.shape
        capacity = max(1, 2 * 2 * seq // self.experts)
        weights, choice = torch.topk(torch.softmax(self.router(x), -1), 2, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        numbers = torch.arange(self.experts, device=x.device)
        chosen = (choice.unsqueeze(-1) == numbers).to(x.dtype)  # batch, sequence, 2, expert
        in_turn = chosen.transpose(1, 2).reshape(batch, 2 * seq, self.experts)  # every first choice goes first
        place = ((in_turn.cumsum(1) - 1) * in_turn).sum(-1).reshape(batch, 2, seq).transpose(1, 2)
        places = (place.unsqueeze(-1) == torch.arange(capacity, device=x.device)).to(x.dtype)
        dispatch = torch.einsum("bske,bskc->bsec", chosen, places)
        combine = torch.einsum("bske,bskc->bsec", chosen * weights.unsqueeze(-1), places)
        inside = torch.einsum("bsec,bsm->ebcm", dispatch, x)
        inside = torch.relu(torch.einsum("ebcm,emh->ebch", inside, self.wi))
        made = torch.einsum("ebch,ehm->ebcm", inside, self.wo)
        return torch.einsum("bsec,ebcm->bsm", combine, made)


class ExpertsBlock(nn.Module):
    """Self-attention and a layer of experts, each behind a norm and beside a residual path."""

    def __init__(self, width: int, hidden: int, experts: int, heads: int) -> None:
        """`hidden` is the width inside an expert."""
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.experts = Experts(width, hidden, experts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of shape (batch, sequence, width)."""
        batch, seq, width = x.shape
        normed = self.norm_1(x)
        q, k, v = (
            projection(normed).view(batch, seq, self.heads, width // self.heads).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        heads = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o_proj(heads.transpose(1, 2).reshape(batch, seq, width))
        made: torch.Tensor = x + self.experts(self.norm_2(x))
        return made


class MoE(nn.Module):
    """A causal language model whose feed-forward layers are experts; returns the mean cross entropy of the labels."""

    def __init__(self, vocabulary: int, layers: int, width: int, hidden: int, experts: int, heads: int) -> None:
        """`layers` blocks of attention and experts."""
        super().__init__()
        self.embed_tokens = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(ExpertsBlock(width, hidden, experts, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The mean loss; `labels` are the next tokens, both of shape (batch, sequence)."""
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        logits = self.lm_head(self.norm(x))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def moe(
    batch: int = 8,
    seq: int = 512,
    layers: int = 2,
    width: int = 1024,
    hidden: int = 4096,
    experts: int = 8,
    heads: int = 16,
    vocabulary: int = 32000,
) -> dict[str, Any]:
    """GShard's mixture of experts in a causal language model, top 2 of `experts`."""
    with torch.device("meta"):
        model = MoE(vocabulary, layers, width, hidden, experts, heads)
        inputs = tuple(torch.empty(batch, seq, dtype=torch.int64) for _ in range(2))
    return {"model": model, "inputs": inputs, "loss_fn": first}
