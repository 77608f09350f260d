"""Plans by hand that are predicted faster than the solver's choice.

The solver prices op by op; the prediction follows the whole compiled program, and the two differ by some percent. A
plan by hand that is nearly optimal may be predicted faster than the choice; then it becomes the plan. So does one that
fits a memory limit, where the solver, which counts memory in program order, finds none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice
from math import prod

from autoshard.cost.machine.device import load_device, with_slop
from autoshard.cost.predict import Prediction, predict
from autoshard.dtypes import dtype_bytes
from autoshard.graph.annotations import Annotations
from autoshard.graph.ops import Graph, Value
from autoshard.manual import PLANS
from autoshard.manual.rank import ranked
from autoshard.mesh import Mesh, Spec, replicated, spec_axes
from autoshard.planning.candidate import Candidate, collective_totals
from autoshard.planning.hints import value_named
from autoshard.planning.options import PlanningOptions
from autoshard.plans.figures import BY_HAND
from autoshard.plans.value import SolverInfo
from autoshard.strategies.formulate import annotatable
from autoshard.strategies.guard import UncompilableError, WrongNumbersError, guarded

PREDICTED_OPS = 30_000
"""Most predictions of plans by hand that are no faster, times ops of the program; 1,000 take up to a CPU second."""
_DOUBTED_OPS = 50_000
"""As many where the prices of kernels were far off: a choice by such prices says little."""
_FAR_OFF = 1.25
"""From this factor on, either way, prices of kernels are far off."""
_TIED = 0.02
"""A plan by hand so little slower than such a choice is taken: of errors, a choice has those that favour it."""
_FIRST = ("spatial", "dp")
"""Plans by hand that are predicted before others of such a choice: the estimate that ranks plans sees no kernels."""
FITTED = 3
"""Most plans by hand that are predicted where no other plan fits."""
_SURE = 0.05
"""Above this solver gap, or where prices were wrong by more, one plan by hand is always predicted."""

_FASTER = 1e-4
"""Fraction of a step by which a plan by hand must be faster."""
_DEARER = 0.005
"""Fraction of a step by which it is to be faster as it is, than the best and than with all values annotated."""
_ROUNDING = 1e-6
"""Relative rounding of recorded times, at most."""


def by_hand(
    graph: Graph, mesh: Mesh, hints: Mapping[str, Spec], memory: int | None = None
) -> Iterator[tuple[str, Annotations]]:
    """Plans by hand that satisfy the hints, best estimated first (`manual/rank.py`), without those XLA miscompiles.

    Nor are those among them whose arguments alone take more than `memory` bytes per device.
    """
    for name, made in _wanted(graph, mesh, hints, memory):
        if (safe := _safe(graph, made, mesh)) is not None:
            yield name, safe


def _wanted(
    graph: Graph, mesh: Mesh, hints: Mapping[str, Spec], memory: int | None
) -> Iterator[tuple[str, Annotations]]:
    wanted = {value_named(graph, name): spec for name, spec in hints.items()}
    for name, made in ranked(graph, mesh, load_device(mesh.device), PLANS):
        kept = all(value is not None and made.pins.get(value) == spec for value, spec in wanted.items())
        if kept and (memory is None or _held_bytes(graph, made, mesh) <= memory):
            yield name, made


def _held_bytes(graph: Graph, made: Annotations, mesh: Mesh) -> int:
    """Bytes of the arguments per device."""
    kinds = (graph.type_of(Value(op)) for op in graph.arguments)
    held = zip(kinds, _arguments(graph, made), strict=True)
    return sum(prod(mesh.shard_shape(kind.shape, spec)) * dtype_bytes(kind.dtype) for kind, spec in held)


def _safe(graph: Graph, made: Annotations, mesh: Mesh) -> Annotations | None:
    """The plan as XLA compiles it right; None if there is no such way. It takes a propagation."""
    try:
        return guarded(graph, made, mesh)
    except (UncompilableError, WrongNumbersError):
        return None


def that_fits(
    graph: Graph, mesh: Mesh, memory: int, hints: Mapping[str, Spec], bound: float | None
) -> Candidate | None:
    """Of the plans by hand estimated best, the fastest that fits; for where the solver finds none.

    Args:
        bound: on the objective without a limit, in seconds.
    """
    found = []
    for name, made in islice(by_hand(graph, mesh, hints, memory), FITTED):
        one = Candidate(mesh, made, predict(graph, made, mesh), memory=memory, graph=graph).rescheduled()
        gap = None if bound is None else max(0.0, 1 - bound / one.time)
        found.append(replace(one, solver=SolverInfo("feasible", one.time, bound, gap, BY_HAND, overruled=name)))
    return min((each for each in found if each.fits), key=lambda each: each.time, default=None)


def or_by_hand(found: Candidate, graph: Graph, options: PlanningOptions, hints: Mapping[str, Spec]) -> Candidate:
    """The solver's choice, or the plan by hand that is predicted faster within the same memory limit and hints.

    On a TPU it is to be no slower in sequence either: no schedule says which of its permutes hide. All values of a
    faster one are annotated, unless that is predicted dearer. A plan by hand that is equal to the choice, with an equal
    prediction, is taken as it is: it pins fewer values, and compilers then combine more.
    """
    assert found.solver is not None
    proved = found.solver.gap is not None and found.solver.gap <= _SURE
    step = found.time if found.hidden else found.prediction.step_time_s  # as the objective counts collectives
    right = found.prices == (1.0, 1.0) and step <= (1 + _SURE) * found.solver.objective
    sure = proved and right
    doubted = not 1 / _FAR_OFF <= found.prices[0] <= _FAR_OFF
    count = (_DOUBTED_OPS if doubted else PREDICTED_OPS) // max(1, len(graph.ops))
    count = count if count > 1 else 0 if sure else 1  # one of many plans says little
    if not count:  # making the plans by hand alone takes long for deep models
        return found
    mesh = found.mesh if found.slop is None else with_slop(found.mesh, None)  # rivals may fit with all latency hiding
    best = found
    wanted = list(_wanted(graph, mesh, hints, found.memory))
    if doubted:
        wanted.sort(key=lambda each: _FIRST.index(each[0]) if each[0] in _FIRST else len(_FIRST))
    for name, unsafe in wanted:
        fewer = best is found and len(unsafe.pins) < len(found.annotations.pins)
        same = fewer and _arguments(graph, unsafe) == _arguments(graph, found.annotations)
        if (count <= 0 and not same) or (made := _safe(graph, unsafe, mesh)) is None:
            continue
        solver = replace(found.solver, overruled=name)
        rival = replace(found, mesh=mesh, annotations=made, prediction=predict(graph, made, mesh), solver=solver)
        rival = replace(rival, slop=None).written(graph, options)
        margin = _TIED if doubted and best is found else -_FASTER
        scheduled = rival.rescheduled()
        if same and _alike(scheduled.prediction, found.prediction) and scheduled.fits:
            best = scheduled
        elif _faster(scheduled, best, margin):
            pinned = _pinned(rival, graph, options).rescheduled()
            as_is = not pinned.fits or _faster(scheduled, pinned, -_DEARER)
            taken = scheduled if as_is else pinned
            if _faster(taken, best, -_DEARER if as_is else margin):  # where one is, others may be
                best, count = taken, count + 1
        count -= 1
    return best


def _faster(rival: Candidate, best: Candidate, margin: float) -> bool:
    """Whether a plan by hand fits and is faster, or slower by less than this fraction of the step."""
    scheduled = load_device(best.mesh.device).target != "tpu"
    slower = rival.prediction.step_time_s > best.prediction.step_time_s * (1 + margin)
    return rival.fits and rival.time < best.time * (1 + margin) and (scheduled or not slower)


def _pinned(rival: Candidate, graph: Graph, options: PlanningOptions) -> Candidate:
    """With all values annotated as propagation is predicted to shard them: then no compiler propagates otherwise."""
    if options.annotations != "all":
        return rival
    specs, axes = rival.prediction.specs, set(rival.mesh.axis_names)
    pins = {value: specs[value] for value in annotatable(graph) if value in specs and spec_axes(specs[value]) <= axes}
    made = replace(rival.annotations, pins=pins | dict(rival.annotations.pins))
    return replace(rival, annotations=made, prediction=predict(graph, made, rival.mesh))


def _arguments(graph: Graph, annotations: Annotations) -> list[Spec]:
    """The spec of every argument; one without a pin (a counter, in plans by hand) is replicated."""
    whole = ((Value(op), replicated(len(graph.type_of(Value(op)).shape))) for op in graph.arguments)
    return [annotations.pins.get(value, spec) for value, spec in whole]


def _alike(one: Prediction, other: Prediction) -> bool:
    """Whether both predict the same communication, time and memory."""
    close = abs(one.step_time_s - other.step_time_s) <= _ROUNDING * other.step_time_s
    return (
        close
        and one.peak_memory_bytes == other.peak_memory_bytes
        and (collective_totals(one.collectives) == collective_totals(other.collectives))
    )
