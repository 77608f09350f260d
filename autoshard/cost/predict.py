"""What a set of annotations costs: propagation, partitioning, roofline, collectives and memory put together."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autoshard.cost.compiler.backend import Compiled
from autoshard.cost.compiler.backends import backend_of
from autoshard.cost.compiler.eager import Eager, EagerBackend
from autoshard.cost.compiler.lowered import lower
from autoshard.cost.compiler.timing import collective_seconds, kernel_seconds
from autoshard.cost.machine.bars import Bars, bars_of
from autoshard.cost.machine.collectives import Collective
from autoshard.cost.machine.compute import BODIES, MATRIX_WORK, op_flops, roofline_seconds
from autoshard.cost.machine.device import Device, load_device
from autoshard.cost.machine.libraries import library
from autoshard.cost.machine.measured import matrix_seconds
from autoshard.cost.machine.targets import Target
from autoshard.cost.overlap import as_scheduled, overlapped, streamed
from autoshard.cost.partitioner.partition import partition
from autoshard.cost.partitioner.partitioned import Partitioned
from autoshard.cost.partitioner.passes.merge import equal_ops, merged
from autoshard.cost.partitioner.passes.recomputed import recomputed_ops
from autoshard.cost.partitioner.passes.simplify import simplified
from autoshard.cost.partitioner.propagate import Shardings, propagate
from autoshard.dtypes import dtype_bytes
from autoshard.experts.form import KINDS as EXPERTS
from autoshard.graph.annotations import Annotations
from autoshard.graph.groups import Groups, free_ops, fusion_groups
from autoshard.graph.ops import Graph, Value
from autoshard.graph.rules.table import rule_for
from autoshard.mesh import Mesh, Spec

_UNMEASURED = {"convolution", "sort", *EXPERTS}
"""Kinds of ops in none of the steps that others measured."""


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
        overlapped_s: step time when collectives run beside kernels (`overlap.py`); what plans are compared by.
        mfu: FLOP of the program, each op counted once over the whole mesh and none that only computes again what a
            checkpoint has let go of, over what all devices could do in `step_time_s` at their peak.
        collectives: every collective of a step, with the op it comes from.
        peak_memory_bytes: per device.
        bars: how far off step times and memory may be.
        replicated_ops: what had to be replicated for want of a rule.
        specs: value -> the sharding its readers find.
        compiled: the kernels of one device in the order in which the target's compiler is taken to run them.
        kernel_s, collective_s: seconds of every kernel, with the graph op that it ends with, and of every collective.
    """

    step_time_s: float
    compute_s: float
    communication_s: float
    overlapped_s: float
    mfu: float
    collectives: tuple[Collective, ...] = field(repr=False)
    peak_memory_bytes: int
    bars: Bars
    replicated_ops: tuple[ReplicatedOp, ...] = field(repr=False)
    specs: Mapping[Value, Spec] = field(repr=False)
    compiled: Compiled = field(repr=False)
    kernel_s: tuple[tuple[int | None, float], ...] = field(repr=False)
    collective_s: tuple[float, ...] = field(repr=False)


def predict(
    graph: Graph,
    annotations: Annotations,
    mesh: Mesh,
    device: Device | None = None,
    *,
    groups: Groups | None = None,
    as_compiled: bool = False,
    eager: Eager | None = None,
) -> Prediction:
    """What `graph` costs under `annotations` on `mesh` of `device`; what is not annotated follows from propagation.

    Args:
        device: the kind that `mesh` names where none is given.
        groups: `fusion_groups(graph)`, if the caller has it.
        as_compiled: of a step of several micro-batches, what the two that are captured cost.
        eager: PyTorch on a GPU as the runtime, instead of XLA.

    Raises:
        ValueError: `eager` on a device that is no GPU.
    """
    if as_compiled:
        graph = replace(graph, program=replace(graph.program, micro_steps=None))
    device = load_device(mesh.device) if device is None else device
    target = device.target
    if eager and target != "gpu":
        raise ValueError(f"PyTorch's eager runtime is predicted for GPUs, not for {device.name}")
    graph = simplified(graph, target)
    groups = fusion_groups(graph) if groups is None else groups
    flops = [op_flops(op, graph) for op in graph.ops]
    again = recomputed_ops(graph)
    useful = sum(graph.runs(number) * each for number, each in enumerate(flops) if number not in again)
    shardings, partitioned = _partitioned(graph, annotations, mesh, target)
    equal = _moved_again(graph, annotations, shardings, partitioned) if device.compiler.merges_equal_ops else {}
    if equal:
        graph, annotations = merged(graph, annotations, equal)
        shardings, partitioned = _partitioned(graph, annotations, mesh, target)
    lowered = lower(graph, shardings, partitioned, device.compiler)
    compiled = (EagerBackend(device, eager) if eager else backend_of(device)).compile(lowered)
    known = library(eager.attention) if eager else matrix_seconds
    kernels = _per_op(compiled, graph, kernel_seconds(compiled, device, known))
    compute = _per_group(kernels, groups)
    emitted = compiled.collectives if eager else partitioned.collectives
    often = [1 if each.once else graph.runs(each.op) for each in emitted]
    times = collective_seconds(emitted, compiled, mesh, device)
    times = [runs * each for runs, each in zip(often, times, strict=True)]
    collectives = tuple(
        replace(each, count=runs * each.count) if runs > 1 else each for runs, each in zip(often, emitted, strict=True)
    )
    compute_s, communication_s = sum(compute), sum(times)
    if eager:
        beside = streamed(compiled, [seconds for _, seconds in kernels], times)
    elif target == "gpu":
        beside = as_scheduled(compiled, [seconds for _, seconds in kernels], mesh, device)
    else:
        beside = overlapped(graph, groups, compute, collectives, times, device)
    step = compute_s + communication_s
    peak = mesh.size * device.peak_flops(_main_dtype(graph, flops))
    return Prediction(
        step_time_s=step,
        compute_s=compute_s,
        communication_s=communication_s,
        overlapped_s=beside,
        mfu=useful / (step * peak) if step > 0 else 0.0,
        collectives=collectives,
        peak_memory_bytes=compiled.peak_bytes,
        bars=bars_of(device, _unmeasured(compiled, graph, kernels) / step if step > 0 else 0.0),
        compiled=compiled,
        replicated_ops=_replicated(graph, groups.free, device),
        specs=shardings.specs | {value: shardings.specs[first] for value, first in equal.items()},
        kernel_s=tuple(kernels),
        collective_s=tuple(times),
    )


