"""The solver's choice for a graph on one mesh."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from autoshard.cost.machine.device import load_device
from autoshard.cost.overlap import taken_share
from autoshard.cost.predict import predict
from autoshard.graph.ops import Graph
from autoshard.mesh import Mesh, Spec, format_spec
from autoshard.planning.advice import what_would_fit
from autoshard.planning.candidate import Candidate, Decision, solver_info
from autoshard.planning.hints import kept, split
from autoshard.planning.memory import within_limit
from autoshard.planning.options import DEVICE_MEMORY, PlanningOptions
from autoshard.planning.rivals import that_fits
from autoshard.plans.value import NoPlanError, SolverInfo
from autoshard.solver.objective import evaluate as evaluate_choice
from autoshard.solver.problem import Problem, Solution, Status
from autoshard.solver.settings import Settings
from autoshard.strategies.allowed import MAX_PADDING, fits
from autoshard.strategies.carry import Carried, carried_from, choices_from
from autoshard.strategies.formulate import Formulation, formulate
from autoshard.strategies.guard import guarded
from autoshard.strategies.shared import solved_together

REPRICED = 2
"""Most times that a problem is solved again with prices that agree with the prediction of its last solution."""
LONGER, LEAST = 3.0, 10.0
"""Most times as long, or so many seconds, that such a problem is solved as the first one."""
AGREE = 0.05
"""Fraction of the predicted step by which the objective may differ."""


def candidate_on(
    graph: Graph,
    mesh: Mesh,
    options: PlanningOptions,
    seconds: float,
    goal: float = math.inf,
    others: Sequence[Carried] = (),
    known: dict[Mesh, Candidate] | None = None,
) -> Candidate:
    """The best candidate on `mesh` whose predicted memory is within the limit.

    Where a plan on GPUs does not fit, XLA's latency hiding scheduler may get less memory (`Candidate.rescheduled`).
    Where the solver finds none that fits, plans by hand are looked at.

    Args:
        seconds: time limit of the solver.
        goal: objective, in seconds of a step, that it must undercut.
        others: choices on other meshes; those of coarser meshes warm-start the solver.
        known: candidates without a limit, to which that on `mesh` is added.

    Raises:
        NoPlanError: the memory limit or the hints exclude every plan.
        GoalOutOfReachError: the solver's bound proves that none undercuts the goal.
    """
    problem = problem_on(graph, mesh, options, seconds, goal, others)
    memory, known = problem.memory, {} if known is None else known
    free = known.get(mesh)
    if free is None or (free.solver is not None and free.solver.status == Status.TIME_LIMIT.value):
        free = known[mesh] = problem.candidate(None)
    if memory is None:
        return free
    free = problem.scheduled(replace(free, memory=memory))
    try:
        return within_limit(problem, memory, free)
    except NoPlanError as error:
        refused = error
    if options.rivals and not options.refine:
        options.progress("plans by hand")
        bound = None if free.solver is None else free.solver.bound
        if (found := that_fits(graph, mesh, memory, problem.hints, bound)) is not None:
            return found.written(graph, options)
    raise _explained(refused, graph, mesh, options, memory)


def _explained(error: NoPlanError, graph: Graph, mesh: Mesh, options: PlanningOptions, memory: int) -> NoPlanError:
    """The error with what the limit is, and what would fit."""
    if not math.isfinite(error.least):
        return error
    said = [str(error)]
    if options.memory == DEVICE_MEMORY:
        said.append(
            f"{memory:,} bytes is what runtimes leave of the device kind's memory; memory= (--memory) is another limit"
        )
    said.append(what_would_fit(graph, mesh, memory, error.least))
    return NoPlanError(". ".join(said), error.least)


def problem_on(
    graph: Graph, mesh: Mesh, options: PlanningOptions, seconds: float, goal: float, others: Sequence[Carried]
) -> OneMesh:
    """What `candidate_on` solves under one memory limit or another."""
    hints = kept(graph.program, mesh, options.hints, options.keep)
    return OneMesh(graph, mesh, options, hints, options.memory_on(mesh), seconds, goal, tuple(others))


HIDDEN = 0.9
"""The share of each collective of weights that runs beside kernels in the problem where they do."""
FEW = 0.01
"""Fraction of a step below which the two problems are one."""


@dataclass(frozen=True)
class OneMesh:
    """A graph on one mesh, to be solved under one memory limit or another.

    Attributes:
        hints: those that constrain the plan (`hints.kept`).
        memory: limit in bytes per device; None is no limit.
        seconds, goal, others: see `candidate_on`.
    """

    graph: Graph = field(repr=False)
    mesh: Mesh
    options: PlanningOptions = field(default_factory=PlanningOptions)
    hints: Mapping[str, Spec] = field(default_factory=dict)
    memory: int | None = None
    seconds: float = 60.0
    goal: float = math.inf
    others: tuple[Carried, ...] = ()

    @cached_property
    def formulation(self) -> Formulation:
        """The problem without a limit."""
        return formulated(self.graph, self.mesh, None, self.hints)

    def candidate(self, limit: float | None, before: Candidate | None = None) -> Candidate:
        """The solver's choice under a limit of `limit` bytes per device, the better of two by its prediction.

        One problem has all collectives in sequence with kernels, the other most of each gather of a weight and of each
        sum of gradients beside them. Nothing is solved twice where the choice without a limit is too large.

        Args:
            before: under another limit; its prices are a start.
        """
        settings = self.settings(limit)
        self.options.progress("strategies")
        formulation = self.formulation.limited(limit)
        return self.scheduled(self.better(formulation, settings, before).written(self.graph, self.options))

    def scheduled(self, found: Candidate) -> Candidate:
        """The candidate as it is compiled; what is to be refined is compiled for the target that was asked for."""
        return found if self.options.refine else found.rescheduled()

    def settings(self, limit: float | None) -> Settings:
        """Solver settings; the bound under a tightened limit is not one of the plan asked for."""
        options, deadline = self.options, time.process_time() + self.seconds
        goal = self.goal if limit is None or limit == self.memory else math.inf
        return Settings(deadline, options.seed, options.backend, goal)

    def better(self, formulation: Formulation, settings: Settings, before: Candidate | None = None) -> Candidate:
        """The choice with collectives of weights beside kernels, or that in sequence if it is predicted faster.

        The latter is looked for only where collectives of weights are a part of the step, and the solver proved the
        first to be an optimum. It starts from prices that no prediction has corrected: they find other choices.
        """
        device = load_device(self.mesh.device)
        if before is not None or self.others:
            formulation = formulation.at_prices(before.prices if before is not None else self.others[-1].prices)
        share = HIDDEN * (1 - taken_share(device)) if device.overlaps and not _unhidden(before) else 0.0
        found = self._repriced(formulation, settings, share)
        assert found.decision is not None
        if not share or found.decision.solution.status is not Status.OPTIMAL:
            return found
        if formulation.problem.limit is None and not (compiled := self.scheduled(found)).fits:
            return compiled  # not the plan
        if _hideable(formulation, found) <= FEW * found.time:
            return found
        try:
            serial = self._repriced(formulation, replace(settings, goal=math.inf), 0.0, found)
        except NoPlanError:  # out of time
            return found
        return serial if serial.time < found.time else found

    def _repriced(
        self, formulation: Formulation, settings: Settings, share: float, start: Candidate | None = None
    ) -> Candidate:
        """The choice under prices that agree with its prediction, or one under prices before that is predicted faster.

        The solver prices groups one by one, the prediction follows the whole program. Where the objective differs, the
        problem is solved again with kernels and collectives each as much dearer as is predicted of its solution, if
        that can take as long as the first time.

        Args:
            share: of collectives of weights that takes no time.
        """
        began = time.process_time()
        found = self._chosen(formulation, settings, share, start)
        took = time.process_time() - began
        latest = settings.deadline - took
        for _ in range(REPRICED):
            assert found.solver is not None
            assert found.decision is not None
            objective, prediction = found.solver.objective, found.prediction
            serial = objective + share * _hideable(formulation, found)
            step = prediction.step_time_s
            late = time.process_time() > latest or found.decision.solution.status is Status.TIME_LIMIT
            if abs(step - serial) <= AGREE * step or late:
                break
            kernels = formulation.kernel_seconds(found.decision.solution.choice)
            rates = _rate(prediction.compute_s, kernels), _rate(prediction.communication_s, serial - kernels)
            formulation = formulation.repriced(*rates)
            deadline = min(settings.deadline, time.process_time() + max(LEAST, LONGER * took))
            again = self._chosen(formulation, replace(settings, deadline=deadline), share, found)
            if again.time > found.time:
                objective = rates[0] * kernels + rates[1] * (objective - kernels)
                return replace(found, solver=_as_priced(again.solver, objective), prices=again.prices)
            found = again
        return found

    def _chosen(
        self, formulation: Formulation, settings: Settings, share: float, before: Candidate | None = None
    ) -> Candidate:
        """The solver's choice; `before`: of the same problem with other costs, to start from."""
        say = self.options.progress
        say("solve")
        start = None if before is None or before.decision is None else before.decision.solution.choice
        problem = formulation.overlapping(share)
        decision = decide(problem, self.mesh, settings, self.hints, self.others, start)
        say("predict")
        same = before is not None and before.annotations == decision.annotations
        return Candidate(
            self.mesh,
            decision.annotations,
            before.prediction if before is not None and same else predict(self.graph, decision.annotations, self.mesh),
            memory=self.memory,
            solver=solver_info(decision.solution),
            decision=decision,
            prices=formulation.prices,
            hidden=share,
            graph=self.graph,
        )


