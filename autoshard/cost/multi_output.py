"""Kernels with several results: siblings that read one array, and makers with their readers, run as one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autoshard.cost.kernels import Kernel
from autoshard.cost.schedule import ancestors, dependencies, in_order


def merged_outputs(
    kernels: list[Kernel], alike: Callable[[Kernel, Kernel], bool], shared: Callable[[int], bool]
) -> list[Kernel]:
    """Merge kernels that read, or make and read, one array, as long as nothing else stands between them.

    Args:
        alike: whether two kernels may run as one.
        shared: whether an array is worth reading once.
    """
    return _Merger(kernels).run(alike, shared)


class _Merger:
    def __init__(self, kernels: list[Kernel]) -> None:
        self.kernels = kernels
        self.before = ancestors(kernels)
        self.makers = dependencies(kernels).makers
        self.members = [[number] for number in range(len(kernels))]
        self.into = list(range(len(kernels)))

    def run(self, alike: Callable[[Kernel, Kernel], bool], shared: Callable[[int], bool]) -> list[Kernel]:
        users: dict[int, list[int]] = {}
        for number, kernel in enumerate(self.kernels):
            for array in (*kernel.writes, *kernel.reads):
                if shared(array):
                    users.setdefault(array, []).append(number)
        for group in users.values():
            for place, later in enumerate(group[1:], 1):
                for earlier in group[:place]:
                    one, other = self.into[earlier], self.into[later]
                    if one != other and alike(self.kernels[one], self.kernels[other]) and self._free(one, other):
                        self._join(one, other)
                        break
        result = [self._merged(sorted(parts)) for parts in self.members if parts]
        return in_order(sorted(result, key=lambda kernel: kernel.place))

    def _free(self, one: int, other: int) -> bool:
        """Whether neither needs the other but for results that it reads directly."""
        first = sum(1 << number for number in self.members[one])
        second = sum(1 << number for number in self.members[other])
        if any(self.before[number] & second for number in self.members[one]):
            return False
        both = {*self.members[one], *self.members[other]}
        between = {maker for number in self.members[other] for maker in self.makers[number]} - both
        return not any(self.before[maker] & first for maker in between)

    def _join(self, one: int, other: int) -> None:
        self.members[one] += self.members[other]
        self.members[other] = []
        bits = members = 0
        for number in self.members[one]:
            self.into[number] = one
            members |= 1 << number
            bits |= self.before[number]
        for number, found in enumerate(self.before):
            if found & members:
                self.before[number] = found | bits

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
