"""Moves in bf16 on TPU: contractions of f32 use bf16 passes, so values that only they use are rounded early.

Compiled with libtpu 0.0.51: all-gathers, all-to-alls and permutes of slices of an f32 value whose only users, also
through data movement and optimization barriers, are contractions and conversions to bf16, move bf16
(`BFloat16Propagation`); all-reduces do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autoshard.cost.machine.compute import CONTRACTIONS
from autoshard.cost.partitioner.context import Context
from autoshard.cost.partitioner.ops.scatter import SUM_MOVES
from autoshard.cost.partitioner.partitioned import Emission
from autoshard.cost.partitioner.reshard.emitted import Step
from autoshard.graph.groups import BARRIER
from autoshard.graph.ops import Op, Value

_PASSING = SUM_MOVES | {"reverse", "slice"}
"""Kinds to look through for contractions: a convolution's gradient reads the reversed kernel, fused weights are cut."""


def rounds(context: Context, value: Value, at: int | None) -> bool:
    """Whether a TPU moves an f32 value, or its copy number `at`, in bf16."""
    if not context.compiler.rounds_for_products or context.graph.type_of(value).dtype != "f32":
        return False
    return only_contracted(context, value, at)


def multiplies_matrices(context: Context, op: Op) -> bool:
    """Whether both operands of a contraction have free dims.

    A TPU's compiler turns other contractions into reductions of elementwise products, in f32
    (`AlgebraicSimplifier::HandleDot`), and fuses some with a softmax into a kernel that reads f32.
    """
    if op.id in context.read_unrounded:
        return False
    if op.kind != "dot_general":
        return op.kind in CONTRACTIONS
    dims = context.transfers.contraction(op)
    lhs, rhs = (context.graph.type_of(value).shape for value in op.operands[:2])
    return any(lhs[pair[0]] > 1 for pair in dims.left) and any(rhs[pair[0]] > 1 for pair in dims.right)


def only_contracted(context: Context, value: Value, at: int | None, depth: int = 8) -> bool:
    """Whether only contractions and conversions to bf16 use a value, or its copy number `at`, data movement aside."""
    further = [
        only_contracted(context, value, number, depth)
        for number in context.copies_of.get(value, ())
        if context.shardings.copies[number].source == at
    ]
    if not all(further):
        return False
    if value in context.graph.returned and context.shardings.copy_read(None, value) == at:
        return False
    readers = [op for op in context.graph.readers(value) if context.shardings.copy_read(op.id, value) == at]
    return bool(readers or further) and all(_reads_bf16(context, op, value, depth) for op in readers)


def _reads_bf16(context: Context, op: Op, value: Value, depth: int) -> bool:
    """Whether an op uses an operand in bf16 alone, or passes it on to such ops."""
    if multiplies_matrices(context, op) or (op.kind == "convert" and op.results[0].dtype == "bf16"):
        return True
    if op.kind == BARRIER:
        passed = [Value(op.id, place) for place, operand in enumerate(op.operands) if operand == value]
    else:
        passed = [Value(op.id)] if op.kind in _PASSING else []
    return bool(passed) and depth > 0 and all(only_contracted(context, each, None, depth - 1) for each in passed)


def halved(emission: Emission) -> Emission:
    """An emission that moves bf16 in place of f32; all-reduces stay f32."""

    def narrow(steps: Sequence[Step]) -> tuple[Step, ...]:
        return tuple((kind, axes, size if kind == "all-reduce" else size // 2) for kind, axes, size in steps)

    moves = tuple((place, key, narrow(steps)) for place, key, steps in emission.moves)
    return replace(emission, moves=moves, own=narrow(emission.own))
