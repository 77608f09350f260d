"""What XLA's latency hiding scheduler takes a GPU's kernels and collectives to last (`SolLatencyEstimator`).

Products come from a table of measured ones, all custom calls count alike. A collective within a host also comes from a
table; one between hosts is a ring over all of their network adapters, of which groups side by side share
(`sol_gpu_cost_model.cc`). Read off the log of jax 0.10.2 for H100, H200 and B200; a ring is within 10 % of it.
"""

from __future__ import annotations

import math

from autoshard.attention.form import KINDS as ATTENTIONS
from autoshard.cost.compiler.gpu.sums import Sums
from autoshard.cost.compiler.kernels import Kernel, operand_dtype
from autoshard.cost.compiler.lowered import COLLECTIVES, Lowered, matrices_of
from autoshard.cost.machine.collectives import Collective, group_sizes
from autoshard.cost.machine.device import Device
from autoshard.experts.form import KINDS as EXPERTS
from autoshard.graph.groups import BARRIER

CALLS = frozenset({"convolution", "custom_call", *ATTENTIONS, *EXPERTS})
"""Kinds of steps that compile to custom calls."""
CALL, TRITON, SHORTEST_SUM = 10e-6, 1e-8, 2e-6
"""Seconds of a custom call; of a Triton kernel (a layer norm or softmax); of a reduction, at least."""
PRODUCTS, NARROW = 0.82, 200
"""Of the peak, which large products reach; one whose smallest dim is this takes twice as long."""

START, RATE = 40e-6, 390e9
"""Of a collective within a host: seconds, and bytes per second of its larger side."""
BEGIN, TRIP, CHUNK, CHUNK_BYTES, HEADERS = 45e-6, 31e-6, 6e-6, 4 * 2**20, 1.025
"""Of a ring between hosts: seconds of its start, of each message, and of each chunk of one; what headers add."""
ADAPTER, ADAPTERS = {"h100": 25e9}, 50e9
"""Bytes per second of a network adapter, by kind, and of other kinds."""
PER_HOST = 8
"""GPUs, and network adapters, of a host as XLA assumes it."""
UNKNOWN = 5e-3
"""Seconds of groups of which a host has no whole number of rings."""


def kernel_seconds(kernel: Kernel, program: Lowered, device: Device, sums: Sums) -> float:
    """Seconds of one kernel or collective, without its launch, except of products."""
    if kernel.kind == BARRIER:
        return 0.0
    arrays = program.arrays
    reads = kernel.writes if kernel.kind == "slice" else kernel.reads
    moved = sum(arrays[array].bytes for array in (*reads, *kernel.writes))
    if kernel.kind in COLLECTIVES:
        return _collective(kernel, program, moved, device)
    kinds = {program.steps[number].kind for number in kernel.steps}
    if kinds & CALLS:
        return CALL
    if "dot_general" in kinds:
        dot = next(step for number in kernel.steps if (step := program.steps[number]).kind == "dot_general")
        working = kernel.flops / (PRODUCTS * device.peak_flops(operand_dtype(kernel, program)))
        working *= 1 + NARROW / max(1, min(matrices_of(program, dot)[1:]))
        return max(working, moved / device.memory_bandwidth) + device.kernel_overhead
    if sums.is_triton(kernel):
        return TRITON
    traffic = moved / device.memory_bandwidth
    return max(traffic, SHORTEST_SUM) if "reduce" in kinds else traffic


def _collective(kernel: Kernel, program: Lowered, moved: int, device: Device) -> float:
    combined = [each for number in kernel.steps if (each := program.steps[number].collective) is not None]
    size = sum(each.bytes for each in combined)
    rounds = 2 if kernel.kind == "all-reduce" else 1
    inside, total = group_sizes(combined[0].axes, program.mesh, device) if combined and program.mesh else (1, 1)
    if inside == total:
        return START + rounds * size / RATE
    return _between_hosts(combined[0], size, inside, total, program, device) + moved / device.memory_bandwidth


def _between_hosts(one: Collective, size: int, inside: int, total: int, program: Lowered, device: Device) -> float:
    """Seconds of a ring over `total` devices, `inside` of each host."""
    assert program.mesh is not None
    rings = max(1, program.mesh.size // total)
    if PER_HOST % rings:
        return UNKNOWN
    hosts = total // inside if rings == 1 else total
    count = hosts * PER_HOST // rings

    def message(bytes: float) -> float:
        sent: float = bytes * HEADERS / ADAPTER.get(device.kind, ADAPTERS)
        return sent + math.ceil(bytes / CHUNK_BYTES) * CHUNK + TRIP

    if one.kind == "all-to-all":
        return BEGIN + count // hosts * (hosts - 1) * message(size / (count - 1))
    if one.kind == "collective-permute":
        return BEGIN + message(size)
    rounds = 2 if one.kind == "all-reduce" else 1
    return BEGIN + rounds * (count - 1) / (count / hosts) * message(size / count)
