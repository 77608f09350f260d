"""Sums over devices that are added up are made once: `AllReduceReassociate`, on TPU and GPU.

Reduce-scatters too, and all-reduces of which each is cut alike before they are added. In program order, so that a sum
of several terms ends with one collective. A GPU adds values that were widened after their reduction (products in bf16
under autocast) and reduces the wide sum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autoshard.cost.machine.collectives import Collective
from autoshard.cost.partitioner.context import Context
from autoshard.cost.partitioner.ops.chained import is_annotated
from autoshard.cost.partitioner.ops.contraction import is_transposed
from autoshard.cost.partitioner.partitioned import OpRun
from autoshard.cost.partitioner.tiling import Tiling
from autoshard.dtypes import FLOATS, dtype_bytes
from autoshard.graph.groups import unscaled
from autoshard.graph.ops import Graph, Op, Value


@dataclass(frozen=True)
class _Term:
    """What a sum adds: made by an op whose last collective reduces it, and read by nothing else.

    Attributes:
        maker: that op.
        reduction: its last collective, as large as the sum would be; behind a reduce-scatter of slices that were padded
            the permute that moves them into place, too.
        whole: the values on the way, if parts of them are read: they are whole until the sum is reduced.
    """

    maker: int
    reduction: tuple[Collective, ...]
    whole: tuple[Value, ...]


def sum_once(runs: list[OpRun], context: Context) -> list[OpRun]:
    """A sum of two reduced values that it alone reads is reduced once; `runs` are changed."""
    _Summing(context, runs).run()
    return runs


class _Summing:
    def __init__(self, context: Context, runs: list[OpRun]) -> None:
        self.context, self.graph, self.runs = context, context.graph, runs
        self.whole: set[int] = set()  # sums of terms of which parts are read

    def run(self) -> None:
        for op in self.graph.ops:
            if op.kind != "add" or self.runs[op.id].collectives or op.operands[0] == op.operands[1]:
                continue
            terms = [term for place in (0, 1) if (term := self._term(op, place)) is not None]
            if len(terms) == 2 and terms[0].maker != terms[1].maker and len(set(map(self._kind, terms))) == 1:
                self._join(op, terms)

    def _kind(self, term: _Term) -> tuple[object, ...]:
        """What terms that are reduced together have in common."""
        what = tuple((one.kind, one.axes, one.bytes) for one in term.reduction)
        return what, self.context.order.get(term.maker), not term.whole

    def _join(self, op: Op, terms: Sequence[_Term]) -> None:
        first = terms[0]
        if first.maker in self.context.order:
            self.context.order[op.id] = self.context.order[first.maker]
        if first.whole:
            self.whole.add(op.id)
        for term in terms:
            self.context.unsummed.update(term.whole)
            before = self.runs[term.maker]
            self.runs[term.maker] = replace(before, collectives=before.collectives[: -len(term.reduction)])
        made = tuple(replace(one, op=op.id) for one in first.reduction)
        self.runs[op.id] = replace(self.runs[op.id], collectives=made)

    def _term(self, op: Op, place: int) -> _Term | None:
        """An operand as a term; None where it is not reduced, or something else reads it too."""
        way = self._way(op, place)
        *_, value = way
        maker = self.graph.ops[value.op]
        last = _reduction(self.runs[maker.id].collectives)
        if not last:
            return None
        if any(self.graph.uses(each) != 1 or each in self.context.graph.returned for each in way):
            return None
        if maker.kind == "scatter" and not is_annotated(self.context, maker):  # it scatters onto the other term
            return None
        made = {each: self.context.shardings.made[each] for each in way}
        moved = any(dim != old and old for each in way for dim, old in zip(way[each], made[each], strict=True))
        if moved and last[0].kind == "all-reduce":
            return None
        cut = made != way or maker.id in self.whole or last[0].kind == "reduce-scatter"
        times = dtype_bytes(op.results[0].dtype) // dtype_bytes(self.graph.type_of(value).dtype)
        if cut and times > 1:
            return None
        reduction = tuple(replace(one, bytes=times * one.bytes) for one in last)
        return _Term(maker.id, reduction, tuple(way) if cut else ())

    def _way(self, op: Op, place: int) -> Mapping[Value, Tiling]:
        """The values from an operand back to what was reduced, with how they are read. A product may be transposed."""
        split = self.runs[op.id].reads[place]
        way = dict.fromkeys(unscaled(self.graph, op.operands[place]), split)
        *_, value = way
        turn = self.graph.ops[value.op]
        if self.context.compiler.sums_widened_terms and _widens(self.graph, turn):
            way |= dict.fromkeys(unscaled(self.graph, turn.operands[0]), split)
            *_, value = way
            turn = self.graph.ops[value.op]
        if turn.kind == "transpose" and is_transposed(self.context, self.graph.ops[turn.operands[0].op]):
            way[turn.operands[0]] = split[::-1]
        return way


def _reduction(collectives: Sequence[Collective]) -> tuple[Collective, ...]:
    """The reduction that an op ends with, and what moves its slices into place."""
    last = tuple(collectives[-2:])
    if last and last[-1].kind in ("all-reduce", "reduce-scatter"):
        return last[-1:]
    padded = [one.kind for one in last] == ["reduce-scatter", "collective-permute"]
    return last if padded and last[0].axes == last[1].axes else ()


def _widens(graph: Graph, op: Op) -> bool:
    """Whether an op makes floating-point numbers wider."""
    if op.kind != "convert":
        return False
    narrow, wide = graph.type_of(op.operands[0]).dtype, op.results[0].dtype
    return {narrow, wide} <= FLOATS and dtype_bytes(narrow) < dtype_bytes(wide)
