"""The decision on one mesh: from an op graph to the annotations that the solver chose, within a memory limit."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from autoshard.cost.predict import predict
from autoshard.mesh import Mesh, Spec, format_spec

if TYPE_CHECKING:
    from autoshard.cost.predict import Prediction
    from autoshard.graph.annotations import Annotations
    from autoshard.graph.ops import Graph
    from autoshard.planning.meshes import Watch
    from autoshard.solver.problem import Problem, Solution
    from autoshard.strategies.carry import Carried
    from autoshard.strategies.formulate import Formulation

Progress = Callable[[str], None]
MEMORY_TRIES = 5
"""How often a plan is sought whose predicted memory is within the limit."""
WORTH_MORE = 1.02
"""How many times what is predicted the limit must be for the solver to be asked with a higher one."""


def within_limit(
    limit: float | None, decide: Callable[[float | None], tuple[Decision, Annotations, Prediction]]
) -> tuple[Decision, Annotations, Prediction]:
    """A plan whose *predicted* memory keeps the limit.

    The solver counts memory in program order, group by group; the prediction counts it as the target's compiler runs
    the program. Where the second is above the limit, the solver is asked again with a lower one; where the solver
    counts too much for there to be a plan, with higher ones, as long as the prediction keeps the limit.

    Raises:
        NoPlanError: no plan was found that keeps it; says the least predicted.
    """
    from autoshard.plans.value import NoPlanError

    asked, least = limit, math.inf
    refused: NoPlanError | None = None
    first: float | None = None  # the limit that the solver refused
    best: tuple[Decision, Annotations, Prediction] | None = None
    lowest: int | None = None  # predicted of the plan that uses least as the solver counts
    for _ in range(MEMORY_TRIES):
        try:
            found = decide(asked)
        except NoPlanError as error:
            if best is not None:  # time was over
                break
            if refused is not None or not math.isfinite(error.least):
                if least == math.inf:
                    raise
                break
            refused, first, asked = (
                error,
                asked,
                error.least * (1 + 1e-6),
            )  # what uses least memory as the solver counts it
            continue
        predicted = found[2].peak_memory_bytes
        if limit is None or asked is None or (predicted <= limit and refused is None):
            return found
        if best is not None and (predicted > limit or found[2].step_time_s >= best[2].step_time_s):
            break
        if predicted <= limit:
            best = found
            if TIGHTER * limit <= predicted * WORTH_MORE:
                break
            asked *= TIGHTER * limit / predicted
            continue
        least = min(least, predicted)
        if refused is not None:
            lowest = predicted
            break
        # As much less than what the solver counts for this plan as the prediction is above the limit.
        asked = TIGHTER * min(found[0].counted_bytes, asked) * limit / predicted
    if best is not None:
        return best
    assert limit is not None
    if lowest is None and least < math.inf:
        plainest = _lowest(decide)
        if plainest is not None and plainest[2].peak_memory_bytes <= limit:
            return plainest
        lowest = None if plainest is None else plainest[2].peak_memory_bytes
    least = least if lowest is None else lowest  # what is found again when it is asked for
    said = f"; counted op by op, {refused}" if refused is not None and first == limit else ""
    raise NoPlanError(
        f"no plan was found whose predicted memory is within {limit:,.0f} bytes per device: "
        f"the least predicted of those tried is {least:,.0f}{said}",
        least,
    )


def _lowest(
    decide: Callable[[float | None], tuple[Decision, Annotations, Prediction]],
) -> tuple[Decision, Annotations, Prediction] | None:
    """The plan that uses least memory as the solver counts it; None where it finds none in its time."""
    from autoshard.plans.value import NoPlanError

    try:
        return decide(0.0)
    except NoPlanError as error:
        if not math.isfinite(error.least):
            return None
        asked = error.least * (1 + 1e-6)
    try:
        return decide(asked)
    except NoPlanError:
        return None


LEAST_TIME_S = 1.0
"""Seconds that a problem solved again has, whatever time its first solution took."""

TIGHTER = 0.99
"""Part of the proportional limit that the solver is asked for next, so that it comes nearer from above."""


@dataclass(frozen=True)
class Decision:
    """What the solver chose for a graph: the annotations, and how good they are proved to be.

    Attributes:
        solution: of the problem; not called optimal where the annotations had to be changed after it (`guard.py`).
        counted_bytes: the peak per device that the solver counts; infinite where memory was not limited.
        carried: what was chosen, for finer meshes to begin with.
    """

    annotations: Annotations = field(repr=False)
    solution: Solution
    problem: Problem = field(repr=False)
    counted_bytes: float = math.inf
    carried: Carried | None = field(default=None, repr=False)


def plan_graph(
    graph: Graph,
    mesh: Mesh,
    *,
    memory: float | None = None,
    hints: Mapping[str, Spec] | None = None,
    fold: bool = True,
    time_limit: float = 60.0,
    seed: int = 0,
    backend: str = "auto",
    progress: Progress | None = None,
    watch: Watch | None = None,
    others: Sequence[Carried] = (),
) -> Decision:
    """Choose a strategy for every op of a graph.

    Args:
        watch: told what the solver has found after each of its stages.
        others: what was chosen on other meshes, to begin with where this one is a finer one.
    """
    ends = time.perf_counter() + time_limit

    def decided(gathers: bool) -> Decision:
        return decide(
            formulated(graph, mesh, memory, hints or {}, progress or (lambda stage: None), gathers=gathers),
            mesh,
            hints=hints,
            fold=fold,
            time_limit=max(LEAST_TIME_S, ends - time.perf_counter()),
            seed=seed,
            backend=backend,
            progress=progress,
            watch=watch,
            others=others,
        )

    return with_or_without_gathers(graph, mesh, decided)


def with_or_without_gathers(graph: Graph, mesh: Mesh, decided: Callable[[bool], Decision]) -> Decision:
    """What is decided, or what is where nothing may be gathered, if that is faster.

    On a TPU, copies of activations run early beside gathers (`cost/compiler/tpu/strips.py`): all of them, as soon as
    there is one gather, which no price of that gather alone says. The prediction knows these, but not all that comes of
    them, so they count twice: as compiled for v5e, ResNet's plans with gathers took 0.30 and 0.18 ms more against
    prediction than those without (on 4x4 and 2x4), where 0.23 and 0.47 ms of such copies were predicted.
    """
    from autoshard.cost.compiler.tpu.strips import early_seconds
    from autoshard.cost.machine.device import load_device
    from autoshard.plans.value import NoPlanError

    found = decided(True)
    device = load_device(mesh.device)
    if device.target != "tpu" or all(op.kind != "convolution" for op in graph.ops):
        return found
    first = predict(graph, found.annotations, mesh)
    early = early_seconds(first.compiled, device)
    if not early:
        return found
    try:
        other = decided(False)
    except NoPlanError:  # a hint, or the memory limit, wants one
        return found
    second = predict(graph, other.annotations, mesh)
    return found if first.step_time_s + early <= second.step_time_s else other


def formulated(
    graph: Graph,
    mesh: Mesh,
    memory: float | None,
    hints: Mapping[str, Spec],
    progress: Progress,
    *,
    gathers: bool = True,
) -> Formulation:
    """The problem of a graph on `mesh`, in which what is hinted can only be as it is hinted.

    Args:
        gathers: whether anything may be gathered.
    """
    from autoshard.cost.machine.device import load_device
    from autoshard.planning.hints import split
    from autoshard.strategies.formulate import formulate

    arguments, inside = split(graph, hints)
    for value, spec in inside.items():
        mesh.check(spec, graph.type_of(value).shape, "a hint")
    progress("strategies")
    device = load_device(mesh.device)
    return formulate(graph, mesh, device, memory=memory, hints=arguments, gathers=gathers).fixed(inside)


def decide(
    formulation: Formulation,
    mesh: Mesh,
    *,
    hints: Mapping[str, Spec] | None = None,
    fold: bool = True,
    time_limit: float = 60.0,
    seed: int = 0,
    backend: str = "auto",
    progress: Progress | None = None,
    watch: Watch | None = None,
    others: Sequence[Carried] = (),
) -> Decision:
    """Solve the problem of a graph on `mesh`; `hints` are those that it was formulated with, for messages."""
    from autoshard.cost.machine.device import load_device
    from autoshard.plans.value import NoPlanError
    from autoshard.solver.objective import evaluate as evaluate_choice
    from autoshard.solver.problem import Status
    from autoshard.solver.solve import solve
    from autoshard.strategies.carry import carried_from, choices_from
    from autoshard.strategies.guard import guarded
    from autoshard.strategies.shared import solved_together

    (progress or (lambda stage: None))("solve")
    device = load_device(mesh.device)
    ends = time.perf_counter() + time_limit

    def solved(problem: Problem, starts: Sequence[list[int]] = ()) -> Solution:
        left = max(LEAST_TIME_S, ends - time.perf_counter())
        return solve(problem, time_limit=left, seed=seed, backend=backend, fold=fold, progress=watch, starts=starts)

    starts = [choice for other in others for choice in choices_from(other, formulation, mesh)]
    solution = solved(formulation.problem, starts)
    plain = formulation
    if device.target == "tpu" and solution.choice:
        formulation, solution = solved_together(formulation, solution, mesh, device, solved)
    if solution.status in (Status.INFEASIBLE, Status.UNKNOWN):
        shape = "x".join(str(size) for size in mesh.shape)
        least = solution.least_usage
        if (
            solution.status is Status.INFEASIBLE and least is None and hints
        ):  # without hints there is always a plan: everything replicated
            given = "; ".join(f"{name}={format_spec(spec)}" for name, spec in hints.items())
            raise NoPlanError(
                f"no plan exists on mesh {shape}: the hints contradict each other, or what the program allows "
                f"(a state has its parameter's sharding, an updated tensor the one it had): {given}. Marks that "
                "tensors carry, FSDPv2's among them, are hints too; keep='none' leaves them out"
            )
        found = "exists" if solution.status is Status.INFEASIBLE else "was found"
        raise NoPlanError(
            f"no plan {found} on mesh {shape}: {solution.message}", least.reached if least is not None else math.inf
        )
    limited = formulation.problem.limit is not None
    counted = evaluate_choice(formulation.problem, solution.choice).peak if limited else math.inf
    chosen = formulation.annotations(solution.choice)
    written = guarded(formulation.graph, chosen, mesh)
    if written != chosen and solution.status is Status.OPTIMAL:
        solution = replace(solution, status=Status.FEASIBLE)
    return Decision(written, solution, formulation.problem, counted, carried_from(plain, mesh, solution.choice))
