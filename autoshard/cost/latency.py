"""The latency hiding scheduler of XLA's GPU compiler: collectives beside the kernels that neither make nor read them.

From the end of the step backwards, one collective at a time is in flight (`parallel_collective_overlap_limit`): as soon
as all that reads its result stands behind it, its end is placed, and its start once kernels have been placed that take
as long as it does. Kernels are otherwise taken as they stood. So gathers move to the front one behind the other, and
their results wait in memory.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from autoshard.cost.schedule import Dependencies


def overlapped(
    order: Sequence[int], deps: Dependencies, takes: Sequence[float], moves: Sequence[bool]
) -> list[tuple[int, bool]]:
    """An order of (kernel, whether it is its end); a collective appears twice, as its start and as its end.

    Args:
        order: the kernels in the order that is changed.
        takes: seconds of each kernel.
        moves: whether a kernel is a collective.
    """
    place = {number: position for position, number in enumerate(order)}
    waiting = [len(after) for after in deps.frees]
    kernels: list[tuple[int, int]] = []
    collectives: list[tuple[int, int]] = []
    placed: list[tuple[int, bool]] = []

    def release(number: int) -> None:
        for before in deps.waits[number]:
            waiting[before] -= 1
            if not waiting[before]:
                ready(before)

    def ready(number: int) -> None:
        heapq.heappush(collectives if moves[number] else kernels, (-place[number], number))

    for number in order:
        if not waiting[number]:
            ready(number)
    now = until = 0.0
    flying: int | None = None
    while kernels or collectives or flying is not None:
        if flying is not None and (now >= until or not kernels):
            now = max(now, until)
            placed.append((flying, False))
            release(flying)
            flying = None
        elif flying is None and collectives:
            flying = heapq.heappop(collectives)[1]
            placed.append((flying, True))
            until = now + takes[flying]
        else:
            number = heapq.heappop(kernels)[1]
            placed.append((number, False))
            now += takes[number]
            release(number)
    return placed[::-1]
