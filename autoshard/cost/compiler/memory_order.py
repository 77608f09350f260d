"""The two schedules of XLA's memory scheduler that start from results: depth first, and in post-order."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autoshard.cost.compiler.kernels import Kernel
from autoshard.cost.compiler.lowered import Array
from autoshard.cost.compiler.schedule import Dependencies, Reads, passes
from autoshard.graph.orders import post_order


class FromResults:
    """The instructions of a program: kernels, arguments, elements of tuples, bitcasts, and the root.

    Attributes:
        operands: of every instruction, each once.
        bytes: that an instruction defines.
    """

    def __init__(
        self,
        kernels: Sequence[Kernel],
        deps: Dependencies,
        reads: Reads,
        arrays: Sequence[Array],
        results: Sequence[int],
        rounded: Callable[[Array], int],
    ) -> None:
        """For kernels in program order; `results`: the program's arrays; `rounded`: bytes of an array's buffer."""
        self.kernels = kernels
        self.operands = [list(read) for read in reads.of]
        self.bytes = [
            0 if passes(kernel) else sum(rounded(arrays[array]) for array in kernel.writes) for kernel in kernels
        ]
        of = {array: number for number, kernel in enumerate(kernels) for array in kernel.writes}
        for number, viewed in enumerate(reads.viewed[len(kernels) :], len(kernels)):
            array = reads.arrays[number]
            assert array is not None
            self._add([] if viewed is None else [viewed], rounded(arrays[array]) if viewed is None else 0)
            if viewed is None or viewed < len(kernels):
                of[array] = number
        roots = list(dict.fromkeys(of[array] for array in results if array in of))
        self.held = [set(waits) - set(makers) for waits, makers in zip(deps.waits, deps.makers, strict=True)]
        self._add(roots, 0)

    def _add(self, operands: list[int], size: int) -> None:
        self.operands.append(operands)
        self.bytes.append(size)

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
        roots = (len(self.operands) - 1, *range(len(self.kernels)))
        return post_order(roots, lambda number: self._before(number, visited))

    def _before(self, number: int, visited: Sequence[Sequence[int]]) -> Sequence[int]:
        held = self.held[number] if number < len(self.held) else None
        return [*visited[number], *sorted(held)] if held else visited[number]
