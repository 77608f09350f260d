"""One device's program after partitioning, before fusion: arrays (shards), and the steps that produce them.

Input of the backends. Reshards are steps: a chain of collectives, or a dynamic-slice. Reshapes, barriers and no-ops
share their operand's array (bitcasts), but for reshapes that no tiles of a TPU keep; constant expressions have no array
and are computed in their users.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

from autoshard.cost.compiler.experts import stages
from autoshard.cost.machine.collectives import Collective
from autoshard.cost.machine.compute import BODIES, CONTRACTIONS, body_work, op_flops
from autoshard.cost.machine.targets import CAPABILITIES, Capabilities
from autoshard.cost.machine.tiles import copies_of_gathered, reshapes_in_place
from autoshard.cost.partitioner.partitioned import Attention, Move, OpRun, Partitioned
from autoshard.cost.partitioner.passes.simplify import fold
from autoshard.cost.partitioner.propagate import Shardings
from autoshard.cost.partitioner.tiling import Tiling
from autoshard.dtypes import dtype_bytes
from autoshard.experts.form import GRADIENT
from autoshard.experts.form import KINDS as EXPERTS
from autoshard.fused import KINDS
from autoshard.graph.contraction import Matrices, matrices
from autoshard.graph.groups import BARRIER, ELEMENTWISE, free_ops
from autoshard.graph.indexing import index_dims
from autoshard.graph.ops import Graph, Op, Value
from autoshard.mesh import Mesh

VIEWS = frozenset({"reshape", BARRIER})
"""Kinds whose results are bitcasts of their operands."""

SLICE = "partition_slice"
"""A dynamic-slice of each device's shard out of an array that it holds."""

ROUNDING = "rounding"
"""A TPU's conversion to bf16 of an argument that is gathered for dots (`cost/partitioner/ops/rounded.py`)."""

ATTENTION = "softmax_product"
"""An attention kernel: a softmax and its product with values, of two operands, or of three with the product of queries
and keys (`cost/partitioner/ops/attention.py`)."""

COLLECTIVES = frozenset({"all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"})
END = "end"
"""Kind of a kernel that ends an asynchronous collective."""


SUMS = frozenset({"all-reduce", "reduce-scatter"})

MASKED = frozenset({"dot_general", "reduce"})
"""Kinds that contract or reduce dims: padding of an unevenly split one must not count."""


UPDATES = frozenset({"scatter", "dynamic_update_slice"})
"""Kinds that update their first operand in place."""


REPEATABLE = ELEMENTWISE | {
    "broadcast_in_dim", "transpose", "reduce", "slice", "concatenate", "pad", "gather", "dot_general", "convolution",
}  # fmt: skip
"""Kinds of which equal steps are computed once."""


@dataclass(slots=True, eq=False)
class Array:
    """One device's shard of a value, or of an intermediate between collectives of a reshard.

    Attributes:
        shape: of the shard; None between two collectives of one reshard, where only the size is known.
        bytes: without padding of layouts.
        maker: number of the producer; -1 for an argument.
        readers: numbers of its users, each once, ascending.
        returned: whether it is a result of the program.
        donated: whether it also aliases the donated argument that it updates.
        strips: positions per strip of an activation after space-to-batch on TPU
            (`cost/compiler/tpu/strip_widths.py`); 0 without it.
        tile_dims: the dims that a TPU's layout has in tiles; None: those with least padding.
        tiles: of an operand of a TPU's convolution, its layout's tiles; of all others 0.
        logical: shape of an operand of a TPU's convolution, whose layout has another; of all others None.
    """

    shape: tuple[int, ...] | None
    dtype: str
    bytes: int
    maker: int
    readers: list[int] = field(default_factory=list)
    returned: bool = False
    donated: bool = False
    strips: int = 0
    tiles: int = 0
    tile_dims: tuple[int, int] | None = None
    logical: tuple[int, ...] | None = None

    @property
    def elements(self) -> int:
        """Number of elements."""
        shape = self.logical if self.shape is None else self.shape
        return self.bytes // dtype_bytes(self.dtype) if shape is None else math.prod(shape)


