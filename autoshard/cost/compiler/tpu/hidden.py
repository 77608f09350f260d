"""The schedule of libtpu's latency hiding scheduler on TPUs of one core.

It is XLA's (`cost/compiler/latency.py`), with its own costs in cycles; its log gives all of them, and every choice
(libtpu 0.0.51, `TPU_VMODULE=latency_hiding_scheduler=10`). From the logged graph and costs all but one of 6,518 choices
in eight compiled steps follow. A program without asynchronous collectives keeps the memory scheduler's order. Where
sparse cores do gathers (v5p, v6e), permutes alone are asynchronous, and there are no aggressive policies. Loops of
windowed einsums are scheduled as a done is, with two of five permutes left in flight for them; one more permute stands
before or after each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autoshard.cost.compiler.kernels import Kernel
from autoshard.cost.compiler.latency import LOOP, Rules, overlapped
from autoshard.cost.compiler.lowered import COLLECTIVES, Array, Lowered
from autoshard.cost.compiler.schedule import Dependencies, Reads
from autoshard.cost.compiler.tpu.conv_loops import ring
from autoshard.cost.compiler.tpu.loops import goes_round, is_loop
from autoshard.cost.compiler.tpu.place import ALLOCATED, SHARE
from autoshard.cost.machine.device import Device
from autoshard.cost.machine.figures import figure, table, whole
from autoshard.graph.groups import BARRIER, ELEMENTWISE
from autoshard.graph.orders import post_order

CYCLE = 1 / figure("scheduled_cycle")

LAUNCH = figure("scheduled_launch") * CYCLE

LINKS = figure("scheduled_links")

SLOWER = {"collective-permute": figure("scheduled_permute"), "all-to-all": figure("scheduled_exchange")}

PRODUCTS = figure("scheduled_products") / CYCLE

LANES, STEP = 1024, table("scheduled_step")

HEAVIER = frozenset({"exponential", "log", "tanh", "divide", "sqrt", "rsqrt", "power", "logistic", "sine", "cosine"})

SMALLEST = whole("asynchronous_gather")

AT_ONCE = {"all-gather": 1, "collective-permute": whole("permutes_at_once")}


def hides_gathers(device: Device) -> bool:
    """Whether all-gathers run beside kernels; elsewhere sparse cores do them, or two cores."""
    return device.cores == 1 and not device.sparse_copy_bytes


def asynchronous(kernel: Kernel, program: Lowered, device: Device) -> bool:
    """Whether a kernel is an asynchronous collective: gathers on some kinds, and permutes."""
    if kernel.kind == "all-gather":
        return hides_gathers(device) and sum(program.arrays[array].bytes for array in kernel.writes) >= SMALLEST
    return kernel.kind in AT_ONCE


def goes_in_loop(kernel: Kernel, program: Lowered) -> bool:
    """Whether a kernel is a windowed einsum: permutes run inside, but for one before or after it."""
    steps = (program.steps[number] for number in kernel.steps)
    return any(is_loop(program, step) or ring(program, step) is not None for step in steps)


def hidden(
    order: Sequence[int],
    kernels: Sequence[Kernel],
    deps: Dependencies,
    program: Lowered,
    device: Device,
    size: Callable[[Array], int],
) -> list[int]:
    """The memory scheduler's `order`, rescheduled; a gather is at the position of its start.

    Kernels without operands, such as zeros, are placed right before their user, at no cost.

    Args:
        size: bytes of an array's buffer.
    """
    moves = [asynchronous(kernel, program, device) for kernel in kernels]
    placed = overlapped(
        order,
        deps,
        [_seconds(kernel, program, device, size) for kernel in kernels],
        moves,
        Reads.of_arrays(kernels),
        [LOOP if goes_in_loop(kernel, program) else kernel.kind for kernel in kernels],
        Rules(edge=CYCLE, at_once=AT_ONCE, viewing=CYCLE, aggressive=hides_gathers(device)),
    )
    found = dict.fromkeys(number for number, end in placed if not (end and moves[number]))
    return right_before(list(found), filling(kernels, deps), deps.makers)


def filling(kernels: Sequence[Kernel], deps: Dependencies) -> set[int]:
    """Kernels without operands, such as zeros, that have users; not allocations."""
    return {
        number
        for number, kernel in enumerate(kernels)
        if not kernel.reads and deps.users[number] and kernel.kind != ALLOCATED
    }


def right_before(order: Sequence[int], these: set[int], makers: Sequence[Sequence[int]]) -> list[int]:
    """`order` with each of `these` right before its first user."""
    roots = (*(one for one in order if one not in these), *order)
    return post_order(roots, lambda number: [maker for maker in makers[number] if maker in these])


def _seconds(kernel: Kernel, program: Lowered, device: Device, size: Callable[[Array], int]) -> float:
    """A kernel's seconds as the scheduler estimates."""
    arrays = program.arrays
    made, read = ([size(arrays[array]) for array in several] for several in (kernel.writes, kernel.reads))
    if kernel.kind == BARRIER:
        return 0.0
    if kernel.kind in COLLECTIVES:
        moved = {"all-reduce": made[0], "reduce-scatter": sum(read)}.get(kernel.kind, sum(made))
        if goes_round(program, kernel.steps[0]):
            permute = program.steps[kernel.steps[0]].collective
            assert permute is not None
            moved = permute.bytes
        return moved / (LINKS * device.links[0].bandwidth) * SLOWER.get(kernel.kind, 1.0)
    if kernel.kind in ("gather", "scatter") or (len(kernel.steps) <= 1 and not kernel.flops):
        return CYCLE
    work = kernel.flops / PRODUCTS
    for step in (program.steps[number] for number in kernel.steps):
        if step.kind in ELEMENTWISE or step.kind == "reduce":
            elements = max((arrays[array].elements for array in (*step.reads, *step.writes)), default=0)
            work += elements / LANES * STEP["heavy" if step.kind in HEAVIER else "plain"] * CYCLE
    touched = sum(size(arrays[array]) for array in {*kernel.reads, *kernel.writes})
    return LAUNCH + max(touched / (SHARE * device.memory_bandwidth / device.cores), work)
