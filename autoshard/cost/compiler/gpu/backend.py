"""XLA's GPU compiler: fusion, combined collectives, schedule.

Loops fuse into loops, reductions and scatters as long as that moves fewer bytes (`PriorityFusion`). A matrix-vector dot
becomes a reduction and an outer product a loop (`AlgebraicSimplifier`: dot strength reduction); any other dot fuses
transposes, and is split along its contraction if that fills the GPU (`SplitkRewriter`). Collectives of one kind are
combined up to 30 MiB of results (`kDefault*CombineThreshold`), in post-order; all-reduces work in place, combined ones
on one array into which their operands are copied (`AllReduceContiguous`). Of three schedules the one with the lowest
peak (`DefaultMemoryScheduler`) goes to the latency hiding scheduler (`latency.py`), from Hopper on.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import ClassVar

from autoshard.cost.compiler.backend import Backend
from autoshard.cost.compiler.gpu.estimates import kernel_seconds
from autoshard.cost.compiler.gpu.merged_products import merged_products
from autoshard.cost.compiler.gpu.split_k import Product, split_k
from autoshard.cost.compiler.gpu.sums import Sums
from autoshard.cost.compiler.kernels import EXPENSIVE, LOOPS, Fusion, Kernel
from autoshard.cost.compiler.latency import Pressure, overlapped
from autoshard.cost.compiler.lowered import COLLECTIVES, END, SLICE, Array, Lowered, Step, matrices_of
from autoshard.cost.compiler.multi_output import merged_outputs
from autoshard.cost.compiler.rewrite import Rewriter, folded_transposes, scattered_onto
from autoshard.cost.compiler.rewrite_conv import cudnn_convolution, folded_kernels
from autoshard.cost.compiler.schedule import Dependencies, Reads, combined
from autoshard.cost.machine.device import Device
from autoshard.cost.partitioner.passes.simplify import fold
from autoshard.cost.passes import Passes
from autoshard.dtypes import dtype_bytes
from autoshard.experts.form import KINDS as EXPERTS
from autoshard.graph.groups import BARRIER, ELEMENTWISE

COMBINED = frozenset({"all-gather", "all-reduce", "reduce-scatter", "collective-permute"})
COMBINE_BYTES = 30 * 2**20
"""Bytes of results up to which collectives are combined (xla/service/collective_utils.h)."""
FUSED = LOOPS | {"reduce"}
"""Kinds of kernels that may have several results."""
MOST_OPERANDS = 64
PREALLOCATED, SCHEDULED = 0.75, 0.8
"""Parts of a GPU's memory: a kind's `usable_bytes`, and what the latency hiding scheduler counts on, of which it fills
`Device.slop` percent beside arguments and results (`GetSchedulerMemoryLimit`)."""
COSTLY = EXPENSIVE - {"divide", "erf", "erf_inv", "reduce", "gather", "reduce_window"}
"""Kinds whose result XLA stores where a reduction and another kernel read it (seen with jax 0.10.2, for H100)."""
JOINING = frozenset({"concatenate", "pad"})
"""Loops that no Triton kernel holds."""
SPLIT_K_SUM = "sum_of_parts"
"""The reduction after a split-K dot: it fuses as a producer."""


class GpuFusion(Fusion):
    """Fusion as long as it saves traffic."""

    def __init__(self, program: Lowered) -> None:
        """For one device's program."""
        super().__init__(program)
        self.little = self._broadcasts()
        self.sums = Sums(program)
        self.centred = self._centred()
        self.summed = self._summed()
        self.apart = self._apart()
        self.relus = {number for number, step in enumerate(self.steps) if _of_zero(program, step, "maximum")}

    def inlined(self, step: Step) -> bool:
        """Loops, reductions after a split-K dot, and sums of rows that are centred."""
        return step.kind in LOOPS or step.kind == SPLIT_K_SUM or self._centres(step)

    def _centres(self, step: Step) -> bool:
        return step.kind == "reduce" and self.sums.joins(step.writes[0])

    def _centred(self) -> set[int]:
        """Arrays of loops after sums of rows that are centred: Triton kernels compute them, and no other reduction."""
        found: set[int] = set()
        for step in self.steps:
            within = step.kind in LOOPS and not found.isdisjoint(step.reads)
            if within or self._centres(step):
                found.update(array for array in step.writes if not self._product_reads(array))
        return found

    def _summed(self) -> set[int]:
        """Arrays of loops that reductions sum, without those made from a reduction's result."""
        made: set[int] = set()
        for step in self.steps:
            if step.kind == "reduce" or (step.kind in LOOPS and not made.isdisjoint(step.reads)):
                made.update(step.writes)
        return self._before(step for step in self.steps if step.kind == "reduce") - made

    def _apart(self) -> set[int]:
        """Arrays between a Triton kernel and steps that none can hold: what follows a concatenation up to its users.

        Such as a softmax with sinks: scores beside one more logit, and the probabilities without it.
        """
        found: set[int] = set()
        within: set[int] = set()  # arrays of loops with a concatenation
        rows = self._before(step for step in self.steps if step.kind == "reduce" and self._centres(step))
        for step in self.steps:
            if step.kind in JOINING or (step.kind in ELEMENTWISE and not within.isdisjoint(step.reads)):
                made = self.arrays[step.writes[0]]
                after = self.steps[made.readers[0]] if len(made.readers) == 1 else None
                narrow = False
                if after is not None and after.kind in ELEMENTWISE:
                    narrow = self.arrays[after.writes[0]].bytes <= made.bytes
                (within if narrow else found).update(step.writes)
            if step.kind in JOINING or step.kind == "slice":
                centred = self.centred.intersection(step.reads)
                rows |= centred
                found |= centred
        return found & rows

    def _before(self, sums: Iterable[Step]) -> set[int]:
        """Arrays of loops that these reductions sum; what a product reads is stored."""
        found = {array for step in sums for array in step.reads}
        for step in reversed(self.steps):
            if step.kind in LOOPS and not found.isdisjoint(step.writes):
                found.update(array for array in step.reads if not self._product_reads(array))
        return found

    def _product_reads(self, array: int) -> bool:
        return any(self.steps[reader].flops for reader in self.arrays[array].readers)

    def absorbs(self, step: Step) -> bool:
        """Loops, reductions, pooling and scatters fuse loops."""
        return super().absorbs(step) or step.kind in (SPLIT_K_SUM, "scatter", "reduce_window")

    def takes(self, reader: int, number: int) -> bool:
        """Products take ReLUs, others all but what no Triton kernel holds.

        A scatter's operand is updated in place; centred rows are in no other sum.
        """
        step = self.steps[reader]
        if step.kind == "dot_general":
            return number in self.relus
        if not self.apart.isdisjoint(self.steps[number].writes):
            return False
        if step.kind == "reduce" and not self._centres(step) and not self.centred.isdisjoint(self.steps[number].writes):
            return False
        if step.kind == "scatter" and step.reads and step.reads[0] in self.steps[number].writes:
            return False
        return super().takes(reader, number)

    def expensive(self, step: Step) -> bool:
        """Only before a reduction: elsewhere traffic costs, not arithmetic."""
        return step.kind in COSTLY and not self.summed.isdisjoint(step.writes)

    def reads_more(self, step: Step, kernels: int) -> bool:
        """Whether duplicating a step moves more bytes than one write and a read per user.

        A slice reads as much as it returns; each Triton kernel computes its own sum of rows that it centres. Indices
        that are joined, with a number for each dim, are stored for several users, whatever they read (as compiled:
        `torch.gather` and its gradient).
        """
        if step.kind in ("slice", SLICE) or self._centres(step):
            return False
        array = self.arrays[step.writes[0]]
        if step.kind == "concatenate" and kernels > 1 and array.dtype[:1] in ("i", "u"):
            return True
        read = sum(self.little.get(operand, self.arrays[operand].bytes) for operand in dict.fromkeys(step.reads))
        return kernels * read > read + array.bytes + kernels * array.bytes

    def _broadcasts(self) -> dict[int, int]:
        """Array -> bytes of its sources, for arrays of broadcasts and elementwise steps on these.

        These are duplicated into all users (such as a mask of a head's classes).
        """
        found: dict[int, int] = {}
        for step in self.steps:
            if step.kind in ("broadcast_in_dim", "iota"):
                size = sum(self.arrays[array].bytes for array in step.reads)
            elif len(step.writes) == 1 and (step.kind in ELEMENTWISE or step.kind == "reshape"):
                if any(array not in found for array in step.reads):
                    continue
                size = sum(found[array] for array in dict.fromkeys(step.reads))
            else:
                continue
            found.update(dict.fromkeys(step.writes, size))
        return found


