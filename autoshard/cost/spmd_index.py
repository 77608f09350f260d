"""What GSPMD emits for gather and scatter, given the shardings of operand, indices and result or updates.

This follows `PartitionGather` and `PartitionScatter` of XLA (xla/service/spmd/gather_scatter_handler.cc): devices are
grouped, one way after another, by dims that operand and window share, by indexed dims of the operand (each device looks
up what it holds, and the parts are summed; a scatter drops what it does not hold), or by dims of the indices. XLA tries
the way with the least memory first, then the least communication.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autoshard.cost.spmd_reshard import Step
from autoshard.graph.ops import Op
from autoshard.graph.tiling import Tiling
from autoshard.graph.transfer import bytes_of

if TYPE_CHECKING:
    from autoshard.cost.spmd import Emission, Partitioner

Dim = tuple[int, ...]
Shape = tuple[int, ...]
Move = tuple[int, tuple[Dim, Tiling, Tiling], tuple[Step, ...]]


@dataclass(frozen=True)
class _Array:
    place: int
    shape: Shape
    tiling: Tiling
    dtype: str


@dataclass
class _Outcome:
    """Steps so far; `memory` is what a way allocates, bytes per device."""

    moves: list[Move]
    own: list[Step]
    memory: int = 0
    local: int = 0

    @property
    def communication(self) -> int:
        """Bytes of all collectives."""
        return sum(step[2] for move in self.moves for step in move[2]) + sum(step[2] for step in self.own)


class IndexPartitioner:
    """Plans one gather or scatter; `emit` is the entry."""

    def __init__(self, owner: Partitioner, op: Op, reads: tuple[Tiling, ...], result: Tiling) -> None:
        """For one op, whose operands are found under `reads` and whose result is wanted under `result`."""
        self.owner = owner
        self.subaxes = owner.subaxes
        self.resharder = owner.resharder
        self.op = op
        self.reads = reads
        self.result = result
        self.is_gather = op.kind == "gather"
        types = [owner.graph.type_of(value) for value in op.operands]
        self.types = types
        attrs = op.attrs
        operand = types[0].shape
        if self.is_gather:
            window_dims, hidden = attrs["offset_dims"], attrs["collapsed_dims"]
            indexed, sizes = attrs["start_index_map"], attrs["slice_sizes"]
            window_rank = len(op.results[0].shape)
        else:
            window_dims, hidden = attrs["window_dims"], attrs["inserted_dims"]
            indexed = attrs["scatter_dims"]
            window_rank = len(types[2].shape)
            hidden_or_batched = (*hidden, *attrs["operand_batch_dims"])
            sizes = self._window_sizes(operand, types[2].shape, window_dims, hidden_or_batched)
        batched = attrs["operand_batch_dims"]
        windows = [dim for dim in range(len(operand)) if dim not in hidden and dim not in batched]
        self.passthrough = [
            (dim, window) for dim, window in zip(windows, window_dims, strict=True) if sizes[dim] == operand[dim]
        ]
        self.trivial = tuple(dim for dim in indexed if sizes[dim] == 1)
        vector = attrs["index_vector_dim"]
        outer = [dim for dim in range(window_rank) if dim not in window_dims]
        inner = [dim for dim in range(len(types[1].shape)) if dim != vector]
        pairs = list(zip(inner, outer, strict=True))
        explicit = dict(zip(attrs["indices_batch_dims"], batched, strict=True))
        self.batch = [(explicit[i], i, w) for i, w in pairs if i in explicit]
        self.index = [(i, w) for i, w in pairs if i not in explicit]
        self.devices = tuple(range(len(self.subaxes.sizes)))

    @staticmethod
    def _window_sizes(operand: Shape, updates: Shape, window_dims: Sequence[int], hidden: Sequence[int]) -> list[int]:
        kept = iter(window_dims)
        return [1 if dim in hidden else updates[next(kept)] for dim in range(len(operand))]

    def emit(self) -> Emission:
        """The emission of the op."""
        from autoshard.cost.spmd import Emission

        operand = _Array(0, self.types[0].shape, self.reads[0], self.types[0].dtype)
        indices = _Array(1, self.types[1].shape, self.reads[1], self.types[1].dtype)
        result = self.op.results[0]
        if self.is_gather:
            window = _Array(2, result.shape, self.result, result.dtype)
        else:
            window = _Array(2, self.types[2].shape, self.reads[2], self.types[2].dtype)
        outcome = self._partition(operand, indices, window, self.devices, (), recursive=True)
        if not self.is_gather and self.final != self.result:
            outcome.own.extend(self.resharder.reshard(result.shape, result.dtype, self.final, self.result))
        whole = math.prod(window.shape)
        share = outcome.local / whole if whole else 1.0
        return Emission(tuple(outcome.moves), tuple(outcome.own), min(share, 1.0), self.reads)

    # ---- the ways ----------------------------------------------------------------------------------------------

    def _partition(
        self, operand: _Array, indices: _Array, window: _Array, devices: Dim, outer: Dim, recursive: bool
    ) -> _Outcome:
        if recursive:
            ranked = []
            for number, way in enumerate((self._by_batch, self._by_window, self._by_trivial, self._by_index)):
                found = way(operand, indices, window, devices, outer, False)
                if found is not None:
                    ranked.append(((found.memory, found.communication, number), way))
            for _, way in sorted(ranked, key=lambda item: item[0]):
                found = way(operand, indices, window, devices, outer, True)
                if found is not None:
                    return found
        outcome = _Outcome([], [])
        operand = self._moved(outcome, operand, self._nothing(operand), outer)
        indices = self._moved(outcome, indices, self._nothing(indices), outer)
        self.final: Tiling = operand.tiling
        if self.is_gather:
            outcome.memory += self._bytes(window.shape, self._nothing(window), window.dtype)
            outcome.local = math.prod(window.shape)
        else:
            whole = self._moved(outcome, window, self._nothing(window), outer)
            outcome.memory += self._bytes(operand.shape, operand.tiling, operand.dtype)
            outcome.local = math.prod(whole.shape)
        return outcome

    def _by_batch(
        self, operand: _Array, indices: _Array, window: _Array, devices: Dim, outer: Dim, recursive: bool
    ) -> _Outcome | None:
        """Dims that operand, indices and window share (explicit batch dims)."""
        ways = self.subaxes.ways
        wanted_operand, wanted_indices = list(operand.tiling), list(indices.tiling)
        wanted_window = list(window.tiling)
        group: list[int] = []
        for a, i, w in self.batch:
            axes = max((operand.tiling[a], indices.tiling[i]), key=ways)
            wanted_operand[a] = wanted_indices[i] = wanted_window[w] = axes
            group.extend(axes)
        if not group or len(set(group)) != len(group):
            return None
        return self._grouped(
            operand,
            indices,
            window,
            self._cleared(tuple(wanted_operand), {a for a, _, _ in self.batch}, tuple(group)),
            self._cleared(tuple(wanted_indices), {i for _, i, _ in self.batch}, tuple(group)),
            self._cleared(tuple(wanted_window), {w for _, _, w in self.batch}, tuple(group)),
            tuple(group),
            devices,
            outer,
            recursive,
            (),
        )

    def _by_window(
        self, operand: _Array, indices: _Array, window: _Array, devices: Dim, outer: Dim, recursive: bool
    ) -> _Outcome | None:
        """Dims of the operand that the window has whole."""
        group = tuple(axis for a, _ in self.passthrough for axis in operand.tiling[a])
        if not group:
            return None
        asked: list[Dim] = [()] * len(window.tiling)
        for a, w in self.passthrough:
            asked[w] = operand.tiling[a]
        carried = self.subaxes.merge(window.tiling, tuple(asked), 1) or tuple(asked)
        return self._grouped(
            operand,
            indices,
            window,
            operand.tiling,
            self._off(indices.tiling, group, self._index_order(), devices),
            carried,
            group,
            devices,
            outer,
            recursive,
            (),
        )

    def _by_trivial(
        self, operand: _Array, indices: _Array, window: _Array, devices: Dim, outer: Dim, recursive: bool
    ) -> _Outcome | None:
        """Indexed dims of the operand: each device takes the indices that fall on its part."""
        per_dim = tuple(operand.tiling[dim] for dim in self.trivial if operand.tiling[dim])
        group = tuple(axis for axes in per_dim for axis in axes)
        if not group:
            return None
        wanted_indices = self._off(indices.tiling, group, self._index_order(), devices)
        wanted_window = self._off(window.tiling, group, self._window_order(window), devices)
        if any(wanted_indices) and not any(wanted_window):
            asked: list[Dim] = [()] * len(window.tiling)
            for i, w in self.index:
                asked[w] = indices.tiling[i]
            wanted_window = self._off(tuple(asked), group, self._window_order(window), devices)
        elif any(wanted_window) and not any(wanted_indices):
            asked = [()] * len(indices.tiling)
            for i, w in self.index:
                asked[i] = window.tiling[w]
            wanted_indices = self._off(tuple(asked), group, self._index_order(), devices)
        sums = per_dim if self.is_gather else ()
        return self._grouped(
            operand,
            indices,
            window,
            operand.tiling,
            wanted_indices,
            wanted_window,
            group,
            devices,
            outer,
            recursive,
            sums,
        )

    def _by_index(
        self, operand: _Array, indices: _Array, window: _Array, devices: Dim, outer: Dim, recursive: bool
    ) -> _Outcome | None:
        """Dims of the indices: a scatter then sums what the groups made."""
        asked: list[Dim] = [()] * len(indices.tiling)
        for i, w in self.index:
            asked[i] = window.tiling[w]
        before = self.subaxes.tiles(indices.tiling)
        better = self.subaxes.merge(tuple(asked), indices.tiling, before + 1) or indices.tiling
        per_dim = tuple(better[i] for i, _ in self.index if better[i])
        group = tuple(axis for axes in per_dim for axis in axes)
        if not group:
            return None
        carried: list[Dim] = [()] * len(window.tiling)
        for i, w in self.index:
            carried[w] = better[i]
        through = self.subaxes.merge(window.tiling, tuple(carried), 1) or tuple(carried)
        order = (*self.trivial, *(a for a, _ in self.passthrough))
        return self._grouped(
            operand,
            indices,
            window,
            self._off(operand.tiling, group, order, devices),
            better,
            through,
            group,
            devices,
            outer,
            recursive,
            () if self.is_gather else per_dim,
        )

    def _grouped(
        self,
        operand: _Array,
        indices: _Array,
        window: _Array,
        operand_as: Tiling,
        indices_as: Tiling,
        window_as: Tiling,
        group: Dim,
        devices: Dim,
        outer: Dim,
        recursive: bool,
        sums: tuple[Dim, ...],
    ) -> _Outcome:
        """One way: reshard, partition within the groups, sum, and give the result its sharding."""
        outcome = _Outcome([], [])
        operand = self._moved(outcome, operand, operand_as, outer)
        indices = self._moved(outcome, indices, indices_as, outer)
        if self.is_gather:
            inside = _Array(2, window.shape, window_as, window.dtype)
        else:
            inside = self._moved(outcome, window, window_as, outer)
        left = tuple(axis for axis in devices if axis not in group)
        inner = self._partition(
            self._within(operand, group),
            self._within(indices, group),
            self._within(inside, group),
            left,
            outer + group,
            recursive,
        )
        outcome.moves += inner.moves
        outcome.own += inner.own
        outcome.memory += inner.memory
        outcome.local = inner.local
        target = window if self.is_gather else operand
        made_as = window_as if self.is_gather else operand_as
        size = self._bytes(target.shape, made_as, target.dtype)
        if sums:
            final = window.tiling if self.is_gather else self.result if not outer else made_as
            cut = self.owner.cuts.cut(target.shape, made_as, final, outer)
            outcome.own.extend(self.owner.sums(sums[::-1], size, cut))
            outcome.memory += size
        if self.is_gather and made_as != window.tiling:
            outcome.own.extend(self.resharder.reshard(window.shape, window.dtype, made_as, window.tiling, outer))
            outcome.memory += self._bytes(window.shape, window.tiling, window.dtype)
        self.final = operand_as
        return outcome

    # ---- helpers -----------------------------------------------------------------------------------------------

    def _moved(self, outcome: _Outcome, array: _Array, want: Tiling, outer: Dim) -> _Array:
        if want == array.tiling:
            return array
        steps = self.resharder.reshard(array.shape, array.dtype, array.tiling, want, outer)
        end = self.resharder.destination(array.shape, array.dtype, array.tiling, want, outer)
        outcome.moves.append((array.place, (outer, array.tiling, end), steps))
        outcome.memory += self._bytes(array.shape, want, array.dtype)
        return _Array(array.place, array.shape, want, array.dtype)

    def _within(self, array: _Array, group: Dim) -> _Array:
        inside = set(group)
        ways = self.subaxes.ways
        shape = tuple(
            -(-size // ways(tuple(axis for axis in axes if axis in inside)))
            for size, axes in zip(array.shape, array.tiling, strict=True)
        )
        rest = tuple(tuple(axis for axis in axes if axis not in inside) for axes in array.tiling)
        return _Array(array.place, shape, rest, array.dtype)

    def _off(self, tiling: Tiling, group: Dim, order: Sequence[int], devices: Dim) -> Tiling:
        """`tiling` without the group's axes (`GroupShardingOnReplicatedDim`): it keeps what idle devices can hold."""
        if not any(tiling):
            return tiling
        ways = self.subaxes.ways
        used = {axis for dim in tiling for axis in dim}
        idle = ways(tuple(axis for axis in devices if axis not in used))
        needed = ways(group)
        kept = list(tiling)
        for dim in order:
            if idle % needed == 0:
                break
            while kept[dim] and idle % needed:
                *rest, last = kept[dim]
                kept[dim] = tuple(rest)
                idle *= self.subaxes.sizes[last]
        if idle % needed:
            return ((),) * len(tiling)
        return self._cleared(tuple(kept), set(), group, devices)

    def _cleared(self, tiling: Tiling, keep: set[int], group: Dim, devices: Dim | None = None) -> Tiling:
        """The dims that are not in `keep` off the group's axes: each gives way to a spare one of its size."""
        inside = set(group)
        used = {axis for dim in tiling for axis in dim}
        spare = [axis for axis in (devices or self.devices) if axis not in used and axis not in inside]
        result = []
        for dim, axes in enumerate(tiling):
            if dim in keep:
                result.append(axes)
                continue
            moved = []
            for axis in axes:
                if axis not in inside:
                    moved.append(axis)
                    continue
                match = next((s for s in spare if self.subaxes.sizes[s] == self.subaxes.sizes[axis]), None)
                if match is not None:
                    spare.remove(match)
                    moved.append(match)
            result.append(tuple(moved))
        return tuple(result)

    def _index_order(self) -> list[int]:
        vector = self.op.attrs["index_vector_dim"]
        rank = len(self.types[1].shape)
        batched = [i for _, i, _ in self.batch]
        first = [vector] if vector < rank else []
        return first + [dim for dim in range(rank) if dim != vector and dim not in batched] + batched

    def _window_order(self, window: _Array) -> list[int]:
        through = [w for _, w in self.passthrough]
        return [dim for dim in range(len(window.shape)) if dim not in through] + through

    @staticmethod
    def _nothing(array: _Array) -> Tiling:
        return ((),) * len(array.shape)

    def _bytes(self, shape: Shape, tiling: Tiling, dtype: str) -> int:
        return math.prod(self.subaxes.shard(shape, tiling)) * bytes_of(dtype)
