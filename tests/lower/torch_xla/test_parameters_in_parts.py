"""Parameters read in parts (one flat tensor, fused projections), and gathers by two indices, under their own plans."""

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
from benchmarks.eager_steps import DEVICE

prepare_runtime(8)


class Parts(nn.Module):
    def __init__(self, shape, read):
        super().__init__()
        self.weight, self.read = nn.Parameter(torch.randn(shape) / 5), read

    def forward(self, x, at):
        return self.read(self.weight, x, at).square().mean()


def flat(weight, x, at):
    matrix, bias = weight.split([768, 32])
    return torch.tanh(x @ matrix.view(24, 32) + bias)


def strided(weight, x, at):
    return torch.tanh(x @ weight.as_strided((24, 32), (1, 24)))


def uneven(weight, x, at):
    query, key, value = weight.split([48, 24, 24])
    return (x @ query.t()).view(-1, 2, 24) * (x @ key.t())[:, None] + (x @ value.t())[:, None]


def thirds(weight, x, at):
    query, key, value = weight.chunk(3)
    return (x @ query.t()) * (x @ key.t()) + x @ value.t()


def by_pairs(weight, x, at):
    return (x @ weight).view(4, 4, 32)[:, at[:, 0] % 4, at[:, 1]]


CASES = {flat: 800, strided: 768, uneven: (96, 24), thirds: (96, 24), by_pairs: (24, 32)}
for read, shape in CASES.items():
    torch.manual_seed(0)
    adamw = lambda parameters: torch.optim.AdamW(parameters, lr=0.01, eps=1e-3)
    inputs = {"x": torch.randn(16, 24), "at": torch.randint(0, 32, (5, 2))}
    source = Source(Parts(shape, read), inputs, lambda loss: loss, adamw, train=True)
    program = capture(source.model, source.inputs, loss_fn=source.loss_fn, optimizer=source.optimizer)
    plan = plan_program(program, Mesh.parse("2x2x2", device=str(DEVICE)), rivals=False)
    found = run_worker.compare(plan, source, 2)
    worst = max(found["loss"], found["gradients"]["value"], found["parameters"]["value"])
    assert worst < found["tolerance"], (read.__name__, found["losses"], found["reference_losses"])
    print(read.__name__, any(plan.parameters["weight"].spec))
"""


def test_parameters_that_are_read_in_parts() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        env={**os.environ, "PJRT_DEVICE": "CPU"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    split = dict(line.split() for line in done.stdout.splitlines()[-5:])
    assert list(split) == ["flat", "strided", "uneven", "thirds", "by_pairs"], done.stderr[-2000:]
    assert split["strided"] == split["uneven"] == split["thirds"] == "True"
