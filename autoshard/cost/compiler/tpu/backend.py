"""XLA's TPU compiler: fusion, combined collectives, schedule.

Elementwise ops fuse into their users unless recomputing them reads more than storing their result; contractions also
fuse producers and elementwise users (epilogue fusion). So what is live between forward and backward pass are results
of contractions, gathers, reductions and collectives, and sums of several arrays with many users (a residual stream).
Values that only contractions use are stored in bf16, the precision of these. All-reduces work in place in device
memory, not on chip; collectives are combined up to 120 MiB.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from functools import cache, partial
from typing import ClassVar

from autoshard.cost.compiler.backend import Backend, Compiled, Placement, Traffic
from autoshard.cost.compiler.kernels import Fusion, Kernel
from autoshard.cost.compiler.list_schedule import greedy
from autoshard.cost.compiler.lowered import ROUNDING, Array, Lowered, Step
from autoshard.cost.compiler.memory_order import FromResults
from autoshard.cost.compiler.multi_output import merged_outputs
from autoshard.cost.compiler.rewrite import scattered_onto
from autoshard.cost.compiler.schedule import (
    Dependencies,
    Liveness,
    combined,
    summed_over,
)
from autoshard.cost.compiler.tpu import rewrite, strips, units
from autoshard.cost.compiler.tpu.counted_peak import counted_peak
from autoshard.cost.compiler.tpu.fusion import MOVES, TpuFusion, reads_from_memory
from autoshard.cost.compiler.tpu.gathers import JOINED, gathered_in_pieces
from autoshard.cost.compiler.tpu.groups import in_groups
from autoshard.cost.compiler.tpu.hidden import asynchronous, hidden
from autoshard.cost.compiler.tpu.layout import convolution_tiles, for_convolution, row_major, tiled, tiles
from autoshard.cost.compiler.tpu.loops import as_loops, turned_operands, with_buffers
from autoshard.cost.compiler.tpu.place import Placing, multiplies_matrices, product_with_vectors
from autoshard.cost.compiler.tpu.results import several_results
from autoshard.cost.compiler.tpu.sparse_copies import beside_sparse_cores
from autoshard.cost.compiler.tpu.strip_widths import (
    FEW,
    SPLITS,
    annotated_view,
    as_annotated,
    as_images,
    convolved_whole,
    strip_widths,
    with_images_apart,
)
from autoshard.cost.machine import cycles
from autoshard.cost.machine.compute import CONTRACTIONS
from autoshard.cost.passes import Passes
from autoshard.experts.form import KINDS as EXPERTS
from autoshard.graph.groups import BARRIER, ELEMENTWISE

THRESHOLD = 120 * 2**20
"""Bytes up to which all-reduces are combined (libtpu's `xla_jf_crs_combiner_threshold_in_bytes`)."""

IN_PLACE = frozenset({"scatter", "dynamic_update_slice", BARRIER})
"""Kinds that update operands in place."""


def _updated_in_pieces(program: Lowered, array: int) -> bool:
    """Whether pieces of a gather update an array in place, so that no result takes over its buffer."""
    maker = program.arrays[array].maker
    return maker >= 0 and program.steps[maker].kind == JOINED


def _in_groups_and_strips(program: Lowered) -> Lowered:
    """Grouped feature reductions, then space-to-batch with the strip widths from before."""
    widths = strip_widths(program)
    return strips.cut_into_strips(rewrite.laid_out_for_convolutions(in_groups(program), widths), widths)


class CoarseTpuBackend(Backend):
    """XLA's TPU compiler, as far as all kinds and versions agree: tiles, fusion, on-chip memory."""

    alignment = 512
    reuses_results = False
    fills_late = True
    combined_up_to: ClassVar[Mapping[str, float]] = {"all-reduce": THRESHOLD}

    def buffer_bytes(self, array: Array) -> int:
        """Bytes of an array's buffer in its tiled layout."""
        if array.shape is None:
            return -(-array.bytes // self.alignment) * self.alignment
        size = array.bytes * tiled(array.shape, array.tile_dims) // max(math.prod(array.shape), 1)
        return -(-size // self.alignment) * self.alignment

    def layouts(self, program: Lowered) -> Mapping[int, Callable[[tuple[int, ...]], int]]:
        """What convolutions read and make has their layout; a scatter's rows take whole tiles of 128 elements."""
        like = cache(lambda dims: partial(for_convolution, within=dims))
        found = {array: like(dims) for array, dims in rewrite.convolved(program, arguments=True).items()}
        scattered = (array for step in program.steps if step.kind == "scatter" for array in step.writes)
        return found | dict.fromkeys(scattered, row_major)

    def fusion(self, program: Lowered) -> Fusion:
        """See `TpuFusion`."""
        return TpuFusion(program, self.device)

    def combine(self, kernels: list[Kernel], program: Lowered) -> list[Kernel]:
        """Merge elementwise kernels of one shape, and combine independent all-reduces over the same devices.

        The bf16 copy of an update for an all-gather merges with it, unless a combined all-reduce waits for the gather.
        """
        for kernel in kernels:
            if product_with_vectors(kernel, program) is not None:
                kernel.shares = True
                kernel.displaced |= {array for array in kernel.reads if _updated_in_pieces(program, array)}
        kernels = merged_outputs(
            kernels,
            lambda kernel: None if kernel.kind == ROUNDING else self._loop_over(kernel, program),
            lambda array: True,
        )
        kernels = several_results(kernels, program)

        for kernel in kernels:
            if kernel.kind in IN_PLACE or (kernel.kind in EXPERTS and len(kernel.writes) > 1 and not kernel.flops):
                kernel.shares = True  # gradients of gates take over the buffer of what they multiply
            elif product_with_vectors(kernel, program) is None:
                kernel.shares = False

        def size(kernel: Kernel) -> int:
            return sum(program.arrays[array].bytes for array in kernel.reads)

        kernels = combined(kernels, partial(summed_over, program), size, THRESHOLD, results=program.results)
        kernels = merged_outputs(
            kernels,
            lambda kernel: self._loop_over(kernel, program),
            lambda array: True,
            alike=lambda one, other: (one.kind == ROUNDING) != (other.kind == ROUNDING),
        )
        return with_buffers(kernels, program)

    @staticmethod
    def _loop_over(kernel: Kernel, program: Lowered) -> Hashable:
        """Shape of an elementwise kernel's results, or dims of a matrix-vector product; None for other kernels."""
        if any(reads_from_memory(program, program.steps[number]) for number in kernel.steps):
            return None
        made = [program.arrays[array] for array in kernel.writes]
        shapes = {found.shape or (found.elements, found.strips) if found.shape != () else () for found in made}
        if shapes == {()}:
            return None  # scalars' reductions stay apart: gradients need the number of labels, not the loss
        product = product_with_vectors(kernel, program)
        if product is not None:
            around = [program.arrays[array].shape or () for array in (*product.reads, *product.writes)]
            return "product", *sorted(max(around, key=math.prod))
        matrices = any(program.steps[number].kind in CONTRACTIONS for number in kernel.steps)
        loop = kernel.kind in ELEMENTWISE or kernel.kind == ROUNDING
        return tuple(shapes) if loop and not matrices and len(shapes) == 1 else None

    def order(self, kernels: Sequence[Kernel], deps: Dependencies, program: Lowered) -> list[int]:
        """The memory scheduler's order."""
        return self.lowest_peak(kernels, deps, program)

    def lowest_peak(self, kernels: Sequence[Kernel], deps: Dependencies, program: Lowered) -> list[int]:
        """The one of three schedules with the lowest peak by libtpu's count.

        On one core it is depth first where rows are gathered in pieces. Here one piece stands for all; with all of them
        live the greedy schedule's peak is higher.
        """
        reads = self.reads(kernels, program)
        found = FromResults(kernels, deps, reads, program.arrays, program.results, self.buffer_bytes)
        if self.device.cores == 1 and any(step.kind == JOINED for step in program.steps):
            return found.depth_first()
        first = greedy(kernels, deps, program.arrays, reads, late=self.fills_late)
        orders = [first, found.depth_first(), found.post_order()]
        return min(orders, key=lambda order: counted_peak(kernels, order, program, self.buffer_bytes))

    def store(self, kernels: Sequence[Kernel], program: Lowered) -> None:
        """Store values that only contractions use in bf16, and transposed copies that are sliced row-major.

        Their slices are bitcasts, which leaves no choice of layout: the last dim is padded to 128.
        """
        lying = rewrite.convolved(program)
        near, apart = convolved_whole(program), with_images_apart(program)
        views = {step.writes[0]: step for step in program.steps if annotated_view(program, step)}
        rounded = _Rounded(program, lying.keys())
        for kernel in kernels:
            for array in kernel.writes:
                found = program.arrays[array]
                if array in lying and found.shape is not None:
                    shape, item = found.shape, found.bytes // found.elements
                    if found.strips:
                        shape = (SPLITS * shape[0], *shape[1:-1], found.strips)
                    size = for_convolution(shape, lying[array])
                    other = as_annotated(program, views[array], shape) if array in views else tiled(shape)
                    few = min(shape[dim] for dim in lying[array]) < FEW and array not in near
                    wide = size >= rewrite.COPIED * other and array in apart
                    free = array in views or (wide if found.strips else few)
                    found.bytes = item * (other if free else size)
                    found.tiles = tiles(shape) if free else convolution_tiles(shape, lying[array])
                    if rounded.is_kept_narrow(array):
                        found.dtype, found.bytes = "bf16", found.bytes // 2
                    found.logical, found.shape = found.shape, None
                    continue
                if self._cut_up(array, program):
                    found.bytes = found.bytes * row_major(found.shape or ()) // found.elements
                    found.shape = None
                elif rounded.is_kept_narrow(array):
                    found.dtype, found.bytes = "bf16", found.bytes // 2

    @staticmethod
    def _cut_up(array: int, program: Lowered) -> bool:
        found = program.arrays[array]
        return (
            found.maker >= 0
            and program.steps[found.maker].kind == "transpose"
            and bool(found.shape)
            and any(program.steps[reader].kind == "slice" for reader in found.readers)
        )

    def kernel_seconds(self, compiled: Compiled) -> list[float | None]:
        """By libtpu's own estimates, for kinds that `cycles.toml` has."""
        model = cycles.model_of(self.device)
        if model is None:
            return super().kernel_seconds(compiled)
        moved = [
            float(sum(touched.values()) + sum(copied.values()))
            for touched, copied in zip(compiled.touched, compiled.copied, strict=True)
        ]
        return units.kernel_seconds(compiled.kernels, moved, compiled.program, model, self.device)

    def timed_as_traffic(self, compiled: Compiled) -> Sequence[Traffic]:
        """See `units.as_traffic`."""
        model = cycles.model_of(self.device)
        if model is None:
            return super().timed_as_traffic(compiled)
        return units.as_traffic(compiled, self.kernel_seconds(compiled), model, self.device)

    def place(self, kernels: Sequence[Kernel], program: Lowered, live: Liveness) -> Placement:
        """Memory space assignment, the rest in a heap; arguments stay on chip where there is room."""
        return Placing(self.device, self.buffer_bytes, kernels, program, live).placement()


class TpuBackend(CoarseTpuBackend):
    """The compiler for which `libtpu.toml` has figures."""

    @property
    def rewrites(self) -> Passes[Lowered]:
        """See `rewrite.py`, `strips.py` and `loops.py`."""
        return Passes(
            (
                rewrite.kernels_by_rows,
                partial(gathered_in_pieces, kind=self.device.kind),
                rewrite.gathered_results,
                as_loops,
                turned_operands,
                scattered_onto,
                rewrite.scattered_by_rows,
                rewrite.looked_up_by_rows,
                rewrite.moved_by_rows,
                as_images,
                _in_groups_and_strips,
                rewrite.laid_out_for_products,
            )
        )

    def _hides(self, kernels: Sequence[Kernel], program: Lowered) -> bool:
        """Whether the latency hiding scheduler has anything to do."""
        return any(asynchronous(kernel, program, self.device) for kernel in kernels)

    def order(self, kernels: Sequence[Kernel], deps: Dependencies, program: Lowered) -> list[int]:
        """The memory scheduler's order, or the latency hiding scheduler's if collectives are asynchronous."""
        lowest = self.lowest_peak(kernels, deps, program)
        if not self._hides(kernels, program):
            return lowest
        return hidden(lowest, kernels, deps, program, self.device, self.buffer_bytes)

    def overlap(
        self, kernels: list[Kernel], order: list[int], deps: Dependencies, program: Lowered
    ) -> tuple[list[Kernel], list[int]]:
        """Sparse cores copy large narrow tables."""
        return beside_sparse_cores(kernels, order, program, self.device)


class _Rounded:
    """Arrays that only contractions use, data movement aside; reductions fuse into the producer and do not count.

    Nor does a comparison with a constant: the mask of an activation is stored apart, as bits (a ReLU between two
    dots; not around convolutions).
    """

    def __init__(self, program: Lowered, around: Set[int]) -> None:
        """`around`: operands and results of convolutions, and elementwise values around them."""
        self.program, self.arrays, self.steps, self.around = program, program.arrays, program.steps, set(around)
        self.known: dict[int, bool] = {}

    def is_kept_narrow(self, array: int) -> bool:
        found = self.arrays[array]
        if found.dtype != "f32" or found.shape is None or not self._only_products(array):
            return False
        return any(self._multiplies(self.steps[reader]) for reader in found.readers)

    def _multiplies(self, step: Step) -> bool:
        """Whether a step is no reduction, no mask, and no copy that only these use."""
        if step.kind == "copy":
            return any(map(self.is_kept_narrow, step.writes))
        return step.kind not in ("reduce", "compare")

    def _only_products(self, array: int) -> bool:
        todo = [] if array in self.known else [array]
        while todo:  # chains of data movement may be long
            found = self.arrays[todo[-1]]
            moves = (self.steps[reader] for reader in found.readers if self._moves(self.steps[reader]))
            behind = [one for step in moves for one in step.writes if one not in self.known]
            if not behind:
                passes = bool(found.readers) and not found.returned and all(map(self._passes, found.readers))
                self.known[todo.pop()] = passes
            todo += behind
        return self.known[array]

    @staticmethod
    def _moves(step: Step) -> bool:
        return step.kind in MOVES or step.kind in ("all-gather", "copy")

    def _passes(self, reader: int) -> bool:
        step = self.steps[reader]
        if step.kind in CONTRACTIONS:
            return multiplies_matrices(self.program, step)
        if step.kind in ("reduce", strips.EDGES) or (step.kind == "compare" and self._with_constant(step)):
            return True
        return self._moves(step) and all(self.known[one] for one in step.writes)

    def _with_constant(self, step: Step) -> bool:
        """Whether all of a step's other operands are constant expressions."""
        if not self.around.isdisjoint(step.reads):
            return False
        makers = [self.arrays[array].maker for array in dict.fromkeys(step.reads)]
        plain = [maker >= 0 and not self._reads_arrays(self.steps[maker]) for maker in makers]
        return len(plain) - sum(plain) == 1

    def _reads_arrays(self, step: Step) -> bool:
        return any(self.arrays[array].shape != () or self.arrays[array].maker < 0 for array in step.reads)
