"""Copies that a plan asks for, and who reads them."""

import torch

import autoshard
from autoshard.mesh import Mesh
from autoshard.stablehlo.reader import build_graph
from autoshard.strategies.random_plans import random_annotations


class Picked(torch.nn.Module):
    """Elements picked out of features that are also read whole: their gradient is scattered, then added."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = torch.nn.Linear(32, 64, bias=False), torch.nn.Linear(16, 32, bias=False)

    def forward(self, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        wide = self.wide(x)
        return self.narrow(wide.gather(1, places)).square().mean() + wide.square().mean()


def test_every_copy_is_read_by_the_aten_op_that_it_names() -> None:
    inputs = torch.randn(64, 32), torch.zeros(64, 16, dtype=torch.int64)
    program = autoshard.capture(
        Picked(), inputs, loss_fn=lambda made: made, optimizer=lambda own: torch.optim.SGD(own, lr=0.1)
    )
    graph, mesh = build_graph(program), Mesh((2, 4), ("data", "model"), device="tpu-v5e")
    scatters = [op for op in graph.ops if op.kind == "scatter"]
    named = set()
    for seed in range(8):
        copies = random_annotations(graph, mesh, seed).copies
        named |= {aten for _, aten in copies} & {op.aten for op in scatters}
        assert all(aten in [op.aten for op in graph.readers(value)] for value, aten in copies)
    assert named
