import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.solver import solve as solver
from autoshard.solver.dual import Dual
from autoshard.solver.objective import evaluate
from autoshard.solver.problem import Problem, Status, Usage
from autoshard.solver.solve import solve
from tests.solver.random_problems import (
    best_by_enumeration,
    examples,
    least_peak_by_enumeration,
    planted_problem,
    random_problem,
)
from tests.solver.transformer_like import transformer_like

seeds = st.integers(0, 2**32 - 1)


@examples(300)
@given(seeds)
def test_equals_enumeration(seed):
    problem = random_problem(seed)
    best = best_by_enumeration(problem)
    solution = solve(problem)
    if math.isinf(best):
        assert solution.status is Status.INFEASIBLE
        assert solution.choice == ()
        least = least_peak_by_enumeration(problem)
        if math.isfinite(least):
            assert solution.least_usage is not None
            assert solution.least_usage.bound == solution.least_usage.reached == least
            assert "least possible peak" in solution.message
        else:
            assert "whatever the memory limit" in solution.message
    else:
        assert solution.status is Status.OPTIMAL
        assert solution.gap == 0.0
        assert solution.objective == pytest.approx(best, rel=1e-9, abs=1e-15)
        assert evaluate(problem, solution.choice).feasible


@pytest.mark.parametrize("share", [None, 0.3, 0.03])
def test_repeated_layers_are_solved_to_optimality(share):
    problem = transformer_like(layers=3, limit_share=share)
    solution = solve(problem, time_limit=120)
    assert solution.status is Status.OPTIMAL
    again = solve(problem, time_limit=120)
    assert again == solution


@pytest.mark.parametrize("seed", range(3))
def test_a_tight_bound_needs_no_integer_program_where_rounding_fails(monkeypatch, seed):
    problem, sweeps, sweep = planted_problem(seed), [], Dual.sweep
    monkeypatch.setattr(Dual, "rounded", lambda *_, **__: None)
    monkeypatch.setattr(Dual, "sweep", lambda dual: sweeps.append(sweep(dual)) or sweeps[-1])
    monkeypatch.setattr(solver.ilp, "solve_ilp", lambda *_, **__: pytest.fail("an integer program is asked"))
    solution = solve(problem)
    assert solution.status is Status.OPTIMAL
    assert solution.objective == pytest.approx(10 * len(problem.node_costs), rel=1e-9)
    assert len(sweeps) <= sum(solver.DUAL_SWEEPS[:2])


def test_the_limit_costs_something_and_is_kept():
    free = solve(transformer_like(layers=3))
    problem = transformer_like(layers=3, limit_share=0.02)
    bound_by_memory = solve(problem)
    assert bound_by_memory.objective > free.objective
    assert evaluate(problem, bound_by_memory.choice).peak <= problem.limit
    assert evaluate(problem, free.choice).peak > problem.limit


def test_a_limit_that_cannot_be_met_says_the_least_that_is_possible():
    amounts = [np.array([10.0, 4.0]), np.array([8.0, 3.0])]
    # Both small choices at once are forbidden, so that the least is 4 + 8, not 4 + 3.
    forbid = np.array([[0.0, 0.0], [0.0, np.inf]])
    problem = Problem(
        [np.zeros(2), np.zeros(2)],
        [(0, 1)],
        [forbid],
        [Usage(0, 0, 5, amounts[0]), Usage(1, 2, 4, amounts[1])],
        limit=9.0,
        names=["wte", "lm_head"],
    )
    solution = solve(problem)
    assert solution.status is Status.INFEASIBLE
    assert solution.least_usage is not None
    assert solution.least_usage.reached == 12.0
    assert solution.message == (
        "no choice fits in 9 bytes per device: the least possible peak is 12 bytes per device; it is reached at "
        "time 2, where these are live: lm_head (8), wte (4)"
    )


def test_pairs_that_exclude_each_other_are_named():
    forbid = np.full((2, 2), np.inf)
    solution = solve(Problem([np.zeros(2), np.zeros(2)], [(0, 1)], [forbid], names=["a", "b"]))
    assert solution.status is Status.INFEASIBLE
    assert solution.message.startswith("no choice exists, whatever the memory limit")
    assert "strategy of b" in solution.message


def test_pairs_that_exclude_each_other_are_named_without_time_too():
    forbid = np.full((2, 2), np.inf)
    solution = solve(Problem([np.zeros(2), np.zeros(2)], [(0, 1)], [forbid], names=["a", "b"]), time_limit=0.0)
    assert solution.status in (Status.INFEASIBLE, Status.UNKNOWN)
    assert solution.choice == ()
    assert solution.message


def test_an_empty_problem_is_solved():
    solution = solve(Problem([]))
    assert (solution.status, solution.choice, solution.objective, solution.gap) == (Status.OPTIMAL, (), 0.0, 0.0)


@pytest.mark.parametrize(
    ("problem", "text"),
    [
        (Problem([np.zeros((2, 2))]), r"node 0: costs have shape \(2, 2\)"),
        (Problem([np.array([np.nan])]), "node 0: a cost is NaN"),
        (Problem([np.zeros(2)], [(0, 0)], [np.zeros((2, 2))]), "does not join two different nodes"),
        (Problem([np.zeros(2), np.zeros(3)], [(0, 1)], [np.zeros((3, 2))]), r"shape \(3, 2\), expected \(2, 3\)"),
        (Problem([np.zeros(2)], node_usages=[Usage(0, 0, 1, np.array([-1.0, 0.0]))]), "finite and not negative"),
        (Problem([np.zeros(2)], node_usages=[Usage(3, 0, 1, np.zeros(2))]), "there is no node 3"),
    ],
)
def test_malformed_problems_are_refused(problem, text):
    with pytest.raises(ValueError, match=text):
        solve(problem)


def test_progress_reports_bounds_that_only_rise():
    bounds = []
    solution = solve(
        transformer_like(layers=2, limit_share=0.02), progress=lambda stage, objective, bound: bounds.append(bound)
    )
    assert bounds == sorted(bounds)
    assert bounds[-1] <= solution.objective


def test_out_of_time_still_gives_a_choice_and_a_bound():
    problem = transformer_like(layers=4, limit_share=0.01)
    solution = solve(problem, time_limit=0.0)
    assert solution.status in (Status.TIME_LIMIT, Status.OPTIMAL, Status.UNKNOWN)
    if solution.choice:
        assert evaluate(problem, solution.choice).feasible
        assert solution.bound <= solution.objective
