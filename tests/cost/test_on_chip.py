"""What lies in a TPU's on-chip memory, and how the rest is laid out, counted by hand."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from autoshard.cost.on_chip import Life, off_chip, packed


def test_what_fits_for_its_whole_life_needs_no_device_memory() -> None:
    lives = [Life(60, (0, 9)), Life(50, (1, 2)), Life(50, (3, 4))]
    assert off_chip(lives, 110) == []
    assert off_chip(lives, 100) == [0]  # the two short ones gain more per byte
    assert off_chip(lives, 0) == [0, 1, 2]


def test_what_is_read_more_often_comes_first() -> None:
    assert off_chip([Life(100, (0, 5)), Life(100, (0, 2, 4, 5))], 100) == [0]


def test_the_heap_fills_gaps_and_keeps_those_that_are_too_small() -> None:
    assert packed([]) == 0
    assert packed([(0, 1, 100), (2, 3, 100)]) == 100
    assert packed([(0, 1, 100), (0, 9, 10), (2, 3, 60), (2, 3, 40)]) == 110
    # 200 fits neither below nor above the 10 that stay: 100 + 10 + 200.
    assert packed([(0, 1, 100), (0, 9, 10), (2, 3, 200)]) == 310


blocks = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20), st.integers(1, 100)), max_size=20)


@given(blocks)
def test_the_heap_holds_what_is_live_and_never_more_than_everything(parts: list[tuple[int, int, int]]) -> None:
    found = [(min(a, b), max(a, b), size) for a, b, size in parts]
    live = max((sum(size for a, b, size in found if a <= at <= b) for at in range(21)), default=0)
    assert live <= packed(found) <= sum(size for _, _, size in found)


@given(blocks, st.integers(0, 300))
def test_more_on_chip_memory_is_never_over_filled(parts: list[tuple[int, int, int]], capacity: int) -> None:
    lives = [Life(size, (min(a, b), max(a, b) + 1)) for a, b, size in parts]
    off = set(off_chip(lives, capacity))
    on = [life for place, life in enumerate(lives) if place not in off]
    assert all(sum(li.bytes for li in on if li.uses[0] <= at <= li.uses[-1]) <= capacity for at in range(23))
