"""What lies in a TPU's on-chip memory, and how the rest is laid out, counted by hand."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import reduce
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.cost.compiler.heap import packed
from autoshard.cost.compiler.kernels import Kernel
from autoshard.cost.compiler.list_schedule import greedy
from autoshard.cost.compiler.lowered import Array, Lowered, Step
from autoshard.cost.compiler.rewrite import scattered_onto
from autoshard.cost.compiler.schedule import dependencies, liveness
from autoshard.cost.compiler.tpu.backend import TpuBackend
from autoshard.cost.compiler.tpu.fusion import TpuFusion
from autoshard.cost.compiler.tpu.layout import convolution_tiles, for_convolution, tiled
from autoshard.cost.compiler.tpu.on_chip import Buffered, Life, off_chip
from autoshard.cost.compiler.tpu.place import SLICES, TUPLE_BYTES, Placing, _and_gain
from autoshard.cost.compiler.tpu.rewrite import scattered_by_rows
from autoshard.cost.machine.compute import CONTRACTIONS
from autoshard.cost.machine.device import load_device

MATRICES = SimpleNamespace(ops=[SimpleNamespace(kind="convolution", attrs={})])
"""A graph in which the op of every product has matrices for operands."""


def test_what_fits_for_its_whole_life_needs_no_device_memory() -> None:
    lives = [Life(60, (0, 9)), Life(50, (1, 2)), Life(50, (3, 4))]
    assert off_chip(lives, 110) == {}
    assert off_chip(lives, 100) == {0: Buffered(frozenset(), 0, 9)}  # the two short ones gain more per byte
    assert sorted(off_chip(lives, 0)) == [0, 1, 2]


def test_what_does_not_fit_for_its_whole_life_is_on_chip_between_uses() -> None:
    lives = [Life(100, (0, 1, 5, 6), 1e-6), Life(80, (2, 4), 2e-6)]
    assert off_chip(lives, 100) == {0: Buffered(frozenset({1, 6}), 2, until=5, fetched=(6,), evicted=True)}


def test_what_saves_more_comes_first() -> None:
    both = [Life(100, (0, 5), 1e-6), Life(100, (0, 2, 4, 5), 3e-6)]
    assert off_chip(both, 100) == {0: Buffered(frozenset(), 0, 5)}


def test_what_waits_too_long_between_two_uses_does_not_stay_on_chip() -> None:
    clock = [float(position) for position in range(12)]
    waits = [Life(10, (0, 9)), Life(10, (0, 5, 9))]
    assert off_chip(waits, 100, clock, longest=8) == {}
    fetched = Buffered(frozenset({9}), copies=1, until=8, fetched=(9,), evicted=True)  # for its reader
    assert off_chip(waits, 100, clock, longest=7) == {0: fetched}
    assert off_chip(waits, 100, clock, longest=3.5) == {0: fetched, 1: Buffered(frozenset({5, 9}), 1, 4, (5,), True)}


def test_a_buffer_is_free_once_all_that_reads_it_later_finds_the_value_on_chip() -> None:
    written = Life(10, (0, 4, 6, 9), far=True)
    assert off_chip([written], 100) == {0: Buffered(frozenset({4, 6, 9}), 1, until=3, fetched=(4,))}
    other = Life(95, (5,), 9.0)
    assert off_chip([written, other], 100)[0] == Buffered(frozenset({4, 9}), 2, until=8, fetched=(4, 9))


def test_what_is_read_before_it_could_be_copied_on_chip_is_read_where_it_lies() -> None:
    """A product's result of 8 MB on v5p that the next kernels read: T5's bias of positions, which a sum writes over."""
    clock = [0.0, 1.0, 2.0, 6.0, 7.0]
    made = Life(10, (0, 2, 3), far=True)
    assert off_chip([made], 100, clock, bandwidth=10.0)[0].near == {2, 3}
    assert off_chip([made], 100, clock, bandwidth=5.0)[0] == Buffered(frozenset(), 0, until=3)
    assert off_chip([replace(made, argument=True)], 100, clock, bandwidth=5.0)[0].near == {2, 3}


def test_half_of_what_is_copied_in_slices_is_there_one_kernel_earlier() -> None:
    before = Life(60, (3, 4), 0.5)
    assert sorted(off_chip([Life(100, (5, 6), far=True), before], 100)) == [0]
    assert sorted(off_chip([Life(100, (5, 6), far=True, half=3), before], 100)) == [0, 1]


@pytest.mark.parametrize(("rows", "far"), [(4096, {"sum": 2}), (1024, {})])
def test_moments_come_before_sums_of_gradients_and_gradients_before_both(rows: int, far: dict[str, int]) -> None:
    """Two gradients of 16 MiB (an MLP on v5e) and of 4: which lie in device memory when the sums are made."""
    arrays = [Array((rows, 1024), "f32", 4096 * rows, -1) for _ in range(6)]
    arrays += [Array((rows, 1024), "f32", 4096 * rows, number) for number in (0, 1, 2, 2, 3, 4)]
    for array in arrays[-2:]:
        array.returned = array.donated = True
    kernels = [Kernel((), (0,), (6,), "negate", 0), Kernel((), (1,), (7,), "negate", 0)]
    kernels.append(Kernel((), (6, 7), (8, 9), "all-reduce", 0))
    kernels += [Kernel((), (8, 0, 2, 3), (10,), "add", 0), Kernel((), (9, 1, 4, 5), (11,), "add", 0)]
    program = Lowered(arrays, [], [10, 11], MATRICES)  # type: ignore[arg-type]
    backend = TpuBackend(load_device("tpu-v5e"))
    live = liveness(kernels, range(5), arrays, backend.buffer_bytes)
    names = {(0, 2): "gradient", (1, 2): "gradient", (2, 3): "sum", (2, 4): "sum"}
    found = Counter(names[start, end] for start, end, _ in backend.place(kernels, program, live).blocks)
    assert found == far


def test_what_lies_between_convolutions_takes_its_tiles_time() -> None:
    """Few images: 2 x 64 features in tiles of two rows, so that a sum takes longer than its bytes do."""
    assert convolution_tiles((2, 64, 64, 64), (0, 1)) == 64 * 64
    assert convolution_tiles((32, 64, 64, 64), (0, 1)) == 64 * 64 * 4
    arrays = [Array(None, "f32", 2**22, -1, tiles=tiles) for tiles in (0, 4096, 8192)]
    seconds = []
    for array in range(3):
        program = Lowered(arrays, [], [], MATRICES)  # type: ignore[arg-type]
        kernels = [Kernel((), (array,), (), "reduce", 0)]
        backend = TpuBackend(load_device("tpu-v5e"))
        live = liveness(kernels, range(1), arrays, backend.buffer_bytes)
        seconds.append(Placing(backend.device, backend.buffer_bytes, kernels, program, live).clock[-1])
    assert 2**22 / 819e9 < seconds[0] < seconds[1]  # the datasheet's bandwidth is never reached
    assert seconds[2] == pytest.approx(2 * seconds[1], rel=0.05)


def placing(device: str, steps: list[Step], arrays: list[Array], shape: tuple[int, ...] = ()) -> Placing:
    """Of a program that runs step by step; `shape` of the table that rows are taken from."""
    kernels = [
        Kernel((n,), tuple(step.reads), tuple(step.writes), step.kind, n, flops=step.flops)
        for n, step in enumerate(steps)
    ]
    graph = SimpleNamespace(
        ops=[SimpleNamespace(kind="dot_general", operands=(0,), attrs=EVERY_DIM)],
        type_of=lambda _: SimpleNamespace(shape=shape),
    )
    backend = TpuBackend(load_device(device))
    live = liveness(kernels, range(len(kernels)), arrays, backend.buffer_bytes)
    return Placing(backend.device, backend.buffer_bytes, kernels, Lowered(arrays, steps, [], graph), live)  # type: ignore[arg-type]


EVERY_DIM = {f"{side}_{dims}": () for side in ("lhs", "rhs") for dims in ("batch", "contract")}


@pytest.mark.parametrize(("device", "microseconds"), [("tpu-v5e", 1273.65), ("tpu-v5p", 171.088)])
def test_a_value_waits_on_chip_as_long_as_libtpu_logs(device: str, microseconds: float) -> None:
    """`Interval min/max/preferred` in what libtpu 0.0.51 logs of its memory space assignment."""
    assert placing(device, [], [])._longest() == pytest.approx(microseconds * 1e-6, rel=0.002)


@pytest.mark.parametrize(
    ("kind", "shape", "microseconds"),
    [
        ("gather", (50257, 768), 19.19),  # 512 rows, of each the tile that it lies in
        ("scatter", (50257, 768), 36.25),  # read and written
        ("gather", (8, 512, 768), 4.27),  # whole tiles
    ],
)
def test_rows_of_a_table_count_as_the_tiles_that_they_lie_in(
    kind: str, shape: tuple[int, ...], microseconds: float
) -> None:
    """GPT-2's lookup of 512 rows and its gradient on a v5e, as libtpu 0.0.51 logs them (`Initial resource`)."""
    rows, size = 4 * 512 * 768, 4 * 50257 * 768
    arrays = [Array(None, "f32", size, -1), Array(None, "f32", rows, -1), Array(None, "f32", rows, 0)]
    steps = [Step("gather", 0, (0,), (2,))]
    if kind == "scatter":
        arrays[2] = Array(None, "f32", size, 0)
        steps = [Step("scatter", 0, (0, 1), (2,))]
    assert placing("tpu-v5e", steps, arrays, shape).clock[-1] == pytest.approx(microseconds * 1e-6, rel=0.01)