def _unhidden(before: Candidate | None) -> bool:
    """Whether a candidate under a limit did not fit even with nothing hidden, as its successor will be compiled."""
    return before is not None and before.slop == 0 and not before.fits and math.isfinite(_counted(before))


def _counted(found: Candidate) -> float:
    """Its peak per device by the solver's count; infinite where that had no limit."""
    return math.inf if found.decision is None else found.decision.counted_bytes


def _hideable(formulation: Formulation, found: Candidate) -> float:
    """Seconds of collectives of weights, as priced, of a choice; its own prices may be others."""
    assert found.decision is not None
    rate = found.prices[1] / formulation.prices[1]
    return rate * formulation.hideable(found.decision.solution.choice)


def _as_priced(optimum: SolverInfo | None, objective: float) -> SolverInfo:
    """The record of a choice of `objective` under the prices of this optimum."""
    assert optimum is not None
    gap = None if optimum.bound is None else max(0.0, objective - optimum.bound) / objective
    return replace(optimum, status="feasible", objective=objective, gap=gap)


def _rate(predicted: float, priced: float) -> float:
    """How many times as long as priced, between half and four times: what is little of a step says little of others."""
    return min(4.0, max(0.5, predicted / priced)) if predicted > 0.0 and priced > 0.0 else 1.0