class GpuBackend(Backend):
    """XLA's GPU compiler."""

    alignment = 128
    gaps = True
    started = COLLECTIVES
    combined_up_to: ClassVar[Mapping[str, float]] = dict.fromkeys(COMBINED - {"collective-permute"}, COMBINE_BYTES)
    copies_of_combined: ClassVar[Mapping[str, int]] = {"all-reduce": 4}

    @property
    def rewrites(self) -> Passes[Lowered]:
        """Scatters and products as libraries and Triton take them, masks as the simplifier leaves them."""
        libraries = partial(_for_libraries, device=self.device)
        scattered = partial(scattered_onto, again=True)
        return Passes((_masks_before, scattered, folded_transposes, merged_products, libraries))

    def fusion(self, program: Lowered) -> Fusion:
        """See `GpuFusion`."""
        return GpuFusion(program)

    def store(self, kernels: Sequence[Kernel], program: Lowered) -> None:
        """Costly ops run in f32: their results are stored so where only loops and reductions read them."""
        for kernel in kernels:
            array = program.arrays[kernel.writes[0]]
            read = FUSED.issuperset(program.steps[reader].kind for reader in array.readers)
            if kernel.kind in COSTLY and array.dtype in ("bf16", "f16") and read and not array.returned:
                array.dtype, array.bytes = "f32", 2 * array.bytes

    def combine(self, kernels: list[Kernel], program: Lowered) -> list[Kernel]:
        """Combine independent collectives of one kind over the same devices, up to 30 MiB."""

        of_op: Counter[int] = Counter()  # op -> its permutes so far

        def key(kernel: Kernel) -> Hashable:
            step = program.steps[kernel.steps[-1]] if kernel.steps else None
            if kernel.kind not in COMBINED or step is None or step.collective is None:
                return None
            dtype = program.arrays[step.writes[0]].dtype
            if kernel.kind == "collective-permute":  # of equal ops: the same pairs of devices
                op = program.graph.ops[step.op]
                of_op[step.op] += 1
                shapes = tuple([program.graph.type_of(value).shape for value in op.operands])
                return kernel.kind, step.collective.axes, op.kind, repr(op.attrs), shapes, of_op[step.op]
            return kernel.kind, step.collective.axes, None if kernel.kind == "all-gather" else dtype

        def size(kernel: Kernel) -> int:
            return sum(program.arrays[array].bytes for array in kernel.writes)

        arrays = program.arrays
        sums = Sums(program)
        kernels = merged_outputs(
            kernels,
            partial(_elements, program, sums),
            lambda array: arrays[array].elements > 1 and not _makes_product(program, array),
            _reads_few,
            sums.of,
            sums.joins,
            siblings_first=True,
        )
        for kernel in kernels:
            if kernel.kind == "all-reduce" or _makes_sums_of_rows(kernel, sums):
                kernel.shares = True
            elif _is(kernel, "reduce", program) and kernel.kind in LOOPS and len(kernel.writes) > 1:
                kernel.shares = True
                kernel.displaced |= _of_several(kernel, program)
        merged = combined(kernels, key, size, COMBINE_BYTES, results=program.results)
        found = []
        for kernel in merged:
            if kernel.kind == "all-reduce" and len(kernel.writes) > 1:
                found += self._contiguous(kernel, program)
            else:
                found.append(kernel)
        _keep_viewed(found, program, sums)
        return found

    @staticmethod
    def _contiguous(kernel: Kernel, program: Lowered) -> list[Kernel]:
        """A combined all-reduce: copies of its operands into one array, the all-reduce in place, and slices of it."""
        arrays = program.arrays
        size = sum(arrays[array].bytes for array in kernel.writes)
        first = arrays[kernel.writes[0]]
        numbers = []
        for _ in range(2):
            arrays.append(Array(None, first.dtype, size, first.maker))
            numbers.append(len(arrays) - 1)
        copied = Kernel((), kernel.reads, (numbers[0],), "concatenate", kernel.place)
        summed = Kernel(kernel.steps, (numbers[0],), (numbers[1],), kernel.kind, kernel.place, shares=True)
        slices = [Kernel((), (numbers[1],), (array,), "slice", kernel.place) for array in kernel.writes]
        return [copied, summed, *slices]

    def order(self, kernels: Sequence[Kernel], deps: Dependencies, program: Lowered) -> list[int]:
        """The one with the lowest peak of three schedules."""
        return self.lowest_peak(kernels, deps, program)

    def reads(self, kernels: Sequence[Kernel], program: Lowered) -> Reads:
        """Products of more than two dims are read through bitcasts; cuDNN's convolutions return tuples."""
        return Reads.of_arrays(
            kernels,
            lambda kernel: len(kernel.writes) > 1 or _is(kernel, "convolution", program),
            lambda kernel: _bitcasts(kernel, program),
        )

    def overlap(
        self, kernels: list[Kernel], order: list[int], deps: Dependencies, program: Lowered
    ) -> tuple[list[Kernel], list[int]]:
        """See `latency.overlapped`: a collective holds its results from its start and its operands until its done."""
        if not self.device.overlaps:
            return kernels, order
        moves = [kernel.kind in COLLECTIVES for kernel in kernels]
        sums = Sums(program)
        takes = [kernel_seconds(kernel, program, self.device, sums) for kernel in kernels]
        found = list(kernels)
        numbers = []
        limit, reads = self._pressure(kernels, program), self.reads(kernels, program)
        for number, ends in overlapped(order, deps, takes, moves, reads, pressure=limit):
            if ends:
                kernel = kernels[number]
                held = kernel.writes if kernel.shares else (*kernel.reads, *kernel.writes)
                found.append(Kernel((), held, (), END, kernel.place))
                numbers.append(len(found) - 1)
            else:
                numbers.append(number)
        return found, numbers

    def _pressure(self, kernels: Sequence[Kernel], program: Lowered) -> Pressure:
        """Of temporaries, where the results of a barrier are its operands."""
        device, arrays, passed = self.device, program.arrays, dict[int, int]()
        for kernel in kernels:
            if kernel.kind == BARRIER:
                pairs = zip(kernel.writes, kernel.reads, strict=True)
                passed.update((new, passed.get(old, old)) for new, old in pairs)
        size = {number: self.buffer_bytes(each) for number, each in enumerate(arrays)}
        counted = {number for number, each in enumerate(arrays) if each.maker >= 0 and not each.returned}
        reads = [
            [each for each in dict.fromkeys(passed.get(array, array) for array in kernel.reads) if each in counted]
            for kernel in kernels
        ]
        makes = [[each for each in kernel.writes if each in counted and each not in passed] for kernel in kernels]
        memory = device.usable_bytes / PREALLOCATED if device.usable_bytes else device.memory_bytes or math.inf
        outside = sum(
            size[number] for number, each in enumerate(arrays) if each.maker < 0 or (each.returned and not each.donated)
        )
        return Pressure(0.01 * device.slop * (SCHEDULED * memory - outside), reads, makes, size)


