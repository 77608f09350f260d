"""Transfer functions of sharding propagation: from an op's operands to its result and back, as in XLA."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from autoshard.cost.partitioner.tiling import Subaxes, Tiling, carried
from autoshard.dtypes import dtype_bytes
from autoshard.fused import KINDS, dims_of_attrs
from autoshard.graph.contraction import Dims, convolution_dims, dot_dims, kernel_is_small
from autoshard.graph.groups import ELEMENTWISE
from autoshard.graph.indexing import IndexDims, index_dims
from autoshard.graph.ops import Graph, Op
from autoshard.regions.dims import RegionDims

PASS_THROUGH = frozenset(
    {
        *("broadcast_in_dim", "concatenate", "constant", "convolution", "dot_general", "dynamic_slice"),
        *("dynamic_update_slice", "gather", "iota", "pad", "reduce", "reduce_window", "reshape", "scatter"),
        *("select_and_scatter", "slice", "sort", "transpose", "reverse", "rng_bit_generator", "rng"),
        *("optimization_barrier", "case", "while", *KINDS),
    }
)
"""Kinds, beside the elementwise ones, that propagation may give a sharding (`SupportSpatialPartitioning`)."""

FORWARD_LEVEL: dict[str, int] = dict.fromkeys(ELEMENTWISE, 0) | {
    "reshape": 0,
    "transpose": 0,
    "concatenate": 0,
    "dynamic_slice": 0,
    "dynamic_update_slice": 0,
    "optimization_barrier": 0,
    "broadcast_in_dim": 3,
}
"""Lowest level of aggressiveness at which a kind passes shardings; 1 for kinds not listed."""


class Transfers:
    """Transfer functions of a graph's ops; dim maps are cached per op and operand."""

    def __init__(self, graph: Graph, subaxes: Subaxes) -> None:
        """For the ops of `graph`, whose shardings are over `subaxes`."""
        self.graph = graph
        self.subaxes = subaxes
        self._maps: dict[tuple[int, int], tuple[int, ...] | None] = {}
        self._contractions: dict[int, Dims] = {}

    def operand_bytes(self, op: Op, place: int) -> int:
        """Bytes of the global operand."""
        kind = self.graph.type_of(op.operands[place])
        return math.prod(kind.shape) * dtype_bytes(kind.dtype)

    def is_dot(self, op: Op) -> bool:
        """Whether a convolution slides over no spatial dim, so that it is a contraction."""
        return not self.contraction(op).spatial

    def contraction(self, op: Op) -> Dims:
        """The dims of a `dot_general` or convolution."""
        known = self._contractions.get(op.id)
        if known is None:
            lhs, rhs = (self.graph.type_of(value).shape for value in op.operands[:2])
            if op.kind == "convolution":
                known = convolution_dims(lhs, rhs, op.attrs)
            else:
                known = dot_dims(len(lhs), len(rhs), op.attrs)
            self._contractions[op.id] = known
        return known

    def slides_over_parts(self, op: Op, operands: Sequence[Tiling | None]) -> bool:
        """Whether a convolution's result follows only its input: it slides over a split dim, or has groups."""
        dims = self.contraction(op)
        if not dims.spatial:
            return False
        grouped = op.attrs["feature_groups"] > 1 or op.attrs["batch_groups"] > 1
        lhs, rhs = operands[:2]
        return grouped or any((lhs and lhs[dim[0]]) or (rhs and rhs[dim[1]]) for dim in dims.spatial)

    def slid_forward(self, op: Op, tiling: Tiling) -> Tiling | None:
        """The result's sharding from the input's, where `slides_over_parts`; None without information."""
        attrs = op.attrs
        rhs = self.graph.type_of(op.operands[1]).shape
        if not any(tiling):
            return ((),) * len(tiling)
        if not kernel_is_small(rhs, op.results[0].shape, attrs):
            # XLA keeps the input's batch dim, at its position in the input.
            return tuple(axes if dim == attrs["lhs"][0] else () for dim, axes in enumerate(tiling))
        if tiling[attrs["lhs"][1]]:
            return None
        return carried(tiling, zip(attrs["lhs"], attrs["out"], strict=True), len(tiling))

    def dim_map(self, op: Op, place: int) -> tuple[int, ...] | None:
        """Per result dim the dim of operand `place` that it follows, or -1; None where no dim carries over."""
        key = (op.id, place)
        if key not in self._maps:
            self._maps[key] = self._make_map(op, place)
        return self._maps[key]

    def forward(self, op: Op, place: int, tiling: Tiling, result: int = 0) -> Tiling | None:
        """The sharding of a result that follows from operand `place`; None without information."""
        if op.kind in KINDS:
            named = self._region_dims(op)
            return self._named(named, named.operands[place], tiling, named.results[result])
        if op.kind == "reshape":
            source = self.graph.type_of(op.operands[0]).shape
            return self.subaxes.reshape(source, op.results[0].shape, tiling)
        if (op.kind == "broadcast_in_dim" or "outer" in op.attrs) and not any(tiling):
            return None
        dims = self.dim_map(op, place)
        if dims is None:
            return None
        return tuple(tiling[dim] if dim >= 0 else () for dim in dims)

    def backward(
        self, op: Op, place: int, tiling: Tiling, operands: Sequence[Tiling | None], level: int, result: int = 0
    ) -> Tiling | None:
        """The sharding that a result sharded by `tiling` asks of operand `place`.

        Args:
            operands: the operands' present shardings.
            level: the round's aggressiveness.
        """
        kind = op.kind
        if kind in KINDS:
            named = self._region_dims(op)
            return self._named(named, named.results[result], tiling, named.operands[place])
        shape = self.graph.type_of(op.operands[place]).shape
        if kind == "reshape":
            return self.subaxes.reshape(op.results[0].shape, shape, tiling)
        if kind in ("concatenate", "dynamic_slice", "dynamic_update_slice") and level == 0:
            return None
        if kind == "reduce" and not shape:
            return None
        if kind == "rng_bit_generator":
            return None
        if kind == "scatter":
            return self._scatter_backward(op, place, tiling, operands)
        dims = self.dim_map(op, place)
        if dims is None:
            return None
        found = carried(tiling, followed(dims), len(shape))
        if (kind == "dot_general" and "outer" not in op.attrs) or (kind == "convolution" and place < 2):
            return self._with_other(op, place, found, operands, level)
        return found

    def _region_dims(self, op: Op) -> RegionDims:
        return dims_of_attrs(op.kind, op.attrs, [self.graph.type_of(value).shape for value in op.operands])

    @staticmethod
    def _named(dims: RegionDims, read: str, tiling: Tiling, made: str) -> Tiling | None:
        """The tiling of a tensor with dims `made` that one with dims `read` implies, by letters."""
        found = {letter: axes for letter, axes in zip(read, tiling, strict=True) if letter in dims.shared}
        return tuple(found.get(letter, ()) for letter in made) if found else None

    def _with_other(
        self, op: Op, place: int, found: Tiling, operands: Sequence[Tiling | None], level: int
    ) -> Tiling | None:
        """A contraction's operand also takes the other operand's batch and contracted dims, where they merge."""
        if op.kind == "convolution" and not self.is_dot(op):
            return None
        other = operands[1 - place]
        if other is None:
            return found
        dims = self.contraction(op)
        pairs = (*(triple[:2] for triple in dims.batch), *dims.contract)
        offered = carried(other, ((pair[1 - place], pair[place]) for pair in pairs), len(found))
        tiles, subaxes = self.subaxes.tiles, self.subaxes
        before, after = tiles(found), tiles(offered)
        if level > 0 and 1 < before < subaxes.devices and 1 < after < subaxes.devices:
            merged = subaxes.merge(found, offered, max(before, after) + 1)
            if merged is not None:
                return merged
        return offered if after > before else found

    def _scatter_backward(self, op: Op, place: int, tiling: Tiling, operands: Sequence[Tiling | None]) -> Tiling | None:
        if place == 0:
            return tiling
        attrs = op.attrs
        rank = len(self.graph.type_of(op.operands[2]).shape)
        batch = [dim for dim in range(rank) if dim not in attrs["window_dims"]]
        indices_rank = len(self.graph.type_of(op.operands[1]).shape)
        index_batch = [dim for dim in range(indices_rank) if dim != attrs["index_vector_dim"]]
        if place == 1:
            updates = operands[2]
            if updates is None:
                return None
            return carried(updates, zip(batch, index_batch, strict=True), indices_rank)
        indices, dims = operands[1], self.dim_map(op, 2)
        from_indices: Tiling = ((),) * rank
        if indices is not None:
            from_indices = carried(indices, zip(index_batch, batch, strict=True), rank)
        from_output = carried(tiling, followed(dims or ()), rank)
        if any(from_output):
            return self.subaxes.merge(from_indices, from_output, 1) or from_output
        return from_indices if any(from_indices) else None

    # ---- which dim follows which -------------------------------------------------------------------------------

    def _make_map(self, op: Op, place: int) -> tuple[int, ...] | None:
        kind, attrs = op.kind, op.attrs
        operand = self.graph.type_of(op.operands[place]).shape
        rank = len(op.results[0].shape) if op.results else 0
        if kind in ELEMENTWISE or kind in ("reverse", "optimization_barrier", "concatenate", "sort"):
            return tuple(range(rank)) if len(operand) == rank else None
        if kind == "transpose":
            return tuple(attrs["permutation"])
        if kind == "broadcast_in_dim":
            dims = [-1] * rank
            for dim, result_dim in enumerate(attrs["dims"]):
                if operand[dim] == op.results[0].shape[result_dim]:
                    dims[result_dim] = dim
            return tuple(dims)
        if kind == "reduce":
            kept = [dim for dim in range(len(operand)) if dim not in attrs["dims"]]
            return tuple(kept) if operand else None
        if kind in ("slice", "pad", "reduce_window", "select_and_scatter"):
            return tuple(range(rank)) if place == 0 else None
        if kind == "dynamic_slice":
            same = [dim if operand[dim] == op.results[0].shape[dim] else -1 for dim in range(rank)] if not place else []
            return tuple(same) if place == 0 else None
        if kind == "dynamic_update_slice":
            if place > 1:
                return None
            return tuple(dim if operand[dim] == op.results[0].shape[dim] else -1 for dim in range(rank))
        if kind == "dot_general" or (kind == "convolution" and place < 2):
            return self._dot_map(op, place)
        if kind == "gather":
            return self._gather_map(op, place)
        if kind == "scatter":
            return self._scatter_map(op, place)
        return None

    def _dot_map(self, op: Op, place: int) -> tuple[int, ...]:
        dims = self.contraction(op)
        found = [-1] * len(op.results[0].shape)
        for triple in dims.batch:
            found[triple[2]] = triple[place]
        for mine, into in dims.right if place else dims.left:
            found[into] = mine
        return tuple(found)

    def _index_dims(self, op: Op) -> IndexDims:
        shapes = [self.graph.type_of(value).shape for value in op.operands]
        window = op.results[0].shape if op.kind == "gather" else shapes[2]
        return index_dims(op.kind, op.attrs, shapes[0], shapes[1], window)

    def _gather_map(self, op: Op, place: int) -> tuple[int, ...] | None:
        """The result follows the operand in whole slices and batch dims, the indices in their batch dims."""
        found = self._index_dims(op)
        dims = [-1] * len(op.results[0].shape)
        if place == 0:
            for dim, window in (*found.passthrough, *((a, w) for a, _, w in found.batch)):
                dims[window] = dim
        elif place == 1:
            for dim, window in (*found.index, *((i, w) for _, i, w in found.batch)):
                dims[window] = dim
        else:
            return None
        return tuple(dims)

    def _scatter_map(self, op: Op, place: int) -> tuple[int, ...] | None:
        """The result follows the operand, and the updates in whole windows and batch dims."""
        if place == 0:
            return tuple(range(len(op.results[0].shape)))
        if place != 2:
            return None
        found = self._index_dims(op)
        dims = [-1] * len(op.results[0].shape)
        for dim, window in (*found.passthrough, *((a, w) for a, _, w in found.batch)):
            dims[dim] = window
        return tuple(dims)


def followed(dims: Iterable[int]) -> Iterator[tuple[int, int]]:
    """(dim of the result, dim of the operand) of a `dim_map`."""
    return ((result, dim) for result, dim in enumerate(dims) if dim >= 0)
