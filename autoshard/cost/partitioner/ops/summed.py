"""One all-reduce for a sum of all-reduced terms: `AllReduceReassociate`, on TPU and GPU.

Also for reduce-scatters, and for all-reduces with equal slices before the add. In program order, so that a sum of
several terms ends with one collective. A GPU also adds terms converted to f32 after their reduction (bf16 products
under autocast) and reduces the f32 sum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autoshard.cost.machine.collectives import Collective
from autoshard.cost.partitioner.context import Context
from autoshard.cost.partitioner.ops.chained import is_annotated
from autoshard.cost.partitioner.ops.contraction import is_transposed
from autoshard.cost.partitioner.partitioned import OpRun
from autoshard.cost.partitioner.tiling import Tiling, across_ones
from autoshard.dtypes import FLOATS, dtype_bytes
from autoshard.graph.groups import unscaled
from autoshard.graph.ops import Graph, Op, Value


@dataclass(frozen=True)
class _Term:
    """An operand of an add, all-reduced by its producer and with no other user.

    Attributes:
        maker: the producer.
        reduction: its last collective, with the bytes of the sum; after a padded reduce-scatter also the permute that
            moves slices into place.
        whole: the values from there to the add if a slice of them is read: partial sums until the sum is reduced.
        reshaped: whether a reshape or transpose stands between them: of two, `ReshapeMover` makes one, of the sum.
    """

    maker: int
    reduction: tuple[Collective, ...]
    whole: tuple[Value, ...]
    reshaped: bool


def sum_once(runs: list[OpRun], context: Context) -> list[OpRun]:
    """Reduce the sum of two reduced values once if it is their only user; changes `runs`."""
    _Summing(context, runs).run()
    return runs


class _Summing:
    def __init__(self, context: Context, runs: list[OpRun]) -> None:
        self.context, self.graph, self.runs = context, context.graph, runs
        self.whole: set[int] = set()  # sums of terms that are sliced
        self.reshaped: set[int] = set()  # sums of reshaped terms

    def run(self) -> None:
        for op in self.graph.ops:
            if op.kind != "add" or self.runs[op.id].collectives or op.operands[0] == op.operands[1]:
                continue
            terms = [term for place in (0, 1) if (term := self._term(op, place)) is not None]
            if len(terms) == 2 and terms[0].maker != terms[1].maker and len(set(map(self._kind, terms))) == 1:
                self._join(op, terms)

    def _kind(self, term: _Term) -> tuple[object, ...]:
        """What terms must have in common to share a reduction."""
        what = tuple((one.kind, one.axes, one.bytes) for one in term.reduction)
        return what, self.context.order.get(term.maker), not term.whole, term.reshaped

    def _join(self, op: Op, terms: Sequence[_Term]) -> None:
        first = terms[0]
        if first.maker in self.context.order:
            self.context.order[op.id] = self.context.order[first.maker]
        if first.whole:
            self.whole.add(op.id)
        if first.reshaped:
            self.reshaped.add(op.id)
        for term in terms:
            self.context.unsummed.update(term.whole)
            before = self.runs[term.maker]
            self.runs[term.maker] = replace(before, collectives=before.collectives[: -len(term.reduction)])
        often = self.graph.runs(op.id)
        once = any(self.graph.runs(term.maker) < often or term.reduction[-1].once for term in terms)
        made = tuple(replace(one, op=op.id, once=once) for one in first.reduction)
        self.runs[op.id] = replace(self.runs[op.id], collectives=made)

    def _term(self, op: Op, place: int) -> _Term | None:
        """An operand as a term; None where it is not reduced, or has another user."""
        chain = self._chain(op, place)
        *_, value = chain
        maker = self.graph.ops[value.op]
        last = _reduction(self.runs[maker.id].collectives)
        if not last:
            return None
        if any(self.graph.uses(each) != 1 or each in self.context.graph.returned for each in chain):
            return None
        if maker.kind == "scatter" and not is_annotated(self.context, maker):  # it scatters onto the other term
            return None
        made = {each: self.context.shardings.made[each] for each in chain}
        moved = any(dim != old and old for each in chain for dim, old in zip(chain[each], made[each], strict=True))
        if moved and last[0].kind == "all-reduce":
            return None
        cut = made != chain or maker.id in self.whole or last[0].kind == "reduce-scatter"
        times = dtype_bytes(op.results[0].dtype) // dtype_bytes(self.graph.type_of(value).dtype)
        if cut and times > 1:
            return None
        reduction = tuple(replace(one, bytes=times * one.bytes) for one in last)
        reshaped = maker.id in self.reshaped or any(self._stands(self.graph.ops[each.op]) for each in chain)
        return _Term(maker.id, reduction, tuple(chain) if cut else (), reshaped)

    def _chain(self, op: Op, place: int) -> Mapping[Value, Tiling]:
        """Values from an operand back to its reduction, by scaling, widening or transposing -> their tilings."""
        split = self.runs[op.id].reads[place]
        chain = dict.fromkeys(unscaled(self.graph, op.operands[place]), split)
        *_, value = chain
        turn = self.graph.ops[value.op]
        if self.context.compiler.sums_widened_terms and _widens(self.graph, turn):
            chain |= dict.fromkeys(unscaled(self.graph, turn.operands[0]), split)
            *_, value = chain
            turn = self.graph.ops[value.op]
        if turn.kind == "transpose":
            places = turn.attrs["permutation"]
            chain[turn.operands[0]] = tuple(split[places.index(dim)] for dim in range(len(split)))
        elif turn.kind == "reshape":
            before = across_ones(split, turn.results[0].shape, self.graph.type_of(turn.operands[0]).shape)
            chain |= {} if before is None else {turn.operands[0]: before}
        return chain

    def _stands(self, op: Op) -> bool:
        """Whether an op is a reshape, or a transpose that is no part of the product or kernel's gradient before it."""
        if op.kind != "transpose":
            return op.kind == "reshape"
        maker = self.graph.ops[op.operands[0].op]
        return maker.kind != "convolution" and not is_transposed(self.context, maker)


def _reduction(collectives: Sequence[Collective]) -> tuple[Collective, ...]:
    """The reduction that an op ends with, and the permute that moves its slices into place."""
    last = tuple(collectives[-2:])
    if last and last[-1].kind in ("all-reduce", "reduce-scatter"):
        return last[-1:]
    padded = [one.kind for one in last] == ["reduce-scatter", "collective-permute"]
    return last if padded and last[0].axes == last[1].axes else ()


def _widens(graph: Graph, op: Op) -> bool:
    """Whether an op converts floating-point numbers to a wider dtype."""
    if op.kind != "convert":
        return False
    narrow, wide = graph.type_of(op.operands[0]).dtype, op.results[0].dtype
    return {narrow, wide} <= FLOATS and dtype_bytes(narrow) < dtype_bytes(wide)
