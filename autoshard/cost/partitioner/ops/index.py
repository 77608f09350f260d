"""GSPMD's handlers of gather and scatter.

This follows `PartitionGather` and `PartitionScatter` of XLA (xla/service/spmd/gather_scatter_handler.cc): it groups
the devices, one grouping after another, by dims that operand and window share (passthrough), by indexed dims of the
operand (each device looks up the indices in its shard and an all-reduce adds the results; a scatter drops the others),
or by dims of the indices. XLA takes batch dims first wherever it can (explicit ones, and those that an iota indexes),
then the grouping with the least memory, then the one with the least communication.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autoshard.cost.partitioner.context import Context
from autoshard.cost.partitioner.ops.scatter import is_summed
from autoshard.cost.partitioner.partitioned import Emission, Tilings
from autoshard.cost.partitioner.reshard.emitted import Step
from autoshard.cost.partitioner.tiling import Tiling, carried
from autoshard.dtypes import dtype_bytes
from autoshard.graph.indexing import index_dims
from autoshard.graph.ops import Op
from autoshard.graph.rules.index import REDUCERS
from autoshard.mesh import Mesh

Dim = tuple[int, ...]
Shape = tuple[int, ...]
Move = tuple[int, tuple[Dim, Tiling, Tiling], tuple[Step, ...]]


@dataclass(frozen=True)
class _Array:
    place: int
    shape: Shape
    tiling: Tiling
    dtype: str


@dataclass(frozen=True)
class _Case:
    """A gather or scatter within a group of devices.

    Attributes:
        window: a gather's result, a scatter's updates.
        devices, outer: the subaxes within the group, and those that number the groups.
    """

    operand: _Array
    indices: _Array
    window: _Array
    devices: Dim
    outer: Dim


@dataclass(frozen=True)
class _Grouping:
    """A grouping of the devices.

    Attributes:
        operand, indices, window: the tilings it needs.
        group: the subaxes that number the groups.
        sums: those over which partial results are all-reduced, per dim.
    """

    operand: Tiling
    indices: Tiling
    window: Tiling
    group: Dim
    sums: tuple[Dim, ...] = ()


@dataclass
class _Outcome:
    """Steps so far.

    Attributes:
        moves: reshards of operands; see `Emission`.
        own: other collectives.
        memory: bytes per device that the local gather or scatter reads and writes.
        local: elements of the window that one device gathers or scatters.
        summed: if the last step of `own` is an all-reduce, its axes in the order of the devices in a replica group.
    """

    moves: list[Move]
    own: list[Step]
    memory: int = 0
    local: int = 0
    summed: Dim | None = None

    def cost(self, mesh: Mesh) -> tuple[int, int]:
        """XLA's criterion: (bytes that the largest op touches, bytes that all collectives send), both per device.

        `EvaluatePartitionCost` of spmd_partitioner_util.h: operands and result, for an all-reduce only its operand; an
        all-reduce sends its operand twice, an all-gather or all-to-all everything but one device's shard.
        """
        memory, sent = self.memory, 0
        for kind, axes, size in (*(step for move in self.moves for step in move[2]), *self.own):
            devices = mesh.group_size(axes)
            if kind in ("all-reduce", "reduce-scatter"):
                memory, sent = max(memory, size), sent + 2 * size
            elif kind == "all-gather":
                memory, sent = max(memory, size + size // devices), sent + size - size // devices
            else:
                moved = size - size // devices if kind == "all-to-all" else size
                memory, sent = max(memory, 2 * size), sent + moved
        return memory, sent


def indexed(context: Context, op: Op, reads: Tilings, results: Tilings) -> Emission:
    """The emission of a gather or scatter whose operands have the tilings `reads`."""
    return IndexPartitioner(context, op, reads, results[0]).emit()


class IndexPartitioner:
    """Plans one gather or scatter; `emit` is the entry."""

    def __init__(self, context: Context, op: Op, reads: Tilings, result: Tiling) -> None:
        """For one op with operand tilings `reads`, whose result is wanted under the tiling `result`."""
        self.context = context
        self.subaxes = context.subaxes
        self.resharder = context.resharder
        self.op = op
        self.reads = reads
        self.result = result
        self.is_gather = op.kind == "gather"
        types = [context.graph.type_of(value) for value in op.operands]
        if context.compiler.narrows_integers and dtype_bytes(types[1].dtype) == 8:
            types[1] = replace(types[1], dtype="i32")  # no 64-bit integers there: it moves the low halves only
        self.types = types
        window = op.results[0].shape if self.is_gather else types[2].shape
        dims = index_dims(op.kind, op.attrs, types[0].shape, types[1].shape, window)
        self.passthrough, self.batch, self.index = dims.passthrough, dims.batch, dims.index
        self.trivial = () if op.attrs.get("sliced") else dims.trivial
        self.devices = tuple(range(len(self.subaxes.sizes)))

    def emit(self) -> Emission:
        """The emission of the op."""
        operand = _Array(0, self.types[0].shape, self.reads[0], self.types[0].dtype)
        indices = _Array(1, self.types[1].shape, self.reads[1], self.types[1].dtype)
        result = self.op.results[0]
        if self.is_gather:
            window = _Array(2, result.shape, self.result, result.dtype)
        else:
            window = _Array(2, self.types[2].shape, self.reads[2], self.types[2].dtype)
        before = _Outcome([], [])
        if self.is_gather and self.op.attrs.get("sliced"):  # GSPMD reshards a dynamic-slice's operand to its result
            as_result = carried(window.tiling, ((into, dim) for dim, into in self.passthrough), len(operand.shape))
            operand = self._moved(before, operand, as_result, ())
        outcome = self._partition(_Case(operand, indices, window, self.devices, ()), recursive=True)
        outcome.moves[:0] = before.moves
        if not self.is_gather:
            self._reshard_made(outcome, operand, self.final, self.result, ())
        whole = math.prod(window.shape)
        share = outcome.local / whole if whole else 1.0
        order = outcome.summed or ()
        return Emission(tuple(outcome.moves), tuple(outcome.own), min(share, 1.0), self.reads, order=order)

    # ---- groupings ---------------------------------------------------------------------------------------------

    def _partition(self, case: _Case, recursive: bool) -> _Outcome:
        if recursive:
            grouping = self._by_batch(case)
            if grouping is not None:
                return self._grouped(case, grouping, True)
            found = [self._by_window(case), self._by_indexed(case), self._by_index(case)]
            ways = [grouping for grouping in found if grouping is not None]
            if ways:
                cheapest = min(ways, key=lambda grouping: self._grouped(case, grouping, False).cost(self.subaxes.mesh))
                return self._grouped(case, cheapest, True)
        outcome = _Outcome([], [])
        operand, indices, window = case.operand, case.indices, case.window
        operand = self._moved(outcome, operand, self._nothing(operand), case.outer)
        indices = self._moved(outcome, indices, self._nothing(indices), case.outer)
        self.final: Tiling = operand.tiling
        if not self.is_gather:
            window = self._moved(outcome, window, self._nothing(window), case.outer)
        outcome.memory = sum(math.prod(each.shape) * dtype_bytes(each.dtype) for each in (operand, indices, window))
        outcome.local = math.prod(window.shape)
        return outcome

    def _by_batch(self, case: _Case) -> _Grouping | None:
        """Group by batch dims, which operand, indices and window share."""
        aligned = self._aligned(case.operand, case.indices, case.devices)
        if aligned is None:
            return None
        operand_as, indices_as = aligned
        rank = len(case.window.tiling)
        looked_up = carried(indices_as, (*self.index, *((i, w) for _, i, w in self.batch)), rank)
        window_as = self.subaxes.merge(looked_up, carried(operand_as, self.passthrough, rank), 1) or looked_up
        group = tuple(axis for _, i, _ in self.batch for axis in indices_as[i])
        return _Grouping(operand_as, indices_as, window_as, group)

    def _aligned(self, operand: _Array, indices: _Array, devices: Dim) -> tuple[Tiling, Tiling] | None:
        """Operand and indices with their shared dims split alike (`GatherScatterOperandsShardedAcrossParallelDims`).

        The one with fewer tiles takes the other's tiling if it has idle devices for it, the operand where both have
        equally many.
        """
        ways = self.subaxes.ways
        on_operand, on_indices = tuple(a for a, _, _ in self.batch), tuple(i for _, i, _ in self.batch)
        of_operand = math.prod(ways(operand.tiling[a]) for a in on_operand)
        of_indices = math.prod(ways(indices.tiling[i]) for i in on_indices)
        if of_operand == of_indices == 1:
            return None
        if not any(indices.tiling):
            return operand.tiling, self._split_like(indices.tiling, on_indices, operand.tiling, on_operand, devices)
        if any(operand.tiling) and of_operand != of_indices:
            more, less = (indices, operand) if of_indices > of_operand else (operand, indices)
            idle = ways(devices) // self.subaxes.tiles(less.tiling)
            for a, i, _ in self.batch:
                many, few = (ways(each.tiling[a if each is operand else i]) for each in (more, less))
                if many % few or idle % (many // few):
                    return None
                idle //= many // few
        if of_operand > of_indices:
            taken = self._split_like(indices.tiling, on_indices, operand.tiling, on_operand, devices)
            return operand.tiling, taken
        return self._split_like(operand.tiling, on_operand, indices.tiling, on_indices, devices), indices.tiling

    def _split_like(
        self, tiling: Tiling, dims: tuple[int, ...], like: Tiling, like_dims: tuple[int, ...], devices: Dim
    ) -> Tiling:
        """`tiling` with `dims` split as `like` splits `like_dims`; other dims move off these axes."""
        wanted = list(tiling)
        for dim, other in zip(dims, like_dims, strict=True):
            wanted[dim] = like[other]
        group = tuple(axis for dim in like_dims for axis in like[dim])
        return self._off_axes(tuple(wanted), set(dims), group, devices)

    def _by_window(self, case: _Case) -> _Grouping | None:
        """Group by dims of the operand that pass through to the window."""
        group = tuple(axis for a, _ in self.passthrough for axis in case.operand.tiling[a])
        if not group:
            return None
        through = carried(case.operand.tiling, self.passthrough, len(case.window.tiling))
        through = self.subaxes.merge(case.window.tiling, through, 1) or through
        return _Grouping(
            case.operand.tiling,
            self._off(case.indices.tiling, group, self._index_order(), case.devices),
            through,
            group,
            (),
        )

    def _by_indexed(self, case: _Case) -> _Grouping | None:
        """Group by indexed dims of the operand (trivially sliced): each device handles the indices in its shard."""
        per_dim = tuple(case.operand.tiling[dim] for dim in self.trivial if case.operand.tiling[dim])
        group = tuple(axis for axes in per_dim for axis in axes)
        if not group:
            return None
        wanted_indices = self._off(case.indices.tiling, group, self._index_order(), case.devices)
        wanted_window = self._off(case.window.tiling, group, self._window_order(case.window), case.devices)
        if any(wanted_indices) and not any(wanted_window):
            asked = carried(case.indices.tiling, self.index, len(case.window.tiling))
            wanted_window = self._off(asked, group, self._window_order(case.window), case.devices)
        elif any(wanted_window) and not any(wanted_indices):
            asked = carried(case.window.tiling, self._of_window(), len(case.indices.tiling))
            wanted_indices = self._off(asked, group, self._index_order(), case.devices)
        sums = per_dim if self.is_gather else ()
        return _Grouping(case.operand.tiling, wanted_indices, wanted_window, group, sums)

    def _by_index(self, case: _Case) -> _Grouping | None:
        """Group by dims of the indices: an all-reduce then adds a scatter's results, if its reducer has an identity."""
        if not self.is_gather and self.op.attrs["reducer"] not in REDUCERS:
            return None
        asked = carried(case.window.tiling, self._of_window(), len(case.indices.tiling))
        before = self.subaxes.tiles(case.indices.tiling)
        better = self.subaxes.merge(asked, case.indices.tiling, before + 1) or case.indices.tiling
        per_dim = tuple(better[i] for i, _ in self.index if better[i])
        group = tuple(axis for axes in per_dim for axis in axes)
        if not group:
            return None
        looked_up = carried(better, self.index, len(case.window.tiling))
        through = self.subaxes.merge(case.window.tiling, looked_up, 1) or looked_up
        order = (*self.trivial, *(a for a, _ in self.passthrough))
        return _Grouping(
            self._off(case.operand.tiling, group, order, case.devices),
            better,
            through,
            group,
            () if self.is_gather else per_dim,
        )

    def _grouped(self, case: _Case, grouping: _Grouping, recursive: bool) -> _Outcome:
        """Apply a grouping: reshard, partition within the groups, all-reduce, and reshard to the wanted result."""
        outcome = _Outcome([], [])
        window, outer, group = case.window, case.outer, grouping.group
        operand = self._moved(outcome, case.operand, grouping.operand, outer)
        indices = self._moved(outcome, case.indices, grouping.indices, outer)
        if self.is_gather:
            inside = replace(window, tiling=grouping.window)
        else:
            inside = self._moved(outcome, window, grouping.window, outer)
        left = tuple(axis for axis in case.devices if axis not in group)
        held = self._within(operand, group)
        parts = (held, self._within(indices, group), self._within(inside, group))
        inner = self._partition(_Case(*parts, left, outer + group), recursive)
        outcome.moves += inner.moves
        outcome.own += inner.own
        outcome.memory = inner.memory
        outcome.local = inner.local
        target = window if self.is_gather else operand
        made_as = grouping.window if self.is_gather else grouping.operand
        size = self._bytes(target.shape, made_as, target.dtype)
        outcome.summed = inner.summed
        if not self.is_gather:  # results within the groups are tiled like the operand
            self._reshard_made(outcome, held, self.final, held.tiling, outer + group)
        if grouping.sums:
            outcome.own.extend(self.context.sums(grouping.sums[::-1], size, None))
            outcome.summed = self.context.order_of(grouping.sums[::-1])
        if self.is_gather:
            self._reshard_made(outcome, window, made_as, window.tiling, outer)
        self.final = grouping.operand
        return outcome

    def _reshard_made(self, outcome: _Outcome, array: _Array, before: Tiling, after: Tiling, outer: Dim) -> None:
        """Reshard a result; an all-reduce right before a slice becomes a reduce-scatter."""
        if before == after:
            return
        cut = self.context.cuts.cut(array.shape, before, after, outer)
        if outcome.summed is not None:
            size, gathers = outcome.own[-1][2], self.is_gather
            scattered = self.context.scattered(
                outcome.summed, size, cut, True, gathers, gathers and is_summed(self.context, self.op)
            )
            outcome.own[-1:] = scattered or (outcome.own[-1],)
        steps = self.resharder.reshard(array.shape, array.dtype, before, after, outer)
        if steps:
            outcome.own.extend(steps)
            outcome.summed = None

    # ---- helpers -----------------------------------------------------------------------------------------------

    def _moved(self, outcome: _Outcome, array: _Array, want: Tiling, outer: Dim) -> _Array:
        if want == array.tiling:
            return array
        steps = self.resharder.reshard(array.shape, array.dtype, array.tiling, want, outer)
        end = self.resharder.destination(array.shape, array.dtype, array.tiling, want, outer)
        outcome.moves.append((array.place, (outer, array.tiling, end), steps))
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
        """`tiling` without the group's axes (`GroupShardingOnReplicatedDim`); idle axes of equal size replace them."""
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
        return self._off_axes(tuple(kept), set(), group, devices)

    def _off_axes(self, tiling: Tiling, keep: set[int], group: Dim, devices: Dim | None = None) -> Tiling:
        """`tiling` with dims not in `keep` moved off the group's axes, to spare ones of the same size or to none."""
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

    def _of_window(self) -> list[tuple[int, int]]:
        """(dim of the window, dim of the indices) of the index batch dims."""
        return [(w, i) for i, w in self.index]

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
        return math.prod(self.subaxes.shard(shape, tiling)) * dtype_bytes(dtype)
