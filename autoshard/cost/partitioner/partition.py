"""GSPMD's partitioner: the collectives of a sharded program, and each device's share of the FLOP.

Propagation gives every operand and result a sharding. Per op this decides which operands to reshard, which local op
runs on the shards, and which partial sums to all-reduce, after XLA's `SpmdPartitioningVisitor`
(xla/service/spmd/spmd_partitioner.cc; GSPMD paper, arXiv:2105.04663, section 4). Contractions are in `ops/dot.py`,
gather and scatter in `ops/index.py`, reshards in `reshard/price.py`.

A value that several users need in one sharding is resharded once: the partitioner caches reshards.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace

from autoshard.cost.machine.collectives import Collective
from autoshard.cost.machine.targets import Target
from autoshard.cost.partitioner.context import Context
from autoshard.cost.partitioner.ops import body, expanded, reorder, rounded, shape
from autoshard.cost.partitioner.ops.aligned import aligned, reduce, rng
from autoshard.cost.partitioner.ops.attention import attentions, unread
from autoshard.cost.partitioner.ops.chained import chained_scatters
from autoshard.cost.partitioner.ops.contraction import contraction, is_transposed
from autoshard.cost.partitioner.ops.gather import KeptGathers, in_whole_mesh
from autoshard.cost.partitioner.ops.index import indexed
from autoshard.cost.partitioner.ops.kernel import Gathering, source_of, unfolded
from autoshard.cost.partitioner.ops.regions import region
from autoshard.cost.partitioner.ops.scatter import is_summed, scatter_later
from autoshard.cost.partitioner.ops.summed import sum_once
from autoshard.cost.partitioner.partitioned import Emission, Move, OpRun, Partitioned, Ring, Tilings
from autoshard.cost.partitioner.propagate import Shardings
from autoshard.cost.partitioner.reshard.emitted import Step
from autoshard.cost.partitioner.tiling import Tiling
from autoshard.cost.passes import Passes
from autoshard.fused import KINDS
from autoshard.graph.ops import Graph, Op, Value
from autoshard.mesh import Spec

Emit = Callable[[Context, Op, Tilings, Tilings], Emission]
"""(context, op, its operands' tilings, its results' wanted tilings) -> its emission."""

EMITTED_BY: Mapping[str, Emit] = {
    "dot_general": contraction,
    "convolution": contraction,
    "reshape": shape.reshape,
    "slice": shape.slice_,
    "pad": shape.pad,
    "concatenate": shape.concatenate,
    "reduce_window": shape.reduce_window,
    "select_and_scatter": shape.select_and_scatter,
    "sort": shape.sort,
    "reverse": shape.reverse,
    "reduce": reduce,
    "rng": rng,
    "gather": indexed,
    "scatter": indexed,
    "while": body.loop,
    "case": body.branches,
    "custom_call": expanded.custom_call,
    **dict.fromkeys(KINDS, region),
}
"""Handlers by kind of op; all other kinds run on aligned shards."""

EXPANDED_BY: Mapping[str, Emit] = {
    "top_k": expanded.top_k,
    "batch_norm_training": expanded.batch_norm,
    "batch_norm_inference": expanded.batch_norm,
    "batch_norm_grad": expanded.batch_norm,
}
"""Handlers of ops that a TPU's compiler expands before it partitions."""

REDUCED_BY: Mapping[Target, Passes[list[OpRun]]] = {
    "cpu": Passes((scatter_later,)),
    "gpu": Passes((scatter_later, sum_once, scatter_later, chained_scatters)),
    "tpu": Passes((scatter_later, sum_once, scatter_later, chained_scatters)),
}
"""Passes over all-reduces once all ops are partitioned, by target."""


def partition(graph: Graph, shardings: Shardings, target: Target) -> Partitioned:
    """The SPMD program that the partitioner of `target` (`cpu`, `tpu` or `gpu`) emits for `graph` under `shardings`."""
    return Partitioner(graph, shardings, target).run()


