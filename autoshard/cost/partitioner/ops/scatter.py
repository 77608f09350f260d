"""Which all-reduces become reduce-scatters: those whose only user is a dynamic-slice.

The partitioner writes an all-reduce, and a dynamic-slice after it where the value is then split further. XLA's GPU and
TPU compilers merge the two into a reduce-scatter (`ReduceScatterCreator`, xla/service/collective_opt_utils.cc) if the
slice is the only user, slices a single dim, and takes slices in the order of the replica groups' devices; on GPU not
where the slices are uneven, since padding comes in between. The CPU compiler merges none; there `verify` counts an
all-reduce of which every device takes its own slice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from autoshard.cost.machine.collectives import Collective
from autoshard.cost.partitioner.context import Context
from autoshard.cost.partitioner.partitioned import OpRun, Ring
from autoshard.cost.partitioner.reshard.steps import Cut
from autoshard.cost.partitioner.tiling import Tiling
from autoshard.fused import KINDS, dims_of_attrs
from autoshard.graph.groups import ELEMENTWISE, unscaled
from autoshard.graph.ops import Op, Value
from autoshard.mesh import AxisGroup

Dim = tuple[int, ...]

SUM_MOVES = frozenset({"reshape", "transpose", "convert"})
"""Kinds to look through for the users of a sum."""


def _slice_moves_before(context: Context, op: Op) -> bool:
    """Whether a TPU's compiler moves a slice of the op's result to its operand: all other operands are broadcasts.

    Its pad-slice mover (libtpu 0.0.51) does so with the sum of a product and a bias.
    """
    if not context.compiler.slices_sooner or op.kind not in ELEMENTWISE:
        return False
    made_by = [context.graph.ops[value.op].kind for value in op.operands]
    return sum(kind != "broadcast_in_dim" for kind in made_by) == 1


def _moves(context: Context, op: Op) -> bool:
    """Whether to look through an op for the users of a sum."""
    return op.kind in SUM_MOVES or len(unscaled(context.graph, Value(op.id))) > 1 or _slice_moves_before(context, op)


def _read_by(context: Context, value: Value) -> Iterator[tuple[Op, int]]:
    """The users of a value, each with the operand's number."""
    for op in context.graph.readers(value):
        for place, read in enumerate(op.operands):
            if read == value:
                yield op, place


def _slice_after_reshape(context: Context, op: Op, read: Tiling) -> Cut | None:
    """The slice that every device takes after a reshape of a sum, along a dim that the sum has merged with others.

    A GPU's compiler does not look through a reshape of the sliced dim. A TPU's makes a reduce-scatter where a transpose
    after the reshape makes that dim major-most, since the sum then has that layout (libtpu 0.0.51: sequence-first
    attention).
    """
    into = op.results[0].shape
    made = context.shardings.made[Value(op.id)]
    forth = context.subaxes.reshape(context.graph.type_of(op.operands[0]).shape, into, read)
    cut = context.cuts.cut(into, forth, made)
    if cut is None or not context.compiler.scatters_sums:
        return cut
    if not context.compiler.scatters_behind_reshapes:
        return None
    orders = {tuple(reader.attrs.get("permutation", ())) for reader in context.graph.readers(Value(op.id))}
    if len(orders) != 1 or not (order := orders.pop()) or Value(op.id) in context.graph.returned:
        return None
    seen = replace(
        cut,
        factors=tuple(cut.factors[dim] for dim in order),
        places=cut.places[:, list(order)],
        shape=tuple(cut.shape[dim] for dim in order),
    )
    return seen if seen.factors[0] > 1 else None


def is_summed(context: Context, op: Op) -> bool:
    """Whether a reduction uses an op's result, or a copy of it."""
    return any(reader.kind == "reduce" for reader in context.graph.readers(Value(op.id)))


