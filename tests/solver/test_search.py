import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from autoshard.solver.dual import Dual
from autoshard.solver.eliminate import exact_minimum
from autoshard.solver.network import Network
from autoshard.solver.problem import Problem, Usage
from autoshard.solver.reduce import tighten_rows
from autoshard.solver.search import TreeSearch
from tests.solver.random_problems import best_of_network, random_problem


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_what_is_found_fits_costs_no_more_and_no_less_than_the_optimum(seed):
    net = Network.of(random_problem(seed, nodes=5))
    best, _ = best_of_network(net)
    assume(math.isfinite(best))
    tighten_rows(net)
    dual = Dual(net)
    dual.ascend(20, best)
    start = dual.rounded()
    assume(start is not None and math.isfinite(net.value(start)))
    found = TreeSearch(dual, seed % 7).improve(start, deadline=math.inf, patience=1)
    assert net.fits(found)
    tolerance = 1e-9 * max(abs(best), 1e-9)
    assert best - tolerance <= net.value(found) <= net.value(start) + tolerance


@pytest.mark.parametrize("seed", range(5))
def test_a_tree_is_solved_by_one_move(seed):
    rng = np.random.default_rng(seed)
    n, k = 30, 5
    edges = [(int(rng.integers(0, v)), v) for v in range(1, n)]
    problem = Problem(list(rng.random((n, k))), edges, [rng.random((k, k)) for _ in edges])
    net = Network.of(problem)
    optimum = exact_minimum(net)
    assert optimum is not None
    found = TreeSearch(Dual(net), seed).improve([0] * n, deadline=math.inf, patience=1)
    assert net.value(found) == pytest.approx(optimum[1])


def knapsack(items: list[tuple[int, int]], room: int) -> Network:
    """Per (seconds, bytes) of an item, whether to spend these seconds or to keep these bytes."""
    costs = [np.array([float(seconds), 0.0]) for seconds, _ in items]
    usages = [Usage(item, 0, 1, np.array([0.0, float(size)])) for item, (_, size) in enumerate(items)]
    return Network.of(Problem(costs, [], [], usages, [], float(room)))


def searched(net: Network, start: list[int], seed: int, *, patience: int) -> float:
    dual = Dual(net)
    dual.ascend(50, net.value(start))
    return net.value(TreeSearch(dual, seed).improve(start, deadline=math.inf, patience=patience))


@pytest.mark.parametrize("seed", range(5))
def test_one_is_given_up_for_two_where_every_single_move_is_worse(seed):
    net = knapsack([(13, 6), (10, 5), (10, 5)], room=10)
    start = [1, 0, 0]  # most seconds for its bytes, and no room for another
    best, choice = best_of_network(net)
    assert (net.value(start), best, choice) == (20.0, 13.0, [0, 1, 1])
    assert searched(net, start, seed, patience=200) == best


def test_most_knapsacks_are_filled_best_and_few_of_them_by_moves_alone():
    by_moves = found = 0
    for seed in range(30):
        items = [(int(seconds), int(size)) for seconds, size in np.random.default_rng(seed).integers(5, 40, (8, 2))]
        net = knapsack(items, sum(size for _, size in items) // 2)
        best, _ = best_of_network(net)
        by_moves += searched(net, [0] * 8, seed, patience=0) == best
        found += searched(net, [0] * 8, seed, patience=10) == best
    assert by_moves < 10 < 25 <= found


def test_the_same_seed_gives_the_same_choice():
    net = Network.of(random_problem(12, nodes=12, strategies=6, memory=False))
    choices = [TreeSearch(Dual(net), 3).improve([0] * len(net.cost), deadline=math.inf) for _ in range(2)]
    assert choices[0] == choices[1]
