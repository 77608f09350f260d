"""Gradients that are clipped by their norm, against libtpu."""

import pytest
import torch

import autoshard
from autoshard.mesh import Mesh
from autoshard.stablehlo.annotate import annotate
from autoshard.stablehlo.reader import build_graph
from autoshard.verify.check import compare_compiled
from autoshard.verify.targets import parse_target

pytest.importorskip("libtpu")


class Clipped(torch.optim.AdamW):
    """Of every gradient, at most a norm of one."""

    def step(self, closure=None):
        torch.nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 1.0)
        return super().step(closure)


class Net(torch.nn.Module):
    """An embedding and a head of one shape."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = torch.nn.Embedding(4096, 256), torch.nn.Linear(256, 4096, bias=False)
        self.trunk = torch.nn.Linear(256, 256)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        scores = self.head(torch.tanh(self.trunk(self.table(ids))))
        return torch.nn.functional.cross_entropy(scores.flatten(0, 1).float(), labels.flatten())


def test_a_coefficient_is_not_exchanged_between_gradients_of_one_shape() -> None:
    """Whose shardings differ: no device needs more of the coefficient than it has."""
    ids, mesh = torch.randint(0, 4096, (8, 512)), Mesh((2, 4), ("data", "model"), device="tpu-v5e:2x4")
    program = autoshard.capture(
        Net().bfloat16(), (ids, ids), loss_fn=lambda loss: loss, optimizer=lambda own: Clipped(own, lr=0.1)
    )
    graph = build_graph(program)
    annotations = autoshard.plan_program(program, mesh).annotations(graph)
    module = annotate(program, graph, annotations, mesh)
    report, _ = compare_compiled(graph, annotations, mesh, parse_target("tpu-v5e:2x4", 8), module)
    assert report.fidelity.value < 0.01
