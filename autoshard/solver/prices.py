"""Seconds of a group under each of its strategies: its kernels as `cost/work.py` knows them, and its collectives.

Collectives that depend on none of each other are combined by every target's compiler: sums that no product is made from
(gradients) start together, and each is charged its part of a start. A GPU copies what it combines into one array and
out of it again.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from autoshard.cost.backend import backend_of
from autoshard.cost.collectives import Collective, coefficients
from autoshard.cost.compute import CONTRACTIONS, dtype_bytes, op_flops
from autoshard.cost.device import Device
from autoshard.cost.reshard import reshard_matrix
from autoshard.cost.work import GroupWork, Weights, group_work
from autoshard.graph.groups import Group, Groups
from autoshard.graph.ops import Graph, Value
from autoshard.mesh import Mesh, Spec, replicated
from autoshard.solver.strategies import Specs, Strategies, plain, spec_of

Matrix = npt.NDArray[np.float64]


class Prices:
    """What the groups of one graph cost on a mesh."""

    def __init__(self, graph: Graph, groups: Groups, mesh: Mesh, device: Device) -> None:
        """Compiles the whole program once."""
        self.graph, self.groups, self.mesh, self.device = graph, groups, mesh, device
        self.backend = backend_of(device)
        self.works = group_work(graph, groups, mesh, device)
        self.last = _last_products(graph, groups)
        self.sums = sum(self.last) or 1
        outputs = zip(graph.program.outputs, graph.outputs, strict=True)
        self.returned = {value for output, value in outputs if output.updates is None}

    def average(self, keys: Sequence[Hashable]) -> None:
        """Let groups of one key have one work, the mean of theirs: what looks alike is decided alike."""
        members: dict[Hashable, list[int]] = {}
        for group, key in enumerate(keys):
            members.setdefault(key, []).append(group)
        works = list(self.works)
        for alike in members.values():
            if len(alike) > 1:
                for group, work in zip(alike, self._averaged(alike), strict=True):
                    works[group] = work
        self.works = tuple(works)

    def _averaged(self, alike: Sequence[int]) -> list[GroupWork]:
        locals_ = [self._locals(self.groups.groups[group]) for group in alike]

        def mean(weights: Sequence[Weights]) -> list[dict[Value, float]]:
            rows = [[own.get(value, 0.0) for value in values] for own, values in zip(weights, locals_, strict=True)]
            means = np.mean(np.array(rows, float).reshape(len(rows), -1), axis=0)
            return [
                {value: float(weight) for value, weight in zip(values, means, strict=True) if weight}
                for values in locals_
            ]

        launches = sum(self.works[group].launches for group in alike) / len(alike)
        within = mean([self.works[group].with_products for group in alike])
        alone = mean([self.works[group].alone for group in alike])
        return [GroupWork(*parts, launches) for parts in zip(within, alone, strict=True)]

    def _locals(self, group: Group) -> list[Value]:
        made = [Value(op, result) for op in group.ops for result in range(len(self.graph.ops[op].results))]
        return [*group.inputs, *made]

    def group_costs(self, group: Group, ways: Strategies) -> Matrix:
        """Seconds of a group under each strategy."""
        work = self.works[group.id]
        costs = np.full(len(ways), work.launches * self.device.kernel_overhead)
        rate = self.device.memory_bandwidth * self.device.achievable_memory
        beside = self._traffic(group, ways, work.with_products) / rate
        costs += np.maximum(self._products(group, ways), beside) + self._traffic(group, ways, work.alone) / rate
        for index, collectives in enumerate(ways.collectives):
            costs[index] += sum(self._collective(each, self.last[group.id]) for each in collectives)
        for value, specs in zip(group.outputs, ways.outputs, strict=True):
            if value in self.returned:
                costs += self._return_costs(value, specs)
        return costs

    def _products(self, group: Group, ways: Strategies) -> Matrix:
        seconds = np.zeros(len(ways))
        for place, op_id in enumerate(group.ops):
            op = self.graph.ops[op_id]
            if op.kind in CONTRACTIONS:
                dtype = self.graph.type_of(op.operands[0]).dtype
                rate = self.device.peak_flops(dtype) * self.device.achievable_compute
                seconds += op_flops(op, self.graph) / ways.flop_ways[:, place] / rate
        return seconds

    def _traffic(self, group: Group, ways: Strategies, weights: Weights) -> Matrix:
        """Bytes of one device."""
        total = np.zeros(len(ways))
        if not weights:
            return total
        for place, value in enumerate(self._locals(group)):
            weight = weights.get(value, 0.0)
            if not weight:
                continue
            kind = self.graph.type_of(value)
            sizes: dict[Spec, float] = {}
            dims = ways.shape.value_dims[place]
            item = weight * dtype_bytes(kind.dtype)
            for index, assignment in enumerate(ways.assignments):
                spec = spec_of(dims, assignment)
                if spec not in sizes:
                    sizes[spec] = item * math.prod(self.mesh.shard_shape(kind.shape, spec))
                total[index] += sizes[spec]
        return total

    def _collective(self, each: Collective, last: bool) -> float:
        start, per_byte = coefficients(each.kind, each.axes, self.mesh, self.device)
        seconds = start + per_byte * each.bytes
        limit = self.backend.combined_up_to.get(each.kind)
        if last and limit is not None and self.sums > 1:
            seconds -= start * (1 - self.part_of_start(each.bytes, limit, self.sums))
            rate = self.device.memory_bandwidth * self.device.achievable_memory
            seconds += self.backend.copies_of_combined.get(each.kind, 0) * each.bytes / rate
        return seconds * each.count

    @staticmethod
    def part_of_start(size: float, limit: float, count: int) -> float:
        """Of a collective of `size` bytes that runs with the rest of `count`, combined up to `limit` bytes."""
        return min(1.0, max(1 / count, size / limit))

    def _return_costs(self, value: Value, specs: Specs) -> Matrix:
        """Seconds to gather a result whose parts are uneven: a program does not return such parts."""
        kind = self.graph.type_of(value)
        choices = [plain(spec) for spec in specs.choices]
        uneven = [
            any(size % self.mesh.ways(axes) for size, axes in zip(kind.shape, spec, strict=True)) for spec in choices
        ]
        if not any(uneven):
            return np.zeros(len(specs.index))
        whole = [replicated(len(kind.shape))]
        moved = reshard_matrix(kind.shape, dtype_bytes(kind.dtype), choices, whole, self.mesh, self.device)[0]
        return np.asarray(np.where(uneven, moved[:, 0], 0.0)[specs.index])


def _last_products(graph: Graph, groups: Groups) -> list[bool]:
    """Per group whether no product is made from what it makes."""
    readers: Mapping[int, set[int]] = {group.id: set() for group in groups.groups}
    for group in groups.groups:
        for value in group.inputs:
            maker = groups.of.get(value.op)
            if maker is not None:
                readers[maker].add(group.id)
    found = [True] * len(groups.groups)
    for group in reversed(groups.groups):
        found[group.id] = all(
            found[reader] and not any(graph.ops[op].kind in CONTRACTIONS for op in groups.groups[reader].ops)
            for reader in readers[group.id]
        )
    return found