def _masks_before(program: Lowered) -> Lowered:
    """`max(x, 0) > 0` is `x > 0` (`AlgebraicSimplifier`): the gradient of a ReLU reads what the ReLU reads."""
    rewriter = Rewriter(program)
    for step in program.steps:
        if _of_zero(program, step, "compare") and program.graph.ops[step.op].attrs["direction"] == "GT":
            before = program.arrays[step.reads[0]].maker
            if before >= 0 and _of_zero(program, program.steps[before], "maximum"):
                step = replace(step, reads=(program.steps[before].reads[0], *step.reads[1:]))
        rewriter.emit(step)
    return rewriter.result()


def _of_zero(program: Lowered, step: Step, kind: str) -> bool:
    """Whether a step is of this kind, and its second operand zero."""
    op = program.graph.ops[step.op]
    return step.kind == kind == op.kind and fold(program.graph).splat.get(op.operands[1]) == 0


def _bitcasts(kernel: Kernel, program: Lowered) -> dict[int, bool]:
    """Operands of a kernel's products that are bitcast to matrices -> whether to a transposed one.

    That is a left operand all of whose dims but the last are contracted.
    """
    found: dict[int, bool] = {}
    steps = {array: step for number in kernel.steps for step in [program.steps[number]] for array in step.writes}
    for number in kernel.steps:
        step = program.steps[number]
        if step.kind != "dot_general":
            continue
        depth = matrices_of(program, step)[-1]
        for place, array in enumerate(step.reads[:2]):
            while array in steps and steps[array].kind in ("reshape", "transpose"):
                array = steps[array].reads[0]
            shape = program.arrays[array].shape or ()
            if len(shape) > 2:
                found[array] = place == 0 and math.prod(shape[:-1]) == depth
    return found