def test_a_gather_beside_a_product_counts_three_times() -> None:
    """A weight of 768 x 768 in bf16 from 8 devices: 1.80 µs, beside a product 2.04 and 3.44 (ViT under FSDP on v5e)."""
    part, whole = 2 * 96 * 768, 2 * 768 * 768
    arrays = [Array(None, "bf16", part, -1), Array(None, "bf16", whole, 0)]
    arrays += [Array(None, "bf16", part, -1), Array(None, "bf16", 8, 1), Array(None, "bf16", whole, 2)]
    gather = Step("all-gather", 0, (0,), (1,))
    product = Step("dot_general", 0, (2,), (3,), flops=1.0)
    steps = [gather, product, Step("all-gather", 0, (2,), (4,))]
    times = placing("tpu-v5e", steps, arrays).clock
    assert times[1] == pytest.approx(1.80e-6, rel=0.01)
    assert times[3] - times[2] == pytest.approx(2.04e-6 + 3.44e-6, rel=0.02)


def test_two_cores_share_on_chip_what_loops_and_sums_make_and_nothing_else() -> None:
    """A product and what an all-reduce makes of it lie in device memory on a v5p, all of it on chip on a v5e."""

    def temporary(device: str) -> int:
        steps: list[Step] = []
        arrays = arguments(2)
        size = 2**20
        product = step(steps, arrays, "dot_general", (0, 1), size)
        total = step(steps, arrays, "all-reduce", (product,), size)
        loop = step(steps, arrays, "sine", (total,), size)
        for _ in range(2):
            arrays[step(steps, arrays, "reduce", (loop, total), 128)].returned = True
        backend = TpuBackend(load_device(device))
        return backend.compile(Lowered(arrays, steps, [], MATRICES)).temporary_bytes  # type: ignore[arg-type]

    assert temporary("tpu-v5e") < 2**18
    assert 4 * 2**20 <= temporary("tpu-v5p") < 5 * 2**20


