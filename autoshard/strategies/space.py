"""The strategies of one fusion group: its factors, and every assignment of mesh axes to them.

A group's factors are those of its ops, unified along the values inside it. A strategy assigns each mesh axis to one
factor or none; the rules then give every value of the group its sharding. An axis on a factor that an op reduces makes
the result a partial sum: the group all-reduces it there, or, if it has one output, reduce-scatters it onto a dim, or
leaves it partial for a user that adds several partial sums (the partitioners of TPU and GPU all-reduce such a sum
once).
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from autoshard.cost.machine.collectives import Collective, CollectiveKind
from autoshard.cost.machine.compute import CONTRACTIONS
from autoshard.cost.machine.device import load_device
from autoshard.cost.partitioner.collective_rules import CollectiveRules
from autoshard.cost.partitioner.targets import COLLECTIVE_RULES
from autoshard.dtypes import dtype_bytes
from autoshard.fused import KINDS, dims_of_attrs
from autoshard.graph.groups import BARRIER, FUSABLE, Group, Groups, unscaled
from autoshard.graph.ops import DimFactors, Graph, Op, Rule, Value
from autoshard.mesh import MAX_AXES, AxisGroup, Mesh, Spec, spec_axes
from autoshard.strategies.allowed import Orders, fits


@dataclass(frozen=True)
class Partial:
    """A sharding of an unreduced value: every device along `axes` has a term of a sum that is still to be all-reduced.

    `axes` in the order of the devices in the replica groups.
    """

    spec: Spec
    axes: tuple[str, ...]


Sharded = Spec | Partial
RuleOf = Callable[[Op, Graph], Rule | None]
Priced = Callable[[Op, Sequence[Spec | None], Sequence[Spec]], tuple[Collective, ...] | None]
AS_FACTORS = (FUSABLE - {"reduce"}) | {"dot_general", "reshape", BARRIER}
"""Kinds that partitioners run as the factors say, with strategies' shardings (measured: docs/rules.md)."""
MOST_RUNS = 3
"""On four axes a group's factors are split by at most so many runs of neighbours in the mesh, idle ones counted."""
Assignment = tuple[tuple[str, ...], ...]  # per factor of the group, the axes that split it, major to minor


@dataclass(frozen=True)
class Specs:
    """One value's sharding under every strategy: `choices[index[s]]`."""

    choices: tuple[Sharded, ...]
    index: npt.NDArray[np.int32]

    def __getitem__(self, strategy: int) -> Sharded:
        """The sharding under a strategy."""
        return self.choices[int(self.index[strategy])]

    @classmethod
    def of(cls, specs: Sequence[Sharded]) -> Specs:
        """Collect equal shardings."""
        position: dict[Sharded, int] = {}
        index = np.array([position.setdefault(spec, len(position)) for spec in specs], dtype=np.int32)
        return cls(tuple(position), index)


@dataclass(frozen=True)
class GroupShape:
    """The common part of groups that look alike: ops and values are named by position.

    Attributes:
        sizes: extent of each factor.
        splittable: whether an axis may split it.
        value_dims: per local value (inputs first, then each op's results) the factors of each dim.
        reduces: per op the factors it reduces over, in the order in which the op names them.
        op_factors: per op the factors of its loop nest (over which its work divides).
        ruled: whether every op has a rule.
        even: factors that may only be split evenly.
    """

    sizes: tuple[int, ...]
    splittable: tuple[bool, ...]
    value_dims: tuple[DimFactors, ...]
    value_shapes: tuple[tuple[int, ...], ...]
    reduces: tuple[tuple[int, ...], ...]
    op_factors: tuple[frozenset[int], ...]
    ruled: bool
    even: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Strategies:
    """Every strategy of one group; arrays run over strategies.

    Attributes:
        assignments: axes of each factor.
        inputs, outputs: shardings at the boundary, in the group's order; outputs as consumers see them (after a
            reduce-scatter).
        pinned: shardings of the outputs as annotated (before a reduce-scatter).
        flop_ways: (strategies, ops): into how many parts each loop nest is split.
        collectives: per strategy the collectives of its partial sums.
    """

    shape: GroupShape = field(repr=False)
    assignments: tuple[Assignment, ...]
    inputs: tuple[Specs, ...]
    outputs: tuple[Specs, ...]
    pinned: tuple[Specs, ...]
    flop_ways: npt.NDArray[np.float64] = field(repr=False)
    collectives: tuple[tuple[Collective, ...], ...] = field(repr=False)

    def __len__(self) -> int:
        """Number of strategies."""
        return len(self.assignments)

    def read(self, position: int, strategy: int) -> Spec:
        """The sharding under which the group reads its input at `position`.

        A partial term of a sum that is reduce-scattered is read under the sum's sharding.
        """
        return spec_of(self.shape.value_dims[position], self.assignments[strategy])


