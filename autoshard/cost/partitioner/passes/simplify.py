"""Canonicalization and algebraic simplification before sharding propagation.

`fold` is what the step from StableHLO to HLO does on all targets, `simplified` what the compilers of TPU and GPU do
next. MLIR's canonicalization folds ops on splat constants, merges equal splat constants into one, and drops no-ops.
Sharding propagation through a merged constant relates ops that have nothing else in common.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import wraps

from autoshard.cost.machine.compute import CONTRACTIONS
from autoshard.cost.machine.targets import Target
from autoshard.cost.passes import Passes
from autoshard.dtypes import is_float
from autoshard.graph.indexing import parallel_dims
from autoshard.graph.memo import per_graph
from autoshard.graph.ops import Graph, Op, Value

Number = float | int | bool

_FOLDS: dict[str, Callable[[Number, Number], Number]] = {
    "add": lambda a, b: a + b,
    "subtract": lambda a, b: a - b,
    "multiply": lambda a, b: a * b,
    "maximum": max,
    "minimum": min,
}
_DATA_MOVEMENT = frozenset({"broadcast_in_dim", "reshape", "transpose", "slice"})
_COMPARES: dict[str, Callable[[Number, Number], bool]] = {
    "EQ": lambda a, b: a == b,
    "NE": lambda a, b: a != b,
    "LT": lambda a, b: a < b,
    "LE": lambda a, b: a <= b,
    "GT": lambda a, b: a > b,
    "GE": lambda a, b: a >= b,
}


@dataclass(frozen=True)
class Folded:
    """What folding finds about a graph's values.

    Attributes:
        same: value -> the value that it is equal to, where its op is a no-op.
        splat: value -> its number, where every element is that constant.
    """

    same: dict[Value, Value]
    splat: dict[Value, Number]

    def resolve(self, value: Value) -> Value:
        """The value that replaces `value`."""
        while value in self.same:
            value = self.same[value]
        return value


@per_graph
def fold(graph: Graph) -> Folded:
    """Find splat constants and no-ops (x * 1, x / 1, conversions and reshapes to the same type)."""
    same: dict[Value, Value] = {}
    splat: dict[Value, Number] = {}
    for op in graph.ops:
        if len(op.results) != 1:
            continue
        value = Value(op.id)
        number = _number(op, graph, splat)
        if number is not None:
            splat[value] = number
            continue
        operand = _unchanged(op, graph, splat)
        if operand is not None:
            same[value] = operand
    return Folded(same, splat)


def _number(op: Op, graph: Graph, splat: dict[Value, Number]) -> Number | None:
    """The number that every element of the result is; None if unknown."""
    if op.kind == "constant":
        number = op.attrs["value"]
        return number if isinstance(number, int | float) else None
    if not op.operands or any(value not in splat for value in op.operands):
        return None
    read = [splat[value] for value in op.operands]
    if op.kind in _DATA_MOVEMENT:
        return read[0]
    if op.kind == "convert":
        dtype = op.results[0].dtype
        if dtype == "i1":
            return bool(read[0])
        return float(read[0]) if is_float(dtype) else int(read[0])
    if op.kind in _FOLDS:
        return _FOLDS[op.kind](read[0], read[1])
    if op.kind == "divide":
        if not read[1]:
            return None
        return read[0] / read[1] if is_float(op.results[0].dtype) else int(read[0] / read[1])
    if op.kind == "compare":
        return _COMPARES[op.attrs["direction"]](read[0], read[1])
    if op.kind == "select":
        return read[1] if read[0] else read[2]
    return None


def _unchanged(op: Op, graph: Graph, splat: dict[Value, Number]) -> Value | None:
    """The operand that the result equals; None if the op is no no-op."""
    if op.kind in ("multiply", "divide"):
        left, right = op.operands
        if splat.get(right) == 1:
            return left
        if op.kind == "multiply" and splat.get(left) == 1:
            return right
        return None
    if op.kind in ("convert", "reshape") and graph.type_of(op.operands[0]) == op.results[0]:
        return op.operands[0]
    if op.kind == "broadcast_in_dim" and graph.type_of(op.operands[0]).shape == op.results[0].shape:
        return op.operands[0] if op.attrs["dims"] == tuple(range(len(op.results[0].shape))) else None
    if op.kind == "transpose" and op.attrs["permutation"] == tuple(range(len(op.results[0].shape))):
        return op.operands[0]
    if op.kind == "select" and op.operands[0] in splat:
        return op.operands[1 if splat[op.operands[0]] else 2]
    return None


def _rewrite(make: Callable[[Graph], Graph | None]) -> Callable[[Graph], Graph]:
    """`make`, cached per graph; the graph itself where `make` changes nothing and returns None."""
    known = per_graph(make)

    @wraps(make)
    def found(graph: Graph) -> Graph:
        return known(graph) or graph

    return found


@_rewrite
def _with_zeros(graph: Graph) -> Graph | None:
    """`graph` with constants for zero-sized arrays and for sums over no elements; None where it has none."""
    return _with_ops(graph, [made for op in graph.ops if (made := _of_nothing(op, graph)) is not None])


def _of_nothing(op: Op, graph: Graph) -> Op | None:
    """The replacement of an op on zero-sized arrays: a constant, or the fill of a sum or pad; None for other ops."""
    if op.kind in ("argument", "constant") or len(op.results) != 1:
        return None
    reads_none = any(0 in graph.type_of(value).shape for value in op.operands)
    if 0 in op.results[0].shape or (reads_none and op.kind in CONTRACTIONS):
        return replace(op, kind="constant", operands=(), attrs={"value": 0})
    if reads_none and op.kind in ("reduce", "reduce_window", "pad") and len(op.operands) == 2:
        return replace(op, kind="broadcast_in_dim", operands=op.operands[1:], attrs={"dims": ()})
    return None


@_rewrite
def _with_reshapes(graph: Graph) -> Graph | None:
    """`graph` with reshapes for broadcasts that only add dims of size 1; None where it has none."""
    broadcasts = (op for op in graph.ops if op.kind == "broadcast_in_dim")
    return _with_ops(graph, [replace(op, kind="reshape", attrs={}) for op in broadcasts if _adds_dims(op, graph)])


def _adds_dims(op: Op, graph: Graph) -> bool:
    shape = graph.type_of(op.operands[0]).shape
    same_size = math.prod(shape) == math.prod(op.results[0].shape)
    return same_size and shape != op.results[0].shape and list(op.attrs["dims"]) == sorted(op.attrs["dims"])


@_rewrite
def _with_pads(graph: Graph) -> Graph | None:
    """`graph` with pads for dynamic-update-slices into splat constants; None where it has none."""
    splat = fold(graph).splat
    return _with_ops(graph, [pad for op in graph.ops if (pad := _pad(op, graph, splat)) is not None])


@_rewrite
def _with_outer_products(graph: Graph) -> Graph | None:
    """`graph` with its outer products marked; None where it has none."""
    products = [op for op in graph.ops if op.kind == "dot_general" and _sums_nothing(op, graph)]
    return _with_ops(graph, [replace(op, attrs={**op.attrs, "outer": True}) for op in products])


def _sums_nothing(op: Op, graph: Graph) -> bool:
    shape = graph.type_of(op.operands[0]).shape
    return all(shape[dim] == 1 for dim in op.attrs["lhs_contract"])


@_rewrite
def _with_squares(graph: Graph) -> Graph | None:
    """`graph` with x * x for x ** 2; None where it has none."""
    splat = fold(graph).splat
    powers = (op for op in graph.ops if op.kind == "power" and splat.get(op.operands[1]) == 2)
    return _with_ops(graph, [replace(op, kind="multiply", operands=(op.operands[0],) * 2) for op in powers])


@_rewrite
def _with_slices(graph: Graph) -> Graph | None:
    """Gathers and scatters of one index are a dynamic-slice or dynamic-update-slice: marked `sliced`."""
    found = (op for op in graph.ops if op.kind in ("gather", "scatter"))
    one = [op for op in found if _indices(graph.type_of(op.operands[len(op.results)]).shape, op) == 1]
    return _with_ops(graph, [replace(op, attrs={**op.attrs, "sliced": True}) for op in one])


@_rewrite
def _with_points_onto(graph: Graph) -> Graph | None:
    """`graph` with elements added in place, for a scatter of single elements into zeros that is then added."""
    splat = fold(graph).splat
    changed: dict[int, Op] = {}
    for op in graph.ops:
        if op.kind != "add":
            continue
        for value, other in (op.operands, op.operands[::-1]):
            one = graph.ops[value.op]
            alone = len(graph.readers(value)) == 1 and value not in graph.returned
            points = _adds(one) and not one.attrs["window_dims"] and not _adds(graph.ops[other.op])
            if points and alone and splat.get(one.operands[0]) == 0:
                changed[op.id] = replace(
                    one, id=op.id, operands=(other, *one.operands[1:]), aten=op.aten, scattered=one.aten
                )
                changed[one.id] = replace(one, kind="constant", operands=(), attrs={"value": 0})
                break
    return _with_ops(graph, list(changed.values()))


def _adds(op: Op) -> bool:
    return op.kind == "scatter" and op.attrs["reducer"] == "add"


def _with_rows_of(dtypes: Set[str]) -> Callable[[Graph], Graph]:
    """A pass that notes which gathers and scatters read or write each row by itself: of indices of these dtypes."""

    @_rewrite
    def noted(graph: Graph) -> Graph | None:
        changed = []
        for op in graph.ops:
            if op.kind in ("gather", "scatter"):
                found = parallel_dims(graph.ops, op.kind, op.attrs, op.operands, dtypes)
                if found != op.attrs["parallel"]:
                    changed.append(replace(op, attrs={**op.attrs, "parallel": found}))
        return _with_ops(graph, changed)

    return noted


def _indices(shape: Sequence[int], op: Op) -> int:
    return math.prod(size for dim, size in enumerate(shape) if dim != op.attrs["index_vector_dim"])


COUNTED_ON_GPUS = frozenset({"i32", "i64", "ui32", "ui64"})
COUNTED_ON_TPUS = frozenset({"i32", "ui32"})
"""Dtypes of indices in which a broadcast iota is known to be one, seen in gathers and scatters of u32 and i64."""

SIMPLIFIED_BY: Mapping[Target, Passes[Graph]] = {
    "cpu": Passes((_with_zeros, _with_reshapes)),
    "gpu": Passes(
        (
            _with_zeros,
            _with_reshapes,
            _with_pads,
            _with_outer_products,
            _with_squares,
            _with_slices,
            _with_points_onto,
            _with_rows_of(COUNTED_ON_GPUS),
        )
    ),
    "tpu": Passes(
        (
            _with_zeros,
            _with_reshapes,
            _with_pads,
            _with_outer_products,
            _with_points_onto,
            _with_rows_of(COUNTED_ON_TPUS),
        )
    ),
}


def simplified(graph: Graph, target: Target) -> Graph:
    """The graph that `target`'s compiler propagates shardings through and partitions; op numbers stay.

    On all targets zero-sized arrays and sums over no elements are constants (`ZeroSizedHloElimination`), and a
    broadcast that only adds dims of size 1 is a reshape, through which shardings pass. On TPU and GPU
    `AlgebraicSimplifier` also runs: a dynamic-update-slice at a constant place of a splat (the gradient of a slice) is
    a pad; a contraction of no dims is a product of broadcasts, marked `outer`; what is added to elements scattered
    into zeros is what they are scattered into. On GPU squares are products, so no
    sharding passes through a shared exponent, and a gather or scatter of one index is a dynamic-slice or -update-slice
    (`GatherExpander`, `ScatterExpander`), for which GSPMD gathers what is split along the indexed dims. The CPU
    compiler does so after partitioning, and knows rows that are read by themselves by counts in i32 alone.
    """
    return SIMPLIFIED_BY[target](graph)


def _with_ops(graph: Graph, changed: Sequence[Op]) -> Graph | None:
    """`graph` with these ops in place of those of the same numbers; None where there are none."""
    if not changed:
        return None
    ops = {op.id: op for op in changed}
    return replace(graph, ops=tuple(ops.get(op.id, op) for op in graph.ops))


def _pad(op: Op, graph: Graph, splat: Mapping[Value, Number]) -> Op | None:
    """The pad that replaces a `dynamic_update_slice`; its constant fill is no operand."""
    if op.kind != "dynamic_update_slice" or op.operands[0] not in splat:
        return None
    _, update, *starts = op.operands
    low = [splat.get(start) for start in starts]
    sizes = zip(op.results[0].shape, graph.type_of(update).shape, strict=True)
    room = [size - part for size, part in sizes]
    if any(start is None or not 0 <= start <= left for start, left in zip(low, room, strict=True)):
        return None
    before = tuple(int(start) for start in low if start is not None)
    after = tuple(left - start for left, start in zip(room, before, strict=True))
    attrs = {"low": before, "high": after, "interior": (0,) * len(room)}
    return replace(op, kind="pad", operands=(update,), attrs=attrs)
