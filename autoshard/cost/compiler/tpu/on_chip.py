"""Memory space assignment on TPU: which temporaries are in on-chip memory (VMEM), which in device memory.

XLA's (`xla/service/memory_space_assignment`) assigns on-chip memory in order of seconds saved ÷ √size, so users bound
by memory come first. A value that fits for its whole live range needs no buffer in device memory, unless two uses are
too far apart: no value stays for longer than copying all of on-chip memory takes eight times
(`CanAllocateInAlternateMemoryNoCopy`). Any other has a buffer there from its producer to its last user, and is
prefetched for uses where it fits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Life:
    """The live range of one value.

    Attributes:
        bytes: of its buffer.
        uses: positions of its producer and then its users, ascending.
        gain: seconds that it saves on chip.
        far: whether its producer writes to device memory.
        half: position from which half of it is on chip before its first use, for a copy in slices.
        argument: whether the first position is that of its prefetch, not its producer.
    """

    bytes: int
    uses: tuple[int, ...]
    gain: float = 1.0
    far: bool = False
    half: int | None = None
    argument: bool = False

    @property
    def span(self) -> tuple[int, int]:
        """First and last position of the live range."""
        return self.uses[0], self.uses[-1]


@dataclass(frozen=True, slots=True)
class Buffered:
    """A value with a buffer in device memory.

    Attributes:
        near: its uses that read it on chip all the same.
        copies: number of prefetches and evictions.
        until: the last position at which device memory must hold it: all later users read it on chip.
        fetched: uses that it is prefetched for; others reuse such a copy.
        evicted: whether its producer writes it on chip, and a copy evicts it to the buffer.
    """

    near: frozenset[int]
    copies: int
    until: int
    fetched: tuple[int, ...] = ()
    evicted: bool = False


def off_chip(
    lives: Sequence[Life],
    capacity: int,
    clock: Sequence[float] | None = None,
    longest: float = math.inf,
    bandwidth: float = math.inf,
) -> dict[int, Buffered]:
    """Which of `lives` need a buffer in device memory if `capacity` bytes are on chip.

    Args:
        clock: seconds at which each position begins; default no time passes.
        longest: seconds that a value may stay on chip between two uses.
        bandwidth: bytes per second of prefetches, which must fit between two uses
            (libtpu's `xla_msa_min_overlap_to_async_copy_ratio` is 1).

    Returns:
        Index of the live range -> its buffer there.
    """
    if not lives:
        return {}
    taken = np.zeros(max(life.uses[-1] for life in lives) + 1, dtype=np.int64)

    def fits(start: int, end: int, size: int) -> bool:
        if size > capacity or int(taken[start : end + 1].max()) + size > capacity:
            return False
        taken[start : end + 1] += size
        return True

    def beside(start: int, size: int) -> bool:
        """Whether there is room until the eviction of a value produced here ends."""
        return bool(int(taken[start : start + 2].max()) + size <= capacity)

    def short(start: int, end: int) -> bool:
        return clock is None or clock[end] - clock[start + 1] <= longest

    def in_time(start: int, end: int, size: int) -> bool:
        return clock is None or bandwidth == math.inf or (clock[end] - clock[start + 1]) * bandwidth >= size

    found: dict[int, Buffered] = {}
    for place in sorted(range(len(lives)), key=lambda place: (*_urgency(lives[place]), place)):
        life = lives[place]
        gaps = list(zip(life.uses, life.uses[1:], strict=False))
        if life.far or not all(short(*gap) for gap in gaps) or not fits(*life.span, life.bytes):
            evicted = not life.far and beside(life.uses[0], life.bytes)
            waits = [(start if short(start, end) else end - 1, end) for start, end in gaps]
            found[place] = _buffered(life, waits, fits, evicted, in_time)
    return found


def _urgency(life: Life) -> tuple[float, int]:
    """Sort key: gain to five digits, since sums of equal terms may differ; the larger value first."""
    return float(f"{-life.gain / math.sqrt(max(life.bytes, 1)):.5g}"), -life.bytes


def _buffered(
    life: Life,
    gaps: Sequence[tuple[int, int]],
    fits: Callable[[int, int, int], bool],
    evicted: bool,
    in_time: Callable[[int, int, int], bool],
) -> Buffered:
    """The buffer of a value that is on chip between two uses where it fits.

    Args:
        gaps: (from where on it would be on chip, the use that reads it there).
        evicted: whether it is produced on chip.
        in_time: whether a value of so many bytes can be prefetched between two positions.
    """
    near: list[int] = []
    fetched: list[int] = []
    copies, until, held = 0, life.uses[0], False
    for before, (start, end) in zip(life.uses, gaps, strict=False):
        kept = held and start == before
        there = kept or ((evicted or life.argument) and start == life.uses[0]) or in_time(before, end, life.bytes)
        held = there and fits(start, end, life.bytes)
        if held and start == life.uses[0] and life.half is not None:
            fits(life.half, start - 1, life.bytes // 2)
        if held:
            near.append(end)
            copies += not kept
            if not kept and not (evicted and start == life.uses[0]):
                fetched.append(end)
        if not held or not kept:
            until = max(before, end - held)
    return Buffered(frozenset(near), copies, until, tuple(fetched), evicted)
