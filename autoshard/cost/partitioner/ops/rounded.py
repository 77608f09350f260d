"""What a TPU moves in bf16: it multiplies f32 in bf16 passes, and rounds what only products read where it is made.

Measured by compiling (libtpu 0.0.51): gathers, exchanges and permutes of slices between a value of f32 and the
contractions that alone read it, through moves perhaps, are of bf16 (`BFloat16Propagation`); sums are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autoshard.cost.machine.compute import CONTRACTIONS
from autoshard.cost.partitioner.context import Context
from autoshard.cost.partitioner.ops.scatter import SUM_MOVES
from autoshard.cost.partitioner.partitioned import Emission
from autoshard.cost.partitioner.reshard.emitted import Step
from autoshard.graph.ops import Op, Value

_PASSING = SUM_MOVES | {"reverse"}
"""Kinds behind which the products are looked for: of a kernel, a convolution's gradient reads the reverse."""


def rounds(context: Context, value: Value, at: int | None) -> bool:
    """Whether a TPU moves a value of f32, or its copy number `at`, in bf16."""
    if not context.compiler.rounds_for_products or context.graph.type_of(value).dtype != "f32":
        return False
    return only_contracted(context, value, at)


def multiplies_matrices(context: Context, op: Op) -> bool:
    """Whether an op is a contraction of which both operands have dims of their own.

    A TPU's compiler makes the others sums of elementwise products, in f32 (`AlgebraicSimplifier::HandleDot`), and some
    part of a kernel with a softmax, which reads f32.
    """
    if op.id in context.read_unrounded:
        return False
    if op.kind != "dot_general":
        return op.kind in CONTRACTIONS
    dims = context.transfers.contraction(op)
    lhs, rhs = (context.graph.type_of(value).shape for value in op.operands[:2])
    return any(lhs[pair[0]] > 1 for pair in dims.left) and any(rhs[pair[0]] > 1 for pair in dims.right)


def only_contracted(context: Context, value: Value, at: int | None, depth: int = 8) -> bool:
    """Whether contractions alone read a value, or its copy number `at`, through moves perhaps."""
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
    return bool(readers or further) and all(
        multiplies_matrices(context, op)
        or (op.kind in _PASSING and depth > 0 and only_contracted(context, Value(op.id), None, depth - 1))
        for op in readers
    )


def halved(emission: Emission) -> Emission:
    """An emission in bf16 for f32; what it sums stays as it is."""

    def narrow(steps: Sequence[Step]) -> tuple[Step, ...]:
        return tuple((kind, axes, size if kind == "all-reduce" else size // 2) for kind, axes, size in steps)

    moves = tuple((place, key, narrow(steps)) for place, key, steps in emission.moves)
    return replace(emission, moves=moves, own=narrow(emission.own))
