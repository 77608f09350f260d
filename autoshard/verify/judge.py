"""The step time of a compiled program under the device model: how plans are ranked by what XLA made of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

from autoshard.cost.collectives import CollectiveKind, seconds
from autoshard.cost.compute import roofline_seconds
from autoshard.cost.device import Device, load_device
from autoshard.mesh import Mesh
from autoshard.verify.collectives import CompiledCollective, compiled_collectives
from autoshard.verify.compile import Compiled
from autoshard.verify.hlo_text import parse_hlo
from autoshard.verify.work import CompiledWork, Kernel, compiled_work

# What a kind that the device model does not know costs: as the one it resembles.
_LIKE = {"ragged-all-to-all": "all-to-all", "collective-broadcast": "all-gather"}


@dataclass(frozen=True)
class Judged:
    """Seconds of one step of a compiled program, all of it serial.

    Attributes:
        communication_s: its collectives.
        compute_s: its kernels, each at its roofline.
        flops, bytes: per device and step, of its dots and convolutions, and of its kernels.
        collective_bytes: per device and step.
        memory_bytes: per device, what the compiler lays out.
    """

    communication_s: float
    compute_s: float
    flops: float
    bytes: float
    collective_bytes: int
    memory_bytes: int | None = None

    @property
    def step_time_s(self) -> float:
        """Seconds of one step when nothing overlaps."""
        return self.communication_s + self.compute_s

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "step_time_s": self.step_time_s,
            "communication_s": self.communication_s,
            "compute_s": self.compute_s,
            "flops": self.flops,
            "bytes": self.bytes,
            "collective_bytes": self.collective_bytes,
            "memory_bytes": self.memory_bytes,
        }


def judge(compiled: Compiled, mesh: Mesh, device: Device | None = None) -> Judged:
    """Judge a compiled program on `mesh`; `device` is the kind of the target unless another is given."""
    kind = device or load_device(compiled.target.device)
    module = parse_hlo(compiled.hlo_text)
    family = compiled.target.family
    return judged(
        compiled_collectives(module, mesh, family), compiled_work(module, family), mesh, kind, compiled.memory.peak
    )


def judged(
    collectives: Iterable[CompiledCollective],
    work: CompiledWork,
    mesh: Mesh,
    device: Device,
    memory_bytes: int | None = None,
) -> Judged:
    """Judge what was read from a compiled program."""
    collectives = list(collectives)
    return Judged(
        communication_s=sum(collective_seconds(each, mesh, device) for each in collectives),
        compute_s=sum(kernel.count * kernel_seconds(kernel, device) for kernel in work.kernels),
        flops=work.flops,
        bytes=work.bytes,
        collective_bytes=sum(each.total_bytes for each in collectives),
        memory_bytes=memory_bytes,
    )


def collective_seconds(collective: CompiledCollective, mesh: Mesh, device: Device) -> float:
    """Seconds per step of one compiled collective.

    Groups along a part of an axis, or along no grid of the mesh, are taken to run over all of the axes they touch: an
    upper bound.
    """
    touched = {name for axis in collective.axes for name in axis.partition("[")[0].split("~")}
    kind = cast(CollectiveKind, _LIKE.get(collective.kind, collective.kind))
    return collective.count * seconds(kind, mesh.in_order(touched), collective.bytes, mesh, device)


def kernel_seconds(kernel: Kernel, device: Device) -> float:
    """Seconds of one execution of a kernel: the roofline of its products and its bytes, and its launch."""
    if not kernel.flops:
        return roofline_seconds(0.0, kernel.bytes, "f32", device, kernels=kernel.launches)
    compute = sum(roofline_seconds(flops, 0.0, dtype, device, kernels=0) for dtype, flops in kernel.flops.items())
    memory = roofline_seconds(0.0, kernel.bytes, "f32", device, kernels=0)
    return max(compute, memory) + kernel.launches * device.kernel_overhead
