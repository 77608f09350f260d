"""Rules of ops that index: gather, scatter, sort, top-k.

In the gather specification's words *batch dims* enumerate the index vectors and *offset (window) dims* run over the
slice of each. A dim is *trivially sliced* if the slice has extent one there. What a compiler makes a dynamic-slice of
(`sliced`) splits no indexed dim.
"""

from __future__ import annotations

from collections.abc import Iterable, Set

from autoshard.graph.ops import FactorKind, Rule
from autoshard.graph.rules.base import Dim, Factors, Shape, Signature, rule

REDUCERS = ("add", "mul", "min", "max", "and", "or")
"""Reducers of a scatter whose partial results can be combined."""


@rule("gather")
def gather(op: Signature) -> Rule:
    """Embedding: a split of the indexed rows leaves partial sums (a masked gather, then an all-reduce); index batch
    dims and completely covered dims are parallel; a dim that a slice covers in part is replicated.
    """
    operand, indices = op.operands
    (result,) = op.results
    sizes, sliced = op.attrs["slice_sizes"], op.attrs.get("sliced", False)
    factors = Factors()
    index = _index_dims(factors, indices, op.attrs["index_vector_dim"])
    paired = _paired(op)
    collapsed = set(op.attrs["collapsed_dims"]) | set(op.attrs["operand_batch_dims"])
    source: list[Dim] = []
    offsets: list[Dim] = []
    for dim, (extent, taken) in enumerate(zip(operand, sizes, strict=True)):
        if dim in paired:
            source.append(index[paired[dim]])
        elif taken == extent and extent != 1:
            source.append(factors.new(extent))
        elif taken == 1 and dim in op.attrs["start_index_map"]:
            source.append(factors.new(extent, "replicated") if sliced else factors.new(extent, "reduce", "add"))
        else:
            source.append(factors.new(extent, "replicated"))
        if dim not in collapsed:
            offsets.append(source[-1] if taken == extent else factors.new(taken, "replicated"))
    batch = [dims for i, dims in enumerate(index) if i != op.attrs["index_vector_dim"]]
    return factors.rule([source, index], [_interleave(len(result), op.attrs["offset_dims"], offsets, batch)])


@rule("scatter")
def scatter(op: Signature) -> Rule:
    """Embedding gradient: the indexed rows are parallel (a device drops the updates outside its shard: measured, no
    collective); the region's reducer reduces update batch dims; completely covered dims are parallel.

    Update batch dims are only split evenly: XLA pads indices with 0, so padding of the updates would land in row 0
    (seen in a run).

    Reducers without an identity (assignment and the like) apply updates in order: their batch dims are replicated.
    """
    count = (len(op.operands) - 1) // 2
    operand, indices, update = op.operands[0], op.operands[count], op.operands[count + 1]
    combines = op.attrs["reducer"] in REDUCERS
    factors = Factors()
    paired = _paired(op)
    index = _index_dims(
        factors,
        indices,
        op.attrs["index_vector_dim"],
        parallel=set(paired.values()),
        otherwise="reduce" if combines else "replicated",
        reducer=op.attrs["reducer"] if combines else None,
    )
    inserted = set(op.attrs["inserted_dims"]) | set(op.attrs["operand_batch_dims"])
    window_extents = iter([update[dim] for dim in op.attrs["window_dims"]])
    target: list[Dim] = []
    windows: list[Dim] = []
    for dim, extent in enumerate(operand):
        covered = 1 if dim in inserted else next(window_extents)
        if dim in paired:
            target.append(index[paired[dim]])
        elif covered == extent or (covered == 1 and dim in op.attrs["scatter_dims"]):
            target.append(factors.new(extent))
        else:
            target.append(factors.new(extent, "replicated"))
        if dim not in inserted:
            windows.append(target[-1] if covered == extent else factors.new(covered, "replicated"))
    batch = [dims for i, dims in enumerate(index) if i != op.attrs["index_vector_dim"]]
    updates = _interleave(len(update), op.attrs["window_dims"], windows, batch)
    return factors.rule([target] * count + [index] + [updates] * count, [target] * count)


def _paired(op: Signature) -> dict[int, int]:
    """Operand dim -> its indices' dim: explicit batch dims, and dims that an iota indexes."""
    explicit = zip(op.attrs["operand_batch_dims"], op.attrs["indices_batch_dims"], strict=True)
    return dict(explicit) | dict(op.attrs["parallel"])


def _index_dims(
    factors: Factors,
    shape: Shape,
    vector_dim: int,
    parallel: Set[int] = frozenset(),
    otherwise: FactorKind = "parallel",
    reducer: str | None = None,
) -> list[Dim]:
    """Factors of the indices' dims; the dim of the index vectors has none."""
    dims: list[Dim] = []
    for dim, size in enumerate(shape):
        kind: FactorKind = "replicated" if dim == vector_dim else "parallel" if dim in parallel else otherwise
        summed = kind == "reduce"
        dims.append(factors.new(size, kind, reducer if summed else None, even=summed))
    return dims


def _interleave(rank: int, places: Iterable[int], offsets: list[Dim], batch: list[Dim]) -> list[Dim]:
    """Dims of a gather's result: `offsets` at `places`, `batch` in the others, both in order."""
    at = dict(zip(places, offsets, strict=True))
    rest = iter(batch)
    return [at[dim] if dim in at else next(rest) for dim in range(rank)]


@rule("sort")
def sort(op: Signature) -> Rule:
    """The sorted dim is replicated, all others are parallel, in every operand."""
    factors = Factors()
    dims = [
        factors.new(size, "replicated" if dim == op.attrs["dim"] else "parallel")
        for dim, size in enumerate(op.operands[0])
    ]
    return factors.rule([dims] * len(op.operands), [dims] * len(op.results))


@rule("top_k")
def top_k(op: Signature) -> Rule:
    """Along the last dim; the dims before it are parallel."""
    (operand,) = op.operands
    factors = Factors()
    batch = factors.dims(operand[:-1])
    last = factors.new(op.results[0][-1], "replicated")
    return factors.rule([[*batch, factors.new(operand[-1], "replicated")]], [[*batch, last]] * len(op.results))
