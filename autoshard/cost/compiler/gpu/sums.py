"""Row and column reductions of XLA's GPU compiler, by the layout of what they reduce.

Layouts are row-major, except for results of convolutions: features minor-most (`dim_labels=b01f`), which elementwise
ops, transposes and reshapes keep as long as they are bitcasts. A reduction along the minor-most dims is a row
reduction, which can fuse into a normalisation; others are column reductions, which no user joins.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

from autoshard.cost.compiler.kernels import Kernel
from autoshard.cost.compiler.lowered import COLLECTIVES, SLICE, Array, Lowered, Step
from autoshard.graph.groups import ELEMENTWISE

Order = tuple[int, ...]
"""Dims from major to minor."""

_CARRIED = COLLECTIVES | {
    SLICE, "slice", "pad", "concatenate", "reverse", "reduce_window", "select_and_scatter", "scatter",
}  # fmt: skip
"""Kinds whose result has the layout of an operand."""


UNARY = frozenset({"convert", "negate", "exponential"})
LONGEST_ROW = 16384
"""Elements of a row that one kernel sums (`ReductionDimensionRaceFreeBound`); longer rows take two."""


class Sums:
    """The reductions of one device's program."""

    def __init__(self, program: Lowered) -> None:
        """For a program before multi-output fusion."""
        self.program = program
        self.orders = _orders(program)
        self.centring: dict[int, bool] = {}

    def over(self, step: Step) -> tuple[tuple[bool, int], ...] | None:
        """(whether reduced, elements) of a reduction's dims, major to minor, with neighbours merged.

        Dims of size 1 are left out. None: unknown.
        """
        shape = _summed_shape(self.program, step)
        if shape is None:
            return None
        dims = self.program.graph.ops[step.op].attrs["dims"]
        found: list[tuple[bool, int]] = []
        for dim in _seen_as(self.program, step.reads[0], shape, self.orders) or range(len(shape)):
            size, summed = shape[dim], dim in dims
            if size > 1 and found and found[-1][0] == summed:
                found[-1] = (summed, found[-1][1] * size)
            elif size > 1:
                found.append((summed, size))
        return tuple(found)

    def of(self, kernel: Kernel) -> Hashable:
        """What reductions of merged kernels must agree on (`FusionHeroesAreCompatible`); None without a reduction."""
        step = self.program.steps[kernel.steps[-1]] if kernel.kind == "reduce" and kernel.steps else None
        return None if step is None or step.kind != "reduce" else self.over(step)

    def joins(self, array: int) -> bool:
        """Whether users of an array may merge with its producer: with a sum if that is of rows that they centre."""
        step = self._maker(array)
        if step is None or step.kind != "reduce":
            return True
        over = self.over(step)
        alone = over is not None and not any(summed for summed, _ in over)  # sums of dims of one element
        return alone or (_is_of_rows(over) and self.centres(step))

    def centres(self, step: Step) -> bool:
        """Whether a row's sum and what it is of have a common user, as in a softmax or a mean that is subtracted.

        That is a diamond (`SoftmaxRewriterTriton`), and so the start of a Triton kernel, which other sums of what has
        been centred join: a variance.
        """
        if step.op not in self.centring:
            self.centring[step.op] = False
            if not step.reads:
                return False
            array, maker = step.reads[0], self._maker(step.reads[0])
            while len(self._readers(array)) == 1 and maker is not None and maker.kind in UNARY:
                array, maker = maker.reads[0], self._maker(maker.reads[0])
            self.centring[step.op] = len(self._readers(array)) > 1 or self._is_centred(array, 8)
        return self.centring[step.op]

    def _is_centred(self, array: int, depth: int) -> bool:
        """Whether a value that no product reads is made from a row's sum that `centres`."""
        step = self._maker(array)
        if not depth or step is None or any(self.program.steps[one].flops for one in self._readers(array)):
            return False
        if step.kind == "reduce":
            return _is_of_rows(self.over(step)) and self.centres(step)
        within = step.kind in ELEMENTWISE or step.kind in ("broadcast_in_dim", "reshape")
        return within and any(self._is_centred(each, depth - 1) for each in step.reads)

    def _maker(self, array: int) -> Step | None:
        maker = self.program.arrays[array].maker
        return self.program.steps[maker] if maker >= 0 else None

    def _readers(self, array: int) -> Sequence[int]:
        return self.program.arrays[array].readers

    def makes_rows(self, kernel: Kernel) -> bool:
        """Whether all reductions that a kernel returns are row reductions."""
        made = [self.over(step) for step in self._steps(kernel) if not set(step.writes).isdisjoint(kernel.writes)]
        return bool(made) and all(over and over[-1][0] for over in made)

    def is_triton(self, kernel: Kernel) -> bool:
        """Whether a kernel sums rows that it centres."""
        return any(_is_of_rows(self.over(step)) and self.centres(step) for step in self._steps(kernel))

    def _steps(self, kernel: Kernel) -> list[Step]:
        steps = (self.program.steps[number] for number in kernel.steps)
        return [step for step in steps if step.kind == "reduce"]


