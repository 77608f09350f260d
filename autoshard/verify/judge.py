"""Times a compiled program under the device model, to rank plans by their compiled programs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from autoshard.cost.machine.device import Device, load_device
from autoshard.mesh import Mesh
from autoshard.verify.collectives import compiled_collectives
from autoshard.verify.compile import Compiled
from autoshard.verify.compiled_collective import CompiledCollective
from autoshard.verify.hlo_text import parse_hlo
from autoshard.verify.schedule import Clock, collective_seconds, overlapped_seconds
from autoshard.verify.work import CompiledWork, compiled_work


@dataclass(frozen=True)
class Judged:
    """Seconds of one step of a compiled program.

    Attributes:
        communication_s: of its collectives.
        compute_s: of its kernels.
        flops, bytes: per device and step, of its dots and convolutions, and of its kernels.
        collective_bytes: per device and step.
        memory_bytes: peak per device by the compiler's buffer assignment.
        overlapped_s: step time when async collectives overlap with the kernels scheduled between their start and done
            (`schedule.py`), never more than one after the other; None where not computed.
    """

    communication_s: float
    compute_s: float
    flops: float
    bytes: float
    collective_bytes: int
    memory_bytes: int | None = None
    overlapped_s: float | None = None

    @property
    def step_time_s(self) -> float:
        """Serial step time in seconds."""
        return self.communication_s + self.compute_s

    def scheduled(self, overlapped_s: float) -> Judged:
        """With the compiler's schedule, which prices what crosses TPU slices part by part, and may be too long so."""
        return replace(self, overlapped_s=min(overlapped_s, self.step_time_s))

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {"step_time_s": self.step_time_s, **asdict(self)}


def judge(compiled: Compiled, mesh: Mesh, device: Device | None = None) -> Judged:
    """Time a compiled program on `mesh`; `device` is by default the target's kind."""
    kind = device or load_device(compiled.target.device)
    module = parse_hlo(compiled.hlo_text)
    family = compiled.target.family
    found = judged(
        compiled_collectives(module, mesh, family), compiled_work(module, family), mesh, kind, compiled.memory.peak
    )
    return found.scheduled(overlapped_seconds(module, mesh, kind, family))


def judged(
    collectives: Iterable[CompiledCollective],
    work: CompiledWork,
    mesh: Mesh,
    device: Device,
    memory_bytes: int | None = None,
) -> Judged:
    """Time the collectives and kernels read from a compiled program."""
    collectives, clock = list(collectives), Clock(device)
    return Judged(
        communication_s=sum(collective_seconds(each, mesh, device) for each in collectives),
        compute_s=sum(kernel.count * clock.seconds(kernel) for kernel in work.kernels),
        flops=work.flops,
        bytes=work.bytes,
        collective_bytes=sum(each.total_bytes for each in collectives),
        memory_bytes=memory_bytes,
    )
