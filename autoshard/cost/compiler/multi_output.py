"""Multi-output fusion: siblings that read one array, and producers with their users, run as one kernel."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence

import numpy as np
import numpy.typing as npt

from autoshard.cost.compiler.kernels import Kernel
from autoshard.cost.compiler.schedule import Dependencies, dependencies, in_order

MAX_WALKED_KERNELS = 64
"""Up to so many ancestors or descendants of a kernel are enumerated: a parameter update has few, of tens of thousands
of kernels.
"""

_BITS = [np.uint64(1 << place) for place in range(64)]


def merged_outputs(
    kernels: list[Kernel],
    key: Callable[[Kernel], Hashable],
    shared: Callable[[int], bool],
    alike: Callable[[Kernel, Kernel], bool] = lambda one, other: True,
    hero: Callable[[Kernel], Hashable] | None = None,
    passes: Callable[[int], bool] | None = None,
    siblings_first: bool = False,
    siblings: bool = True,
) -> list[Kernel]:
    """Merge siblings that read one array, or a producer and a user, unless a path through a third kernel joins them.

    Args:
        key: kernels with equal keys may merge; those with None never do.
        shared: whether an array is worth reading once.
        alike: a further condition on two kernels with equal keys.
        hero: what the heroes of merged kernels must agree on; None agrees with any.
        passes: whether a user of an array may merge with its producer; default any.
        siblings_first: siblings merge before their producer joins (as in XLA's GPU compiler).
        siblings: whether siblings merge without their producer.
    """
    return _Merger(kernels, hero, passes, siblings_first, siblings).run(
        [key(kernel) for kernel in kernels], shared, alike
    )


class _Merger:
    def __init__(
        self,
        kernels: list[Kernel],
        hero: Callable[[Kernel], Hashable] | None,
        passes: Callable[[int], bool] | None,
        siblings_first: bool,
        siblings: bool,
    ) -> None:
        self.kernels, self.passes, self.siblings_first, self.siblings = kernels, passes, siblings_first, siblings
        self.heroes = [None if hero is None else hero(kernel) for kernel in kernels]
        deps = dependencies(kernels)
        self.before = _Ancestors(deps)
        self.makers = [np.array(sorted(makers), np.intp) for makers in deps.makers]  # of all merged kernels
        self.members = [[number] for number in range(len(kernels))]
        self.into = list(range(len(kernels)))
        self.root = np.arange(len(kernels))  # the same, as an array

    def run(
        self, keys: Sequence[Hashable], shared: Callable[[int], bool], alike: Callable[[Kernel, Kernel], bool]
    ) -> list[Kernel]:
        users: dict[int, list[int]] = {}
        for number, kernel in enumerate(self.kernels):
            for array in (*kernel.writes, *kernel.reads):
                if shared(array):
                    users.setdefault(array, []).append(number)
        for array, group in users.items():
            makes = self.siblings_first and array in self.kernels[group[0]].writes
            seen: dict[Hashable, list[int]] = {}
            for later in (*group[1:], group[0]) if makes else group:
                if keys[later] is None:
                    continue
                before = seen.setdefault(keys[later], [])
                for earlier in before:
                    one, other = self.into[earlier], self.into[later]
                    if makes and later == group[0]:
                        one, other = other, one
                    if one == other or not self._agree(one, other):
                        continue
                    if alike(self.kernels[one], self.kernels[other]) and self._makes_no_cycle(one, other):
                        self._join(one, other)
                        break
                sibling = not self.siblings and array not in self.kernels[later].writes
                if not sibling and all(self.into[earlier] != self.into[later] for earlier in before):
                    before.append(later)
        result = [self._merged(sorted(parts)) for parts in self.members if parts]
        return in_order(sorted(result, key=lambda kernel: kernel.place))

    def _agree(self, one: int, other: int) -> bool:
        first, second = self.heroes[one], self.heroes[other]
        return first is None or second is None or first == second

    def _makes_no_cycle(self, one: int, other: int) -> bool:
        """Whether merging makes no cycle: no path from one to the other through a third kernel."""
        if self.before.waits(one, other) or not self._passed_on(one, other):
            return False
        between = self.root[self.makers[other]]
        return not self.before.any_waits(between[(between != one) & (between != other)], one)

    def _passed_on(self, one: int, other: int) -> bool:
        if self.passes is None:
            return True
        made = {array for number in self.members[one] for array in self.kernels[number].writes}
        return all(
            self.passes(array)
            for number in self.members[other]
            for array in self.kernels[number].reads
            if array in made
        )

    def _join(self, one: int, other: int) -> None:
        self.before.join(one, other)
        if self.heroes[one] is None:
            self.heroes[one] = self.heroes[other]
        self.makers[one] = np.concatenate((self.makers[one], self.makers[other]))
        self.members[one] += self.members[other]
        for number in self.members[other]:
            self.into[number] = one
        self.root[self.members[other]] = one
        self.members[other] = []

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
    """The ancestors of each kernel, itself included: one bit each, 64 to a word.

    Words come first, so that asking all kernels for one bit reads memory in order. The first of merged kernels stands
    for all: they have the same ancestors and descendants; the others are dropped.
    """

    def __init__(self, deps: Dependencies) -> None:
        """For kernels in topological order."""
        count = len(deps.makers)
        rows = np.zeros((count, -(-count // 64)), np.uint64)
        for number, makers in enumerate(deps.makers):
            if len(makers) == 1:
                rows[number] = rows[makers[0]]
            elif makers:
                np.bitwise_or.reduce(rows[list(makers)], axis=0, out=rows[number])
            rows[number, number // 64] |= _bit(number)
        self.words = rows.T.copy()
        self.kept = np.ones(count, dtype=bool)
        self.makers = [list(makers) for makers in deps.makers]  # merged ones included
        self.users = [list(users) for users in deps.users]  # the same
        self.into = list(range(count))

    def waits(self, one: int, other: int) -> bool:
        """Whether `other` is an ancestor of `one`."""
        return bool(self.words[other // 64, one] & _bit(other))

    def any_waits(self, these: np.ndarray, other: int) -> bool:
        """Whether `other` is an ancestor of any of `these`."""
        return bool((self.words[other // 64, these] & _bit(other)).any())

    def join(self, one: int, other: int) -> None:
        """Merge two kernels: descendants of either get the ancestors of both."""
        self.kept[other] = False
        first, second = self._waiting(one), self._waiting(other)
        more = self._waited_for(other, one), self._waited_for(one, other)
        self.into[other] = one
        self.makers[one] += self.makers[other]
        self.users[one] += self.users[other]
        after_one = self._rows(first, second, one, other, gone=other)
        after_other = self._rows(second, first, other, one, gone=other)
        before = [self.words[:, number].copy() for number in (one, other)] if None in more else []
        for rows, new, words in ((after_one, more[0], before), (after_other, more[1], before[::-1])):
            if len(rows) and new is not None:
                for number in new:
                    self.words[number // 64, rows] |= _bit(number)
            elif len(rows):
                has, wants = words
                changed = np.flatnonzero(wants & ~has)
                self.words[changed[:, None], rows] |= wants[changed, None]

    def _waited_for(self, number: int, other: int) -> set[int] | None:
        """The ancestors of one kernel, itself included, that are not those of another; None if there are many.

        The search stops at ancestors of the other, since it has theirs too.
        """
        return self._reached(number, self.makers, lambda maker: not self.waits(other, maker))

    def _waiting(self, number: int) -> set[int] | None:
        """The descendants of a kernel, itself included; None if there are many."""
        return self._reached(number, self.users, lambda user: True)

    def _reached(
        self, number: int, beside: Sequence[Collection[int]], counts: Callable[[int], bool]
    ) -> set[int] | None:
        found, todo = {number}, [number]
        while todo:
            near = beside[todo.pop()]
            if len(near) > MAX_WALKED_KERNELS or len(found) > MAX_WALKED_KERNELS:
                return None
            for one in near:
                while self.into[one] != one:
                    one = self.into[one]
                if one not in found and counts(one):
                    found.add(one)
                    todo.append(one)
        return found

    def _rows(
        self, these: set[int] | None, others: set[int] | None, one: int, other: int, gone: int
    ) -> npt.NDArray[np.intp]:
        """The remaining descendants of one kernel but not of another; `these` and `others` are descendants of either.

        `gone` has just been merged, after `these` and `others` were found.
        """
        if these is not None and others is not None:
            return np.array([*(these - others - {gone})], np.intp)
        waits, excluded = ((self.words[number // 64] & _bit(number)) != 0 for number in (one, other))
        return np.flatnonzero(waits & ~excluded & self.kept)


def _bit(number: int) -> np.uint64:
    """A kernel's bit in its word."""
    return _BITS[number % 64]
