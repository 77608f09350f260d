"""What is recomputed, chosen together with the shardings: `plan(..., remat="auto")`.

Every choice of what blocks keep is a program of its own, captured and solved when it is tried. Where the program that
keeps everything fits, nothing is faster. Else the uniform choices are solved without a memory limit, and of two of them
the mixture that is estimated fastest, with as few recomputed blocks as fit. Uniform choices that could be faster than
what was found are also solved within the limit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

from autoshard.attention.form import FUSED
from autoshard.graph.ops import Graph
from autoshard.mesh import Mesh
from autoshard.planning.candidate import Candidate
from autoshard.planning.one_mesh import candidate_on, problem_on
from autoshard.planning.options import PlanningOptions
from autoshard.plans.remat import ATTENTION, LEVELS, Blocks, Remat, switch_value
from autoshard.plans.value import NoPlanError, RematSearch, RematTried
from autoshard.program import Program
from autoshard.solver.solve import GoalOutOfReachError
from autoshard.stablehlo.reader import build_graph
from autoshard.strategies.carry import Carried

Capture = Callable[[Remat], Program]
TRIES = 3
"""Most mixtures of one pair of levels that are solved."""
_KEPT = ""


@dataclass(frozen=True)
class Mixture:
    """The first `count` blocks of a program on one level, the others on one that keeps more."""

    lighter: str
    heavier: str
    count: int

    def remat(self, blocks: Sequence[str]) -> Remat:
        """What is recomputed of which block."""
        levels = (self.heavier if i < self.count else self.lighter for i in range(len(blocks)))
        return {path: level for path, level in zip(blocks, levels, strict=True) if level}


@dataclass
class Recomputed:
    """A training step of which it is open what is recomputed.

    Attributes:
        classes: of equal blocks, in the order in which they run; those that run first are recomputed first, since what
            they keep is kept longest.
        capture: the program that recomputes so.
        graphs: of programs captured before, by value of the switch.
        free: candidates without a memory limit, by value of the switch and mesh.
    """

    classes: tuple[Blocks, ...]
    capture: Capture
    graphs: dict[str, Graph] = field(default_factory=dict, repr=False)
    free: dict[tuple[str, Mesh], Candidate] = field(default_factory=dict, repr=False)

    @property
    def blocks(self) -> tuple[str, ...]:
        """All blocks."""
        return tuple(path for paths in self.classes for path in paths)

    def graph(self, remat: Remat, options: PlanningOptions) -> Graph:
        """The graph of the program that recomputes so."""
        name = switch_value(remat)
        if name not in self.graphs:
            options.progress("capture")
            program = self.capture(remat)
            options.progress("graph")
            self.graphs[name] = build_graph(program)
        return self.graphs[name]

    def candidate(
        self, mesh: Mesh, options: PlanningOptions, seconds: float, goal: float, others: Sequence[Carried]
    ) -> Candidate:
        """The best candidate on `mesh` within the memory limit, whatever is recomputed; arguments as `candidate_on`.

        Raises:
            NoPlanError: the memory limit or the hints exclude every plan.
            GoalOutOfReachError: the solver's bound proves that none undercuts the goal.
        """
        return _Search(self, mesh, options, seconds, goal, others).best()


@dataclass
class _Search:
    """The search on one mesh.

    Attributes:
        tried: what came of each choice, by value of the switch.
        found: candidates within the memory limit.
    """

    program: Recomputed
    mesh: Mesh
    options: PlanningOptions
    seconds: float
    goal: float
    others: Sequence[Carried]
    tried: dict[str, RematTried] = field(default_factory=dict)
    found: list[Candidate] = field(default_factory=list)

    def best(self) -> Candidate:
        """See `Recomputed.candidate`."""
        kept = self.uniform(_KEPT)  # its bound holds of all others, which compute more
        if kept.fits:
            return self.chosen(kept)
        levels = self.levels(kept)
        ends = {level: kept if level == _KEPT else self.uniform(level) for level in levels}
        for mixture in self.mixtures(ends):
            self.fewest(mixture, ends)
        refused: list[NoPlanError] = []
        for level in sorted(ends, key=lambda level: ends[level].time):
            faster = not self.found or ends[level].time < self.shortest.time
            if not ends[level].fits and faster:
                self.within_limit(level, refused)
        if not self.found:
            raise min(refused, key=lambda error: error.least)
        return self.chosen(kept)

    @staticmethod
    def levels(kept: Candidate) -> list[str]:
        """The levels that differ, from what keeps most to what keeps least."""
        assert kept.graph is not None
        attends = any(op.name == FUSED for op in kept.graph.program.ops)
        return [_KEPT, *(level for level in LEVELS if attends or level != ATTENTION)]

    @property
    def shortest(self) -> Candidate:
        """The best candidate so far."""
        return min(self.found, key=lambda each: each.time)

    def uniform(self, level: str) -> Candidate:
        """The candidate without a memory limit that has every block on one level."""
        return self.solved(Mixture(level, level, 0))

    def mixtures(self, ends: dict[str, Candidate]) -> Iterator[Mixture]:
        """The mixture of two levels that is estimated fastest among those that fit, and that one alone."""
        estimates = []
        for lighter, heavier in combinations(ends, 2):
            light, heavy = ends[lighter], ends[heavier]
            if not light.fits and heavy.fits:
                count = self.needed(0, light, len(self.program.blocks), heavy)
                share = count / len(self.program.blocks)
                time = light.time + share * (heavy.time - light.time)
                estimates.append((time, Mixture(lighter, heavier, count)))
        yield from (mixture for _, mixture in sorted(estimates, key=lambda each: each[0])[:1])

    def needed(self, low: int, light: Candidate, high: int, heavy: Candidate) -> int:
        """The fewest blocks that fit, by interpolation between too few and enough of them."""
        limit = light.memory
        assert limit is not None
        most, least = (each.prediction.peak_memory_bytes for each in (light, heavy))
        return min(high, low + max(1, math.ceil((high - low) * (most - limit) / max(1, most - least))))

    def fewest(self, mixture: Mixture, ends: dict[str, Candidate]) -> None:
        """Solve mixtures of two levels until few enough blocks are on the heavier one."""
        low, high = 0, len(self.program.blocks)
        light, heavy = ends[mixture.lighter], ends[mixture.heavier]
        count = mixture.count
        for _ in range(TRIES):
            if not low < count < high:
                break
            found = self.solved(replace(mixture, count=count))
            if found.fits:
                high, heavy = count, found
            else:
                low, light = count, found
            count = self.needed(low, light, high, heavy)

    def solved(self, mixture: Mixture) -> Candidate:
        """The candidate of a mixture without a memory limit.

        Raises:
            GoalOutOfReachError: as `candidate_on`.
        """
        remat = mixture.remat(self.program.blocks)
        name = switch_value(remat)
        known = self.program.free.get((name, self.mesh))
        if known is None:
            graph = self.program.graph(remat, self.options)
            problem = problem_on(graph, self.mesh, self.options, self.seconds, self.goal, self.others)
            known = self.program.free[name, self.mesh] = problem.candidate(None)
        known = replace(known, memory=self.options.memory_on(self.mesh))
        if known.fits:
            self.found.append(known)
        self.note(name, "planned" if known.fits else "too large", known)
        return known

    def within_limit(self, level: str, refused: list[NoPlanError]) -> None:
        """Solve one level within the memory limit, if it can be the fastest.

        Args:
            refused: gets the reason, where there is no plan.
        """
        remat = Mixture(level, level, 0).remat(self.program.blocks)
        name = switch_value(remat)
        graph, known = self.program.graph(remat, self.options), {self.mesh: self.program.free[name, self.mesh]}
        solver = self.shortest.solver if self.found else None
        goal = math.inf if solver is None else solver.objective
        try:
            found = candidate_on(graph, self.mesh, self.options, self.seconds, goal, self.others, known)
        except GoalOutOfReachError:
            self.note(name, "pruned")
        except NoPlanError as error:
            refused.append(error)
            self.note(name, "no plan")
        else:
            self.found.append(found)
            self.note(name, "planned", found)

    def note(self, name: str, outcome: str, found: Candidate | None = None) -> None:
        """Record what came of a choice."""
        figures = () if found is None else (found.time, found.prediction.peak_memory_bytes)
        self.tried[name] = RematTried(name, outcome, *figures)

    def chosen(self, kept: Candidate) -> Candidate:
        """The best candidate, with the record of the search; `kept` keeps everything and has no memory limit."""
        best = self.shortest
        assert best.graph is not None
        name = next(name for name, graph in self.program.graphs.items() if graph is best.graph)
        bound = None if kept.solver is None else kept.solver.bound
        if bound is not None:  # under the prices of the best one
            bound *= min(ours / theirs for ours, theirs in zip(best.prices, kept.prices, strict=True))
        objective = None if best.solver is None else best.solver.objective
        gap = max(0.0, 1 - bound / objective) if bound is not None and objective else None
        return replace(best, remat=RematSearch(name, tuple(self.tried.values()), bound, gap))
