"""Corresponding dims of a gather's or scatter's tensors, as in XLA (`GetGatherScatterBatchParallelDims` and others).

In the specification's words *batch dims* enumerate the index vectors and *offset (window) dims* run over the slice of
each. *Window* is a gather's result and a scatter's updates here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from autoshard.graph.ops import Op, Value

Shape = tuple[int, ...]


COUNTED = frozenset({"i32"})
"""Dtypes of broadcasts in which `GetDimensionForIota` looks for an iota, before anything is simplified."""


@dataclass(frozen=True)
class IndexDims:
    """Dims of one gather or scatter.

    Attributes:
        passthrough: (operand dim, window dim) of dims that the slice covers completely.
        trivial: indexed dims of the operand with slice size 1 (trivially sliced).
        batch: (operand dim, indices dim, window dim) of explicit batch dims, and of dims that an iota indexes: there
            element i of the indices reads (or writes) row i.
        index: (indices dim, window dim) of the other batch dims.
    """

    passthrough: tuple[tuple[int, int], ...]
    trivial: tuple[int, ...]
    batch: tuple[tuple[int, int, int], ...]
    index: tuple[tuple[int, int], ...]


def index_dims(kind: str, attrs: Mapping[str, Any], operand: Shape, indices: Shape, window: Shape) -> IndexDims:
    """The dims of a `gather` or `scatter` with these attributes and shapes."""
    batched = attrs["operand_batch_dims"]
    if kind == "gather":
        window_dims, hidden, indexed = attrs["offset_dims"], attrs["collapsed_dims"], attrs["start_index_map"]
        sizes = attrs["slice_sizes"]
    else:
        window_dims, hidden, indexed = attrs["window_dims"], attrs["inserted_dims"], attrs["scatter_dims"]
        kept = iter(window_dims)
        sizes = [1 if dim in hidden or dim in batched else window[next(kept)] for dim in range(len(operand))]
    windows = [dim for dim in range(len(operand)) if dim not in hidden and dim not in batched]
    outer = [dim for dim in range(len(window)) if dim not in window_dims]
    inner = [dim for dim in range(len(indices)) if dim != attrs["index_vector_dim"]]
    pairs = list(zip(inner, outer, strict=True))
    with_operand = {i: a for a, i in attrs["parallel"]} | dict(zip(attrs["indices_batch_dims"], batched, strict=True))
    return IndexDims(
        tuple((a, w) for a, w in zip(windows, window_dims, strict=True) if sizes[a] == operand[a]),
        tuple(dim for dim in indexed if sizes[dim] == 1),
        tuple((with_operand[i], i, w) for i, w in pairs if i in with_operand),
        tuple((i, w) for i, w in pairs if i not in with_operand),
    )


def parallel_dims(
    ops: Sequence[Op],
    kind: str,
    attrs: Mapping[str, Any],
    operands: Sequence[Value],
    dtypes: Set[str] = COUNTED,
) -> tuple[tuple[int, int], ...]:
    """(operand dim, indices dim) pairs in which the indices are an iota: each reads or writes a row of its own.

    Args:
        dtypes: of which a broadcast iota is known to be one; more than `COUNTED` in a program that is simplified.
    """
    count = 1 if kind == "gather" else (len(operands) - 1) // 2

    def shape(value: Value) -> Shape:
        return ops[value.op].results[value.result].shape

    operand, indices = shape(operands[0]), shape(operands[count])
    vector = attrs["index_vector_dim"]
    indexed = attrs["start_index_map" if kind == "gather" else "scatter_dims"]
    if kind == "gather":
        single = [attrs["slice_sizes"][dim] == 1 for dim in indexed]
    else:
        kept = [dim for dim in range(len(operand)) if dim not in attrs["inserted_dims"]]
        kept = [dim for dim in kept if dim not in attrs["operand_batch_dims"]]
        updates = shape(operands[count + 1])
        extent = {dim: updates[w] for dim, w in zip(kept, attrs["window_dims"], strict=True)}
        single = [extent.get(dim, 1) == 1 for dim in indexed]
    along = _counted(ops, operands[count], vector, shape, dtypes)
    if len(along) != len(indexed):
        return ()
    found: list[tuple[int, int]] = []
    for dim, one, counted in zip(indexed, single, along, strict=True):
        if counted is None:
            continue
        if counted in (i for _, i in found):
            return ()
        if one and counted not in attrs["indices_batch_dims"]:
            if operand[dim] != indices[counted]:
                return ()
            found.append((dim, counted))
    return tuple(found)


def _counted(
    ops: Sequence[Op], indices: Value, vector: int, shape: Callable[[Value], Shape], dtypes: Set[str]
) -> list[int | None]:
    """Per element of an index vector the indices' dim along which it is an iota, if any."""
    op = ops[indices.op]
    parts = op.operands if op.kind == "concatenate" and op.attrs["dim"] == vector else (indices,)
    found: list[int | None] = []
    for part in parts:
        dim = _iota_dim(ops, part, dtypes)
        size = shape(part)[vector] if vector < len(shape(part)) else 1
        found += [None if dim == vector else dim] * size
    return found


def _iota_dim(ops: Sequence[Op], value: Value, dtypes: Set[str]) -> int | None:
    """The dim along which a value is an iota, or a broadcast of one of these dtypes (`GetDimensionForIota`).

    In HLO an iota of several dims becomes a broadcast of a 1-D one, so it must be of them too. In a program that is
    simplified a constant 0, 1, 2, ... is one too, and a select of what is below 0 in an iota is that iota.
    """
    op = ops[value.op]
    if op.kind == "iota":
        plain = len(op.results[0].shape) == 1 or op.results[0].dtype in dtypes
        return int(op.attrs["dim"]) if plain else None
    if op.results[0].dtype not in dtypes:
        return None
    if op.kind == "broadcast_in_dim":
        inner = _iota_dim(ops, op.operands[0], dtypes)
        return None if inner is None else int(op.attrs["dims"][inner])
    if dtypes == COUNTED:
        return None
    if op.kind == "constant":
        return 0 if op.attrs.get("counts") else None
    if op.kind == "reshape":
        return _reshaped(ops, op, _iota_dim(ops, op.operands[0], dtypes))
    if op.kind == "select" and _is_negative(ops, op.operands[0], op.operands[2]):
        return _iota_dim(ops, op.operands[2], dtypes)
    return None


def _reshaped(ops: Sequence[Op], op: Op, dim: int | None) -> int | None:
    """Where a dim of the operand of a reshape that adds or drops dims of size 1 is in its result."""
    before, after = ops[op.operands[0].op].results[op.operands[0].result].shape, op.results[0].shape
    places = [at for at, size in enumerate(after) if size > 1]
    if dim is None or before[dim] == 1 or [size for size in before if size > 1] != [after[at] for at in places]:
        return None
    return places[sum(size > 1 for size in before[:dim])]


def _is_negative(ops: Sequence[Op], asked: Value, of: Value) -> bool:
    """Whether a value is the comparison `of < 0`: indices may count from the end."""
    op = ops[asked.op]
    if op.kind != "compare" or op.attrs["direction"] != "LT" or op.operands[0] != of:
        return False
    zero = ops[op.operands[1].op]
    while zero.kind in ("broadcast_in_dim", "reshape"):
        zero = ops[zero.operands[0].op]
    return zero.kind == "constant" and zero.attrs["value"] == 0
