"""Losses of three steps in jax on eight virtual CPU devices, and of eager PyTorch: one JSON line per split and form."""

import json
import os

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
os.environ["JAX_PLATFORMS"] = "cpu"

from autoshard.lower.to_jax import to_jax
from tests.experts.small import graph_of, source, split


def main():
    graph = graph_of(source(), "tpu-v5e", "torchax")
    reference = source()
    expected = []
    for _ in range(3):
        reference.optimizer.zero_grad()
        loss = reference.model(**reference.inputs).loss
        loss.backward()
        reference.optimizer.step()
        expected.append(float(loss.detach()))
    for how, form in (("experts, scattered", "shardy"), ("features", "gspmd")):
        step = source()
        run = to_jax(split(graph, how, "tpu-v5e")).step(graph.program, step.optimizer, partitioner=form)
        state, losses = run.place(step.model, step.optimizer), []
        for _ in expected:
            state, outputs = run(state, step.inputs)
            losses.append(float(outputs["loss"]))
        print(json.dumps({"how": how, "form": form, "losses": losses, "expected": expected}))


if __name__ == "__main__":
    main()