class _Union:
    """Union-find over factor ids."""

    def __init__(self) -> None:
        self.parent: list[int] = []

    def make(self, count: int) -> range:
        start = len(self.parent)
        self.parent.extend(range(start, start + count))
        return range(start, start + count)

    def find(self, item: int) -> int:
        while self.parent[item] != item:
            self.parent[item] = self.parent[self.parent[item]]
            item = self.parent[item]
        return item

    def join(self, left: int, right: int) -> None:
        left, right = self.find(left), self.find(right)
        if left != right:
            self.parent[max(left, right)] = min(left, right)


def signature(group: Group, groups: Groups, graph: Graph) -> tuple[object, ...]:
    """Equal for groups whose strategies and costs are equal: ops, shapes and wiring, without names or places."""
    local: dict[Value, int] = {value: index for index, value in enumerate(group.inputs)}
    parts: list[object] = [tuple(graph.type_of(value) for value in group.inputs)]
    for op_id in group.ops:
        op = graph.ops[op_id]
        wiring = tuple(
            ("free", graph.type_of(value)) if value.op in groups.free else local[value] for value in group.operands(op)
        )
        results = group.results(op)
        local.update((value, place) for place, value in enumerate(results, len(local)))
        parts.append((op.kind, wiring, tuple(graph.type_of(value) for value in results), _frozen(op.attrs)))
    parts.append(tuple(local[value] for value in group.outputs))
    return tuple(parts)


def _frozen(attrs: Mapping[str, object]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((key, repr(value)) for key, value in attrs.items() if key != "value"))


def group_shape(group: Group, groups: Groups, graph: Graph, rule_of: RuleOf) -> GroupShape:
    """Unify the factors of the group's ops."""
    union = _Union()
    local: dict[Value, int] = {value: index for index, value in enumerate(group.inputs)}
    shapes = [graph.type_of(value).shape for value in group.inputs]
    dims: list[DimFactors | None] = [None] * len(shapes)
    sizes: dict[int, int] = {}
    whole: set[int] = set()  # factors that may not be split
    even: set[int] = set()
    op_factors: list[set[int]] = []
    op_reduces: list[list[int]] = []
    ruled = True
    for op_id in group.ops:
        op = graph.ops[op_id]
        if group.operand_number is not None:
            op = replace(op, operands=group.operands(op), results=(op.results[group.operand_number],))
        rule = rule_of(op, graph)
        if rule is None:
            ruled = False
            rule = _unsplit(op, graph)
        ids = union.make(len(rule.factors))
        for factor, ident in zip(rule.factors, ids, strict=True):
            sizes[ident] = factor.size
            if factor.kind in ("replicated", "halo") or factor.reducer == "gather":
                whole.add(ident)
            if factor.even:
                even.add(ident)
        op_factors.append(set(ids))
        op_reduces.append([ids[i] for i, factor in enumerate(rule.factors) if factor.kind == "reduce"])
        for value, operand in zip(op.operands, rule.operands, strict=True):
            if value.op in groups.free:
                continue
            mine = tuple(tuple(ids[f] for f in dim) for dim in operand)
            seen = dims[local[value]]
            if seen is None:
                dims[local[value]] = mine
            else:
                _unify(seen, mine, union, whole)
        for value, result_dims in zip(group.results(graph.ops[op_id]), rule.results, strict=True):
            local[value] = len(dims)
            dims.append(tuple(tuple(ids[f] for f in dim) for dim in result_dims))
            shapes.append(graph.type_of(value).shape)
    roots = sorted({union.find(ident) for ident in sizes})
    number = {root: index for index, root in enumerate(roots)}
    value_dims: tuple[DimFactors, ...] = tuple(
        tuple(tuple(number[union.find(f)] for f in dim) for dim in known) if known is not None else ((),) * len(shape)
        for known, shape in zip(dims, shapes, strict=True)
    )
    unsplittable = {number[union.find(ident)] for ident in whole}
    for factors in value_dims:  # an axis splits one dim of a value at most
        flat = [f for dim in factors for f in dim]
        unsplittable |= {f for f in flat if flat.count(f) > 1}
    return GroupShape(
        sizes=tuple(sizes[root] for root in roots),
        splittable=tuple(index not in unsplittable and sizes[root] > 1 for index, root in enumerate(roots)),
        value_dims=value_dims,
        value_shapes=tuple(shapes),
        reduces=tuple(tuple(dict.fromkeys(number[union.find(f)] for f in factors)) for factors in op_reduces),
        op_factors=tuple(frozenset(number[union.find(f)] for f in factors) for factors in op_factors),
        ruled=ruled,
        even=frozenset(number[union.find(ident)] for ident in even),
    )


