"""Steps of programs captured without torch_xla, run by jax on two virtual devices, beside eager PyTorch.

python -m tests.core.numbers OUT.json
"""

import copy
import json
import os
import sys

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2".strip()
os.environ["JAX_PLATFORMS"] = "cpu"

import torch

import autoshard
from autoshard.mesh import Mesh
from tests.core import nets

STEPS = 3


def difference(a, b):
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-3))


def trained(name):
    """Largest differences of losses and of updated tensors, after each of `STEPS` SGD steps."""
    made = nets.NETS[name]()
    model, inputs, loss_fn = made["model"], made["inputs"], made["loss_fn"]
    reference = copy.deepcopy(model)
    optimizer, theirs = (torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in (model, reference))
    program = autoshard.capture(model, inputs, loss_fn=loss_fn, optimizer=optimizer, frontend="torchax")
    plan = autoshard.plan_program(program, Mesh((2,)))
    step = plan.to_jax().step(program, optimizer, precision="highest")
    state = step.place(model, optimizer)
    losses, expected = [], []
    for _ in range(STEPS):
        state, outputs = step(state, inputs)
        losses.append(float(outputs["loss"]))
        whole = isinstance(inputs, dict)
        loss = reference(**inputs).loss if whole else loss_fn(reference(*inputs[:-1]), inputs[-1])
        loss.backward()
        theirs.step()
        theirs.zero_grad()
        expected.append(loss.item())
    step.restore(state, model, optimizer)
    found, wanted = model.state_dict(), reference.state_dict()
    before = nets.NETS[name]()["model"]
    return {
        "loss": max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True)),
        "tensors": max(difference(found[n], t) for n, t in wanted.items() if t.is_floating_point()),
        "moved": max(difference(t, b) for t, b in zip(reference.parameters(), before.parameters(), strict=True)),
    }


if __name__ == "__main__":
    with open(sys.argv[1], "w") as out:
        json.dump({name: trained(name) for name in nets.NETS}, out)
