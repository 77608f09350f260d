"""Rows that `torch.gather` reads by themselves, as PyTorch's indices of 64 bits say them."""

import pytest
import torch

import autoshard
from autoshard import manual
from autoshard.mesh import Mesh
from autoshard.stablehlo.annotate import annotate
from autoshard.stablehlo.reader import build_graph
from autoshard.verify.check import compare_compiled
from autoshard.verify.targets import TargetError, on_target, parse_target


class Picked(torch.nn.Module):
    """Some positions of each sequence, as of masked language models."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(64, 64, bias=False)

    def forward(self, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        made = self.inner(x)
        return torch.gather(made, 1, places.unsqueeze(-1).expand(-1, -1, 64)).square().mean() + made.mean()


@pytest.mark.parametrize("target", ["tpu-v5e:2x4", "h100:8"])
def test_rows_picked_of_a_split_batch_and_their_gradients_move_nothing(target: str) -> None:
    """On v5e the batch was gathered for indices of 64 bits, and gradients scattered: half of the bytes of an ESM-2."""
    inputs = torch.randn(16, 32, 64), torch.zeros(16, 8, dtype=torch.int64)
    program = autoshard.capture(
        Picked(), inputs, loss_fn=lambda loss: loss, optimizer=lambda own: torch.optim.SGD(own, lr=0.1)
    )
    graph, where = build_graph(program), parse_target(target, 8)
    mesh = on_target(Mesh((2, 4), ("data", "model"), device=target.partition(":")[0]), where)
    annotations = manual.PLANS["dp"](graph, mesh)
    text = annotate(program, graph, annotations, mesh, platform=where.family)
    try:
        report, _ = compare_compiled(graph, annotations, mesh, where, text)
    except TargetError as error:
        pytest.skip(str(error))
    assert report.fidelity.value == 0
    assert {one.kind for one in report.prediction.collectives} == {"all-reduce"}
