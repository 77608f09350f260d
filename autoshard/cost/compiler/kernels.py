"""Fusion: which steps of a device's program run as one kernel, and so which arrays are materialised.

A target's `Fusion` says which producers each kernel can fuse. An array is *materialised* if a user cannot fuse its
producer, if it is a result, or if computing it once per user costs more than storing it (XLA's `InstructionFusion`
duplicates no expensive ops, nor those that read more than they write). A step whose result is not materialised runs in
the kernels of all its users.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass, field

from autoshard.cost.compiler.lowered import SLICE, UPDATES, Array, Lowered, Step
from autoshard.graph.groups import BARRIER, ELEMENTWISE

EXPENSIVE = frozenset(
    """divide exponential exponential_minus_one log log_plus_one logistic tanh erf erf_inv power sqrt rsqrt cbrt atan2
    tan sine cosine remainder digamma lgamma acos asin atan cosh sinh acosh asinh atanh reduce gather reduce_window
    """.split()  # noqa: SIM905
)
"""Kinds that XLA duplicates into no user."""

LOOPS = ELEMENTWISE | {
    "broadcast_in_dim", "transpose", "reshape", "reverse", "slice", "dynamic_slice", "dynamic_update_slice", "pad",
    "concatenate", "gather", "iota", SLICE,
}  # fmt: skip
"""Kinds whose result elements depend on few operand elements each: they fuse as producers."""

REORDERING = frozenset({"transpose", "reverse", "gather", "slice", "pad", "concatenate", "dynamic_slice", SLICE})
"""Loops that read operand elements at other positions."""


@dataclass(slots=True, eq=False)
class Kernel:
    """Steps that run as one kernel.

    Attributes:
        steps: their numbers; the last is the root.
        reads: materialised operands, each once.
        writes: materialised results.
        kind: the root's.
        place: the largest number of its steps: its position in the program.
        shares: whether a result may take over the buffer of an operand of the same size.
        displaced: operands excepted from that: read in another element order than results are written.
        viewed: operands for which it holds only in buffers of results: tuple elements, or reshaped.
        workspace: bytes of scratch memory.
    """

    steps: tuple[int, ...]
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    kind: str
    place: int
    shares: bool = False
    workspace: int = 0
    flops: float = field(default=0.0)
    displaced: frozenset[int] = frozenset()
    viewed: frozenset[int] = frozenset()


def operand_dtype(kernel: Kernel, program: Lowered) -> str:
    """Operand dtype of a kernel's first contraction; `f32` without one."""
    product = next((program.steps[number] for number in kernel.steps if program.steps[number].flops), None)
    return program.arrays[product.reads[0]].dtype if product is not None and product.reads else "f32"


