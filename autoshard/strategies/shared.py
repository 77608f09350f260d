"""Values that a compiler computes once for groups that the solver decides one by one.

A TPU's compiler merges equal ops before sharding propagation: the updates of all parameters of one shape use one
broadcast of a learning rate. Propagation gives it one sharding, the finest that a user asks for; what a user computes
from it inside an aten op, where no annotation is possible, gets that too, and a user that wants another sharding
reshards. So one more node, the sharding of the shared value, joins the groups that compute it. It is added only where
a solution disagrees: most never do, and a node that joins distant groups makes a problem harder.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autoshard.cost.machine.device import Device
from autoshard.cost.partitioner.propagate import equal_values
from autoshard.cost.partitioner.reshard.price import reshard_matrix
from autoshard.dtypes import FLOATS, dtype_bytes
from autoshard.graph.annotations import Annotations
from autoshard.graph.ops import DimFactors, Value
from autoshard.mesh import Mesh, Spec
from autoshard.program import TensorType
from autoshard.solver.objective import evaluate
from autoshard.solver.problem import Array, Problem, Solution, Status
from autoshard.solver.settings import Settings
from autoshard.solver.solve import CLOSE, GAP_TOLERANCE
from autoshard.strategies.formulate import Formulation
from autoshard.strategies.space import spec_of


@dataclass(frozen=True)
class Shared:
    """A value that the compiler computes once for groups that are decided one by one.

    Attributes:
        values: per group its value, of the same shape and without an annotation of its own.
        groups: their ids, ascending.
        free: whether it depends on constants and scalars only: every device computes it.
    """

    values: tuple[Value, ...]
    groups: tuple[int, ...]
    free: bool


CONSENSUS_ROUNDS = 4
"""Times that a problem is solved again with the last solution's disagreements; each adds only new ones."""


def solved_together(
    formulation: Formulation, solution: Solution, mesh: Mesh, device: Device, settings: Settings
) -> tuple[Formulation, Solution]:
    """The problem with costs for the disagreements of `solution`, and its solution.

    Every intermediate problem only lacks costs, so its bound holds for the complete one.
    """
    known: list[Shared] = []
    whole = formulation
    shared = shared_values(formulation, formulation.annotations(solution.choice), mesh)
    for _ in range(CONSENSUS_ROUNDS):
        more = [one for one in disagreeing(formulation, shared, solution.choice) if one not in known]
        if not more:
            break
        known += more
        whole = joined(formulation, known, mesh, device)
        kept = _extended(whole.problem, solution, len(formulation.problem.node_costs))
        proved = solution.status is Status.OPTIMAL
        if kept.objective - kept.bound <= (GAP_TOLERANCE if proved else CLOSE) * kept.objective:
            solution = kept
            continue
        found = settings.solve(whole.problem, [list(kept.choice)])
        solution = replace(found, bound=min(max(kept.bound, found.bound), found.objective)) if found.choice else found
    return whole, solution


def _extended(problem: Problem, before: Solution, nodes: int) -> Solution:
    """The choice of `before` with the cheapest shared values; `nodes` without them."""
    choice = list(before.choice[:nodes])
    costs = [np.zeros_like(cost) for cost in problem.node_costs[nodes:]]
    for (tail, head), matrix in zip(problem.edges, problem.edge_costs, strict=True):
        if tail >= nodes:
            costs[tail - nodes] += matrix[:, choice[head]]
    choice += [int(cost.argmin()) for cost in costs]
    return replace(before, choice=tuple(choice), objective=evaluate(problem, choice).objective)


def shared_values(formulation: Formulation, annotations: Annotations, mesh: Mesh) -> list[Shared]:
    """Values computed once for several groups; of those that the same groups, or fewer, share in one shape only one."""
    graph, groups = formulation.graph, formulation.groups
    equal = equal_values(graph, annotations, mesh)
    equal.update({first: first for first in equal.values()})
    members: dict[Value, dict[int, Value]] = {}  # shared value -> group -> its equal value
    for op in graph.ops:
        made = Value(op.id)
        if op.id not in groups.of or made in annotations.pins or op.results[0].dtype not in FLOATS:
            continue
        for value in op.operands:
            if value in equal and graph.type_of(value).shape == op.results[0].shape != ():
                members.setdefault(equal[value], {})[groups.of[op.id]] = made
    found: list[Shared] = []
    within: dict[tuple[TensorType, int], list[set[int]]] = {}  # shape, group -> groups of what was found with it
    for value, own in sorted(members.items(), key=lambda item: -len(item[1])):
        ids, kind = tuple(sorted(own)), graph.type_of(value)
        if len(ids) > 1 and not any(more.issuperset(ids) for more in within.get((kind, ids[0]), ())):
            found.append(Shared(tuple(own[group] for group in ids), ids, value.op in groups.free))
            whole = set(ids)
            for group in ids:
                within.setdefault((kind, group), []).append(whole)
    return found