class Partitioner(Context):
    """One partitioner run over a graph."""

    def __init__(self, graph: Graph, shardings: Shardings, target: Target) -> None:
        """For `graph` as `target`'s compiler partitions it."""
        super().__init__(graph, shardings, target)
        self.memo: dict[Hashable, Emission] = {}
        self.made: set[Hashable] = set()
        self.kept = KeptGathers(graph) if self.compiler.regathers else None
        self.gathering = Gathering(self) if self.compiler.windowed_einsums else None

    def run(self) -> Partitioned:
        """Partition every op, in program order."""
        if self.compiler.fuses_attention:
            self.attentions = attentions(self)
            products = (attention.product for attention in self.attentions.values())
            self.read_unrounded = frozenset({*self.attentions, *(one for one in products if one is not None)})
        runs: list[OpRun] = []
        made: dict[int, Move] = {}
        for op in self.graph.ops:
            runs.append(self._op(op))
            for result in range(len(op.results)):
                for number in self.copies_of.get(Value(op.id, result), ()):
                    move = self._copy(op, number)
                    if move is not None:
                        made[number] = move
        copies = [one for move in made.values() for one in move.collectives]
        uneven = self._uneven_results()
        copies += [one for steps in uneven.values() for one in steps]
        runs = REDUCED_BY[self.target](runs, self)
        return Partitioned(
            tuple(runs),
            tuple(copies),
            made,
            self.joined,
            uneven,
            frozenset(self.unsummed),
            self.attentions,
            unread(self),
        )

    def partition(self, graph: Graph, shardings: Shardings) -> Partitioned:
        """Another program for the same target."""
        return partition(graph, shardings, self.target)

    def _uneven_results(self) -> dict[Value, list[Collective]]:
        """All-gathers of results without annotation whose sharding is uneven (compiled so on all targets).

        Propagation may choose a result's sharding, but one that needs padding is replaced by replication.
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
        # A TPU rounds what only contractions read before the all-gather, here as in `_emit`.
        dtype = "bf16" if rounded.rounds(self, copy.value, number) else kind.dtype
        steps = self.resharder.reshard(kind.shape, dtype, source, target)
        end = self.resharder.destination(kind.shape, dtype, source, target)
        steps = reorder.before_convert(self, copy.value, copy.source, steps)
        made = (key, ((), source, end))
        return Move(0, made, end, tuple(self._once(made, steps, op.id)))

    def _once(self, key: Hashable, steps: Sequence[Step], op: int, reader: int | None = None) -> list[Collective]:
        """The collectives of a move, none if an equal one was emitted before; `reader` is the user it serves."""
        if self.kept is not None and reader is not None and steps and steps[0][0] == "all-gather":
            # An annotated copy stays gathered until its last user.
            if (key in self.made and not self.kept.knows(key)) or self.kept.serves(key, reader):
                return []
        elif key in self.made:
            return []
        self.made.add(key)
        return [self.collective(step, op) for step in steps]

    def _ring_permutes(self, key: Hashable, ring: Ring, steps: Sequence[Step], op: int) -> tuple[Collective, ...]:
        """The permutes of a windowed einsum's operand; loops over the same operand share the first of them."""
        (permute,) = steps
        known = key in self.made
        self.made.add(key)
        return (self.collective(permute, op, ring.parts + (not known)),)

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
        if op.kind in ("dot_general", "convolution"):
            narrow = rounded.rounds(self, Value(op.id), None)
            key = (key, self.may_loop(op), narrow, is_transposed(self, op), op.id in self.read_unrounded)
        if op.kind == "gather":
            key = (key, is_summed(self, op))
        emission = self.memo.get(key)
        if emission is None:
            emission = self.memo[key] = self._emit(op, reads, results)
        if op.kind in ("slice", "reshape") and rounded.rounds(self, Value(op.id), None):
            emission = rounded.halved(emission)
        self.emissions.append(emission)
        if emission.order:
            self.order[op.id] = emission.order
        collectives: list[Collective] = []
        moves: list[Move] = []
        tilings = list(reads)
        for place, move, steps in emission.moves:
            value = op.operands[place]
            if value.op in self.free:
                continue
            end, reader = move[2], op.id
            if move[1] is not None:
                value, dims, reader = source_of(self, op, place)
                move = (move[0], unfolded(move[1], dims), unfolded(end, dims))
            copy = self.shardings.copy_read(reader, value)
            node: Hashable = ("value", value) if copy is None else ("copy", copy)
            if (
                self.compiler.narrows_integers
                and op.kind == "gather"
                and place == 1
                and "64" in self.graph.type_of(value).dtype
            ):
                node = (node, "clamped")  # to 32 bits before it is moved; a scatter's indices are not
            if move[1] is not None:
                steps = reorder.before_convert(self, value, copy, steps)
            if copy is None and move[1] is not None:
                steps = reorder.before_broadcast(self, value, move[1], move[2], steps)
            if self.compiler.regathers and move[1] is not None:
                held = self.shardings.made[value] if copy is None else self.shardings.copied[copy]
                move = in_whole_mesh(move, held)
                end = move[2]
            outer = move[0].outer if isinstance(move[0], Ring) else move[0]
            if move[1] is not None and isinstance(outer, tuple) and len(end) == len(tilings[place]):
                kept = [[axis for axis in axes if axis in outer] for axes in tilings[place]]
                end = tilings[place] = tuple((*own, *axes) for own, axes in zip(kept, end, strict=True))
            if isinstance(move[0], Ring):
                moves.append(
                    Move(place, (node, move, op.id), end, self._ring_permutes((node, move), move[0], steps, op.id))
                )
            else:
                moves.append(Move(place, (node, move), end, tuple(self._once((node, move), steps, op.id, op.id))))
            collectives.extend(moves[-1].collectives)
        if op.id not in self.free:
            collectives.extend(self._own(emission, op.id))
        inner = tuple(replace(each, op=op.id) for each in emission.inner)
        return OpRun(
            tuple(collectives), emission.share, emission.reads, tuple(moves), inner, emission.of_result
        )  # fmt: skip

    def overcounts(self, op: Op) -> bool:
        """Whether XLA sums replicas of the same terms of a convolution, so that its result is wrong."""
        return self.emission(op, self.shardings.made[Value(op.id)]).overcounted

    def emission(self, op: Op, made: Tiling) -> Emission:
        """The emission of an op that reads its operands as they are and produces its one result under `made`."""
        return self._emit(op, tuple(self.shardings.read(op.id, value) for value in op.operands), (made,))

    def op_collectives(
        self, op: Op, reads: Sequence[Spec | None], results: Sequence[Spec]
    ) -> tuple[Collective, ...] | None:
        """The collectives of one op between these shardings; None where XLA would compute wrong results.

        Args:
            reads: per operand; None for one that costs nothing in any sharding.
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
        """The tiling of an operand that is free in any sharding: the result's if the shapes agree, else replicated."""
        shape = self.graph.type_of(op.operands[place]).shape
        return made[0] if op.results[0].shape == shape else self.nothing(shape)

    def may_loop(self, op: Op) -> tuple[bool, ...]:
        """Whether no other contraction needs an operand gathered."""
        return (False,) * len(op.operands) if self.gathering is None else self.gathering.may_loop(op)

    def _emit(self, op: Op, reads: Tilings, results: Tilings) -> Emission:
        if not results:
            return Emission((), (), 1.0, reads)
        if not op.operands:
            return Emission((), (), self.share(op, results[0]), reads)
        emit = EMITTED_BY.get(op.kind, aligned)
        if self.compiler.splits_top_k_and_norms:
            emit = EXPANDED_BY.get(op.kind, emit)
        return aligned(self, op, reads, results) if "outer" in op.attrs else emit(self, op, reads, results)
