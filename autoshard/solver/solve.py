"""Solves a strategy-selection problem: to proven optimality where it can, else with a bound and a gap.

1. Presolve (`reduce.py`).
2. Drop the memory rows and minimise by dynamic programming (`eliminate.py`), where the tree width allows: a choice
   that happens to be feasible is optimal.
3. Otherwise bound by dual ascent (`dual.py`), find incumbents by rounding, local search and tree moves (`search.py`),
   fix by reduced costs, presolve again, and give the rest to the integer program (`ilp.py`).
4. Where that is too large, dual ascent and strategic oscillation (`oscillate.py`) run in two threads until what lies
   near the bound is solved exactly, or neither gains.

Whatever takes long watches the deadline, on the clock of `time.process_time`. A KeyboardInterrupt ends the solve with
the incumbent. `objective.py`, which shares no code with the search, re-evaluates every choice returned.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from autoshard.solver import ilp
from autoshard.solver.crossing import Crossing
from autoshard.solver.dual import Dual
from autoshard.solver.eliminate import exact_minimum
from autoshard.solver.network import ImpossibleError, Network
from autoshard.solver.objective import evaluate
from autoshard.solver.oscillate import Oscillation
from autoshard.solver.peak import explain, least_peak
from autoshard.solver.problem import Problem, Solution, Status
from autoshard.solver.reduce import reduce
from autoshard.solver.search import TreeSearch
from autoshard.solver.start import first_choices, least_sum

GAP_TOLERANCE = 1e-9
"""OPTIMAL means objective - bound <= this fraction of the objective: the rounding of float64 sums over thousands of
terms, and of costs scaled to integers for the integer program."""

SolverProgress = Callable[[str, float, float], None]
"""Called with (stage, best objective so far, bound so far)."""


BOUND_ROUNDS = 6
"""Times that the problem is bounded, fixed and reduced again before the integer program."""
FIXED_SHARE = 0.5
"""A round ends when no more than this share of the strategies can be in a better choice: the rest is bounded anew."""
UNFIXED_SHARE = 0.99
"""When more can, and no integer program fits, the same dual goes on: fixing little is not worth its messages."""
DUAL_SWEEPS = (20, 50, 100, 200, 300, 300, 400)
"""Sweeps of the dual in each part of a round; after each part a choice is rounded and improved."""

NEAR_WIDTH, NEAR_STEP, NEAR_TRIES = 1e-5, 10.0, 4
"""What costs at most this fraction more than the bound is solved exactly first; then this factor more; so often."""
NEAR_LEAST, NEAR_MOST, NEAR_SHARE = 1e-9, 0.05, 0.6
"""The narrowest and the widest subproblem that is tried, as fractions of the bound, and the largest share of all
strategies that it may have."""
NEAR_PROGRAM, NEAR_TIME = 60_000, 3.0
"""Entries of the integer program's matrix, and seconds, of such a piece under memory rows."""

LARGEST_PROGRAM, LARGEST_UNKNOWN = 1_000_000, 4_000_000
"""Nonzeros of the integer program up to which it is tried with an incumbent, and without: presolve ignores limits."""
ALTERNATING, SEARCHED, LEAST_GAIN, STALLED = 1000, 50, 1e-2, 6
"""Beyond the integer program: sweeps of the dual, and rounds of the search beside them, between two exchanges; that
many exchanges in a row that close less than this share of the gap end the solve."""
RELAXED_PARTS = 2, 5
"""Parts of a round that a relaxation at one price of memory takes, at first and at the best prices."""
CROSSING, CLOSE, ENOUGH = 0.5, 1e-3, 5e-3
"""Share of the time left for prices of memory; gap at which that search ends; gap at which, after it, a problem with
memory rows ends that is beyond the integer program."""
REDUCING = 0.5
"""Share of the time left that reductions may take; a solve with little time goes on with what is reduced by then."""
PEAK_TIME, UNKNOWN_TIME = 8.0, 0.5
"""Most seconds for minimising the peak, which goes into the message when no choice is feasible; least for it."""


class GoalOutOfReachError(Exception):
    """The bound proves that no choice undercuts the goal.

    Attributes:
        bound: that proves it.
    """

    def __init__(self, bound: float) -> None:
        """Keep the bound."""
        super().__init__(f"no choice is better than {bound}")
        self.bound = bound


