"""The schedules of XLA's memory scheduler that start from results, and its criterion to choose one.

`DefaultMemoryScheduler` of libtpu 0.0.51 logs the peak of each schedule and its choice
(`TPU_VMODULE=hlo_memory_scheduler=5`); the schedule is among the pass dumps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from autoshard.cost.compiler.kernels import Kernel
from autoshard.cost.compiler.lowered import Array, Lowered
from autoshard.cost.compiler.schedule import Dependencies
from autoshard.graph.orders import post_order

Rounded = Callable[[Array], int]
"""Bytes of an array's buffer."""


def counted_peak(kernels: Sequence[Kernel], order: Sequence[int], program: Lowered, rounded: Rounded) -> int:
    """Peak of a schedule by the scheduler's count, without arguments (`MinimumMemoryForModule`).

    Donated arguments die at their last user, beside the result that replaces them; only all-reduces take over a buffer.
    This count agrees with libtpu's log for six scheduled modules.
    """
    arrays = program.arrays
    last = {array: position for position, number in enumerate(order) for array in kernels[number].reads}
    change = np.zeros(len(order) + 1, dtype=np.int64)
    for position, number in enumerate(order):
        kernel = kernels[number]
        ending = [
            rounded(arrays[array])
            for array in (kernel.reads if kernel.kind == "all-reduce" else ())
            if last[array] == position and arrays[array].maker >= 0 and not arrays[array].returned
        ]
        for array in kernel.writes:
            size = rounded(arrays[array])
            taken = size in ending
            if taken:
                ending.remove(size)
                change[position + 1] += size
            else:
                change[position] += size
            change[len(order) if arrays[array].returned else last.get(array, position) + 1] -= size
    for result, argument in program.updates.items():
        if arrays[result].maker >= 0:
            change[last.get(argument, -1) + 1] -= rounded(arrays[argument])
    return int(np.cumsum(change[:-1]).max(initial=0))


class FromResults:
    """The instructions of a program: kernels, arguments, and get-tuple-elements of kernels with several results."""

    def __init__(self, kernels: Sequence[Kernel], deps: Dependencies, program: Lowered, rounded: Rounded) -> None:
        """For kernels in program order."""
        self.kernels = kernels
        self.operands: list[list[int]] = [[] for _ in kernels]
        self.bytes = [sum(rounded(program.arrays[array]) for array in kernel.writes) for kernel in kernels]
        self.of: dict[int, int] = {}  # array -> its instruction
        for number, kernel in enumerate(kernels):
            for array in kernel.writes:
                self.of[array] = self._added([number], 0) if len(kernel.writes) > 1 else number
        for number, kernel in enumerate(kernels):
            for array in kernel.reads:
                if array not in self.of:
                    self.of[array] = self._added([], rounded(program.arrays[array]))
            self.operands[number] = list(dict.fromkeys(self.of[array] for array in kernel.reads))
        self.held = [set(waits) - set(makers) for waits, makers in zip(deps.waits, deps.makers, strict=True)]
        results = list(dict.fromkeys(self.of[array] for array in program.results if array in self.of))
        self.root = self._added(results, 0)

    def _added(self, operands: list[int], size: int) -> int:
        self.operands.append(operands)
        self.bytes.append(size)
        return len(self.operands) - 1

    def post_order(self) -> list[int]:
        """`PostOrderScheduler`: operands in their order."""
        return [number for number in self._instructions(self.operands) if number < len(self.kernels)]

    def depth_first(self) -> list[int]:
        """`DFSMemoryScheduler`: operands with the most fan-out first, then those with the most bytes.

        Both are sums over all paths to an operand, bounded by all instructions, and by all bytes up to it in
        post-order.
        """
        users = [0] * len(self.operands)
        for operands in self.operands:
            for operand in operands:
                users[operand] += 1
        fans, totals = [0] * len(users), [0] * len(users)
        seen = 0
        for number in self._instructions(self.operands):
            seen += self.bytes[number]
            fan = max(0, users[number] - 1) + sum(fans[operand] for operand in self.operands[number])
            total = self.bytes[number] + sum(totals[operand] for operand in self.operands[number])
            fans[number], totals[number] = min(fan, len(users)), min(total, seen)
        visited = [sorted(operands, key=lambda one: (-fans[one], -totals[one], one)) for operands in self.operands]
        return [number for number in self._instructions(visited) if number < len(self.kernels)]

    def _instructions(self, visited: Sequence[Sequence[int]]) -> list[int]:
        """All instructions, operands first in the given order; from the results, then from those without users."""
        roots = (self.root, *range(len(self.kernels)))
        return post_order(roots, lambda number: self._before(number, visited))

    def _before(self, number: int, visited: Sequence[Sequence[int]]) -> Sequence[int]:
        held = self.held[number] if number < len(self.held) else None
        return [*visited[number], *sorted(held)] if held else visited[number]
