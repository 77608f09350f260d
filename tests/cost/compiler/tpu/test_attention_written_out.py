"""Attention of separate ops, beside what libtpu makes of it."""

import pytest
import torch

from tests.cost.peaks import peak_and_compiled

pytest.importorskip("libtpu")


class Attention(torch.nn.Module):
    """Eight heads; scores are scaled and masked in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(1024, 3072, bias=False), torch.nn.Linear(1024, 1024, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, tokens, width = x.shape
        query, key, value = self.qkv(x).view(rows, tokens, 3, 8, 128).permute(2, 0, 3, 1, 4)
        hidden = torch.ones(tokens, tokens, dtype=torch.bool, device=x.device).triu(1)
        scores = ((query @ key.transpose(-1, -2)).float() * 0.088).masked_fill(hidden, -1e30)
        heads = torch.softmax(scores, -1).to(x.dtype) @ value
        return x + self.out(heads.transpose(1, 2).reshape(rows, tokens, width))


def test_probabilities_are_computed_again_in_three_products() -> None:
    """From scores of twice the bytes, and a maximum and a sum of each row, which count as nothing."""
    inputs = (torch.randn(16, 1024, 1024, dtype=torch.bfloat16),)
    peak, compiled = peak_and_compiled("tpu-v5e:2x4", Attention().bfloat16(), inputs)
    assert peak == pytest.approx(compiled.memory.peak, rel=0.1)
