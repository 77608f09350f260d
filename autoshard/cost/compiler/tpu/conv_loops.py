"""Convolutions as windowed einsums on TPU: loops that permute shards of the kernel.

A loop (`cost/partitioner/ops/conv.py`) reads materialised images and materialises its result: nothing fuses into it. If
shards split the contracted features (an input gradient, a transposed convolution), every iteration adds to one result.
"""

from __future__ import annotations

import math

from autoshard.cost.compiler.lowered import Lowered, Step


def ring(program: Lowered, step: Step) -> Step | None:
    """The permute of a convolution's kernel if it is a windowed einsum; else None."""
    for array in step.reads[1:] if step.kind == "convolution" else ():
        maker = program.arrays[array].maker
        if maker >= 0 and program.steps[maker].kind == "collective-permute" and program.steps[maker].op == step.op:
            return program.steps[maker]
    return None


def adds_up(program: Lowered, step: Step) -> bool:
    """Whether the permuted shards split the features that the convolution contracts."""
    permute = ring(program, step)
    if permute is None:
        return False
    op = program.graph.ops[step.op]
    moved = program.arrays[permute.reads[0]]
    whole, part = program.graph.type_of(op.operands[1]).shape, moved.logical if moved.shape is None else moved.shape
    within = op.attrs["rhs"][1]
    return part is not None and len(part) == len(whole) and part[within] < whole[within]


def turns(program: Lowered, step: Step) -> int:
    """How many shards of its kernel a convolution works through, one after another; 1 if it is no windowed einsum."""
    permute = ring(program, step)
    part = 0 if permute is None else program.arrays[permute.reads[0]].elements
    if not part:
        return 1
    return math.prod(program.graph.type_of(program.graph.ops[step.op].operands[1]).shape) // part


def passes(program: Lowered, step: Step) -> int:
    """How often a convolution works on each tile of its images: once per iteration, twice if it does not accumulate.

    As seen in loops of 8 iterations, cycles per tile and iteration: 37 for slices of the result, 12 to accumulate.
    """
    rounds = turns(program, step)
    return rounds if rounds == 1 or adds_up(program, step) else 2 * rounds
