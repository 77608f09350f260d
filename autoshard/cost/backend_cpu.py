"""XLA's CPU compiler: what it fuses, combines, and in which order it runs.

`CpuInstructionFusion` fuses loops into loops, and duplicates what is cheap. Sums and softmaxes go to a library, each
with the elementwise ops around it (`LibraryRewriter`: an operand joins when nothing outside reads it, the one reader
joins when there is one). Products run alone. All all-reduces that do not depend on each other become one, whatever
their size (`CpuAllReduceCombiner`), so all gradients and their sums are in memory together. Kernels run in the order in
which they become ready (`BFScheduler`), so every weight is gathered at the start of the step.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import ClassVar

from autoshard.cost.backend import Backend
from autoshard.cost.kernels import Fusion, Kernel
from autoshard.cost.lowered import Lowered, Step
from autoshard.cost.rewrite import (
    Rewriter,
    by_parts,
    canonical_dot,
    folded_transposes,
    gather_majormost,
    without_reduce_scatter,
)
from autoshard.cost.rewrite_conv import canonical_convolution, expanded_select_and_scatter
from autoshard.cost.schedule import Dependencies, breadth_first, combined

LIBRARY = frozenset(
    """add subtract multiply divide maximum minimum power abs ceil floor convert exponential negate sign
    broadcast_in_dim reshape""".split()  # noqa: SIM905
)
"""Kinds that join a sum in its library kernel."""
LIBRARY_DTYPES = frozenset({"f32", "f64", "bf16"})


class CpuFusion(Fusion):
    """Loop fusion, and library kernels around sums."""

    def absorbs(self, step: Step) -> bool:
        """Sums read what is in memory; loops take loops in."""
        return super().absorbs(step) and step.kind != "reduce"

    def takes(self, reader: int, number: int) -> bool:
        """Library kernels take broadcasts in."""
        clustered = self.steps[number].kind == "broadcast_in_dim" and self._joins(reader)
        return super().takes(reader, number) or (clustered and self.steps[reader].kind != "dot_general")

    def cluster(self) -> None:
        """Grow a library kernel around every sum, from the last to the first."""
        taken: set[int] = set()
        for number in range(len(self.steps) - 1, -1, -1):
            if self.steps[number].kind == "reduce" and number not in taken and self._supported(number):
                self._grow(number, taken)

    def _grow(self, seed: int, taken: set[int]) -> None:
        members, root = {seed}, seed
        taken.add(seed)
        changed = True
        while changed:
            changed = False
            todo = list(members)
            while todo:  # up
                for array in self.steps[todo.pop()].reads:
                    found = self.arrays[array]
                    maker = found.maker
                    if maker < 0 or maker in taken or found.returned or not self._joins(maker):
                        continue
                    if all(reader in members for reader in found.readers):
                        members.add(maker)
                        taken.add(maker)
                        todo.append(maker)
                        changed = True
            down = self._only_reader(root)
            if down is not None and down not in taken:
                root = down
                members.add(root)
                taken.add(root)
                changed = True
        for member in members:
            self.root[member] = root

    def _only_reader(self, root: int) -> int | None:
        """The one reader of a kernel's result, if it may join."""
        found = self.arrays[self.steps[root].writes[0]]
        if len(found.readers) != 1 or found.returned:
            return None
        reader = found.readers[0]
        return reader if self._joins(reader) and self.steps[reader].kind != "dot_general" else None

    def _joins(self, number: int) -> bool:
        step = self.steps[number]
        return (step.kind in LIBRARY or step.kind in ("dot_general", "reduce")) and self._supported(number)

    def _supported(self, number: int) -> bool:
        step = self.steps[number]
        return len(step.writes) == 1 and all(
            self.arrays[array].dtype in LIBRARY_DTYPES for array in (*step.reads, *step.writes)
        )


class CpuBackend(Backend):
    """XLA's CPU compiler."""

    combined_up_to: ClassVar[Mapping[str, float]] = {"all-reduce": math.inf}

    def rewrite(self, program: Lowered) -> Lowered:
        """No reduce-scatters; gathers along inner dims, all-to-alls and products with copies."""
        program = folded_transposes(program)
        rewriter = Rewriter(program)
        for step in program.steps:
            if step.kind == "reduce-scatter":
                without_reduce_scatter(rewriter, step)
            elif step.kind == "all-gather" and self._inner(program, step):
                gather_majormost(rewriter, step)
            elif step.kind == "all-to-all":
                by_parts(rewriter, step)
            elif step.kind == "dot_general":
                canonical_dot(rewriter, step, program.graph.ops[step.op])
            elif step.kind == "convolution":
                canonical_convolution(rewriter, step, program.graph.ops[step.op])
            elif step.kind == "select_and_scatter":
                expanded_select_and_scatter(rewriter, step, program.graph.ops[step.op])
            else:
                rewriter.emit(step)
        return rewriter.result()

    @staticmethod
    def _inner(program: Lowered, step: Step) -> bool:
        shape = program.arrays[step.reads[0]].shape
        return step.dim is not None and shape is not None and math.prod(shape[: step.dim]) > 1

    def fusion(self, program: Lowered) -> Fusion:
        """See `CpuFusion`."""
        return CpuFusion(program)

    def combine(self, kernels: list[Kernel], program: Lowered) -> list[Kernel]:
        """All independent all-reduces of one dtype over the same devices are one."""

        def key(kernel: Kernel) -> Hashable:
            step = program.steps[kernel.steps[-1]]
            if kernel.kind != "all-reduce" or step.collective is None:
                return None
            return step.collective.axes, program.arrays[step.writes[0]].dtype

        return combined(kernels, key, lambda kernel: 0, math.inf)

    def order(self, kernels: Sequence[Kernel], deps: Dependencies, program: Lowered) -> list[int]:
        """As they become ready."""
        return breadth_first(deps)
