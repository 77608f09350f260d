"""Kernels, orders and memory of one device's program, on programs small enough to count by hand."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from autoshard.cost.compiler.kernels import Kernel
from autoshard.cost.compiler.list_schedule import greedy
from autoshard.cost.compiler.lowered import Array
from autoshard.cost.compiler.memory_order import FromResults
from autoshard.cost.compiler.schedule import (
    Reads,
    beside_results,
    breadth_first,
    combined,
    dependencies,
    liveness,
    post_order,
)


def program(reads: Sequence[Sequence[int]], sizes: Sequence[int]) -> tuple[list[Kernel], list[Array]]:
    """Kernel i makes array i; `reads[i]` are the arrays that it reads."""
    kernels = [Kernel((i,), tuple(of), (i,), "dot_general", i) for i, of in enumerate(reads)]
    arrays = [Array((size // 4,), "f32", size, i) for i, size in enumerate(sizes)]
    for kernel in kernels:
        for array in kernel.reads:
            arrays[array].readers.append(kernel.place)
    arrays[-1].returned = True
    return kernels, arrays


def peak(kernels: Sequence[Kernel], order: Sequence[int], arrays: Sequence[Array]) -> int:
    return liveness(kernels, order, arrays, lambda array: array.bytes).peak


def test_an_array_lives_from_its_maker_to_its_last_reader() -> None:
    kernels, arrays = program([(), (0,), (1,), (0, 2)], [100, 10, 20, 1000])
    found = liveness(kernels, [0, 1, 2, 3], arrays, lambda array: array.bytes)
    assert found.timeline.tolist() == [100, 110, 130, 120]
    assert found.spans == {0: (0, 3), 1: (1, 2), 2: (2, 3)}


def test_a_loop_takes_over_the_buffer_of_an_operand_that_ends() -> None:
    kernels, arrays = program([(), (0,), (1,), (2,)], [100, 100, 100, 100])
    kernels[1].shares = kernels[2].shares = True
    assert peak(kernels, [0, 1, 2, 3], arrays) == 100
    arrays[0].readers.append(3)
    kernels[3].reads = (2, 0)
    assert peak(kernels, [0, 1, 2, 3], arrays) == 200


def test_temporaries_lie_in_buffers_of_results_until_these_are_made() -> None:
    # 0 is read by 1 and 2; 2 makes the result in the place of 1; 3 is larger than the result.
    kernels, arrays = program([(), (0,), (1, 0), (), (2, 3)], [60, 100, 100, 200, 4])
    for kernel in kernels:
        kernel.shares = True
    arrays[2].returned, arrays[4].donated = True, True

    def left(order: Sequence[int]) -> dict[int, tuple[int, int]]:
        live = liveness(kernels, order, arrays, lambda array: array.bytes)
        return beside_results(live, [kernels[i] for i in order], arrays, lambda array: array.bytes).spans

    assert left([0, 1, 2, 3, 4]) == {0: (0, 2), 3: (3, 4)}  # 0 is still read when the result is made
    kernels[2].reads = (1,)
    assert left([0, 1, 2, 3, 4]) == {0: (0, 1), 3: (3, 4)}  # there is no room beside 1
    assert left([3, 0, 1, 2, 4]) == {3: (0, 4), 0: (1, 2)}
    kernels[2].shares = False
    assert left([0, 1, 2, 3, 4]) == {1: (1, 2), 3: (3, 4)}  # 1 is read while the result is made, 0 is not


def test_breadth_first_runs_what_waits_for_nothing_first() -> None:
    deps = dependencies(program([(), (0,), (1,), (), (2, 3)], [1] * 5)[0])
    assert breadth_first(deps) == [0, 3, 1, 2, 4]
    assert post_order(deps, [4]) == [0, 1, 2, 3, 4]


def test_the_greedy_order_puts_off_what_only_adds() -> None:
    # 1 and 2 are read at the end; 3 frees 0.
    kernels, arrays = program([(), (0,), (0,), (0,), (1, 2, 3)], [8000, 4000, 4000, 1000, 64])
    deps = dependencies(kernels)
    assert greedy(kernels, deps, arrays) == [0, 3, 2, 1, 4]
    kernels, arrays = program([(), (), (0,), (1,), (2, 3)], [8000, 8000, 1000, 1000, 64])
    deps = dependencies(kernels)
    assert peak(kernels, greedy(kernels, deps, arrays), arrays) == 10000
    assert peak(kernels, breadth_first(deps), arrays) == 17000


def test_what_is_cleared_late_adds_before_what_is_scattered_into_it_frees() -> None:
    # 1 is made of an argument; 3 scatters it into the zeros 0, and 2 adds less than these; 4 adds more.
    kernels, arrays = program([(), (), (1,), (0, 1, 2), (2,), (3, 4)], [300, 8000, 64, 300, 400, 64])
    kernels[1].reads = (6,)
    deps = dependencies(kernels)
    assert greedy(kernels, deps, arrays) == [0, 1, 2, 3, 4, 5]
    assert greedy(kernels, deps, arrays, late=True) == [1, 2, 0, 3, 4, 5]
    kernels[4].reads, arrays[4] = (1,), Array((50,), "f32", 200, 4)
    deps = dependencies(kernels)
    assert greedy(kernels, deps, arrays, late=True) == [1, 2, 4, 0, 3, 5]


def test_what_reads_a_tuple_before_its_last_element_is_taken_counts_nothing_as_freed() -> None:
    """XLA schedules reduce-scatters of gradients behind a barrier at the end of the step."""
    # 0 makes three arrays; 3 makes as much of the first, 4 and 5 make little of the others.
    sizes = [4000, 4000, 4000, 4000, 400, 400, 64]
    reads = {0: (), 3: (0,), 4: (1,), 5: (2,), 6: (3, 4, 5)}
    arrays = [Array((size // 4,), "f32", size, 0 if i < 3 else i) for i, size in enumerate(sizes)]
    kernels = [Kernel((i,), of, (0, 1, 2) if i == 0 else (i,), "dot_general", i) for i, of in reads.items()]
    # The last element is taken first, so only what reads the first one is seen to free anything.
    order = greedy(kernels, dependencies(kernels), arrays)
    assert [kernels[number].place for number in order] == [0, 3, 4, 5, 6]


def collective(kernels: list[Kernel], numbers: Sequence[int]) -> None:
    for number in numbers:
        kernels[number].kind = "all-reduce"


def test_independent_collectives_are_combined_up_to_a_limit() -> None:
    kernels, arrays = program([(), (), (), (0,), (1,), (2,), (3, 4, 5)], [10] * 7)
    collective(kernels, [3, 4, 5])

    def groups(limit: float) -> list[tuple[int, ...]]:
        merged = combined(
            kernels,
            lambda kernel: kernel.kind if kernel.kind == "all-reduce" else None,
            lambda kernel: sum(arrays[a].bytes for a in kernel.writes),
            limit,
        )
        return [kernel.steps for kernel in merged if kernel.kind == "all-reduce"]

    assert groups(100) == [(3, 4, 5)]
    assert groups(20) == [(3, 4), (5,)]
    assert groups(5) == [(3,), (4,), (5,)]
    kernels[5].reads = (2, 3)  # the last needs the first
    assert groups(100) == [(3, 4), (5,)]


graphs = st.lists(st.tuples(st.sets(st.integers(0, 40), max_size=3), st.integers(1, 1000)), min_size=1, max_size=30)


@given(graphs)
def test_every_order_respects_data_flow(parts: list[tuple[set[int], int]]) -> None:
    reads = [tuple(sorted({i % n for i in of})) if n else () for n, (of, _) in enumerate(parts)]
    kernels, arrays = program(reads, [size for _, size in parts])
    deps = dependencies(kernels)
    sizes = [size for _, size in parts]
    found = FromResults(kernels, deps, Reads.of_arrays(kernels), arrays, [len(kernels) - 1], lambda array: array.bytes)
    for order in (
        breadth_first(deps),
        post_order(deps, [len(kernels) - 1]),
        found.depth_first(),
        found.post_order(),
        greedy(kernels, deps, arrays),
        greedy(kernels, deps, arrays, late=True),
    ):
        assert sorted(order) == list(range(len(kernels)))
        at = {number: position for position, number in enumerate(order)}
        assert all(at[maker] < at[user] for user, makers in enumerate(deps.makers) for maker in makers)
        assert liveness(kernels, order, arrays, lambda array: array.bytes).peak <= sum(sizes)


@given(graphs, st.sets(st.integers(0, 29)), st.integers(1, 2000))
def test_combining_keeps_every_array_and_makes_no_cycle(
    parts: list[tuple[set[int], int]], moved: set[int], limit: int
) -> None:
    reads = [tuple(sorted({i % n for i in of})) if n else () for n, (of, _) in enumerate(parts)]
    kernels, arrays = program(reads, [size for _, size in parts])
    collective(kernels, [number for number in moved if number < len(kernels)])
    merged = combined(
        kernels,
        lambda kernel: kernel.kind if kernel.kind == "all-reduce" else None,
        lambda kernel: sum(arrays[a].bytes for a in kernel.writes),
        limit,
    )
    assert sorted(array for kernel in merged for array in kernel.writes) == list(range(len(arrays)))
    assert len(breadth_first(dependencies(merged))) == len(merged)
