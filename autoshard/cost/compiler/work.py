"""Device memory traffic and kernel launches of each fusion group, before shardings are known.

The solver decides per group, but the compiler runs kernels: a group may fuse into a dot's kernel, become several
kernels, or run in each of its users; on a TPU many reads and writes stay on chip. So the backend compiles the
replicated program for a device as large as the mesh (on-chip memory, bandwidth, FLOP/s: the sum over all devices), and
this module attributes its kernels' work to groups and values.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field, replace
from functools import partial

from autoshard.cost.compiler.backend import Compiled
from autoshard.cost.compiler.backends import backend_of
from autoshard.cost.compiler.kernels import Kernel, operand_dtype
from autoshard.cost.compiler.lowered import Lowered, Step, lower
from autoshard.cost.compiler.rewrite import Rewriter
from autoshard.cost.compiler.traffic import PARTIAL
from autoshard.cost.machine.collectives import Collective
from autoshard.cost.machine.compute import MATRIX_WORK, roofline_seconds
from autoshard.cost.machine.device import Device
from autoshard.cost.partitioner.partitioned import OpRun, Partitioned
from autoshard.cost.partitioner.propagate import Shardings
from autoshard.cost.partitioner.tiling import Subaxes, Tiling
from autoshard.dtypes import dtype_bytes
from autoshard.graph.groups import BARRIER, Groups
from autoshard.graph.ops import Graph, Value
from autoshard.mesh import Mesh

Weights = Mapping[Value, float]
"""Value -> reads and writes of it, as a multiple of its shard's bytes."""


@dataclass(frozen=True)
class GroupWork:
    """The kernels of a group.

    Attributes:
        with_products: traffic of kernels with contractions of this group, which take the longer of FLOP and traffic.
        other: all other traffic.
        launches: kernels whose root is in this group.
    """

    with_products: Weights = field(default_factory=dict)
    other: Weights = field(default_factory=dict)
    launches: float = 0.0


@dataclass(frozen=True)
class Works:
    """The work of every group of a program, in their order.

    Attributes:
        kept: if sums are local to a device.
        summed: if all sums are all-reduced, which ends a kernel. Parameter gradients are all-reduced in both.
        layouts: values in layouts that may pad them -> elements of a shape, padding included.
        stored: values that a kernel stores; all others are computed in the kernels that read them.
    """

    kept: tuple[GroupWork, ...]
    summed: tuple[GroupWork, ...]
    layouts: Mapping[Value, Callable[[tuple[int, ...]], int]] = field(default_factory=dict, repr=False)
    stored: Set[Value] = field(default_factory=frozenset, repr=False)


def group_works(graph: Graph, groups: Groups, mesh: Mesh, device: Device) -> dict[int, Works]:
    """Number of devices that split the program -> the work of every group: more of them have more on-chip memory.

    For one device, if that makes a difference, and for the whole mesh.
    """
    program = replicated_program(graph, mesh, device)
    last = last_products(graph, groups)
    gradients = {op for group, own in zip(groups.groups, last, strict=True) if own for op in group.ops}
    variants = [
        summed(program, partial(_ends, kinds, gradients, graph)) for kinds in (frozenset[str](), frozenset({"reduce"}))
    ]
    compiled = [backend_of(larger(device, mesh.size)).listed(each) for each in variants]
    shared = [_Attribution(each.program, graph, groups, device) for each in compiled]
    laid = backend_of(device).layouts(program)
    attributed = _Attribution(program, graph, groups, device)
    layouts = {attributed.origin[array]: elements for array, elements in laid.items()}
    kept, all_reduced = (each.works(one) for each, one in zip(shared, compiled, strict=True))
    origins = (shared[0].origin.get(array) for kernel in compiled[0].kernels for array in kernel.writes)
    stored = {value for value in origins if value is not None}
    found = {mesh.size: Works(kept, all_reduced, layouts, stored)}
    if device.on_chip_bytes and mesh.size > 1:
        backend = backend_of(device)
        kept, all_reduced = (each.works(backend.placed(one)) for each, one in zip(shared, compiled, strict=True))
        found[1] = Works(kept, all_reduced, layouts, stored)
    return found


