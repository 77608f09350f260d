"""Rules of ops that only move elements: reshape, broadcast, transpose, slice, pad, concatenate…

Along a dim whose extent changes (or whose elements move), the op needs elements of other devices. GSPMD has no cheap
and reliable method there (measured: a slice `[:, :-1]` along a split dim gathers it, a split of fused QKV is seven
permutes), so such dims are `replicated`: operand and result each with a factor of their own.
"""

from __future__ import annotations

import math

from autoshard.graph.ops import Rule
from autoshard.graph.rules.base import Dim, Factors, Shape, Signature, rule


@rule("broadcast_in_dim")
def broadcast_in_dim(op: Signature) -> Rule:
    """Operand dims carry over; new and expanded dims have a parallel factor that the operand does not mention."""
    (operand,), (result,) = op.operands, op.results
    factors = Factors()
    dims = factors.dims(result)
    source: list[Dim] = [
        dims[to] if size == result[to] else () for size, to in zip(operand, op.attrs["dims"], strict=True)
    ]
    return factors.rule([source], [dims])


@rule("transpose")
def transpose(op: Signature) -> Rule:
    """Result dim i is operand dim permutation[i]."""
    factors = Factors()
    dims = factors.dims(op.operands[0])
    return factors.rule([dims], [[dims[i] for i in op.attrs["permutation"]]])


@rule("reshape", "bitcast")
def reshape(op: Signature) -> Rule:
    """The common refinement of the two shapes (see `refine`)."""
    (operand,), (result,) = op.operands, op.results
    factors = Factors()
    sides = refine(operand, result, factors)
    return factors.rule([sides[0]], [sides[1]])


def refine(first: Shape, second: Shape, factors: Factors) -> tuple[list[Dim], list[Dim]]:
    """Factors of two shapes with equally many elements in row-major order, each dim major to minor.

    From the major-most dim: a common divisor of both sides' next dims is a shared factor. `(8, 512) -> (4096,)` has the
    factors 8 and 512, `(6, 4) -> (8, 3)` a shared 2 and no more: the rest is replicated up to the next boundary that
    both shapes have.
    """
    sides: tuple[list[list[int]], list[list[int]]] = ([[] for _ in first], [[] for _ in second])
    if math.prod(first) == 0:
        return [()] * len(first), [()] * len(second)
    i = j = 0
    left, right = 1, 1  # the rest of the current dims
    while True:
        while left == 1 and i < len(first):
            left, i = first[i], i + 1
        while right == 1 and j < len(second):
            right, j = second[j], j + 1
        if left == 1 and right == 1:
            break
        common = math.gcd(left, right)
        if common > 1:
            (factor,) = factors.new(common)
            sides[0][i - 1].append(factor)
            sides[1][j - 1].append(factor)
            left, right = left // common, right // common
        if left > 1 and right > 1:
            # Neither divides the other: skip to the next common boundary.
            sides[0][i - 1].extend(factors.new(left, "replicated"))
            sides[1][j - 1].extend(factors.new(right, "replicated"))
            while left != right:
                if left < right:
                    sides[0][i].extend(factors.new(first[i], "replicated"))
                    left, i = left * first[i], i + 1
                else:
                    sides[1][j].extend(factors.new(second[j], "replicated"))
                    right, j = right * second[j], j + 1
            left = right = 1
    return [tuple(dim) for dim in sides[0]], [tuple(dim) for dim in sides[1]]


def _moved(
    factors: Factors, operand: Shape, result: Shape, untouched: list[bool], spread: list[bool] | None = None
) -> tuple[list[Dim], list[Dim]]:
    """Untouched dims share a parallel factor, spread ones the smaller extent; the others are replicated on each side.

    `spread`: dims of which one side has every so-manyeth element of the other.
    """
    before: list[Dim] = []
    after: list[Dim] = []
    for size, new_size, same, apart in zip(operand, result, untouched, spread or [False] * len(operand), strict=True):
        if apart:
            shared, many = factors.new(min(size, new_size)), max(size, new_size) // min(size, new_size)
            between = (*shared, *factors.new(many, "replicated"))
            before.append(between if size > new_size else shared)
            after.append(shared if size > new_size else between)
        elif same and size == new_size:
            before.append(factors.new(size))
            after.append(before[-1])
        else:
            before.append(factors.new(size, "replicated"))
            after.append(factors.new(new_size, "replicated"))
    return before, after


@rule("slice")
def slice_(op: Signature) -> Rule:
    """Completely covered dims are parallel, and those that a stride divides."""
    (operand,), (result,) = op.operands, op.results
    factors = Factors()
    spread = [
        stride > 1 and 0 < size * stride == whole and start < stride
        for whole, size, start, stride in zip(operand, result, op.attrs["start"], op.attrs["stride"], strict=True)
    ]
    before, after = _moved(factors, operand, result, [True] * len(operand), spread)
    return factors.rule([before], [after])


@rule("pad")
def pad(op: Signature) -> Rule:
    """Dims without padding are parallel (a shift, such as low 1 and high -1, moves elements), and spread ones."""
    (operand, *fill), (result,) = op.operands, op.results
    factors = Factors()
    edges = list(zip(*(op.attrs[name] for name in ("low", "high", "interior")), strict=True))
    spread = [size > 0 and spreads(*each) for size, each in zip(operand, edges, strict=True)]
    before, after = _moved(factors, operand, result, [not any(each) for each in edges], spread)
    return factors.rule([before, *([] for _ in fill)], [after])


def spreads(low: int, high: int, interior: int) -> bool:
    """Whether a pad puts each element among zeros of its own, as the gradient of a slice with a stride does."""
    return interior > 0 and low >= 0 and high >= 0 and low + high == interior


@rule("concatenate")
def concatenate(op: Signature) -> Rule:
    """All dims but the concatenated one are parallel."""
    (result,) = op.results
    dim = op.attrs["dim"]
    factors = Factors()
    dims = [factors.new(size, "replicated" if i == dim else "parallel") for i, size in enumerate(result)]
    if len(op.operands) == 1:
        return factors.rule([dims], [dims])
    parts = [
        [factors.new(shape[dim], "replicated") if i == dim else own for i, own in enumerate(dims)]
        for shape in op.operands
    ]
    return factors.rule(parts, [dims])


@rule("reverse")
def reverse(op: Signature) -> Rule:
    """Dims that are not reversed are parallel."""
    (shape,) = op.results
    factors = Factors()
    dims = [factors.new(size, "replicated" if i in op.attrs["dims"] else "parallel") for i, size in enumerate(shape)]
    return factors.rule([dims], [dims])


@rule("dynamic_slice")
def dynamic_slice(op: Signature) -> Rule:
    """Completely covered dims are parallel (their start index is clamped to 0)."""
    operand, *starts = op.operands
    factors = Factors()
    before, after = _moved(factors, operand, op.results[0], [True] * len(operand))
    return factors.rule([before, *([] for _ in starts)], [after])


@rule("dynamic_update_slice")
def dynamic_update_slice(op: Signature) -> Rule:
    """Dims that the update covers completely are parallel."""
    operand, update, *starts = op.operands
    factors = Factors()
    before: list[Dim] = []
    part: list[Dim] = []
    for size, covered in zip(operand, update, strict=True):
        if size == covered:
            before.append(factors.new(size))
            part.append(before[-1])
        else:
            before.append(factors.new(size, "replicated"))
            part.append(factors.new(covered, "replicated"))
    return factors.rule([before, part, *([] for _ in starts)], [before])
