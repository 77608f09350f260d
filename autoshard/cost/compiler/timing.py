"""Seconds of a compiled device program: rooflines of its kernels, and its collectives as they are combined."""

from __future__ import annotations

from collections.abc import Sequence

from autoshard.cost.compiler.backend import Compiled
from autoshard.cost.compiler.lowered import COLLECTIVES
from autoshard.cost.machine.collectives import Collective, coefficients
from autoshard.cost.machine.compute import roofline_seconds
from autoshard.cost.machine.device import Device
from autoshard.mesh import Mesh


def kernel_seconds(compiled: Compiled, device: Device) -> list[float]:
    """Roofline of every kernel, 0 for collectives, and the copies to and from on-chip memory for it, in order."""
    steps, arrays = compiled.program.steps, compiled.program.arrays
    found = []
    for kernel, touched, copied in zip(compiled.kernels, compiled.touched, compiled.copied, strict=True):
        copying = roofline_seconds(0.0, sum(copied.values()), "f32", device, kernels=0)
        if kernel.kind in COLLECTIVES:
            found.append(copying)
            continue
        products = [steps[number] for number in kernel.steps if steps[number].flops]
        dtype = arrays[products[0].reads[0]].dtype if products and products[0].reads else "f32"
        inner = [steps[number].inner for number in kernel.steps]
        size = sum(touched.values()) + sum(each for each, _ in inner)
        kernels = 1 + int(sum(count for _, count in inner))
        found.append(roofline_seconds(kernel.flops, size, dtype, device, kernels=kernels) + copying)
    return found


def collective_seconds(
    collectives: Sequence[Collective], compiled: Compiled, mesh: Mesh, device: Device
) -> list[float]:
    """Seconds of every collective: those that the compiler combines start once, and share what that takes."""
    steps = compiled.program.steps
    together: dict[int, int] = {}  # a collective -> how many run as one with it
    for kernel in compiled.kernels:
        if kernel.kind in COLLECTIVES:
            members = [each for number in kernel.steps if (each := steps[number].collective) is not None]
            together.update((id(each), len(members)) for each in members)
    found = []
    for each in collectives:
        start, per_byte = coefficients(each.kind, each.axes, mesh, device)
        found.append(each.count * (start / together.get(id(each), 1) + per_byte * each.bytes) if each.bytes else 0.0)
    return found
