"""Makes the HLO texts beside it, with the compilers that are installed: `python tests/verify/hlo/make.py`.

Three layers of a two-matrix network in a scan, split over data=2 and model=4 (FSDP over the one, Megatron over the
other), its gradients and update, in bf16. Metadata but the names of ops, and backend settings but trip counts, are cut.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

TARGETS = {"tpu": "tpu-v5e:2x4", "gpu": "h100:8", "cpu": "cpu:8"}


def lowered(dtype_name: str) -> bytes:
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    jax.config.update("jax_use_shardy_partitioner", False)
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))

    def sharding(*axes):
        return NamedSharding(mesh, PartitionSpec(*axes))

    def layer(x, weights):
        up, down = weights
        with jax.named_scope("op1"):
            hidden = x @ up
        with jax.named_scope("op2"):
            hidden = jax.nn.relu(hidden)
        with jax.named_scope("op3"):
            return x + hidden @ down, None

    def loss(weights, x):
        y, _ = jax.lax.scan(layer, x, weights)
        return jnp.mean(y.astype(jnp.float32) ** 2)

    def step(weights, x):
        return jax.tree.map(lambda w, g: w - 0.1 * g.astype(w.dtype), weights, jax.grad(loss)(weights, x))

    dtype = jnp.dtype(dtype_name)
    weights = (jax.ShapeDtypeStruct((3, 256, 512), dtype), jax.ShapeDtypeStruct((3, 512, 256), dtype))
    split = (sharding(None, "data", "model"), sharding(None, "model", "data"))
    module = (
        jax.jit(step, in_shardings=(split, sharding("data", None)), out_shardings=split)
        .lower(weights, jax.ShapeDtypeStruct((64, 256), dtype))
        .compiler_ir("stablehlo")
    )
    return module.operation.get_asm(enable_debug_info=True).encode()


def shortened(text: str) -> str:
    """Without what no test reads."""

    def settings(match: re.Match[str]) -> str:
        trips = re.search(r'"known_trip_count":\{"n":"\d+"\}', match[0])
        return f", backend_config={{{trips[0]}}}" if trips else ""

    def names(match: re.Match[str]) -> str:
        name = re.search(r'op_name="[^"]*"', match[0])
        return f", metadata={{{name[0]}}}" if name else ""

    lines = []
    for line in text.splitlines():
        if line.startswith(("FileNames", "FunctionNames", "FileLocations", "StackFrames")) or re.match(r"\d+ ", line):
            continue
        if line.startswith("HloModule"):
            line = "HloModule step, is_scheduled=true, num_partitions=8"
        line = re.sub(r", frontend_attributes=\{[^{}]*\}", "", line)
        line = re.sub(r", metadata=\{[^{}]*\}", names, line)
        line = re.sub(r", backend_config=\{.*\}\s*$", settings, line)
        lines.append(line.rstrip())
    return "\n".join(lines) + "\n"


def main() -> None:
    from autoshard.verify.compile import compile_module

    module = lowered("bfloat16")
    for family, target in TARGETS.items():
        text = compile_module(module, target).hlo_text
        Path(__file__).with_name(f"scan_{family}.txt").write_text(shortened(text))


if __name__ == "__main__":
    main()