class SolverError(AssertionError):
    """The search contradicts the evaluator or its own bound: a bug in the solver, please report it."""


def solve(
    problem: Problem,
    *,
    time_limit: float = 60.0,
    seed: int = 0,
    backend: str = "auto",
    progress: SolverProgress | None = None,
    goal: float = math.inf,
    starts: Iterable[list[int]] = (),
) -> Solution:
    """The cheapest choice of one strategy per node within the memory limit, and a proven lower bound.

    The same problem and seed give the same choice whenever the solve ends before the time limit.

    Args:
        problem: see `Problem`; infinite costs are forbidden, usages may not be negative.
        time_limit: CPU seconds of one thread, so that a busy machine finds the same choice; then `solve` returns the
            incumbent with its bound. An interrupt ends the solve in the same way; without an incumbent it stays a
            KeyboardInterrupt.
        seed: of the random choices.
        backend: "auto", "highs", "scip", "cp-sat" or "cbc", for the parts left to an integer program.
        progress: called after every stage with (stage, objective, bound).
        goal: objective that a choice must undercut.
        starts: choices to start from; infeasible ones are ignored.

    Raises:
        ValueError: the problem is malformed, or no such backend.
        BackendMissingError: an integer program is needed and its solver is not installed.
        GoalOutOfReachError: the bound after some stage has reached the goal.
    """
    check(problem)
    if backend != "auto":
        ilp.require(backend)
    run = _Run(problem, time.process_time() + time_limit, seed, backend, progress, goal)
    for choice in starts:
        run.offer(choice, "warm start")
    return run.solution()


def check(problem: Problem) -> None:
    """Raise ValueError, naming the place, unless the arrays of `problem` fit together."""
    sizes = [np.shape(c) for c in problem.node_costs]
    for i, (shape, cost) in enumerate(zip(sizes, problem.node_costs, strict=True)):
        if len(shape) != 1 or shape[0] == 0:
            raise ValueError(f"node {i}: costs have shape {shape}, expected (strategies,) with at least one strategy")
        if np.isnan(cost).any() or np.isneginf(cost).any():
            raise ValueError(f"node {i}: a cost is NaN or minus infinity")
    if len(problem.edges) != len(problem.edge_costs):
        raise ValueError(f"{len(problem.edges)} edges but {len(problem.edge_costs)} edge cost matrices")
    if problem.names and len(problem.names) != len(sizes):
        raise ValueError(f"{len(problem.names)} names for {len(sizes)} nodes")
    checked: set[int] = set()
    for e, ((u, v), matrix) in enumerate(zip(problem.edges, problem.edge_costs, strict=True)):
        if not (0 <= u < len(sizes) and 0 <= v < len(sizes)) or u == v:
            raise ValueError(f"edge {e}: ({u}, {v}) does not join two different nodes out of {len(sizes)}")
        if np.shape(matrix) != (*sizes[u], *sizes[v]):
            raise ValueError(f"edge {e}: costs have shape {np.shape(matrix)}, expected {(*sizes[u], *sizes[v])}")
        if id(matrix) not in checked:
            checked.add(id(matrix))
            if np.isnan(matrix).any() or np.isneginf(matrix).any():
                raise ValueError(f"edge {e}: a cost is NaN or minus infinity")
    for what, usages in (("node", problem.node_usages), ("edge", problem.edge_usages)):
        for usage in usages:
            if not 0 <= usage.index < (len(sizes) if what == "node" else len(problem.edges)):
                raise ValueError(f"{what} usage: there is no {what} {usage.index}")
            ends = (usage.index,) if what == "node" else problem.edges[usage.index]
            expected = tuple(sizes[i][0] for i in ends)
            if np.shape(usage.amount) != expected:
                raise ValueError(f"{what} usage of {usage.index}: shape {np.shape(usage.amount)}, expected {expected}")
            if not (np.isfinite(usage.amount).all() and (np.asarray(usage.amount) >= 0).all()):
                raise ValueError(f"{what} usage of {usage.index}: amounts must be finite and not negative")


def cheaper(net: Network, one: list[int] | None, two: list[int]) -> list[int]:
    """The cheaper of two choices of a network, the first of equals."""
    return two if one is None or net.value(two) < net.value(one) else one