def disagreeing(formulation: Formulation, shared: Iterable[Shared], choice: Sequence[int]) -> list[Shared]:
    """Shared values whose groups want different shardings."""
    first = len(formulation.argument_values)

    def chosen(group: int, value: Value) -> Spec:
        assignments = formulation.strategies[group].assignments
        return spec_of(_dims(formulation, group, value), assignments[choice[first + group]])

    return [one for one in shared if len(set(map(chosen, one.groups, one.values))) > 1]


def joined(formulation: Formulation, shared: Iterable[Shared], mesh: Mesh, device: Device) -> Formulation:
    """The problem with one more node for each of `shared`: its sharding, with its costs for its groups."""
    problem = formulation.problem
    node_costs, names = list(problem.node_costs), list(problem.names)
    edges, edge_costs = list(problem.edges), list(problem.edge_costs)
    first = len(formulation.argument_values)
    matrices: dict[object, Array] = {}
    for one in shared:
        members = [_specs(formulation, *member) for member in zip(one.groups, one.values, strict=True)]
        choices = tuple(dict.fromkeys(itertools.chain(*members)))
        kind = formulation.graph.type_of(one.values[0])
        key = kind, choices, one.free
        if key not in matrices:
            matrices[key] = _disagreement(kind, choices, one.free, mesh, device)
        index = {spec: place for place, spec in enumerate(choices)}
        for group, specs in zip(one.groups, members, strict=True):
            edges.append((len(node_costs), first + group))
            edge_costs.append(np.ascontiguousarray(matrices[key][:, [index[spec] for spec in specs]]))
        names.append(f"made once for {len(one.groups)} groups: {formulation.graph.ops[one.values[0].op].kind}")
        node_costs.append(np.zeros(len(choices)))
    more = replace(problem, node_costs=node_costs, names=names, edges=edges, edge_costs=edge_costs)
    return replace(formulation, problem=more)


def _disagreement(kind: TensorType, choices: Sequence[Spec], free: bool, mesh: Mesh, device: Device) -> Array:
    """Seconds for a user under one of `choices` (columns) of a value produced under another (rows).

    The value takes a user's finer or compatible sharding: other choices are infinite. A coarser user runs under the
    finer sharding, and its result is resharded. A user with an incompatible one reshards its operand.
    """
    found = reshard_matrix(kind.shape, dtype_bytes(kind.dtype), choices, choices, mesh, device)[0].copy()
    for row, made in enumerate(choices):
        for column, read in enumerate(choices):
            if _finer(made, read):
                continue
            if _compatible(made, read):
                found[row, column] = np.inf
            elif free:
                found[row, column] = 0.0
    return found


def _finer(spec: Spec, other: Spec) -> bool:
    """Whether every dim is split as in `other`, and perhaps further."""
    return all(left[: len(right)] == right for left, right in zip(spec, other, strict=True))


def _compatible(spec: Spec, other: Spec) -> bool:
    """Whether both can be refined to one sharding."""
    longer = [max(dims, key=len) for dims in zip(spec, other, strict=True)]
    axes = [axis for dim in longer for axis in dim]
    return len(set(axes)) == len(axes) and _finer(tuple(longer), spec) and _finer(tuple(longer), other)


def _specs(formulation: Formulation, number: int, value: Value) -> list[Spec]:
    """The sharding of a value inside a group, under each of its strategies."""
    dims = _dims(formulation, number, value)
    return [spec_of(dims, assignment) for assignment in formulation.strategies[number].assignments]


def _dims(formulation: Formulation, number: int, value: Value) -> DimFactors:
    """The factors of the dims of a value inside a group."""
    group = formulation.groups.groups[number]
    place = len(group.inputs) + group.made(formulation.graph).index(value)
    return formulation.strategies[number].shape.value_dims[place]
