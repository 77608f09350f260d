"""Times collectives, kernels and the schedule of a compiled program under the device model."""

from __future__ import annotations

from typing import cast

from autoshard.cost.machine import cycles, measured
from autoshard.cost.machine.collectives import CollectiveKind, seconds
from autoshard.cost.machine.compute import roofline_seconds
from autoshard.cost.machine.device import Device
from autoshard.mesh import Mesh
from autoshard.verify.collectives import Reader
from autoshard.verify.compiled_collective import CompiledCollective
from autoshard.verify.hlo_text import Module
from autoshard.verify.targets import Family
from autoshard.verify.work import Kernel, Work

# A kind that the device model does not know costs as the one it resembles.
_LIKE = {"ragged-all-to-all": "all-to-all", "collective-broadcast": "all-gather"}


def collective_seconds(collective: CompiledCollective, mesh: Mesh, device: Device) -> float:
    """Seconds per step of one compiled collective.

    Groups that span no grid of the mesh count as spanning all axes they touch: an upper bound.
    """
    kind = cast(CollectiveKind, _LIKE.get(collective.kind, collective.kind))
    return collective.count * seconds(kind, mesh.spanned(collective.axes), collective.bytes, mesh, device)


class Clock:
    """Times kernels in program order; async copies run beside the kernel that follows."""

    def __init__(self, device: Device) -> None:
        """Of one program on a device kind."""
        self.device = device
        self.model = cycles.model_of(device)
        self.copied = 0.0

    def seconds(self, kernel: Kernel) -> float:
        """Seconds of one execution of a kernel."""
        if self.device.measured and kernel.flops:
            moving = roofline_seconds(0.0, kernel.bytes, "f32", self.device, kernels=0)
            return max(moving, self._measured(kernel)) + kernel.launches * self.device.kernel_overhead
        if self.model is None:
            return roofline(kernel, self.device)
        if kernel.copies:
            self.copied += kernel.bytes
            return 0.0
        moved, self.copied = kernel.bytes + self.copied, 0.0
        if kernel.registers is None or not kernel.launches or not cycles.DTYPES.issuperset(kernel.flops):
            return max(roofline(kernel, self.device), moved / self.device.reachable_bandwidth)
        return cycles.kernel_seconds(kernel.registers, moved, self.model.constants, self.device)

    def _measured(self, kernel: Kernel) -> float:
        """Seconds of the products of a kernel on a GPU that was measured, without a launch."""
        dtype, flops = max(kernel.flops.items(), key=lambda item: item[1])
        if kernel.attention is not None:
            of = kernel.attention
            return measured.fused_seconds(of.sizes, of.form, flops, of.forward, dtype, self.device)
        if kernel.registers is None or not kernel.registers.products:
            return flops / self.device.reachable_flops(dtype)
        return sum(
            measured.matrices_seconds(round(one.batch), round(one.m), round(one.n), round(one.k), dtype, self.device)
            for one in kernel.registers.products
        )


def roofline(kernel: Kernel, device: Device) -> float:
    """Seconds of one execution of a kernel: its roofline plus its launch."""
    if not kernel.flops:
        return roofline_seconds(0.0, kernel.bytes, "f32", device, kernels=kernel.launches)
    compute = sum(roofline_seconds(flops, 0.0, dtype, device, kernels=0) for dtype, flops in kernel.flops.items())
    memory = roofline_seconds(0.0, kernel.bytes, "f32", device, kernels=0)
    return max(compute, memory) + kernel.launches * device.kernel_overhead


def overlapped_seconds(module: Module, mesh: Mesh, device: Device, family: Family) -> float:
    """Step time of the compiler's schedule, in seconds.

    Simulates a stream of kernels, in printed order (the module is scheduled), and one of collectives: an async
    collective begins once its start is issued and the one before it has finished; its done waits for it. A synchronous
    one blocks the kernels. Every iteration of a loop takes as long as its first.
    """
    return _Schedule(module, mesh, device, family).run(module.entry, 0.0, 0.0)[0]


class _Schedule:
    """Simulates a schedule, for one `overlapped_seconds` call."""

    def __init__(self, module: Module, mesh: Mesh, device: Device, family: Family) -> None:
        self.module = module
        self.mesh = mesh
        self.device = device
        self.reader = Reader(module, mesh, family)
        self.work = Work(module, family == "tpu")
        self.clock = Clock(device)

    def run(self, name: str, now: float, free: float, loops: tuple[str, ...] = ()) -> tuple[float, float]:
        """Simulate a computation from `now`, with links free from `free` on; returns both times at its end.

        Args:
            loops: the computations around the loop that it is a body of, outermost first.
        """
        computation = self.module.computations[name]
        ends: dict[str | int, float] = {}
        for instruction in computation.instructions.values():
            opcode = instruction.opcode
            if opcode == "while":
                trips = self.module.trip_count(instruction)
                begin, free_before = now, max(free, now)
                for body in instruction.called:
                    now, free = self.run(body, now, free_before, (*loops, name))
                more = (now - begin) * ((1 if trips is None else trips) - 1)
                now, free = now + more, free + more
                continue
            if opcode in ("call", "conditional"):
                for called in instruction.called:
                    now, free = self.run(called, now, free, loops)
                continue
            fused = self.module.async_ends(instruction) if opcode == "fusion" else None
            found = self.reader.at(computation, instruction, loops=loops)
            moving = sum(collective_seconds(each, self.mesh, self.device) for each in found)
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
            now += sum(self.clock.seconds(kernel) for kernel in self.work.at(computation, instruction))
        return now, free
