"""Small models of many kinds: what both ways of capturing are held against one another with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def tokens(batch: int = 8, length: int = 16, below: int = 96) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, below, (batch, length), generator=torch.Generator().manual_seed(3))
    return {"input_ids": ids, "labels": ids.clone()}


def hf(kind: str, config: str, inputs: dict[str, torch.Tensor], **fields: Any) -> dict[str, Any]:
    import transformers

    torch.manual_seed(0)
    model = getattr(transformers, kind)(getattr(transformers, config)(**fields))
    return {"model": model, "inputs": inputs, "loss_fn": None}


def gpt2() -> dict[str, Any]:
    return hf(
        "GPT2LMHeadModel", "GPT2Config", tokens(), n_layer=2, n_embd=32, n_head=4, vocab_size=96, n_positions=32,
        resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
    )  # fmt: skip


def llama() -> dict[str, Any]:
    return hf(
        "LlamaForCausalLM", "LlamaConfig", tokens(), num_hidden_layers=2, hidden_size=32, intermediate_size=64,
        num_attention_heads=4, num_key_value_heads=2, vocab_size=96,
    )  # fmt: skip


def bert() -> dict[str, Any]:
    return hf(
        "BertForMaskedLM", "BertConfig", tokens(), num_hidden_layers=1, hidden_size=32, num_attention_heads=4,
        intermediate_size=64, vocab_size=96, hidden_dropout_prob=0, attention_probs_dropout_prob=0,
    )  # fmt: skip


def images(size: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    return {
        "pixel_values": torch.randn(8, 3, size, size, generator=generator),
        "labels": torch.randint(0, 8, (8,), generator=generator),
    }


def vit() -> dict[str, Any]:
    return hf(
        "ViTForImageClassification", "ViTConfig", images(32), num_hidden_layers=1, hidden_size=32, image_size=32,
        num_attention_heads=4, intermediate_size=64, patch_size=8, num_labels=8,
    )  # fmt: skip


def resnet() -> dict[str, Any]:
    return hf(
        "ResNetForImageClassification", "ResNetConfig", images(32), embedding_size=8, hidden_sizes=[8, 16],
        depths=[1, 1], layer_type="basic", num_labels=8,
    )  # fmt: skip


def mlp() -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 32))
    return {"model": model, "inputs": (torch.randn(64, 32), torch.randn(64, 32)), "loss_fn": nn.MSELoss()}


class Recommender(nn.Module):
    """Embedding bags, products of pairs, a perceptron: DLRM's parts."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Sequential(nn.Linear(6, 16), nn.ReLU())
        self.bags = nn.ModuleList(nn.EmbeddingBag(rows, 16, mode="sum") for rows in (40, 24, 56))
        self.top = nn.Sequential(nn.Linear(16 + 6, 32), nn.GELU(), nn.Linear(32, 1))

    def forward(self, dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
        x = self.dense(dense)
        parts = torch.stack([x, *(bag(sparse[:, i]) for i, bag in enumerate(self.bags))], 1)
        pairs = parts @ parts.transpose(1, 2)
        i, j = torch.tril_indices(4, 4, -1, device=pairs.device)
        return self.top(torch.cat([x, pairs[:, i, j]], 1)).squeeze(-1)


def dlrm() -> dict[str, Any]:
    torch.manual_seed(0)
    clicked = torch.randint(0, 2, (16,)).float()
    inputs = (torch.randn(16, 6), torch.randint(0, 24, (16, 3, 4)), clicked)
    return {"model": Recommender(), "inputs": inputs, "loss_fn": nn.functional.binary_cross_entropy_with_logits}


class Experts(nn.Module):
    """A router, the two best experts of each token, tokens dispatched by products with masks."""

    def __init__(self, width: int = 16, hidden: int = 32, experts: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(48, width)
        self.router = nn.Linear(width, experts, bias=False)
        self.wi = nn.Parameter(torch.randn(experts, width, hidden) / 4)
        self.wo = nn.Parameter(torch.randn(experts, hidden, width) / 4)
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        weights, choice = torch.topk(torch.softmax(self.router(x), -1), 2, -1)
        chosen = (choice.unsqueeze(-1) == torch.arange(self.wi.shape[0], device=x.device)).to(x.dtype)
        in_turn = chosen.sum(2)
        place = (in_turn.cumsum(1) - 1) * in_turn
        kept = in_turn * (place < 12)
        combined = (chosen * weights.unsqueeze(-1)).sum(2) * kept
        inside = torch.relu(torch.einsum("bsm,emh->ebsh", x, self.wi))
        made = torch.einsum("ebsh,ehm->ebsm", inside, self.wo)
        out = torch.einsum("bse,ebsm->bsm", combined, made)
        return self.norm(x + out) @ self.embed.weight.T


def flat_cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten())


def moe() -> dict[str, Any]:
    torch.manual_seed(0)
    ids = torch.randint(0, 48, (8, 16))
    return {"model": Experts(), "inputs": (ids, ids.clone()), "loss_fn": flat_cross_entropy}


NETS: dict[str, Callable[[], dict[str, Any]]] = {
    each.__name__: each for each in (gpt2, llama, bert, vit, resnet, mlp, dlrm, moe)
}
