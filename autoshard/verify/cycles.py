"""libtpu's own estimate of a compiled step, independent of the device model.

A TPU's compiler that runs to its end writes `estimated_cycles` on products, fusions and copies. It writes none on
collectives, on async copies and sparse-core work, on gathers, scatters and sorts, or on Pallas kernels: those are
counted by kind, without an estimate of ours in their place.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from autoshard.cost.machine.device import Device
from autoshard.graph.ops import Graph
from autoshard.verify.hlo_text import Computation, Instruction, Module, aten_index
from autoshard.verify.schedule import Clock
from autoshard.verify.targets import Target, TargetError
from autoshard.verify.work import ASYNC_COPIES, COLLECTIVE, Work

_ESTIMATE = re.compile(r'"estimated_cycles":"(\d+)"')
_NO_ESTIMATE = 2**63 - 1
"""libtpu's value for no estimate."""

_LOOPS_OF_THEIR_OWN = frozenset({"gather", "scatter", "sort"})
_ESTIMATED = "estimated"
_SHOWN_S = 5e-7


@dataclass(frozen=True)
class Cycles:
    """libtpu's estimates for the kernels of one device, per step.

    Attributes:
        cycles: sum of its estimates times trip counts; of a conditional, the most expensive branch alone.
        clock: cycles per second of the device kind.
        model_s: seconds of the same kernels under the device model.
        without: kind -> executions per step without an estimate, and their seconds under the device model (0 for
            collectives).
        loops: names of loops counted once because their trip counts are unknown.
    """

    cycles: int
    clock: float
    model_s: float
    without: Mapping[str, tuple[int, float]]
    loops: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """Seconds of the kernels with an estimate."""
        return self.cycles / self.clock

    @property
    def unestimated_s(self) -> float:
        """Seconds under the device model of kernels without an estimate, none of those that run beside others."""
        return sum(seconds for kind, (_, seconds) in self.without.items() if not kind.startswith("async "))

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "cycles": self.cycles,
            "clock": self.clock,
            "seconds": self.seconds,
            "model_s": self.model_s,
            "without_estimate": {
                kind: {"kernels": count, "model_s": seconds} for kind, (count, seconds) in self.without.items()
            },
            "loops_of_unknown_trips": list(self.loops),
        }

    def __str__(self) -> str:
        """Lines for the terminal."""
        without = ", ".join(
            f"{count} {kind}" + f" ({seconds * 1e3:.3f} ms)" * (seconds >= _SHOWN_S)
            for kind, (count, seconds) in self.without.items()
        )
        lines = [
            f"kernels: {self.seconds * 1e3:.3f} ms by libtpu's cycles at {self.clock / 1e9:g} GHz, "
            f"{self.model_s * 1e3:.3f} ms under the device model",
            f"  without an estimate (time under the device model): {without or 'none'}",
        ]
        if self.loops:
            lines.append(f"  counted once, their trips unknown: {', '.join(self.loops)}")
        return "\n".join(lines)


def compiled_cycles(module: Module, device: Device, trips: Mapping[int, int] | None = None) -> Cycles:
    """Sum libtpu's estimates over the kernels of a module compiled with code generation.

    Args:
        device: of the target; its clock must be known.
        trips: aten op -> trip count of its loop, for loops without one in the compiled text.
    """
    walk = _Walk(module, device, trips or {})
    found = walk.kernels(module.entry, 1)
    count: Counter[str] = Counter()
    seconds: dict[str, float] = defaultdict(float)
    for one in found:
        count[one.kind] += one.times
        seconds[one.kind] += one.times * one.model_s
    return Cycles(
        cycles=_cycles(found),
        clock=device.clock,
        model_s=seconds[_ESTIMATED],
        without={kind: (times, seconds[kind]) for kind, times in count.most_common() if kind != _ESTIMATED},
        loops=tuple(dict.fromkeys(walk.unknown)),
    )


def estimate_of(instruction: Instruction) -> int:
    """libtpu's estimate of one execution in cycles; 0 where it has none."""
    estimate = _ESTIMATE.search(instruction.rest)
    return int(estimate[1]) if estimate and int(estimate[1]) < _NO_ESTIMATE else 0


def check_clock(target: Target, device: Device) -> None:
    """Refuse a target whose compiler estimates no cycles, and a device kind of unknown clock.

    Raises:
        TargetError: says what to do.
    """
    if target.family != "tpu":
        raise TargetError(f"only libtpu estimates cycles, and {target} is no TPU: choose a target such as tpu-v5e:2x4")
    if not device.clock:
        raise TargetError(
            f"the clock of device kind {device.kind} is not known: give its file a line such as clock = 1.5e9 (Hz)"
        )


