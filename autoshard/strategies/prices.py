"""Seconds of a group under each of its strategies: its kernels (`cost/compiler/work.py`) and its collectives.

Every target's compiler combines independent collectives: all-reduces that no contraction depends on (gradients) share
one alpha, of which each pays its share. A GPU copies combined operands into one array and out again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from autoshard.attention.form import KINDS as ATTENTIONS
from autoshard.cost.compiler.backends import backend_of
from autoshard.cost.compiler.work import GroupWork, Weights, group_works, last_products
from autoshard.cost.machine import cycles
from autoshard.cost.machine.collectives import Collective, saved_seconds, seconds
from autoshard.cost.machine.compute import BODIES, MATRIX_WORK, body_work, op_flops, region_share, roofline_seconds
from autoshard.cost.machine.cycles import beside_traffic
from autoshard.cost.machine.device import Device
from autoshard.cost.machine.measured import is_timed, matrix_seconds
from autoshard.cost.machine.tiles import copies_of_gathered
from autoshard.cost.partitioner.reshard.price import fit_of, near_on, reshard_matrix, reshard_steps
from autoshard.dtypes import dtype_bytes
from autoshard.graph.groups import Group, Groups
from autoshard.graph.memo import Latest
from autoshard.graph.ops import DimFactors, Graph, Op, Value
from autoshard.mesh import Mesh, Spec, replicated
from autoshard.program import TensorType
from autoshard.strategies.space import Specs, Strategies, plain, spec_of

Matrix = npt.NDArray[np.float64]


_WORKS = Latest()
"""The last replicated program: all mesh shapes of one size have the same."""


class Prices:
    """Costs of the groups of one graph on a mesh."""

    def __init__(self, graph: Graph, groups: Groups, mesh: Mesh, device: Device) -> None:
        """Compiles the replicated program."""
        self.graph, self.groups, self.mesh, self.device = graph, groups, mesh, device
        self.backend = backend_of(device)
        self.works = _WORKS.of(graph, (mesh.size, device), lambda: group_works(graph, groups, mesh, device))
        self.last = last_products(graph, groups)
        self.sums = sum(self.last) or 1
        self.weights = sum(argument.role == "parameter" for argument in graph.program.arguments)
        outputs = zip(graph.program.outputs, graph.outputs, strict=True)
        self.returned = {value for output, value in outputs if output.updates is None}

    def average(self, keys: Sequence[Hashable]) -> None:
        """Give groups of one key the mean of their work, so that equal groups get equal decisions."""
        members: dict[Hashable, list[int]] = {}
        for group, key in enumerate(keys):
            members.setdefault(key, []).append(group)
        classes = list(members.values())
        self.works = {
            ways: replace(works, kept=self._averages(works.kept, classes), summed=self._averages(works.summed, classes))
            for ways, works in self.works.items()
        }

    def _averages(self, works: Sequence[GroupWork], classes: Sequence[Sequence[int]]) -> tuple[GroupWork, ...]:
        found = list(works)
        for alike in classes:
            if len(alike) > 1:
                for group, work in zip(alike, self._averaged(works, alike), strict=True):
                    found[group] = work
        return tuple(found)

    def _averaged(self, works: Sequence[GroupWork], alike: Sequence[int]) -> list[GroupWork]:
        locals_ = [self._locals(self.groups.groups[group]) for group in alike]

        def mean(weights: Sequence[Weights]) -> list[dict[Value, float]]:
            rows = [[own.get(value, 0.0) for value in values] for own, values in zip(weights, locals_, strict=True)]
            means = np.mean(np.array(rows, float).reshape(len(rows), -1), axis=0)
            return [
                {value: float(weight) for value, weight in zip(values, means, strict=True) if weight}
                for values in locals_
            ]

        launches = sum(works[group].launches for group in alike) / len(alike)
        within = mean([works[group].with_products for group in alike])
        other = mean([works[group].other for group in alike])
        return [GroupWork(*parts, launches) for parts in zip(within, other, strict=True)]

    def _locals(self, group: Group) -> list[Value]:
        return [*group.inputs, *group.made(self.graph)]

    def collectives(self, group: Group, ways: Strategies) -> Matrix:
        """Seconds of a group's collectives under each strategy."""
        costs = np.array([sum(self.collective_seconds(each, group) for each in found) for found in ways.collectives])
        for value, specs in zip(group.outputs, ways.outputs, strict=True):
            if value in self.returned:
                costs = costs + self._return_costs(value, specs)
        return costs

    def kernels(self, group: Group, ways: Strategies) -> Matrix:
        """Seconds of a group's kernels under each strategy."""
        costs = self._kernels(group, ways, {many: works.kept[group.id] for many, works in self.works.items()})
        if len(group.ops) > 1 and any(ways.collectives):
            over_devices = np.array([bool(each) for each in ways.collectives])
            summed = {many: works.summed[group.id] for many, works in self.works.items()}
            costs = np.where(over_devices, self._kernels(group, ways, summed), costs)
        return costs

    def _kernels(self, group: Group, ways: Strategies, works: Mapping[int, GroupWork]) -> Matrix:
        """Seconds of a group's kernels; `works` by the number of devices that split its program."""
        rate = self.device.reachable_bandwidth
        beside = self._traffic(group, ways, {many: work.with_products for many, work in works.items()})
        other = self._traffic(group, ways, {many: work.other for many, work in works.items()}) / rate
        launched = works[self.mesh.size].launches * self.device.kernel_overhead
        return beside_traffic(self._products(group, ways), beside, self.device) + other + launched

    def _products(self, group: Group, ways: Strategies) -> Matrix:
        spent = np.zeros(len(ways))
        for place, op_id in enumerate(group.ops):
            op = self.graph.ops[op_id]
            if op.kind in BODIES:
                spent += self._bodies(op) / ways.flop_ways[:, place] + body_work(op)[1] * self.device.kernel_overhead
            elif op.kind in MATRIX_WORK:
                dtype = self.graph.type_of(op.operands[0]).dtype
                share = self._region_shares(op, group, ways) / ways.flop_ways[:, place]
                spent += self._matrix(op, group, ways, op_flops(op, self.graph) * share, dtype)
        return spent

    def _matrix(self, op: Op, group: Group, ways: Strategies, flops: Matrix, dtype: str) -> Matrix:
        """Seconds of one product or attention of `flops` FLOP under each strategy."""
        known = is_timed(op, self.device)
        places = {value: place for place, value in enumerate(self._locals(group))} if known else {}
        if not all(value in places for value in op.operands[:3]):
            return flops / self.device.reachable_flops(dtype)
        values = (*op.operands[:3], Value(op.id))
        arrays = [(self.graph.type_of(value).shape, ways.shape.value_dims[places[value]]) for value in values]
        found = np.zeros(len(ways))
        for index, assignment in enumerate(ways.assignments):
            shapes = [self.mesh.shard_shape(shape, spec_of(dims, assignment)) for shape, dims in arrays]
            found[index] = matrix_seconds(op, shapes, float(flops[index]), dtype, self.device)
        return found

    def _region_shares(self, op: Op, group: Group, ways: Strategies) -> Matrix:
        """`region_share` under each strategy; 1 for other ops."""
        if op.kind not in ATTENTIONS:
            return np.ones(len(ways))
        queries = ways.shape.value_dims[len(group.inputs)][3]
        split = [self.mesh.ways(axis for factor in queries for axis in each[factor]) for each in ways.assignments]
        return np.array([region_share(op, count, self.device.target) for count in split])

    def _bodies(self, op: Op) -> float:
        """Seconds of one device's run of a loop's or branch's bodies."""
        dtypes = [kind.dtype for kind in op.results if kind.shape] or ["f32"]
        return roofline_seconds(op_flops(op, self.graph), body_work(op)[0], dtypes[0], self.device, kernels=0)

    def _traffic(self, group: Group, ways: Strategies, weights: Mapping[int, Weights]) -> Matrix:
        """Bytes per device. With less sharding less is on chip: logarithmic interpolation between the two works."""
        total = np.zeros(len(ways))
        if not any(weights.values()):
            return total
        alike: dict[Hashable, Matrix] = {}  # a group may have thousands of inputs
        most = self.mesh.size
        for place, value in enumerate(self._locals(group)):
            split = weights[most].get(value, 0.0)
            whole = weights[1].get(value, 0.0) if 1 in weights else split
            if not split and not whole:
                continue
            kind = self.graph.type_of(value)
            size_of = self.works[most].layouts.get(value, math.prod)
            key = (kind, ways.shape.value_dims[place], whole, split, size_of)
            if key not in alike:
                alike[key] = self._bytes_of(kind, ways.shape.value_dims[place], ways, whole, split, size_of)
            total += alike[key]
        return total

    def _bytes_of(
        self,
        kind: TensorType,
        dims: DimFactors,
        ways: Strategies,
        whole: float,
        split: float,
        size_of: Callable[[tuple[int, ...]], int],
    ) -> Matrix:
        """Bytes per device and strategy of a value's traffic: `whole` x its bytes, `split` x a shard of all devices."""
        most, most_of_it = self.mesh.size, size_of(kind.shape)
        sizes: dict[Spec, float] = {}
        found = np.zeros(len(ways))
        for index, assignment in enumerate(ways.assignments):
            spec = spec_of(dims, assignment)
            if spec not in sizes:
                part = size_of(self.mesh.shard_shape(kind.shape, spec))
                near = math.log(most_of_it / part) / math.log(most) if most > 1 and part else 1.0
                weight = whole + (split - whole) * min(1.0, max(0.0, near))
                held = math.prod(kind.shape) * part / max(1, most_of_it)
                sizes[spec] = weight * held * dtype_bytes(kind.dtype)
            found[index] = sizes[spec]
        return found

    def collective_seconds(self, each: Collective, group: Group) -> float:
        """Seconds of a group's all-reduce or reduce-scatter, combined with others."""
        found = seconds(each.kind, each.axes, each.bytes, self.mesh, self.device)
        limit = self.backend.combined_up_to.get(each.kind)
        if self.last[group.id] and limit is not None and self.sums > 1:
            part = self.part_of_start(each.bytes, limit, self.sums)
            found -= saved_seconds(each.kind, each.axes, each.bytes, self.mesh, self.device, part)
            rate = self.device.reachable_bandwidth
            copies = self.backend.copies_of_combined.get(each.kind, 0)
            found += copies * each.bytes / rate + (self.device.kernel_overhead if copies else 0.0)
        return found * each.count

    @staticmethod
    def part_of_start(size: float, limit: float, count: int) -> float:
        """The share of one alpha for a collective of `size` bytes among `count`, combined up to `limit` bytes."""
        return min(1.0, max(1 / count, size / limit))

    def shared_starts(self, kind: TensorType, item: int, rows: Sequence[Spec], columns: Sequence[Spec]) -> Matrix:
        """Seconds that combining saves in all-gathers of a weight from `rows` to `columns`.

        Args:
            item: bytes per element.
        """
        saved = np.zeros((len(rows), len(columns)))
        limit = self.backend.combined_up_to.get("all-gather")
        if limit is None or self.weights < 2:
            return saved
        total, fit = math.prod(kind.shape) * item, fit_of(kind.shape, self.mesh)
        near = near_on(self.mesh, rows, columns)
        for i, row in enumerate(rows):
            for j, column in enumerate(columns):
                if not near[i, j]:
                    continue
                steps = reshard_steps(row, column, self.mesh, self.device.target, fit).steps
                if len(steps) == 1 and steps[0].kind == "all-gather":
                    size = float(steps[0].share) * total
                    part = self.part_of_start(size, limit, self.weights)
                    saved[i, j] = saved_seconds("all-gather", steps[0].axes, size, self.mesh, self.device, part)
        return saved

    def stores(self, value: Value) -> bool:
        """Whether a kernel stores a value in any case, not only where it is resharded."""
        if cycles.model_of(self.device) is None or self.graph.ops[value.op].kind == "argument":
            return True
        return value in self.works[self.mesh.size].stored

    def storing_seconds(self, kind: TensorType, specs: Sequence[Spec]) -> Matrix:
        """Seconds of a kernel of its own that makes a device's shard of a tensor, under each of `specs`."""
        item = dtype_bytes(kind.dtype)
        return np.array(
            [self._vector_seconds(math.prod(self.mesh.shard_shape(kind.shape, spec)), item) for spec in specs]
        )

    def _vector_seconds(self, elements: float, item: int, moved: float = 0.0) -> float:
        """Seconds of a TPU kernel that reads and writes elements of `item` bytes, and moves `moved` in registers."""
        known = cycles.model_of(self.device)
        assert known is not None
        words = elements * item / (4 * cycles.TILE)
        tiles = {"tiles": elements / cycles.TILE, "read": words, "written": words, "moved": moved / cycles.TILE}
        return cycles.kernel_seconds(cycles.Done((), tiles), 0.0, known.constants, self.device)

    def gathered_copies(self, kind: TensorType, item: int, rows: Sequence[Spec], columns: Sequence[Spec]) -> Matrix:
        """Seconds of copies behind all-gathers along several dims from `rows` to `columns` (`copies_of_gathered`).

        Args:
            item: bytes per element.
        """
        found = np.zeros((len(rows), len(columns)))
        if len(kind.shape) < 2 or not self.device.compiler.lays_out_in_tiles or cycles.model_of(self.device) is None:
            return found
        before, after = ([self.mesh.shard_shape(kind.shape, spec) for spec in specs] for specs in (rows, columns))
        small, large = np.array(before)[:, None], np.array(after)[None]
        several = (small <= large).all(axis=2) & ((small != large).sum(axis=2) > 1)
        fit, near = fit_of(kind.shape, self.mesh), near_on(self.mesh, rows, columns)
        for i, j in zip(*np.nonzero(several & near), strict=True):
            steps = reshard_steps(rows[i], columns[j], self.mesh, self.device.target, fit).steps
            if len(steps) == 1 and steps[0].kind == "all-gather":
                size = math.prod(after[j])
                found[i, j] = copies_of_gathered(before[i], after[j]) * self._vector_seconds(size, item, size)
        return found

    def copy_seconds(self, kind: TensorType, specs: Sequence[Spec]) -> Matrix:
        """Seconds of a kernel that copies a device's shard of a tensor, under each of `specs`."""
        rate = self.device.reachable_bandwidth
        sizes = [math.prod(self.mesh.shard_shape(kind.shape, spec)) * dtype_bytes(kind.dtype) for spec in specs]
        return 2 * np.array(sizes, float) / rate + self.device.kernel_overhead

    def _return_costs(self, value: Value, specs: Specs) -> Matrix:
        """Seconds to gather a result with uneven shards, which a program cannot return."""
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
