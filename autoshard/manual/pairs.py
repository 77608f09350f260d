"""Column- and row-parallel products, by what flows from one to the next.

Tensor parallelism splits pairs: a product's output features, and the contracted dim of the product that reads them
behind something nonlinear that keeps them apart (an activation, attention by heads). So every forward value is given,
per part of its dims, the products whose output features that part is made of: none where a norm, a residual path, a
reduction has mixed them. A product whose contracted dim has such makers is row-parallel, its makers column-parallel.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from math import gcd, prod

from autoshard.graph.memo import per_graph
from autoshard.graph.ops import Graph, Op, Rule, Value
from autoshard.graph.rules.table import rule_for
from autoshard.manual.find import is_forward, through_views

Makers = frozenset[tuple[str, bool]]
"""Weights of the products that made a dim's features, and whether something nonlinear has come since."""
Parts = tuple[tuple[int, Makers | None], ...]
"""The parts of a dim, major to minor: extent and makers; None where no activation has a say (broadcast)."""

_MIXED: Makers = frozenset()
_CUTS = frozenset({"concatenate", "dynamic_slice", "pad", "slice"})
"""A dim that these cut or join keeps its makers."""
_LINEAR = frozenset({
    *("broadcast_in_dim", "reshape", "transpose", "convert", "copy", "negate"),
    *("add", "subtract", "multiply", "divide", "select"),
})  # fmt: skip
"""Linear in an operand, where the others follow from no input; sums always are."""


@dataclass(frozen=True)
class _Flow:
    """The parts of a value's dims, and the products whose features were summed on the way to it."""

    dims: tuple[Parts, ...]
    summed: frozenset[str] = frozenset()


@per_graph
def pairs(graph: Graph) -> Mapping[str, str]:
    """Weight (of two dims, or three with the experts' first) -> `column` or `row`, for products in pairs; `whole`
    where attention sums its product's features, so that a split would leave partial sums (a key for all heads).
    """
    arguments = dict(zip(graph.arguments, graph.program.arguments, strict=True))
    weights = {Value(op): each.name for op, each in arguments.items() if each.role == "parameter"}
    flows = {Value(op): _mixed(each.type.shape) for op, each in arguments.items() if each.role == "input"}
    found: dict[str, str] = {}
    for op in graph.ops:
        if not is_forward(graph, op.aten) or not any(value in flows for value in op.operands):
            continue
        rule = rule_for(op, graph)
        if rule is None:
            flows.update({Value(op.id, i): _mixed(each.shape) for i, each in enumerate(op.results)})
        elif (layer := _layer(graph, op, weights)) is not None:
            side, name, features = layer
            read = _read(rule, 1 - side, flows[op.operands[1 - side]])
            columns = _columns(rule, side, read)
            if columns:
                found |= dict.fromkeys(columns, "column") | {name: "row"}
            else:
                for factor in rule.operands[side][features]:
                    read[factor] = ((rule.factors[factor].size, frozenset({(name, False)})),)
            flows[Value(op.id)] = _Flow(tuple(_written(rule, dims, read, _MIXED) for dims in rule.results[0]))
        elif op.kind in _CUTS:
            flows.update(_cut(graph, op, flows))
        else:
            made = _through(op, rule, flows)
            flows.update(made)
            if op.kind == "dot_general":
                for name in made[Value(op.id)].summed.difference(*(flows[v].summed for v in op.operands if v in flows)):
                    found.setdefault(name, "whole")
    return found


def _mixed(shape: Iterable[int]) -> _Flow:
    return _Flow(tuple(((size, _MIXED),) for size in shape))


def _layer(graph: Graph, op: Op, weights: Mapping[Value, str]) -> tuple[int, str, int] | None:
    """Of a linear layer's product or a stack's: the weight's operand, its name, and which dim is the features made."""
    for side, operand in enumerate(op.operands if op.kind == "dot_general" else ()):
        source, dims = through_views(graph, operand)
        contracted = op.attrs["rhs_contract" if side else "lhs_contract"]
        if source in weights and len(contracted) == 1 and len(dims) in (2, 3):
            into = dims[contracted[0]]
            if len(dims) == 2 or into > 0:
                return side, weights[source], dims.index(1 - into if len(dims) == 2 else 3 - into)
    return None


def _columns(rule: Rule, side: int, read: Mapping[int, Parts]) -> set[str]:
    """The column-parallel products before a product whose weight is operand `side`: none if it is not row-parallel."""
    contracted = [factor for dim in rule.operands[side] for factor in dim if rule.factors[factor].kind == "reduce"]
    makers = [read[factor][0][1] or _MIXED for factor in contracted if read.get(factor)]
    return {name for each in makers for name, _ in each if any(bent for _, bent in each)}


