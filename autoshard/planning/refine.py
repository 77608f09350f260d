"""`plan(..., refine=TARGET)`: the few best candidates compiled for the target, and the best compiled one taken.

Candidates are the solver's optimum; the optimum where communication counts half, as if the other half ran beside
compute; the best runners-up, each the best plan in which alike parameters, or the inputs, may not be split over the
axes that the optimum splits them over; and the best of the plans written by hand that are for the program. Those that
communicate alike count as one. They are compiled, and judged under the device model by what came out
(`verify/judge.py`). Times are seconds of one step.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING

from autoshard.mesh import Mesh, spec_axes
from autoshard.plans.value import NoPlanError, Plan, RefineCandidate, Refinement, SolverInfo

if TYPE_CHECKING:
    from autoshard.cost.predict import Prediction
    from autoshard.graph.annotations import Annotations
    from autoshard.graph.ops import Graph, Value
    from autoshard.planning.decision import Progress
    from autoshard.strategies.formulate import Formulation
    from autoshard.verify.targets import Target

OPTIMUM = "optimum"
"""What the predicted choice is called among the candidates."""
_BEST = {"runner-up": 2, "by hand": 2}
"""How many of each kind are compiled, beside the optimum and the overlapped one."""
COMPILED = 2 + sum(_BEST.values())
"""Candidates that are compiled at most."""
_ALIKE = 1e-3
"""Plans that communicate the same bytes, with steps that differ by less than this part, count as one."""
_FORBIDDEN = 4
"""Decisions that runners-up are sought by: the largest parameters, alike ones together, and the inputs."""
_HIDDEN = 0.5
"""Part of communication that the overlapped objective takes to run beside compute."""


@dataclass(frozen=True)
class _Candidate:
    name: str
    annotations: Annotations = field(repr=False)
    prediction: Prediction = field(repr=False)
    solver: SolverInfo | None = None
    kind: str = ""

    @property
    def time(self) -> float:
        return self.prediction.step_time_s

    def like(self, other: _Candidate) -> bool:
        """Whether both communicate the same in the same time."""
        mine, others = (_moved(each.prediction) for each in (self, other))
        return mine == others and abs(self.time - other.time) <= _ALIKE * max(self.time, other.time)


def _moved(prediction: Prediction) -> dict[tuple[str, tuple[str, ...]], int]:
    """Bytes of collectives per kind and axes."""
    found: dict[tuple[str, tuple[str, ...]], int] = {}
    for each in prediction.collectives:
        key = each.kind, each.axes
        found[key] = found.get(key, 0) + each.bytes * each.count
    return found


def check_refine(text: str, mesh: Mesh) -> Target:
    """The target to refine for, on which the mesh must lie.

    Raises:
        TargetError: there is no such target, its compiler is not installed, or the mesh does not lie on it.
    """
    from autoshard.verify.targets import on_target, parse_target

    target = parse_target(text, mesh.size)
    target.packages()
    on_target(mesh, target)
    return target


def refined(
    plan: Plan,
    graph: Graph,
    target: Target,
    *,
    time_limit: float = 60.0,
    written: Callable[[Annotations], Annotations] = lambda annotations: annotations,
    progress: Progress | None = None,
) -> Plan:
    """The best compiled of the plan and its rivals, with what was compiled and how long each takes.

    Args:
        plan: the solver's; its options (memory, hints, fold, seed) hold for its rivals too.
        time_limit: seconds for the solver, for each rival.
        written: what of a rival's annotations is written (all, or the least that are needed).

    Raises:
        CompileError: the target's compiler compiles none of the candidates.
    """
    from autoshard.cost.predict import predict
    from autoshard.planning.written import written_plan
    from autoshard.stablehlo.annotate import annotate
    from autoshard.verify.check import compare_compiled
    from autoshard.verify.compile import CompileError

    say = progress or (lambda stage: None)
    own = plan.annotations(graph)
    first = _Candidate(OPTIMUM, own, predict(graph, own, plan.mesh), plan.solver)
    candidates = _distinct([first, *_rivals(plan, graph, time_limit, written, say)], plan.options.memory)
    rows: list[RefineCandidate] = []
    errors: list[CompileError] = []
    for each in candidates:
        say(f"compile {each.name} for {target}")
        figures = (each.name, each.prediction.step_time_s, each.prediction.overlapped_s)
        module = annotate(graph.program, graph, each.annotations, plan.mesh)
        try:
            report, _ = compare_compiled(graph, each.annotations, plan.mesh, target, module)
        except CompileError as error:
            errors.append(error)
            rows.append(RefineCandidate(*figures, note=str(error).splitlines()[0]))
            continue
        judged, memory = report.judged, plan.options.memory
        over = memory is not None and report.memory_bytes > memory
        rows.append(
            RefineCandidate(
                *figures,
                judged.step_time_s,
                judged.step_time_s if judged.overlapped_s is None else judged.overlapped_s,
                report.memory_bytes,
                f"compiled it takes more than {memory:,} bytes per device" if over else "",
            )
        )
    times = {row.name: (bool(row.note), row.compiled_s) for row in rows if row.compiled_s is not None}
    if not times:
        raise errors[0]
    chosen = min(times, key=lambda name: times[name])
    record = Refinement(str(target), chosen, tuple(rows))
    if chosen == OPTIMUM:
        return replace(plan, refined=record)
    best = next(each for each in candidates if each.name == chosen)
    found = written_plan(graph, plan.mesh, best.annotations, best.prediction, options=plan.options, solver=best.solver)
    return replace(found, search=plan.search, refined=record)


def _distinct(candidates: list[_Candidate], memory: int | None) -> list[_Candidate]:
    """The optimum and the best predicted others of each kind that fit, no two of them alike."""
    first, *others = candidates
    found, room = [first], dict(_BEST)
    for each in sorted(others, key=lambda each: (each.kind != "", each.time)):
        fits = memory is None or each.prediction.peak_memory_bytes <= memory
        if fits and room.get(each.kind, 1) and not any(each.like(other) for other in found):
            found.append(each)
            room[each.kind] = room.get(each.kind, 1) - 1
    return found


def _rivals(
    plan: Plan,
    graph: Graph,
    time_limit: float,
    written: Callable[[Annotations], Annotations],
    say: Progress,
) -> Iterator[_Candidate]:
    from autoshard.cost.predict import predict
    from autoshard.planning.decision import decide, formulated

    options, mesh = plan.options, plan.mesh
    formulation = formulated(graph, mesh, options.memory, options.hints, say)

    def solved(name: str, problem: Formulation, kind: str) -> Iterator[_Candidate]:
        try:
            decided = decide(
                problem, mesh, hints=options.hints, fold=options.fold, time_limit=time_limit, seed=options.seed
            )
        except NoPlanError:  # the hints, or what the program ties together, leave only the optimum's way
            return
        annotations = written(decided.annotations)
        info = None
        if kind and plan.solver is not None and plan.solver.bound is not None:
            objective = decided.solution.objective
            gap = max(0.0, objective - plan.solver.bound) / objective if objective else 0.0
            info = SolverInfo("feasible", objective, plan.solver.bound, gap, decided.solution.backend)
        yield _Candidate(name, annotations, predict(graph, annotations, mesh), info, kind)

    say("runners-up")
    chosen = _chosen(plan, graph)
    for name, values in _decisions(graph).items():
        forbidden = {value: axes for value, axes in chosen.items() if value in values}
        yield from solved(f"another {name}", formulation.without(forbidden), "runner-up")
    yield from solved("overlapped", _overlapped(graph, plan), "")
    say("plans by hand")
    yield from _by_hand(plan, graph)


def _chosen(plan: Plan, graph: Graph) -> dict[Value, frozenset[str]]:
    """Argument -> the axes that split it."""
    pins = plan.annotations(graph).pins
    return {value: spec_axes(spec) for value, spec in pins.items() if graph.ops[value.op].kind == "argument"}


def _decisions(graph: Graph) -> dict[str, set[Value]]:
    """The largest parameters by bytes, those of one name but for numbers and of one shape together; and the inputs."""
    from autoshard.graph.ops import Value

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


def _overlapped(graph: Graph, plan: Plan) -> Formulation:
    """The problem in which part of every collective's bytes are on their way beside compute."""
    from autoshard.cost.machine.device import load_device
    from autoshard.planning.hints import split
    from autoshard.strategies.formulate import formulate

    device = load_device(plan.mesh.device)
    links = tuple(replace(link, bandwidth=link.bandwidth / (1 - _HIDDEN)) for link in device.links)
    arguments, inside = split(graph, plan.options.hints)
    faster = replace(device, links=links)
    return formulate(graph, plan.mesh, faster, memory=plan.options.memory, hints=arguments).fixed(inside)


def _by_hand(plan: Plan, graph: Graph) -> Iterator[_Candidate]:
    """Plans by hand that hold the hints."""
    from autoshard.cost.predict import predict
    from autoshard.planning.rivals import by_hand

    for name, chosen in by_hand(graph, plan.mesh, plan.options.hints):
        yield _Candidate(name, chosen, predict(graph, chosen, plan.mesh), kind="by hand")
