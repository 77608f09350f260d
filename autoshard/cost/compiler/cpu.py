"""XLA's CPU compiler: fusion, combined collectives, schedule.

`CpuInstructionFusion` fuses loops into loops and duplicates cheap ones. Reductions and softmaxes become library calls,
each with the elementwise ops around it (`LibraryRewriter`: a producer joins if it has no other users, a user if it is
the only one). Dots fuse with nothing. All independent all-reduces become one, of any size (`CpuAllReduceCombiner`), so
all gradients and their sums are live together. Kernels run as they become ready (`BFScheduler`), so all weights are
gathered at the start of the step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import ClassVar

from autoshard.cost.compiler.backend import Backend
from autoshard.cost.compiler.kernels import Fusion, Kernel
from autoshard.cost.compiler.lowered import Lowered, Step
from autoshard.cost.compiler.rewrite import (
    Rewriter,
    by_parts,
    canonical_dot,
    folded_transposes,
    gather_majormost,
    without_reduce_scatter,
)
from autoshard.cost.compiler.rewrite_conv import canonical_convolution, expanded_select_and_scatter
from autoshard.cost.compiler.schedule import combined, summed_over
from autoshard.cost.passes import Passes

LIBRARY = frozenset(
    """add subtract multiply divide maximum minimum power abs ceil floor convert exponential negate sign
    broadcast_in_dim reshape""".split()  # noqa: SIM905
)
"""Kinds that join a reduction in its library call."""
LIBRARY_DTYPES = frozenset({"f32", "f64", "bf16"})


class CpuFusion(Fusion):
    """Loop fusion, and library calls around reductions."""

    recomputes = True

    def __init__(self, program: Lowered) -> None:
        """For one device's program."""
        super().__init__(program)
        self.libraries: set[int] = set()  # roots of library calls

    def absorbs(self, step: Step) -> bool:
        """Reductions fuse no producers by themselves; loops do."""
        return super().absorbs(step) and step.kind != "reduce"

    def reads_more(self, step: Step, kernels: int) -> bool:
        """Never a reason to materialise what all users can fuse."""
        return False

    def takes(self, reader: int, number: int) -> bool:
        """Library calls fuse broadcasts, of the producers of their operands."""
        if self.root[reader] != reader or reader in self.libraries:
            joins = self.steps[number].kind == "broadcast_in_dim" and self._joins(reader)
            return joins and self.steps[reader].kind != "dot_general"
        return super().takes(reader, number)

    def cluster(self) -> None:
        """Grow a library call around every reduction, from the last to the first."""
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
            while todo:  # producers
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
            down = self._only_user(root, seed)
            if down is not None and down not in taken:
                root = down
                members.add(root)
                taken.add(root)
                changed = True
        for member in members:
            self.root[member] = root
        self.libraries.add(root)

    def inlined(self, step: Step) -> bool:
        """Loops outside of library calls."""
        return super().inlined(step) and self.arrays[step.writes[0]].maker not in self.libraries

    def _repeated(self, number: int, step: Step) -> bool:
        """Also if only dots keep it, which read it in another shape: the reshape before them fuses it."""
        if super()._repeated(number, step):
            return True
        array = step.writes[0]
        keeping = [reader for reader in self.arrays[array].readers if not self.takes(reader, number)]
        cheap = len(step.writes) == 1 and self.inlined(step) and not self.expensive(step)
        own_kernel = self.root[number] == number and not self.arrays[array].returned
        return cheap and own_kernel and all(_reads_reshaped(self.program, reader, array) for reader in keeping)

    def _only_user(self, root: int, seed: int) -> int | None:
        """The only user of a kernel's result, if it may join: not if it scales a sum to a mean.

        As in all of 1,300 library calls of compiled training steps. A scaling after a broadcast moves before it
        (`AlgebraicSimplifier` sinks broadcasts).
        """
        found = self.arrays[self.steps[root].writes[0]]
        if len(found.readers) != 1 or found.returned:
            return None
        reader = found.readers[0]
        step = self.steps[reader]
        if step.kind in ("multiply", "divide") and found.bytes == self.arrays[self.steps[seed].writes[0]].bytes:
            return None
        if step.kind == "broadcast_in_dim" and self._scaled(step.writes[0]):
            return None
        return reader if self._joins(reader) and step.kind != "dot_general" else None

    def _scaled(self, array: int) -> bool:
        """Whether all users of an array multiply or divide it by a constant."""
        readers = [self.steps[reader] for reader in self.arrays[array].readers]
        scaled = all(step.kind in ("multiply", "divide") and set(step.reads) == {array} for step in readers)
        return scaled and not self.arrays[array].returned

    def _joins(self, number: int) -> bool:
        step = self.steps[number]
        return (step.kind in LIBRARY or step.kind in ("dot_general", "reduce")) and self._supported(number)

    def _supported(self, number: int) -> bool:
        step = self.steps[number]
        return len(step.writes) == 1 and all(
            self.arrays[array].dtype in LIBRARY_DTYPES for array in (*step.reads, *step.writes)
        )