def _unsplit(op: Op, graph: Graph) -> Rule:
    """The rule of an op that has none: no dim may be split."""
    none = tuple(((),) * len(graph.type_of(value).shape) for value in op.operands)
    return Rule((), none, tuple(((),) * len(result.shape) for result in op.results))


def _unify(seen: DimFactors, mine: DimFactors, union: _Union, whole: set[int]) -> None:
    for left, right in zip(seen, mine, strict=True):
        if len(left) == len(right):
            for a, b in zip(left, right, strict=True):
                union.join(a, b)
        else:  # one side never splits the dim, or factors it differently: split neither
            whole.update(left)
            whole.update(right)


def assignments(shape: GroupShape, allowed: Orders, alone: Op | None) -> list[Assignment]:
    """Every assignment of axes to factors or to none, as far as `allowed` where several share a factor.

    On four axes without hints of few runs alone, and, where the group is one contraction, without idle axes.
    """
    mesh = allowed.mesh
    axes = mesh.split_axes
    few = len(axes) == MAX_AXES and not allowed.asked
    even = shape.even | {f for value in shape.value_dims for dim in value if len(dim) > 1 for f in dim}
    found: list[Assignment] = []
    options = [None, *(f for f, ok in enumerate(shape.splittable) if ok)]
    for chosen in itertools.product(options, repeat=len(axes)):
        per_factor: list[tuple[str, ...]] = [()] * len(shape.sizes)
        for axis, factor in zip(axes, chosen, strict=True):
            if factor is not None:
                per_factor[factor] += (axis,)
        if not all(
            fits(shape.sizes[f], mesh.ways(split), even=f in even) for f, split in enumerate(per_factor) if split
        ):
            continue
        if not all(_nested(dim, per_factor, shape, mesh) for value in shape.value_dims for dim in value):
            continue
        if few and len([*itertools.groupby(chosen)]) > MOST_RUNS:
            continue
        found.extend(itertools.product(*map(allowed, per_factor)))
    return _busy(found) if few and alone is not None and alone.kind in CONTRACTIONS else found


def _busy(found: Sequence[Assignment]) -> list[Assignment]:
    """The assignments that leave at most one axis idle more than any need, and those that leave all."""
    split = [sum(map(len, each)) for each in found]
    return [each for each, count in zip(found, split, strict=True) if not count or count >= max(split) - 1]


def _nested(dim: tuple[int, ...], axes: Sequence[tuple[str, ...]], shape: GroupShape, mesh: Mesh) -> bool:
    """Whether in a merged dim a minor factor is split only if the major ones are completely."""
    return not any(
        axes[minor] and mesh.ways(axes[major]) != shape.sizes[major]
        for position, minor in enumerate(dim)
        for major in dim[:position]
    )


def plain(sharded: Sharded) -> Spec:
    """The sharding as annotated."""
    return sharded.spec if isinstance(sharded, Partial) else sharded


@dataclass(frozen=True)
class Sum:
    """Adds in a group whose terms other groups may leave partial, or a transpose of one such term.

    Attributes:
        leaves: positions of those values among the group's inputs; at least two of a sum.
        root: position, among the group's values (inputs first), of the sum.
        moved: whether it is a transpose of the one leaf; it is only reduce-scattered.
    """

    leaves: tuple[int, ...]
    root: int
    moved: bool = False