@pytest.mark.parametrize(("reader", "buffers"), [("scatter", 2), ("sort", 1)])
def test_loops_write_over_what_ends_in_them_but_for_a_scatter(reader: str, buffers: int) -> None:
    """A select of 200 MB: two buffers, as libtpu lays it out before the scatter of a tied embedding's gradient."""
    steps: list[Step] = []
    arrays = arguments(1)
    size = 50 * 2**20
    value = step(steps, arrays, "dot_general", (0, 0), size)
    value = step(steps, arrays, "select", (step(steps, arrays, "all-reduce", (value,), size),), size)
    if reader == "scatter":
        value = step(steps, arrays, "scatter", (value, 0), size)
    arrays[step(steps, arrays, "sort", (value,), 128)].returned = True
    backend = TpuBackend(load_device("tpu-v5e"))
    op = SimpleNamespace(kind="convolution", attrs={"window_dims": ()}, operands=(0,))
    graph = SimpleNamespace(ops=[op], type_of=lambda value: SimpleNamespace(shape=(1, 1)))
    compiled = backend.compile(Lowered(arrays, steps, [], graph))  # type: ignore[arg-type]
    assert 4 * buffers * size <= compiled.temporary_bytes < (4 * buffers + 1) * size


def test_copies_to_on_chip_memory_take_device_memory_of_their_own() -> None:
    """16 KiB each, the result's too; from 1 MiB on four slices of two such, which on two cores there are none of."""
    steps: list[Step] = []
    arrays = [*arguments(1), *(Array((rows, 128), "f32", 512 * rows, -1) for rows in (1024, 4096))]
    first = step(steps, arrays, "reduce", (step(steps, arrays, "sine", (0,)),), 128)  # two cores fuse several ops
    arrays[step(steps, arrays, "reduce", (1, 2, first), 128)].returned = True
    for device, tables in (("tpu-v5e", 2 + 2 * SLICES), ("tpu-v5p", 3)):
        compiled = TpuBackend(load_device(device)).compile(Lowered(arrays, steps, [], MATRICES))  # type: ignore[arg-type]
        assert compiled.temporary_bytes == tables * TUPLE_BYTES


