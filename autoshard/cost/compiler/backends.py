"""The compiler of each target family."""

from __future__ import annotations

from collections.abc import Mapping

from autoshard.cost.compiler.backend import Backend
from autoshard.cost.compiler.cpu import CpuBackend
from autoshard.cost.compiler.gpu.backend import GpuBackend
from autoshard.cost.compiler.tpu.backend import CoarseTpuBackend, TpuBackend
from autoshard.cost.machine.device import Device
from autoshard.cost.machine.figures import are_known
from autoshard.cost.machine.targets import Target

BACKENDS: Mapping[Target, type[Backend]] = {"cpu": CpuBackend, "gpu": GpuBackend, "tpu": TpuBackend}


def backend_of(device: Device) -> Backend:
    """The compiler of a device kind's target family; on a TPU kind without figures the coarse one."""
    if device.target == "tpu" and not are_known(device.kind):
        return CoarseTpuBackend(device)
    return BACKENDS[device.target](device)