def _summed_shape(program: Lowered, step: Step) -> tuple[int, ...] | None:
    """The shape in which a reduction reads its operand, perhaps through a bitcast; None: unknown, or a dot."""
    op = program.graph.ops[step.op]
    shape = program.arrays[step.reads[0]].shape if step.reads else None
    if shape is None or "dims" not in op.attrs:
        return None
    whole = program.graph.type_of(op.operands[0]).shape
    if len(shape) == len(whole):
        return shape
    made = iter(program.arrays[step.writes[0]].shape or ())
    seen = [size if dim in op.attrs["dims"] else next(made, 0) for dim, size in enumerate(whole)]
    if not seen:
        return None
    first = min(op.attrs["dims"], default=0)
    if math.prod(seen) and seen[first] * math.prod(shape) % math.prod(seen) == 0:  # it may be sharded
        seen[first] = seen[first] * math.prod(shape) // math.prod(seen)
    return tuple(seen) if math.prod(seen) == math.prod(shape) else None


def _seen_as(program: Lowered, array: int, shape: Sequence[int], orders: dict[int, Order]) -> Order | None:
    """The layout of an array as read in this shape; None: row-major."""
    before = program.arrays[array].shape
    if array not in orders or before is None or math.prod(before) != math.prod(shape) or not math.prod(shape):
        return None
    return _reshaped(orders[array], before, shape)


def _is_of_rows(over: Sequence[tuple[bool, int]] | None) -> bool:
    if not over:
        return True
    return over[-1][0] and over[-1][1] <= LONGEST_ROW and sum(summed for summed, _ in over) == 1


def _orders(program: Lowered) -> dict[int, Order]:
    """Array -> its layout, if not row-major."""
    found: dict[int, Order] = {}
    if all(step.kind != "convolution" for step in program.steps):
        return found
    for step in program.steps:
        for array in step.writes:
            made = program.arrays[array]
            order = None if made.shape is None else _order(program, step, made, found)
            if order is not None and list(order) != sorted(order):
                found[array] = order
    return found


def _order(program: Lowered, step: Step, made: Array, found: dict[int, Order]) -> Order | None:
    attrs, shape = program.graph.ops[step.op].attrs, made.shape or ()
    if step.kind == "convolution":
        batch, features, *spatial = attrs["out"]
        return (batch, *spatial, features) if len(attrs["out"]) == len(shape) else None
    read = next((array for array in step.reads if array in found), None)
    if read is None:
        return None
    if step.kind == "reduce":
        seen = _summed_shape(program, step)
        order = None if seen is None else _seen_as(program, read, seen, found)
        left = [dim for dim in range(len(order or ())) if dim not in attrs["dims"]]
        return None if order is None else tuple(left.index(dim) for dim in order if dim in left)
    if step.kind == "transpose":
        moved = attrs.get("permutation", ())
        before = [0] * len(moved)
        for dim, size in zip(moved, shape, strict=False):
            before[dim] = size
        order = _seen_as(program, read, before, found) if len(moved) == len(shape) else None
        return None if order is None else tuple(moved.index(dim) for dim in order)
    if step.kind == "reshape" or step.kind in ELEMENTWISE:
        return _seen_as(program, read, shape, found)
    return found[read] if step.kind in _CARRIED and len(found[read]) == len(shape) else None


def _reshaped(order: Order, before: Sequence[int], after: Sequence[int]) -> Order | None:
    """The layout of a reshape's result if it is a bitcast; None: row-major."""
    lying = [dim for dim in order if before[dim] > 1]
    left = [dim for dim, size in enumerate(after) if size > 1]
    found = {}  # first dim of a group before -> the group's dims after
    ahead = sorted(lying)
    while ahead:
        group, made = [ahead.pop(0)], [left.pop(0)]
        while (read := math.prod(before[dim] for dim in group)) != (size := math.prod(after[dim] for dim in made)):
            (group if read < size else made).append((ahead if read < size else left).pop(0))
        start = lying.index(group[0])
        if lying[start : start + len(group)] != group:
            return None
        found[group[0]] = made
    ones = [dim for dim, size in enumerate(after) if size == 1]
    return (*ones, *(dim for first in lying for dim in found.get(first, ())))
