"""Graph → Problem, and a choice of strategies → Annotations.

Nodes of the problem are the arguments (one strategy per sharding), the fusion groups, and one *copy node* per value
that several groups use: lowering writes equal copies of a value once, so a gathered weight is paid for once however
many use it. A copy node either is the value itself, or a copy under one other sharding, which users read or slice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from autoshard.cost.compiler.experts import between_elements
from autoshard.cost.machine.compute import CONTRACTIONS
from autoshard.cost.machine.device import Device
from autoshard.cost.overlap import hides, hides_sums, made_of_parameters
from autoshard.cost.partitioner.ops.scatter import SUM_MOVES
from autoshard.cost.partitioner.partition import Partitioner
from autoshard.cost.partitioner.passes.simplify import simplified
from autoshard.cost.partitioner.propagate import Shardings
from autoshard.cost.partitioner.reshard.hops import hops_between, path_matrix
from autoshard.cost.partitioner.reshard.price import reshard_matrix
from autoshard.cost.partitioner.tiling import Subaxes
from autoshard.dtypes import FLOATS, dtype_bytes
from autoshard.experts.form import KINDS as EXPERTS
from autoshard.graph.annotations import Annotations
from autoshard.graph.groups import BARRIER, Group, Groups, fusion_groups
from autoshard.graph.ops import Graph, Op, Value
from autoshard.graph.rules.table import rule_for
from autoshard.mesh import Mesh, Spec, spec_axes
from autoshard.program import of_micro_step
from autoshard.solver.problem import Problem, Usage
from autoshard.strategies.allowed import Orders, argument_specs
from autoshard.strategies.prices import Prices
from autoshard.strategies.space import (
    Partial,
    Sharded,
    Specs,
    Strategies,
    Sum,
    Variants,
    op_specs,
    plain,
    signature,
    strategies,
    sum_of_partials,
)

Matrix = npt.NDArray[np.float64]
Usages = tuple[list[Usage], list[Usage]]
"""Of nodes, and of edges."""
SMALL_SUMS = 0.01
"""Fraction of the memory limit up to which partial sums that are reduce-scattered do not count."""
UNREAD = 1e-6
"""Cost of a shard that no kernel reads, in readings of it from device memory. It decides ties alone: a floating-point
input, that a loader feeds beside the step, and gathered rows that each of their users gathers. Integers (ids, labels)
cost nothing: a sum over split labels takes an all-reduce. So much of a kernel launch costs, on a GPU, a parameter split
along another dim than the first, which XLA updates transposed and copies back."""
SUMMED = CONTRACTIONS | {"scatter"}
"""Kinds whose result is a partial sum if the contracted or reduced dim is split."""


@dataclass(frozen=True)
class Copy:
    """A copy node: per strategy its sharding, and whether it is the value itself."""

    value: Value
    specs: Specs
    same: npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Formulation:
    """A problem and the meaning of its nodes.

    Nodes are the arguments in the order of `argument_values`, then the groups, then the copies.
    """

    problem: Problem = field(repr=False)
    graph: Graph = field(repr=False)
    groups: Groups = field(repr=False)
    argument_values: tuple[Value, ...] = field(repr=False)
    argument_specs: tuple[Specs, ...] = field(repr=False)
    strategies: tuple[Strategies, ...] = field(repr=False)
    copies: tuple[Copy, ...] = field(repr=False)
    kernels: tuple[Matrix, ...] = field(default=(), repr=False)
    """Of the costs of each group's node, the seconds of its kernels."""
    prices: tuple[float, float] = (1.0, 1.0)
    """How many times as long as `cost/` says kernels and collectives take in this problem."""
    detour: Callable[[Value, Spec, Spec], tuple[Spec, ...]] = field(default=lambda *_: (), repr=False)
    """The hops (intermediate specs) of a copy of a value from one spec to another."""
    gathers: Mapping[int, Matrix] = field(default_factory=dict, repr=False)
    """Edges that reshard what is made of parameters alone -> per pair 1 where that can run beside kernels, else 0."""
    sums: Mapping[int, Matrix] = field(default_factory=dict, repr=False)
    """Node -> seconds of its sums of gradients under each strategy, where these can too."""
    usages: Callable[[float], Usages] = field(default=lambda _: ([], []), repr=False)
    """What nodes and edges use of memory under a limit."""

    def limited(self, memory: float | None) -> Formulation:
        """The problem with a limit of `memory` bytes per device at any point of the step, or without one."""
        nodes, edges = ([], []) if memory is None else self.usages(memory)
        return replace(self, problem=replace(self.problem, node_usages=nodes, edge_usages=edges, limit=memory))

    def overlapping(self, share: float) -> Formulation:
        """The problem in which this share of those collectives takes no time."""
        if not share:
            return self
        costs, edge_costs = list(self.problem.node_costs), list(self.problem.edge_costs)
        for node, seconds in self.sums.items():
            costs[node] = costs[node] - share * seconds
        scaled: dict[tuple[int, int], Matrix] = {}  # equal matrices stay one object
        for edge, hidden in self.gathers.items():
            matrix = edge_costs[edge]
            key = id(matrix), id(hidden)
            if key not in scaled:
                scaled[key] = (1.0 - share * hidden) * matrix
            edge_costs[edge] = scaled[key]
        return replace(self, problem=replace(self.problem, node_costs=costs, edge_costs=edge_costs))

    def hideable(self, choice: Sequence[int]) -> float:
        """Of the objective of a choice in sequence, the seconds of those collectives."""
        found = sum(float(own[choice[node]]) for node, own in self.sums.items())
        for edge, hidden in self.gathers.items():
            pair = tuple(choice[node] for node in self.problem.edges[edge])
            found += float(hidden[pair] * self.problem.edge_costs[edge][pair])
        return found

    def shardings_of(self, value: Value) -> tuple[int, list[Spec]]:
        """The node that decides a value's sharding, and the value's pinned spec under each of its strategies.

        Raises:
            ValueError: the value has no node: it depends on constants only, or is a barrier's result without users.
        """
        if value in self.argument_values:
            node = self.argument_values.index(value)
            specs = self.argument_specs[node]
            return node, [plain(specs[i]) for i in range(len(specs.index))]
        group = self.groups.maker(value)
        if group is None:
            raise ValueError(
                "that value follows from constants alone, or nothing reads it: it is free in every sharding"
            )
        ways, members = self.strategies[group], self.groups.groups[group]
        made = [op_specs(ways, members, self.graph, number)[value] for number in range(len(ways))]
        return len(self.argument_values) + members.id, made

    def kernel_seconds(self, choice: Sequence[int]) -> float:
        """Of the objective of a choice, the seconds of kernels; the others are of collectives."""
        first = len(self.argument_values)
        return sum(float(own[choice[node]]) for node, own in enumerate(self.kernels, first))

    def at_prices(self, prices: tuple[float, float]) -> Formulation:
        """The problem under these `prices`."""
        return self if prices == self.prices else self.repriced(prices[0] / self.prices[0], prices[1] / self.prices[1])

    def repriced(self, kernels: float, collectives: float) -> Formulation:
        """The problem in which kernels and collectives take so many times as long."""
        first = len(self.argument_values)
        costs = list(self.problem.node_costs)
        made: dict[tuple[int, int], Matrix] = {}  # of equal groups one object, as before
        for node, own in enumerate(self.kernels, first):
            key = id(costs[node]), id(own)
            if key not in made:
                made[key] = collectives * costs[node] + (kernels - collectives) * own
            costs[node] = made[key]
        edges = {id(matrix): collectives * matrix for matrix in {id(m): m for m in self.problem.edge_costs}.values()}
        problem = replace(
            self.problem, node_costs=costs, edge_costs=[edges[id(matrix)] for matrix in self.problem.edge_costs]
        )
        return replace(
            self,
            problem=problem,
            prices=(kernels * self.prices[0], collectives * self.prices[1]),
            kernels=tuple(kernels * own for own in self.kernels),
            sums={node: collectives * own for node, own in self.sums.items()},
        )

    def fixed(self, wanted: Mapping[Value, Spec]) -> Formulation:
        """The problem with these values' shardings fixed; infeasible if no strategy has them."""
        costs = list(self.problem.node_costs)
        for value, spec in wanted.items():
            node, specs = self.shardings_of(value)
            costs[node] = np.where(np.array([each == spec for each in specs]), costs[node], math.inf)
        return replace(self, problem=replace(self.problem, node_costs=costs)) if wanted else self

    def without(self, unwanted: Mapping[Value, frozenset[str]]) -> Formulation:
        """The problem with these axis sets forbidden for these values; infeasible if no strategy avoids them."""
        costs = list(self.problem.node_costs)
        for value, axes in unwanted.items():
            node, specs = self.shardings_of(value)
            costs[node] = np.where(np.array([spec_axes(each) == axes for each in specs]), math.inf, costs[node])
        return replace(self, problem=replace(self.problem, node_costs=costs))

    def annotations(self, choice: Sequence[int]) -> Annotations:
        """The annotations of a choice of one strategy per node."""
        graph, first_group = self.graph, len(self.argument_values)
        pins: dict[Value, Spec] = {}
        for node, value in enumerate(self.argument_values):
            pins[value] = plain(self.argument_specs[node][choice[node]])
        made_by_aten = annotatable(graph)
        for group, ways in zip(self.groups.groups, self.strategies, strict=True):
            chosen = choice[first_group + group.id]
            made = op_specs(ways, group, graph, chosen)
            pins.update((value, spec) for value, spec in made.items() if value in made_by_aten)
        wants: dict[tuple[Value, int], list[Spec]] = {}
        for group, ways in zip(self.groups.groups, self.strategies, strict=True):
            chosen = choice[first_group + group.id]
            for position, value in enumerate(group.inputs):
                if value not in pins or graph.type_of(value).dtype not in FLOATS:
                    continue
                wanted = ways.read(position, chosen)
                for op in group.readers(graph, value):
                    if (reader := op.reader(value)) is not None:
                        wants.setdefault((value, reader), []).append(wanted)
        read = {key: one_copy(specs) for key, specs in wants.items()}
        _as_read(graph, pins, read)
        copies = {key: spec for key, spec in read.items() if spec != pins[key[0]]}
        return Annotations(pins, copies, self._hops(choice, pins, copies))

    def _hops(
        self, choice: Sequence[int], pins: Mapping[Value, Spec], copies: Mapping[tuple[Value, int], Spec]
    ) -> dict[tuple[Value, Spec], tuple[Spec, ...]]:
        """The hops to every copy; several slices of a copy node's sharding come from one copy."""
        held = {
            copy.value: plain(copy.specs.choices[choice[node]])
            for node, copy in enumerate(self.copies, len(self.argument_values) + len(self.strategies))
            if not copy.same[choice[node]]
        }
        wanted: dict[Value, dict[Spec, None]] = {}
        for (value, _), spec in copies.items():
            wanted.setdefault(value, {})[spec] = None
        found = {}
        for value, specs in wanted.items():
            middle = held.get(value)
            slices = [spec for spec in specs if middle is not None and _is_slice(middle, spec)]
            for spec in specs:
                if middle is not None and len(slices) > 1 and spec in slices and spec != middle:
                    hops = (*self.detour(value, pins[value], middle), middle)
                else:
                    hops = self.detour(value, pins[value], spec)
                if hops:
                    found[value, spec] = hops
        return found