class Fusion:
    """The fusion pass; subclasses override what differs between targets."""

    duplicates = True
    """Whether a step may run in several kernels."""
    recomputes = False
    """Whether a materialised step is also duplicated into users that can fuse it at no more reads."""

    def __init__(self, program: Lowered) -> None:
        """For one device's program."""
        self.program = program
        self.arrays, self.steps = program.arrays, program.steps
        self.root: list[int] = list(range(len(self.steps)))  # step -> root of its library call
        self.again: set[int] = set()  # materialised arrays, recomputed in kernels that fuse their producer

    # ---- what targets differ in

    def cluster(self) -> None:
        """Merge steps into library calls, through `root`."""

    def absorbs(self, step: Step) -> bool:
        """Whether the kernel of this step fuses producers."""
        return step.kind in LOOPS or step.kind == "reduce"

    def inlined(self, step: Step) -> bool:
        """Whether a step may fuse into its users."""
        return step.kind in LOOPS

    def expensive(self, step: Step) -> bool:
        """Whether a step must not be duplicated into several users."""
        return step.kind in EXPENSIVE

    # ---- the algorithm

    def kernels(self) -> list[Kernel]:
        """All kernels, in program order."""
        self.cluster()
        kept = self.materialised()
        found: list[Kernel] = []
        members: dict[int, list[int]] = {}
        for number, root in enumerate(self.root):
            members.setdefault(root, []).append(number)
        for root in sorted(members):
            made = (array for number in members[root] for array in self.steps[number].writes)
            writes = tuple(array for array in made if array in kept or self.steps[root].kind == BARRIER)
            if writes:
                found.append(self._kernel(root, members[root], writes, kept))
        return found

    def materialised(self) -> set[int]:
        """Materialised arrays, without arguments."""
        kept: set[int] = set()
        homes: list[frozenset[int]] = [frozenset()] * len(self.steps)  # step -> kernels that run it
        for number in range(len(self.steps) - 1, -1, -1):
            step = self.steps[number]
            in_readers: frozenset[int] = frozenset()
            for array in step.writes:
                readers = [reader for reader in self.arrays[array].readers if self.root[reader] != self.root[number]]
                around = (
                    homes[readers[0]]
                    if len(readers) == 1
                    else frozenset().union(*[homes[reader] for reader in readers])
                )
                if self._kept(number, step, array, readers, len(around)):
                    kept.add(array)
                    taking = [reader for reader in readers if self.takes(reader, number)]
                    if self.recomputes and taking and self._repeated(number, step):
                        self.again.add(array)
                        in_readers |= frozenset().union(*(homes[reader] for reader in taking))
                else:
                    in_readers = in_readers | around if in_readers else around
            own = self.root[number] != number or any(array in kept for array in step.writes) or not in_readers
            homes[number] = in_readers | {self.root[number]} if own else in_readers
        return kept

    def _kept(self, number: int, step: Step, array: int, readers: Sequence[int], kernels: int) -> bool:
        if self.arrays[array].returned:
            return True
        if not readers:
            return False
        if self.root[number] != number or not self.inlined(step) or len(step.writes) > 1:
            return True
        if not all(self.takes(reader, number) for reader in readers):
            return True
        if kernels == 1:
            return False
        return not self.duplicates or self.expensive(step) or self.reads_more(step, kernels)

    def _repeated(self, number: int, step: Step) -> bool:
        """Whether a materialised step is also duplicated into users: a cheap loop with at most one operand of its rank.

        Broadcasts do not count (`effectively_at_most_unary` in XLA's `InstructionFusion`).
        """
        if self.root[number] != number or len(step.writes) > 1 or not self.inlined(step) or self.expensive(step):
            return False
        dims = rank(self.arrays[step.writes[0]])
        large = [a for a in dict.fromkeys(step.reads) if rank(self.arrays[a]) >= dims and not self._broadcast(a)]
        return len(large) <= 1

    def _broadcast(self, array: int) -> bool:
        maker = self.arrays[array].maker
        return maker >= 0 and self.steps[maker].kind == "broadcast_in_dim"

    def takes(self, reader: int, number: int) -> bool:
        """Whether the kernel of step `reader` can fuse step `number`."""
        return self.root[reader] == reader and self.absorbs(self.steps[reader])

    def reads_more(self, step: Step, kernels: int) -> bool:
        """Whether duplicating a step reads more: it has several operands as large as its result."""
        made = math.prod(self.arrays[step.writes[0]].shape or (1,))
        sizes = [math.prod(self.arrays[array].shape or (1,)) for array in dict.fromkeys(step.reads)]
        return sum(size >= made for size in sizes) > 1

    def _kernel(self, root: int, members: Sequence[int], writes: tuple[int, ...], kept: Set[int]) -> Kernel:
        reads: dict[int, None] = {}
        seen: dict[int, None] = dict.fromkeys(members)
        todo = list(members)
        while todo:
            reader = todo.pop()
            step = self.steps[reader]
            for array in step.reads:
                maker = self.arrays[array].maker
                again = array in self.again and self.takes(reader, maker)
                if maker < 0 or (array in kept and maker not in seen and not again):
                    reads.setdefault(array)
                elif maker not in seen:
                    seen[maker] = None
                    todo.append(maker)
        kind = self.steps[root].kind
        flops = sum(self.steps[number].flops for number in seen)
        steps = tuple(sorted(seen))
        shares = kind in LOOPS or kind in UPDATES
        displaced = self._displaced(steps) if kind in LOOPS else frozenset()
        return Kernel(steps, tuple(reads), writes, kind, max(members), shares, 0, flops, displaced)

    def _displaced(self, steps: Sequence[int]) -> frozenset[int]:
        """Arrays that these steps read through a transpose (XLA shares buffers of elementwise operands only)."""
        found: set[int] = set()
        for number in reversed(steps):
            step = self.steps[number]
            if step.kind in REORDERING or not found.isdisjoint(step.writes):
                found.update(step.reads)
        return frozenset(found)


def rank(array: Array) -> int:
    """Number of dims larger than 1; of an array of unknown shape, more than any."""
    return 99 if array.shape is None else sum(size > 1 for size in array.shape)
