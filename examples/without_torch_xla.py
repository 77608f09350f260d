"""Plan a PyTorch training step without torch_xla, on any torch from 2.9 on, and train under the plan with jax.

    python examples/without_torch_xla.py        # eight virtual devices of this machine's CPU

torch, jax and torchax are all it needs (`pip install 'autoshard[torchax]'`). Where torch_xla is installed too, the
plan holds for it as well: the captured step is the same.
"""

import copy
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import torch

import autoshard

ROWS, WIDTH, CLASSES, STEPS = 64, 64, 10, 3


def network():
    return torch.nn.Sequential(
        torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.LayerNorm(4 * WIDTH), torch.nn.GELU(),
        torch.nn.Linear(4 * WIDTH, CLASSES),
    )  # fmt: skip


def main():
    torch.manual_seed(0)
    model = network()
    reference = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    theirs = torch.optim.AdamW(reference.parameters(), lr=1e-3)
    sample = torch.zeros(ROWS, WIDTH), torch.zeros(ROWS, dtype=torch.int64)
    program = autoshard.capture(
        model, sample, loss_fn=torch.nn.functional.cross_entropy, optimizer=optimizer, frontend="torchax"
    )
    # So small a network would not be split; a hint makes it.
    plan = autoshard.plan_program(program, autoshard.Mesh((2, 4), device="cpu"), hints={"0.weight": "[model],[]"})
    print(plan)

    step = plan.to_jax().step(program, optimizer, precision="highest")  # f32, to be compared
    state = step.place(model, optimizer)
    print(f"0.weight on the devices: {state['0.weight'].sharding.spec}")
    worst = 0.0
    for number in range(STEPS):
        x, labels = torch.randn(ROWS, WIDTH), torch.randint(CLASSES, (ROWS,))
        state, outputs = step(state, (x, labels))
        wanted = torch.nn.functional.cross_entropy(reference(x), labels)
        wanted.backward()
        theirs.step()
        theirs.zero_grad()
        print(f"step {number}: loss {float(outputs['loss']):.6f}, PyTorch on one device {wanted.item():.6f}")
        worst = max(worst, abs(float(outputs["loss"]) - wanted.item()) / wanted.item())
    print(f"losses differ by at most {worst:.1e}")
    assert worst < 1e-5


if __name__ == "__main__":
    main()