def one_copy(wants: Sequence[Spec]) -> Spec:
    """The copy that all HLO ops of one aten op read if they want these shardings of one value.

    It is the one that the partitioner can slice to all others without communication; else what the last op wants.
    """
    return next((spec for spec in wants if all(_is_slice(spec, other) for other in wants)), wants[-1])


def formulate(
    graph: Graph,
    mesh: Mesh,
    device: Device,
    *,
    memory: float | None = None,
    hints: Mapping[str, Spec] | None = None,
    inside: Mapping[Value, Spec] | None = None,
) -> Formulation:
    """The strategy-selection problem (an integer linear program) of a program on a mesh.

    Args:
        memory: limit of bytes per device at any point of the step, or None.
        hints: argument name -> its required sharding. Raises ValueError for a hint that fits no argument.
        inside: other values -> their required shardings.
    """
    built = _Builder(simplified(graph, device.target), mesh, device, hints or {}, inside or {}).build()
    return built.fixed(inside or {}).limited(memory)


class _Key(NamedTuple):
    """Groups of one key have the same strategies at the same costs."""

    signature: tuple[object, ...]
    scatter: bool
    defer: bool
    sums: Sum | None
    returned: tuple[bool, ...]
    last: bool


class _Builder:
    def __init__(
        self,
        graph: Graph,
        mesh: Mesh,
        device: Device,
        hints: Mapping[str, Spec],
        inside: Mapping[Value, Spec],
    ) -> None:
        self.graph, self.mesh, self.device, self.hints = graph, mesh, device, hints
        self.allowed = Orders(mesh, (*hints.values(), *inside.values()))
        arguments = zip(graph.arguments, graph.program.arguments, strict=True)
        self.inputs = {Value(op) for op, argument in arguments if argument.role == "input"}
        self.groups = fusion_groups(graph)
        self.annotatable = annotatable(graph)
        self.node_costs: list[Matrix] = []
        self.edges: list[tuple[int, int]] = []
        self.edge_costs: list[Matrix] = []
        self.names: list[str] = []
        self.made: dict[Value, tuple[int, Specs]] = {}  # value -> its producer's node, shardings that consumers see
        self.sums: dict[int, Sum] = {}  # group -> its sum of possibly partial values
        self.deferrable: set[Value] = set()  # values that may stay partial for such a sum
        self.prices = Prices(graph, self.groups, mesh, device)
        self.partitioner = Partitioner(graph, Shardings(Subaxes(mesh), {}, (), (), {}, {}), device.target)
        self._find_sums()
        self.weights = made_of_parameters(graph)
        self.gathered: dict[int, Matrix] = {}  # edges that reshard them -> where that can run beside kernels
        self.gradients: dict[int, Matrix] = {}  # node -> seconds of its sums of gradients
        self.contractions: set[int] = set()  # nodes of groups that contract
        self.first_group = 0  # node of the first group
        self._matrices: dict[tuple[object, ...], Matrix] = {}
        self._by_shape: dict[object, tuple[Strategies, Matrix, Matrix]] = {}
        self.kernels: list[Matrix] = []  # per group the seconds of its kernels

    def build(self) -> Formulation:
        arguments = self._arguments()
        ways = self._groups()
        copies = self._edges(ways)
        self._shared_reads(ways)
        self._ties()
        problem = Problem(self.node_costs, self.edges, self.edge_costs, names=self.names)
        values = tuple(arguments)
        specs = tuple(arguments.values())
        return Formulation(
            problem,
            self.graph,
            self.groups,
            values,
            specs,
            tuple(ways),
            tuple(copies),
            tuple(self.kernels),
            detour=self._detour,
            gathers=self.gathered,
            sums=self.gradients,
            usages=partial(self._usages, ways, copies),
        )

    def _detour(self, value: Value, src: Spec, dst: Spec) -> tuple[Spec, ...]:
        kind = self.graph.type_of(value)
        return hops_between(kind.shape, dtype_bytes(kind.dtype), src, dst, self.mesh, self.device)

    def _copied(self, value: Value) -> bool:
        """Whether lowering can write copies of a value."""
        annotated = value in self.annotatable or self.graph.ops[value.op].kind == "argument"
        return annotated and self.graph.type_of(value).dtype in FLOATS

    def _arguments(self) -> dict[Value, Specs]:
        found: dict[Value, Specs] = {}
        for op_id, argument in zip(self.graph.arguments, self.graph.program.arguments, strict=True):
            if op_id in self.groups.free:
                continue
            even = argument.type.dtype not in FLOATS
            choices = argument_specs(argument.type.shape, self.mesh, even=even, allowed=self.allowed)
            if argument.name in self.hints:
                hint = self.hints[argument.name]
                self.mesh.check(hint, argument.type.shape, f"the hint for {argument.name}")
                choices = (hint,)
            value = Value(op_id)
            found[value] = Specs(choices, np.arange(len(choices), dtype=np.int32))
            self.made[value] = (len(self.node_costs), found[value])
            cost = np.zeros(len(choices))
            if value in self.inputs and not even:
                cost = UNREAD * self._bytes(value, choices) / self.device.reachable_bandwidth
            elif argument.role == "parameter" and self.device.target == "gpu":  # its scattered gradient is major-most
                cost = UNREAD * self.device.kernel_overhead * np.array([any(spec[1:]) for spec in choices], float)
            self._node(cost, argument.name)
        return found

    def _groups(self) -> list[Strategies]:
        found = []
        self.first_group = len(self.node_costs)
        scatterable = self._scatterable()
        keys = [self._key(group, scatterable) for group in self.groups.groups]
        self.prices.average(keys)
        compiler = self.device.compiler
        for group, key in zip(self.groups.groups, keys, strict=True):
            if key not in self._by_shape:
                ways = strategies(
                    group,
                    self.groups,
                    self.graph,
                    self.mesh,
                    rule_for,
                    Variants(key.scatter, key.defer, key.sums, compiler.sums_dims_at_once, compiler.folds_sums),
                    self.partitioner.op_collectives,
                    self.allowed,
                )
                kernels = self.prices.kernels(group, ways)
                costs = kernels + self.prices.collectives(group, ways)
                costs = costs if kernels.any() else costs + self._gathered_again(group, ways)
                self._by_shape[key] = ways, kernels, costs
            ways, kernels, costs = self._by_shape[key]
            found.append(ways)
            node = self._node(self._in_a_step(group, ways, costs), self._name(group))
            self.kernels.append(self._runs(node) * kernels)
            if hides_sums(self.device) and self.prices.last[group.id] and any(ways.collectives):
                sums = [sum(self.prices.collective_seconds(one, group) for one in each) for each in ways.collectives]
                self.gradients[node] = np.array(sums)
            for value, specs in zip(group.outputs, ways.outputs, strict=True):
                self.made[value] = (node, specs)
        return found

    def _gathered_again(self, group: Group, ways: Strategies) -> Matrix:
        """What decides ties between strategies of a gather that every user runs again: the shard of its result."""
        found = np.zeros(len(ways))
        if all(self.graph.ops[op].kind != "gather" for op in group.ops):
            return found
        for value, specs in zip(group.outputs, ways.outputs, strict=True):
            if self.graph.type_of(value).dtype in FLOATS:
                found += UNREAD * self._bytes(value, specs.choices)[specs.index] / self.device.reachable_bandwidth
        return found

    def _in_a_step(self, group: Group, ways: Strategies, costs: Matrix) -> Matrix:
        """Seconds of all of a group's runs; sums over micro-steps of partial values are reduced once."""
        runs = self._runs(self.first_group + group.id)
        if runs == 1:
            return costs
        more = (runs - 1) * costs
        sums = self.sums.get(group.id)
        before = [] if sums is None else [self.groups.maker(group.inputs[leaf]) for leaf in sums.leaves]
        if any(maker is not None and self._runs(self.first_group + maker) == 1 for maker in before):
            assert sums is not None
            for row, collectives in enumerate(ways.collectives):
                if any(isinstance(ways.inputs[leaf][row], Partial) for leaf in sums.leaves):
                    more[row] -= (runs - 1) * self.prices.collective_seconds(collectives[-1], group)
        return costs + more

    def _runs(self, node: int) -> int:
        """How often what a group's node stands for runs in a step."""
        return self.graph.runs(self.groups.groups[node - self.first_group].ops[-1])

    def _key(self, group: Group, scatterable: Container[Value]) -> _Key:
        return _Key(
            signature(group, self.groups, self.graph),
            all(value in scatterable for value in group.outputs),
            any(value in self.deferrable for value in group.outputs),
            self.sums.get(group.id),
            tuple(value in self.prices.returned for value in group.outputs),
            self.prices.last[group.id],
        )

    def _scatterable(self) -> frozenset[Value]:
        """Values of which a reduce-scattered copy can be written: they have users, or update an argument.

        A plain result of the program stays whole.
        """
        outputs = zip(self.graph.program.outputs, self.graph.outputs, strict=True)
        kept = {value: output.updates is not None for output, value in outputs}
        read = {value for group in self.groups.groups for value in group.inputs}
        return frozenset(value for value in self.annotatable if kept.get(value, value in read))

    def _node(self, costs: Matrix, name: str) -> int:
        self.node_costs.append(costs)
        self.names.append(name)
        return len(self.node_costs) - 1

    def _name(self, group: Group) -> str:
        op = self.graph.ops[group.ops[-1]]
        return (
            f"{op.module or 'step'}: {op.kind} ({len(group.ops)} ops)"
            if len(group.ops) > 1
            else (f"{op.module or 'step'}: {op.kind}")
        )

    def _bytes(self, value: Value, specs: tuple[Sharded, ...]) -> Matrix:
        kind, mesh = self.graph.type_of(value), self.mesh
        key = ("bytes", kind, specs)
        if key not in self._matrices:
            item = dtype_bytes(kind.dtype)
            sizes = [float(math.prod(mesh.shard_shape(kind.shape, plain(spec))) * item) for spec in specs]
            self._matrices[key] = np.array(sizes)
        return self._matrices[key]

    def _find_sums(self) -> None:
        """Find groups that sum values which may stay partial until then; CPU's partitioner all-reduces each term."""
        graph = self.graph
        if not self.device.compiler.sums_terms_once:
            return
        contracted = {
            value
            for group in self.groups.groups
            for value in group.outputs
            if len(group.ops) == 1 and graph.ops[value.op].kind in SUMMED
            if graph.uses(value) == 1 and value not in graph.returned
        }
        for group in self.groups.groups:
            found = sum_of_partials(group, graph, contracted) or self._transposed_sum(group, contracted)
            if found is not None:
                self.sums[group.id] = found
                self.deferrable.update(group.inputs[leaf] for leaf in found.leaves)

    def _transposed_sum(self, group: Group, contracted: Container[Value]) -> Sum | None:
        """A kernel's gradient: its aten op transposes the convolution's result, and only a copy of that is annotated.

        Compilers see the slice of the copy, and reduce-scatter the convolution's partial sum.
        """
        (op, *more) = (self.graph.ops[number] for number in group.ops)
        if more or op.kind != "transpose" or group.inputs[:1] != op.operands:
            return None
        value = op.operands[0]
        scatters = value in contracted and value not in self.annotatable and self.graph.ops[value.op].aten == op.aten
        return Sum((0,), 1, moved=True) if scatters else None

    def _edges(self, ways: Sequence[Strategies]) -> list[Copy]:
        readers: dict[Value, list[tuple[int, Specs]]] = {}
        first_group = len(self.node_costs) - len(ways)
        for group, own in zip(self.groups.groups, ways, strict=True):
            if self.graph.ops[group.ops[0]].kind in CONTRACTIONS:
                self.contractions.add(first_group + group.id)
            for value, specs in zip(group.inputs, own.inputs, strict=True):
                readers.setdefault(value, []).append((first_group + group.id, specs))
        copies = []
        for value, uses in readers.items():
            node, specs = self.made[value]
            if len(uses) > 1 and self._copied(value):
                copies.append(self._copy(value, node, specs, uses))
            else:
                for reader, wanted in uses:
                    edge = self._edge(node, reader, self._reshard(value, specs, reader, wanted), self._runs(reader))
                    self._gathers(value, edge, specs, wanted, self._moved_as(value, [reader]))
        return copies

    def _copy(self, value: Value, node: int, specs: Specs, uses: Sequence[tuple[int, Specs]]) -> Copy:
        """The node of the one copy of `value` that its users share.

        An `optimization_barrier` reads it, or a slice of it: what is gathered before a barrier for those behind it is
        written as one copy with what other users gather, and kept until the last of them.
        """
        others = tuple(dict.fromkeys(spec for _, wanted in uses for spec in wanted.choices))
        same = np.array([True] * len(specs.choices) + [False] * len(others))
        held = Specs(specs.choices + others, np.arange(len(same), dtype=np.int32))
        copy = self._node(np.zeros(len(same)), f"copy of {self.names[node]}")
        readers = [reader for reader, _ in uses]
        if self._needs_nothing(value):  # its update reads it under its own sharding
            last = [node for node in readers if self.prices.last[node - self.first_group]]
            updates = set(last) - self.contractions
            readers = [node for node in readers if node not in updates] or readers
        item, sliced = self._moved_as(value, readers), self._cut_out(readers)
        kind = self._sort(value)
        key = ("into", *kind, item, sliced, self._needs_nothing(value), specs.choices, others)
        if key not in self._matrices:
            into = self._choice_matrix(value, specs.choices, held.choices, item, sliced).copy()
            kept = len(specs.choices)
            into[:, :kept] = np.where(np.eye(kept, dtype=bool), 0.0, np.inf)
            for row, spec in enumerate(specs.choices):  # a copy under the value's own sharding is no copy
                for column, other in enumerate(others):
                    if other == spec:
                        into[row, kept + column] = np.inf
            self._matrices[key] = into
        edge = self._edge(node, copy, self._expand(key, self._matrices[key], specs, held), self._runs(uses[0][0]))
        self._gathers(value, edge, specs, held, item)
        for reader, wanted in uses:
            item, sliced = self._moved_as(value, [reader]), self._cut_out([reader])
            first, barrier = self._needs_nothing(value), self.groups.groups[reader - self.first_group].operand_number
            own = len(specs.choices) if barrier is None else 0  # that a reshard may start from
            out_key = ("out", *kind, item, sliced, first, own, specs.choices, others, wanted.choices)
            if out_key not in self._matrices:
                out = self._choice_matrix(value, held.choices, wanted.choices, item, sliced).copy()
                for row, spec in enumerate(held.choices[own:], own):
                    for column, other in enumerate(wanted.choices):
                        if not isinstance(spec, Partial):
                            out[row, column] = 0.0 if _is_slice(spec, other) else np.inf
                self._matrices[out_key] = out
            costs = self._expand(out_key, self._matrices[out_key], held, wanted)
            self._gathers(value, self._edge(copy, reader, costs, self._runs(reader)), held, wanted, item)
        return Copy(value, held, same)

    def _shared_reads(self, ways: Sequence[Strategies]) -> None:
        """Groups with HLO ops of one aten op read one copy of a value: see `one_copy`."""
        wants: dict[tuple[Value, int], dict[int, Specs]] = {}
        for group, own in zip(self.groups.groups, ways, strict=True):
            for value, specs in zip(group.inputs, own.inputs, strict=True):
                if self._copied(value) and not any(isinstance(spec, Partial) for spec in specs.choices):
                    for op in group.readers(self.graph, value):
                        if (reader := op.reader(value)) is not None:
                            wants.setdefault((value, reader), {})[group.id] = specs
        for (value, _), found in wants.items():
            *others, (last, read) = found.items()
            for other, wanted in others:
                item = self._moved_as(value, [self.first_group + other])
                matrix = self._differently(value, read.choices, wanted.choices, item)
                key = ("shared", self.graph.type_of(value), item, read.choices, wanted.choices)
                tail, head = self.first_group + last, self.first_group + other
                self._edge(tail, head, self._expand(key, matrix, read, wanted), self._runs(head))

    def _differently(self, value: Value, reads: tuple[Sharded, ...], wanted: tuple[Sharded, ...], item: int) -> Matrix:
        """Seconds for an op that wants one of `wanted` (columns) but reads a value under one of `reads` (rows)."""
        kind = self.graph.type_of(value)
        key = ("differently", kind, item, reads, wanted)
        if key not in self._matrices:
            rows, columns = [plain(spec) for spec in reads], [plain(spec) for spec in wanted]
            found = reshard_matrix(kind.shape, item, rows, columns, self.mesh, self.device)[0].copy()
            sliced = [[_is_slice(row, column) or _is_slice(column, row) for column in columns] for row in rows]
            found[np.array(sliced)] = 0.0
            self._matrices[key] = found
        return self._matrices[key]

    def _edge(self, tail: int, head: int, costs: Matrix, runs: int = 1) -> int:
        """An edge whose costs arise `runs` times in a step."""
        self.edges.append((tail, head))
        if runs > 1:  # `costs` is kept, so that its id is its own
            costs = self._matrices.setdefault(("runs", id(costs), runs), runs * costs)
        self.edge_costs.append(costs)
        return len(self.edges) - 1

    def _gathers(self, value: Value, edge: int, rows: Specs, columns: Specs, item: int) -> None:
        """Note an edge that reshards what is made of parameters alone; `item`: bytes per element that move."""
        if value.op in self.weights:
            key = ("hides", self.graph.type_of(value), item, rows.choices, columns.choices)
            if key not in self._matrices:
                sources, wanted = [plain(row) for row in rows.choices], [plain(column) for column in columns.choices]
                hidden = [[float(hides(one, other, self.mesh, self.device)) for other in wanted] for one in sources]
                copies, moved = self._gathered_copies(value, item, sources, wanted)
                with_copies = np.where(copies > 0.0, copies + moved, 1.0)
                self._matrices[key] = np.array(hidden) * (1.0 - copies / with_copies)
            self.gathered[edge] = self._expand(key, self._matrices[key], rows, columns)

    def _follows(self, value: Value) -> bool:
        """Whether propagation gives a value its user's sharding: a convolution's that no annotation can pin.

        The partitioner gathers more than a reshard for results whose sharding does not follow from the operands.
        """
        return self.graph.ops[value.op].kind == "convolution" and not self._copied(value)

    def _needs_nothing(self, value: Value) -> bool:
        """Whether gathers of a value can all be combined: a weight's."""
        return self.graph.ops[value.op].kind == "argument"

    def _cut_out(self, readers: Sequence[int]) -> bool:
        """Whether a slice of a value is its own kernel: libraries' dots fuse none, loops and TPUs do."""
        return not self.device.compiler.fuses_slices and any(node in self.contractions for node in readers)

    def _moved_as(self, value: Value, readers: Sequence[int]) -> int:
        """Bytes per element while a value is resharded for these nodes: bf16 on TPU if only contractions use it."""
        kind = self.graph.type_of(value)
        if not self.device.compiler.rounds_for_products or kind.dtype != "f32":
            return dtype_bytes(kind.dtype)
        groups = (self.groups.groups[node - self.first_group] for node in readers)
        uses = [op for group in groups for op in group.readers(self.graph, value)]
        return 2 if uses and all(self._contracts(op) for op in uses) else dtype_bytes(kind.dtype)

    def _contracts(self, op: Op, depth: int = 8) -> bool:
        """Whether an op is a contraction, or data movement with contractions as only users."""
        if op.kind in CONTRACTIONS:
            return True
        made = Value(op.id)
        if op.kind not in SUM_MOVES or not depth or made in self.graph.returned:
            return False
        uses = self.graph.readers(made)
        return bool(uses) and all(self._contracts(each, depth - 1) for each in uses)

    def _choice_matrix(
        self, value: Value, sources: tuple[Sharded, ...], wanted: tuple[Sharded, ...], item: int, sliced: bool
    ) -> Matrix:
        kind = self.graph.type_of(value)
        copied, first = self._copied(value), self._needs_nothing(value)
        key = ("reshard", *self._sort(value), item, copied, sliced, first, self._follows(value), sources, wanted)
        if key not in self._matrices:
            whole = [[i for i, s in enumerate(side) if not isinstance(s, Partial)] for side in (sources, wanted)]
            rows, columns = (
                [plain(side[i]) for i in kept] for side, kept in zip((sources, wanted), whole, strict=True)
            )
            matrix = np.array([[0.0 if left == right else np.inf for right in wanted] for left in sources])
            if rows and columns:
                ends = (kind.shape, item, rows, columns, self.mesh, self.device)
                found = path_matrix(*ends) if copied else reshard_matrix(*ends)[0]
                copies, direct = self._gathered_copies(value, item, rows, columns)
                found = found + np.where(found < direct, 0.0, copies)
                if self._follows(value):
                    found = np.array([[0.0 if row == column else np.inf for column in columns] for row in rows])
                moved = np.where(found > 0.0, 1.0, 0.0)
                if first:
                    found = found - self.prices.shared_starts(kind, item, rows, columns)
                    found = found + self._read_whole(value, rows, columns, moved)
                if not self.prices.stores(value):
                    found = found + moved * self.prices.storing_seconds(kind, rows)[:, None]
                if sliced:
                    differs = np.array([[row != column for column in columns] for row in rows])
                    made = self.prices.copy_seconds(kind, columns)
                    found = found + np.where(differs & (found == 0.0), made[None, :], 0.0)
                matrix[np.ix_(*whole)] = found
            self._matrices[key] = matrix
        return self._matrices[key]

    def _gathered_copies(self, value: Value, item: int, rows: list[Spec], columns: list[Spec]) -> tuple[Matrix, Matrix]:
        """Seconds of the copies behind gathers along several dims, and those of the direct reshards."""
        kind = self.graph.type_of(value)
        copies = self.prices.gathered_copies(kind, item, rows, columns)
        return copies, reshard_matrix(kind.shape, item, rows, columns, self.mesh, self.device)[0]

    def _sort(self, value: Value) -> tuple[object, ...]:
        """The key of a value's reshard costs, beside its shardings."""
        return self.graph.type_of(value), value in self.inputs, self.prices.stores(value), value.op in self.weights

    def _read_whole(self, value: Value, rows: list[Spec], columns: list[Spec], moved: Matrix) -> Matrix:
        """Seconds to read an argument that devices slice: a TPU copies the whole of its shard on chip."""
        if not self.device.compiler.copies_inputs_on_chip or value not in self.inputs:
            return np.zeros(moved.shape)
        differs = np.array([[float(row != column) for column in columns] for row in rows])
        rate = self.device.reachable_bandwidth
        return np.asarray(differs * (1.0 - moved) * self._bytes(value, tuple(rows))[:, None] / rate)

    def _reshard(self, value: Value, sources: Specs, reader: int, wanted: Specs) -> Matrix:
        item, sliced = self._moved_as(value, [reader]), self._cut_out([reader])
        matrix = self._choice_matrix(value, sources.choices, wanted.choices, item, sliced)
        copied, first, follows = self._copied(value), self._needs_nothing(value), self._follows(value)
        sort = self._sort(value)
        key = ("reshard", *sort, item, copied, sliced, first, follows, sources.choices, wanted.choices)
        return self._expand(key, matrix, sources, wanted)

    def _expand(self, key: tuple[object, ...], matrix: Matrix, rows: Specs, columns: Specs) -> Matrix:
        """Expand entries per pair of shardings to pairs of strategies; equal matrices are one object."""
        full = ("expanded", key, rows.index.tobytes(), columns.index.tobytes())
        if full not in self._matrices:
            self._matrices[full] = np.ascontiguousarray(matrix[np.ix_(rows.index, columns.index)])
        return self._matrices[full]

    def _ties(self) -> None:
        """Tie what has one sharding, or the next step or micro-step would be another program."""
        for value, other in self._tied():
            if value == other or value not in self.made or other not in self.made:
                continue
            node, specs = self.made[value]
            beside, kept = self.made[other]
            key = ("tie", specs.choices, kept.choices)
            if key not in self._matrices:  # what is left partial is reduced with what is added to it
                free = [[isinstance(left, Partial) for _ in kept.choices] for left in specs.choices]
                same = [[left == right for right in kept.choices] for left in specs.choices]
                self._matrices[key] = np.where(np.array(free) | np.array(same), 0.0, np.inf)
            self._edge(node, beside, self._expand(key, self._matrices[key], specs, kept))

    def _tied(self) -> Iterator[tuple[Value, Value]]:
        """Updates and their arguments; inputs of two micro-steps; what enters the second one and leaves it."""
        graph, program = self.graph, self.graph.program
        for output, value in zip(program.outputs, graph.outputs, strict=True):
            if output.updates is not None:
                yield value, Value(graph.arguments[output.updates])
        if program.micro_steps is None:
            return
        inputs = {program.arguments[place].name: Value(op) for place, op in enumerate(graph.arguments)}
        for name in program.inputs:
            if (again := of_micro_step(name, 2)) in inputs and name in inputs:
                yield inputs[name], inputs[again]
        for before, after in program.micro_steps.carried:
            if before in graph.aten_outputs and after in graph.aten_outputs:
                yield graph.aten_outputs[before], graph.aten_outputs[after]

    def _usages(self, ways: Sequence[Strategies], copies: Sequence[Copy], memory: float) -> Usages:
        """Memory of each choice, over `_times`."""
        graph, groups = self.graph, self.groups
        end = len(groups.groups)
        times = self._times()
        on_nodes: list[Usage] = []
        on_edges: list[Usage] = []
        using: dict[Value, list[int]] = {}  # groups that read a value
        readers: dict[Value, list[int]] = {}  # times of a value's uses
        passed: dict[int, list[int]] = {}  # barrier's group -> times of its result's uses: it aliases
        for group in reversed(groups.groups):
            if group.operand_number is not None:
                (made,) = group.outputs
                passed[group.id] = [*readers.get(made, []), *([end - 1] if made in graph.returned else [])]
            for value in group.inputs:
                using.setdefault(value, []).append(group.id)
                readers.setdefault(value, []).extend([times[group.id], *passed.get(group.id, [])])
        donated = {
            value
            for output, value in zip(graph.program.outputs, graph.outputs, strict=True)
            if output.updates is not None
        }
        first_group = len(self.node_costs) - len(copies) - end
        position = {edge: index for index, edge in enumerate(self.edges)}
        for value, (node, specs) in self.made.items():
            if graph.ops[value.op].kind == "argument":
                on_nodes.append(self._usage(node, 0, end, value, specs))
            elif value not in donated and value not in groups.barrier_results:
                start = times[node - first_group]
                last = end if value in graph.returned else max(readers.get(value, [start])) + 1
                on_nodes.append(self._usage(node, start, last, value, specs))
        for index, copy in enumerate(copies):
            amount = self._bytes(copy.value, copy.specs.choices)[copy.specs.index]
            amount = np.where(copy.same, 0.0, amount)
            node = len(self.node_costs) - len(copies) + index
            direct = [times[user] for user in using[copy.value] if user not in passed]
            start = 0 if self._gathered_first(copy.value) else min(times[user] for user in using[copy.value])
            last = max(direct, default=start)
            on_nodes.append(Usage(node, start, last + 1, amount))
            for user in sorted(passed.keys() & using[copy.value]):  # what a barrier reads of the copy is kept behind it
                until = max([times[user], *passed[user]])
                if until > last:
                    size = self._bytes(copy.value, ways[user].inputs[0].choices)[ways[user].inputs[0].index]
                    kept = np.where(copy.same, 0.0, 1.0)[:, None] * size[None, :]
                    on_edges.append(Usage(position[node, first_group + user], last + 1, until + 1, kept))
                    last = until
        shared = {copy.value for copy in copies}
        for group in groups.groups:
            now, way = times[group.id], ways[group.id]
            expert = graph.ops[group.ops[0]].kind in EXPERTS
            used = self._between(group, way) if expert else self._unreduced(way)
            if expert or used.max() > SMALL_SUMS * memory:
                on_nodes.append(Usage(first_group + group.id, now, now + 1, used))
        for group in groups.groups:
            for value, wanted in zip(group.inputs, ways[group.id].inputs, strict=True):
                if value in shared or value not in self.made:
                    continue
                node, specs = self.made[value]
                edge = position[node, first_group + group.id]
                key = ("held", graph.type_of(value), specs.choices, wanted.choices)
                if key not in self._matrices:
                    differs = np.array([[plain(a) != plain(b) for b in wanted.choices] for a in specs.choices])
                    self._matrices[key] = differs * self._bytes(value, wanted.choices)[None, :]
                amount = self._expand(key, self._matrices[key], specs, wanted)
                now = times[group.id]
                start = 0 if self._gathered_first(value) else now
                on_edges.append(Usage(edge, start, max([now, *passed.get(group.id, [])]) + 1, amount))
        return on_nodes, on_edges

    def _unreduced(self, ways: Strategies) -> Matrix:
        """Bytes of the partial sums that a group reduce-scatters, under each strategy."""
        key = ("unreduced", id(ways))
        if key not in self._matrices:
            kind = "reduce-scatter"
            sizes = [sum(each.bytes for each in found if each.kind == kind) for found in ways.collectives]
            self._matrices[key] = np.array(sizes, dtype=float)
        return self._matrices[key]

    def _between(self, group: Group, ways: Strategies) -> Matrix:
        """Bytes that experts kept as one op use between their operands and results, under each strategy."""
        op = self.graph.ops[group.ops[0]]
        places = [(group.inputs.index(value), self.graph.type_of(value).shape) for value in op.operands]
        item, apart = dtype_bytes(op.results[0].dtype), self.device.compiler.fuses_no_gathers
        found = []
        for number in range(len(ways)):
            local = [self.mesh.shard_shape(shape, ways.read(place, number)) for place, shape in places]
            found.append(float(item * between_elements(op.kind, local, apart=apart)))
        return np.array(found)

    def _times(self) -> list[int]:
        """Time of every group: its position, or as soon as its inputs are ready if only parameter gradients need it.

        These are late in the program, next to the optimizer, and would keep activations live until then.
        """
        makers = [
            [made for value in group.inputs if (made := self.groups.maker(value)) is not None]
            for group in self.groups.groups
        ]
        needed: set[int] = set()  # by other contractions
        found = list(range(len(makers)))
        early = [False] * len(makers)
        for group in reversed(self.groups.groups):
            stays = self.graph.ops[group.ops[0]].kind in (*CONTRACTIONS, BARRIER) or group.id in needed
            early[group.id] = self.prices.last[group.id] or not stays
            needed.update(() if early[group.id] else makers[group.id])
        for number, before in enumerate(makers):
            if early[number] and before:
                found[number] = max(found[made] for made in before)
        return found

    def _gathered_first(self, value: Value) -> bool:
        """Whether the target reshards it at the start of the step: XLA's CPU compiler does so for every argument."""
        return self.device.compiler.gathers_arguments_first and self.graph.ops[value.op].kind == "argument"

    def _usage(self, node: int, start: int, end: int, value: Value, specs: Specs) -> Usage:
        return Usage(node, start, end, self._bytes(value, specs.choices)[specs.index])


