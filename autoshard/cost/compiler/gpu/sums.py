"""Over which dims XLA's GPU compiler sums, as they lie in memory: what decides which kernels sums run in.

Dims lie in their order, but for what convolutions make: features last (`dim_labels=b01f`), which elementwise ops,
transposes and reshapes carry on for as long as that moves no element. Sums along the last dims in memory are sums of
rows, of which a normalisation is one kernel; others are kernels that no reader of the sum joins.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

from autoshard.cost.compiler.kernels import Kernel
from autoshard.cost.compiler.lowered import COLLECTIVES, SLICE, Array, Lowered, Step
from autoshard.graph.groups import ELEMENTWISE

Order = tuple[int, ...]
"""Dims from the outermost in memory to the innermost."""

_CARRIED = COLLECTIVES | {
    SLICE, "slice", "pad", "concatenate", "reverse", "reduce_window", "select_and_scatter", "scatter",
}  # fmt: skip
"""Kinds whose result lies as an operand does."""


class Sums:
    """The sums of one device's program."""

    def __init__(self, program: Lowered) -> None:
        """For a program before kernels are merged."""
        self.program = program
        self.orders = _orders(program)

    def over(self, step: Step) -> tuple[tuple[bool, int], ...] | None:
        """Whether a step sums along dims, and how many elements they have; neighbours in memory taken together.

        Those of one element are left out. None: not known.
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
        """What kernels that sum must agree on to run as one (`FusionHeroesAreCompatible`); None: it does not sum."""
        step = self.program.steps[kernel.steps[-1]] if kernel.kind == "reduce" and kernel.steps else None
        return None if step is None or step.kind != "reduce" else self.over(step)

    def joins(self, array: int) -> bool:
        """Whether what reads an array may run in the kernel that makes it: nothing that reads sums of columns."""
        maker = self.program.arrays[array].maker
        step = self.program.steps[maker] if maker >= 0 else None
        return step is None or step.kind != "reduce" or _is_of_rows(self.over(step))

    def makes_rows(self, kernel: Kernel) -> bool:
        """Whether all sums that a kernel returns are of rows."""
        made = [self.over(step) for step in self._steps(kernel) if not set(step.writes).isdisjoint(kernel.writes)]
        return bool(made) and all(over and over[-1][0] for over in made)

    def normalises(self, kernel: Kernel) -> bool:
        """Whether a kernel sums over the last dims alone, and goes on with the sums."""
        read = {array for number in kernel.steps for array in self.program.steps[number].reads}
        return any(
            not read.isdisjoint(step.writes) and (over := self.over(step)) is not None and len(over) == 2 and over[1][0]
            for step in self._steps(kernel)
        )

    def _steps(self, kernel: Kernel) -> list[Step]:
        steps = (self.program.steps[number] for number in kernel.steps)
        return [step for step in steps if step.kind == "reduce"]


def _summed_shape(program: Lowered, step: Step) -> tuple[int, ...] | None:
    """The shape in which a sum reads its operand, which may lie there in another; None: not known, or a product."""
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
    if math.prod(seen) and seen[first] * math.prod(shape) % math.prod(seen) == 0:  # it may be split
        seen[first] = seen[first] * math.prod(shape) // math.prod(seen)
    return tuple(seen) if math.prod(seen) == math.prod(shape) else None


def _seen_as(program: Lowered, array: int, shape: Sequence[int], orders: dict[int, Order]) -> Order | None:
    """How an array lies for what reads it in this shape; None: in the order of its dims."""
    before = program.arrays[array].shape
    if array not in orders or before is None or math.prod(before) != math.prod(shape) or not math.prod(shape):
        return None
    return _reshaped(orders[array], before, shape)


def _is_of_rows(over: Sequence[tuple[bool, int]] | None) -> bool:
    return over is None or not over or (over[-1][0] and sum(summed for summed, _ in over) == 1)


def _orders(program: Lowered) -> dict[int, Order]:
    """Array -> how it lies, of those that do not lie in the order of their dims."""
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
    """How the result of a reshape lies, if no element moves; None: it lies in the order of its dims."""
    lying = [dim for dim in order if before[dim] > 1]
    left = [dim for dim, size in enumerate(after) if size > 1]
    found = {}  # the first of some dims before -> those that they become
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
