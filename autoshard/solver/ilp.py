"""The problem as an integer linear program, for OR-Tools (HiGHS, CP-SAT, SCIP) and PuLP (CBC).

One 0/1 variable per strategy (one-hot per node) and one continuous variable per finite pair of an edge, whose rows
and columns both sum to the node variables (Alpa, OSDI'22, section 4.2, there with <=): the linear relaxation of this
form is the local polytope, far tighter than e >= s + s' - 1. Memory rows have coefficients on node and pair variables.

Solvers run in one thread with a given seed and a relative gap of 0.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from autoshard.solver.network import Network
from autoshard.solver.problem import Array

ILP_SOLVERS = ("highs", "scip", "cp-sat", "cbc")
"""In order of preference."""
_ORTOOLS = {"highs": "highs", "scip": "scip", "cp-sat": "sat"}
SPAN, WHOLE_SPAN = 2.0**20, 2.0**40
"""Costs are scaled so that the relevant range is this wide: solvers in float64 stop at absolute gaps of 1e-6, which
is then 1e-12 of the range; CP-SAT, which takes integers only, gets a finer grid."""


GRACE, LOOK = 0.5, 0.1
"""Seconds that a solver may go on beyond its limit before it is left behind; seconds between two looks at the clock."""
IlpOutcome = tuple[Array | None, float, bool, bool]
"""Values of the variables or None, lower bound, whether infeasible, whether finished."""
UNFINISHED: IlpOutcome = (None, -math.inf, False, False)


class BackendMissingError(RuntimeError):
    """The asked-for solver is not installed."""


@dataclass(frozen=True)
class IlpResult:
    """Attributes.

    choice: per node of the network (0 for eliminated nodes), or None.
    bound: proven lower bound on the cost, `-inf` when there is none.
    infeasible: proven infeasible.
    finished: whether the solver ended within its limit (then `choice` is optimal or `infeasible` holds).
    """

    choice: list[int] | None
    bound: float
    infeasible: bool
    finished: bool


def available() -> tuple[str, ...]:
    """The backends installed here, in order of preference, found without importing them."""
    found = []
    if importlib.util.find_spec("ortools") is not None and importlib.util.find_spec("scipy") is not None:
        found += ["highs", "scip", "cp-sat"]
    if importlib.util.find_spec("pulp") is not None:
        found.append("cbc")
    return tuple(found)


def require(backend: str) -> str:
    """`backend`, checked; for "auto" the first one available.

    Raises:
        ValueError: no such backend.
        BackendMissingError: it is not installed.
    """
    have = available()
    if backend == "auto":
        if not have:
            raise BackendMissingError("no ILP solver is installed: pip install ortools scipy (or pulp)")
        return have[0]
    if backend not in ILP_SOLVERS:
        raise ValueError(f"unknown backend {backend!r}: choose one of auto, {', '.join(ILP_SOLVERS)}")
    if backend not in have:
        package = "pulp" if backend == "cbc" else "ortools scipy"
        raise BackendMissingError(
            f"the backend {backend!r} needs a package that is not installed: pip install {package}"
        )
    return backend


@dataclass(frozen=True)
class Model:
    """Minimise cost·x subject to lower <= rows·x <= upper and 0 <= x <= most; the first `integers` of x are integer."""

    cost: Array
    most: Array  # per variable 1, or 0 for a forbidden strategy
    integers: int
    columns: int  # strategies and pairs, without the overflow variable
    row: np.ndarray
    column: np.ndarray
    value: Array
    lower: Array
    upper: Array
    first: dict[int, int]  # per node its first variable


def build(net: Network, *, cost_scale: float, whole: bool, overflow: float = 0.0) -> Model:
    """The integer program of a network, costs multiplied by `cost_scale` and rounded down when they must be `whole`.

    With `overflow` (bytes) a last slack variable x in [0, 1] relaxes every memory row by overflow * x.
    """
    nodes = net.alive
    first: dict[int, int] = {}
    costs: list[Array] = []
    rows: list[np.ndarray] = []
    columns: list[np.ndarray] = []
    values: list[Array] = []
    lower: list[Array] = []
    upper: list[Array] = []
    n = row = 0

    def add(r: np.ndarray, c: np.ndarray, v: Array) -> None:
        rows.append(r)
        columns.append(c)
        values.append(v)

    for i in nodes:
        k = net.size(i)
        first[i] = n
        costs.append(net.costs(i))
        add(np.full(k, row), np.arange(n, n + k), np.ones(k))
        n, row = n + k, row + 1
    lower.append(np.ones(row))
    upper.append(np.ones(row))
    integers = n
    memory: list[tuple[int, int, np.ndarray, Array]] = []
    for i in nodes:
        for (start, end), amount in net.node_terms[i].items():
            used = np.flatnonzero(amount)
            memory.append((start, end, first[i] + used, amount[used]))
    for u in nodes:
        for v, matrix in net.adj[u].items():
            if v < u:
                continue
            a, b = np.nonzero(np.isfinite(matrix))
            variables = np.arange(n, n + len(a))
            costs.append(matrix[a, b])
            ku, kv = matrix.shape
            one = np.ones(len(a))
            add(row + a, variables, one)
            add(row + np.arange(ku), first[u] + np.arange(ku), -np.ones(ku))
            add(row + ku + b, variables, one)
            add(row + ku + np.arange(kv), first[v] + np.arange(kv), -np.ones(kv))
            lower.append(np.zeros(ku + kv))
            upper.append(np.zeros(ku + kv))
            for (start, end), amount in net.pair_terms(u, v).items():
                flat = amount[a, b]
                used = np.flatnonzero(flat)
                memory.append((start, end, variables[used], flat[used]))
            n, row = n + len(a), row + ku + kv
    if len(net.room):
        unit = max(1.0, float(np.abs(net.room).max()))  # rows near 1: solvers' feasibility tolerances are absolute
        for start, end, variables, amount in memory:
            for r in range(start, end):
                add(np.full(len(variables), row + r), variables, amount / unit)
        if overflow > 0.0:
            each = np.arange(len(net.room))
            add(row + each, np.full(len(each), n), np.full(len(each), -overflow / unit))
            costs.append(np.array([1.0]))
        lower.append(np.full(len(net.room), -math.inf))
        upper.append((net.room + net.slack) / unit)
    cost = np.concatenate(costs) * cost_scale if costs else np.empty(0)
    allowed = np.isfinite(cost)
    cost[~allowed] = 0.0
    cost = np.floor(cost) if whole else cost
    cat: Any = np.concatenate
    entries = _summed(cat(rows), cat(columns), cat(values), len(cost))
    return Model(cost, allowed.astype(np.float64), integers, n, *entries, cat(lower), cat(upper), first)


def _summed(row: np.ndarray, column: np.ndarray, value: Array, width: int) -> tuple[np.ndarray, np.ndarray, Array]:
    """Sum the entries of each place of the matrix: usages of one node may overlap, and PuLP keeps the last of two."""
    places, number = np.unique(row * width + column, return_inverse=True)
    total = np.zeros(len(places))
    np.add.at(total, number, value)
    return places // width, places % width, total


def solve_ilp(net: Network, *, backend: str, time_limit: float, seed: int = 0, largest: float = math.inf) -> IlpResult:
    """Minimise a network's cost under its memory rows.

    Args:
        net: not modified.
        backend: one of `ILP_SOLVERS`, available.
        time_limit: seconds.
        seed: for the solver's random choices.
        largest: the range of total cost that matters, to choose the scale (default: from the costs).

    The bound stays valid where CP-SAT needs costs rounded to integers.
    """
    scale = _scale(net, largest, WHOLE_SPAN if backend == "cp-sat" else SPAN)
    model = build(net, cost_scale=scale, whole=backend == "cp-sat")
    x, bound, infeasible, finished = _run(model, backend, time_limit, seed)
    choice = None if x is None else _decode(net, model, x)
    return IlpResult(choice, net.offset + bound / scale, infeasible, finished)


def nonzeros(net: Network) -> int:
    """Estimate of the nonzeros of the constraint matrix."""
    pairs = sum(m.size for i in net.alive for j, m in net.adj[i].items() if j > i)
    terms = (*(net.node_terms[i] for i in net.alive), *net.edge_terms.values())
    return 2 * pairs + sum((last - first) * a.size for t in terms for (first, last), a in t.items())


def solve_least_overflow(
    net: Network, *, backend: str, time_limit: float, most: float, seed: int = 0
) -> tuple[list[int] | None, float, bool]:
    """The least violation of the memory rows, in bytes, that some choice reaches; costs do not count.

    Args:
        net: finite costs must be 0.
        backend: not "cp-sat": the violation is not an integer.
        time_limit: seconds.
        most: an upper bound on the least violation, in bytes.
        seed: for the solver's random choices.

    Returns:
        A choice (or None), a lower bound in bytes, and whether it is exact (then the choice reaches it).
    """
    model = build(net, cost_scale=SPAN, whole=False, overflow=most)
    x, bound, _, finished = _run(model, backend, time_limit, seed)
    choice = None if x is None else _decode(net, model, x)
    return choice, max(0.0, bound / SPAN * most), finished


def _decode(net: Network, model: Model, x: Array) -> list[int]:
    choice = [0] * len(net.cost)
    for i, f in model.first.items():
        choice[i] = int(np.argmax(x[f : f + net.size(i)]))
    return choice


def _scale(net: Network, largest: float, span: float) -> float:
    """Power of two that maps the relevant range of costs (at most `largest`) to `span`."""
    high = 0.0
    for i in net.alive:
        for v in (net.costs(i), *(m for j, m in net.adj[i].items() if j > i)):
            high = max(high, net.memo.get(("highest",), (v,), lambda m=v: _highest(m)))  # type: ignore[misc]
    high = min(largest, high) if largest > 0 else high
    return 1.0 if high == 0.0 else 2.0 ** math.floor(math.log2(span / high))


def _highest(values: Array) -> float:
    finite = values[np.isfinite(values)]
    return float(np.abs(finite).max(initial=0.0))


_workers: list[threading.Thread] = []


def left_behind() -> bool:
    """Whether an abandoned solver thread still runs."""
    return any(worker.is_alive() for worker in _workers)


def _run(model: Model, backend: str, time_limit: float, seed: int) -> IlpOutcome:
    """Run a backend within its time limit.

    It gets a thread of its own: presolve ignores limits and interrupts. A thread that does not end is abandoned; the
    interpreter waits for it at exit.
    """
    found: list[IlpOutcome] = []
    failed: list[BaseException] = []
    stops: list[Callable[[], Any]] = []

    def work() -> None:
        try:
            name = _ORTOOLS.get(backend)
            found.append(
                _run_cbc(model, time_limit, seed)
                if name is None
                else _run_ortools(model, name, time_limit, seed, stops)
            )
        except BaseException as error:  # raised again in the caller's thread
            failed.append(error)

    worker = threading.Thread(target=work)
    _workers[:] = [*filter(threading.Thread.is_alive, _workers), worker]
    end = time.perf_counter() + time_limit + GRACE
    with _quiet():
        worker.start()
        try:
            while worker.is_alive() and time.perf_counter() < end:
                worker.join(LOOK)
        finally:
            for stop in stops:
                stop()
    if failed:
        raise failed[0]
    return found[0] if found else UNFINISHED


def _run_ortools(model: Model, name: str, time_limit: float, seed: int, stops: list[Callable[[], Any]]) -> IlpOutcome:
    import scipy.sparse
    from ortools.linear_solver.python import model_builder_helper as helper

    n = len(model.cost)
    matrix = scipy.sparse.csr_matrix((model.value, (model.row, model.column)), shape=(len(model.lower), n))
    program = helper.ModelBuilderHelper()
    arguments: list[Any] = [np.zeros(n), model.most, model.cost, model.lower, model.upper, matrix]
    program.fill_model_from_sparse_data(*arguments)
    # CP-SAT takes integers only; with integer node variables the pair variables are integer in every solution anyway.
    # SCIP (of OR-Tools 9.15) has cut off the optimum in presolve with continuous ones: see the test.
    for i in range(model.integers if name == "highs" else model.columns):
        program.set_var_integrality(i, True)
    solver = helper.ModelSolverHelper(name)
    if not solver.solver_is_supported():
        raise BackendMissingError(f"this build of ortools has no {name}: install the ortools wheel from its project")
    solver.set_time_limit_in_seconds(max(0.01, time_limit))
    parameters = {
        "highs": f"threads=1\nrandom_seed={seed}\nmip_rel_gap=0\nmip_abs_gap=1e-6\noutput_flag=false",
        "scip": f"limits/gap = 0\nrandomization/randomseedshift = {seed}",
        "sat": f"num_workers:1,random_seed:{seed},relative_gap_limit:0",
    }
    solver.set_solver_specific_parameters(parameters[name])
    stops.append(solver.interrupt_solve)
    solver.solve(program)
    status = solver.status()
    optimal, infeasible = status == helper.SolveStatus.OPTIMAL, status == helper.SolveStatus.INFEASIBLE
    x = np.asarray(solver.variable_values()) if solver.has_solution() else None
    bound = solver.best_objective_bound() if solver.has_response() else -math.inf
    if optimal:
        bound = solver.objective_value()
    elif name == "highs" or infeasible:
        bound = math.inf if infeasible else -math.inf  # through OR-Tools HiGHS reports no bound unless it finishes
    return x, bound, infeasible, optimal or infeasible


def _run_cbc(model: Model, time_limit: float, seed: int) -> IlpOutcome:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # PuLP 3.3 announces the names of PuLP 4 at every call
        return _run_pulp(model, time_limit, seed)


def _run_pulp(model: Model, time_limit: float, seed: int) -> IlpOutcome:
    import pulp

    n = len(model.cost)
    program = pulp.LpProblem("strategies", pulp.LpMinimize)
    kind = [pulp.LpInteger] * model.integers + [pulp.LpContinuous] * (n - model.integers)
    x = [pulp.LpVariable(f"x{i}", 0, float(model.most[i]), kind[i]) for i in range(n)]
    program += pulp.LpAffineExpression((x[i], float(c)) for i, c in enumerate(model.cost))
    order = np.argsort(model.row, kind="stable")
    bounds = np.searchsorted(model.row[order], np.arange(len(model.lower) + 1))
    for r in range(len(model.lower)):
        part = order[bounds[r] : bounds[r + 1]]
        expression = pulp.LpAffineExpression((x[int(model.column[p])], float(model.value[p])) for p in part)
        equal = model.lower[r] == model.upper[r]
        sense = pulp.LpConstraintEQ if equal else pulp.LpConstraintLE
        program += pulp.LpConstraint(expression, sense, rhs=float(model.upper[r]))
    options = [f"randomSeed {seed + 1}", f"randomCbcSeed {seed + 1}"]
    with tempfile.TemporaryDirectory() as folder:
        solver = pulp.PULP_CBC_CMD(
            msg=False, timeLimit=max(0.01, time_limit), threads=1, gapRel=0.0, gapAbs=1e-6, options=options
        )
        solver.tmpDir = folder
        program.solve(solver)
    optimal = program.sol_status == pulp.LpSolutionOptimal
    infeasible = program.status == pulp.LpStatusInfeasible
    has = program.sol_status in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible)
    values = np.array([v.value() or 0.0 for v in x]) if has else None
    bound = math.inf if infeasible else -math.inf
    if optimal and values is not None:
        bound = float(model.cost @ values)
    return values, bound, infeasible, optimal or infeasible


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the solvers' banners off standard output: HiGHS prints one from C++ in spite of its options."""
    sys.stdout.flush()
    try:
        saved = os.dup(1)
    except OSError:  # no standard output at all
        yield
        return
    with open(os.devnull, "wb") as null:
        os.dup2(null.fileno(), 1)
        try:
            yield
        finally:
            os.dup2(saved, 1)
            os.close(saved)