def formulated(graph: Graph, mesh: Mesh, memory: float | None, hints: Mapping[str, Spec]) -> Formulation:
    """The problem of a graph on `mesh`; hints are hard constraints."""
    arguments, inside = split(graph, hints)
    for value, spec in inside.items():
        mesh.check(spec, graph.type_of(value).shape, "a hint")
    device = load_device(mesh.device)
    return formulate(graph, mesh, device, memory=memory, hints=arguments, inside=inside)


def decide(
    formulation: Formulation,
    mesh: Mesh,
    settings: Settings,
    hints: Mapping[str, Spec] | None = None,
    others: Sequence[Carried] = (),
    start: Sequence[int] | None = None,
) -> Decision:
    """Solve a formulated problem.

    Args:
        hints: those that it was formulated with, for messages.
        others: choices on other meshes, which may warm-start the solver.
        start: a choice on this one.

    Raises:
        NoPlanError: hints and memory limit are infeasible, or nothing was found in time.
    """
    starts = [choice for other in others for choice in choices_from(other, formulation, mesh)]
    if start is not None:
        starts.append(list(start[: len(formulation.problem.node_costs)]))
    solution = settings.solve(formulation.problem, starts)
    plain, device = formulation, load_device(mesh.device)
    if device.compiler.merges_equal_ops and solution.choice:
        formulation, solution = solved_together(formulation, solution, mesh, device, settings)
    if solution.status in (Status.INFEASIBLE, Status.UNKNOWN):
        raise _no_plan(solution, mesh, hints, _padded(formulation.graph, mesh, hints or {}))
    chosen = formulation.annotations(solution.choice)
    written = guarded(formulation.graph, chosen, mesh)
    if written != chosen and solution.status is Status.OPTIMAL:
        solution = replace(solution, status=Status.FEASIBLE)
    counted = _counted_bytes(formulation.problem, solution.choice)
    return Decision(written, solution, formulation.problem, counted, carried_from(plain, mesh, solution.choice))


def _counted_bytes(problem: Problem, choice: Sequence[int]) -> float:
    """Peak per device by the solver's count; infinite without a memory limit."""
    return math.inf if problem.limit is None else evaluate_choice(problem, choice).peak


def _padded(graph: Graph, mesh: Mesh, hints: Mapping[str, Spec]) -> str:
    """Which hints pad a dim of an argument by more than plans do."""
    found = [
        f"{argument.name}={format_spec(hints[argument.name])} pads a dim of {size} to {-(-size // ways) * ways}"
        for argument in graph.program.arguments
        if argument.name in hints
        for size, split in zip(argument.type.shape, hints[argument.name], strict=False)
        if not fits(size, ways := mesh.ways(split))
    ]
    most = f"what is computed of them may be padded by at most {MAX_PADDING - 1:.0%}"
    return f"{'; '.join(found)}: {most}" if found else ""


def _no_plan(solution: Solution, mesh: Mesh, hints: Mapping[str, Spec] | None, padded: str = "") -> NoPlanError:
    """The message: why there is no plan; `padded` as from `_padded`."""
    shape = "x".join(str(size) for size in mesh.shape)
    least = solution.least_usage
    if solution.status is Status.INFEASIBLE and least is None and hints:
        # Without hints some plan always exists: everything replicated.
        if padded:
            return NoPlanError(f"no plan exists on mesh {shape}: {padded}")
        given = "; ".join(f"{name}={format_spec(spec)}" for name, spec in hints.items())
        return NoPlanError(
            f"no plan exists on mesh {shape}: the hints contradict each other, or what the program allows "
            f"(a state has its parameter's sharding, an updated tensor the one it had): {given}. Marks that "
            "tensors carry, FSDPv2's among them, are hints too; keep='none' leaves them out"
        )
    found = "exists" if solution.status is Status.INFEASIBLE else "was found"
    return NoPlanError(
        f"no plan {found} on mesh {shape}: {solution.message}", least.reached if least is not None else math.inf
    )
