import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.solver import ilp
from autoshard.solver.network import Network
from autoshard.solver.objective import evaluate
from autoshard.solver.problem import Problem, Status, Usage
from autoshard.solver.solve import solve
from tests.solver.random_problems import best_by_enumeration, best_of_network, examples, random_problem

installed = pytest.mark.parametrize("backend", ilp.available())
seeds = st.integers(0, 2**32 - 1)


@installed
@examples(25)
@given(seeds)
def test_every_backend_finds_the_optimum(backend, seed):
    problem = random_problem(seed, nodes=5, strategies=4)
    best = best_by_enumeration(problem)
    net = Network.of(problem)
    result = ilp.solve_ilp(net, backend=backend, time_limit=20)
    assert result.finished
    if math.isinf(best):
        assert result.infeasible
        assert result.choice is None
    else:
        assert result.choice is not None
        full = evaluate(problem, net.expand(result.choice))
        assert full.feasible
        assert full.objective == pytest.approx(best, rel=1e-9, abs=1e-15)
        assert result.bound <= best * (1 + 1e-9) + 1e-15


@installed
def test_solve_agrees_over_backends(backend):
    for seed in range(40):
        problem = random_problem(seed, memory=True)
        best = best_by_enumeration(problem)
        solution = solve(problem, backend=backend)
        assert solution.status is (Status.INFEASIBLE if math.isinf(best) else Status.OPTIMAL)
        assert solution.objective == pytest.approx(best, rel=1e-9, abs=1e-15)


def test_scip_is_given_whole_pair_variables():
    """With continuous pair variables SCIP's presolve answers 31 for this problem; the optimum is 24."""
    if "scip" not in ilp.available():
        pytest.skip("ortools is not installed")
    problem = Problem(
        [np.array([9.0, 23 / 3]), np.array([9.0, 16.0])],
        [(0, 1)],
        [np.array([[6.0, 6.0], [7.0, 9.0]])],
        [Usage(0, 0, 1, np.array([0.0, 4.0])), Usage(1, 0, 1, np.array([4.0, 0.0]))],
        [Usage(0, 0, 1, np.array([[0.0, 6.0], [2.0, 0.0]]))],
        limit=7.0,
    )
    net = Network.of(problem)
    assert best_of_network(net)[0] == 24.0
    result = ilp.solve_ilp(net, backend="scip", time_limit=10)
    assert result.bound == pytest.approx(24.0)


def test_usages_of_one_node_that_overlap_in_time_add_up():
    """PuLP kept the last of two entries in one place: this choice would use 8 of 6 bytes."""
    problem = Problem(
        [np.array([0.0, 1.0])], node_usages=[Usage(0, 0, 2, np.array([5.0, 1.0])), Usage(0, 1, 3, np.array([3.0, 1.0]))]
    )
    net = Network.of(replace(problem, limit=6.0))
    for backend in ilp.available():
        assert ilp.solve_ilp(net, backend=backend, time_limit=10).bound == pytest.approx(1.0)


def test_the_solver_prints_nothing(capfd):
    net = Network.of(random_problem(3))
    for backend in ilp.available():
        ilp.solve_ilp(net, backend=backend, time_limit=5)
    assert capfd.readouterr().out == ""


def test_a_missing_backend_is_named_before_anything_is_built(monkeypatch):
    monkeypatch.setattr(ilp, "available", lambda: ("cbc",))
    with pytest.raises(ilp.BackendMissingError, match="pip install ortools scipy"):
        solve(random_problem(1), backend="highs")
    assert ilp.require("auto") == "cbc"
    monkeypatch.setattr(ilp, "available", lambda: ())
    with pytest.raises(ilp.BackendMissingError, match="no ILP solver is installed"):
        ilp.require("auto")


def test_an_unknown_backend_is_refused():
    with pytest.raises(ValueError, match="choose one of auto, highs, scip, cp-sat, cbc"):
        solve(random_problem(1), backend="gurobi")


def test_a_solver_that_does_not_end_is_left_behind(monkeypatch):
    import threading
    import time

    net = Network.of(random_problem(3))
    go_on = threading.Event()
    monkeypatch.setattr(ilp, "_run_ortools", lambda *_: go_on.wait(60) and ilp.UNFINISHED)
    start = time.perf_counter()
    result = ilp.solve_ilp(net, backend="highs", time_limit=0.0)
    assert time.perf_counter() - start < 30
    assert (result.choice, result.infeasible, result.finished) == (None, False, False)
    assert ilp.left_behind()
    go_on.set()
    for worker in ilp._workers:
        worker.join()
    assert not ilp.left_behind()
