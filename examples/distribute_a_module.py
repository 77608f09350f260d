"""Train under a plan through PyTorch's own `distribute_module`, on eight virtual devices of this machine's CPU.

    python examples/distribute_a_module.py

`autoshard.auto_policy` stands where a partition function is passed. Parameters are split evenly at once, so that no
device ever holds the whole model; the first step is watched, planned when it ends, and annotated from then on.
"""

import copy
import os

os.environ.setdefault("PJRT_DEVICE", "CPU")
os.environ.setdefault("CPU_NUM_DEVICES", "8")

import torch
import torch_xla
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import distribute_module

import autoshard
from autoshard.auto import current_plan

ROWS, WIDTH, STEPS = 256, 128, 4


def main():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.GELU(), torch.nn.Linear(4 * WIDTH, 10))
    reference = copy.deepcopy(model)

    mesh = DeviceMesh("xla", torch.arange(8).reshape(2, 4), mesh_dim_names=("data", "model"))
    model = distribute_module(model, mesh, autoshard.auto_policy)  # the line

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    theirs = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    worst = 0.0
    for step in range(STEPS):
        x, labels = torch.randn(ROWS, WIDTH), torch.randint(10, (ROWS,))
        loss = torch.nn.functional.cross_entropy(model(x.to("xla")), labels.to("xla"))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch_xla.sync()
        wanted = torch.nn.functional.cross_entropy(reference(x), labels)
        wanted.backward()
        theirs.step()
        theirs.zero_grad()
        print(f"step {step}: loss {loss.item():.6f}, on one device {wanted.item():.6f}")
        worst = max(worst, abs(loss.item() - wanted.item()) / wanted.item())
    print(current_plan())
    print(f"losses differ by at most {worst:.1e}")
    assert worst < 1e-5


if __name__ == "__main__":
    main()