def _ends(kinds: Set[str], gradients: Set[int], graph: Graph, step: Step) -> bool:
    if step.op not in gradients or not step.flops:
        return step.kind in kinds
    return step.flops > 2 * math.prod(graph.ops[step.op].results[0].shape)  # outer products have no partial sums


def summed(program: Lowered, chosen: Callable[[Step], bool]) -> Lowered:
    """`program` with all-reduces after the chosen steps."""
    rewriter = Rewriter(program)
    for step in program.steps:
        rewriter.emit(step)
        if len(step.writes) == 1 and chosen(step):
            whole = rewriter.array(step.writes[0])
            size = rewriter.arrays[whole].bytes
            collective = Collective("all-reduce", ("all",), size, op=step.op)
            rewriter.emit(Step("all-reduce", step.op, step.writes, (whole,), collective=collective))
            rewriter.instead[step.writes[0]] = whole
    return rewriter.result()


def last_products(graph: Graph, groups: Groups) -> list[bool]:
    """Per group whether no contraction depends on it: parameter gradients, and their users."""
    found = [True] * len(groups.groups)
    for group in reversed(groups.groups):
        if not found[group.id] or any(graph.ops[op].kind in MATRIX_WORK for op in group.ops):
            for value in group.inputs:
                if (maker := groups.maker(value)) is not None:
                    found[maker] = False
    return found


def larger(device: Device, ways: int) -> Device:
    """A device with the resources of `ways` devices."""
    return replace(
        device,
        on_chip_bytes=device.on_chip_bytes * ways,
        multiprocessors=device.multiprocessors * ways,
        memory_bandwidth=device.memory_bandwidth * ways,
        flops={dtype: rate * ways for dtype, rate in device.flops.items()},
    )


def replicated_program(graph: Graph, mesh: Mesh, device: Device) -> Lowered:
    """One device's program without any sharding."""
    whole: dict[Value, Tiling] = {}
    runs: list[OpRun] = []
    known: dict[tuple[Tiling, ...], OpRun] = {}  # by operand tilings: there are few ranks
    for op in graph.ops:
        for result, kind in enumerate(op.results):
            whole[Value(op.id, result)] = ((),) * len(kind.shape)
        reads = tuple([whole[value] for value in op.operands])
        run = known.get(reads)
        if run is None:
            run = known[reads] = OpRun((), 1.0, reads)
        runs.append(run)
    shardings = Shardings(Subaxes(mesh), whole, (), (), {}, {})
    partitioned = Partitioned(tuple(runs), (), {})
    return replace(lower(graph, shardings, partitioned, device.compiler), mesh=None)