def loop_trips(graph: Graph) -> dict[int, int]:
    """Aten op -> trip count of the one loop that it became, where that is known."""
    found: dict[int, set[int | None]] = {}
    for op in _ops(graph):
        if op.kind == "while" and op.aten is not None:
            found.setdefault(op.aten, set()).add(op.attrs["trip_count"])
    return {aten: trips for aten, (trips, *more) in found.items() if trips is not None and not more}


def _ops(graph: Graph) -> Iterator[Any]:
    for op in graph.ops:
        yield op
        for body in op.attrs.get("bodies", ()):
            yield from _ops(body.graph)


@dataclass(frozen=True)
class _Timed:
    """What runs `times` times: libtpu's cycles of one execution if `_ESTIMATED`, its seconds under the device model."""

    kind: str
    times: int
    cycles: int
    model_s: float


def _cycles(kernels: Iterable[_Timed]) -> int:
    return sum(one.times * one.cycles for one in kernels)


class _Walk:
    """A walk over the computations that run, for one `compiled_cycles` call."""

    def __init__(self, module: Module, device: Device, trips: Mapping[int, int]) -> None:
        self.module = module
        self.device = device
        self.trips = trips
        self.work = Work(module, on_chip_is_free=True)
        self.clock = Clock(device)
        self.unknown: list[str] = []

    def kernels(self, name: str, times: int) -> list[_Timed]:
        """The kernels of a computation that runs `times` times a step."""
        computation = self.module.computations[name]
        found: list[_Timed] = []
        for instruction in computation.instructions.values():
            if instruction.opcode == "while":
                found += self.called(instruction, times * self.trip_count(instruction))
            elif instruction.opcode == "conditional":
                found += max((self.kernels(branch, times) for branch in instruction.called), key=_cycles, default=[])
            elif instruction.opcode == "call":
                found += self.called(instruction, times)
            else:
                found += self.at(computation, instruction, times)
        return found

    def called(self, instruction: Instruction, times: int) -> list[_Timed]:
        return [kernel for name in instruction.called for kernel in self.kernels(name, times)]

    def trip_count(self, loop: Instruction) -> int:
        """Trip count of a loop: from the compiled text, else from the program, else 1, and noted."""
        trips = self.module.trip_count(loop)
        if trips is None:
            aten = aten_index(loop.op_name)
            trips = self.trips.get(aten) if aten is not None else None
        if trips is None:
            self.unknown.append(loop.name)
        return 1 if trips is None else trips

    def at(self, computation: Computation, instruction: Instruction, times: int) -> Iterator[_Timed]:
        """A top-level instruction, if it is a kernel or a collective."""
        kernels = list(self.work.at(computation, instruction))
        cycles = estimate_of(instruction)
        kind = _ESTIMATED if cycles else self.without_estimate(computation, instruction, bool(kernels))
        if kind:
            model_s = sum(kernel.count * self.clock.seconds(kernel) for kernel in kernels)
            yield _Timed(kind, times, cycles, model_s)

    def without_estimate(self, computation: Computation, instruction: Instruction, kernel: bool) -> str:
        """Name of an instruction without an estimate; empty where it takes no time."""
        opcode = instruction.opcode
        if collective := COLLECTIVE.match(opcode):
            return "" if opcode.endswith("-done") else collective[0]
        if opcode == "async-start":  # a sparse core's, in parallel to the kernels
            return f"async {self.module.computations[instruction.called[0]].root.opcode}"
        if opcode == "fusion" and not kernel:
            end = self.module.async_ends(instruction)
            return "reduce-scatter" if end is None else "async collective" if end[0] == "start" else ""
        if not kernel:
            return ""
        if opcode in ASYNC_COPIES:
            return "async copy"
        if self.work.is_scalar(computation, instruction):
            return "scalar op"
        return self.fused_loop(instruction) or instruction.target or opcode

    def fused_loop(self, instruction: Instruction) -> str:
        """The gather, scatter or sort inside a fusion, however deep."""
        for name in instruction.called:
            for one in reversed(self.module.computations[name].instructions.values()):
                if found := one.opcode if one.opcode in _LOOPS_OF_THEIR_OWN else self.fused_loop(one):
                    return found
        return ""