def test_a_use_that_is_not_bound_by_memory_adds_nothing() -> None:
    assert reduce(_and_gain, [2.0, 3.0, -1.0], None) == 5.0
    assert reduce(_and_gain, [-2.0, -1.0], None) == -1.0


@pytest.mark.parametrize("gathers", [False, True])
def test_what_no_collective_waits_for_runs_last_or_beside_a_gather(gathers: bool) -> None:
    """Two layers' gradients: that of the last layer is summed once that of the first is made, or beside a gather."""
    steps: list[Step] = []
    arrays = arguments(2)
    saved = step(steps, arrays, "dot_general", (0, 0), 8192)
    backward = step(steps, arrays, "dot_general", (saved, 1))
    last = step(steps, arrays, "dot_general", (backward, saved))
    last_sum = step(steps, arrays, "reduce-scatter", (last,))
    updated = step(steps, arrays, "subtract", (1, last_sum))
    gathered = step(steps, arrays, "all-reduce", (backward,))
    weight = step(steps, arrays, "all-gather", (1,)) if gathers else 1
    first = step(steps, arrays, "dot_general", (gathered, weight))
    first_sum = step(steps, arrays, "reduce-scatter", (first,))
    for array in (updated, first_sum):
        arrays[array].returned = True
    program = Lowered(arrays, steps, [updated, first_sum], None)  # type: ignore[arg-type]
    order = ordered(program)
    assert (order.index(last_sum) < order.index(first)) == gathers


def ordered(program: Lowered) -> list[int]:
    """The arrays that kernels of one step each make, in the order in which a TPU runs them."""
    kernels = [
        Kernel((number,), one.reads, one.writes, one.kind, number, flops=float(one.kind in CONTRACTIONS))
        for number, one in enumerate(program.steps)
    ]
    order = TpuBackend(load_device("tpu-v5e")).order(kernels, dependencies(kernels), program)
    return [kernels[number].writes[0] for number in order]


def test_rows_of_a_narrow_table_are_padded_while_they_are_scattered() -> None:
    def sizes(columns: int, constant: bool) -> list[tuple[str, int]]:
        steps: list[Step] = []
        arrays = arguments(3)
        arrays[2].shape, arrays[2].bytes = (1024, columns), 4096 * columns
        onto = step(steps, arrays, "broadcast_in_dim", (), 1024 * columns) if constant else 2
        table = step(steps, arrays, "scatter", (onto, 0, 1), 1024 * columns)
        for array in (onto, table):
            arrays[array].shape = (1024, columns)
        arrays[table].returned = True
        found = scattered_by_rows(Lowered(arrays, steps, [table], None))  # type: ignore[arg-type]
        return [(one.kind, found.arrays[one.writes[0]].bytes) for one in found.steps]

    rows, table = 4 * 1024 * 128, 4 * 1024 * 8
    assert sizes(8, True) == [("broadcast_in_dim", rows), ("scatter", rows), ("copy", table)]
    assert sizes(8, False) == [("copy", rows), ("scatter", rows), ("copy", table)]
    assert sizes(128, True) == [("broadcast_in_dim", rows), ("scatter", rows)]