def sum_of_partials(group: Group, graph: Graph, deferrable: Container[Value]) -> Sum | None:
    """The largest sum in the group whose terms are all in `deferrable`; None if no two of them meet.

    Args:
        deferrable: values that may stay partial until they are summed: one contraction's result, with one user.
    """
    leaves: dict[Value, tuple[Value, ...]] = {value: (value,) for value in group.inputs if value in deferrable}
    best: Value | None = None
    local: dict[Value, int] = {value: index for index, value in enumerate(group.inputs)}
    for op_id in group.ops:
        op = graph.ops[op_id]
        made = Value(op_id)
        for result in range(len(op.results)):
            local[Value(op_id, result)] = len(local)
        if op.kind != "add" or op.operands[0] == op.operands[1]:
            continue
        chains = [unscaled(graph, value) for value in op.operands]
        if all(chain[-1] in leaves and all(graph.uses(value) == 1 for value in chain) for chain in chains):
            leaves[made] = tuple(leaf for chain in chains for leaf in leaves[chain[-1]])
            if best is None or len(leaves[made]) > len(leaves[best]):
                best = made
    if best is None:
        return None
    return Sum(tuple(local[leaf] for leaf in leaves[best]), local[best])


class Variants(NamedTuple):
    """Alternatives to an all-reduce of a group's partial sum in place.

    Attributes:
        scatter: whether its one output may be reduce-scattered.
        defer: whether its one output may stay partial, for its user to sum.
        sums: partial values of which it may all-reduce the sum once.
        merged: whether a sum along several dims is one all-reduce (TPU, GPU), not one per dim (CPU).
        folded: whether its replica groups follow the order of the mesh (GPU), not of the dims (TPU).
    """

    scatter: bool
    defer: bool = False
    sums: Sum | None = None
    merged: bool = True
    folded: bool = False


def strategies(
    group: Group,
    groups: Groups,
    graph: Graph,
    mesh: Mesh,
    rule_of: RuleOf,
    variants: Variants,
    priced: Priced | None = None,
    allowed: Orders | None = None,
) -> Strategies:
    """All strategies of a group.

    Args:
        priced: the partitioner's collectives of an op under operand and result shardings, None if XLA computes wrong
            results; called for single-op groups, where they may differ from what the factors say.
    """
    allowed = allowed or Orders(mesh)
    shape = group_shape(group, groups, graph, rule_of)
    local: dict[Value, int] = {value: index for index, value in enumerate((*group.inputs, *group.made(graph)))}
    outputs = [local[value] for value in group.outputs]
    item = [dtype_bytes(graph.type_of(value).dtype) for value in local]
    made_by = [position for position, op in enumerate(group.ops) for _ in group.results(graph.ops[op])]
    alone = graph.ops[group.ops[0]] if len(group.ops) == 1 else None
    rows: list[_Row] = []
    for assignment in assignments(shape, allowed, alone):
        split_as = {dims: spec_of(dims, assignment) for dims in frozenset(shape.value_dims)}
        specs = [split_as[dims] for dims in shape.value_dims]
        collectives: list[Collective] = []
        partial: tuple[str, ...] = ()  # in the order of the devices in a replica group
        for value, position in enumerate(made_by, start=len(group.inputs)):
            mentioned = {f for dim in shape.value_dims[value] for f in dim}
            summed = [f for f in shape.reduces[position] if f not in mentioned]  # of batch_norm the mean alone
            axes = mesh.in_order(a for f in summed for a in assignment[f])
            if axes:
                size = math.prod(mesh.shard_shape(shape.value_shapes[value], specs[value])) * item[value]
                whole = [assignment[f] for f in summed if assignment[f]]
                for over in [axes] if variants.merged else map(mesh.in_order, whole):
                    collectives.append(Collective("all-reduce", over, size, op=position))
                if value in outputs:
                    folded = variants.folded and len(whole) > 1
                    partial = axes if folded else tuple(axis for dim in whole for axis in dim)
        if priced is not None and alone is not None and alone.kind not in AS_FACTORS:
            reads = [specs[local[value]] if value in local else None for value in alone.operands]
            found = priced(alone, reads, specs[len(group.inputs) :])
            if found is None:
                continue
            if _totals(found) != _totals(collectives):
                collectives, partial = [replace(each, op=0) for each in found], ()
        pinned = [specs[index] for index in outputs]
        row = _Row(assignment, [*specs[: len(group.inputs)]], pinned, [*pinned], tuple(collectives))
        rows.append(row)
        if alone is not None and alone.kind in KINDS:  # sums are made inside
            results = specs[len(group.inputs) :]
            other = _scattered_results(alone, graph, reads, results, mesh) if collectives and priced is not None else ()
            for made in other:
                found = None if priced is None else priced(alone, reads, made)
                if found is not None:
                    kept = [made[index - len(group.inputs)] for index in outputs]
                    own = tuple(replace(each, op=0) for each in found)
                    rows.append(row._replace(pinned=kept, outputs=[*kept], collectives=own))
            continue
        if len(outputs) == 1 and partial and len(collectives) == 1:
            rows += _unsummed(row, shape.value_shapes[outputs[0]], partial, allowed, variants, item[outputs[0]])
        if variants.sums is not None:
            alone_out = variants.scatter and outputs == [variants.sums.root] and not collectives
            size = item[variants.sums.root]
            rows += _summed_once(row, specs, shape, variants.sums, allowed, scattered=alone_out, item=size)
    ways = np.array(
        [[mesh.ways(a for f in own for a in row.assignment[f]) for own in shape.op_factors] for row in rows], float
    )
    return Strategies(
        shape=shape,
        assignments=tuple(row.assignment for row in rows),
        inputs=tuple(Specs.of([row.inputs[i] for row in rows]) for i in range(len(group.inputs))),
        outputs=tuple(Specs.of([row.outputs[i] for row in rows]) for i in range(len(outputs))),
        pinned=tuple(Specs.of([row.pinned[i] for row in rows]) for i in range(len(outputs))),
        flop_ways=ways,
        collectives=tuple(row.collectives for row in rows),
    )


