"""In which order a TPU of one core runs nets of convolutions: what frees most first, then as collectives let them."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from functools import partial

from autoshard.cost.compiler.kernels import Kernel
from autoshard.cost.compiler.latency import Rules, overlapped
from autoshard.cost.compiler.lowered import ATTENTION, COLLECTIVES, ROUNDING, SLICE, WITH_LOGITS, Lowered
from autoshard.cost.compiler.schedule import Dependencies, dependencies, greedy
from autoshard.cost.compiler.tpu.hidden import right_before
from autoshard.graph.groups import ELEMENTWISE

BESIDE = frozenset({"all-gather", "collective-permute", "all-to-all", "reduce-scatter"})
"""Kinds of collectives that run beside kernels on one core."""

LEAST_COST, LOOP_COST, PRODUCT_COST = 1.0, 1000.0, 5000.0
"""Seconds, in units of its own, that the latency hiding scheduler takes a kernel to last (XLA's
`ApproximateLatencyEstimator`): copies, scatters and all-reduces, and the way from a kernel to its reader; what is
elementwise, and sums; products. So, from the end backwards, two scatters are placed one behind the other, as each lets
the zeros be placed that it writes onto, and both copies for them lie before: T5's FSDP on v5e, 268 MB. Where a copy
follows each scatter, one chain stands behind the other (as compiled, data parallel and with split tables).
"""


def one_core_order(kernels: Sequence[Kernel], deps: Dependencies, program: Lowered, updates: bool) -> list[int]:
    """What frees most first; what needs nothing but arguments right before what reads it.

    The latency hiding scheduler keeps for the end what no collective waits for, so gradients that are not reduced
    yet are in memory together; and what nothing waits for, such as updates, comes last of all. Beside a gather runs
    all of this that is ready, and the products of gradients whose sums nothing waits for but updates.

    Args:
        updates: whether an update that is written over its argument adds nothing, unless its gradient is summed
            over devices together with others: of those the smallest comes first. No rule of the compiler's, but
            nearer: in 14 of 21 programs compiled for v5e such updates go up in size, in 7 down, and why is not
            found; by which order needs less memory the direction was right in 9.
    """
    together = {
        array for kernel in kernels if kernel.kind == "all-reduce" and len(kernel.writes) > 1 for array in kernel.writes
    }

    def placed(kernel: Kernel, phase: int) -> bool:
        return phase == 0 or (updates and together.isdisjoint(kernel.reads))

    lazy = _lazy(kernels, deps) | made_again(kernels, deps, program)
    phases = _phases(kernels, deps)
    sequence: list[list[int]] = []
    for current in range(3):
        now = [n for n in range(len(kernels)) if n not in lazy and phases[n] == current]
        rest = [kernels[number] for number in now]
        ordered = greedy(rest, dependencies(rest), program.arrays, partial(placed, phase=current))
        sequence.append([now[number] for number in ordered])
    beside = {number for number, kernel in enumerate(kernels) if kernel.kind == "all-gather"}
    late = [*(n for n in sequence[0] if _gradient(n, kernels, deps, phases)), *sequence[1], *sequence[2]]
    places = {number: place for place, number in enumerate(late)}
    waiting = [sum(maker not in lazy for maker in makers) for makers in deps.makers]
    ready = [place for place, number in enumerate(late) if not waiting[number]]  # of `late`, ascending
    order: list[int] = []
    done: set[int] = set()

    def run(number: int) -> None:
        if number not in done:
            done.add(number)
            for maker in deps.makers[number]:
                if maker in lazy:
                    run(maker)
            order.append(number)
            for user in deps.users[number] if number not in lazy else ():
                waiting[user] -= 1
                if not waiting[user] and user in places:
                    heapq.heappush(ready, places[user])

    def waits(number: int) -> bool:
        """Whether a kernel reads what is not gathered yet, or gathers what waits for what else its readers need."""
        if not beside.isdisjoint(maker for maker in deps.makers[number] if maker not in done):
            return True
        makers = ({*deps.makers[user]} - {number} - lazy for user in deps.users[number])
        return kernels[number].kind == "all-gather" and not any(done >= others for others in makers)

    def run_late() -> None:
        """What is ready, in one pass: what becomes ready behind the place where the pass is waits for the next."""
        at, passed = -1, []
        while ready:
            place = heapq.heappop(ready)
            if place < at or waits(late[place]):
                passed.append(place)
            else:
                at = place
                run(late[place])
        ready.extend(passed)
        heapq.heapify(ready)

    for number in sequence[0]:
        if not beside.isdisjoint((number, *(maker for maker in deps.makers[number] if maker not in done))):
            run_late()
        run(number)
    for number in late:
        run(number)
    return order


def behind_collectives(order: Sequence[int], kernels: Sequence[Kernel], program: Lowered) -> list[int]:
    """`order`, with all that follows the last collective that runs beside kernels in the latency hiding scheduler's.

    What needs nothing but arguments runs right before what reads it, wherever the scheduler puts it (libtpu's
    `constant-deferring`).
    """
    last = max((place for place, number in enumerate(order) if kernels[number].kind in BESIDE), default=-1)
    deps = dependencies(kernels)
    lazy = _lazy(kernels, deps)
    early, late = order[: last + 1], order[last + 1 :]
    rest = [kernels[number] for number in late]
    takes = [_cost(kernel) for kernel in rest]
    views = [len(kernel.writes) > 1 for kernel in rest]
    rules = Rules(edge=LEAST_COST, elements=True)
    placed = overlapped(range(len(rest)), dependencies(rest), takes, [False] * len(rest), views, rules=rules)
    found = [*early, *(late[place] for place, _ in placed)]
    return right_before(found, lazy, deps.makers)


def _cost(kernel: Kernel) -> float:
    """What the latency hiding scheduler takes a kernel to last; collectives that run alone are as short as copies."""
    if kernel.flops:
        return PRODUCT_COST
    return LOOP_COST if kernel.kind in ELEMENTWISE or kernel.kind == "reduce" else LEAST_COST


def _phases(kernels: Sequence[Kernel], deps: Dependencies) -> list[int]:
    """Per kernel when it runs: 0 products that a collective waits for, and what they need; 2 updates, 1 the rest.

    Updates that an all-reduce is the last step to run with it: the scheduler takes an all-reduce as soon as it may. A
    reduce-scatter is part of a kernel like any other.
    """
    awaited = _before(deps, [number for number, kernel in enumerate(kernels) if kernel.kind in COLLECTIVES])
    products = [number for number in awaited if kernels[number].flops or kernels[number].kind == "reduce"]
    first = {*products, *_before(deps, products)}
    reduced = {number for number, kernel in enumerate(kernels) if kernel.kind == "all-reduce"}
    return [
        0 if number in first else 1 if users or not reduced.isdisjoint(deps.makers[number]) else 2
        for number, users in enumerate(deps.users)
    ]


def _gradient(number: int, kernels: Sequence[Kernel], deps: Dependencies, phases: Sequence[int]) -> bool:
    """Whether a kernel is a product that updates alone wait for, and a sum over devices before them."""

    def late(user: int) -> bool:
        summed = kernels[user].kind in ("all-reduce", "reduce-scatter")
        return phases[user] > 0 or (summed and all(phases[after] > 0 for after in deps.users[user]))

    return bool(kernels[number].flops) and bool(deps.users[number]) and all(map(late, deps.users[number]))


def _lazy(kernels: Sequence[Kernel], deps: Dependencies) -> set[int]:
    """Kernels that need nothing but arguments, rounded perhaps; copies and parts of what they make for these alone."""
    found: set[int] = set()
    for number, makers in enumerate(deps.makers):
        follows = (
            len(makers) == 1
            and makers[0] in found
            and (
                kernels[makers[0]].kind == ROUNDING
                or (kernels[number].kind in ("copy", SLICE) and len(deps.users[makers[0]]) == 1)
            )
        )
        if deps.users[number] and (not makers or follows):
            found.add(number)
    return found


def made_again(kernels: Sequence[Kernel], deps: Dependencies, program: Lowered) -> set[int]:
    """Products of queries and keys that are part of a kernel of attention too, and sums over what they make.

    They run right before what reads them, in the backward pass, though they could from the forward pass on: in none of
    16 compiled programs does one, but that of the last layer, run before the last attention (DeBERTa's on v5e and v5p,
    two small transformers on v5e, chains of two and three attentions).
    """
    whole = {step.values[:2] for step in program.steps if step.kind == ATTENTION and len(step.values) > WITH_LOGITS}
    found: set[int] = set()
    for number, kernel in enumerate(kernels if whole else ()):
        steps = [program.steps[step] for step in kernel.steps]
        product = any(step.kind == "dot_general" and step.values in whole for step in steps)
        makers = deps.makers[number]
        if deps.users[number] and (product or (makers and found.issuperset(makers))):
            found.add(number)
    return found


def _before(deps: Dependencies, todo: list[int]) -> set[int]:
    """Kernels that one of `todo` waits for."""
    found: set[int] = set()
    todo = list(todo)
    while todo:
        for maker in deps.waits[todo.pop()]:
            if maker not in found:
                found.add(maker)
                todo.append(maker)
    return found
