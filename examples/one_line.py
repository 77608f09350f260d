"""Train under a plan with one line: an ordinary torch_xla loop, on eight virtual devices of this machine's CPU.

    python examples/one_line.py

The first step is watched, planned when it ends (or found in the cache, when the script is run again), and annotated
from then on. Where a model is distributed by PyTorch's `distribute_module`, see `distribute_a_module.py`.
"""

import copy
import os

os.environ.setdefault("PJRT_DEVICE", "CPU")
os.environ.setdefault("CPU_NUM_DEVICES", "8")

import torch
import torch_xla

import autoshard
from autoshard.auto import current_plan

ROWS, WIDTH, STEPS = 512, 512, 4


def main():
    autoshard.use_spmd(auto=True, spmd_config={"auto_sharding": {"mesh": "2x4"}})  # the line

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.GELU(), torch.nn.Linear(4 * WIDTH, WIDTH))
    reference = copy.deepcopy(model)
    model = model.to("xla")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    theirs = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    worst = 0.0
    for step in range(STEPS):
        x, y = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
        loss = torch.nn.functional.mse_loss(model(x.to("xla")), y.to("xla"))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch_xla.sync()
        wanted = torch.nn.functional.mse_loss(reference(x), y)
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
