"""Rules of loops and branches, from the ops of their bodies.

The factors of all ops of a body are unified along its values, as in a fusion group, and a loop's outputs with its
arguments. So each carried value has one sharding in all iterations, and every op inside runs accordingly; all-reduces
inside are the cost (`cost/partitioner/ops/body.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

from autoshard.graph.body import Body
from autoshard.graph.groups import free_ops
from autoshard.graph.ops import DimFactors, FactorKind, Graph, Op, Rule, Value
from autoshard.graph.rules.base import Dim, Factors, Shape, Signature, rule, rule_for

STUCK = "its body lets nothing be split that it is handed"


@rule("while")
def loop(op: Signature) -> Rule:
    """Every carried value has one sharding in all iterations; a dim is parallel if the whole body can follow."""
    body: Body = op.attrs["bodies"][-1]
    union = _Bodies([body])
    arguments = union.arguments[0]
    count = len(op.results)
    for place, outputs in enumerate(union.outputs[0][:count]):
        union.tie(arguments[place], outputs)
    return union.rule(op, arguments, arguments[:count])


@rule("case")
def branches(op: Signature) -> Rule:
    """As both branches allow: they read the same values, and their results have one sharding."""
    bodies: Sequence[Body] = op.attrs["bodies"]
    union = _Bodies(bodies)
    for other in union.outputs[1:]:
        for mine, theirs in zip(union.outputs[0], other, strict=True):
            union.tie(mine, theirs)
    scalar: DimFactors = ()
    operands: list[DimFactors] = [scalar]
    first = union.arguments[0]
    for other in union.arguments[1:]:
        for mine, theirs in zip(first, other, strict=True):
            union.tie(mine, theirs)
    return union.rule(op, [*operands, *first], union.outputs[0])


class _Bodies:
    """The unified factors of some bodies.

    Attributes:
        arguments, outputs: per body and value the factors of each dim.
    """

    def __init__(self, bodies: Sequence[Body]) -> None:
        self.parent: list[int] = []
        self.sizes: list[int] = []
        self.whole: set[int] = set()
        self.even: set[int] = set()
        self.dims: list[DimFactors] = []
        self.arguments: list[list[DimFactors]] = []
        self.outputs: list[list[DimFactors]] = []
        for body in bodies:
            self._add(body.graph)

    def _add(self, graph: Graph) -> None:
        free = free_ops(graph)
        known: dict[Value, DimFactors] = {}
        for op in graph.ops:
            if op.id in free and op.kind != "argument":
                continue
            found = rule_for(op, graph)
            if found is None:
                found = _unsplit(op, graph)
            ids = [self._make(factor.size) for factor in found.factors]
            for factor, ident in zip(found.factors, ids, strict=True):
                if factor.kind in ("replicated", "halo") or factor.reducer == "gather":
                    self.whole.add(ident)
                if factor.even:
                    self.even.add(ident)
            for value, operand in zip(op.operands, found.operands, strict=True):
                if value in known:
                    self.tie(known[value], _named(operand, ids))
            for result, dims in enumerate(found.results):
                known[Value(op.id, result)] = _named(dims, ids)
        self.dims.extend(known.values())
        self.arguments.append([known[Value(op)] for op in graph.arguments])
        self.outputs.append([known.get(value) or self._anew(graph.type_of(value).shape) for value in graph.outputs])

    def _make(self, size: int) -> int:
        self.parent.append(len(self.parent))
        self.sizes.append(size)
        return self.parent[-1]

    def _anew(self, shape: Shape) -> DimFactors:
        """New factors for a value that is free in any sharding."""
        made = tuple((self._make(size),) if size > 1 else () for size in shape)
        self.dims.append(made)
        return made

    def _find(self, item: int) -> int:
        while self.parent[item] != item:
            self.parent[item] = self.parent[self.parent[item]]
            item = self.parent[item]
        return item

    def tie(self, left: DimFactors, right: DimFactors) -> None:
        """Unify the factors of one value under two names."""
        for one, other in zip(left, right, strict=True):
            if len(one) != len(other):  # factored differently, or never split on one side
                self.whole.update(one)
                self.whole.update(other)
                continue
            for a, b in zip(one, other, strict=True):
                first, second = sorted((self._find(a), self._find(b)))
                self.parent[second] = first

    def rule(self, op: Signature, operands: Sequence[DimFactors], results: Sequence[DimFactors]) -> Rule:
        """The factors of the op's operands and results."""
        whole = {self._find(ident) for ident in self.whole}
        for value in self.dims:  # an axis splits one dim of a value only
            flat = [self._find(ident) for dim in value for ident in dim]
            whole.update(ident for ident in flat if flat.count(ident) > 1)
        even = {self._find(ident) for ident in self.even}
        factors = Factors()
        made: dict[int, Dim] = {}

        def moved(value: DimFactors) -> list[Dim]:
            return [tuple(factor for ident in dim for factor in one(self._find(ident))) for dim in value]

        def one(root: int) -> Dim:
            if root not in made:
                kind: FactorKind = "replicated" if root in whole else "parallel"
                made[root] = factors.new(self.sizes[root], kind, even=root in even)
            return made[root]

        read = [moved(value) for value in operands]
        handed = [moved(value) for value in results]
        stuck = bool(factors.all) and all(factor.kind == "replicated" for factor in factors.all)
        return factors.rule(read, handed, STUCK if stuck else "")


def _named(dims: DimFactors, ids: Sequence[int]) -> DimFactors:
    return tuple(tuple(ids[factor] for factor in dim) for dim in dims)


def _unsplit(op: Op, graph: Graph) -> Rule:
    factors = Factors()
    operands, results = (
        [factors.dims(shape, "replicated") for shape in side]
        for side in ([graph.type_of(value).shape for value in op.operands], [kind.shape for kind in op.results])
    )
    return factors.rule(operands, results)
