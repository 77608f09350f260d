"""Blocks whose lives are known in one heap, as XLA's CPU and GPU compilers lay them out."""

from __future__ import annotations

import random

import numpy as np
import pytest

from autoshard.cost.compiler.backend import Backend, Compiled
from autoshard.cost.compiler.gpu.backend import GpuBackend
from autoshard.cost.compiler.heap import best_fit
from autoshard.cost.compiler.lowered import Lowered
from autoshard.cost.compiler.schedule import Liveness


def peak(blocks: list[tuple[int, int, int]]) -> int:
    """Most bytes live at once."""
    return max(sum(size for start, end, size in blocks if start <= at <= end) for at in range(40))


def test_the_largest_lies_lowest_and_others_in_the_tightest_gap() -> None:
    assert best_fit([]) == 0
    assert best_fit([(0, 1, 4), (1, 2, 6), (2, 3, 4)]) == 10
    # 6 lies below from 1 to 2; what is live before and after it shares its place.
    assert best_fit([(0, 0, 5), (1, 2, 6), (3, 4, 5)]) == 6


def test_gaps_make_a_heap_larger_than_what_is_live_at_once() -> None:
    """Never smaller than the most that is live; a chain of lives that overlap leaves gaps that nothing fits in."""
    chance = random.Random(0)
    wasted = 0
    for _ in range(200):
        starts = [chance.randrange(30) for _ in range(25)]
        blocks = [(start, start + chance.randrange(10), chance.randrange(1, 50)) for start in starts]
        assert peak(blocks) <= best_fit(blocks) <= 1.6 * peak(blocks)
        wasted += best_fit(blocks) > peak(blocks)
    assert wasted > 50


@pytest.mark.parametrize(("backend", "temporary"), [(GpuBackend, 4), (Backend, 3)])
def test_on_gpu_gaps_count_as_memory(backend: type[Backend], temporary: int) -> None:
    """Both of 2 bytes lie lowest; of those of 1, which overlap, one lies beside each, and they cannot both lie at 2."""
    blocks = {0: (0, 1, 2), 1: (1, 2, 1), 2: (2, 3, 1), 3: (3, 4, 2)}
    timeline = [sum(size for start, end, size in blocks.values() if start <= at <= end) for at in range(5)]
    live = Liveness(
        np.array(timeline),
        {array: (start, end) for array, (start, end, _) in blocks.items()},
        {array: size for array, (_, _, size) in blocks.items()},
        {},
    )
    program: Lowered = None  # type: ignore[assignment]
    assert Compiled(program, (), live, 0, 0, gaps=backend.gaps).temporary_bytes == temporary
