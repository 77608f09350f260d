"""Schedules of a program's kernels, and the live memory over each.

Schedules are XLA's (`hlo_memory_scheduler.cc`): here breadth first (the CPU compiler's: the oldest ready kernel), in
`list_schedule.py` and `memory_order.py` the other three. Before that collectives are combined
(`collective_combiner_utils.h`): independent ones of one kind over the same axes, up to a size.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from autoshard.cost.compiler.kernels import Kernel
from autoshard.cost.compiler.lowered import Array, Lowered
from autoshard.graph import orders
from autoshard.graph.groups import BARRIER


@dataclass(frozen=True)
class Dependencies:
    """Data and control dependencies of kernels, by their number in the list.

    Attributes:
        makers: per kernel the producers of its operands, each once.
        users: per kernel the users of its results, each once.
        waits: per kernel all predecessors: its producers, and control predecessors.
        frees: successors, the reverse of `waits`.
    """

    makers: tuple[tuple[int, ...], ...]
    users: tuple[tuple[int, ...], ...]
    waits: tuple[tuple[int, ...], ...]
    frees: tuple[tuple[int, ...], ...]


def dependencies(kernels: Sequence[Kernel]) -> Dependencies:
    """Dependencies of these kernels."""
    maker = {array: number for number, kernel in enumerate(kernels) for array in kernel.writes}
    makers = tuple(tuple(dict.fromkeys(maker[array] for array in kernel.reads if array in maker)) for kernel in kernels)
    users = _reversed(makers)
    return Dependencies(makers, users, makers, users)


@dataclass(frozen=True)
class Reads:
    """The instructions that kernels read: kernels, arguments, get-tuple-elements and bitcasts.

    Attributes:
        of: per kernel the instructions that it reads, each once.
        viewed: per instruction that which it is an element or a bitcast of; None: it is a kernel or an argument.
        arrays: per instruction the array that it is; None: a kernel.
    """

    of: Sequence[Sequence[int]]
    viewed: Sequence[int | None]
    arrays: Sequence[int | None]

    @classmethod
    def of_arrays(
        cls,
        kernels: Sequence[Kernel],
        several: Callable[[Kernel], bool] = lambda kernel: len(kernel.writes) > 1,
        bitcasts: Callable[[Kernel], Mapping[int, Hashable]] = lambda kernel: {},
    ) -> Reads:
        """Arguments, kernels, and elements of those that return tuples.

        Args:
            several: whether a kernel returns a tuple.
            bitcasts: of a kernel, array that it reads through a bitcast -> which bitcast of it.
        """
        maker = {array: number for number, kernel in enumerate(kernels) for array in kernel.writes}
        viewed: list[int | None] = [None] * len(kernels)
        arrays: list[int | None] = [None] * len(kernels)
        known: dict[Hashable, int] = {}

        def instruction(key: Hashable, array: int, of: int | None) -> int:
            if key not in known:
                known[key] = len(viewed)
                viewed.append(of)
                arrays.append(array)
            return known[key]

        found = []
        for kernel in kernels:
            through = bitcasts(kernel)
            read = []
            for array in kernel.reads:
                one = maker.get(array)
                if one is None or several(kernels[one]):
                    one = instruction(array, array, one)
                if array in through:
                    one = instruction((array, through[array]), array, one)
                read.append(one)
            found.append(list(dict.fromkeys(read)))
        return cls(found, viewed, arrays)


def _reversed(makers: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    users: list[list[int]] = [[] for _ in makers]
    for number, before in enumerate(makers):
        for one in before:
            users[one].append(number)
    return tuple(map(tuple, users))


def summed_over(program: Lowered, kernel: Kernel) -> Hashable:
    """What combined all-reduces must have in common, axes and dtype; None for other kernels."""
    step = program.steps[kernel.steps[-1]]
    if kernel.kind != "all-reduce" or step.collective is None:
        return None
    return step.collective.axes, program.arrays[step.writes[0]].dtype


def combined(
    kernels: list[Kernel],
    key: Callable[[Kernel], Hashable],
    size: Callable[[Kernel], int],
    limit: float,
    count: int = 256,
    results: Sequence[int] = (),
) -> list[Kernel]:
    """Combine independent collectives with equal keys (None is never combined) up to `limit` bytes.

    In program order, as XLA does: a collective that would exceed the limit, or depends on one of the group, starts a
    new group.

    Args:
        key: what combined collectives have in common.
        size: bytes of one.
        limit: bytes of a group.
        count: largest number in a group.
        results: the program's results in order; if given, collectives come in post-order from these.
    """
    keys = {number: found for number, kernel in enumerate(kernels) if (found := key(kernel)) is not None}
    if results and len(keys) > 1:
        order = post_order(dependencies(kernels), _makers(kernels, results))
        keys = {number: keys[number] for number in order if number in keys}
    keys = {number: found for number, found in keys.items() if size(kernels[number]) <= limit}
    if len(set(keys.values())) == len(keys):
        return kernels
    before = ancestors(kernels)
    merged: list[list[int]] = []
    while keys:
        active = keys[next(iter(keys))]
        taken: list[int] = []
        total, above, joined = 0, 0, 0
        for number in [number for number, found in keys.items() if found == active]:
            amount = size(kernels[number])
            depends = before[number] & above or joined >> number & 1
            if taken and (total + amount > limit or depends):
                break
            taken.append(number)
            total += amount
            above |= 1 << number
            joined |= before[number]
            del keys[number]
            if len(taken) >= count:
                break
        if len(taken) > 1:
            merged.append(taken)
            for number, found in enumerate(before):  # successors of one now wait for all
                if found & above:
                    before[number] = found | joined
    return _merged(kernels, merged)


def _merged(kernels: list[Kernel], merged: Sequence[Sequence[int]]) -> list[Kernel]:
    """The kernels with these groups merged."""
    if not merged:
        return kernels
    gone = {number for members in merged for number in members}
    result = [kernel for number, kernel in enumerate(kernels) if number not in gone]
    for members in merged:
        parts = [kernels[number] for number in members]
        result.append(
            Kernel(
                tuple(step for part in parts for step in part.steps),
                tuple(dict.fromkeys(array for part in parts for array in part.reads)),
                tuple(array for part in parts for array in part.writes),
                parts[0].kind,
                max(part.place for part in parts),
                parts[0].shares,
            )
        )
    return in_order(sorted(result, key=lambda kernel: kernel.place))


def _makers(kernels: Sequence[Kernel], arrays: Sequence[int]) -> list[int]:
    """The producers of these arrays, in their order, each once."""
    maker = {array: number for number, kernel in enumerate(kernels) for array in kernel.writes}
    return list(dict.fromkeys(maker[array] for array in arrays if array in maker))


def ancestors(kernels: Sequence[Kernel]) -> list[int]:
    """Per kernel a bit set of its ancestors, itself included; kernels in topological order."""
    maker: dict[int, int] = {}
    found: list[int] = []
    for number, kernel in enumerate(kernels):
        bits = 1 << number
        for array in kernel.reads:
            if array in maker:
                bits |= found[maker[array]]
        found.append(bits)
        maker.update(dict.fromkeys(kernel.writes, number))
    return found


def in_order(kernels: list[Kernel]) -> list[Kernel]:
    """In topological order, otherwise stable."""
    return [kernels[number] for number in _as_ready(dependencies(kernels), [], heapq.heappush, heapq.heappop)]


# --- orders ------------------------------------------------------------------------------------------------------


def breadth_first(deps: Dependencies) -> list[int]:
    """`BFScheduler`: a queue of ready kernels."""
    return _as_ready(deps, deque[int](), deque.append, deque.popleft)


Ready = TypeVar("Ready", list[int], deque[int])


def _as_ready(
    deps: Dependencies, ready: Ready, put: Callable[[Ready, int], None], take: Callable[[Ready], int]
) -> list[int]:
    """Kernels as they are taken from the ready ones; `ready` holds these, at first none."""
    waiting = [len(before) for before in deps.waits]
    for number, count in enumerate(waiting):
        if not count:
            put(ready, number)
    order = []
    while ready:
        number = take(ready)
        order.append(number)
        for user in deps.frees[number]:
            waiting[user] -= 1
            if not waiting[user]:
                put(ready, user)
    return order


def post_order(deps: Dependencies, results: Sequence[int]) -> list[int]:
    """Operands first, from each of `results` (their producers) in turn, and from what has no users."""
    rest = [number for number, users in enumerate(deps.frees) if not users]
    return orders.post_order((*results, *rest), deps.waits.__getitem__)


# --- what is in memory -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Liveness:
    """Live temporary memory of a schedule, without arguments and results.

    Attributes:
        timeline: bytes at each position of the schedule.
        spans: array -> (first, last) position of its live range.
        sizes: array -> bytes of its buffer.
        buffers: array -> the array whose buffer it has: its own, or an operand's that it takes over.
    """

    timeline: np.ndarray
    spans: dict[int, tuple[int, int]]
    sizes: dict[int, int]
    buffers: dict[int, int]

    @property
    def peak(self) -> int:
        """Most bytes at any position."""
        return int(self.timeline.max()) if len(self.timeline) else 0


def passes(kernel: Kernel) -> bool:
    """Whether a kernel is a barrier whose results alias its operands; one that has an operand twice copies it."""
    return kernel.kind == BARRIER and len(kernel.writes) == len(kernel.reads)


def liveness(
    kernels: Sequence[Kernel],
    order: Sequence[int],
    arrays: Sequence[Array],
    rounded: Callable[[Array], int],
    results: bool = False,
) -> Liveness:
    """Live memory when `kernels` run in `order`.

    Args:
        rounded: bytes of an array's buffer.
        results: also count the program's results, from their producers to the end.
    """
    last: dict[int, int] = {}
    for position, number in enumerate(order):
        for array in kernels[number].reads:
            last[array] = position
    spans: dict[int, list[int]] = {}
    buffer: dict[int, int] = {}  # array -> the array whose buffer it has
    sizes: dict[int, int] = {}
    change = np.zeros(len(order) + 1, dtype=np.int64)
    for position, number in enumerate(order):
        kernel = kernels[number]
        passed = dict(zip(kernel.writes, kernel.reads, strict=True)) if passes(kernel) else {}
        free = [
            array
            for array in kernel.reads
            if last[array] == position
            and array in buffer
            and array not in kernel.displaced
            and array not in kernel.viewed
            and spans[buffer[array]][1] <= position
        ]
        for array in kernel.writes:
            found = arrays[array]
            if found.returned:
                if not results:
                    continue
                last[array] = len(order) - 1
            size = rounded(found)
            held = array
            if array in passed:  # a barrier's results alias its operands
                if passed[array] not in buffer:
                    continue
                held = buffer[passed[array]]
            elif kernel.shares:
                taken = next((one for one in free if sizes[buffer[one]] == size), None)
                if taken is not None:
                    free.remove(taken)
                    held = buffer[taken]
            buffer[array] = held
            if held == array:
                spans[array] = [position, position]
                sizes[array] = size
            spans[held][1] = max(spans[held][1], last.get(array, position))
        change[position] += kernel.workspace
        change[position + 1] -= kernel.workspace
    for array, (start, end) in spans.items():
        change[start] += sizes[array]
        change[end + 1] -= sizes[array]
    timeline = np.cumsum(change[:-1])
    return Liveness(timeline, {array: (start, end) for array, (start, end) in spans.items()}, sizes, buffer)


def beside_results(
    live: Liveness, kernels: Sequence[Kernel], arrays: Sequence[Array], rounded: Callable[[Array], int]
) -> Liveness:
    """`live`, that of `kernels` in this order, without temporaries that share buffers of results.

    The buffer of a result that aliases no argument exists for the whole step: a temporary that is not larger and dies
    before the result is produced shares it, largest temporaries first, in the smallest buffer (XLA's `BufferAssigner`).
    """
    rooms: list[tuple[int, list[tuple[int, int, int]]]] = []  # bytes, and the live ranges in it
    follows: set[tuple[int, int]] = set()  # (array, one that may take over its buffer)
    for position, kernel in enumerate(kernels):
        for array in kernel.writes:
            if arrays[array].returned and not arrays[array].donated:
                rooms.append((rounded(arrays[array]), [(position, len(kernels), array)]))
            if kernel.shares:
                before = [live.buffers.get(one, one) for one in kernel.reads if one not in kernel.displaced]
                size = rounded(arrays[array])
                follows |= {(one, array) for one in before if live.sizes.get(one) == size}
    rooms.sort(key=lambda room: room[0])
    change = np.zeros(len(kernels) + 1, dtype=np.int64)
    within: set[int] = set()
    for array in sorted(live.spans, key=lambda array: -live.sizes[array]) if rooms else ():
        start, end = live.spans[array]
        for size, held in rooms:
            if live.sizes[array] <= size and all(
                end < first + ((array, other) in follows) or start > until - ((other, array) in follows)
                for first, until, other in held
            ):
                held.append((start, end, array))
                within.add(array)
                change[start] -= live.sizes[array]
                change[end + 1] += live.sizes[array]
                break
    spans = {array: span for array, span in live.spans.items() if array not in within}
    return Liveness(live.timeline + np.cumsum(change[:-1]), spans, live.sizes, live.buffers)