def annotatable(graph: Graph) -> frozenset[Value]:
    """Results of aten ops that an annotation may shard: floating-point values."""
    return frozenset(
        value
        for value in graph.aten_outputs.values()
        if graph.ops[value.op].kind != "argument" and graph.type_of(value).dtype in FLOATS
    )


def _as_read(graph: Graph, pins: dict[Value, Spec], read: Mapping[tuple[Value, int], Spec]) -> None:
    """Pin a scatter's result to the one sharding that all users read.

    Its aten op may compute the updates too, where no annotation is possible: for a result that is pinned replicated
    partitioners all-reduce the scatters, and for a sharded one they gather the updates.
    """
    wanted: dict[Value, set[Spec]] = {}
    for (value, _), spec in read.items():
        if graph.ops[value.op].kind == "scatter":
            wanted.setdefault(value, set()).add(spec)
    for value, specs in wanted.items():
        if len(specs) == 1 and value not in graph.outputs and all(_is_slice(pins[value], spec) for spec in specs):
            pins[value] = specs.pop()


@cache
def _is_slice(spec: Spec, other: Spec) -> bool:
    """Whether a device can slice its shard of `other` from its shard of `spec`: minor axes split each dim further."""
    return all(right[: len(left)] == left for left, right in zip(spec, other, strict=True))