def _scattered_results(
    op: Op, graph: Graph, reads: Sequence[Spec | None], results: Sequence[Spec], mesh: Mesh
) -> list[list[Spec]]:
    """Each way in which a manual region may reduce-scatter its partial results (`cost/partitioner/ops/regions.py`)."""
    dims = dims_of_attrs(op.kind, op.attrs, [graph.type_of(value).shape for value in op.operands])
    split = dims.split([spec or () for spec in reads], results, mesh.ways)
    ways = (dims.scattered(way, split, mesh.ways) for way in dims.scatters)
    return [way for way in ways if way is not None]


def _unsummed(
    row: _Row, shape: Sequence[int], partial: tuple[str, ...], allowed: Orders, variants: Variants, item: int
) -> list[_Row]:
    """The strategies that reduce-scatter the one output, partial over `partial`, or leave it to its user.

    Args:
        item: bytes per element.
    """
    mesh = allowed.mesh
    pinned, (collective,) = row.pinned[0], row.collectives
    rows = []
    if variants.scatter:
        for spec in scattered(pinned, shape, partial, allowed):
            how = _scatter_kind_of(shape, pinned, spec, partial, mesh, item)
            moved = replace(collective, kind=how, axes=mesh.in_order(partial))
            rows.append(row._replace(outputs=[spec], collectives=(moved,)))
    if variants.defer and partial in allowed(partial):
        rows.append(row._replace(outputs=[Partial(pinned, partial)], collectives=()))
    return rows


def _summed_once(
    row: _Row, specs: Sequence[Spec], shape: GroupShape, sums: Sum, allowed: Orders, *, scattered: bool, item: int
) -> list[_Row]:
    """The strategies that read partial values and reduce their sum once; `item` is bytes per element."""
    mesh = allowed.mesh
    root, shape_of_root = specs[sums.root], shape.value_shapes[sums.root]
    rows = []
    for axes, before, after in _reductions(root, shape_of_root, allowed):
        if sums.moved and (before != root or after == root):
            continue
        kind: CollectiveKind = (
            "all-reduce" if before == after else _scatter_kind_of(shape_of_root, before, after, axes, mesh, item)
        )
        size = math.prod(mesh.shard_shape(shape_of_root, before)) * item
        once = Collective(kind, mesh.in_order(axes), size, op=len(shape.op_factors) - 1)
        terms: list[Sharded] = [
            Partial(specs[i] if sums.moved else before, axes) if i in sums.leaves else spec
            for i, spec in enumerate(row.inputs)
        ]
        if after == root:
            rows.append(row._replace(inputs=terms, collectives=(*row.collectives, once)))
        elif scattered:
            rows.append(row._replace(inputs=terms, outputs=[after], collectives=(once,)))
    return rows


