"""Losses of three steps in jax on eight virtual CPU devices, and of eager PyTorch: one JSON line per form.

    python -m tests.regions_in_jax MODULE SHARDY GSPMD

MODULE has `source`, `graph_of` and `split`, as `tests.attention.small` has; the others are names of its splits.
"""

import json
import os
import sys
from importlib import import_module

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
os.environ["JAX_PLATFORMS"] = "cpu"

from autoshard.lower.to_jax import to_jax
from autoshard.verify.eager import eager_step


def main():
    module, *splits = sys.argv[1:]
    small = import_module(module)
    graph = small.graph_of(small.source(), "tpu-v5e", "torchax")
    reference = small.source()
    expected = [
        float(eager_step(reference.model, reference.optimizer, reference.inputs, None).detach()) for _ in range(3)
    ]
    for how, form in zip(splits, ("shardy", "gspmd"), strict=True):
        step = small.source()
        run = to_jax(small.split(graph, how, "tpu-v5e")).step(graph.program, step.optimizer, partitioner=form)
        state, losses = run.place(step.model, step.optimizer), []
        for _ in expected:
            state, outputs = run(state, step.inputs)
            losses.append(float(outputs["loss"]))
        print(json.dumps({"how": how, "form": form, "losses": losses, "expected": expected}))


if __name__ == "__main__":
    main()
