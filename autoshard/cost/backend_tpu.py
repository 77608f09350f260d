"""XLA's TPU compiler: what it fuses, combines, and in which order it runs.

What is elementwise runs inside the kernels that read it, unless that reads more than keeping it: products take in their
operands' makers and what their result goes through, so what is kept between forward and backward pass are results of
products, gathers, sums and collectives, and the sums of several arrays that many kernels read (a residual stream).
A value that products alone read is kept in bf16, the precision they run in.
All-reduces work in place in device memory, not on chip; collectives are combined up to 120 MiB.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence, Set
from functools import partial
from typing import ClassVar

from autoshard.cost.backend import Backend, Placement
from autoshard.cost.compute import CONTRACTIONS
from autoshard.cost.conv_loops_tpu import allocated_early, ring
from autoshard.cost.gathers_tpu import JOINED, gathered_in_pieces, scattered_in_turns
from autoshard.cost.indices_tpu import flattened_indices
from autoshard.cost.kernels import LOOPS, Fusion, Kernel
from autoshard.cost.latency import overlapped
from autoshard.cost.loops_tpu import RING, as_loops, with_bodies
from autoshard.cost.lowered import BARRIER, COLLECTIVES, SLICE, Array, Lowered, Step
from autoshard.cost.multi_output import merged_outputs
from autoshard.cost.place_tpu import Placing, multiplies_matrices, product_with_vectors
from autoshard.cost.results_tpu import several_results
from autoshard.cost.rewrite import scattered_onto
from autoshard.cost.rewrite_tpu import (
    COPIED,
    attentions_by_rows,
    convolved,
    gathered_results,
    laid_out_for_convolutions,
    looked_up_by_rows,
    moved_by_rows,
    scattered_by_rows,
    updated_kernels,
)
from autoshard.cost.schedule import Dependencies, Liveness, combined, dependencies, greedy, liveness
from autoshard.cost.sparse_copies_tpu import beside_sparse_cores
from autoshard.cost.strip_widths_tpu import (
    FEW,
    SPLITS,
    annotated_view,
    as_images,
    convolved_whole,
    enlarges,
    strip_widths,
    with_images_apart,
)
from autoshard.cost.strips_tpu import (
    arguments_beside_gathers,
    beside_gathers,
    cut_into_strips,
    halo_passes,
    shifted_copies,
    sums_together,
)
from autoshard.cost.tpu_layout import convolution_tiles, for_convolution, row_major, tiled, tiles
from autoshard.graph.groups import ELEMENTWISE, INDEXED

THRESHOLD = 120 * 2**20
"""Bytes of results up to which collectives are combined (libtpu's `xla_jf_crs_combiner_threshold_in_bytes`)."""

BESIDE = frozenset({"all-gather", "collective-permute", "all-to-all", "reduce-scatter"})
"""Kinds of collectives that run beside kernels on one core."""

LEAST_COST, LOOP_COST, PRODUCT_COST = 1.0, 1000.0, 5000.0
"""Seconds, in units of its own, that the latency hiding scheduler takes a kernel to last (XLA's
`ApproximateLatencyEstimator`): copies, scatters and all-reduces, and the way from a kernel to its reader; what is
elementwise, and sums; products. So, from the end backwards, two scatters are placed one behind the other, as each lets
the zeros be placed that it writes onto, and both copies for them lie before: T5's FSDP on v5e, 268 MB. Where a copy
follows each scatter, one chain stands behind the other (as compiled, data parallel and with split tables).
"""

IN_PLACE = frozenset({"scatter", "dynamic_update_slice", BARRIER})
"""Kinds that write into their operands' buffers."""

MOVES = frozenset({"transpose", "reshape", "slice", "broadcast_in_dim", "concatenate", "pad", "reverse", SLICE})
"""Kinds that pass their operands' elements on."""


TAKING = INDEXED | {SLICE}
"""Kinds that read of an operand what they make."""


MOST_AGAIN = 64
"""Makers of what a step reads that are followed; what lies behind them counts as read. Chains of elementwise steps may
be thousands long, and be asked after at every step.
"""


class TpuFusion(Fusion):
    """Products with what is elementwise around them, loops into everything."""

    recomputes = True

    def __init__(self, program: Lowered) -> None:
        """For one device's program."""
        super().__init__(program)
        self.ends: set[int] = set()  # roots of products' kernels
        self.again_of: dict[int, bool] = {}  # array -> `_runs_again`
        self.parted: set[int] = set()  # arrays that are kept for a device to take its part of
        self.around = convolved(program)  # arrays that convolutions read or make, and what is elementwise around them

    def cluster(self) -> None:
        """A product's kernel goes on as long as one elementwise step alone reads what it made.

        Of two products that one step reads, the kernel of its last operand goes on and the other one ends (so compiled
        in either order). So do convolutions; of these the earlier one is taken all the same: what ResNet keeps between
        those that it adds is not predicted, and with the last one its memory is 13 % too low, with this one 4.
        """
        kernels: dict[int, list[int]] = {}  # last step of a product's kernel -> its steps
        for number, step in enumerate(self.steps):
            if self.root[number] != number:
                continue
            if step.kind in CONTRACTIONS:
                if not (step.parts >= RING or ring(self.program, step) is not None):
                    kernels[number] = [number]
                continue
            ends = [last for last in self._continues(step) if last in kernels]
            if ends:
                convolution = self.steps[kernels[ends[0]][0]].kind == "convolution"
                before = min(ends, key=lambda last: kernels[last][0]) if convolution else ends[0]
                kernels[number] = [*kernels.pop(before), number]
        for last, members in kernels.items():
            for member in members:
                self.root[member] = last
            self.ends.add(last)

    def _kept(self, number: int, step: Step, array: int, readers: Sequence[int], kernels: int) -> bool:
        return number in self.ends or step.parts >= RING or super()._kept(number, step, array, readers, kernels)

    def _continues(self, step: Step) -> Iterator[int]:
        """The steps whose kernels one could be the end of: makers of what it alone reads, the last operand's first."""
        if len(step.writes) != 1 or not (step.kind in ELEMENTWISE or step.kind in ("reshape", "transpose")):
            return
        size = _elements(self.arrays[step.writes[0]])
        for array in reversed(step.reads):
            read = self.arrays[array]
            if len(read.readers) == 1 and not read.returned and read.maker >= 0 and _elements(read) == size:
                yield read.maker

    def absorbs(self, step: Step) -> bool:
        """Loops, sums and products take in what is made elementwise; not so loops of permutes and some convolutions."""
        if step.parts >= RING or reads_from_memory(self.program, step):
            return super().absorbs(step)
        return super().absorbs(step) or step.kind in CONTRACTIONS

    def inlined(self, step: Step) -> bool:
        """Whatever makes each element of its result from few of its operands, gathers left out."""
        if step.kind == "broadcast_in_dim" and (self.arrays[step.writes[0]].strips or enlarges(self.program, step)):
            return False
        return step.kind in LOOPS and step.kind not in ("gather", "dynamic_update_slice")

    def takes(self, reader: int, number: int) -> bool:
        """Also in the middle of a product's kernel; a part is taken of what is kept, if something reads the whole."""
        step = self.steps[reader]
        return self.absorbs(step) and not (step.kind == SLICE and self.steps[number].writes[0] in self.parted)

    def _repeated(self, number: int, step: Step) -> bool:
        """What is kept for such a part runs again in what reads the whole, if it is made of one array."""
        made = step.writes[0]
        return made in self.parted and not self._reads(step, self.arrays[made].bytes)

    def expensive(self, step: Step) -> bool:
        """Nothing elementwise is."""
        return False

    def reads_more(self, step: Step, kernels: int) -> bool:
        """Whether running in every reader moves more than one write and a read each.

        As seen: an elementwise result of two arrays runs again in three kernels, not in four; of three arrays in two,
        not in three; of four not in two; of one array, and what is smaller than that, in any number. What a device
        takes its part of is kept if anything else reads it.
        """
        if kernels > 1 and step.kind == "multiply" and annotated_view(self.program, step):
            return True
        if kernels > 1 and any(self.steps[reader].kind == SLICE for reader in self.arrays[step.writes[0]].readers):
            self.parted.add(step.writes[0])
            return True
        made = self.arrays[step.writes[0]].bytes
        return self._reads(step, (kernels + 1) * made / (kernels - 1)) if kernels > 1 else False

    def _reads(self, step: Step, bytes: float) -> bool:
        """Whether a step reads more than so many bytes, with what runs again for it."""
        arrays, again_of = self.arrays, self.again_of
        sizes: dict[int, int] = {}
        read = 0
        todo = [step]
        seen: set[int] = set()  # makers: there are as many ways to one as halves in a chain of sums
        while todo:
            one = todo.pop()
            made = arrays[one.writes[0]].bytes
            for array in dict.fromkeys(one.reads) if len(one.reads) > 1 else one.reads:
                found = arrays[array]
                if found.maker >= 0 and len(seen) < MOST_AGAIN:
                    again = again_of.get(array)
                    if self._runs_again(array) if again is None else again:
                        if found.maker not in seen:
                            seen.add(found.maker)
                            todo.append(self.steps[found.maker])
                        continue
                taken = min(found.bytes, made) if one.kind in TAKING else found.bytes
                read += max(0, taken - sizes.get(array, 0))
                sizes[array] = max(sizes.get(array, 0), taken)
                if read > bytes:
                    return True
        return False

    def _runs_again(self, number: int) -> bool:
        """Whether all that reads an array takes its maker in: what it is made from is read then, not the array.

        As seen: the gradient of BERT's logits, read by two products and a sum, is made from the logits in each. Not so
        between convolutions: ResNet and U-Net keep what normalisations make.
        """
        if number not in self.again_of:
            self.again_of[number] = self._taken_by_all(number)
        return self.again_of[number]

    def _taken_by_all(self, number: int) -> bool:
        array = self.arrays[number]
        maker = self.steps[array.maker]
        if len(maker.writes) > 1 or array.returned or not self.inlined(maker) or array.maker in self.ends:
            return False
        if len(array.readers) == 1:
            return True
        return number not in self.around and all(self.absorbs(self.steps[reader]) for reader in array.readers)


def reads_from_memory(program: Lowered, step: Step) -> bool:
    """Whether a convolution takes in nothing: a loop around permutes, and one of strips that need their neighbours."""
    return step.kind == "convolution" and (ring(program, step) is not None or halo_passes(program, step) > 1)


def _put_together(program: Lowered, array: int) -> bool:
    """Whether an array is gathered in pieces, so that no result takes over its buffer."""
    maker = program.arrays[array].maker
    return maker >= 0 and program.steps[maker].kind == JOINED


def _elements(array: Array) -> int:
    return math.prod(array.shape) if array.shape is not None else array.bytes


class TpuBackend(Backend):
    """XLA's TPU compiler."""

    alignment = 512
    reuses_results = False
    fills_late = True
    combined_up_to: ClassVar[Mapping[str, float]] = {"all-reduce": THRESHOLD}

    def buffer_bytes(self, array: Array) -> int:
        """Bytes of an array's buffer: in tiles."""
        if array.shape is None:
            return -(-array.bytes // self.alignment) * self.alignment
        size = array.bytes * tiled(array.shape) // max(math.prod(array.shape), 1)
        return -(-size // self.alignment) * self.alignment

    def rewrite(self, program: Lowered) -> Lowered:
        """See `autoshard.cost.rewrite_tpu`, `autoshard.cost.strips_tpu` and `autoshard.cost.loops_tpu`."""
        program = gathered_in_pieces(attentions_by_rows(program), self.device.kind)
        program = gathered_results(scattered_in_turns(program, self.device.kind))
        program = updated_kernels(as_loops(with_bodies(program, self.device)))
        images = as_images(moved_by_rows(looked_up_by_rows(scattered_by_rows(scattered_onto(program)))))
        widths = strip_widths(images)
        return flattened_indices(cut_into_strips(laid_out_for_convolutions(images, widths), widths))

    def fusion(self, program: Lowered) -> Fusion:
        """See `TpuFusion`."""
        return TpuFusion(program)

    def combine(self, kernels: list[Kernel], program: Lowered) -> list[Kernel]:
        """Elementwise results of one shape made together; independent all-reduces over the same devices, to 120 MiB."""
        for kernel in kernels:
            if product_with_vectors(kernel, program) is not None:
                kernel.shares = True
                kernel.displaced |= {array for array in kernel.reads if _put_together(program, array)}
        kernels = merged_outputs(kernels, lambda kernel: self._loop_over(kernel, program), lambda array: True)

        kernels = several_results(sums_together(kernels, program), program)

        def key(kernel: Kernel) -> Hashable:
            step = program.steps[kernel.steps[-1]]
            if kernel.kind != "all-reduce" or step.collective is None:
                return None
            return step.collective.axes, program.arrays[step.writes[0]].dtype

        for kernel in kernels:
            if kernel.kind in IN_PLACE:
                kernel.shares = True
            elif product_with_vectors(kernel, program) is None:
                kernel.shares = False

        def size(kernel: Kernel) -> int:
            return sum(program.arrays[array].bytes for array in kernel.writes)

        return combined(kernels, key, size, THRESHOLD)

    @staticmethod
    def _loop_over(kernel: Kernel, program: Lowered) -> Hashable:
        """The shape of all that an elementwise kernel writes; the dims that a product with vectors has; else None."""
        if any(reads_from_memory(program, program.steps[number]) for number in kernel.steps):
            return None
        shapes = {program.arrays[array].shape for array in kernel.writes}
        product = product_with_vectors(kernel, program)
        if product is not None:
            around = [program.arrays[array].shape or () for array in (*product.reads, *product.writes)]
            return "product", *sorted(max(around, key=math.prod))
        matrices = any(program.steps[number].kind == "dot_general" for number in kernel.steps)
        return tuple(shapes) if kernel.kind in ELEMENTWISE and not matrices and len(shapes) == 1 else None

    def order(self, kernels: Sequence[Kernel], deps: Dependencies, program: Lowered) -> list[int]:
        """What frees most first, updates counted as in place or as new arrays: whichever needs less memory.

        The memory scheduler knows of no donation (`DefaultMemoryScheduler` takes the best of several orders): by what
        it frees, the update of the largest gradient comes last. On two cores no collective but permutes runs beside
        kernels, and the order stays as the memory scheduler left it.
        """
        if self.device.cores > 1:
            return self.lowest_peak(kernels, deps, program)
        orders = [self._ordered(kernels, deps, program, updates) for updates in (True, False)]

        def peaks(order: list[int]) -> list[int]:
            counted = (
                liveness(kernels, order, program.arrays, self.buffer_bytes, results=held) for held in (True, False)
            )
            return [live.peak for live in counted]

        order = orders[0] if orders[0] == orders[1] else min(orders, key=peaks)
        return _behind_collectives(order, kernels, program)

    def _ordered(self, kernels: Sequence[Kernel], deps: Dependencies, program: Lowered, updates: bool) -> list[int]:
        """What frees most first; what needs nothing but arguments right before what reads it.

        The latency hiding scheduler keeps for the end what no collective waits for, so gradients that are not reduced
        yet are in memory together; and what nothing waits for, such as updates, comes last of all. Beside a gather runs
        all of this that is ready, and the products of gradients whose sums nothing waits for but updates.

        Args:
            updates: whether an update that is written over its argument adds nothing, unless its gradient is summed
                over devices together with others: of those the smallest comes first. No rule of the compiler's, but
                nearer: in 14 of 21 programs compiled for v5e such updates go up in size, in 7 down, and why is not
                found; by which order needs less memory the direction was right in 9.
        """
        together = {
            array
            for kernel in kernels
            if kernel.kind == "all-reduce" and len(kernel.writes) > 1
            for array in kernel.writes
        }

        def placed(kernel: Kernel, phase: int) -> bool:
            return phase == 0 or (updates and together.isdisjoint(kernel.reads))

        lazy = _lazy(kernels, deps)
        phases = _phases(kernels, deps)
        sequence: list[list[int]] = []
        for current in range(3):
            now = [n for n in range(len(kernels)) if n not in lazy and phases[n] == current]
            rest = [kernels[number] for number in now]
            ordered = greedy(rest, dependencies(rest), program.arrays, partial(placed, phase=current))
            sequence.append([now[number] for number in ordered])
        beside = {number for number, kernel in enumerate(kernels) if kernel.kind == "all-gather"}
        late = [*(n for n in sequence[0] if _gradient(n, kernels, deps, phases)), *sequence[1], *sequence[2]]
        places = {number: place for place, number in enumerate(late)}
        waiting = [sum(maker not in lazy for maker in makers) for makers in deps.makers]
        ready = [place for place, number in enumerate(late) if not waiting[number]]  # of `late`, ascending
        order: list[int] = []
        done: set[int] = set()

        def run(number: int) -> None:
            if number not in done:
                done.add(number)
                for maker in deps.makers[number]:
                    if maker in lazy:
                        run(maker)
                order.append(number)
                for user in deps.users[number] if number not in lazy else ():
                    waiting[user] -= 1
                    if not waiting[user] and user in places:
                        heapq.heappush(ready, places[user])

        def waits(number: int) -> bool:
            """Whether a kernel reads what is not gathered yet, or gathers what waits for what else its readers need."""
            if not beside.isdisjoint(maker for maker in deps.makers[number] if maker not in done):
                return True
            makers = ({*deps.makers[user]} - {number} - lazy for user in deps.users[number])
            return kernels[number].kind == "all-gather" and not any(done >= others for others in makers)

        def run_late() -> None:
            """What is ready, in one pass: what becomes ready behind the place where the pass is waits for the next."""
            at, passed = -1, []
            while ready:
                place = heapq.heappop(ready)
                if place < at or waits(late[place]):
                    passed.append(place)
                else:
                    at = place
                    run(late[place])
            ready.extend(passed)
            heapq.heapify(ready)

        for number in sequence[0]:
            if not beside.isdisjoint((number, *(maker for maker in deps.makers[number] if maker not in done))):
                run_late()
            run(number)
        for number in late:
            run(number)
        return order

    def store(self, kernels: Sequence[Kernel], program: Lowered) -> None:
        """What products alone read is kept in the dtype that they run in, a transposed copy that is cut up as it is.

        Slices of a copy are views of it, so it has no choice of layout: its last dim is padded to 128.
        """
        lying = convolved(program)
        near, apart = convolved_whole(program), with_images_apart(program)
        views = {array for step in program.steps if annotated_view(program, step) for array in step.writes}
        rounded = _Rounded(program, lying.keys())
        for kernel in kernels:
            for array in kernel.writes:
                found = program.arrays[array]
                if array in lying and found.shape is not None:
                    shape, item = found.shape, found.bytes // _elements(found)
                    if found.strips:
                        shape = (SPLITS * shape[0], *shape[1:-1], found.strips)
                    size = for_convolution(shape, lying[array])
                    other = row_major(shape) if array in views else tiled(shape)
                    few = min(shape[dim] for dim in lying[array]) < FEW and array not in near
                    free = array in views or (size > COPIED * other and array in apart if found.strips else few)
                    found.bytes = item * (other if free else size)
                    found.tiles = tiles(shape) if free else convolution_tiles(shape, lying[array])
                    if rounded.is_kept_narrow(array):
                        found.dtype, found.bytes = "bf16", found.bytes // 2
                    found.shape = None
                    continue
                if self._cut_up(array, program):
                    found.bytes = found.bytes * row_major(found.shape or ()) // _elements(found)
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

    def overlap(
        self, kernels: list[Kernel], order: list[int], deps: Dependencies, program: Lowered
    ) -> tuple[list[Kernel], list[int]]:
        """Copies to other layouts run beside gathers; on two cores, those of arguments alone, beside larger ones.

        Those of large narrow tables run on sparse cores.
        """
        order = arguments_beside_gathers(kernels, order, program, self.device.cores == 1)
        kernels, order = shifted_copies(kernels, order, program)
        if self.device.cores == 1:
            kernels, order = allocated_early(kernels, order, program)
        kernels, order = beside_gathers(kernels, order, program, self.device.cores == 1)
        return beside_sparse_cores(kernels, order, program, self.device)

    def place(self, kernels: Sequence[Kernel], program: Lowered, live: Liveness) -> Placement:
        """On chip what gains most from it, the rest as a heap; arguments stay on chip in what room is left."""
        return Placing(self.device, self.buffer_bytes, kernels, program, live).placement()


def _behind_collectives(order: Sequence[int], kernels: Sequence[Kernel], program: Lowered) -> list[int]:
    """`order`, with all that follows the last collective that runs beside kernels in the latency hiding scheduler's.

    What needs nothing but arguments runs right before what reads it, wherever the scheduler puts it (libtpu's
    `constant-deferring`).
    """
    last = max((place for place, number in enumerate(order) if kernels[number].kind in BESIDE), default=-1)
    deps = dependencies(kernels)
    lazy = _lazy(kernels, deps)
    early, late = order[: last + 1], order[last + 1 :]
    rest = [kernels[number] for number in late]
    takes = [_cost(kernel) for kernel in rest]
    views = [len(kernel.writes) > 1 for kernel in rest]
    placed = overlapped(
        range(len(rest)), dependencies(rest), takes, [False] * len(rest), views, edge=LEAST_COST, elements=True
    )
    found = [*early, *(late[place] for place, _ in placed)]
    return _deferred(found, lazy, deps.makers)


def _deferred(order: Sequence[int], lazy: Set[int], makers: Sequence[Sequence[int]]) -> list[int]:
    """`order`, in which each of `lazy` stands right before what reads it first."""
    done: dict[int, None] = {}

    def run(number: int) -> None:
        if number not in done:
            for maker in makers[number]:
                if maker in lazy:
                    run(maker)
            done[number] = None

    for number in (*(one for one in order if one not in lazy), *order):
        run(number)
    return list(done)


def _cost(kernel: Kernel) -> float:
    """What the latency hiding scheduler takes a kernel to last; collectives that run alone are as short as copies."""
    if kernel.flops:
        return PRODUCT_COST
    return LOOP_COST if kernel.kind in ELEMENTWISE or kernel.kind == "reduce" else LEAST_COST


def _phases(kernels: Sequence[Kernel], deps: Dependencies) -> list[int]:
    """Per kernel when it runs: 0 products that a collective waits for, and what they need; 2 updates, 1 the rest.

    Updates that an all-reduce is the last step to run with it: the scheduler takes an all-reduce as soon as it may. A
    reduce-scatter is part of a kernel like any other.
    """
    awaited = _before(deps, [number for number, kernel in enumerate(kernels) if kernel.kind in COLLECTIVES])
    products = [number for number in awaited if kernels[number].flops or kernels[number].kind == "reduce"]
    first = {*products, *_before(deps, products)}
    reduced = {number for number, kernel in enumerate(kernels) if kernel.kind == "all-reduce"}
    return [
        0 if number in first else 1 if users or not reduced.isdisjoint(deps.makers[number]) else 2
        for number, users in enumerate(deps.users)
    ]


def _gradient(number: int, kernels: Sequence[Kernel], deps: Dependencies, phases: Sequence[int]) -> bool:
    """Whether a kernel is a product that updates alone wait for, and a sum over devices before them."""

    def late(user: int) -> bool:
        summed = kernels[user].kind in ("all-reduce", "reduce-scatter")
        return phases[user] > 0 or (summed and all(phases[after] > 0 for after in deps.users[user]))

    return bool(kernels[number].flops) and bool(deps.users[number]) and all(map(late, deps.users[number]))


def _lazy(kernels: Sequence[Kernel], deps: Dependencies) -> set[int]:
    """Kernels that need nothing but arguments, and copies and parts of what they make for these alone."""
    found: set[int] = set()
    for number, makers in enumerate(deps.makers):
        alone = len(makers) == 1 and makers[0] in found and len(deps.users[makers[0]]) == 1
        if deps.users[number] and (not makers or (alone and kernels[number].kind in ("copy", SLICE))):
            found.add(number)
    return found


def _before(deps: Dependencies, todo: list[int]) -> set[int]:
    """Kernels that one of `todo` waits for."""
    found: set[int] = set()
    todo = list(todo)
    while todo:
        for maker in deps.waits[todo.pop()]:
            if maker not in found:
                found.add(maker)
                todo.append(maker)
    return found


class _Rounded:
    """Which arrays only products read, through moves perhaps; sums run where the array is made.

    So does a comparison with a constant: the mask of an activation is kept apart, as bits (a ReLU between two products;
    not around convolutions).
    """

    def __init__(self, program: Lowered, around: Set[int]) -> None:
        """`around`: arrays that convolutions read or make, and what is elementwise around them."""
        self.program, self.arrays, self.steps, self.around = program, program.arrays, program.steps, set(around)
        self.known: dict[int, bool] = {}

    def is_kept_narrow(self, array: int) -> bool:
        found = self.arrays[array]
        if found.dtype != "f32" or found.shape is None or not self._only_products(array):
            return False
        return any(self.steps[reader].kind not in ("reduce", "compare") for reader in found.readers)

    def _only_products(self, array: int) -> bool:
        if array not in self.known:
            found = self.arrays[array]
            self.known[array] = bool(found.readers) and not found.returned and all(map(self._passes, found.readers))
        return self.known[array]

    def _passes(self, reader: int) -> bool:
        step = self.steps[reader]
        if step.kind in CONTRACTIONS:
            return multiplies_matrices(self.program, step)
        if step.kind == "reduce" or (step.kind == "compare" and self._with_constant(step)):
            return True
        return (step.kind in MOVES or step.kind == "all-gather") and all(map(self._only_products, step.writes))

    def _with_constant(self, step: Step) -> bool:
        """Whether a step's other operands follow from constants alone."""
        if not self.around.isdisjoint(step.reads):
            return False
        makers = [self.arrays[array].maker for array in dict.fromkeys(step.reads)]
        plain = [maker >= 0 and not self._reads_arrays(self.steps[maker]) for maker in makers]
        return len(plain) - sum(plain) == 1

    def _reads_arrays(self, step: Step) -> bool:
        return any(self.arrays[array].shape != () or self.arrays[array].maker < 0 for array in step.reads)
