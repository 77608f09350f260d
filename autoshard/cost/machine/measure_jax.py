"""Measurements in jax: on virtual CPU devices, GPUs and TPUs, sharded over all devices of the process."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from autoshard.dtypes import numpy_dtype

_PLATFORMS = {"cpu": "cpu", "gpu": "cuda", "tpu": "tpu"}


class JaxBackend:
    """The devices of one jax platform; see `measure.Backend`."""

    def __init__(self, platform: str | None, devices: int | None) -> None:
        """`platform` None: jax's default. `devices`: how many virtual CPU devices, or how many to use."""
        if platform is not None:
            os.environ["JAX_PLATFORMS"] = _PLATFORMS[platform]
        if devices is not None:
            flags = f"--xla_force_host_platform_device_count={devices}"
            os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
        import jax
        import numpy as np

        jax.config.update("jax_enable_x64", True)
        self.found = jax.local_devices()[:devices]
        if devices is not None and len(self.found) < devices:
            raise RuntimeError(f"{devices} devices were asked for, {len(self.found)} are there")
        self.platform = {"cuda": "gpu", "rocm": "gpu"}.get(self.found[0].platform, self.found[0].platform)
        self.devices = len(self.found)
        self.mesh = jax.sharding.Mesh(np.array(self.found), ("d",))

    def facts(self) -> dict[str, Any]:
        """See `measure.Backend`."""
        import jax

        stats = self.found[0].memory_stats() if self.platform != "cpu" else None
        known = {"usable_bytes": int(stats["bytes_limit"])} if stats and "bytes_limit" in stats else {}
        return {"backend": "jax", "version": jax.__version__, "device": self.found[0].device_kind, **known}

    def matmul(self, dtype: str, size: int) -> Callable[[], None]:
        """See `measure.Backend`."""
        import jax
        import jax.numpy as jnp

        kind = numpy_dtype(dtype)
        accumulated = jnp.int32 if dtype == "i8" else None
        a, b = (self._whole((self.devices, size, size), kind) for _ in range(2))
        return self._run(
            lambda a, b: jax.lax.dot_general(a, b, (((2,), (1,)), ((0,), (0,))), preferred_element_type=accumulated),
            a,
            b,
        )

    def memory(self, op: str, bytes: int) -> Callable[[], None]:
        """See `measure.Backend`. The first operand is donated, so nothing is allocated meanwhile."""
        import jax

        a, b = (self._whole((self.devices, bytes // 4), "float32") for _ in range(2))
        function, others = (lambda a: a + 1, ()) if op == "copy" else (lambda a, b: a + b, (b,))
        compiled = jax.jit(function, donate_argnums=0).lower(a, *others).compile()
        held = [a]
        del a

        def run() -> None:
            held[0] = compiled(held[0], *others)
            jax.block_until_ready(held[0])

        return run

    def launch(self, kernels: int) -> Callable[[], None]:
        """See `measure.Backend`."""
        import jax

        def chain(x: Any) -> Any:
            for _ in range(kernels):
                x = jax.lax.optimization_barrier(jax.numpy.sin(x))
            return x

        return self._run(chain, self._whole((self.devices, 1024), "float32"))

    def collective(self, kind: str, group: int, bytes: int) -> Callable[[], None]:
        """See `measure.Backend`."""
        import jax
        import numpy as np
        from jax import lax
        from jax.sharding import PartitionSpec

        mesh = jax.sharding.Mesh(np.array(self.found).reshape(-1, group), ("outer", "inner"))
        spec = PartitionSpec(("outer", "inner"))
        whole = max(group, bytes // 4 // group * group)
        each = whole // group if kind == "all-gather" else whole
        ring = [(i, (i + 1) % group) for i in range(group)]
        body = {
            "all-reduce": lambda x: lax.psum(x, "inner"),
            "all-gather": lambda x: lax.all_gather(x, "inner", axis=1, tiled=True),
            "reduce-scatter": lambda x: lax.psum_scatter(x, "inner", scatter_dimension=1, tiled=True),
            "all-to-all": lambda x: lax.all_to_all(x, "inner", 1, 1, tiled=True),
            "collective-permute": lambda x: lax.ppermute(x, "inner", ring),
        }[kind]
        mapped = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
        value = jax.device_put(np.ones((self.devices, each), np.float32), jax.sharding.NamedSharding(mesh, spec))
        return self._run(mapped, value)

    def _whole(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Ones, the first dim split over all devices."""
        import jax

        split = jax.sharding.NamedSharding(self.mesh, jax.sharding.PartitionSpec("d"))
        return jax.jit(lambda: jax.numpy.ones(shape, dtype), out_shardings=split)()

    def _run(self, function: Callable[..., Any], *arguments: Any) -> Callable[[], None]:
        import jax

        compiled = jax.jit(function).lower(*arguments).compile()

        def run() -> None:
            jax.block_until_ready(compiled(*arguments))

        return run
