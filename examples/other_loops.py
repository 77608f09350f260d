"""The other ways in which people train with torch_xla, under one plan, on eight virtual devices of this machine's CPU.

    python examples/other_loops.py

The model's equal layers stand under `scan_layers`; batches come from an `MpDeviceLoader` that sends each device its
shard. The step runs traced lazily, under `torch_xla.compile`, and compiled while everything else is in eager mode.
"""

import copy
import os

os.environ.setdefault("PJRT_DEVICE", "CPU")
os.environ.setdefault("CPU_NUM_DEVICES", "8")

import torch
import torch_xla
import torch_xla.experimental
import torch_xla.runtime
from torch_xla.distributed.parallel_loader import MpDeviceLoader
from torch_xla.experimental.scan_layers import scan_layers

import autoshard
from autoshard.lower.torch_xla.mark_sharding import input_shardings

ROWS, WIDTH, LAYERS, STEPS = 64, 64, 3, 3


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(WIDTH, 4 * WIDTH)
        self.down = torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = torch.nn.Linear(WIDTH, WIDTH)
        self.layers = torch.nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, x):
        x = self.stem(x)
        if x.device.type == "xla":
            return scan_layers(self.layers, x)
        for layer in self.layers:
            x = layer(x)
        return x


def batches():
    generator = torch.Generator().manual_seed(0)
    return [{name: torch.randn(ROWS, WIDTH, generator=generator) for name in ("x", "target")} for _ in range(STEPS)]


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def alone(model):
    """The losses on one device."""
    optimizer, losses = sgd(model.parameters()), []
    for batch in batches():
        loss = torch.nn.functional.mse_loss(model(batch["x"]), batch["target"])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def under(plan, model, run):
    """The losses under the plan; `run` makes of a step what is called for each batch."""
    optimizer = sgd(model.parameters())
    plan.apply(model, optimizer)

    def step(x, target):
        with plan.annotate():
            loss = torch.nn.functional.mse_loss(model(x), target)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    loader = MpDeviceLoader(batches(), "xla", input_sharding=input_shardings(plan))
    step, losses = run(step), []
    for batch in loader:
        loss = step(batch["x"], batch["target"])
        torch_xla.sync()
        losses.append(loss.item())
    return losses


def main():
    torch_xla.runtime.use_spmd()
    torch.manual_seed(0)
    model = Net()
    wanted = alone(copy.deepcopy(model))
    plan = autoshard.plan(
        model, batches()[0], mesh="2x4", device="cpu", loss_fn=torch.nn.functional.mse_loss, optimizer=sgd
    )
    print(plan)

    def compiled(step):
        return torch_xla.compile(step, full_graph=True)

    def as_it_is(step):
        return step

    ways = ("lazy", as_it_is, False), ("compile", compiled, False), ("eager and compile", compiled, True)
    for name, run, eager in ways:
        torch_xla.experimental.eager_mode(eager)
        losses = under(plan, copy.deepcopy(model), run)
        worst = max(abs(a - b) / b for a, b in zip(losses, wanted, strict=True))
        print(f"{name}: losses {losses}, differ from one device's by at most {worst:.1e}")
        assert worst < 1e-5


if __name__ == "__main__":
    main()