def _totals(collectives: Iterable[Collective]) -> Counter[tuple[str, AxisGroup]]:
    found: Counter[tuple[str, AxisGroup]] = Counter()
    for each in collectives:
        found[each.kind, each.axes] += each.bytes * each.count
    return found


class _Row(NamedTuple):
    """One strategy."""

    assignment: Assignment
    inputs: list[Sharded]
    pinned: list[Spec]
    outputs: list[Sharded]
    collectives: tuple[Collective, ...]


def _reductions(root: Spec, shape: Sequence[int], allowed: Orders) -> Iterable[tuple[tuple[str, ...], Spec, Spec]]:
    """Ways to reduce a sum of partial values once: (axes, sharding of the terms, sharding of the sum).

    An all-reduce over axes that do not split the sum; a reduce-scatter over the minor axes of one of its dims, or, for
    a sum that is pinned before it is scattered, onto a dim that they divide.
    """
    free = [axis for axis in allowed.mesh.split_axes if axis not in spec_axes(root)]
    for count in range(1, len(free) + 1):
        for axes in itertools.permutations(free, count):
            if axes not in allowed(axes):
                continue
            yield axes, root, root
            for spec in scattered(root, shape, axes, allowed):
                yield axes, root, spec
    for dim, split in enumerate(root):
        for first in range(len(split)):
            yield split[first:], (*root[:dim], split[:first], *root[dim + 1 :]), root


def _scatter_kind(axes: Sequence[str], mesh: Mesh) -> CollectiveKind:
    """The kind of a sum of which every device keeps a slice: reduce-scatter or all-reduce."""
    return "all-reduce" if _rules(mesh).sums_whole(mesh.in_order(axes), mesh) else "reduce-scatter"


def _rules(mesh: Mesh) -> CollectiveRules:
    return COLLECTIVE_RULES[load_device(mesh.device).target]


def _scatter_kind_of(
    shape: Sequence[int], before: Spec, after: Spec, axes: Sequence[str], mesh: Mesh, item: int
) -> CollectiveKind:
    """The same for a value of `shape`, of `item` bytes per element, with sharding `before` the sum and `after` it."""
    kind = _scatter_kind(axes, mesh)
    if kind == "all-reduce":
        return kind
    dim = next(dim for dim, split in enumerate(after) if split != before[dim])
    packed, part = max(1, 4 // item), mesh.shard_shape(shape, before)
    found = _rules(mesh).scattered(part, dim, mesh.in_order(axes), mesh, packed=packed)
    return "all-reduce" if found is None else kind


def scattered(spec: Spec, shape: Sequence[int], axes: Sequence[str], allowed: Orders) -> Iterable[Spec]:
    """Every spec that appends `axes` to the axes of one dim, if they divide it.

    One dim and this order: compilers make a reduce-scatter of an all-reduce if a device's index in the replica group is
    the index of its slice, which they see for a slice along one dim only (measured on GPU and TPU, 2x4).
    """
    for dim, size in enumerate(shape):
        split = (*spec[dim], *axes)
        if size % allowed.mesh.ways(split) == 0 and split in allowed(split):
            yield (*spec[:dim], split, *spec[dim + 1 :])


def op_specs(strategies: Strategies, group: Group, graph: Graph, strategy: int) -> dict[Value, Spec]:
    """The sharding under which every op of the group produces its results."""
    assignment = strategies.assignments[strategy]
    dims = strategies.shape.value_dims[len(group.inputs) :]
    made = {value: spec_of(own, assignment) for value, own in zip(group.made(graph), dims, strict=True)}
    return made | {value: plain(own[strategy]) for value, own in zip(group.outputs, strategies.pinned, strict=True)}


def spec_of(dims: DimFactors, assignment: Assignment) -> Spec:
    """The sharding of a value whose dims have these factors."""
    return tuple(tuple(axis for factor in dim for axis in assignment[factor]) for dim in dims)
