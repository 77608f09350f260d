"""All-gathers that compilers cancel: a value is gathered and then sliced back to its shards.

On TPU and GPU (`AllGatherDynamicSliceSimplifier`; seen with libtpu 0.0.51 and jax 0.10.2, not on CPU): an op produces
shards, an annotation asks for the whole value, and all users read the shards.
"""

from __future__ import annotations

from dataclasses import replace

from autoshard.cost.machine.targets import CAPABILITIES, Target
from autoshard.cost.partitioner.context import Context
from autoshard.cost.partitioner.partition import Partitioner
from autoshard.cost.partitioner.propagate import Shardings
from autoshard.cost.partitioner.tiling import Tiling
from autoshard.graph.ops import Graph, Value


def undone(graph: Graph, shardings: Shardings, target: Target) -> Shardings:
    """`shardings` without gathers of values and copies that all users slice back."""
    if not CAPABILITIES[target].undoes_gathers:
        return shardings
    copied = _cancelled_copies(graph, shardings)
    shardings = replace(shardings, made=dict(shardings.made), copied=tuple(copied))
    context = Partitioner(graph, shardings, target)
    for value, numbers in context.copies_of.items():
        wanted = shardings.made[value]
        parts = {shardings.read(op.id, value) for op in context.graph.readers(value)}
        returned = value in context.graph.returned
        if len(parts) != 1 or parts == {wanted} or returned or not _gathers(context, value, *parts):
            continue
        (shardings.made[value],) = parts
        for number in numbers:
            copied[number] = shardings.made[value]
    return replace(shardings, copied=tuple(copied))


def _cancelled_copies(graph: Graph, shardings: Shardings) -> list[Tiling]:
    """The tilings of copies, without replicated ones whose only users are copies with the original tiling."""
    copied = list(shardings.copied)
    read = {shardings.copy_read(op.id, value) for op in graph.ops for value in op.operands}
    read |= {shardings.copy_read(None, value) for value in graph.outputs}
    further: dict[int, list[int]] = {}
    for number, copy in enumerate(shardings.copies):
        if copy.source is not None:
            further.setdefault(copy.source, []).append(number)
    for number, copy in enumerate(shardings.copies):
        before = shardings.made[copy.value] if copy.source is None else copied[copy.source]
        whole = all(not dim or dim == old for dim, old in zip(copied[number], before, strict=True))
        if whole and number in further and number not in read and all(copied[n] == before for n in further[number]):
            copied[number] = before
    return copied


def _gathers(context: Context, value: Value, parts: Tiling) -> bool:
    """Whether an op run on the shards `parts` needs no collective, and an all-gather only for its annotation."""
    op = context.graph.ops[value.op]
    if op.kind == "argument" or op.id in context.free or len(op.results) != 1:
        return False
    cut = context.emission(op, parts)
    whole = context.emission(op, context.shardings.made[value])
    return not cut.own and cut.moves == whole.moves and [step[0] for step in whole.own] == ["all-gather"]