@dataclass(slots=True, eq=False)
class Step:
    """One instruction of a device's program.

    Attributes:
        kind: StableHLO kind, collective kind, or `SLICE`.
        op: the graph op that it implements.
        reads, writes: numbers of arrays; `reads` in operand order, without constant expressions.
        flops: of contractions, per device.
        collective: of collectives, its kind, axes and bytes.
        dim: of an all-gather or reduce-scatter its dim, if it is a single one.
        values: of graph ops, the values whose shards are `reads`.
        inner: of loops and branches, bytes per device that their bodies read and write, and their kernels.
        parts: of the permutes of a windowed einsum, their number.
        turns: of an attention kernel, how often it reads keys and values.
        shapes: of a `dot_general`, a convolution or an attention, local operand shapes as it reads them; the operand's
            array may have another shape through a bitcast. Of a convolution also that of its result.
    """

    kind: str
    op: int
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    flops: float = 0.0
    collective: Collective | None = None
    dim: int | None = None
    values: tuple[Value, ...] = ()
    inner: tuple[float, float] = (0.0, 0.0)
    parts: int = 1
    turns: int = 0
    shapes: tuple[tuple[int, ...], ...] = ()


@dataclass(slots=True)
class Lowered:
    """A device's program.

    Attributes:
        arrays, steps: steps in program order.
        results: the arrays of its results, in order.
        graph: the graph that it implements.
        pinned: annotated values, whose shape no pass changes before partitioning.
        updates: result -> the argument that it aliases.
        mesh: what its collectives run over; None for a program that only stands for one.
    """

    arrays: list[Array]
    steps: list[Step]
    results: list[int]
    graph: Graph
    pinned: Set[Value] = frozenset()
    updates: Mapping[int, int] = field(default_factory=dict)
    mesh: Mesh | None = None


def updates_of(program: Lowered, step: Step) -> Array:
    """A scatter's updates; constant ones, which have no array, count as large as its operand."""
    if not step.values or step.values[-1] == program.graph.ops[step.op].operands[-1]:
        return program.arrays[step.reads[-1]]
    kind = program.graph.type_of(program.graph.ops[step.op].operands[-1])
    return Array(kind.shape, kind.dtype, math.prod(kind.shape) * dtype_bytes(kind.dtype), -1)


def matrices_of(program: Lowered, step: Step) -> Matrices:
    """The local matrices of a `dot_general`."""
    lhs, rhs = step.shapes
    return matrices(lhs, rhs, program.graph.ops[step.op].attrs)


def lower(
    graph: Graph, shardings: Shardings, partitioned: Partitioned, compiler: Capabilities = CAPABILITIES["gpu"]
) -> Lowered:
    """The steps of one device for a partitioned program.

    Args:
        compiler: where it keeps barriers, an `optimization_barrier` is a step, which keeps equal ops on both sides
            apart and which the ops after it wait for. XLA's CPU compiler removes barriers before its last CSE and
            scheduling, which undoes rematerialisation.
    """
    return _Lowering(graph, shardings, partitioned, compiler).run()


def shared_indices(graph: Graph) -> frozenset[int]:
    """Joined indices, with a number for each dim, of the shapes that both gathers and scatters read."""
    of: dict[tuple[int, ...], list[Op]] = {}
    for op in graph.ops:
        if op.kind == "concatenate" and op.results[0].dtype[:1] in ("i", "u"):
            of.setdefault(op.results[0].shape, []).append(op)
    found: set[int] = set()
    for alike in of.values():
        readers = {reader.kind for op in alike for reader in graph.readers(Value(op.id))}
        if {"gather", "scatter"} <= readers:
            found.update(op.id for op in alike)
    return frozenset(found)


