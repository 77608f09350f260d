"""XLA's TPU compiler: what it fuses, combines, and in which order it runs.

Everything elementwise runs inside the kernels that read it, however often that is: products take in their operands'
makers and what their result goes through, so what is kept between forward and backward pass are results of products,
gathers, sums and collectives. A value that products alone read is kept in bf16, the precision they run in.
All-reduces do not work in place; collectives are combined up to 120 MiB.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence, Set

from autoshard.cost.backend import Backend, Compiled
from autoshard.cost.compute import CONTRACTIONS
from autoshard.cost.kernels import LOOPS, Fusion, Kernel
from autoshard.cost.lowered import SLICE, Array, Lowered, Step
from autoshard.cost.on_chip import Life, off_chip, packed
from autoshard.cost.schedule import Dependencies, combined, dependencies, greedy, liveness
from autoshard.graph.groups import ELEMENTWISE

THRESHOLD = 120 * 2**20
"""Bytes of results up to which collectives are combined (libtpu's `xla_jf_crs_combiner_threshold_in_bytes`)."""

MOVES = frozenset({"transpose", "reshape", "slice", "broadcast_in_dim", "concatenate", "pad", "reverse", SLICE})
"""Kinds that pass their operands' elements on."""

PRODUCTS = CONTRACTIONS


class TpuFusion(Fusion):
    """Products with what is elementwise around them, loops into everything."""

    def cluster(self) -> None:
        """A product's kernel goes on as long as one elementwise step alone reads what it made."""
        for number, step in enumerate(self.steps):
            if step.kind not in PRODUCTS or self.root[number] != number:
                continue
            members, last = [number], number
            while (following := self._following(last)) is not None:
                members.append(following)
                last = following
            for member in members:
                self.root[member] = last

    def _following(self, number: int) -> int | None:
        made = self.arrays[self.steps[number].writes[0]]
        if len(made.readers) != 1 or made.returned:
            return None
        reader = made.readers[0]
        step = self.steps[reader]
        joins = step.kind in ELEMENTWISE or step.kind in ("reshape", "transpose")
        if not joins or self.root[reader] != reader or len(step.writes) != 1:
            return None
        return reader if _elements(self.arrays[step.writes[0]]) == _elements(made) else None

    def absorbs(self, step: Step) -> bool:
        """Loops, sums and products take in what is made elementwise."""
        return super().absorbs(step) or step.kind in PRODUCTS

    def inlined(self, step: Step) -> bool:
        """Whatever makes each element of its result from few of its operands, gathers left out."""
        return step.kind in LOOPS and step.kind not in ("gather", "dynamic_update_slice")

    def takes(self, reader: int, number: int) -> bool:
        """Also in the middle of a product's kernel."""
        return self.absorbs(self.steps[reader])

    def expensive(self, step: Step) -> bool:
        """Nothing elementwise is."""
        return False

    def reads_more(self, step: Step) -> bool:
        """Never a reason to keep a result."""
        return False


def _elements(array: Array) -> int:
    return math.prod(array.shape) if array.shape is not None else array.bytes


def tiled(shape: tuple[int, ...]) -> int:
    """Elements of an array in tiles of 8 x 128, its dims laid out as to pad least."""
    if not shape:
        return 1
    if len(shape) == 1:
        return -(-shape[0] // 128) * 128
    total = math.prod(shape)
    best = None
    for lane, across in enumerate(shape):
        for row, along in enumerate(shape):
            if lane != row and across and along:
                size = total // (across * along) * (-(-across // 128) * 128) * (-(-along // 8) * 8)
                best = size if best is None or size < best else best
    return best or 0


class TpuBackend(Backend):
    """XLA's TPU compiler."""

    alignment = 512

    def buffer_bytes(self, array: Array) -> int:
        """Bytes of an array's buffer: in tiles."""
        if array.shape is None:
            return -(-array.bytes // self.alignment) * self.alignment
        size = array.bytes * tiled(array.shape) // max(math.prod(array.shape), 1)
        return -(-size // self.alignment) * self.alignment

    def fusion(self, program: Lowered) -> Fusion:
        """See `TpuFusion`."""
        return TpuFusion(program)

    def combine(self, kernels: list[Kernel], program: Lowered) -> list[Kernel]:
        """Independent all-reduces over the same devices, up to 120 MiB."""

        def key(kernel: Kernel) -> Hashable:
            step = program.steps[kernel.steps[-1]]
            if kernel.kind != "all-reduce" or step.collective is None:
                return None
            return step.collective.axes, program.arrays[step.writes[0]].dtype

        def size(kernel: Kernel) -> int:
            return sum(program.arrays[array].bytes for array in kernel.writes)

        return combined(kernels, key, size, THRESHOLD)

    def order(self, kernels: Sequence[Kernel], deps: Dependencies, program: Lowered) -> list[int]:
        """What frees most first."""
        return greedy(kernels, deps, program.arrays)

    def compile(self, program: Lowered) -> Compiled:
        """Kernels, order and memory of one device's program."""
        kernels = self.fusion(program).kernels()
        _round(program, {array for kernel in kernels for array in kernel.writes})
        kernels = self.combine(kernels, program)
        order = self.order(kernels, dependencies(kernels), program)
        live = liveness(kernels, order, program.arrays, self.buffer_bytes)
        arrays = program.arrays
        arguments = sum(self.buffer_bytes(array) for array in arrays if array.maker < 0)
        outputs = sum(
            self.buffer_bytes(array) for array in arrays if array.returned and not array.donated and array.maker >= 0
        )
        uses: dict[int, list[int]] = {array: [start] for array, (start, _) in live.spans.items()}
        for position, number in enumerate(order):
            for array in kernels[number].reads:
                if array in uses:
                    uses[array].append(position)
        held = list(uses)
        lives = [Life(live.sizes[array], (*uses[array],)) for array in held]
        blocks = [(*lives[place].span, lives[place].bytes) for place in off_chip(lives, self.device.on_chip_bytes)]
        return Compiled(
            program, tuple(kernels[number] for number in order), live, arguments, outputs, packed(blocks) + ASYNC_BYTES
        )


ASYNC_BYTES = 80 * 2**14
"""Bookkeeping of asynchronous copies: up to 40 each way are under way (`xla_msa_max_outstanding_prefetches`), 16 KiB each."""


def _round(program: Lowered, kept: Set[int]) -> None:
    """Give the arrays of `kept` that products alone read the dtype that products run in."""
    known: dict[int, bool] = {}

    def rounds(array: int) -> bool:
        if array not in known:
            known[array] = False
            found = program.arrays[array]
            known[array] = bool(found.readers) and not found.returned and all(map(passes, found.readers))
        return known[array]

    def passes(reader: int) -> bool:
        step = program.steps[reader]
        if step.kind in PRODUCTS or step.kind == "reduce":
            return True
        return (step.kind in MOVES or step.kind == "all-gather") and all(map(rounds, step.writes))

    for array in kept:
        found = program.arrays[array]
        feeds = any(program.steps[reader].kind != "reduce" for reader in found.readers)
        if found.dtype == "f32" and found.shape is not None and feeds and rounds(array):
            found.bytes //= 2
            found.dtype = "bf16"