def scatter_later(runs: list[OpRun], context: Context) -> list[OpRun]:
    """Turn an all-reduce whose users all take the same slice into a reduce-scatter; changes `runs`."""
    sums = [run.collectives[-1:] and run.collectives[-1].kind == "all-reduce" for run in runs]
    copies: dict[tuple[Value, int | None], list[int]] = {}
    for number, copy in enumerate(context.shardings.copies):
        copies.setdefault((copy.value, copy.source), []).append(number)

    def cuts(value: Value, at: int | None = None, depth: int = 8) -> list[Cut | None]:
        """The first slice that each user takes of the value, or of its copy number `at`."""
        made = context.shardings.made[value] if at is None else context.shardings.copied[at]
        shape = context.graph.type_of(value).shape
        found: list[Cut | None] = []
        for number in copies.get((value, at), ()):
            target = context.shardings.copied[number]
            again = made == target and not context.shardings.copies[number].result and depth
            found.extend(cuts(value, number, depth - 1) if again else [context.cuts.cut(shape, made, target)])
        returned = any(context.shardings.copies[n].result for n in copies.get((value, at), ()))
        if value in context.graph.returned and context.shardings.pins.get(value) == at and not returned:
            found.append(None)
        for op, place in _read_by(context, value):
            if context.shardings.copy_read(op.id, value) != at:
                continue
            move = next((move for move in context.emissions[op.id].moves if move[0] == place), None)
            if move is not None:
                outer, source, end = move[1]
                # A halo exchange has no source; a windowed einsum permutes the value as it is.
                if source is None or isinstance(outer, Ring):
                    found.append(None)
                else:
                    found.append(context.cuts.cut(shape, source, end, outer))
            elif op.kind == "reshape" and (cut := _slice_after_reshape(context, op, made)) is not None:
                found.append(cut)
            elif depth and _moves(context, op) and made == runs[op.id].reads[place]:
                found.extend(cuts(Value(op.id), None, depth - 1))
            else:
                found.append(None)
        return found

    summed = {one.axes for run in runs for one in run.collectives if one.kind in ("all-reduce", "reduce-scatter")}
    for op in context.graph.ops:
        if op.kind in KINDS:
            runs[op.id] = _scattered_results(context, op, runs[op.id], cuts)
        if not sums[op.id] or len(op.results) != 1:
            continue
        *first, last = runs[op.id].collectives
        order = context.order.get(op.id, ())
        whole = (name for name in last.axes if isinstance(name, str))
        axes = order or tuple(axis for name in whole for axis in context.subaxes.of_axis.get(name, ()))
        taken = cuts(Value(op.id)) if axes and context.scatters_over(last.axes) else []
        if not taken or not all(context.cuts.scatters(axes, cut, bool(order)) for cut in taken):
            if context.compiler.splits_all_reduces and len(taken) == 1 and taken[0] is not None:
                runs[op.id] = replace(runs[op.id], collectives=(*first, *_split(context, taken[0], last, summed)))
            continue
        if context.compiler.scatters_sums and any(cut != taken[0] for cut in taken):
            continue
        row_major = context.rules.lies_row_major(op.kind, op.results[0].shape)
        in_sums = op.kind == "gather" and is_summed(context, op)
        steps = context.scattered(axes, last.bytes, taken[0], bool(order), row_major, in_sums)
        scattered = tuple(replace(last, kind=kind, bytes=size) for kind, _, size in steps or ())
        runs[op.id] = replace(runs[op.id], collectives=(*first, *(scattered or (last,))))
    return runs


def _scattered_results(context: Context, op: Op, run: OpRun, cuts: Callable[[Value], list[Cut | None]]) -> OpRun:
    """The same for the sums in a manual region, such as of an attention's gradients of keys and values."""
    dims = dims_of_attrs(op.kind, op.attrs, [context.graph.type_of(value).shape for value in op.operands])
    made = [context.shardings.made[Value(op.id, result)] for result in range(len(op.results))]
    split = dims.split(run.reads, made, context.subaxes.ways)
    first = len(run.collectives) - len(run.of_result)
    found = list(run.collectives)
    for place, result in enumerate(run.of_result, first):
        axes = dims.made(result, split, ())[1]
        taken = cuts(Value(op.id, result)) if found[place].kind == "all-reduce" else []
        if not taken or not all(cut == taken[0] and context.cuts.scatters(axes, cut, True) for cut in taken):
            continue
        steps = context.scattered(axes, found[place].bytes, taken[0], True, row_major=True) or ()
        if len(steps) == 1:
            found[place] = replace(found[place], kind=steps[0][0], bytes=steps[0][2])
    return replace(run, collectives=tuple(found))


def _split(context: Context, cut: Cut, whole: Collective, summed: set[AxisGroup]) -> tuple[Collective, ...]:
    """`AllReduceSplitter`, on GPU: an all-reduce over all devices, sliced within groups of neighbours, becomes two.

    A reduce-scatter within each group, then an all-reduce of the slices across groups; only where the program already
    sums over either of these (xla/service/gpu/transforms, all_reduce_splitter.cc).
    """
    sizes = context.subaxes.sizes
    split = [factor for factor in cut.factors if factor > 1]
    if whole.axes != context.resharder.names(tuple(range(len(sizes)))) or len(split) != 1:
        return (whole,)
    inner = [axis for axis in range(len(sizes)) if math.prod(sizes[axis:]) <= split[0]]
    outer = [axis for axis in range(len(sizes)) if axis not in inner]
    within, between = context.resharder.names(tuple(inner)), context.resharder.names(tuple(outer))
    if not inner or not outer or not context.cuts.scatters(inner, cut) or not summed & {within, between}:
        return (whole,)
    return (
        replace(whole, kind="reduce-scatter", axes=within),
        replace(whole, axes=between, bytes=whole.bytes // split[0]),
    )
