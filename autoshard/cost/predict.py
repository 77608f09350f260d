"""What a set of annotations costs: propagation, partitioning, roofline, collectives and memory put together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autoshard.cost.backend import Compiled, backend_of
from autoshard.cost.collectives import Collective, seconds
from autoshard.cost.compute import CONTRACTIONS, op_flops, roofline_seconds
from autoshard.cost.device import Device
from autoshard.cost.lowered import COLLECTIVES, lower
from autoshard.cost.spmd import OpRun, Partitioned, partition
from autoshard.graph.annotations import Annotations
from autoshard.graph.groups import INDEXED, Group, Groups, fusion_groups, is_view
from autoshard.graph.ops import Graph, Op, Value
from autoshard.graph.propagate import Shardings, propagate
from autoshard.graph.rules import rule_for
from autoshard.graph.transfer import bytes_of
from autoshard.mesh import Mesh, Spec

_GRADIENT_KINDS = ("all-reduce", "reduce-scatter")


@dataclass(frozen=True)
class ReplicatedOp:
    """An op that no rule covers, and that every device therefore computes whole.

    Attributes:
        op: its StableHLO kind, or a custom call's target.
        module: path of its module.
        reason: why, for a person.
        cost_s: seconds of a step that it takes, replicated.
        id: its op id.
    """

    op: str
    module: str
    reason: str
    cost_s: float
    id: int


@dataclass(frozen=True)
class Prediction:
    """What the cost model says of one step under some annotations.

    Attributes:
        step_time_s: compute and communication one after the other, in seconds.
        compute_s, communication_s: its two parts.
        overlapped_s: step time when the collectives of gradients run beside the backward pass.
        mfu: FLOP of the program, each op counted once over the whole mesh, over what all devices could do in
            `step_time_s` at their peak.
        collectives: every collective of a step, with the op it comes from.
        peak_memory_bytes: per device.
        replicated_ops: what had to be replicated for want of a rule.
        specs: value -> the sharding its readers find.
        compiled: the kernels of one device in the order in which the target's compiler is taken to run them.
    """

    step_time_s: float
    compute_s: float
    communication_s: float
    overlapped_s: float
    mfu: float
    collectives: tuple[Collective, ...] = field(repr=False)
    peak_memory_bytes: int
    replicated_ops: tuple[ReplicatedOp, ...] = field(repr=False)
    specs: Mapping[Value, Spec] = field(repr=False)
    compiled: Compiled = field(repr=False)


def predict(
    graph: Graph, annotations: Annotations, mesh: Mesh, device: Device, *, groups: Groups | None = None
) -> Prediction:
    """What `graph` costs under `annotations` on `mesh` of `device`; what is not annotated follows from propagation.

    Args:
        groups: `fusion_groups(graph)`, if the caller has it.
    """
    groups = fusion_groups(graph) if groups is None else groups
    shardings = propagate(graph, annotations, mesh)
    partitioned = partition(graph, shardings, device.target)
    flops = [op_flops(op, graph) for op in graph.ops]
    target = device.target
    lowered = lower(graph, shardings, partitioned, barriers=target != "cpu", ordered=target == "tpu")
    compiled = backend_of(device).compile(lowered)
    compute = _kernel_seconds(compiled, groups, device)
    if compute is None:
        compute = [_group_seconds(group, graph, shardings, partitioned, flops, device) for group in groups.groups]
    collectives = partitioned.collectives
    times = [each.count * seconds(each.kind, each.axes, each.bytes, mesh, device) for each in collectives]
    compute_s, communication_s = sum(compute), sum(times)
    step = compute_s + communication_s
    peak = mesh.size * device.peak_flops(_main_dtype(graph, flops))
    return Prediction(
        step_time_s=step,
        compute_s=compute_s,
        communication_s=communication_s,
        overlapped_s=_overlapped(graph, groups, compute, collectives, times),
        mfu=sum(flops) / (step * peak) if step > 0 else 0.0,
        collectives=collectives,
        peak_memory_bytes=compiled.peak_bytes,
        compiled=compiled,
        replicated_ops=_replicated(graph, groups, flops, device),
        specs=shardings.specs,
    )


def _kernel_seconds(compiled: Compiled, groups: Groups, device: Device) -> list[float] | None:
    """Rooflines of the compiler's kernels, per group that their last op is in; None where no traffic is known."""
    if compiled.placement is None or not groups.groups:
        return None
    steps, arrays = compiled.program.steps, compiled.program.arrays
    found = [0.0] * len(groups.groups)
    for kernel, moved in zip(compiled.kernels, compiled.placement.moved, strict=True):
        if kernel.kind in COLLECTIVES:
            continue
        products = [steps[number] for number in kernel.steps if steps[number].flops]
        dtype = arrays[products[0].reads[0]].dtype if products and products[0].reads else "f32"
        group = groups.of.get(steps[kernel.steps[-1]].op)
        found[0 if group is None else group] += roofline_seconds(kernel.flops, moved, dtype, device)
    return found


