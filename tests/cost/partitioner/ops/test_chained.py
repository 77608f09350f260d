"""Gradients of a table that is looked up twice: one scatter or two, against XLA's GPU compiler."""

import pytest
import torch

import autoshard
from autoshard import manual
from autoshard.mesh import Mesh
from autoshard.stablehlo.annotate import annotate
from autoshard.stablehlo.reader import build_graph
from autoshard.verify.check import compare_compiled
from autoshard.verify.targets import parse_target

pytest.importorskip("jax_plugins.xla_cuda12")


@pytest.mark.parametrize(("rows", "lookups", "merged"), [(512, 4096, False), (8192, 4096, False), (8192, 2048, True)])
def test_scatters_merge_where_their_updates_are_fewer_than_the_table(rows: int, lookups: int, merged: bool) -> None:
    """Concatenated updates are exchanged between devices: an all-to-all."""

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Embedding(rows, 128)

        def forward(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
            return (self.table(one) * torch.tanh(self.table(other))).pow(2).mean()

    inputs = (torch.randint(0, rows, (lookups,)), torch.randint(0, rows, (lookups,)))
    program = autoshard.capture(
        Net(), inputs, loss_fn=lambda loss: loss, optimizer=lambda own: torch.optim.SGD(own, lr=0.1)
    )
    graph, mesh = build_graph(program), Mesh((2, 4), ("data", "model"), device="h100")
    annotations = manual.PLANS["dp"](graph, mesh)
    module = annotate(program, graph, annotations, mesh)
    report, _ = compare_compiled(graph, annotations, mesh, parse_target("h100:8", 8), module)
    assert ("all-to-all" in {row.kind for row in report.fidelity.rows if row.predicted_bytes}) == merged
    assert report.fidelity.value < 0.01
