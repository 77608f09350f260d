"""Transposes and reversals that a TPU's compiler folds into convolutions before it partitions.

They become dimension numbers and window attributes of the convolution (`AlgebraicSimplifier`), so a forward convolution
and the gradient of its input read one kernel, gathered once for both. Where both are windowed einsums (`looped.py`),
they share the first permute.

A value that is gathered for several contractions takes part in no windowed einsum, if they ask for one sharding of it:
not so where one result is sharded as its weight, the other as the operand that both read (a gated layer with only its
weights sharded). `GetShardingFromUser` (xla/service/sharding_propagation.cc) does not know what a convolution that
slides over its input asks for, so those never count.
"""

from __future__ import annotations

from autoshard.cost.machine.compute import CONTRACTIONS
from autoshard.cost.partitioner.context import Context
from autoshard.cost.partitioner.tiling import Tiling
from autoshard.graph.ops import Op, Value

Dim = tuple[int, ...]

AGGRESSIVE = 3
"""The level of aggressiveness at which users are asked."""


def source_of(context: Context, op: Op, place: int) -> tuple[Value, Dim, int]:
    """Operand `place` of a convolution after folding: (the value, its dim for each dim read, the op that reads it).

    Annotated values and reversals of a split dim are not folded. While a plan is sought shardings are unknown: every
    transpose and reversal counts as folded.
    """
    value, reader = op.operands[place], op.id
    dims = tuple(range(len(context.graph.type_of(value).shape)))
    if not context.compiler.folds_into_convolutions or op.kind != "convolution":
        return value, dims, reader
    while context.shardings.copy_read(reader, value) is None:
        maker = context.graph.ops[value.op]
        if maker.kind not in ("transpose", "reverse"):
            break
        before = maker.operands[0]
        order = tuple(maker.attrs["permutation"]) if maker.kind == "transpose" else tuple(range(len(dims)))
        split = context.shardings.made.get(value)
        if split is not None:
            found = context.shardings.read(maker.id, before)
            if split != tuple(found[dim] for dim in order):
                break
            if maker.kind == "reverse" and any(split[dim] for dim in maker.attrs["dims"]):
                break
        value, reader, dims = before, maker.id, tuple(order[dim] for dim in dims)
    return value, dims, reader


def unfolded(tiling: Tiling, dims: Dim) -> Tiling:
    """A tiling of a convolution's operand as one of the value that `source_of` returns, with its `dims`."""
    return tuple(tiling[dims.index(dim)] for dim in range(len(dims)))


class Gathering:
    """Which contractions ask for a value in a sharding that the partitioner knows."""

    def __init__(self, context: Context) -> None:
        """For the program that `context` partitions."""
        self.context = context
        self.readers: dict[Value, list[tuple[Op, int]]] = {}
        for op in context.graph.ops:
            if op.kind in CONTRACTIONS and not self.slides(op):
                for place in range(len(op.operands)):
                    self.readers.setdefault(source_of(context, op, place)[0], []).append((op, place))
        self.asking: dict[Value, dict[Tiling | None, set[int]]] = {}  # value -> sharding -> ops that ask for it

    def slides(self, op: Op) -> bool:
        """Whether a kernel of more than one tap slides over an input."""
        return op.kind == "convolution" and bool(self.context.transfers.contraction(op).spatial)

    def may_loop(self, op: Op) -> tuple[bool, ...]:
        """Per operand whether a windowed einsum may permute it: no other contraction needs it gathered."""
        if self.slides(op):
            return (True,) * len(op.operands)
        return tuple(not self._shared(op, place) for place in range(len(op.operands)))

    def _shared(self, op: Op, place: int) -> bool:
        """Whether another contraction of the same value asks for the same sharding, other than the one it has.

        `check_users_sharding` (xla/service/spmd/dot_handler.cc).
        """
        value, _, reads = source_of(self.context, op, place)
        if all(reader.id == op.id for reader, _ in self.readers[value]):
            return False
        asked = self._asked(op, place)
        if asked is None:
            return True
        if value not in self.asking:
            self.asking[value] = {}
            for reader, at in self.readers[value]:
                self.asking[value].setdefault(self._asked(reader, at), set()).add(reader.id)
        known = self.asking[value]
        if known.get(None, set()) - {op.id}:
            return True
        return bool(known[asked] - {op.id}) and asked != self.context.shardings.read(reads, value)

    def _asked(self, op: Op, place: int) -> Tiling | None:
        """The sharding that a contraction asks of its operand; None while a plan is sought."""
        shardings = self.context.shardings
        made = shardings.made.get(Value(op.id))
        if made is None or any(value not in shardings.made for value in op.operands):
            return None
        reads = [shardings.read(op.id, value) for value in op.operands]
        asked = self.context.transfers.backward(op, place, made, reads, AGGRESSIVE)
        return None if asked is None else unfolded(asked, source_of(self.context, op, place)[1])
