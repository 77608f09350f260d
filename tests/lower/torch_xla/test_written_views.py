"""Writes through views of tensors that a step makes from none: a table of positions that is filled by halves."""

from __future__ import annotations

import os
import subprocess
import sys

CODE = """
import torch
from torch import nn
from autoshard.api import plan_program
from autoshard.sources import Source
from autoshard.frontends.torch_xla.program import capture, prepare_runtime
from autoshard.mesh import Mesh
from autoshard.verify import run_worker

prepare_runtime(8)


class Positions(nn.Module):
    def __init__(self, fill):
        super().__init__()
        self.layer, self.fill = nn.Linear(16, 16), fill

    def forward(self, x):
        hidden = self.layer(x)
        table = torch.zeros(8, 16, device=x.device)
        self.fill(table, hidden)
        return (hidden * table[None].expand(8, -1, -1)).square().mean()


def waves(table, hidden):
    angles = torch.arange(8, device=table.device)[:, None] * torch.arange(1, 9, device=table.device)[None] / 8
    table[:, :8] = torch.sin(angles)
    table[:, 8:] = torch.cos(angles)


def values(table, hidden):
    table[:, :8] = hidden[0, :, :8]
    table[:, 8:] = 2.0


def in_place(table, hidden):
    table.view(-1)[::2].add_(3.0)
    table += hidden[0]


for fill in (waves, values, in_place):
    torch.manual_seed(0)
    sgd = lambda parameters: torch.optim.SGD(parameters, lr=0.1)
    source = Source(Positions(fill), {"x": torch.randn(8, 8, 16)}, lambda loss: loss, sgd, train=True)
    program = capture(source.model, source.inputs, loss_fn=source.loss_fn, optimizer=source.optimizer)
    plan = plan_program(program, Mesh.parse("2x4", device="tpu-v5e"), rivals=False)
    found = run_worker.compare(plan, source, 2)
    worst = max(found["loss"], found["gradients"]["value"], found["parameters"]["value"])
    assert worst < found["tolerance"], (fill.__name__, found["losses"], found["reference_losses"])
print("equal")
"""


def test_writes_through_views_of_what_a_step_makes() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        env={**os.environ, "PJRT_DEVICE": "CPU"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.stdout.splitlines()[-1:] == ["equal"], done.stderr[-2000:]
