"""Seconds of a device's scheduled program: its kernels, by rooflines or models, and its combined collectives."""

from __future__ import annotations

from collections.abc import Sequence

from autoshard.cost.compiler.backend import Compiled
from autoshard.cost.compiler.backends import backend_of
from autoshard.cost.compiler.kernels import Kernel, operand_dtype
from autoshard.cost.compiler.lowered import COLLECTIVES, Lowered
from autoshard.cost.machine.collectives import Collective, seconds
from autoshard.cost.machine.compute import roofline_seconds
from autoshard.cost.machine.device import Device
from autoshard.cost.machine.libraries import Library
from autoshard.cost.machine.measured import matrix_seconds
from autoshard.mesh import Mesh


def kernel_seconds(compiled: Compiled, device: Device, library: Library = matrix_seconds) -> list[float]:
    """Per kernel in order its seconds, with copies to and from on-chip memory; 0 for collectives.

    Args:
        library: seconds of products and attention on a device that was measured.
    """
    steps = compiled.program.steps
    found = []
    modelled = backend_of(device).kernel_seconds(compiled)
    for kernel, known, touched, copied in zip(
        compiled.kernels, modelled, compiled.touched, compiled.copied, strict=True
    ):
        if known is not None:
            found.append(known)
            continue
        copying = roofline_seconds(0.0, sum(copied.values()), "f32", device, kernels=0)
        if kernel.kind in COLLECTIVES:
            found.append(copying)
            continue
        inner = [steps[number].inner for number in kernel.steps]
        size = sum(touched.values()) + sum(each for each, _ in inner)
        kernels = 1 + int(sum(count for _, count in inner))
        dtype = operand_dtype(kernel, compiled.program)
        if device.measured and kernel.flops:
            moving = roofline_seconds(0.0, size, dtype, device, kernels=0)
            working = max(moving, _products_seconds(kernel, compiled.program, dtype, device, library))
            found.append(working + kernels * device.kernel_overhead + copying)
        else:
            found.append(roofline_seconds(kernel.flops, size, dtype, device, kernels=kernels) + copying)
    return found


def _products_seconds(kernel: Kernel, program: Lowered, dtype: str, device: Device, library: Library) -> float:
    steps = [step for number in kernel.steps if (step := program.steps[number]).flops]
    return sum(library(program.graph.ops[step.op], step.shapes, step.flops, dtype, device) for step in steps)


def collective_seconds(
    collectives: Sequence[Collective], compiled: Compiled, mesh: Mesh, device: Device
) -> list[float]:
    """Seconds of every collective: combined ones share one alpha."""
    steps = compiled.program.steps
    together: dict[int, int] = {}  # a collective -> how many are combined with it
    for kernel in compiled.kernels:
        if kernel.kind in COLLECTIVES:
            members = [each for number in kernel.steps if (each := steps[number].collective) is not None]
            together.update((id(each), len(members)) for each in members)
    return [
        each.count * seconds(each.kind, each.axes, each.bytes, mesh, device, together.get(id(each), 1))
        for each in collectives
    ]
