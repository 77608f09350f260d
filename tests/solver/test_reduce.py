import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.solver import reduce as reductions
from autoshard.solver.dual import Dual
from autoshard.solver.eliminate import exact_minimum
from autoshard.solver.network import ImpossibleError, Network
from autoshard.solver.objective import evaluate
from autoshard.solver.problem import Problem, Usage
from tests.solver.random_problems import best_by_enumeration, best_of_network, examples, random_problem

seeds = st.integers(0, 2**32 - 1)
STEPS = [
    reductions.tighten_rows,
    reductions.arc_consistency,
    reductions.remove_dominated,
    reductions.drop_modular_edges,
    reductions.eliminate_low_degree,
    reductions.reduce,
]


def contract(net: Network) -> None:
    reductions.arc_consistency(net)
    reductions.contract_functions(net)


@pytest.mark.parametrize("step", [*STEPS, contract], ids=lambda s: s.__name__)
@examples(120)
@given(seeds)
def test_each_reduction_keeps_the_optimum(step, seed):
    problem = random_problem(seed, nodes=5)
    best = best_by_enumeration(problem)
    net = Network.of(problem)
    try:
        step(net)
    except ImpossibleError:
        assert math.isinf(best)
        return
    found, choice = best_of_network(net)
    assert found == pytest.approx(best, rel=1e-9, abs=1e-15)
    if math.isfinite(best):
        full = evaluate(problem, net.expand(choice))
        assert full.feasible
        assert full.objective == pytest.approx(best, rel=1e-9, abs=1e-15)


class Looks:
    """A clock that counts how often it is looked at."""

    def __init__(self):
        self.count = 0

    def process_time(self):
        self.count += 1
        return float(self.count)


@examples(200)
@given(seeds, st.integers(0, 60))
def test_a_reduction_that_is_cut_short_keeps_the_optimum(seed, looks):
    problem = random_problem(seed, nodes=5)
    best = best_by_enumeration(problem)
    net = Network.of(problem)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reductions, "time", Looks())
        try:
            reductions.reduce(net, deadline=float(looks))
        except ImpossibleError:
            assert math.isinf(best)
            return
    found, choice = best_of_network(net)
    assert found == pytest.approx(best, rel=1e-9, abs=1e-15)
    if math.isfinite(best):
        assert evaluate(problem, net.expand(choice)).feasible


@examples(200)
@given(seeds)
def test_dynamic_programming_finds_the_optimum(seed):
    problem = random_problem(seed, memory=False)
    net = Network.of(problem)
    result = exact_minimum(net)
    assert result is not None
    choice, cost = result
    best = best_by_enumeration(problem)
    assert cost == pytest.approx(best, rel=1e-9, abs=1e-15)
    if math.isfinite(best):
        assert evaluate(problem, net.expand(choice)).objective == pytest.approx(best, rel=1e-9, abs=1e-15)


def test_dynamic_programming_gives_up_when_tables_grow():
    rng = np.random.default_rng(0)
    problem = random_problem(0)
    n, k = 12, 6
    pairs = [(u, v) for u in range(n) for v in range(u)]
    problem = type(problem)([rng.random(k) for _ in range(n)], pairs, [rng.random((k, k)) for _ in pairs])
    assert exact_minimum(Network.of(problem), largest=1000) is None


@examples(150)
@given(seeds, st.integers(1, 60))
def test_the_dual_bound_holds_and_fixing_keeps_everything_cheaper(seed, sweeps):
    problem = random_problem(seed, nodes=5)
    net = Network.of(problem)
    best, _ = best_of_network(net)
    try:
        reductions.tighten_rows(net)
    except ImpossibleError:
        assert math.isinf(best)
        return
    dual = Dual(net)
    dual.ascend(sweeps, best)
    tolerance = 1e-9 * max(abs(best), 1e-9) if math.isfinite(best) else 0.0
    if math.isfinite(best):
        assert dual.bound <= best + tolerance
        choice = dual.rounded()
        if choice is not None:
            assert net.fits(choice)
        dual.fix(net, best + 10 * tolerance)
        kept, _ = best_of_network(net)
        assert kept == pytest.approx(best, rel=1e-9, abs=1e-15)


def test_rows_that_cannot_overflow_go():
    for seed in range(40):
        problem = random_problem(seed, memory=True)
        roomy = type(problem)(
            problem.node_costs,
            problem.edges,
            problem.edge_costs,
            problem.node_usages,
            problem.edge_usages,
            limit=1e6,
        )
        net = Network.of(roomy)
        reductions.tighten_rows(net)
        assert len(net.room) == 0
        assert not any(net.node_terms)
        assert not net.edge_terms


def test_rows_far_apart_imply_each_other():
    # A lasting tensor and ten short ones: of the rows of the short ones only that of the largest can bind.
    short = [Usage(i + 1, 2 * i, 2 * i + 1, np.array([0.0, float(i + 1)])) for i in range(10)]
    lasting = Usage(0, 0, 20, np.array([0.0, 8.0]))
    problem = Problem([np.zeros(2)] * 11, node_usages=[lasting, *short], limit=17.0)
    net = Network.of(problem)
    assert len(net.room) > 10
    reductions.drop_rows(net)
    assert net.times.tolist() == [18]


def test_a_hub_with_one_strategy_gives_its_edges_to_its_neighbours():
    matrix = np.array([[3.0, 4.0]])
    net = Network.of(Problem([np.zeros(1), np.zeros(2), np.zeros(2)], [(0, 1), (0, 2)], [matrix, matrix]))
    reductions.settle(net, 0)
    assert net.adj == [{}, {}, {}]
    assert [net.costs(i).tolist() for i in net.alive] == [[0.0], [3.0, 4.0], [3.0, 4.0]]


def test_when_time_is_over_reductions_stop_where_they_are():
    for seed in range(40):
        net = Network.of(random_problem(seed))
        best, _ = best_of_network(net)
        try:
            reductions.arc_consistency(net)
        except ImpossibleError:
            assert math.isinf(best)
            continue
        sizes = [(i, net.size(i), len(net.adj[i])) for i in net.alive]
        reductions.remove_dominated(net, deadline=0.0)
        reductions.eliminate_low_degree(net, deadline=0.0)
        assert [(i, net.size(i), len(net.adj[i])) for i in net.alive] == sizes
