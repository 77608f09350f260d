"""Rewrites of a device's program that compilers do before they fuse: each returns a new program.

They work on a copy of the steps; arrays that are no longer made or read stay in the list, with no maker and no readers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from autoshard.cost.lowered import SLICE, Array, Lowered, Step

Emit = Callable[[Step], None]


class Rewriter:
    """Copies a program step by step, with changes."""

    def __init__(self, program: Lowered) -> None:
        """For `program`, which stays as it is."""
        self.source = program
        self.arrays = [replace(array, readers=[]) for array in program.arrays]
        self.steps: list[Step] = []
        self.instead: dict[int, int] = {}  # array -> the array that is read instead

    def array(self, like: int, bytes: int | None = None, shape: tuple[int, ...] | None = None) -> int:
        """A new array of the dtype of array `like`, and of its shape unless `bytes` differ."""
        old = self.arrays[like]
        size = old.bytes if bytes is None else bytes
        if size == old.bytes and shape is None:
            shape = old.shape
        self.arrays.append(Array(shape, old.dtype, size, -1))
        return len(self.arrays) - 1

    def emit(self, step: Step) -> None:
        """Append a step; its operands are renamed as `instead` says."""
        reads = tuple(self.instead.get(array, array) for array in step.reads)
        number = len(self.steps)
        for array in dict.fromkeys(reads):
            self.arrays[array].readers.append(number)
        for array in step.writes:
            self.arrays[array].maker = number
        self.steps.append(replace(step, reads=reads))

    def result(self) -> Lowered:
        """The new program."""
        for old, new in self.instead.items():  # a result that has become another array
            if self.arrays[old].returned:
                self.arrays[new].returned = True
                self.arrays[new].donated = self.arrays[old].donated
                self.arrays[old].returned = False
        results = [self.instead.get(array, array) for array in self.source.results]
        return Lowered(self.arrays, self.steps, results, self.source.graph)


def without_reduce_scatter(rewriter: Rewriter, step: Step) -> None:
    """An all-reduce of the whole, of which every device goes on with its part."""
    whole = rewriter.array(step.reads[0])
    rewriter.emit(replace(step, kind="all-reduce", writes=(whole,)))
    rewriter.emit(Step(SLICE, step.op, (whole,), step.writes))


def gather_majormost(rewriter: Rewriter, step: Step) -> None:
    """An all-gather along a dim that is not the outermost moves a transposed copy, and is copied back."""
    first = rewriter.array(step.reads[0])
    rewriter.emit(Step("transpose", step.op, step.reads, (first,)))
    moved = rewriter.array(step.writes[0])
    rewriter.emit(replace(step, reads=(first,), writes=(moved,)))
    rewriter.emit(Step("transpose", step.op, (moved,), step.writes))
