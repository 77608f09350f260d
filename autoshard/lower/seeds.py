"""The seeds of a captured program's random numbers, anew for every step.

torch_xla seeds the first random op with a number, and each one after it with the next number of a linear congruential
sequence. A checkpoint's second pass goes back in that sequence: it is seeded by a number of its own, as many places
from the first as at capture, so that it draws the same again.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from autoshard.dtypes import is_whole, numpy_dtype
from autoshard.graph.ops import Graph

_RANDOM = frozenset({"rng_bit_generator", "rng"})
_MULTIPLIER, _ADDEND = 214013, 2531011
"""Of torch_xla's sequence, in 64 bits (`LazyGraphExecutor::DeviceContextArena::GetRngSeed`)."""
_BITS = 64
_FAR = 1 << 32
"""Seeds that are further apart than this have nothing to do with one another."""


class Seeds:
    """The integer scalars that seed a program's random numbers.

    Attributes:
        after: name of each -> the first that it follows, and how many draws it comes after it (modulo 2^64).
    """

    def __init__(self, graph: Graph, seed: int) -> None:
        """`seed`: of the seeds."""
        program = graph.program
        before = graph.leading_to([op.id for op in graph.ops if op.kind in _RANDOM]) if program.values else set()
        self._kinds = {
            argument.name: numpy_dtype(argument.type.dtype)
            for op, argument in zip(graph.arguments, program.arguments, strict=True)
            if argument.role == "scalar" and op in before and is_whole(argument.type.dtype)
        }
        self._random = np.random.default_rng(seed)
        self.after: dict[str, tuple[str, int]] = {}
        for name in self._kinds:
            related = (
                (first, apart(int(program.values[first]), int(program.values[name])))
                for first in [each for each, (first, _) in self.after.items() if each == first]
                if program.frontend == "torch_xla"
            )
            self.after[name] = next(((f, n) for f, n in related if min(n, (1 << _BITS) - n) < _FAR), (name, 0))

    def next_step(self) -> dict[str, Any]:
        """Name -> its value in the next step."""
        drawn = {name: int(self._random.integers(0, 2**31)) for name, (first, _) in self.after.items() if name == first}
        return {
            name: np.uint64(moved(drawn[first], draws)).astype(self._kinds[name])
            for name, (first, draws) in self.after.items()
        }


def apart(one: int, other: int) -> int:
    """How many draws `other` comes after `one`, modulo 2^64: the sequence has every number once."""
    one, other = one % (1 << _BITS), other % (1 << _BITS)
    multiplier, addend, found = _MULTIPLIER, _ADDEND, 0
    for bit in range(_BITS):  # a number's lowest n bits repeat after 2^n draws
        if (one ^ other) >> bit & 1:
            one, found = (one * multiplier + addend) % (1 << _BITS), found | 1 << bit
        multiplier, addend = _doubled(multiplier, addend)
    return found


def moved(one: int, draws: int) -> int:
    """The number that comes so many draws after `one`."""
    multiplier, addend = _MULTIPLIER, _ADDEND
    for bit in range(_BITS):
        if draws >> bit & 1:
            one = (one * multiplier + addend) % (1 << _BITS)
        multiplier, addend = _doubled(multiplier, addend)
    return one % (1 << _BITS)


def _doubled(multiplier: int, addend: int) -> tuple[int, int]:
    """The step of twice as many draws."""
    return multiplier * multiplier % (1 << _BITS), (multiplier + 1) * addend % (1 << _BITS)