class _Lowering:
    def __init__(self, graph: Graph, shardings: Shardings, partitioned: Partitioned, compiler: Capabilities) -> None:
        self.graph, self.shardings, self.partitioned, self.compiler = graph, shardings, partitioned, compiler
        self.updates: dict[int, int] = {}  # result -> the argument that it aliases
        self.last_barrier: dict[Value, int] = {}  # value -> the last barrier before it
        self.numbers: dict[Hashable, tuple[int, ...]] = {}  # key of a step -> its results
        self.names: dict[Value, Hashable] = {}  # constant expressions -> their keys
        self.known: dict[Hashable, int] = {}
        self.arrays: list[Array] = []
        self.steps: list[Step] = []
        self.of: dict[Value, int | None] = {}  # value -> its producer's array; None without one
        self.copies: dict[int, int | None] = {}
        self.moved: dict[Hashable, int] = {}
        self.masks: dict[tuple[int, tuple[int, ...]], int] = {}
        self.factors: dict[int, list[int | None]] = {}  # dot -> its operands
        self.converted: set[Value] = set()  # results of conversions that `_retiled` makes
        self.absorbed: dict[int, list[int | None]] = {}  # op -> operands of those merged into it
        self.free = free_ops(graph)
        if compiler.stores_shared_indices:
            self.free -= shared_indices(graph)
        self.folded = fold(graph)
        self.copies_of: dict[Value, list[int]] = {}
        for number, copy in enumerate(shardings.copies):
            self.copies_of.setdefault(copy.value, []).append(number)

    def run(self) -> Lowered:
        for op in self.graph.ops:
            results = [Value(op.id, i) for i in range(len(op.results))]
            if op.kind == "argument":
                for value in results:
                    self.of[value] = self._array(value, -1)
            elif op.id in self.free or all(value in self.folded.splat for value in results):
                self._name(op, results)
            else:
                self._op(op.id, results)
            for value in results if self.copies_of else ():
                for number in self.copies_of.get(value, ()):
                    self._copy(value, number)
        made = self._outputs()
        pinned = frozenset(self.shardings.pins)
        return Lowered(self.arrays, self.steps, made, self.graph, pinned, self.updates, self.shardings.subaxes.mesh)

    def _array(self, value: Value, maker: int, tiling: Tiling | None = None) -> int:
        kind = self.graph.type_of(value)
        split = self.shardings.made[value] if tiling is None else tiling
        shape = self.shardings.subaxes.shard(kind.shape, split)
        self.arrays.append(Array(shape, kind.dtype, math.prod(shape) * dtype_bytes(kind.dtype), maker))
        return len(self.arrays) - 1

    def _step(
        self, kind: str, op: int, reads: Sequence[int], writes: Sequence[int], flops: float = 0.0, **more: object
    ) -> None:
        number = len(self.steps)
        for array in dict.fromkeys(reads):
            self.arrays[array].readers.append(number)
        for array in writes:
            self.arrays[array].maker = number
        self.steps.append(Step(kind, op, tuple(reads), tuple(writes), flops, **more))  # type: ignore[arg-type]

    def _found(self, op: int | None, value: Value) -> int | None:
        """The array of `value` that an op finds: the producer's, or an annotated copy."""
        copy = self.shardings.copy_read(op, value) if self.copies_of else None
        return self.of[value] if copy is None else self.copies.get(copy, self.of[value])

    def _op(self, number: int, results: list[Value]) -> None:
        op, run = self.graph.ops[number], self.partitioned.runs[number]
        reads = [self._found(number, value) for value in op.operands]
        taken = 0
        for move in run.moves:
            source = reads[move.place]
            taken += len(move.collectives)
            if source is not None and op.operands[move.place] not in self.partitioned.unsummed:
                reads[move.place] = self._move(op.operands[move.place], source, move, number)
        own = run.collectives[taken:]
        self.factors[number] = reads if op.kind == "dot_general" else []
        if number in self.partitioned.unread:
            self.of.update(dict.fromkeys(results))
            return
        attention = self.partitioned.attentions.get(number)
        if attention is not None:
            self._attention(op, attention, reads)
            return
        if op.kind in KINDS:
            self._region(op, reads, results, own, run)
            return
        if op.kind in MASKED:
            self._mask(op, reads, {move.place: move.tiling for move in run.moves}, run.reads)
        if op.kind == BARRIER and self.compiler.keeps_barriers:
            self._barrier(number, results, reads)
            return
        same = self.folded.same.get(results[0])
        place = op.operands.index(same) if same in op.operands else 0 if results[0] in self.converted else None
        if not own and (op.kind in VIEWS or place is not None):
            for i, value in enumerate(results):
                source = i if place is None else place
                self.of[value] = self._view(value, reads[source], number)
                if op.operands[source] in self.last_barrier:
                    self.last_barrier[value] = self.last_barrier[op.operands[source]]
            return
        extra: list[int | None] = []
        later = self.partitioned.joined.get(number)
        if later is not None:
            self.absorbed.setdefault(later, []).extend((*self.absorbed.pop(number, ()), *reads[1:]))
            self.of[results[0]] = None
            return
        if number in self.absorbed:  # operands concatenated with another scatter's
            extra = self.absorbed.pop(number)
            count = next((i for i, each in enumerate(own) if each.kind in SUMS), len(own))
            for collective in own[:count]:
                extra.append(self._concatenation_collective(extra[-1], collective, number))
            own = own[count:]
        if op.kind in UPDATES and reads[0] is None:
            reads[0] = self._filled(op.operands[0], results[0], number, own)
        whole = self._gathered_whole(op, run, results[0]) if op.kind == "gather" and not own else None
        made = self._made(op, reads, results, own, extra, whole)
        if whole is not None:
            parts = [self._array(value, -1) for value in results]
            self._step(SLICE, number, made, parts)
            made = tuple(parts)
        for value, array in zip(results, made, strict=True):
            self.of[value] = array
        if own:
            self.of[results[0]] = self._chain(results[0], made[0], own, self.shardings.made[results[0]], number)

    def _attention(self, op: Op, attention: Attention, reads: Sequence[int | None]) -> None:
        """Emit an attention kernel; equal ones are one."""
        logits, product = attention.logits, attention.product
        before = [self._found(op.id, logits)] if product is None else self.factors[product]
        values = (*((logits,) if product is None else self.graph.ops[product].operands), op.operands[1])
        arrays = [array for array in (*before, reads[1]) if array is not None]
        result = Value(op.id)
        named = tuple((array, self.last_barrier.get(value)) for array, value in zip(arrays, values, strict=True))
        key = (ATTENTION, named, self.shardings.made[result])
        if key not in self.numbers:
            made = self._array(result, -1)
            products = [op.id] if product is None else [product, op.id]
            flops = (op_flops(self.graph.ops[one], self.graph) * self.partitioned.runs[one].share for one in products)
            self._step(ATTENTION, op.id, arrays, (made,), sum(flops), values=values, turns=attention.turns)
            self.numbers[key] = (made,)
        self.of[result] = self.numbers[key][0]

    def _region(
        self, op: Op, reads: Sequence[int | None], results: Sequence[Value], own: Sequence[Collective], run: OpRun
    ) -> None:
        """Emit a manual region: its kernels, and the sums of its partial results."""
        after = [
            [each for each, of in zip(own, run.of_result, strict=True) if of == result]
            for result in range(len(results))
        ]
        made = [self._array(value, -1) for value in results]
        for array, value, collectives in zip(made, results, after, strict=True):
            if collectives:
                size, shape = self._partial(value, collectives)
                self.arrays[array].bytes, self.arrays[array].shape = size, shape or self._scattered(value, collectives)
        flops = op_flops(op, self.graph) * run.share
        if op.kind in EXPERTS:
            self._experts(op, reads, made, run, flops)
        else:
            arrays = [array for array in reads if array is not None]
            self._step(op.kind, op.id, arrays, made, flops, values=op.operands, shapes=self._read(op))
        for array, value, collectives in zip(made, results, after, strict=True):
            tiling = self.shardings.made[value]
            self.of[value] = self._chain(value, array, collectives, tiling, op.id) if collectives else array

    def _experts(
        self, op: Op, reads: Sequence[int | None], made: Sequence[int], run: OpRun, flops: float
    ) -> None:  # fmt: skip
        """The kernels of a mixture's experts, between the barriers of `experts/kernels.py`."""
        kernels = stages(op.kind, self._read(op), apart=self.compiler.fuses_no_gathers)
        found, results = list(reads), list(made)
        if op.kind == GRADIENT and self.compiler.keeps_barriers:
            held = [(place, array) for place in (0, len(reads) - 1) if (array := reads[place]) is not None]
            behind = [self._like(array) for _, array in held]
            self._step(
                BARRIER, op.id, [array for _, array in held], behind, values=tuple(op.operands[p] for p, _ in held)
            )
            for (place, _), array in zip(held, behind, strict=True):
                found[place] = array
            if self.compiler.delays_gradients:
                results = [self._like(array) for array in made]
        named = dict(zip((*kernels.operands, *kernels.results), (*found, *results), strict=True))
        dtype = op.results[0].dtype
        for name, shape in kernels.between.items():
            self.arrays.append(Array(shape, dtype, math.prod(shape) * dtype_bytes(dtype), -1))
            named[name] = len(self.arrays) - 1
        for stage in kernels.stages:
            arrays = [array for name in stage.reads if (array := named[name]) is not None]
            writes = [array for name in stage.writes if (array := named[name]) is not None]
            self._step(op.kind, op.id, arrays, writes, flops * kernels.share * stage.products)
        if results != list(made):
            self._step(BARRIER, op.id, results, made, values=tuple(Value(op.id, i) for i in range(len(made))))

    def _like(self, array: int) -> int:
        """Another array like this one."""
        self.arrays.append(replace(self.arrays[array], maker=-1, readers=[], returned=False, donated=False))
        return len(self.arrays) - 1

    def _concatenation_collective(self, source: int | None, collective: Collective, op: int) -> int:
        """The result of a collective around the concatenation of two scatters' operands."""
        dtype = "f32" if source is None else self.arrays[source].dtype
        self.arrays.append(Array(None, dtype, collective.total_bytes, -1))
        self._step(
            collective.kind, op, () if source is None else (source,), (len(self.arrays) - 1,), collective=collective
        )
        return len(self.arrays) - 1

    def _barrier(self, op: int, results: list[Value], reads: Sequence[int | None]) -> None:
        """Emit a barrier: result i is operand i, of those that are read; XLA drops others.

        One that holds back nothing but arguments and constant expressions is no step.
        """
        held: dict[int, Value] = {}
        for value, operand, source in zip(results, self.graph.ops[op].operands, reads, strict=True):
            if source is not None and self.graph.is_read(value):
                held.setdefault(source, operand)
        behind: dict[int, int] = {}
        if any(self.arrays[source].maker >= 0 for source in held):
            behind = {source: self._like(source) for source in held}
            self._step(BARRIER, op, tuple(held), tuple(behind.values()), values=tuple(held.values()))
        for value, source in zip(results, reads, strict=True):
            self.of[value] = None if source is None else behind.get(source, source)
            self.last_barrier[value] = op

    def _made(
        self,
        op: Op,
        reads: Sequence[int | None],
        results: Sequence[Value],
        own: Sequence[Collective],
        extra: Sequence[int | None] = (),
        tiling: Tiling | None = None,
    ) -> tuple[int, ...]:
        """The arrays of an op's results, before its own collectives; equal steps are one.

        Args:
            extra: further arrays that it reads.
            tiling: of its results at first, if a slice follows.
        """
        tilings = tuple(tiling or self.shardings.made[value] for value in results)
        key: Hashable = None
        if op.kind in REPEATABLE:
            named = tuple(
                self.names.get(value) if array is None else (array, self.last_barrier.get(value))
                for value, array in zip(op.operands, reads, strict=True)
            )
            key = (op.kind, tuple(op.attrs.items()), named, op.results, tilings, own[:1] and own[0].bytes)
            if key in self.numbers:
                return self.numbers[key]
        made = []
        for i, value in enumerate(results):
            array = self._array(value, -1, tiling)
            if i == 0 and own:
                self.arrays[array].bytes, self.arrays[array].shape = self._partial(value, own)
            if i == 0 and not self.partitioned.unsummed.isdisjoint(op.operands):
                self._with_full_size(op, reads[0], self.arrays[array])
            made.append(array)
        share = self.partitioned.runs[op.id].share
        flops = op_flops(op, self.graph) * share if op.kind in CONTRACTIONS | BODIES else 0.0
        held = tuple(value for value, array in zip(op.operands, reads, strict=True) if array is not None)
        arrays = [array for array in (*reads, *extra) if array is not None]
        inner = (0.0, 0.0)
        if op.kind in BODIES:
            size, kernels = body_work(op)
            inner = size * share, kernels
        shapes = self._read(op) if op.kind in ("dot_general", "convolution") else ()
        if op.kind == "convolution":
            shapes = (*shapes, self.shardings.subaxes.shard(op.results[0].shape, tilings[0]))
        self._step(op.kind, op.id, arrays, made, flops, values=held, inner=inner, shapes=shapes)
        if op.kind in REPEATABLE:
            self.numbers[key] = tuple(made)
        return tuple(made)

    def _read(self, op: Op) -> tuple[tuple[int, ...], ...]:
        """Local shapes of an op's operands once resharded."""
        run = self.partitioned.runs[op.id]
        tilings = [*run.reads]
        for move in run.moves:
            tilings[move.place] = move.tiling
        shard, kinds = self.shardings.subaxes.shard, map(self.graph.type_of, op.operands)
        return tuple(shard(kind.shape, tiling) for kind, tiling in zip(kinds, tilings, strict=True))

    def _with_full_size(self, op: Op, read: int | None, made: Array) -> None:
        """Give an op's result on unreduced terms of a later reduce-scatter the terms' full size."""
        term = None if read is None else self.arrays[read].shape
        if term is not None:
            order = op.attrs["permutation"] if op.kind == "transpose" else range(len(term))
            made.shape = tuple(term[dim] for dim in order) if len(order) == len(term) else None  # reshaped
            made.bytes = math.prod(term) * dtype_bytes(made.dtype)

    def _name(self, op: Op, results: Sequence[Value]) -> None:
        """Set the keys of constant expressions: a number, or an op on constant expressions."""
        for i, value in enumerate(results):
            self.of[value] = None
            if value in self.folded.splat:
                self.names[value] = ("splat", repr(self.folded.splat[value]), op.results[i])
            elif op.operands:
                named = tuple(self.names.get(operand, operand) for operand in op.operands)
                self.names[value] = self.known.setdefault(
                    (op.kind, tuple(op.attrs.items()), named, op.results, i), len(self.known)
                )
            else:
                self.names[value] = (op.kind, tuple(op.attrs.items()), op.results, i if op.attrs else value)

    def _gathered_whole(self, op: Op, run: OpRun, result: Value) -> Tiling | None:
        """The tiling of a gather's result before each device slices it; None without a slice.

        Each row spans the operand's row dims as they are sharded: dims that are whole there are sliced afterwards.
        """
        operand = next((move.tiling for move in run.moves if move.place == 0), run.reads[0])
        shapes = [self.graph.type_of(value).shape for value in (*op.operands, result)]
        made = list(self.shardings.made[result])
        for before, after in index_dims(op.kind, op.attrs, shapes[0], shapes[1], shapes[2]).passthrough:
            if self.shardings.subaxes.ways(operand[before]) == 1:
                made[after] = ()
        return None if tuple(made) == self.shardings.made[result] else tuple(made)

    def _filled(self, value: Value, result: Value, op: int, own: Sequence[Collective]) -> int:
        """Emit the array of a constant that is updated in place.

        It has the result's size before the op's collectives (a gradient that is all-reduced).
        """
        array = self._array(value, -1, self.shardings.made[result])
        if own:
            self.arrays[array].bytes, self.arrays[array].shape = self._partial(result, own)
        self._step("broadcast_in_dim", op, (), (array,))
        return array

    def _mask(self, op: Op, reads: list[int | None], moved: Mapping[int, Tiling], read: Sequence[Tiling]) -> None:
        """Mask the padding of unevenly split dims that an op contracts or reduces."""
        for place, dims in enumerate(_summed(op)):
            array = reads[place]
            if array is None:
                continue
            shape = self.graph.type_of(op.operands[place]).shape
            tiling = moved.get(place, read[place])
            uneven = tuple(dim for dim in dims if shape[dim] % self.shardings.subaxes.ways(tiling[dim]))
            if not uneven:
                continue
            if (array, uneven) not in self.masks:
                old = self.arrays[array]
                self.arrays.append(Array(old.shape, old.dtype, old.bytes, -1))
                self.masks[array, uneven] = len(self.arrays) - 1
                self._step("select", op.id, (array,), (len(self.arrays) - 1,))
            reads[place] = self.masks[array, uneven]

    def _view(self, value: Value, source: int | None, op: int) -> int | None:
        """The array of a bitcast: its operand's, a dynamic-slice of that where each device keeps a shard, or a copy."""
        if source is None:
            return None
        kind, before = self.graph.type_of(value), self.arrays[source]
        after = self.shardings.subaxes.shard(kind.shape, self.shardings.made[value])
        size = math.prod(after) * dtype_bytes(kind.dtype)
        if value in self.partitioned.unsummed:
            return source
        if before.bytes > size:
            array = self._array(value, -1)
            self._step(SLICE, op, (source,), (array,))
            return array
        tiled = self.compiler.lays_out_in_tiles and self.graph.ops[op].kind == "reshape" and before.bytes == size
        if tiled and before.shape is not None and not reshapes_in_place(before.shape, after):
            return self._retiled(value, source, op)
        return source

    def _retiled(self, value: Value, source: int, op: int) -> int:
        """A copy in other tiles; converted on the way, if a conversion alone reads it (`ReshapeMover`)."""
        readers = self.graph.readers(value)
        if len(readers) == 1 and readers[0].kind == "convert":
            value = Value(readers[0].id)
            self.converted.add(value)
        array = self._array(value, -1)
        self._step("reshape", op, (source,), (array,))
        return array

    def _size(self, value: Value, tiling: Tiling) -> int:
        kind = self.graph.type_of(value)
        return math.prod(self.shardings.subaxes.shard(kind.shape, tiling)) * dtype_bytes(kind.dtype)

    def _partial(self, value: Value, own: Sequence[Collective]) -> tuple[int, tuple[int, ...] | None]:
        """Bytes and shape of an op's result before its own collectives."""
        first = own[0]
        made = self._size(value, self.shardings.made[value])
        ways = self.shardings.subaxes.mesh.group_size(first.axes)
        size = max(1, first.bytes // ways) if first.kind == "all-gather" else first.total_bytes
        kind = self.graph.type_of(value)
        same = size == made
        return size, self.shardings.subaxes.shard(kind.shape, self.shardings.made[value]) if same else None

    def _scattered(self, value: Value, own: Sequence[Collective]) -> tuple[int, ...] | None:
        """The shape of a region's result before it is reduce-scattered along one dim, which it cuts; else None."""
        ways = self.shardings.subaxes.mesh.group_size(own[0].axes)
        whole = self.graph.type_of(value).shape
        shape = self.shardings.subaxes.shard(whole, self.shardings.made[value])
        cut = [dim for dim, size in enumerate(shape) if size * ways == whole[dim]]
        if own[0].kind != "reduce-scatter" or len(cut) != 1:
            return None
        return tuple(whole[dim] if [dim] == cut else size for dim, size in enumerate(shape))

    def _chain(self, value: Value, source: int, collectives: Sequence[Collective], tiling: Tiling, op: int) -> int:
        """The array after these collectives and, if needed, a dynamic-slice to `tiling`."""
        end = self._size(value, tiling)
        dtype = self.graph.type_of(value).dtype
        if collectives and self._exchanges_halos(op, collectives, end):
            return self._with_halos(value, source, collectives, tiling, op)
        now = source
        for i, collective in enumerate(collectives):
            last = i == len(collectives) - 1
            ways = self.shardings.subaxes.mesh.group_size(collective.axes)
            size = collective.bytes // ways if collective.kind == "reduce-scatter" else collective.total_bytes
            if last and abs(size - end) <= end // 8:
                array = self._array(value, -1, tiling)
            else:
                self.arrays.append(Array(None, dtype, size, -1))
                array = len(self.arrays) - 1
            before, after = self.arrays[now].shape, self.arrays[array].shape
            dim = self._dim(before, after)
            if last and after is None and size <= end:  # a rounded copy
                after = self.shardings.subaxes.shard(self.graph.type_of(value).shape, tiling)
            parts = ways + 1 if collective.count > 1 else 1  # one more permute for the device's own shard
            now = self._rounded(now, collective, op)
            tiled = self.compiler.lays_out_in_tiles and collective.kind == "all-gather"
            made = [self._like(array) for _ in range(copies_of_gathered(before, after) if tiled else 0)] + [array]
            self._step(collective.kind, op, (now,), (made[0],), collective=collective, dim=dim, parts=parts)
            for gathered, copy in itertools.pairwise(made):
                self._step("copy", op, (gathered,), (copy,))
            now = array
        if self.arrays[now].bytes > end:
            array = self._array(value, -1, tiling)
            self._step(SLICE, op, (now,), (array,))
            now = array
        return now

    def _exchanges_halos(self, op: int, collectives: Sequence[Collective], end: int) -> bool:
        """Whether neighbours send parts of an array of `end` bytes; a windowed einsum sends it whole, in turns."""
        if self.graph.ops[op].kind == "dot_general":
            return False
        return all(one.kind == "collective-permute" and one.count == 1 and 2 * one.bytes < end for one in collectives)

    def _with_halos(self, value: Value, source: int, permutes: Sequence[Collective], tiling: Tiling, op: int) -> int:
        """An array with what neighbours send of theirs around it."""
        halos = []
        for permute in permutes:
            self.arrays.append(Array(None, self.graph.type_of(value).dtype, permute.bytes, -1))
            halos.append(len(self.arrays) - 1)
            self._step(permute.kind, op, (source,), (halos[-1],), collective=permute)
        array = self._array(value, -1, tiling)
        self._step("concatenate", op, (source, *halos), (array,))
        return array

    def _rounded(self, source: int, collective: Collective, op: int) -> int:
        """The operand of an all-gather: a bf16 copy of an argument if half of its bytes are gathered."""
        found = self.arrays[source]
        ways = self.shardings.subaxes.mesh.group_size(collective.axes)
        gathered = collective.kind == "all-gather" and 2 * collective.bytes <= found.bytes * ways
        if found.maker >= 0 or not gathered:
            return source
        self.arrays.append(Array(found.shape, "bf16", found.bytes // 2, -1))
        self._step(ROUNDING, op, (source,), (len(self.arrays) - 1,))
        return len(self.arrays) - 1

    @staticmethod
    def _dim(before: tuple[int, ...] | None, after: tuple[int, ...] | None) -> int | None:
        if before is None or after is None or len(before) != len(after):
            return None
        changed = [dim for dim, sizes in enumerate(zip(before, after, strict=True)) if sizes[0] != sizes[1]]
        return changed[0] if len(changed) == 1 else None

    def _move(self, value: Value, source: int, move: Move, op: int) -> int:
        """The array after a reshard; an equal one is reused, unless the compiler gathers again (`ops/gather.py`)."""
        if move.key in self.moved and not move.collectives:
            return self._transposed(value, self.moved[move.key], move.tiling, op)
        self.moved[move.key] = self._chain(value, source, move.collectives, move.tiling, op)
        return self.moved[move.key]

    def _transposed(self, value: Value, found: int, tiling: Tiling, op: int) -> int:
        """An array that was moved for another user, transposed to the order of dims that this one reads."""
        shape = self.shardings.subaxes.shard(self.graph.type_of(value).shape, tiling)
        before = self.arrays[found].shape
        if before is None or before == shape or len(before) != len(shape):
            return found
        array = self._array(value, -1, tiling)
        self._step("transpose", op, (found,), (array,))
        return array

    def _copy(self, value: Value, number: int) -> None:
        copy = self.shardings.copies[number]
        source = self.of[value] if copy.source is None else self.copies[copy.source]
        move = self.partitioned.copied.get(number)
        if source is None or move is None or value in self.partitioned.unsummed:
            self.copies[number] = source
        else:
            self.copies[number] = self._move(value, source, move, value.op)

    def _unpadded(self, value: Value, source: int, collectives: Sequence[Collective]) -> int:
        """A result that is gathered from padded shards, with a slice that drops the padding."""
        whole = ((),) * len(self.graph.type_of(value).shape)
        padded = self._chain(value, source, collectives, whole, value.op)
        array = self._array(value, -1, whole)
        self._step(SLICE, value.op, (padded,), (array,))
        return array

    def _outputs(self) -> list[int]:
        """Mark the program's results; return their arrays."""
        results = []
        own = (number for number, copy in enumerate(self.shardings.copies) if copy.result)
        for value, output in zip(self.graph.outputs, self.graph.program.outputs, strict=True):
            copy = None if output.updates is None else next(own, None)  # prices for the solver have no copies
            found = self._found(None, value) if copy is None else self.copies[copy]
            if found is None or found in self.updates:
                continue
            if self.partitioned.uneven.get(value):
                found = self._unpadded(value, found, self.partitioned.uneven[value])
            results.append(found)
            array = self.arrays[found]
            array.returned = True
            if output.updates is not None and array.maker >= 0:
                array.donated = True
                updated = self.of[Value(self.graph.arguments[output.updates])]
                assert updated is not None
                self.updates[found] = updated
        return results


def _summed(op: Op) -> list[tuple[int, ...]]:
    """Per operand the dims that an op contracts or reduces."""
    if op.kind == "dot_general":
        return [tuple(op.attrs["lhs_contract"]), tuple(op.attrs["rhs_contract"])]
    return [tuple(op.attrs["dims"])] * (len(op.operands) // 2)
