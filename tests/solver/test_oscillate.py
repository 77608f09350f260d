import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.solver import oscillate
from autoshard.solver import solve as solver
from autoshard.solver.dual import Dual
from autoshard.solver.eliminate import exact_minimum
from autoshard.solver.network import ImpossibleError, Network
from autoshard.solver.objective import evaluate
from autoshard.solver.oscillate import Oscillation
from autoshard.solver.problem import Problem, Status
from autoshard.solver.reduce import tighten_rows
from autoshard.solver.solve import solve
from tests.solver.random_problems import (
    best_by_enumeration,
    best_of_network,
    examples,
    planted_problem,
    random_problem,
)

seeds = st.integers(0, 2**32 - 1)


def finite_problem(seed):
    """As `random_problem`, but what is forbidden there is only dear."""
    problem = random_problem(seed, nodes=7)
    dear = [[np.where(np.isfinite(a), a, 40.0) for a in arrays] for arrays in (problem.node_costs, problem.edge_costs)]
    return replace(problem, node_costs=dear[0], edge_costs=dear[1])


def region_moved(net, start, *, entries, regions=1, most=None):
    """The choice after moves of regions without prices and without a limit, by how much its cost fell, its usage."""
    dual = Dual(net)
    search = Oscillation(dual)
    x = np.array([start[int(v)] for v in dual.nodes], np.int64)
    used = dual.usage(x)
    rule = search._kernels.Rule(strict=False, smallest=0.0, largest=entries)
    fixed = search._memory, search._plain, used, search._bench
    fell = search._kernels.move_regions(x, *fixed, regions, most or len(x), rule)
    assert used == pytest.approx(dual.usage(x), abs=1e-9)
    return dual.named(x), fell


@examples(200)
@given(seeds)
def test_a_region_of_all_nodes_is_solved_exactly(seed):
    net = Network.of(finite_problem(seed), memory=False)
    optimum = exact_minimum(net)
    assert optimum is not None
    start = [0] * len(net.cost)
    found, fell = region_moved(net, start, entries=10**6, regions=200)  # each solves the component around a random node
    tolerance = 1e-9 * max(1.0, abs(optimum[1]))
    assert net.value(found) == pytest.approx(net.value(start) - fell, abs=tolerance)
    assert net.value(found) == pytest.approx(optimum[1], abs=tolerance)


@examples(200)
@given(seeds, st.integers(1, 30), st.integers(1, 6))
def test_nodes_are_held_where_tables_would_get_too_large(seed, entries, most):
    net = Network.of(finite_problem(seed))
    start = [0] * len(net.cost)
    found, fell = region_moved(net, start, entries=entries, regions=10, most=most)
    assert fell >= 0.0
    assert net.value(found) == pytest.approx(net.value(start) - fell, abs=1e-9 * max(1.0, abs(net.value(start))))


@examples(50)
@given(seeds)
def test_what_is_found_fits_and_costs_no_less_than_the_optimum(seed):
    net = Network.of(random_problem(seed, nodes=5))
    best, _ = best_of_network(net)
    try:
        tighten_rows(net)
    except ImpossibleError:
        return
    dual = Dual(net)
    dual.ascend(20, best)
    search = Oscillation(dual, seed % 7)
    search.run(20, math.inf)
    if search.best is not None:
        assert net.fits(search.best)
        assert net.value(search.best) >= best - 1e-9 * max(abs(best), 1e-9)
        assert search.value == net.value(search.best)


@examples(40)
@given(seeds)
def test_bound_and_search_beside_each_other_bracket_the_optimum(seed):
    problem = random_problem(seed)
    best = best_by_enumeration(problem)
    with pytest.MonkeyPatch.context() as patch:  # nothing else is asked
        for name in ("NEAR_PROGRAM", "LARGEST_PROGRAM", "LARGEST_UNKNOWN", "NEAR_TRIES"):
            patch.setattr(solver, name, 0)
        patch.setattr(solver, "exact_minimum", lambda *_, **__: None)
        patch.setattr(solver, "reduce", lambda *_, **__: None)
        patch.setattr(solver, "DUAL_SWEEPS", (2,))
        patch.setattr(solver, "BOUND_ROUNDS", 1)
        solution = solve(problem)
    if math.isinf(best):
        assert solution.choice == ()
        return
    tolerance = 1e-9 * max(abs(best), 1e-9)
    assert solution.bound <= best + tolerance
    if solution.choice:
        assert evaluate(problem, solution.choice).feasible
        assert solution.objective >= best - tolerance


def test_beside_the_search_a_tight_bound_is_solved_exactly(monkeypatch):
    problem = planted_problem(0)
    for name in ("LARGEST_PROGRAM", "LARGEST_UNKNOWN"):  # too large for an integer program
        monkeypatch.setattr(solver, name, 0)
    monkeypatch.setattr(solver, "DUAL_SWEEPS", (2,))
    monkeypatch.setattr(Dual, "rounded", lambda *_, **__: None)
    runs: list[int] = []
    monkeypatch.setattr(Oscillation, "run", lambda *_: runs.append(1))  # finds nothing
    solution = solve(problem)
    assert solution.status is Status.OPTIMAL
    assert solution.objective == pytest.approx(10 * len(problem.node_costs), rel=1e-9)
    assert len(runs) == 1


def loop(seed, n=40, k=6):
    """A ring of nodes that all want to be alike, each with tastes of its own."""
    rng = np.random.default_rng(seed)
    edges = [(i, i + 1) for i in range(n - 1)] + [(0, n - 1)] + [(i, i + 2) for i in range(n - 2)]
    return Problem(list(rng.random((n, k))), edges, [4.0 * (1.0 - np.eye(k)) for _ in edges])


@pytest.mark.parametrize("seed", range(3))
def test_a_region_moves_what_no_tree_can(seed):
    net = Network.of(loop(seed))
    optimum = exact_minimum(net)
    assert optimum is not None
    found, _ = region_moved(net, [0] * 40, entries=10**4)
    assert net.value(found) == pytest.approx(optimum[1])


def test_the_same_seed_gives_the_same_choice_however_it_is_divided_into_runs():
    net = Network.of(random_problem(12, nodes=12, strategies=6))
    choices = []
    for runs in ((20,), (7, 13)):
        dual = Dual(net)
        dual.ascend(20, math.inf)
        search = Oscillation(dual, 3)
        for rounds in runs:
            search.exchange()
            search.run(rounds, math.inf)
        choices.append(search.best)
    assert choices[0] == choices[1]


def test_no_round_begins_after_the_deadline(monkeypatch):
    net = Network.of(random_problem(12, nodes=12, strategies=6))
    search = Oscillation(Dual(net))
    passes = []
    monkeypatch.setattr(oscillate.Oscillation, "_moves", lambda *args, **kwargs: passes.append(1) or 0.0)
    search.run(50, -math.inf)
    assert len(passes) <= 1 + len(oscillate.HEIGHTS) + 1
