"""What GSPMD's partitioner makes of a sharded program: collectives, and each device's share of the work.

Per op, from the shardings that propagation gave its operands and results: which operands are resharded first, how the
op runs on the parts, which partial results are summed. This follows XLA's `SpmdPartitioningVisitor`
(xla/service/spmd/spmd_partitioner.cc; GSPMD paper, arXiv:2105.04663, section 4). Contractions are in `ops/dot.py`,
gather and scatter in `ops/index.py`, reshards in `reshard/price.py`.

A value resharded twice to the same sharding is resharded once: the partitioner keeps what it has made.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

from autoshard.cost.machine.collectives import Collective
from autoshard.cost.machine.device import Target
from autoshard.cost.machine.layout import sums_whole
from autoshard.cost.partitioner import tpu as tiles_tpu
from autoshard.cost.partitioner.emission import Emission
from autoshard.cost.partitioner.ops import body as spmd_body
from autoshard.cost.partitioner.ops import expanded as spmd_expanded
from autoshard.cost.partitioner.ops import reorder as spmd_reorder
from autoshard.cost.partitioner.ops import rounded as spmd_rounded
from autoshard.cost.partitioner.ops import shape as spmd_shape
from autoshard.cost.partitioner.ops.attention import Attention, attentions, unread
from autoshard.cost.partitioner.ops.chained import chained_scatters
from autoshard.cost.partitioner.ops.contraction import contraction, is_transposed, may_loop
from autoshard.cost.partitioner.ops.gather import KeptGathers, in_whole_mesh
from autoshard.cost.partitioner.ops.halo import Moved
from autoshard.cost.partitioner.ops.index import IndexPartitioner
from autoshard.cost.partitioner.ops.kernel import Gathering, source_of, turned
from autoshard.cost.partitioner.ops.looped import Ring
from autoshard.cost.partitioner.ops.scatter import Cuts, Dim, is_summed, scatter_later
from autoshard.cost.partitioner.ops.summed import sum_once
from autoshard.cost.partitioner.propagate import Shardings
from autoshard.cost.partitioner.reshard.emitted import Resharder, Step
from autoshard.cost.partitioner.reshard.steps import Cut
from autoshard.cost.partitioner.tiling import Subaxes, Tiling
from autoshard.cost.partitioner.transfer import Transfers
from autoshard.dtypes import dtype_bytes
from autoshard.graph.groups import ELEMENTWISE, free_ops
from autoshard.graph.ops import Graph, Op, Value
from autoshard.mesh import AxisGroup, Spec

Shape = tuple[int, ...]


@dataclass(frozen=True)
class OpRun:
    """How one op runs.

    Attributes:
        collectives: what is emitted for it: reshards of its operands, sums of partial results.
        share: its FLOPs on one device, as a part of the whole op's (1 where every device computes everything).
        reads: per operand the tiling that it reads once resharded.
        moves: the operands that are resharded first; their collectives are the first of `collectives`, in order.
        overcounted: whether XLA sums over devices that hold the same terms: its numbers are wrong.
        inner: what is emitted inside the bodies of a loop or branch.
    """

    collectives: tuple[Collective, ...]
    share: float
    reads: tuple[Tiling, ...]
    moves: tuple[Move, ...] = ()
    overcounted: bool = False
    inner: tuple[Collective, ...] = ()


@dataclass(frozen=True)
class Move:
    """A reshard of what an op reads, or of a value into an annotated copy.

    Attributes:
        place: which operand.
        key: names the array that comes out; moves with equal keys give one array, made by the first of them.
        tiling: how that array is split.
        collectives: what the reshard takes; none where it is a slice, or where it was made before.
    """

    place: int
    key: Hashable
    tiling: Tiling
    collectives: tuple[Collective, ...]


@dataclass(frozen=True)
class Partitioned:
    """A partitioned program.

    Attributes:
        runs: one per op, in program order.
        copies: collectives of annotated copies (a reshard from the value to its annotation).
        copied: copy number -> how the copy is made; absent where it is the value itself.
        joined: op -> the later one that it is part of (`ops/chained.py`).
        uneven: results that are gathered whole because their parts are not even, and by what.
        unsummed: values that stay whole terms of a sum until that is scattered: a slice of one comes after that.
        attentions: products that become one kernel with the softmax before them -> what of (`ops/attention.py`).
        unread: ops that nothing is left to read for these kernels.
    """

    runs: tuple[OpRun, ...] = field(repr=False)
    copies: tuple[Collective, ...] = field(repr=False)
    copied: Mapping[int, Move] = field(repr=False, default_factory=dict)
    joined: Mapping[int, int] = field(repr=False, default_factory=dict)
    uneven: Mapping[Value, Sequence[Collective]] = field(repr=False, default_factory=dict)
    unsummed: Set[Value] = field(repr=False, default_factory=frozenset)
    attentions: Mapping[int, Attention] = field(repr=False, default_factory=dict)
    unread: Set[int] = field(repr=False, default_factory=frozenset)

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """All of them, in program order."""
        return (*(one for run in self.runs for one in (*run.collectives, *run.inner)), *self.copies)


def partition(graph: Graph, shardings: Shardings, target: Target) -> Partitioned:
    """What the partitioner of `target` (`cpu`, `tpu` or `gpu`) emits for `graph` under `shardings`."""
    return Partitioner(graph, shardings, target).run()


class Partitioner:
    """One run over a graph; what `ops/shape.py` and `ops/index.py` share of it is public."""

    def __init__(self, graph: Graph, shardings: Shardings, target: Target) -> None:
        """For `graph` as `target`'s compiler partitions it."""
        self.graph = graph
        self.shardings = shardings
        self.subaxes: Subaxes = shardings.subaxes
        self.target = target
        self.transfers = Transfers(graph, self.subaxes)
        self.resharder = Resharder(self.subaxes, target)
        self.free = free_ops(graph)
        self.cuts = Cuts(self.subaxes, target)
        self.memo: dict[Hashable, Emission] = {}
        self.emissions: list[Emission] = []
        self.order: dict[int, Dim] = {}
        self.joined: dict[int, int] = {}
        self.unsummed: set[Value] = set()
        self.made: set[Hashable] = set()
        self.kept = KeptGathers(graph) if target == "tpu" else None
        self.collectives: list[Collective] = []
        self.gathering = Gathering(self) if target == "tpu" else None
        self.attentions: Mapping[int, Attention] = {}
        self.read_unrounded: frozenset[int] = frozenset()  # products whose operands kernels of attention read too
        self.copies_of: dict[Value, list[int]] = {}
        for number, copy in enumerate(shardings.copies):
            self.copies_of.setdefault(copy.value, []).append(number)

    def run(self) -> Partitioned:
        """Partition every op, in program order."""
        if self.target == "tpu":
            self.attentions = attentions(self)
            products = (attention.product for attention in self.attentions.values())
            self.read_unrounded = frozenset({*self.attentions, *(one for one in products if one is not None)})
        runs: list[OpRun] = []
        copied: dict[Value, list[int]] = {}
        for number, copy in enumerate(self.shardings.copies):
            copied.setdefault(copy.value, []).append(number)
        made: dict[int, Move] = {}
        for op in self.graph.ops:
            runs.append(self._op(op))
            for result in range(len(op.results)):
                for number in copied.get(Value(op.id, result), ()):
                    move = self._copy(op, number)
                    if move is not None:
                        made[number] = move
        copies = [one for move in made.values() for one in move.collectives]
        uneven = self._uneven_results()
        copies += [one for steps in uneven.values() for one in steps]
        scatter_later(self, runs)
        if self.target != "cpu":
            sum_once(self, runs)
            scatter_later(self, runs)
            chained_scatters(self, runs)
        return Partitioned(
            tuple(runs),
            tuple(copies),
            made,
            self.joined,
            uneven,
            frozenset(self.unsummed),
            self.attentions,
            unread(self.graph, self.attentions),
        )

    def _uneven_results(self) -> dict[Value, list[Collective]]:
        """Results that no annotation holds are gathered where their parts would be uneven (compiled so on all targets).

        Propagation may choose a result's sharding, but one that pads is given up for none at all.
        """
        found: dict[Value, list[Collective]] = {}
        for value, output in zip(self.graph.outputs, self.graph.program.outputs, strict=True):
            if output.updates is not None or value.op in self.free:
                continue
            kind = self.graph.type_of(value)
            source = self.shardings.read(None, value)
            if all(size % self.subaxes.ways(dim) == 0 for size, dim in zip(kind.shape, source, strict=True)):
                continue
            copy = self.shardings.copy_read(None, value)
            node = ("value", value) if copy is None else ("copy", copy)
            whole = self.nothing(kind.shape)
            steps = self.resharder.reshard(kind.shape, kind.dtype, source, whole)
            found[value] = self._once((node, ((), source, whole)), steps, value.op)
        return found

    def _copy(self, op: Op, number: int) -> Move | None:
        copy = self.shardings.copies[number]
        kind = self.graph.type_of(copy.value)
        key: Hashable
        if copy.source is None:
            source, key = self.shardings.made[copy.value], ("value", copy.value)
        else:
            source, key = self.shardings.copied[copy.source], ("copy", copy.source)
        target = self.shardings.copied[number]
        if source == target or op.id in self.free:
            return None
        # A TPU rounds before it gathers what only contractions read, here as in `_emit`.
        dtype = "bf16" if spmd_rounded.rounds(self, copy.value, number) else kind.dtype
        steps = self.resharder.reshard(kind.shape, dtype, source, target)
        end = self.resharder.destination(kind.shape, dtype, source, target)
        steps = spmd_reorder.before_convert(self, copy.value, copy.source, steps)
        made = (key, ((), source, end))
        return Move(0, made, end, tuple(self._once(made, steps, op.id)))

    def _once(self, key: Hashable, steps: Sequence[Step], op: int, reader: int | None = None) -> list[Collective]:
        """The collectives of a move that none before it made; `reader` is the op that it is made for."""
        if self.kept is not None and reader is not None and steps and steps[0][0] == "all-gather":
            # An annotated copy holds what was gathered for it until its last reader.
            if (key in self.made and not self.kept.knows(key)) or self.kept.serves(key, reader):
                return []
        elif key in self.made:
            return []
        self.made.add(key)
        return [self.collective(step, op) for step in steps]

    def _around(self, key: Hashable, ring: Ring, steps: Sequence[Step], op: int) -> tuple[Collective, ...]:
        """The permutes of a loop over an operand; the first of them is shared with other loops over it."""
        (permute,) = steps
        known = key in self.made
        self.made.add(key)
        return (self.collective(permute, op, ring.parts + (not known)),)

    def collective(self, step: Step, op: int, count: int = 1) -> Collective:
        """A step that an op needs, so many times."""
        kind, axes, size = step
        return Collective(kind, axes, size, count, op)

    def _own(self, emission: Emission, op: int) -> list[Collective]:
        """An op's own collectives."""
        found = [self.collective(step, op) for step in emission.own]
        if emission.rounds is not None:
            place, rounds = emission.rounds
            found[place] = replace(found[place], count=rounds)
        return found

    def _op(self, op: Op) -> OpRun:
        reads = tuple(self.shardings.read(op.id, value) for value in op.operands)
        results = tuple(self.shardings.made[Value(op.id, r)] for r in range(len(op.results)))
        shapes = tuple(self.graph.type_of(value) for value in op.operands)
        key: Hashable = (op.kind, shapes, op.results, tuple(op.attrs.items()), reads, results)
        if self.target == "tpu" and op.kind in ("dot_general", "convolution"):
            rounded = spmd_rounded.rounds(self, Value(op.id), None)
            key = (key, may_loop(self, op), rounded, is_transposed(self, op), op.id in self.read_unrounded)
        if self.target == "tpu" and op.kind == "gather":
            key = (key, is_summed(self, op))
        emission = self.memo.get(key)
        if emission is None:
            emission = self.memo[key] = self._emit(op, reads, results)
        if op.kind in ("slice", "reshape") and spmd_rounded.rounds(self, Value(op.id), None):
            emission = spmd_rounded.halved(emission)
        self.emissions.append(emission)
        if emission.order:
            self.order[op.id] = emission.order
        collectives: list[Collective] = []
        moves: list[Move] = []
        for place, move, steps in emission.moves:
            value = op.operands[place]
            if value.op in self.free:
                continue
            end, reader = move[2], op.id
            if move[1] is not None:
                value, dims, reader = source_of(self, op, place)
                move = (move[0], turned(move[1], dims), turned(end, dims))
            copy = self.shardings.copy_read(reader, value)
            node: Hashable = ("value", value) if copy is None else ("copy", copy)
            if self.target == "tpu" and op.kind == "gather" and place == 1 and "64" in self.graph.type_of(value).dtype:
                node = (node, "clamped")  # to 32 bits before it is moved; a scatter's indices are not
            if move[1] is not None:
                steps = spmd_reorder.before_convert(self, value, copy, steps)
            if copy is None and move[1] is not None:
                steps = spmd_reorder.before_broadcast(self, value, move[1], move[2], steps)
            if self.target == "tpu" and move[1] is not None:
                held = self.shardings.made[value] if copy is None else self.shardings.copied[copy]
                move = in_whole_mesh(move, held)
                end = move[2]
            if isinstance(move[0], Ring):
                moves.append(Move(place, (node, move, op.id), end, self._around((node, move), move[0], steps, op.id)))
            else:
                moves.append(Move(place, (node, move), end, tuple(self._once((node, move), steps, op.id, op.id))))
            collectives.extend(moves[-1].collectives)
        if op.id not in self.free:
            collectives.extend(self._own(emission, op.id))
        inner = tuple(replace(each, op=op.id) for each in emission.inner)
        return OpRun(tuple(collectives), emission.share, emission.reads, tuple(moves), emission.overcounted, inner)

    def emission(self, op: Op, made: Tiling) -> Emission:
        """What an op takes that makes its one result under `made`, and reads its operands as they are."""
        return self._emit(op, tuple(self.shardings.read(op.id, value) for value in op.operands), (made,))

    def alone(self, op: Op, reads: Sequence[Spec | None], results: Sequence[Spec]) -> tuple[Collective, ...] | None:
        """What one op takes whose operands and results have these shardings; None where its numbers would be wrong.

        Args:
            reads: per operand; None for one that is free in any sharding.
        """
        made = tuple(self.subaxes.tiling(spec) for spec in results)
        found = tuple(
            self.subaxes.tiling(spec) if spec is not None else self._as_result(op, place, made)
            for place, spec in enumerate(reads)
        )
        emission = self._emit(op, found, made)
        if emission.overcounted:
            return None
        moves = [
            self.collective(step, op.id, move[0].parts + 1 if isinstance(move[0], Ring) else 1)
            for place, move, steps in emission.moves
            if reads[place] is not None
            for step in steps
        ]
        return (*moves, *self._own(emission, op.id), *emission.inner)

    def _as_result(self, op: Op, place: int, made: Sequence[Tiling]) -> Tiling:
        """The sharding of an operand that costs nothing in any: the result's, where it looks like one."""
        shape = self.graph.type_of(op.operands[place]).shape
        return made[0] if op.results[0].shape == shape else self.nothing(shape)

    # ---- kinds -------------------------------------------------------------------------------------------------

    def _emit(self, op: Op, reads: tuple[Tiling, ...], results: tuple[Tiling, ...]) -> Emission:
        if not results:
            return Emission((), (), 1.0, reads)
        if not op.operands:
            return Emission((), (), self.share(op, results[0]), reads)
        kind = op.kind
        if kind in ("dot_general", "convolution") and "outer" not in op.attrs:
            return contraction(self, op, reads, results[0])
        if kind == "reshape":
            return spmd_shape.reshape(self, op, reads[0], results[0])
        if kind == "slice":
            return spmd_shape.slice_(self, op, reads[0], results[0])
        if kind == "pad":
            return spmd_shape.pad(self, op, reads, results[0])
        if kind == "concatenate":
            return spmd_shape.concatenate(self, op, reads, results[0])
        if kind == "reduce_window":
            return spmd_shape.reduce_window(self, op, reads, results)
        if kind == "select_and_scatter":
            return spmd_shape.select_and_scatter(self, op, reads, results[0])
        if kind == "sort":
            return spmd_shape.sort(self, op, reads, results)
        if kind == "reverse":
            return spmd_shape.reverse(self, op, reads[0], results[0])
        if kind == "reduce":
            return self._reduce(op, reads, results)
        if kind == "rng":
            return self._rng(op, reads, results[0])
        if kind == "top_k" and self.target == "tpu":
            return spmd_expanded.top_k(self, op, reads, results[0])
        if kind.startswith("batch_norm_") and self.target == "tpu":
            return spmd_expanded.batch_norm(self, op, reads, results)
        if kind in ("gather", "scatter"):
            return IndexPartitioner(self, op, reads, results[0]).emit()
        if kind == "while":
            return spmd_body.loop(self, op, reads, results)
        if kind == "case":
            return spmd_body.branches(self, op, reads, results)
        if kind == "custom_call":
            return spmd_expanded.custom_call(self, op, reads, results)
        if kind in ELEMENTWISE and len(reads) > 1 and all(tiling == reads[0] for tiling in reads[1:]):
            # Operands that agree are not moved; the result is.
            made = op.results[0]
            own = self.resharder.reshard(made.shape, made.dtype, reads[0], results[0])
            return self.moved(op, reads, reads, self.share(op, reads[0]), own)
        wanted = self._wanted(op, reads, results)
        return self.moved(op, reads, wanted, self.share(op, results[0]))

    def _rng(self, op: Op, reads: tuple[Tiling, ...], result: Tiling) -> Emission:
        """`HandleRng`: of the devices that hold one part, one draws it, and an all-reduce hands it to the others."""
        kind = op.results[0]
        used = {axis for dim in result for axis in dim}
        idle = tuple(axis for axis in range(len(self.subaxes.sizes)) if axis not in used)
        size = math.prod(self.subaxes.shard(kind.shape, result)) * dtype_bytes(kind.dtype)
        own: list[Step] = [("all-reduce", self.resharder.names(idle), size)] if idle else []
        return Emission((), tuple(own), self.share(op, result), reads)

    def _wanted(self, op: Op, reads: tuple[Tiling, ...], results: tuple[Tiling, ...]) -> tuple[Tiling, ...]:
        """Per operand the sharding under which the op reads it, for ops that run on aligned parts."""
        kind, result = op.kind, results[0]
        wanted = []
        for place, tiling in enumerate(reads):
            shape = self.graph.type_of(op.operands[place]).shape
            if kind in ELEMENTWISE or kind == "optimization_barrier":
                mine = results[place] if kind == "optimization_barrier" else result
                wanted.append(mine if len(shape) == len(mine) else tiling)
                continue
            dims = self.transfers.dim_map(op, place)
            if dims is None:
                wanted.append(((),) * len(shape))
                continue
            asked: list[tuple[int, ...]] = [()] * len(shape)
            for result_dim, dim in enumerate(dims):
                if dim >= 0:
                    asked[dim] = result[result_dim]
            wanted.append(tuple(asked))
        return tuple(wanted)

    def moved(
        self,
        op: Op,
        reads: tuple[Tiling, ...],
        wanted: tuple[Tiling, ...],
        share: float,
        own: Sequence[Step] = (),
    ) -> Emission:
        """An emission that reshards the operands from `reads` to `wanted`, beside the op's own collectives."""
        moves = []
        for place, (source, target) in enumerate(zip(reads, wanted, strict=True)):
            if source != target:
                kind = self.graph.type_of(op.operands[place])
                steps = self.resharder.reshard(kind.shape, kind.dtype, source, target)
                end = self.resharder.destination(kind.shape, kind.dtype, source, target)
                moves.append((place, ((), source, end), steps))
        return Emission(tuple(moves), tuple(own), share, wanted)

    def share(self, op: Op, tiling: Tiling) -> float:
        """One device's part of an op whose result is made under `tiling`, padding included."""
        shape = op.results[0].shape
        whole = math.prod(shape)
        return math.prod(self.subaxes.shard(shape, tiling)) / whole if whole else 1.0

    @staticmethod
    def nothing(shape: Shape) -> Tiling:
        """The tiling that splits no dim of `shape`."""
        return ((),) * len(shape)

    def permute_axes(self, dim: tuple[int, ...], pairs: Iterable[tuple[int, int]]) -> tuple[str, ...]:
        """The mesh axes along which shards of a dim differ from those they are sent to."""
        moved: set[int] = set()
        for source, target in pairs:
            for axis in reversed(dim):
                size = self.subaxes.sizes[axis]
                if source % size != target % size:
                    moved.add(axis)
                source, target = source // size, target // size
        return self.subaxes.axes(moved)

    def permutes(self, moved: Iterable[Moved], tiling: Tiling, dtype: str) -> list[Step]:
        """The collectives of a halo exchange of an array that is split by `tiling`."""
        return [
            ("collective-permute", self.permute_axes(tiling[one.dim], one.pairs), one.elements * dtype_bytes(dtype))
            for one in moved
        ]

    def sums(
        self, axes: tuple[tuple[int, ...], ...], size: int, cut: Cut | None, row_major: bool = False
    ) -> list[Step]:
        """All-reduces of `size` bytes of partial results, each device going on with its part of `cut`.

        TPU and GPU fold those along several dims into one. Which are reduce-scatters says `ops/scatter.py`; `row_major`
        as in `tiles_tpu.scattered`.
        """
        if not axes:
            return []
        order = self.order_of(axes)
        if self.target != "cpu":
            axes = (order,)
        *first, _ = axes
        steps: list[Step] = [("all-reduce", self.resharder.names(dim), size) for dim in first]
        whole: Step = ("all-reduce", self.resharder.names(order), size)
        return [*steps, *(self.scattered(order, size, cut, True, row_major) or (whole,))]

    def order_of(self, axes: tuple[Dim, ...]) -> Dim:
        """The subaxes of the last all-reduce that sums over `axes`, in the order of its devices.

        That along one dim has them in the order of the dim's tiles, folded ones in that of the mesh.
        """
        if not axes:
            return ()
        last = axes[-1] if self.target == "cpu" else tuple(axis for dim in axes for axis in dim)
        return last if len(axes) == 1 else tuple(sorted(last))

    def scattered(
        self,
        axes: Sequence[int],
        size: int,
        cut: Cut | None,
        ordered: bool,
        row_major: bool = False,
        summed: bool = False,
    ) -> list[Step] | None:
        """The reduce-scatter that a sum of `size` bytes over `axes` is, of which devices go on with parts of `cut`.

        None where it stays an all-reduce. `row_major` and `summed` as in `tiles_tpu.scattered`.
        """
        names = self.resharder.names(axes)
        if cut is None or not self.cuts.scatters(axes, cut, ordered) or not self.scatters_over(names):
            return None
        if self.target != "tpu":
            return [("reduce-scatter", names, size)]
        dim = next(dim for dim, factor in enumerate(cut.factors) if factor > 1)
        unit = tiles_tpu.scatter_unit(names, self.subaxes.mesh)
        ways = cut.factors[dim]
        buffer = tiles_tpu.scatter_buffer(self.subaxes.mesh)
        packed = max(1, 4 * math.prod(cut.shape) // max(1, size))
        found = tiles_tpu.scattered(
            cut.shape, dim, ways, unit=unit, row_major=row_major, summed=summed, buffer=buffer, packed=packed
        )
        if found is None:
            return None
        steps: list[Step] = [("reduce-scatter", names, round(size * found.padded))]
        return [*steps, ("collective-permute", names, round(size * found.moved))] if found.moved else steps

    def scatters_over(self, axes: AxisGroup) -> bool:
        """Whether the target makes reduce-scatters over these axes at all."""
        return self.target != "tpu" or not sums_whole(axes, self.subaxes.mesh)

    def _reduce(self, op: Op, reads: tuple[Tiling, ...], results: tuple[Tiling, ...]) -> Emission:
        """`HandleReduce`: the kept dims follow the result; a split reduced dim leaves partial results to sum."""
        count = len(results)
        inputs = op.operands[:count]
        reduced = op.attrs["dims"]
        shape = self.graph.type_of(inputs[0]).shape
        base = reads[0]
        wanted: list[Tiling] = []
        for place, tiling in enumerate(reads):
            wanted.append(base if 0 < place < count else tiling)
        partial = tuple(axes for dim, axes in enumerate(base) if dim in reduced and axes)
        made_as = tuple(axes for dim, axes in enumerate(base) if dim not in reduced)
        own: list[Step] = []
        kept = tuple(size for dim, size in enumerate(shape) if dim not in reduced)
        for number, result in enumerate(results):
            dtype = op.results[number].dtype
            size = math.prod(self.subaxes.shard(kept, made_as)) * dtype_bytes(dtype)
            if count > 1 and partial:
                for axes in partial:
                    own.append(("all-gather", self.resharder.names(axes), size * self.subaxes.ways(axes)))
            else:
                own.extend(self.sums(partial[::-1], size, self.cuts.cut(kept, made_as, result)))
            if made_as != result:
                own.extend(self.resharder.reshard(kept, dtype, made_as, result))
        whole = math.prod(shape)
        share = math.prod(self.subaxes.shard(shape, base)) / whole if whole else 1.0
        emission = self.moved(op, reads, tuple(wanted), share, own)
        return replace(emission, order=self.order_of(partial[::-1]))
