"""Measurements in torch, on the CPU or on one CUDA device. Collectives are left to jax."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from autoshard.dtypes import DTYPES


class TorchBackend:
    """The CPU, or the first CUDA device; see `measure.Backend`."""

    devices = 1

    def __init__(self, platform: str | None) -> None:
        """`platform` None: CUDA if available."""
        import torch

        if platform == "tpu":
            raise RuntimeError("torch measures CPUs and CUDA devices; use jax for a TPU")
        if platform == "gpu" and not torch.cuda.is_available():
            raise RuntimeError("torch sees no CUDA device")
        self.platform = "gpu" if platform != "cpu" and torch.cuda.is_available() else "cpu"
        self.where = "cuda" if self.platform == "gpu" else "cpu"
        torch.backends.cuda.matmul.allow_tf32 = True  # XLA's default precision
        torch.set_grad_enabled(False)

    def facts(self) -> dict[str, Any]:
        """See `measure.Backend`."""
        import torch

        if self.platform == "cpu":
            return {"backend": "torch", "version": torch.__version__, "device": "cpu"}
        properties = torch.cuda.get_device_properties(0)
        return {
            "backend": "torch",
            "version": torch.__version__,
            "device": properties.name,
            "memory_bytes": int(properties.total_memory),
        }

    def matmul(self, dtype: str, size: int) -> Callable[[], None]:
        """See `measure.Backend`."""
        import torch

        if dtype == "i8":
            a, b = (torch.ones(size, size, dtype=torch.int8, device=self.where) for _ in range(2))
            return self._run(lambda: torch._int_mm(a, b))
        a, b = (torch.ones(size, size, dtype=getattr(torch, DTYPES[dtype].torch), device=self.where) for _ in range(2))
        out = torch.empty_like(a)
        return self._run(lambda: torch.mm(a, b, out=out))

    def memory(self, op: str, bytes: int) -> Callable[[], None]:
        """See `measure.Backend`."""
        import torch

        a, b = (torch.ones(bytes // 4, device=self.where) for _ in range(2))
        out = torch.empty_like(a)
        return self._run(lambda: torch.add(a, 1.0, out=out) if op == "copy" else torch.add(a, b, out=out))

    def launch(self, kernels: int) -> Callable[[], None]:
        """See `measure.Backend`."""
        import torch

        x = torch.ones(1024, device=self.where)

        def chain() -> None:
            for _ in range(kernels):
                x.sin_()

        return self._run(chain)

    def collective(self, kind: str, group: int, bytes: int) -> Callable[[], None]:
        """One device has none."""
        raise NotImplementedError(f"{kind} of {bytes} bytes over {group} devices")

    def _run(self, function: Callable[[], Any]) -> Callable[[], None]:
        import torch

        def run() -> None:
            function()
            if self.platform == "gpu":
                torch.cuda.synchronize()

        return run
