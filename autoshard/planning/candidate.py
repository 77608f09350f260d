"""What travels along the road until a plan is made of it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from autoshard.cost.machine.collectives import Collective
from autoshard.cost.predict import Prediction, predict
from autoshard.graph.annotations import Annotations
from autoshard.graph.ops import Graph
from autoshard.lower.least import least
from autoshard.mesh import Mesh
from autoshard.planning.options import PlanningOptions
from autoshard.plans.value import CollectiveTotal, SolverInfo
from autoshard.solver.problem import Problem, Solution
from autoshard.strategies.carry import Carried

OPTIMUM = "optimum"
"""What the solver's choice is called among other candidates."""


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


@dataclass(frozen=True)
class Candidate:
    """Annotations on one mesh that a plan may be made of, with what is predicted of them.

    Attributes:
        name: `optimum`, what a runner-up may not do, or a plan by hand.
        kind: of the candidates that are compiled; empty for the optimum.
        memory: bytes per device that it is to keep; None is no limit.
        solver: how far the solver got; None where it proved nothing.
        decision: the solver's, where it made the annotations.
    """

    mesh: Mesh
    annotations: Annotations = field(repr=False)
    prediction: Prediction = field(repr=False)
    name: str = OPTIMUM
    kind: str = ""
    memory: int | None = None
    solver: SolverInfo | None = None
    decision: Decision | None = field(default=None, repr=False)

    @property
    def time(self) -> float:
        """Seconds of the predicted step."""
        return self.prediction.step_time_s

    @property
    def fits(self) -> bool:
        """Whether the predicted peak keeps the memory limit."""
        return self.memory is None or self.prediction.peak_memory_bytes <= self.memory

    def written(self, graph: Graph, options: PlanningOptions) -> Candidate:
        """The candidate with the annotations that are written: all, or the least that are needed."""
        if options.annotations == "all":
            return self
        fewer = least(graph, self.annotations, self.mesh)
        return replace(self, annotations=fewer, prediction=predict(graph, fewer, self.mesh))


def solver_info(solution: Solution) -> SolverInfo:
    """What a plan records of a solution."""
    return SolverInfo(solution.status.value, solution.objective, solution.bound, solution.gap, solution.backend)


def collective_totals(collectives: Iterable[Collective]) -> tuple[CollectiveTotal, ...]:
    """Collectives summed per kind and axes."""
    found: dict[tuple[str, tuple[str, ...]], list[int]] = {}
    for one in collectives:
        entry = found.setdefault((one.kind, one.axes), [0, 0])
        entry[0] += one.count
        entry[1] += one.count * one.bytes
    return tuple(CollectiveTotal(*key, *entry) for key, entry in sorted(found.items()))
