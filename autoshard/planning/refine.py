"""`plan(..., refine=TARGET)`: compile the best few candidates for the target, and take the best compiled one.

Candidates are the solver's optimum; the optimum in sequence, and that with collectives of weights beside kernels; the
best runners-up, each the optimum under one more constraint: a group of like parameters, or the inputs, not
split over the axes that the optimum splits them over; and the best plans by hand. Candidates of equal communication
count as one. The device model times each compiled program (`verify/judge.py`). Times are seconds of one step.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from math import prod

from autoshard.cost.predict import predict
from autoshard.graph.annotations import with_regions
from autoshard.graph.ops import Graph, Value
from autoshard.mesh import Spec, spec_axes
from autoshard.planning.candidate import Candidate, collective_totals
from autoshard.planning.one_mesh import HIDDEN, OneMesh, decide, formulated
from autoshard.planning.options import PlanningOptions
from autoshard.planning.rivals import by_hand
from autoshard.plans.value import NoPlanError, RefineCandidate, Refinement, SolverInfo
from autoshard.stablehlo.annotate import annotate
from autoshard.strategies.formulate import Formulation
from autoshard.verify.check import compare_compiled
from autoshard.verify.compile import CompileError
from autoshard.verify.targets import Target

_BEST = {"": 2, "runner-up": 2, "by hand": 2}
"""How many of each kind are compiled beside the optimum; without a kind: in sequence, and overlapped."""
COMPILED = 1 + sum(_BEST.values())
"""Most candidates that are compiled."""
_ALIKE = 1e-3
"""Candidates that communicate the same bytes and whose steps differ by less than this fraction count as one."""
_FORBIDDEN = 4
"""Most constraints for runners-up: on the largest parameters (like ones together) and on the inputs."""


def refined(
    optimum: Candidate, graph: Graph, target: Target, options: PlanningOptions, hints: Mapping[str, Spec]
) -> tuple[Candidate, Refinement]:
    """The best compiled candidate, with all that were compiled and their times.

    Args:
        hints: those that constrain the plan, and plans by hand too.

    Raises:
        CompileError: the target's compiler compiles none of the candidates.
    """
    candidates = _distinct([optimum, *_rivals(optimum, graph, options, hints)])
    rows: list[RefineCandidate] = []
    errors: list[CompileError] = []
    for each in candidates:
        options.progress(f"compile {each.name} for {target}")
        try:
            rows.append(_compiled(each, graph, target))
        except CompileError as error:
            errors.append(error)
            figures = each.prediction.step_time_s, each.prediction.overlapped_s
            rows.append(RefineCandidate(each.name, *figures, note=str(error).splitlines()[0]))
    times = {
        row.name: (bool(row.note), row.compiled_overlapped_s) for row in rows if row.compiled_overlapped_s is not None
    }
    if not times:
        raise errors[0]
    chosen = min(times, key=lambda name: times[name])
    best = next(each for each in candidates if each.name == chosen)
    return best, Refinement(str(target), chosen, tuple(rows))


def _compiled(candidate: Candidate, graph: Graph, target: Target) -> RefineCandidate:
    """A candidate with the time and memory of its compiled program."""
    mesh, memory = candidate.mesh, candidate.memory
    module = annotate(graph.program, graph, candidate.annotations, mesh, platform=target.family)
    report, _ = compare_compiled(graph, candidate.annotations, mesh, target, module)
    judged = report.judged
    over = memory is not None and report.memory_bytes > memory
    return RefineCandidate(
        candidate.name,
        candidate.prediction.step_time_s,
        candidate.prediction.overlapped_s,
        judged.step_time_s,
        judged.step_time_s if judged.overlapped_s is None else judged.overlapped_s,
        report.memory_bytes,
        f"compiled it takes more than {memory:,} bytes per device" if over else "",
    )


def _distinct(candidates: list[Candidate]) -> list[Candidate]:
    """The optimum and, of each kind, the best predicted others that fit, without duplicates."""
    first, *others = candidates
    found, room = [first], dict(_BEST)
    for each in sorted(others, key=lambda each: (each.kind != "", each.time)):
        if each.fits and room.get(each.kind, 1) and not any(_alike(each, other) for other in found):
            found.append(each)
            room[each.kind] = room.get(each.kind, 1) - 1
    return found


def _alike(one: Candidate, other: Candidate) -> bool:
    """Whether both communicate the same bytes in the same time."""
    mine, others = (
        {(each.kind, each.axes): each.bytes for each in collective_totals(candidate.prediction.collectives)}
        for candidate in (one, other)
    )
    return mine == others and abs(one.time - other.time) <= _ALIKE * max(one.time, other.time)


def _rivals(
    optimum: Candidate, graph: Graph, options: PlanningOptions, hints: Mapping[str, Spec]
) -> Iterator[Candidate]:
    mesh, say = optimum.mesh, options.progress
    say("strategies")
    formulation = formulated(graph, mesh, optimum.memory, hints).repriced(*optimum.prices)
    say("runners-up")
    problems: list[tuple[str, str, Formulation]] = []
    chosen = {
        value: spec_axes(spec)
        for value, spec in optimum.annotations.pins.items()
        if graph.ops[value.op].kind == "argument"
    }
    for name, values in _decisions(graph).items():
        forbidden = {value: axes for value, axes in chosen.items() if value in values}
        problems.append((f"another {name}", "runner-up", formulation.without(forbidden)))
    problems += [("in sequence", "", formulation), ("overlapped", "", formulation.overlapping(HIDDEN))]
    on = OneMesh(graph, mesh, options, hints, optimum.memory, options.time_limit)
    for name, kind, problem in problems:
        say("solve")
        try:
            decision = decide(problem, mesh, on.settings(optimum.memory), hints)
        except NoPlanError:  # under the hints and ties only the optimum's way is feasible
            continue
        annotations = decision.annotations
        info = None
        if kind and optimum.solver is not None and optimum.solver.bound is not None:
            objective = decision.solution.objective
            gap = max(0.0, objective - optimum.solver.bound) / objective if objective else 0.0
            info = SolverInfo("feasible", objective, optimum.solver.bound, gap, decision.solution.backend)
        prediction = predict(graph, annotations, mesh)
        annotations = with_regions(graph, annotations, prediction.specs)
        found = Candidate(mesh, annotations, prediction, name, kind, optimum.memory, info, optimum.prices, graph=graph)
        yield found.written(graph, options)
    say("plans by hand")
    for name, made in by_hand(graph, mesh, hints):
        prediction = predict(graph, made, mesh)
        made = with_regions(graph, made, prediction.specs)
        yield Candidate(mesh, made, prediction, name, "by hand", optimum.memory, graph=graph)


def _decisions(graph: Graph) -> dict[str, set[Value]]:
    """Groups of parameters of equal names but for numbers and of equal shapes, largest bytes first; and the inputs."""
    alike: dict[tuple[str, tuple[int, ...]], dict[str, Value]] = {}
    for op, argument in zip(graph.arguments, graph.program.arguments, strict=True):
        if argument.role == "parameter" and argument.type.shape:
            pattern = re.sub(r"(?<![^.])\d+(?![^.])", "*", argument.name)
            alike.setdefault((pattern, argument.type.shape), {})[argument.name] = Value(op)
    largest = sorted(alike, key=lambda key: (-prod(key[1]) * len(alike[key]), key))[:_FORBIDDEN]
    inputs = {
        Value(op)
        for op, argument in zip(graph.arguments, graph.program.arguments, strict=True)
        if argument.role == "input" and argument.type.shape
    }
    found: dict[str, set[Value]] = {}
    for key in largest:
        name = key[0] if len(alike[key]) > 1 else next(iter(alike[key]))
        found[name] = found.get(name, set()) | set(alike[key].values())
    return found | ({"inputs": inputs} if inputs else {})