def _for_libraries(program: Lowered, device: Device) -> Lowered:
    """cuDNN's convolutions; reductions for matrix-vector dots, loops for outer products, split-K for other dots.

    A collective runs along its layout's major-most dim: along another one, what dots and experts read of it, and what
    experts give it, is transposed.
    """
    rewriter = Rewriter(program)
    folded = folded_kernels(program)
    turned: dict[int, int] = {}  # what experts read -> its row-major copy
    for number, step in enumerate(program.steps):
        if number in folded:
            rewriter.instead[step.writes[0]] = rewriter.instead.get(step.reads[0], step.reads[0])
            continue
        if step.kind == "all-gather" and _gathers_inside(program, step):
            moved = rewriter.array(step.writes[0])
            rewriter.emit(replace(step, writes=(moved,)))
            rewriter.emit(Step("transpose", step.op, (moved,), step.writes))
            continue
        if step.kind in EXPERTS and step.flops:
            for array in step.reads:
                if array not in turned and _runs_inside(program, _origin(program, array), "all-gather"):
                    turned[array] = rewriter.array(array)
                    rewriter.emit(Step("transpose", step.op, (array,), (turned[array],)))
            rewriter.emit(replace(step, reads=tuple(turned.get(array, array) for array in step.reads)))
            continue
        if _runs_inside(program, step, "reduce-scatter"):
            made = _origin(program, step.reads[0])
            if made is not None and made.kind in EXPERTS:
                first = rewriter.array(step.reads[0])
                rewriter.emit(Step("transpose", step.op, step.reads, (first,)))
                rewriter.emit(replace(step, reads=(first,)))
                continue
        if step.kind == "convolution":
            cudnn_convolution(rewriter, step, program.graph.ops[step.op])
            continue
        product = _product(program, step) if step.kind == "dot_general" else None
        if product is not None and min(product.m, product.n, product.k) == 1:
            kind = "multiply" if product.k == 1 else "reduce"
            rewriter.emit(replace(step, kind=kind, flops=0.0))
            continue
        parts, padded = (
            (1, 0) if product is None else split_k(product, device.multiprocessors, device.compute_capability)
        )
        if product is None or parts == 1:
            rewriter.emit(step)
            continue
        reads = list(step.reads)
        for place, array in enumerate(reads):
            if padded != product.k:
                reads[place] = rewriter.array(array, bytes=program.arrays[array].bytes * padded // product.k)
                rewriter.emit(Step("pad", step.op, (array,), (reads[place],), values=step.values[place : place + 1]))
        cut = [_parts(rewriter, array, parts) for array in step.writes]
        rewriter.emit(replace(step, reads=tuple(reads), writes=tuple(cut)))
        for array, whole in zip(cut, step.writes, strict=True):
            rewriter.emit(Step(SPLIT_K_SUM, step.op, (array,), (whole,)))
    return rewriter.result()


def _parts(rewriter: Rewriter, array: int, parts: int) -> int:
    """An array for the partial results of a split contraction, in f32 at least."""
    whole = rewriter.arrays[array]
    wide = whole.dtype in ("bf16", "f16")
    found = rewriter.array(array, bytes=whole.bytes * parts * (2 if wide else 1))
    rewriter.arrays[found].dtype = "f32" if wide else whole.dtype
    return found


def _gathers_inside(program: Lowered, step: Step) -> bool:
    """Whether an all-gather for a dot runs along a dim that is not major-most, and so needs a transpose after it.

    Dots read a matrix column-major as well as row-major, so without transpose.
    """
    found = program.arrays[step.writes[0]]
    if not _runs_inside(program, step, step.kind) or sum(size > 1 for size in found.shape or ()) == 2:
        return False
    return any(program.steps[reader].kind == "dot_general" for reader in found.readers)


def _runs_inside(program: Lowered, step: Step | None, kind: str) -> bool:
    """Whether a step is a collective of this kind along a dim that is not major-most."""
    if step is None or step.kind != kind:
        return False
    shape = program.arrays[step.writes[0]].shape
    return bool(step.dim) and shape is not None and math.prod(shape[: step.dim]) != 1


def _origin(program: Lowered, array: int) -> Step | None:
    """What makes an array, barriers left out; None for arguments."""
    while (maker := program.arrays[array].maker) >= 0:
        step = program.steps[maker]
        if step.kind != BARRIER:
            return step
        array = step.reads[step.writes.index(array)]
    return None


def _keep_viewed(kernels: Sequence[Kernel], program: Lowered, sums: Sums) -> None:
    """Mark operands whose buffer no result takes over, except in scatters, which update in place.

    A buffer is shared only with the instruction that defines it (`HeapSimulator`): not with a tuple element (of several
    results, a convolution, a collective's done), nor with a bitcast (a slice of a combined all-reduce). Nor does a
    normalisation along the last dim, a single Triton kernel, write over its operand. In 99 compiled plans no loop or
    reduction shares such a buffer of 1,640, and 720 of 1,426 others do.
    """
    maker = {array: kernel for kernel in kernels for array in kernel.writes}
    for kernel in kernels:
        if kernel.kind == "scatter":
            continue
        made = {array: maker[array] for array in kernel.reads if array in maker}
        kernel.viewed = frozenset(array for array, one in made.items() if _is_viewed(one, program))
        if sums.is_triton(kernel):
            kernel.displaced |= {*kernel.reads}


def _is_viewed(kernel: Kernel, program: Lowered) -> bool:
    """Whether users read a kernel's result through a tuple or a bitcast."""
    parts = not kernel.steps and kernel.kind == "slice"
    return parts or len(kernel.writes) > 1 or kernel.kind in COLLECTIVES or _is(kernel, "convolution", program)


def _is(kernel: Kernel, kind: str, program: Lowered) -> bool:
    return any(program.steps[number].kind == kind for number in kernel.steps)


def _elements(program: Lowered, sums: Sums, kernel: Kernel) -> int | None:
    """Elements over which a loop or reduction iterates: kernels with equal ones may merge; Triton kernels never do."""
    if kernel.kind not in FUSED or sums.is_triton(kernel) or any(_turned(program, array) for array in kernel.reads):
        return None
    step = program.steps[kernel.steps[-1]]
    array = step.reads[0] if step.kind == "reduce" and step.reads else kernel.writes[0]
    return math.prod(program.arrays[array].shape or (0,)) or None


def _turned(program: Lowered, array: int) -> bool:
    """Whether experts' gradients are reduce-scattered to it along an inner dim: in another layout than states."""
    made = _maker(program, array)
    if made is None or not _runs_inside(program, made, "reduce-scatter"):
        return False
    before = _maker(program, made.reads[0])
    return before is not None and before.kind == "transpose"


def _maker(program: Lowered, array: int) -> Step | None:
    maker = program.arrays[array].maker
    return program.steps[maker] if maker >= 0 else None


def _makes_sums_of_rows(kernel: Kernel, sums: Sums) -> bool:
    """Whether a kernel reduces along the last dim, and its other results may take over its operands' buffers.

    As seen in a cross-entropy's gradient beside a sum of it.
    """
    return kernel.kind in FUSED and len(kernel.writes) > 1 and sums.makes_rows(kernel)


def _of_several(kernel: Kernel, program: Lowered) -> frozenset[int]:
    """Operands from which a kernel computes several results, sums left out: none of these takes over their buffer."""
    of: dict[int, frozenset[int]] = {array: frozenset({array}) for array in kernel.reads}
    made: dict[int, int] = dict.fromkeys(kernel.reads, 0)
    for number in kernel.steps:
        step = program.steps[number]
        found = frozenset().union(*(of.get(array, frozenset()) for array in step.reads))
        of.update(dict.fromkeys(step.writes, found))
        if step.kind != "reduce" and not set(step.writes).isdisjoint(kernel.writes):
            for array in found:
                made[array] += 1
    return frozenset(array for array, count in made.items() if count > 1)


def _makes_product(program: Lowered, array: int) -> bool:
    """Whether a product makes an array: what reads a Triton kernel's result does not merge for that."""
    maker = program.arrays[array].maker
    return maker >= 0 and program.steps[maker].kind == "dot_general"


def _reads_few(one: Kernel, other: Kernel) -> bool:
    return len({*one.reads, *other.reads}) <= MOST_OPERANDS


def _product(program: Lowered, step: Step) -> Product | None:
    """The local matrices of a dot; None if it is empty, or no candidate for split-K."""
    kinds = [program.arrays[array].dtype for array in (*step.reads[:2], step.writes[0])]
    if len(step.reads) < 2 or "i32" in kinds[:2]:
        return None
    sizes = matrices_of(program, step)
    return Product(*sizes, *map(dtype_bytes, kinds)) if min(sizes) else None
