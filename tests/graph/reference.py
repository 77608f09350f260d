"""A slow, plain evaluator of single StableHLO ops, whole or one shard of them, to hold the rules against.

It follows the StableHLO specification index by index and knows nothing of rules. A shard of an op is the same op on
parts of its operands; what a part cannot know by itself is in `Shard`: the shapes of the whole, and where it starts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autoshard.graph.ops import Op

Array = np.ndarray
Shape = tuple[int, ...]

COMBINE: dict[str, Callable[[Array, Array], Array]] = {
    "add": np.add,
    "mul": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
    "and": np.logical_and,
    "or": np.logical_or,
}
IDENTITY = {"add": 0, "mul": 1, "max": -(10**6), "min": 10**6, "and": True, "or": False}


@dataclass(frozen=True)
class Shard:
    """Global shape of each operand, where this part of it starts, and the same for each result, with its own shape."""

    operand_shapes: tuple[Shape, ...]
    operand_starts: tuple[Shape, ...]
    result_starts: tuple[Shape, ...]
    result_shapes: tuple[Shape, ...]


def whole(op: Op, operands: Sequence[Array]) -> Shard:
    """The shard that is everything."""
    shapes = tuple(result.shape for result in op.results)
    zeros = [(0,) * operand.ndim for operand in operands]
    return Shard(tuple(o.shape for o in operands), tuple(zeros), tuple((0,) * len(s) for s in shapes), shapes)


def evaluate(op: Op, operands: Sequence[Array], shard: Shard) -> list[Array]:
    """Results of (this shard of) an op."""
    return EVALUATORS[op.kind](op.attrs, [np.asarray(o) for o in operands], shard)


def dot_general(a: Any, operands: list[Array], shard: Shard) -> list[Array]:
    lhs, rhs = operands
    left: list[int] = list(range(lhs.ndim))
    right = [100 + i for i in range(rhs.ndim)]
    for i, j in zip(a["lhs_batch"] + a["lhs_contract"], a["rhs_batch"] + a["rhs_contract"], strict=True):
        right[j] = left[i]
    free_left = [left[i] for i in range(lhs.ndim) if i not in a["lhs_batch"] + a["lhs_contract"]]
    free_right = [right[i] for i in range(rhs.ndim) if i not in a["rhs_batch"] + a["rhs_contract"]]
    names = {n: k for k, n in enumerate(dict.fromkeys(left + right))}
    batch = [left[i] for i in a["lhs_batch"]]
    out = [names[n] for n in batch + free_left + free_right]
    return [np.einsum(lhs, [names[n] for n in left], rhs, [names[n] for n in right], out)]


def reduce(a: Any, operands: list[Array], shard: Shard) -> list[Array]:
    if a["reducer"] == "other":  # argmax: values and their indices; ties go to the lower index
        values, indices = operands[:2]
        (dim,) = a["dims"]
        order = np.lexsort((indices, -values), axis=dim)
        first = np.take(order, [0], axis=dim)
        return [np.take_along_axis(x, first, axis=dim).squeeze(dim) for x in (values, indices)]
    count = len(operands) // 2
    folded = []
    for operand, initial in zip(operands[:count], operands[count:], strict=True):
        ufunc = COMBINE[a["reducer"]]
        folded.append(ufunc(ufunc.reduce(operand, axis=a["dims"]), initial).astype(operand.dtype))
    return folded


def broadcast_in_dim(a: Any, operands: list[Array], shard: Shard) -> list[Array]:
    (operand,) = operands
    shape = [1] * len(shard.result_shapes[0])
    for extent, dim in zip(operand.shape, a["dims"], strict=True):
        shape[dim] = extent
    return [np.broadcast_to(operand.reshape(shape), shard.result_shapes[0])]


def slice_(a: Any, operands: list[Array], shard: Shard) -> list[Array]:
    index = []
    for dim, extent in enumerate(operands[0].shape):
        whole, start, stride = shard.operand_shapes[0][dim], a["start"][dim], a["stride"][dim]
        cut = slice(start, a["limit"][dim], stride)
        # A split dim must be one that the slice keeps whole, or of which it takes as much of every part.
        spread = whole % stride == extent % stride == 0 and start < stride and whole // stride == len(range(whole)[cut])
        assert extent == whole or spread
        index.append(cut if extent == whole else slice(start, None, stride))
    return [operands[0][tuple(index)]]


def pad(a: Any, operands: list[Array], shard: Shard) -> list[Array]:
    operand, value = operands
    for dim, (low, high, interior) in enumerate(zip(a["low"], a["high"], a["interior"], strict=True)):
        pieces = []
        rows = [np.take(operand, [i], axis=dim) for i in range(operand.shape[dim])]
        filler = np.full_like(np.take(operand, [0], axis=dim), value)
        for i, row in enumerate(rows):
            pieces.extend([row] if i == len(rows) - 1 else [row] + [filler] * interior)
        pieces = [filler] * low + pieces if low > 0 else pieces[-low:]
        pieces = pieces + [filler] * high if high > 0 else pieces[: len(pieces) + high]
        operand = np.concatenate(pieces, axis=dim)
    return [operand]


def iota(a: Any, operands: list[Array], shard: Shard) -> list[Array]:
    (shape,), (start,) = shard.result_shapes, shard.result_starts
    along = np.arange(shape[a["dim"]]) + start[a["dim"]]
    return [np.broadcast_to(along.reshape([-1 if d == a["dim"] else 1 for d in range(len(shape))]), shape)]


def dynamic_slice(a: Any, operands: list[Array], shard: Shard) -> list[Array]:
    operand, *starts = operands
    index = []
    for dim, (start, size) in enumerate(zip(starts, a["sizes"], strict=True)):
        extent = shard.operand_shapes[0][dim]
        start = min(max(int(start), 0), extent - size)
        index.append(slice(None) if size == extent else slice(start, start + size))
    return [operand[tuple(index)]]


def dynamic_update_slice(a: Any, operands: list[Array], shard: Shard) -> list[Array]:
    operand, update, *starts = operands
    result = operand.copy()
    index = []
    for dim, start in enumerate(starts):
        extent, size = shard.operand_shapes[0][dim], shard.operand_shapes[1][dim]
        start = min(max(int(start), 0), extent - size)
        index.append(slice(None) if size == extent else slice(start, start + size))
    result[tuple(index)] = update
    return [result]


def _vector(indices: Array, batch: Shape, vector_dim: int) -> list[int]:
    if vector_dim == indices.ndim:
        return [int(indices[batch])]
    at = (*batch[:vector_dim], slice(None), *batch[vector_dim:])
    return [int(i) for i in indices[at]]


def gather(a: Any, operands: list[Array], shard: Shard) -> list[Array]:
    operand, indices = operands
    shape, start = shard.operand_shapes[0], shard.operand_starts[0]
    offset_dims = a["offset_dims"]
    result = np.zeros(shard.result_shapes[0], operand.dtype)
    hidden = (*a["collapsed_dims"], *a["operand_batch_dims"])
    kept = [d for d in range(operand.ndim) if d not in hidden]
    vector_dim = a["index_vector_dim"]
    for at in np.ndindex(result.shape):
        batch = tuple(at[d] for d in range(result.ndim) if d not in offset_dims)
        position = [0] * operand.ndim
        for dim, index in zip(a["start_index_map"], _vector(indices, batch, vector_dim), strict=True):
            size = a["slice_sizes"][dim]
            # A slice of a whole dim is the whole of each part, too.
            position[dim] = min(max(index, 0), shape[dim] - size) - start[dim] if size < shape[dim] else 0
        for dim, of_indices in zip(a["operand_batch_dims"], a["indices_batch_dims"], strict=True):
            position[dim] = batch[of_indices if of_indices < vector_dim else of_indices - 1]
        for dim, d in zip(kept, offset_dims, strict=True):
            position[dim] += at[d]
        if all(0 <= p < extent for p, extent in zip(position, operand.shape, strict=True)):
            result[at] = operand[tuple(position)]  # elsewhere masked: another device has it
    return [result]


def scatter(a: Any, operands: list[Array], shard: Shard) -> list[Array]:
    operand, indices, updates = operands
    start = shard.operand_starts[0]
    result = operand.copy()
    vector_dim = a["index_vector_dim"]
    hidden = (*a["inserted_dims"], *a["operand_batch_dims"])
    kept = [d for d in range(operand.ndim) if d not in hidden]
    window_dims = a["window_dims"]
    for at in np.ndindex(updates.shape):
        batch = tuple(at[d] for d in range(updates.ndim) if d not in window_dims)
        position = [0] * operand.ndim
        for dim, index in zip(a["scatter_dims"], _vector(indices, batch, vector_dim), strict=True):
            position[dim] = index - start[dim]
        for dim, of_indices in zip(a["operand_batch_dims"], a["indices_batch_dims"], strict=True):
            position[dim] = batch[of_indices if of_indices < vector_dim else of_indices - 1]
        for dim, d in zip(kept, window_dims, strict=True):
            position[dim] += at[d]
        if all(0 <= p < extent for p, extent in zip(position, operand.shape, strict=True)):
            old, new = result[tuple(position)], updates[at]
            result[tuple(position)] = new if a["reducer"] == "assign" else COMBINE[a["reducer"]](old, new)
    return [result]


def convolution(a: Any, operands: list[Array], shard: Shard) -> list[Array]:
    lhs, rhs = (np.transpose(x, a[name]) for x, name in zip(operands, ("lhs", "rhs"), strict=True))
    for i, (low, high) in enumerate(a["padding"], start=2):
        dilation = {name: [0] * lhs.ndim for name in ("low", "high", "interior")}
        dilation["interior"][i] = a["lhs_dilation"][i - 2] - 1
        edges = {name: [0] * lhs.ndim for name in ("low", "high", "interior")}
        edges["low"][i], edges["high"][i] = low, high
        for extra in (dilation, edges):
            (lhs,) = pad(extra, [lhs, np.zeros(())], shard)
        if a["reversal"][i - 2]:
            rhs = np.flip(rhs, i)
    # Groups: what remains of them on this device follows from the feature counts of its parts.
    groups = lhs.shape[1] // rhs.shape[1]
    out_shape = [shard.result_shapes[0][d] for d in a["out"]]
    batch_groups = lhs.shape[0] // out_shape[0]
    out = np.zeros(out_shape, lhs.dtype)
    per_group = rhs.shape[0] // (groups * batch_groups)
    for n, o, *at in itertools.product(*map(range, out.shape)):
        g = o // per_group if groups > 1 else 0
        b = o // per_group if batch_groups > 1 else 0
        rows = lhs[n + b * out_shape[0], g * rhs.shape[1] : (g + 1) * rhs.shape[1]]
        for taps in itertools.product(*map(range, rhs.shape[2:])):
            place = tuple(p * s + t * d for p, s, t, d in zip(at, a["stride"], taps, a["rhs_dilation"], strict=True))
            out[(n, o, *at)] += np.dot(rows[(slice(None), *place)], rhs[(o, slice(None), *taps)])
    return [np.transpose(out, np.argsort(a["out"]))]


def sort(a: Any, operands: list[Array], shard: Shard) -> list[Array]:
    return [np.sort(operands[0], axis=a["dim"])]


def elementwise(function: Callable[..., Array]) -> Callable[[Any, list[Array], Shard], list[Array]]:
    return lambda a, operands, shard: [function(*operands)]


EVALUATORS: dict[str, Callable[[Any, list[Array], Shard], list[Array]]] = {
    "add": elementwise(np.add),
    "multiply": elementwise(np.multiply),
    "negate": elementwise(np.negative),
    "select": elementwise(np.where),
    "clamp": elementwise(lambda low, x, high: np.minimum(np.maximum(x, low), high)),
    "dot_general": dot_general,
    "reduce": reduce,
    "broadcast_in_dim": broadcast_in_dim,
    "transpose": lambda a, operands, shard: [np.transpose(operands[0], a["permutation"])],
    "reshape": lambda a, operands, shard: [operands[0].reshape(shard.result_shapes[0])],
    "reverse": lambda a, operands, shard: [np.flip(operands[0], a["dims"])],
    "slice": slice_,
    "pad": pad,
    "concatenate": lambda a, operands, shard: [np.concatenate(operands, axis=a["dim"])],
    "iota": iota,
    "dynamic_slice": dynamic_slice,
    "dynamic_update_slice": dynamic_update_slice,
    "gather": gather,
    "scatter": scatter,
    "convolution": convolution,
    "sort": sort,
}
