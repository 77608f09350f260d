"""Attention of separate ops, beside what libtpu makes of it."""

import pytest
import torch

import autoshard
from autoshard import manual
from autoshard.cost.predict import predict
from autoshard.mesh import Mesh
from autoshard.stablehlo.annotate import annotate, donated
from autoshard.stablehlo.reader import build_graph
from autoshard.verify.compile import compile_module

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
    program = autoshard.capture(
        Attention().bfloat16(),
        (torch.randn(16, 1024, 1024, dtype=torch.bfloat16),),
        loss_fn=lambda made: made.float().pow(2).mean(),
        optimizer=lambda own: torch.optim.SGD(own, lr=0.1),
    )
    graph, mesh = build_graph(program), Mesh((2, 4), ("data", "model"), device="tpu-v5e")
    annotations = manual.PLANS["dp"](graph, mesh)
    compiled = compile_module(annotate(program, graph, annotations, mesh), "tpu-v5e:2x4", donate=donated(program))
    assert predict(graph, annotations, mesh).peak_memory_bytes == pytest.approx(compiled.memory.peak, rel=0.1)
