"""The measuring worker: `python -m autoshard.cost.machine.measure REQUEST.json` prints a JSON line per point.

It is a subprocess because a backend reads its environment (number of virtual CPU devices, platform) before its first
import. It measures, per device and with all devices busy at the same time:

- matmul: products of square matrices, per dtype.
- memory: `y = x + 1` and `z = x + y`, which move two and three times their operand.
- launch: programs of k kernels that cannot fuse; the time that each further kernel adds.
- collective: every kind over groups of 2, 4… devices, all groups at once; bytes as `Collective.bytes` counts them.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from autoshard.cost.machine.measure_jax import JaxBackend
from autoshard.cost.machine.measure_torch import TorchBackend
from autoshard.workers import end_with_parent

MEASURED_KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")

_DTYPES = ("f32", "bf16", "f16", "f64", "i8")
_SIZES = {"cpu": (128, 256, 384, 512, 768), "gpu": (1024, 2048, 4096, 8192, 12288)}
_MEMORY = {"cpu": (2**26, 2**27, 2**28, 2**29), "gpu": (2**26, 2**27, 2**28, 2**29)}
"""Bytes of an operand; on CPU of all devices together, so that it exceeds the caches."""

_MOVED = {"cpu": tuple(2**p for p in range(14, 25, 2)), "gpu": tuple(2**p for p in range(16, 29, 2))}
_KERNELS = (2, 4, 8, 16, 32, 64, 128)

_UNSTEADY, _AGAIN = 0.2, 2
"""A point with a larger spread is measured again, up to so often; the lowest counts."""

_TOO_LONG_S = 2.0
"""A dtype whose product takes longer is not measured at larger sizes."""


@dataclass(frozen=True)
class Budget:
    """Time per point: runs of a batch fill `batch_s`; `least` batches, and more until `point_s` has passed."""

    batch_s: float
    point_s: float
    least: int


QUICK, FULL = Budget(0.005, 0.1, 5), Budget(0.02, 0.5, 8)


class Backend(Protocol):
    """Prepares measurements. Every method returns a function that runs once and returns when it is done."""

    platform: str
    devices: int

    def facts(self) -> dict[str, Any]:
        """`backend`, `version`, `device` (its name) and, where known, `memory_bytes` and `usable_bytes` per device."""

    def matmul(self, dtype: str, size: int) -> Callable[[], None]:
        """A product of two size x size matrices on every device."""

    def memory(self, op: str, bytes: int) -> Callable[[], None]:
        """`copy` or `add` of operands of so many bytes on every device."""

    def launch(self, kernels: int) -> Callable[[], None]:
        """`kernels` tiny kernels, one after the other."""

    def collective(self, kind: str, group: int, bytes: int) -> Callable[[], None]:
        """A collective over groups of `group` devices; the larger of operand and result has `bytes` per device."""


def timed(run: Callable[[], None], budget: Budget) -> tuple[float, float, int]:
    """(seconds of one run, spread, batches): the lower quartile of batches, and (median - lowest) / lower quartile.

    The first runs do not count. Other load on the machine only adds time, so the quartile is closer to the truth than
    the median, and steadier than the lowest.
    """
    run()
    start = time.perf_counter()
    run()
    once = max(time.perf_counter() - start, 1e-7)
    runs = max(1, min(10_000, math.ceil(budget.batch_s / once)))
    batches: list[float] = []
    begin = time.perf_counter()
    while len(batches) < budget.least or time.perf_counter() - begin < budget.point_s:
        start = time.perf_counter()
        for _ in range(runs):
            run()
        batches.append((time.perf_counter() - start) / runs)
    batches.sort()
    quartile = batches[(len(batches) - 1) // 4]
    return quartile, (statistics.median(batches) - batches[0]) / quartile, len(batches)


def points(backend: Backend, quick: bool) -> Iterator[dict[str, Any]]:
    """Measure everything; one dict per point, and one with `skipped` for what the backend cannot do."""
    scale = "cpu" if backend.platform == "cpu" else "gpu"
    budget = QUICK if quick else FULL

    def point(what: str, prepare: Callable[[], Callable[[], None]], **facts: Any) -> dict[str, Any]:
        try:
            run = prepare()
            seconds, spread, batches = timed(run, budget)
            for _ in range(_AGAIN if spread > _UNSTEADY else 0):
                seconds, spread, batches = min((seconds, spread, batches), timed(run, budget))
        except Exception as error:
            said = (str(error).strip() or type(error).__name__).splitlines()[0]
            return {"skipped": what, **facts, "why": said[:200]}
        return {"what": what, **facts, "seconds": seconds, "spread": spread, "batches": batches}

    for kernels in _KERNELS:
        yield point("launch", lambda k=kernels: backend.launch(k), kernels=kernels)  # type: ignore[misc]
    for dtype in _DTYPES[:2] if quick else _DTYPES:
        for size in _SIZES[scale][:4] if quick else _SIZES[scale]:
            found = point("matmul", lambda d=dtype, s=size: backend.matmul(d, s), dtype=dtype, size=size)  # type: ignore[misc]
            yield found | {"flops": 2.0 * size**3}
            if "skipped" in found or found["seconds"] > _TOO_LONG_S:
                break
    for op, times in (("copy", 2), ("add", 3)):
        for whole in _MEMORY[scale][:3] if quick else _MEMORY[scale]:
            size = whole // backend.devices if scale == "cpu" else whole
            found = point("memory", lambda o=op, s=size: backend.memory(o, s), op=op)  # type: ignore[misc]
            yield found | {"bytes": times * size}
            if "skipped" in found:
                break
    group = 2
    while group <= backend.devices:
        if backend.devices % group == 0:
            for kind in MEASURED_KINDS:
                for size in _MOVED[scale][::2] if quick else _MOVED[scale]:
                    run = lambda k=kind, g=group, s=size: backend.collective(k, g, s)  # noqa: E731
                    yield point("collective", run, kind=kind, group=group, bytes=size)  # type: ignore[arg-type]
        group *= 2


def main() -> None:
    """Measure what the request file asks for; write each line at once."""
    end_with_parent()
    request = json.loads(Path(sys.argv[1]).read_text())
    lines = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print goes to standard error
    backend = _backend(request)
    lines.write(json.dumps({"facts": {**backend.facts(), "platform": backend.platform, "devices": backend.devices}}))
    lines.write("\n")
    for found in points(backend, request["quick"]):
        lines.write(json.dumps(found) + "\n")


def _backend(request: dict[str, Any]) -> Backend:
    wanted, platform, devices = request["backend"], request["platform"], request["devices"]
    if wanted == "torch":
        return _torch(platform)
    if wanted == "jax" or platform in ("cpu", "tpu"):
        return _jax(platform, devices)
    found: Backend | None = None
    with contextlib.suppress(Exception):  # no jax, or not for this platform: try torch
        found = _jax(platform, devices)
    if (found is None or found.platform == "cpu") and _torch_sees_cuda():
        return _torch("gpu")
    if found is None:
        raise RuntimeError("neither jax nor torch sees a GPU")
    return found


def _torch_sees_cuda() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return bool(torch.cuda.is_available())


def _jax(platform: str | None, devices: int | None) -> Backend:

    return JaxBackend(platform, devices)


def _torch(platform: str | None) -> Backend:

    return TorchBackend(platform)


if __name__ == "__main__":
    main()