class _Run:
    """One solve: its incumbent and its bound."""

    def __init__(
        self,
        problem: Problem,
        deadline: float,
        seed: int,
        backend: str,
        progress: SolverProgress | None,
        goal: float,
    ) -> None:
        self.problem, self.deadline, self.seed = problem, deadline, seed
        self.asked_backend, self._progress, self._goal = backend, progress, goal
        self._best: tuple[tuple[int, ...] | None, float, str] = None, math.inf, "none"
        self.bound = -math.inf
        self._width = NEAR_WIDTH
        self._searches = 0
        self._interrupted = False

    def offer(self, choice: list[int], backend: str) -> bool:
        """Make a feasible choice the incumbent if it is cheaper; return whether it is feasible."""
        result = evaluate(self.problem, choice)
        if not result.feasible:
            return False
        if result.objective < self.objective:
            self._best = tuple(choice), result.objective, backend  # at once: an interrupt may come at any time
        return True

    @property
    def choice(self) -> tuple[int, ...] | None:
        """The incumbent."""
        return self._best[0]

    @property
    def backend(self) -> str:
        """What found the incumbent."""
        return self._best[2]

    @property
    def objective(self) -> float:
        """Of the incumbent, infinite without one."""
        return self._best[1]

    def raise_bound(self, bound: float) -> None:
        """Take over a proven bound."""
        self.bound = max(self.bound, bound)

    def _learn(self, dual: Dual) -> None:
        """Take over the bound that the dual has proved."""
        if self.choice is None and dual.impossible:
            raise ImpossibleError()
        self.raise_bound(min(dual.bound, self.objective))

    def report(self, stage: str) -> None:
        """Report progress; stop where the bound has reached the goal."""
        if self._progress is not None:
            self._progress(stage, self.objective, self.bound)
        if math.isfinite(self._goal) and self.bound >= self._goal:
            raise GoalOutOfReachError(self.bound)

    @property
    def optimal(self) -> bool:
        """Whether the bound meets the objective."""
        return self.choice is not None and self.objective - self.bound <= GAP_TOLERANCE * abs(self.objective)

    def solution(self) -> Solution:
        """Search, and return the outcome."""
        try:
            self.search()
        except ImpossibleError as error:
            if self.choice is not None:
                raise SolverError(f"a choice exists, but the search proved there is none: {error}") from error
            return self._infeasible(error)
        except KeyboardInterrupt:
            if self.choice is None:
                raise
            self._interrupted = True
        return self._unknown() if self.choice is None else self._found()

    def _found(self) -> Solution:
        assert self.choice is not None
        if self.bound - self.objective > 1e-6 * abs(self.objective):
            raise SolverError(f"the bound {self.bound} is above the objective {self.objective}")
        self.bound = min(self.bound, self.objective)
        ended = Status.TIME_LIMIT if self.late else Status.FEASIBLE
        status = Status.OPTIMAL if self.optimal else Status.INTERRUPTED if self._interrupted else ended
        if status is Status.OPTIMAL:
            self.bound = self.objective
        return Solution(self.choice, status, self.objective, self.bound, self.backend)

    def search(self) -> None:
        """Improve incumbent and bound until they meet or time is over."""
        self.raise_bound(least_sum(self.problem))
        for choice in first_choices(self.problem):
            self.offer(choice, "greedy")
        if self.over:
            return
        net = Network.of(self.problem)
        cut = self._share(REDUCING)
        reduce(net, deadline=cut)
        if math.isinf(net.offset):
            raise ImpossibleError()
        self.report("reduced")
        if time.process_time() < cut and self._without_limit(net):
            return
        self._core(net)

    def _without_limit(self, net: Network) -> bool:
        """Bound, and perhaps optimum, by dynamic programming without memory rows; whether that settles the problem."""
        relaxed = net.copy(memory=False)
        if len(net.room):
            reduce(relaxed, deadline=self._share(REDUCING))
        exact = exact_minimum(relaxed, deadline=self._share(REDUCING))
        if exact is None:
            return False
        choice, bound = exact
        if math.isinf(bound):
            raise ImpossibleError()
        self.raise_bound(bound)
        fits = self.offer(net.expand(relaxed.expand(choice)), "dynamic programming")
        if not fits and not len(net.room):
            raise SolverError("dynamic programming found a choice that the evaluator rejects")
        self.report("dynamic programming")
        return self.optimal

    def _core(self, net: Network) -> None:
        """Dual ascent, incumbents and reduced-cost fixing, then the integer program of what is left."""
        from autoshard.solver.lifted import warm_start

        multipliers = self._crossed(net)  # by the point of time of a memory row
        if self._close(net):
            return None
        for number in range(BOUND_ROUNDS):
            if not net.alive:
                break
            dual = Dual(net)
            if number == 0 and not len(net.room):
                warm_start(dual)
            dual.multipliers[:] = [multipliers.get(int(t), 0.0) * dual.unit for t in net.times]
            held: list[int] | None = None
            for sweeps in DUAL_SWEEPS:
                dual.ascend(sweeps, self.objective, deadline=self.deadline)
                self._learn(dual)
                choice = dual.rounded(deadline=self.deadline)
                if choice is not None:
                    held = cheaper(net, held, choice)
                    self.offer(net.expand(choice), "dual")
                if self.optimal or self.late or self._near(net, dual) or self.optimal:
                    break
                if dual.share(self.objective) < FIXED_SHARE:
                    break
            self.report("dual")
            if self.optimal or self.late:
                return
            large = ilp.nonzeros(net) > LARGEST_PROGRAM
            if held is not None:
                held = self._searched(net, dual, held, patience=1)
            if large and dual.share(self.objective) > UNFIXED_SHARE:
                return self._alternate(net, dual, held)
            multipliers = {int(t): m / dual.unit for t, m in zip(net.times, dual.multipliers, strict=True)}
            if math.isinf(self.objective):
                break
            before = sum(net.size(i) for i in net.alive)
            try:
                dual.fix(net, self.objective)
                reduce(net, deadline=self.deadline)
            except ImpossibleError:
                return self._proven()
            if not len(net.room):
                exact = exact_minimum(net, deadline=self.deadline)
                if exact is not None:
                    self.raise_bound(min(exact[1], self.objective))
                    if math.isfinite(exact[1]):
                        self.offer(net.expand(exact[0]), "dynamic programming")
                    return None
            if sum(net.size(i) for i in net.alive) > 0.8 * before:
                break
        self._integer(net)
        if not self.optimal and not self.late and net.alive:
            dual = Dual(net)
            dual.multipliers[:] = [multipliers.get(int(t), 0.0) * dual.unit for t in net.times]
            self._alternate(net, dual)
        return None

    def _crossed(self, net: Network) -> dict[int, float]:
        """Bound and choices from prices of memory; the best prices, in cost per byte, by point of time."""
        if not len(net.room) or ilp.nonzeros(net) <= LARGEST_PROGRAM:
            return {}
        crossing = Crossing(net, lambda priced, longer: _relaxed(priced, longer, self.deadline, self.seed))
        try:
            crossing.run(self._share(CROSSING), CLOSE)
        finally:  # also when interrupted
            self.raise_bound(min(crossing.bound, self.objective))
            if crossing.best is not None:
                self.offer(net.expand(crossing.best.choice), "prices")
        self.report("prices")
        return {int(t): price for t, price in zip(net.times, crossing.prices, strict=True) if price > 0.0}

    def _close(self, net: Network) -> bool:
        """Whether a large problem with memory rows, whose count is an estimate, is solved closely enough."""
        large = len(net.room) > 0 and ilp.nonzeros(net) > LARGEST_PROGRAM
        return large and self.objective - self.bound <= ENOUGH * abs(self.objective)

    def _searched(self, net: Network, dual: Dual, choice: list[int], *, patience: int) -> list[int]:
        """Tree search from a feasible choice; its outcome becomes the incumbent where cheaper."""

        self._searches += 1
        search = TreeSearch(dual, self.seed + self._searches)
        try:
            found = search.improve(choice, deadline=self.deadline, patience=patience)
        finally:  # also when interrupted
            if search.best is not None:
                self.offer(net.expand(search.best), "search")
        self.report("search")
        return found

    def _alternate(self, net: Network, dual: Dual, held: list[int] | None = None) -> None:
        """Dual ascent and oscillation in two threads, until `_near` proves an optimum, neither gains or time is over.

        They exchange multipliers and costs after fixed numbers of sweeps and rounds, not of seconds, so that the result
        does not depend on which of them is faster.
        """

        search = Oscillation(dual, self.seed)
        if held is not None:
            search.learn(held)
        stalled = 0
        with ThreadPoolExecutor(1) as other:
            while stalled < STALLED and not self.optimal and not self.late and not self._close(net):
                objective, bound = self.objective, self.bound
                search.exchange()
                ascent = other.submit(_ascend, dual, objective, self.deadline)
                try:
                    search.run(SEARCHED, self.deadline)
                    self.deadline += ascent.result()  # the process's clock counts both threads
                finally:  # also when interrupted
                    dual.halt()
                    if search.best is not None:
                        self.offer(net.expand(search.best), "search")
                self._learn(dual)
                if not self.optimal and self._near(net, dual):
                    return
                self.report("search")
                gained = (objective - self.objective) + (self.bound - bound)
                stalled = 0 if gained > LEAST_GAIN * (objective - bound) else stalled + 1

    def _near(self, net: Network, dual: Dual) -> bool:
        """Solve exactly what reduced costs leave a little above the dual bound; whether the optimum is proved.

        What costs more than bound + width is forbidden. A choice left that costs no more than that is optimal; with
        none left, bound + width is a bound; a width that leaves too much shrinks. A tight dual leaves so little that
        dynamic programming (or a small integer program, under memory rows) ends at once, where rounding fails.
        """
        scale = abs(dual.bound) or 1e-9 * dual.forbidden
        labels = sum(net.size(i) for i in net.alive)
        most = math.inf  # a width that leaves too much
        for _ in range(NEAR_TRIES):
            span = self.objective - dual.bound
            width = min(self._width * scale, span)
            if self.late or width > NEAR_MOST * scale:
                break
            upper = dual.bound + width
            narrower = max(width / scale / NEAR_STEP, NEAR_LEAST)
            part = net.copy(passing=True)
            try:
                dual.fix(part, upper)
                if sum(part.size(i) for i in part.alive) > NEAR_SHARE * labels:
                    most, self._width = width / scale, narrower
                    continue
                reduce(part, dominance=False, deadline=self.deadline)
                cost = self._exactly(net, part, dual, upper)
            except ImpossibleError:
                cost = math.inf
            if cost is None:  # too large
                self._width = narrower
                break
            self.raise_bound(min(cost, upper * (1.0 - math.copysign(1e-12, upper)), self.objective))
            if cost <= upper or width >= span:
                return True
            span = (self.objective - dual.bound) / scale
            wider = width / scale * NEAR_STEP
            wider = span if span <= NEAR_STEP * wider else wider
            if wider >= most:
                break
            self._width = wider
        return False

    def _exactly(self, net: Network, part: Network, dual: Dual, upper: float) -> float | None:
        """The least cost of `part` (a subproblem of `net`), whose choice is offered; None when that takes too long."""
        relaxed = part.priced(dual.prices(part.times)) if len(part.room) else part
        if len(part.room):
            reduce(relaxed, deadline=self.deadline)
        exact = exact_minimum(relaxed, deadline=self.deadline)
        if exact is None and not len(part.room):
            return None
        if exact is not None:
            choice, cost = exact
            if math.isinf(cost):
                return math.inf
            if not len(part.room):
                self.offer(net.expand(part.expand(choice)), "dynamic programming")
                return cost
            whole = part.expand(relaxed.expand(choice))
            self.raise_bound(min(cost, upper, self.objective))
            better = dual.improved(whole, deadline=self.deadline)
            if better is not None:
                self.offer(net.expand(better), "dynamic programming")
            if cost > upper:
                return math.inf
        if ilp.nonzeros(part) > NEAR_PROGRAM:
            return None
        left = min(NEAR_TIME, self.deadline - time.process_time())
        backend = ilp.require(self.asked_backend)
        result = ilp.solve_ilp(part, backend=backend, time_limit=left, seed=self.seed, largest=upper - dual.bound)
        if result.choice is not None:
            self.offer(net.expand(part.expand(result.choice)), backend)
        if not result.finished:
            return None
        return math.inf if result.infeasible else result.bound

    def _integer(self, net: Network) -> None:
        left = self.deadline - time.process_time()
        if left <= 0.0 or ilp.nonzeros(net) > (LARGEST_UNKNOWN if self.choice is None else LARGEST_PROGRAM):
            return None
        backend = ilp.require(self.asked_backend)
        span = self.objective - self.bound
        result = ilp.solve_ilp(net, backend=backend, time_limit=left, seed=self.seed, largest=span)
        if result.infeasible:
            if self.choice is None:
                raise ImpossibleError()
            return self._proven()
        self.raise_bound(min(result.bound, self.objective))
        if result.choice is not None:
            self.offer(net.expand(result.choice), backend)
            self.raise_bound(min(result.bound, self.objective))
        self.report(backend)
        return None

    def _proven(self) -> None:
        """Every choice cheaper than the incumbent is excluded: it is optimal."""
        self.raise_bound(self.objective)

    def _share(self, share: float) -> float:
        """The time at which this share of the remaining time is over."""
        now = time.process_time()
        return now + share * max(0.0, self.deadline - now)

    @property
    def late(self) -> bool:
        """Whether time is over."""
        return time.process_time() > self.deadline

    @property
    def over(self) -> bool:
        """Whether the search ends; time over does not end it without an incumbent, which one rounding mostly gives."""
        return self.optimal or (self.late and self.choice is not None)

    def _infeasible(self, error: ImpossibleError) -> Solution:
        problem, left = self.problem, min(PEAK_TIME, max(UNKNOWN_TIME, self.deadline - time.process_time()))
        least = None
        try:
            found = least_peak(problem, backend=self.asked_backend, time_limit=left, seed=self.seed)
        except ImpossibleError as pairs:
            node = error.node if pairs.node is None else pairs.node
            where = "" if node is None else f"; every strategy of {self._name(node)} is ruled out by its neighbours"
            message = f"no choice exists, whatever the memory limit: the forbidden pairs exclude each other{where}"
        else:
            least, message = found.least, explain(problem, found, proven=True)
            if problem.limit is not None and least.reached <= problem.limit:
                raise SolverError(f"a choice with a peak of {least.reached} exists, but the search ruled it out")
        return Solution((), Status.INFEASIBLE, math.inf, math.inf, "none", least, message)

    def _name(self, node: int) -> str:
        return self.problem.names[node] if self.problem.names else f"node {node}"

    def _unknown(self) -> Solution:
        left = min(PEAK_TIME, max(UNKNOWN_TIME, self.deadline - time.process_time()))
        try:
            found = least_peak(self.problem, backend=self.asked_backend, time_limit=left, seed=self.seed)
        except ImpossibleError as error:
            return self._infeasible(error)
        if found.choice is not None and self.offer(found.choice, "least peak"):
            return self._found()
        message = explain(self.problem, found, proven=False)
        message += " (time ran out)" if self.late else " (the search found none, and none was proved impossible)"
        return Solution((), Status.UNKNOWN, math.inf, self.bound, "none", found.least, message)