def test_an_all_reduce_takes_over_a_buffer_in_device_memory() -> None:
    """Of 200 MB, which is too large for on-chip memory: one buffer; two of 40 MB would fit there."""
    steps: list[Step] = []
    arrays = arguments(1)
    size = 50 * 2**20
    value = step(steps, arrays, "dot_general", (0, 0), size)
    value = step(steps, arrays, "all-reduce", (value,), size)
    arrays[step(steps, arrays, "reduce", (value,), 128)].returned = True
    backend = TpuBackend(load_device("tpu-v5e"))
    compiled = backend.compile(Lowered(arrays, steps, [len(arrays) - 1], MATRICES))  # type: ignore[arg-type]
    assert compiled.live.peak == 8 * size
    assert 4 * size <= compiled.temporary_bytes < 5 * size


def test_the_heap_fills_gaps_and_keeps_those_that_are_too_small() -> None:
    assert packed([]) == 0
    assert packed([(0, 1, 100), (2, 3, 100)]) == 100
    assert packed([(0, 1, 100), (0, 9, 10), (2, 3, 60), (2, 3, 40)]) == 110
    # 200 fits neither below nor above the 10 that stay: 100 + 10 + 200.
    assert packed([(0, 1, 100), (0, 9, 10), (2, 3, 200)]) == 310


programs = st.lists(
    st.tuples(st.integers(0, 3), st.sets(st.integers(1, 6), max_size=3), st.integers(1, 9)), max_size=30
)


@given(programs, st.booleans())
def test_every_kernel_runs_once_and_after_all_that_it_reads(parts: list[tuple[int, set[int], int]], late: bool) -> None:
    kernels, arrays = list[Kernel](), list[Array]()
    for number, (kind, back, size) in enumerate(parts):
        reads = tuple(sorted({max(0, number - each) for each in back} - {number}))
        name = ("add", "all-gather", "all-reduce", "dot_general")[kind]
        kernels.append(Kernel((number,), reads, (number,), name, number, flops=float(kind == 3)))
        arrays.append(Array((size,), "f32", 4 * size, number))
    deps = dependencies(kernels)
    found = greedy(kernels, deps, arrays, late=late)
    assert sorted(found) == list(range(len(kernels)))
    place = {number: at for at, number in enumerate(found)}
    assert all(place[maker] < place[number] for number in found for maker in deps.makers[number])


blocks = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20), st.integers(1, 100)), max_size=20)


@given(blocks)
def test_the_heap_holds_what_is_live_and_never_more_than_everything(parts: list[tuple[int, int, int]]) -> None:
    found = [(min(a, b), max(a, b), size) for a, b, size in parts]
    live = max((sum(size for a, b, size in found if a <= at <= b) for at in range(21)), default=0)
    assert live <= packed(found) <= sum(size for _, _, size in found)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20), st.integers(1, 6)), max_size=40))
def test_each_block_goes_to_the_tightest_gap_and_of_equal_ones_to_the_lowest(parts: list[tuple[int, int, int]]) -> None:
    found = [(min(a, b), max(a, b), size) for a, b, size in parts]
    height, held = 0, list[tuple[int, int, int]]()  # offset, top, last position
    for start, end, size in sorted(found, key=lambda block: block[0]):
        held = sorted(block for block in held if block[2] >= start)
        tops = [0, *(top for _, top, _ in held)]
        gaps = [(block[0] - top, top) for block, top in zip(held, tops, strict=False) if block[0] - top >= size]
        where = min(gaps, default=(0, tops[-1]))[1]
        held.append((where, where + size, end))
        height = max(height, where + size)
    assert packed(found) == height


@given(blocks, st.integers(0, 300))
def test_more_on_chip_memory_is_never_over_filled(parts: list[tuple[int, int, int]], capacity: int) -> None:
    lives = [Life(size, (min(a, b), max(a, b) + 1)) for a, b, size in parts]
    off = set(off_chip(lives, capacity))
    on = [life for place, life in enumerate(lives) if place not in off]
    assert all(sum(li.bytes for li in on if li.uses[0] <= at <= li.uses[-1]) <= capacity for at in range(23))


