"""Plan a training step that jax exported, and write its module with the plan's annotations.

    python examples/plan_stablehlo.py

The same from the command line, for a file from anywhere:

    autoshard plan step.jax_export --mesh 2x4 --device h100 -o plan.json
    autoshard verify plan.json step.jax_export --target h100:8
    autoshard lower plan.json step.jax_export -o annotated.mlir --form shardy
"""

import tempfile
from pathlib import Path

import jax
import jax.export
import jax.numpy as jnp

import autoshard
from autoshard.capture.stablehlo_file import read_program
from autoshard.lower.stablehlo import annotate
from autoshard.written import captured_graph


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

    params = {"w1": of(1024, 4096), "w2": of(4096, 1024)}
    batch = {"x": of(2048, 1024), "y": of(2048, 1024)}
    exported = jax.export.export(jax.jit(step, donate_argnums=0))({"params": params, "momentum": params}, batch)
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "step.jax_export"
        file.write_bytes(exported.serialize())

        program = read_program(file)
        plan = autoshard.plan_program(program, autoshard.Mesh((2, 4), device="h100"))
        print(plan)
        graph = captured_graph(program)
        module = annotate(program, graph, plan.annotations(graph), plan.mesh, "shardy", text=True, partitions=True)
        print(f"\nThe annotated module has {len(module):,} bytes; it begins:\n")
        begins = [line for line in module.decode().splitlines() if "module @" in line or "sdy.mesh" in line]
        print("\n".join(line[:160] for line in begins))


if __name__ == "__main__":
    main()
