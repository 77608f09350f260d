"""Candidate plans: annotations on one mesh with their prediction."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from autoshard.cost.machine.collectives import Collective
from autoshard.cost.machine.device import load_device, slop_of, with_slop
from autoshard.cost.predict import Prediction, predict, rescheduled
from autoshard.graph.annotations import Annotations
from autoshard.graph.ops import Graph
from autoshard.lower.least import least
from autoshard.mesh import AxisGroup, Mesh
from autoshard.planning.options import PlanningOptions
from autoshard.plans.value import CollectiveTotal, MeshTried, Refinement, RematSearch, SolverInfo
from autoshard.solver.problem import Problem, Solution
from autoshard.strategies.carry import Carried

OPTIMUM = "optimum"
"""Name of the candidate that the solver chose."""
SLOPS: tuple[int, ...] = (80, 60, 30, 10, 0)
"""Percentages of memory for XLA's latency hiding scheduler that are tried where its default takes too much."""
FAR = 2.0
"""Times the memory limit from which other percentages are tried only where a candidate fits with none.

It saves time alone: candidates for Mixtral 8x7B and Llama 3 70B that fitted with some took up to 1.7 times the limit.
"""


@dataclass(frozen=True)
class Decision:
    """The solver's choice for a graph: its annotations, and the solution with its bound.

    Attributes:
        solution: of the problem; not OPTIMAL where annotations were changed after solving (`guard.py`).
        counted_bytes: peak per device by the solver's count; infinite without a memory limit.
        carried: the choice in a form that warm-starts the solver on finer meshes.
    """

    annotations: Annotations = field(repr=False)
    solution: Solution
    problem: Problem = field(repr=False)
    counted_bytes: float = math.inf
    carried: Carried | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Candidate:
    """Annotations on one mesh that may become the plan, with their prediction.

    Attributes:
        name: `optimum`, the constraint of a runner-up, or the name of a plan by hand.
        kind: of the candidates that are compiled; empty for the optimum.
        memory: limit in bytes per device; None is no limit.
        solver: bound and gap; None where nothing is proved.
        prices: how many times as long as formulated kernels and collectives take in the solver's figures
            (`Formulation.repriced`).
        hidden: share of the collectives of weights that takes no time in these figures.
        decision: the solver's, where it made the annotations.
        graph: of the program, where several programs are planned (`remat.py`).
        remat: what was recomputed to find it, where that was left open.
        slop: percentage of memory for XLA's latency hiding scheduler, where that is less than was asked for.
    """

    mesh: Mesh
    annotations: Annotations = field(repr=False)
    prediction: Prediction = field(repr=False)
    name: str = OPTIMUM
    kind: str = ""
    memory: int | None = None
    solver: SolverInfo | None = None
    prices: tuple[float, float] = (1.0, 1.0)
    hidden: float = 0.0
    decision: Decision | None = field(default=None, repr=False)
    graph: Graph | None = field(default=None, repr=False)
    remat: RematSearch | None = None
    slop: int | None = None

    @property
    def time(self) -> float:
        """Predicted seconds of a step, collectives beside kernels: what candidates are compared by."""
        return self.prediction.overlapped_s

    @property
    def fits(self) -> bool:
        """Whether the predicted peak is within the memory limit."""
        return self.memory is None or self.prediction.peak_memory_bytes <= self.memory

    def rescheduled(self) -> Candidate:
        """The candidate with the most memory for XLA's latency hiding scheduler with which it fits; else with none.

        Less memory for the scheduler is not always a lower peak: within its limit it also orders kernels by the memory
        that they add. A candidate that fits, one for no GPU, and a kind with its percentage in its name stay as they
        are.
        """
        if self.fits or load_device(self.mesh.device).target != "gpu" or slop_of(self.mesh.device) is not None:
            return self
        assert self.memory is not None
        if self.prediction.peak_memory_bytes > FAR * self.memory:
            unhidden = self.with_slop(SLOPS[-1])
            if not unhidden.fits:
                return unhidden
        for percent in SLOPS:
            found = self.with_slop(percent)
            if found.fits:
                break
        return found

    def with_slop(self, percent: int) -> Candidate:
        """The candidate for GPUs with this percentage of memory for XLA's latency hiding scheduler."""
        mesh = with_slop(self.mesh, percent)
        return replace(self, mesh=mesh, prediction=rescheduled(self.prediction, mesh), slop=percent)

    def written(self, graph: Graph, options: PlanningOptions) -> Candidate:
        """The candidate with the annotations to write: all, or the least annotations."""
        if options.annotations == "all":
            return self
        fewer = least(graph, self.annotations, self.mesh)
        return replace(self, annotations=fewer, prediction=predict(graph, fewer, self.mesh))


@dataclass(frozen=True)
class Chosen:
    """The candidate that the road ends at, and how it was found.

    Attributes:
        search: every mesh that was tried, where several were.
        refined: what was compiled to refine the choice, where that was asked for.
    """

    candidate: Candidate
    search: tuple[MeshTried, ...] = ()
    refined: Refinement | None = None

    @property
    def graph(self) -> Graph:
        """Of the program that was chosen."""
        assert self.candidate.graph is not None
        return self.candidate.graph

    @property
    def predicted_bytes(self) -> int:
        """Predicted peak per device."""
        return self.candidate.prediction.peak_memory_bytes


def solver_info(solution: Solution) -> SolverInfo:
    """The record of a solution in a plan."""
    return SolverInfo(solution.status.value, solution.objective, solution.bound, solution.gap, solution.backend)


def collective_totals(collectives: Iterable[Collective]) -> tuple[CollectiveTotal, ...]:
    """Collectives summed per kind and axes."""
    found: dict[tuple[str, AxisGroup], list[int]] = {}
    for one in collectives:
        entry = found.setdefault((one.kind, one.axes), [0, 0])
        entry[0] += one.count
        entry[1] += one.count * one.bytes
    return tuple(CollectiveTotal(*key, *entry) for key, entry in sorted(found.items()))