def step(steps: list[Step], arrays: list[Array], kind: str, reads: tuple[int, ...], size: int = 4096) -> int:
    """Append a step that makes one array of `size` floats; the array's number."""
    arrays.append(Array((size // 128, 128), "f32", 4 * size, len(steps)))
    for array in reads:
        arrays[array].readers.append(len(steps))
    steps.append(Step(kind, 0, reads, (len(arrays) - 1,)))
    return len(arrays) - 1


def arguments(count: int) -> list[Array]:
    return [Array((32, 128), "f32", 16384, -1) for _ in range(count)]


def test_a_sum_with_scattered_zeros_is_scattered_onto() -> None:
    steps: list[Step] = []
    arrays = arguments(3)
    zeros = step(steps, arrays, "broadcast_in_dim", ())
    scattered = step(steps, arrays, "scatter", (zeros, 0, 1))
    summed = step(steps, arrays, "all-reduce", (scattered,))
    product = step(steps, arrays, "dot_general", (2, 2))
    total = step(steps, arrays, "add", (product, summed))
    arrays[total].returned = True
    found = scattered_onto(Lowered(arrays, steps, [], None))  # type: ignore[arg-type]
    assert [one.kind for one in found.steps] == ["dot_general", "select", "scatter", "all-reduce"]
    assert found.steps[1].reads == (product,)  # x on one device, zeros on those whose scatters are summed with its
    assert found.steps[2].reads == (found.steps[1].writes[0], 0, 1)
    assert found.steps[3].writes == (total,)


def kept(steps: list[Step], arrays: list[Array]) -> dict[int, str]:
    """Array -> dtype of what a TPU keeps in memory."""
    backend = TpuBackend(load_device("tpu-v5e"))
    program = Lowered([replace(array) for array in arrays], steps, [], MATRICES)  # type: ignore[arg-type]
    kernels = backend.fusion(program).kernels()
    backend.store(kernels, program)
    return {array: program.arrays[array].dtype for kernel in kernels for array in kernel.writes}


def test_elementwise_work_runs_in_its_readers() -> None:
    steps: list[Step] = []
    arrays = arguments(3)
    product = step(steps, arrays, "dot_general", (0, 1))
    biased = step(steps, arrays, "add", (product, 2))
    gelu = step(steps, arrays, "tanh", (biased,))
    scaled = step(steps, arrays, "multiply", (gelu, biased))
    down = step(steps, arrays, "dot_general", (scaled, 1))
    weight = step(steps, arrays, "dot_general", (scaled, 0))
    for array in (down, weight):
        arrays[array].returned = True
    assert kept(steps, arrays) == {biased: "f32", down: "f32", weight: "f32"}


def test_what_products_alone_read_is_kept_in_bf16() -> None:
    steps: list[Step] = []
    arrays = arguments(3)
    product = step(steps, arrays, "dot_general", (0, 1))
    scaled = step(steps, arrays, "multiply", (product, 2))
    turned = step(steps, arrays, "transpose", (scaled,))
    found = [step(steps, arrays, "dot_general", (turned, 1)), step(steps, arrays, "dot_general", (scaled, 0))]
    found.append(step(steps, arrays, "reduce", (scaled,)))
    for array in found:
        arrays[array].returned = True
    assert kept(steps, arrays)[scaled] == "bf16"
    arrays[step(steps, arrays, "sine", (scaled,))].returned = True
    assert kept(steps, arrays)[scaled] == "f32"


def test_tiles_of_a_convolution_hold_batch_and_features() -> None:
    """As libtpu lays out a ResNet's images (bf16, 4 to a device), and what its first stages make of them."""
    assert 2 * for_convolution((4, 3, 224, 224), (0, 1)) == 51_380_224
    assert 4 * for_convolution((4, 64, 112, 112), (0, 1)) == 25_690_112
    assert for_convolution((32, 256, 7, 7), (0, 1)) == 32 * 256 * 49


def test_tiles() -> None:
    assert tiled((512, 1024)) == 512 * 1024
    assert tiled((3, 512, 12)) == 3 * 512 * 16  # 12 in rows of 8, and not 12 in lanes of 128
    assert tiled((100,)) == 128


def test_a_transposed_copy_that_is_cut_up_has_its_last_dim_padded() -> None:
    steps: list[Step] = []
    arrays = arguments(2)
    product = step(steps, arrays, "dot_general", (0, 1), 3 * 64 * 128)
    heads = step(steps, arrays, "transpose", (product,), 3 * 64 * 128)
    arrays[heads].shape = (3, 4, 64, 32)
    for _ in range(3):
        arrays[
            step(steps, arrays, "dot_general", (step(steps, arrays, "slice", (heads,), 64 * 128), 1))
        ].returned = True
    program = Lowered(arrays, steps, [], None)  # type: ignore[arg-type]
    backend = TpuBackend(load_device("tpu-v5e"))
    backend.store(backend.fusion(program).kernels(), program)
    assert (arrays[heads].dtype, arrays[heads].bytes) == ("f32", 4 * 3 * 4 * 64 * 128)


@pytest.mark.parametrize(
    ("operands", "readers", "kept"),
    [(1, 6, False), (2, 3, False), (2, 4, True), (3, 2, False), (3, 3, True), (4, 2, True)],
)
def test_what_many_kernels_read_is_kept_where_running_it_again_reads_more(
    operands: int, readers: int, kept: bool
) -> None:
    """As compiled by libtpu 0.0.51 for a v5e: sums of so many arrays of 8 MB, read by so many products."""
    steps: list[Step] = []
    arrays = arguments(operands + 1)
    total = step(steps, arrays, "negate", (0,)) if operands == 1 else 0
    for other in range(1, operands):
        total = step(steps, arrays, "add", (total, other))
    for _ in range(readers):
        arrays[step(steps, arrays, "dot_general", (total, operands))].returned = True
    assert (total in TpuFusion(Lowered(arrays, steps, [], MATRICES)).materialised()) == kept  # type: ignore[arg-type]


def test_no_kernel_grows_with_the_length_of_a_residual_stream() -> None:
    """The gradient of each layer is a sum of three arrays, which two products and the gradient before it read."""
    steps: list[Step] = []
    arrays = arguments(2)
    stream = 0
    for _ in range(40):
        product = step(steps, arrays, "dot_general", (stream, 1))
        rows = step(steps, arrays, "reduce", (product,))
        scaled = step(steps, arrays, "multiply", (product, rows))
        stream = step(steps, arrays, "add", (step(steps, arrays, "add", (stream, scaled)), 1))
        arrays[step(steps, arrays, "dot_general", (1, stream))].returned = True
    arrays[stream].returned = True
    kernels = TpuFusion(Lowered(arrays, steps, [], MATRICES)).kernels()  # type: ignore[arg-type]
    assert max(len(kernel.reads) for kernel in kernels) <= 6


def test_what_all_readers_make_again_is_not_read() -> None:
    """A gradient of logits that a sum reads too is made from the logits in each, through what they share."""
    steps: list[Step] = []
    arrays = arguments(3)
    power = step(steps, arrays, "exponential", (0,))
    share = step(steps, arrays, "multiply", (power, power))
    gradient = step(steps, arrays, "subtract", (power, share))
    for other in (1, 2):
        arrays[step(steps, arrays, "dot_general", (gradient, other))].returned = True
    arrays[step(steps, arrays, "reduce", (gradient,), 8)].returned = True
    kept = TpuFusion(Lowered(arrays, steps, [], MATRICES)).materialised()  # type: ignore[arg-type]
    assert not {power, share, gradient} & kept


@pytest.mark.parametrize("constant", [True, False])
def test_a_relu_between_products_is_kept_in_bf16_and_its_mask_apart(constant: bool) -> None:
    steps: list[Step] = []
    arrays = arguments(4)
    zero = step(steps, arrays, "broadcast_in_dim", ()) if constant else 3
    relu = step(steps, arrays, "maximum", (step(steps, arrays, "dot_general", (0, 1)), zero))
    arrays[step(steps, arrays, "dot_general", (relu, 1))].returned = True
    back = step(steps, arrays, "select", (step(steps, arrays, "compare", (relu, zero)), 2, zero))
    arrays[step(steps, arrays, "dot_general", (back, 1))].returned = True
    program = Lowered(arrays, steps, [], MATRICES)  # type: ignore[arg-type]
    backend = TpuBackend(load_device("tpu-v5e"))
    backend.store(backend.fusion(program).kernels(), program)
    assert arrays[relu].dtype == ("bf16" if constant else "f32")