def _group_seconds(
    group: Group, graph: Graph, shardings: Shardings, partitioned: Partitioned, flops: Sequence[float], device: Device
) -> float:
    """Roofline of one kernel: its ops' FLOPs on one device, and the parts that cross its boundary."""
    if is_view(group, graph):
        return 0.0
    work, moved = 0.0, 0
    dtype = "f32"
    heads = [graph.ops[member] for member in group.ops]
    for op in heads:
        work += flops[op.id] * partitioned.runs[op.id].share
        if op.kind in CONTRACTIONS:
            dtype = graph.type_of(op.operands[0]).dtype
    members = set(group.ops)
    read: dict[Value, int] = {}
    for op in heads:
        for value, tiling in zip(op.operands, partitioned.runs[op.id].reads, strict=True):
            if value.op not in members and value in group.inputs:
                size = _bytes(op, value, tiling, graph, shardings, partitioned.runs[op.id])
                read[value] = max(read.get(value, 0), size)
    moved += sum(read.values())
    for value in group.outputs:
        kind = graph.type_of(value)
        moved += math.prod(shardings.subaxes.shard(kind.shape, shardings.made[value])) * bytes_of(kind.dtype)
    return roofline_seconds(work, moved, dtype, device)


def _bytes(
    op: Op, value: Value, tiling: tuple[tuple[int, ...], ...], graph: Graph, shardings: Shardings, run: OpRun
) -> int:
    """Bytes that an op reads of an operand: of indexed operands and slices, only what it takes."""
    kind = graph.type_of(value)
    size = math.prod(shardings.subaxes.shard(kind.shape, tiling)) * bytes_of(kind.dtype)
    if op.kind in INDEXED and value == op.operands[0]:
        result = op.results[0]
        taken = math.prod(result.shape) * bytes_of(result.dtype) * run.share
        return min(size, math.ceil(taken))
    return size


def _main_dtype(graph: Graph, flops: Sequence[float]) -> str:
    """The dtype in which most matrix FLOPs are done."""
    totals: dict[str, float] = {}
    for op in graph.ops:
        if op.kind in CONTRACTIONS:
            dtype = graph.type_of(op.operands[0]).dtype
            totals[dtype] = totals.get(dtype, 0.0) + flops[op.id]
    return max(totals, key=lambda dtype: totals[dtype]) if totals else "f32"


def _overlapped(
    graph: Graph,
    groups: Groups,
    compute: Sequence[float],
    collectives: Sequence[Collective],
    times: Sequence[float],
) -> float:
    """Step time when gradients are reduced beside the backward pass, one after the other.

    A collective is a gradient's if it sums what only the optimizer reads. The optimizer starts when all are done.
    """
    phases = [_phase(graph, op) for op in graph.ops]
    backward_reads = bytearray(len(graph.ops))
    for op in graph.ops:
        if phases[op.id] != "optimizer":
            for value in op.operands:
                backward_reads[value.op] = 1
    at: dict[int, list[int]] = {}
    for number, each in enumerate(collectives):
        if each.op is not None:
            at.setdefault(each.op, []).append(number)
    now = sum(time for each, time in zip(collectives, times, strict=True) if each.op is None)
    reduced = now
    started = False
    for group, own in zip(groups.groups, compute, strict=True):
        if not started and phases[group.ops[-1]] == "optimizer":
            started = True
            now = max(now, reduced)
        for member in group.ops:
            for number in at.pop(member, ()):
                gradient = (
                    phases[member] == "backward"
                    and collectives[number].kind in _GRADIENT_KINDS
                    and not backward_reads[member]
                )
                if gradient:
                    reduced = max(reduced, now + own) + times[number]
                else:
                    now += times[number]
        now += own
    return max(now, reduced) + sum(times[number] for numbers in at.values() for number in numbers)


def _phase(graph: Graph, op: Op) -> str:
    if op.aten is None or op.aten >= len(graph.program.ops):
        return ""
    return graph.program.ops[op.aten].phase


def _replicated(graph: Graph, groups: Groups, flops: Sequence[float], device: Device) -> tuple[ReplicatedOp, ...]:
    found = []
    for op in graph.ops:
        if op.kind == "argument" or op.id in groups.free or rule_for(op, graph) is not None:
            continue
        size = sum(
            math.prod(kind.shape) * bytes_of(kind.dtype)
            for kind in (*op.results, *(graph.type_of(value) for value in op.operands))
        )
        name = op.attrs["target"] if op.kind == "custom_call" else op.kind
        reason = f"{name} has no sharding rule: every device computes all of it"
        found.append(ReplicatedOp(name, op.module, reason, roofline_seconds(flops[op.id], size, "f32", device), op.id))
    return tuple(found)
