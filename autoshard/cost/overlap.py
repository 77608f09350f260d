"""Step time when collectives run beside kernels.

On GPUs from Hopper on, those that run between start and done in the modelled schedule (`compiler/latency.py`); they
take multiprocessors from the kernels beside them. On TPUs gathers of what is made of parameters alone run ahead, one
after the other in the order of their use; a kernel waits for those that it reads. libtpu, by default, issues sums in
line. Permutes of a windowed einsum run beside its product (Wang et al., "Overlap Communication with Dependent
Computation via Decomposition", ASPLOS 2023); every other collective, alone. A CPU's compiler issues none
asynchronously. PyTorch's runtime gathers parameters ahead and sums gradients behind, in the order of its kernels.
"""

from __future__ import annotations

from collections.abc import Sequence

from autoshard.cost.compiler.backend import Compiled
from autoshard.cost.compiler.eager import Gathers
from autoshard.cost.compiler.lowered import COLLECTIVES, END, SUMS, Lowered, Step
from autoshard.cost.compiler.timing import collective_seconds
from autoshard.cost.machine.collectives import Collective
from autoshard.cost.machine.compute import MATRIX_WORK
from autoshard.cost.machine.device import Device
from autoshard.cost.partitioner.reshard.price import gathers_all_as_sums
from autoshard.graph.groups import Groups
from autoshard.graph.ops import Graph
from autoshard.mesh import Mesh, Spec, spec_axes

_COMMUNICATING = 20
"""Multiprocessors of a GPU that communicate (DeepSeek-V3 technical report, arXiv:2412.19437: 20 of an H800's 132)."""


def taken_share(device: Device) -> float:
    """The share of a device's compute that a collective takes from kernels beside it."""
    return _COMMUNICATING / device.multiprocessors if device.multiprocessors > _COMMUNICATING else 0.0


def hides_sums(device: Device) -> bool:
    """Whether it issues sums asynchronously too: libtpu, by default, does not."""
    return device.target == "gpu"


def hides(source: Spec, target: Spec, mesh: Mesh, device: Device) -> bool:
    """Whether a reshard of a weight can run beside kernels: on a TPU an all-gather that is not compiled as a sum."""
    if hides_sums(device):
        return True
    gathered = spec_axes(source) - spec_axes(target)
    return bool(gathered) and not gathers_all_as_sums(mesh.in_order(gathered), mesh, device.target)


def overlapped(
    graph: Graph,
    groups: Groups,
    compute: Sequence[float],
    collectives: Sequence[Collective],
    times: Sequence[float],
    device: Device,
) -> float:
    """Seconds of a step; never more than all of `compute` (by group) and `times` (by collective) in sequence."""
    if not device.overlaps:
        return sum(compute) + sum(times)
    weights = made_of_parameters(graph)
    at: dict[int, list[int]] = {}
    for number, each in enumerate(collectives):
        if each.op is not None:
            at.setdefault(each.op, []).append(number)
    now = sum(time for each, time in zip(collectives, times, strict=True) if each.op is None)
    gathered = now
    for group, own in zip(groups.groups, compute, strict=True):
        left = own  # of the group's kernels, that no permute runs beside
        read = [value.op for value in group.inputs if graph.ops[value.op].kind == "argument"]
        for op in (*dict.fromkeys(read), *group.ops):
            for number in at.pop(op, ()):
                each = collectives[number]
                if op in weights and each.kind == "all-gather":
                    gathered += times[number]
                    now = max(now, gathered)
                elif each.kind == "collective-permute" and graph.ops[op].kind == "dot_general":
                    now += max(0.0, times[number] - left)
                    left = max(0.0, left - times[number])
                else:
                    now += times[number]
        now += own
    rest = sum(times[number] for numbers in at.values() for number in numbers)
    return max(now, gathered) + rest


def made_of_parameters(graph: Graph) -> set[int]:
    """Ops whose results are made of parameters alone."""
    roles = zip(graph.arguments, graph.program.arguments, strict=True)
    found = {op for op, argument in roles if argument.role == "parameter"}
    for op in graph.ops:
        made = op.kind != "argument" and op.operands and op.kind not in MATRIX_WORK
        if made and all(value.op in found for value in op.operands):
            found.add(op.id)
    return found


def as_scheduled(compiled: Compiled, kernels: Sequence[float], mesh: Mesh, device: Device) -> float:
    """Seconds of a GPU program in its modelled schedule; one collective at a time is in flight.

    Args:
        kernels: seconds of each kernel, 0 of collectives.
    """
    steps, graph = compiled.program.steps, compiled.program.graph
    times = iter(collective_seconds(compiled.collectives, compiled, mesh, device))
    now = flown = serial = 0.0
    due: dict[int, float] = {}  # array -> when the collective that makes it ends
    for kernel, own in zip(compiled.kernels, kernels, strict=True):
        if kernel.kind in COLLECTIVES:
            made = [each for number in kernel.steps if (each := steps[number].collective) is not None]
            taken = sum(next(times) * (1 if each.once else graph.runs(each.op)) for each in made)
            serial += taken
            flown = max(now, flown) + taken
            due.update(dict.fromkeys(kernel.writes, flown))
        elif kernel.kind == END:
            now = max(now, *(due.get(array, 0.0) for array in kernel.reads))
        now += own
        serial += own
    found = max(now, flown) if device.overlaps else serial
    return found + taken_share(device) * max(0.0, serial - found)


def streamed(compiled: Compiled, kernels: Sequence[float], collectives: Sequence[float]) -> float:
    """Seconds of a step in which parameters are gathered ahead, and gradients summed behind.

    Args:
        kernels: seconds of each kernel, 0 of collectives; `collectives`: of each collective, in their order.
    """
    gathers = Gathers(compiled.program)
    steps, times = compiled.program.steps, iter(collectives)
    ready: dict[int, float] = {}  # array -> when it is there, of those that are made beside the kernels
    now = gathered = summed = 0.0
    for kernel, own in zip(compiled.kernels, kernels, strict=True):
        if kernel.kind not in COLLECTIVES:
            now = max(now, *(ready.pop(array, 0.0) for array in kernel.reads), 0.0) + own
            continue
        taken = sum(next(times) for _ in kernel.steps)
        step = steps[kernel.steps[-1]]
        if gathers.is_made(step):
            gathered += taken
            ready.update(dict.fromkeys(kernel.writes, gathered))
        elif kernel.kind in SUMS and gathers.of(step)[0] == "backward" and _ends(compiled.program, step):
            summed = max(now, summed) + taken
            ready.update(dict.fromkeys(kernel.writes, summed))
        else:
            now = max(now, *(ready.pop(array, 0.0) for array in kernel.reads), 0.0) + taken
    return max(now, summed, sum(collectives))


def _ends(program: Lowered, step: Step) -> bool:
    """Whether what a step makes is read by no product."""
    return all(
        program.steps[reader].kind not in MATRIX_WORK and program.graph.phase(program.steps[reader].op) != "forward"
        for array in step.writes
        for reader in program.arrays[array].readers
    )
