"""A small causal decoder, for golden plans."""

from __future__ import annotations

import contextlib

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Decoder(nn.Module):
    """Embedding, layers, norm, and a head that is the embedding."""

    def __init__(self, layers: int = 2, checkpoints: bool = False, autocast: bool = False) -> None:
        """`checkpoints`: layers are computed again for the backward pass. `autocast`: products are in bf16."""
        super().__init__()
        self.embed, self.norm = nn.Embedding(8192, 512), nn.LayerNorm(512)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(512, 8, 2048, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.checkpoints, self.autocast = checkpoints, autocast

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of (batch, positions, vocab)."""
        x = self.embed(tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], x.device, x.dtype)
        with torch.autocast("xla", torch.bfloat16) if self.autocast else contextlib.nullcontext():
            for layer in self.layers:
                x = checkpoint(layer, x, mask, use_reentrant=False) if self.checkpoints else layer(x, mask)
            return self.norm(x) @ self.embed.weight.T