class _Attribution:
    """Attributes the kernels of a replicated program to groups."""

    def __init__(self, program: Lowered, graph: Graph, groups: Groups, device: Device) -> None:
        self.program, self.graph, self.groups, self.device = program, graph, groups, device
        self.inputs: dict[int, frozenset[Value]] = {}  # by group
        self.origin = {number: Value(number) for number, op in enumerate(graph.ops) if op.kind == "argument"}
        for step in self.program.steps:
            op = graph.ops[step.op]
            if step.kind == BARRIER:
                self.origin.update(zip(step.writes, step.values, strict=False))
                continue
            if step.kind == op.kind and len(step.writes) == len(op.results):
                for place, array in enumerate(step.writes):
                    self.origin[array] = Value(step.op, place)
                continue
            made = self._read(step, 0) if step.reads else Value(step.op)
            self.origin.update(dict.fromkeys(step.writes, made))

    def works(self, compiled: Compiled) -> tuple[GroupWork, ...]:
        """The work under the memory space assignment of `compiled`."""
        self.products: list[dict[Value, float]] = [{} for _ in self.groups.groups]
        self.other: list[dict[Value, float]] = [{} for _ in self.groups.groups]
        self.launches = [0.0] * len(self.groups.groups)
        traffic = backend_of(self.device).timed_as_traffic(compiled)
        for kernel, (beside, after) in zip(compiled.kernels, traffic, strict=True):
            if kernel.steps:
                self._kernel(kernel, beside)
                self._after(kernel, after)
        parts = zip(self.products, self.other, self.launches, strict=True)
        return tuple(GroupWork(*each) for each in parts)

    def _kernel(self, kernel: Kernel, touched: Mapping[int, float]) -> None:
        steps = self.program.steps
        found: dict[int, defaultdict[Value, float]] = {}
        left = dict(touched)
        writes = frozenset(kernel.writes)
        for number in kernel.steps:
            if not left:
                break
            step = steps[number]
            group = self.groups.of.get(step.op)
            if group is None:
                continue
            if group not in found:
                found[group] = defaultdict(float)
            mine = found[group]
            for place, array in enumerate(step.reads):
                if array in left and array not in writes:
                    partial = step.kind in PARTIAL and place == 0
                    value = Value(step.op) if partial else self._read(step, place)
                    mine[self._local(value, step)] += left.pop(array)
            for array in step.writes:
                if array in left:
                    mine[self._local(self.origin[array], step)] += left.pop(array)
        if touched or kernel.flops:
            root = self.groups.of.get(steps[kernel.steps[-1]].op)
            if root is not None:
                self.launches[root] += 1
        self._share(kernel, found)

    def _after(self, kernel: Kernel, sizes: Mapping[int, float]) -> None:
        """Bytes that stand for work after a kernel's products, each of the group that makes the array."""
        for number in kernel.steps if sizes else ():
            step = self.program.steps[number]
            group = self.groups.of.get(step.op)
            for array in step.writes:
                if array in sizes and group is not None:
                    self._add(self.other[group], self._local(self.origin[array], step), sizes[array])

    def _add(self, into: dict[Value, float], value: Value, size: float) -> None:
        kind = self.graph.type_of(value)
        total = math.prod(kind.shape) * dtype_bytes(kind.dtype)
        if total:
            into[value] = into.get(value, 0.0) + size / total

    def _share(self, kernel: Kernel, found: Mapping[int, Mapping[Value, float]]) -> None:
        """Traffic of other groups in a contraction's kernel counts as far as it makes the kernel slower."""
        steps = self.program.steps
        head = next((steps[number] for number in kernel.steps if steps[number].flops), None)
        owner = None if head is None else self.groups.of.get(head.op)
        scale = 1.0
        if head is not None and owner is not None:
            work = roofline_seconds(kernel.flops, 0.0, operand_dtype(kernel, self.program), self.device, kernels=0)
            own = self._seconds(found.get(owner, {}))
            beside = sum(self._seconds(each) for group, each in found.items() if group != owner)
            if beside:
                scale = (max(work, own + beside) - max(work, own)) / beside
        for group, each in found.items():
            into = self.products[group] if group == owner else self.other[group]
            for value, size in each.items():
                self._add(into, value, size if group == owner else scale * size)

    def _inputs(self, group: int) -> frozenset[Value]:
        """Operands of a group; may be thousands of values."""
        if group not in self.inputs:
            self.inputs[group] = frozenset(self.groups.groups[group].inputs)
        return self.inputs[group]

    def _seconds(self, sizes: Mapping[Value, float]) -> float:
        return roofline_seconds(0.0, sum(sizes.values()), "f32", self.device, kernels=0)

    def _read(self, step: Step, place: int) -> Value:
        if len(step.values) == len(step.reads):
            return step.values[place]
        return self.origin.get(step.reads[place], Value(step.op))

    def _local(self, value: Value, step: Step) -> Value:
        """`value` if the step's group has a sharding for it, else the step's result."""
        group = self.groups.of.get(step.op)
        if group is None:
            return Value(step.op)
        known = self.groups.maker(value) == group or value in self._inputs(group)
        return value if known else Value(step.op)