def rescheduled(found: Prediction, mesh: Mesh) -> Prediction:
    """The prediction of a GPU's program as XLA schedules it for the kind of `mesh`, which differs in `Device.slop`."""
    device = load_device(mesh.device)
    before = found.compiled
    compiled = backend_of(device).scheduled(list(before.unscheduled), before.program, before.sequence)
    kernels = _per_op(compiled, compiled.program.graph, kernel_seconds(compiled, device))
    return replace(
        found,
        overlapped_s=as_scheduled(compiled, [seconds for _, seconds in kernels], mesh, device),
        peak_memory_bytes=compiled.peak_bytes,
        compiled=compiled,
        kernel_s=tuple(kernels),
    )


def _partitioned(graph: Graph, annotations: Annotations, mesh: Mesh, target: Target) -> tuple[Shardings, Partitioned]:
    shardings = propagate(graph, annotations, mesh, target)
    return shardings, partition(graph, shardings, target)


def _moved_again(
    graph: Graph, annotations: Annotations, shardings: Shardings, partitioned: Partitioned
) -> dict[Value, Value]:
    """What a TPU's compiler makes one of, if a collective depends on any of it: value -> the one that is left."""
    equal = equal_ops(graph, annotations)
    moved = {shardings.copies[number].value for number, move in partitioned.copied.items() if move.collectives}
    for op, run in zip(graph.ops, partitioned.runs, strict=True):
        if run.collectives:
            moved |= {Value(op.id), *(op.operands[move.place] for move in run.moves if move.collectives)}
    return {} if moved.isdisjoint(equal) else equal


def _per_op(compiled: Compiled, graph: Graph, times: Sequence[float]) -> list[tuple[int | None, float]]:
    """Seconds of the compiler's kernels, with the op that their last step is of; None for copies that are no op's."""
    steps = compiled.program.steps
    found, last = [], None
    for kernel, seconds in zip(compiled.kernels, times, strict=True):
        op = steps[kernel.steps[-1]].op if kernel.steps else None
        last = last if op is None else op  # a copy runs as often as what runs before it
        found.append((op, graph.runs(last) * seconds))
    return found


def _unmeasured(compiled: Compiled, graph: Graph, kernels: Sequence[tuple[int | None, float]]) -> float:
    """Seconds of kernels with ops that no measured step has."""
    ops = [step.op for step in compiled.program.steps]
    return sum(
        seconds
        for kernel, (_, seconds) in zip(compiled.kernels, kernels, strict=True)
        if any((op := ops[step]) is not None and graph.ops[op].kind in _UNMEASURED for step in kernel.steps)
    )


def _per_group(kernels: Sequence[tuple[int | None, float]], groups: Groups) -> list[float]:
    """Seconds of the compiler's kernels, per group that their last op is in; a program may have none (`return x`)."""
    found = [0.0] * len(groups.groups)
    group = 0  # what is no group's counts where it stands: copies of combined collectives, barriers
    for op, seconds in kernels:
        if op is not None:
            group = groups.of.get(op, group)
        if found:
            found[group] += seconds
    return found


def _main_dtype(graph: Graph, flops: Sequence[float]) -> str:
    """The dtype in which most matrix FLOPs are done."""
    totals: dict[str, float] = {}
    for op in graph.ops:
        if op.kind in MATRIX_WORK:
            dtype = graph.type_of(op.operands[0]).dtype
            totals[dtype] = totals.get(dtype, 0.0) + flops[op.id]
    return max(totals, key=lambda dtype: totals[dtype]) if totals else "f32"


def _replicated(graph: Graph, free: Container[int], device: Device, times: int = 1) -> tuple[ReplicatedOp, ...]:
    """What no rule lets be split, of bodies too; `times`: how often the graph runs."""
    found: list[ReplicatedOp] = []
    for op in graph.ops:
        if op.kind == "argument" or op.id in free:
            continue
        rule = rule_for(op, graph)
        if rule is not None and not rule.reason:
            for body in op.attrs["bodies"] if op.kind in BODIES else ():
                inner = _replicated(body.graph, free_ops(body.graph), device, times * (op.attrs.get("trip_count") or 1))
                found.extend(replace(each, id=op.id) for each in inner)
            continue
        size = sum(
            math.prod(kind.shape) * dtype_bytes(kind.dtype)
            for kind in (*op.results, *(graph.type_of(value) for value in op.operands))
        )
        name = op.attrs["target"] if op.kind == "custom_call" else op.kind
        why = f"{name} has no sharding rule" if rule is None else rule.reason
        seconds = times * roofline_seconds(op_flops(op, graph), size, "f32", device)
        found.append(ReplicatedOp(name, op.module, f"{why}: every device computes all of it", seconds, op.id))
    return tuple(found)