def _is_outer(program: Lowered, step: Step) -> bool:
    """Whether a dot contracts no dim: `AlgebraicSimplifier` makes it a loop."""
    op = program.graph.ops[step.op]
    shape = program.graph.type_of(op.operands[0]).shape
    return len(step.reads) == 2 and all(shape[dim] == 1 for dim in op.attrs["lhs_contract"])


def _is_reshaped(program: Lowered, array: int) -> bool:
    """Whether an array is a dot's result with other than one row and one column dim."""
    maker = program.arrays[array].maker
    step = program.steps[maker] if maker >= 0 else None
    return step is not None and step.kind == "dot_general" and any(_merges(program, step, side) for side in (0, 1))


def _reads_reshaped(program: Lowered, reader: int, array: int) -> bool:
    """Whether a step is a dot that reads an array of another rank as a matrix."""
    step = program.steps[reader]
    if step.kind != "dot_general" or len(step.reads) != 2:
        return False
    return all(_merges(program, step, side) for side, read in enumerate(step.reads) if read == array)


def _merges(program: Lowered, step: Step, side: int) -> bool:
    """Whether a dot merges an operand's free dims, which are other than one, into one."""
    op = program.graph.ops[step.op]
    name = ("lhs", "rhs")[side]
    taken = len(op.attrs[f"{name}_batch"]) + len(op.attrs[f"{name}_contract"])
    return len(program.graph.type_of(op.operands[side]).shape) - taken != 1


def _for_libraries(program: Lowered) -> Lowered:
    """Legalise for libraries: all-reduces for reduce-scatters; copies around inner gathers, all-to-alls and dots."""
    rewriter = Rewriter(program)
    for step in program.steps:
        if step.kind == "reduce-scatter":
            without_reduce_scatter(rewriter, step)
        elif step.kind == "all-gather" and _inner(program, step):
            gather_majormost(rewriter, step)
        elif step.kind == "all-to-all":
            by_parts(rewriter, step)
        elif step.kind == "dot_general" and _is_outer(program, step):
            rewriter.emit(replace(step, kind="multiply", flops=0.0))
        elif step.kind == "dot_general":
            canonical_dot(rewriter, step, program.graph.ops[step.op])
        elif step.kind == "convolution":
            canonical_convolution(rewriter, step, program.graph.ops[step.op])
        elif step.kind == "select_and_scatter":
            expanded_select_and_scatter(rewriter, step, program.graph.ops[step.op])
        else:
            rewriter.emit(step)
    return rewriter.result()


def _inner(program: Lowered, step: Step) -> bool:
    shape = program.arrays[step.reads[0]].shape
    return step.dim is not None and shape is not None and math.prod(shape[: step.dim]) > 1


class CpuBackend(Backend):
    """XLA's CPU compiler."""

    combined_up_to: ClassVar[Mapping[str, float]] = {"all-reduce": math.inf}

    @property
    def rewrites(self) -> Passes[Lowered]:
        """Collectives and dots legalised for their libraries."""
        return Passes((folded_transposes, _for_libraries))

    def fusion(self, program: Lowered) -> Fusion:
        """See `CpuFusion`."""
        return CpuFusion(program)

    def combine(self, kernels: list[Kernel], program: Lowered) -> list[Kernel]:
        """Combine all independent all-reduces of one dtype over the same devices.

        Loops take over no buffers of dots that they read in another shape.
        """
        for kernel in kernels:
            kernel.displaced |= {array for array in kernel.reads if _is_reshaped(program, array)}

        return combined(kernels, partial(summed_over, program), lambda kernel: 0, math.inf)
