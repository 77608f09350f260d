import numpy as np
import pytest

from autoshard.solver.dual import Dual
from autoshard.solver.network import Network
from autoshard.solver.problem import Problem, Usage


def knapsack(rng: np.random.Generator, nodes: int, rows: int) -> Problem:
    """Nodes that choose between memory and time, each live in some of many rows."""
    gains = rng.uniform(1.0, 2.0, nodes)
    starts = rng.integers(0, rows, nodes)
    usages = [Usage(i, int(s), int(s) + rows, np.array([1.0, 0.0])) for i, s in enumerate(starts)]
    return Problem([np.array([0.0, g]) for g in gains], node_usages=usages, limit=nodes / 4)


@pytest.mark.parametrize("rows", [1, 40])
def test_the_ascent_reaches_the_bound_of_the_linear_relaxation(rows):
    from scipy.optimize import linprog

    problem = knapsack(np.random.default_rng(rows), 120, rows)
    net = Network.of(problem)
    used = np.zeros((len(net.room), 120))
    for i, terms in enumerate(net.node_terms):
        for first, last in terms:
            used[first:last, i] = 1.0
    gains = np.array([c[1] for c in problem.node_costs])
    linear = linprog(-gains, A_ub=used, b_ub=net.room, bounds=(0.0, 1.0))
    best = float(gains.sum() + linear.fun)
    dual = Dual(net)
    dual.ascend(1000, best * 1.01)
    assert dual.bound <= best * (1.0 + 1e-9)
    assert dual.bound >= best * 0.995


def test_the_same_network_gives_the_same_ascent():
    bounds = []
    for _ in range(2):
        dual = Dual(Network.of(knapsack(np.random.default_rng(0), 60, 20)))
        dual.ascend(300, 100.0)
        bounds.append((dual.bound, dual.multipliers.tolist()))
    assert bounds[0] == bounds[1]


def test_an_ascent_ends_with_the_choice_rounded_at_the_best_bound(monkeypatch):
    dual = Dual(Network.of(knapsack(np.random.default_rng(0), 60, 20)))
    seen = []
    sweep = dual.sweep
    monkeypatch.setattr(dual, "sweep", lambda: seen.append((sweep(), dual.x.copy())) or seen[-1][0])
    dual.ascend(120, 100.0)
    best = max(range(len(seen)), key=lambda i: seen[i][0])
    assert any((x != seen[best][1]).any() for _, x in seen[best + 1 :])
    assert (dual.x == seen[best][1]).all()


def test_the_cheaper_of_the_best_and_the_latest_rounding_is_handed_out():
    dual = Dual(Network.of(knapsack(np.random.default_rng(1), 60, 20)))
    dual.ascend(120, 100.0)
    latest = dual._latest.copy()
    alone = [dual.improved(dual.named(x)) for x in (dual.x, latest)]
    assert any(c is not None for c in alone)
    found = dual.rounded()
    assert found is not None
    assert dual.net.value(found) == min(dual.net.value(c) for c in alone if c is not None)
