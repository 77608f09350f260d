"""Plan a training step that jax exported, write its module with the plan's annotations, and run it under the plan.

    python examples/plan_stablehlo.py

The same from the command line, for a file from anywhere:

    autoshard plan step.jax_export --mesh 2x4 --device h100 -o plan.json
    autoshard verify plan.json step.jax_export --target h100:8
    autoshard lower plan.json step.jax_export -o annotated.mlir --form shardy
"""

import os
import tempfile
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")  # eight virtual devices

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

import autoshard
from autoshard.frontends.stablehlo_file import read_program
from autoshard.stablehlo.annotate import annotate
from autoshard.stablehlo.reader import build_graph


def step(state, batch):
    """One step of SGD with momentum on a two-layer network."""

    def loss(params):
        with jax.named_scope("up"):
            hidden = jax.nn.gelu(batch["x"] @ params["w1"])
        with jax.named_scope("down"):
            return jnp.mean((hidden @ params["w2"] - batch["y"]) ** 2)

    value, gradients = jax.value_and_grad(loss)(state["params"])
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state["momentum"], gradients)
    return {"params": jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], momentum), "momentum": momentum}, value


def main():
    def of(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    params = {"w1": of(256, 1024), "w2": of(1024, 256)}
    batch = {"x": of(512, 256), "y": of(512, 256)}
    exported = jax.export.export(jax.jit(step, donate_argnums=0))({"params": params, "momentum": params}, batch)
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "step.jax_export"
        file.write_bytes(exported.serialize())

        program = read_program(file)
        # So small a step would not be split; a hint makes it.
        hints = {"state.params.w1": "[],[model]"}
        plan = autoshard.plan_program(program, autoshard.Mesh((2, 4), device="h100"), hints=hints)
        print(plan)
        graph = build_graph(program)
        module = annotate(program, graph, plan.annotations(graph), plan.mesh, "shardy", text=True, partitions=True)
        print(f"\nThe annotated module has {len(module):,} bytes; it begins:\n")
        begins = [line for line in module.decode().splitlines() if "module @" in line or "sdy.mesh" in line]
        print("\n".join(line[:160] for line in begins))
    run(program, plan)


def run(program, plan):
    """Three steps on eight devices, under the plan, and on one."""
    random = np.random.default_rng(0)
    params = {"w1": random.normal(0, 0.05, (256, 1024)), "w2": random.normal(0, 0.05, (1024, 256))}
    params = {name: value.astype(np.float32) for name, value in params.items()}
    alone = {"params": params, "momentum": {name: np.zeros_like(value) for name, value in params.items()}}

    planned = plan.to_jax().step(program, precision="highest")  # f32, to be compared
    state = planned.place(
        tensors={f"state.{part}.{name}": each for part, all_ in alone.items() for name, each in all_.items()}
    )
    for number in range(3):
        x, y = (random.normal(size=(512, 256)).astype(np.float32) for _ in range(2))
        state, outputs = planned(state, {"batch.x": x, "batch.y": y})
        with jax.default_matmul_precision("highest"):
            alone, wanted = step(alone, {"x": x, "y": y})
        (loss,) = outputs.values()
        print(f"step {number}: loss {float(loss):.6f}, on one device {float(wanted):.6f}")
        assert abs(float(loss) - float(wanted)) / float(wanted) < 1e-5


if __name__ == "__main__":
    main()