def _read(rule: Rule, position: int, flow: _Flow) -> dict[int, Parts]:
    """An operand's parts per factor of the op."""
    found: dict[int, Parts] = {}
    for factors, parts in zip(rule.operands[position], flow.dims, strict=True):
        found.update(zip(factors, _divided(parts, [rule.factors[each].size for each in factors]), strict=True))
    return found


def _divided(parts: Parts, sizes: Sequence[int]) -> list[Parts]:
    """A dim's parts in runs of these extents; of a part that falls into several, the major one keeps the makers."""
    left = list(reversed(parts))
    found: list[Parts] = []
    for size in sizes:
        mine: list[tuple[int, Makers | None]] = []
        while left and (rest := size // prod(extent for extent, _ in mine)) > 1:
            extent, makers = left.pop()
            if rest % extent and extent % rest:
                return [*found, *(((each, _MIXED),) for each in sizes[len(found) :])]
            if extent > rest:
                left.append((extent // rest, makers and _MIXED))
            mine.append((min(extent, rest), makers))
        found.append(tuple(mine))
    return found


def _written(rule: Rule, factors: Sequence[int], read: Mapping[int, Parts], other: Makers | None) -> Parts:
    """The parts of a result's dim: those of its factors; makers `other` for a factor that no activation has."""
    return tuple(part for each in factors for part in read.get(each, ((rule.factors[each].size, other),)))


def _through(op: Op, rule: Rule, flows: Mapping[Value, _Flow]) -> dict[Value, _Flow]:
    """The flows of an op's results, by its rule."""
    active = [(position, flows[value]) for position, value in enumerate(op.operands) if value in flows]
    summed = frozenset(name for _, flow in active for name in flow.summed)
    read: dict[int, Parts] = {}
    for position, flow in active:
        for factor, parts in _read(rule, position, flow).items():
            if rule.factors[factor].kind == "reduce":
                summed |= {name for _, makers in parts for name, _ in makers or ()}
            read[factor] = _joined(read[factor], parts) if factor in read else parts
    bends = op.kind not in _LINEAR or (len(active) > 1 and op.kind not in ("add", "subtract"))
    read = {factor: _settled(parts, summed, bends) for factor, parts in read.items()}
    other = None if op.kind == "broadcast_in_dim" else _MIXED
    return {
        Value(op.id, i): _Flow(tuple(_written(rule, factors, read, other) for factors in dims), summed)
        for i, dims in enumerate(rule.results)
    }


def _cut(graph: Graph, op: Op, flows: Mapping[Value, _Flow]) -> dict[Value, _Flow]:
    """The flow of what a slice, a pad, or a concatenation makes: dims that change are one part."""
    active = [value for value in op.operands if value in flows and graph.type_of(value).shape]
    dims: list[Parts] = [] if active else list(_mixed(op.results[0].shape).dims)
    for dim, size in enumerate(op.results[0].shape if active else ()):
        each = [flows[value].dims[dim] for value in active]
        if any(graph.type_of(value).shape[dim] != size for value in active):
            each = [((size, parts[0][1] if parts else None),) for parts in each]
        dims.append(reduce(_joined, each))
    return {Value(op.id): _Flow(tuple(dims), frozenset(name for value in active for name in flows[value].summed))}


def _joined(one: Parts, other: Parts) -> Parts:
    """The parts of what two values make together: mixed where either is, and from where neither's extents divide."""
    extents: list[int] = []
    rest: Parts = ()
    left, right = ([extent for extent, _ in reversed(parts)] for parts in (one, other))
    while left and right:
        a, b = left.pop(), right.pop()
        extent = gcd(a, b)
        if extent not in (a, b):
            rest = ((prod(left, start=a), _MIXED),)
            break
        extents.append(extent)
        left += [a // extent] if a > extent else []
        right += [b // extent] if b > extent else []
    pairs = zip(_divided(one, extents), _divided(other, extents), strict=True)
    return *((extent, _both(a[0][1], b[0][1])) for extent, (a, b) in zip(extents, pairs, strict=True) if a and b), *rest


def _both(one: Makers | None, other: Makers | None) -> Makers | None:
    if one is None or other is None:
        return other if one is None else one
    return one | other if one and other else _MIXED


def _settled(parts: Parts, summed: frozenset[str], bends: bool) -> Parts:
    """Parts behind an op: mixed where a maker's features have been summed."""
    return tuple(
        (extent, _MIXED if any(name in summed for name, _ in makers) else frozenset((n, b or bends) for n, b in makers))
        if makers
        else (extent, makers)
        for extent, makers in parts
    )