def _ascend(dual: Dual, upper: float, deadline: float) -> float:
    """Sweeps of the dual between two exchanges; the CPU seconds of this thread that they took."""
    began = time.thread_time()
    dual.ascend(ALTERNATING, upper, deadline=deadline)
    return time.thread_time() - began


class _Relaxed(_Run):
    """The same for a network without memory rows, for some seconds only."""

    def __init__(self, net: Network, parts: int, deadline: float, seed: int) -> None:
        super().__init__(Problem([]), deadline, seed, "auto", None, math.inf)
        self._net, self._parts = net, parts

    def offer(self, choice: list[int], backend: str) -> bool:
        """Keep a choice if it is cheaper."""
        value = self._net.value(choice)
        if value < self.objective:
            self._best = tuple(choice), value, backend
        return math.isfinite(value)

    def search(self) -> None:
        """Improve choice and bound while that is cheap."""
        from autoshard.solver.lifted import warm_start

        net = self._net.copy()
        reduce(net, dominance=False, deadline=self.deadline)  # dominance takes longer here than it saves
        dual = Dual(net)
        warm_start(dual)
        for sweeps in DUAL_SWEEPS[: self._parts]:
            dual.ascend(sweeps, self.objective, deadline=self.deadline)
            self._learn(dual)
            choice = dual.rounded(deadline=self.deadline)
            if choice is not None:
                self.offer(net.expand(choice), "dual")
            if self.optimal or self.late or self._near(net, dual):
                return


def _relaxed(net: Network, longer: bool, deadline: float, seed: int) -> tuple[list[int], float]:
    """A choice of a network without memory rows, and a bound."""
    run = _Relaxed(net, RELAXED_PARTS[longer], deadline, seed)
    run.search()
    if run.choice is None:
        raise ImpossibleError()
    return list(run.choice), run.bound
