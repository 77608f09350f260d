"""Kernels with several results: siblings that read one array, and makers with their readers, run as one."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import numpy as np

from autoshard.cost.kernels import Kernel
from autoshard.cost.schedule import ancestors, dependencies, in_order


def merged_outputs(
    kernels: list[Kernel],
    key: Callable[[Kernel], Hashable],
    shared: Callable[[int], bool],
    alike: Callable[[Kernel, Kernel], bool] = lambda one, other: True,
) -> list[Kernel]:
    """Merge kernels that read, or make and read, one array, as long as nothing else stands between them.

    Args:
        key: kernels with equal keys may run as one; what has None runs alone.
        shared: whether an array is worth reading once.
        alike: what else is asked of two kernels with equal keys.
    """
    return _Merger(kernels).run([key(kernel) for kernel in kernels], shared, alike)


class _Merger:
    def __init__(self, kernels: list[Kernel]) -> None:
        self.kernels = kernels
        self.before = _Ancestors(kernels)
        self.makers = dependencies(kernels).makers
        self.members = [[number] for number in range(len(kernels))]
        self.into = list(range(len(kernels)))

    def run(
        self, keys: Sequence[Hashable], shared: Callable[[int], bool], alike: Callable[[Kernel, Kernel], bool]
    ) -> list[Kernel]:
        users: dict[int, list[int]] = {}
        for number, kernel in enumerate(self.kernels):
            for array in (*kernel.writes, *kernel.reads):
                if shared(array):
                    users.setdefault(array, []).append(number)
        for group in users.values():
            seen: dict[Hashable, list[int]] = {}
            for later in group:
                if keys[later] is None:
                    continue
                before = seen.setdefault(keys[later], [])
                for earlier in before:
                    one, other = self.into[earlier], self.into[later]
                    if one != other and alike(self.kernels[one], self.kernels[other]) and self._free(one, other):
                        self._join(one, other)
                        break
                before.append(later)
        result = [self._merged(sorted(parts)) for parts in self.members if parts]
        return in_order(sorted(result, key=lambda kernel: kernel.place))

    def _free(self, one: int, other: int) -> bool:
        """Whether neither needs the other but for results that it reads directly."""
        first, second = self.members[one], self.members[other]
        if self.before.any(first, second):
            return False
        between = {maker for number in second for maker in self.makers[number]} - {*first, *second}
        return not self.before.any(sorted(between), first)

    def _join(self, one: int, other: int) -> None:
        self.members[one] += self.members[other]
        for number in self.members[other]:
            self.into[number] = one
        self.members[other] = []
        self.before.join(self.members[one])

    def _merged(self, parts: Sequence[int]) -> Kernel:
        if len(parts) == 1:
            return self.kernels[parts[0]]
        one = [self.kernels[part] for part in parts]
        made = {array for kernel in one for array in kernel.writes}
        return Kernel(
            tuple(sorted({step for kernel in one for step in kernel.steps})),
            tuple(dict.fromkeys(array for kernel in one for array in kernel.reads if array not in made)),
            tuple(array for kernel in one for array in kernel.writes),
            one[-1].kind,
            max(kernel.place for kernel in one),
            all(kernel.shares for kernel in one),
            sum(kernel.workspace for kernel in one),
            sum(kernel.flops for kernel in one),
            frozenset().union(*(kernel.displaced for kernel in one)),
        )


class _Ancestors:
    """Which kernels each kernel waits for, itself included: one bit each, 64 of them in a word.

    Words come first, so that asking all kernels for the same few bits reads memory in order.
    """

    def __init__(self, kernels: Sequence[Kernel]) -> None:
        width = -(-len(kernels) // 64)
        rows = b"".join(found.to_bytes(8 * width, "little") for found in ancestors(kernels))
        self.words = np.frombuffer(rows, dtype="<u8").reshape(len(kernels), width).T.copy()

    def any(self, these: Sequence[int], those: Sequence[int]) -> bool:
        """Whether one of `these` waits for one of `those`."""
        numbers = np.array(these, dtype=np.intp)
        return any(bool((self.words[word, numbers] & bits).any()) for word, bits in _masks(those).items())

    def join(self, members: Sequence[int]) -> None:
        """From now on what waits for one of `members` waits for all that any of them waits for."""
        some = np.zeros(self.words.shape[1], dtype=bool)
        every = np.ones_like(some)
        for word, bits in _masks(members).items():
            found = self.words[word] & bits
            some |= found != 0
            every &= found == bits
        rows = np.flatnonzero(some & ~every)  # who waits for every one has all of this already
        self.words[:, rows] |= np.bitwise_or.reduce(self.words[:, members], axis=1)[:, None]


def _masks(numbers: Sequence[int]) -> dict[int, np.uint64]:
    """Word -> the bits in it."""
    found: dict[int, int] = {}
    for number in numbers:
        found[number // 64] = found.get(number // 64, 0) | 1 << number % 64
    return {word: np.uint64(bits) for word, bits in found.items()}
