"""Seconds of collectives and kernels of a compiled program, and of its schedule."""

from __future__ import annotations

from typing import cast

from autoshard.cost.machine.collectives import CollectiveKind, seconds
from autoshard.cost.machine.compute import roofline_seconds
from autoshard.cost.machine.device import Device
from autoshard.mesh import Mesh
from autoshard.verify.collectives import Reader
from autoshard.verify.compiled_collective import CompiledCollective
from autoshard.verify.hlo_text import Module
from autoshard.verify.targets import Family
from autoshard.verify.work import Kernel, Work

# What a kind that the device model does not know costs: as the one it resembles.
_LIKE = {"ragged-all-to-all": "all-to-all", "collective-broadcast": "all-gather"}


def collective_seconds(collective: CompiledCollective, mesh: Mesh, device: Device) -> float:
    """Seconds per step of one compiled collective.

    Groups along a part of an axis, or along no grid of the mesh, are taken to run over all of the axes they touch: an
    upper bound.
    """
    kind = cast(CollectiveKind, _LIKE.get(collective.kind, collective.kind))
    return collective.count * seconds(kind, mesh.spanned(collective.axes), collective.bytes, mesh, device)


def kernel_seconds(kernel: Kernel, device: Device) -> float:
    """Seconds of one execution of a kernel: the roofline of its products and its bytes, and its launch."""
    if not kernel.flops:
        return roofline_seconds(0.0, kernel.bytes, "f32", device, kernels=kernel.launches)
    compute = sum(roofline_seconds(flops, 0.0, dtype, device, kernels=0) for dtype, flops in kernel.flops.items())
    memory = roofline_seconds(0.0, kernel.bytes, "f32", device, kernels=0)
    return max(compute, memory) + kernel.launches * device.kernel_overhead


def overlapped_seconds(module: Module, mesh: Mesh, device: Device, family: Family) -> float:
    """Seconds of one step as the compiler scheduled it.

    One stream of kernels, in printed order (a compiled module is scheduled), and one of collectives: an async
    collective starts when both its start is reached and the one before it has finished, and its end waits for it. A
    synchronous one stops the kernels. A loop takes its first turn's seconds each time.
    """
    return _Schedule(module, mesh, device, family).run(module.entry, 0.0, 0.0)[0]


class _Schedule:
    """Plays a schedule; state of one `overlapped_seconds` call."""

    def __init__(self, module: Module, mesh: Mesh, device: Device, family: Family) -> None:
        self.module = module
        self.mesh = mesh
        self.device = device
        self.reader = Reader(module, mesh, family)
        self.work = Work(module, family == "tpu")

    def run(self, name: str, now: float, free: float) -> tuple[float, float]:
        """Play a computation that starts at `now`, the links free from `free` on; both at its end, in seconds."""
        computation = self.module.computations[name]
        ends: dict[str | int, float] = {}
        for instruction in computation.instructions.values():
            opcode = instruction.opcode
            if opcode == "while":
                trips = self.module.trip_count(instruction)
                begin, free_before = now, max(free, now)
                for body in instruction.called:
                    now, free = self.run(body, now, free_before)
                more = (now - begin) * ((1 if trips is None else trips) - 1)
                now, free = now + more, free + more
                continue
            if opcode in ("call", "conditional"):
                for called in instruction.called:
                    now, free = self.run(called, now, free)
                continue
            fused = self.module.async_ends(instruction) if opcode == "fusion" else None
            moving = sum(
                collective_seconds(each, self.mesh, self.device) for each in self.reader.at(computation, instruction)
            )
            if moving:
                finish = max(now, free) + moving
                free = finish
                if opcode.endswith("-start"):
                    ends[instruction.name] = finish
                elif fused is not None and fused[0] == "start" and fused[1] is not None:
                    ends[fused[1]] = finish
                else:
                    now = finish
            elif opcode.endswith("-done") and instruction.operands:
                now = max(now, ends.get(instruction.operands[0], now))
            elif fused is not None and fused[0] == "done" and fused[1] is not None:
                now = max(now, ends.get(fused[1], now))
            now += sum(kernel_seconds(kernel, self.device) for kernel in self.work.at(computation, instruction))
        return now, free
