import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.solver.dual import Dual
from autoshard.solver.eliminate import exact_minimum
from autoshard.solver.lifted import alike, warm_start
from autoshard.solver.network import Network
from autoshard.solver.objective import evaluate
from autoshard.solver.problem import Problem
from autoshard.solver.reduce import reduce
from autoshard.solver.solve import solve
from tests.solver.random_problems import examples, random_problem
from tests.solver.transformer_like import transformer_like


def stack(layers):
    """A deep stack, reduced without minimising nodes out: what is left is large, and layers stay apart."""
    net = Network.of(transformer_like(layers=layers))
    reduce(net, eliminate=False)
    return net


def test_longer_stacks_have_the_same_classes():
    assert alike(Dual(stack(40))).max() == alike(Dual(stack(24))).max()


def test_messages_of_the_quotient_begin_where_many_sweeps_of_the_whole_end():
    net = stack(40)
    handed, plain = Dual(net), Dual(net)
    assert warm_start(handed)
    handed.sweep()
    first = plain.sweep()
    for _ in range(100):
        plain.sweep()
    assert plain.bound - handed.bound < 0.01 * (plain.bound - first)
    assert handed.bound <= solve(transformer_like(layers=40)).objective * (1 + 1e-9)


def test_what_does_not_repeat_is_left_alone():
    dual = Dual(stack(3))
    assert not warm_start(dual)
    assert not dual.message.any()


@examples(60)
@given(st.integers(0, 2**32 - 1), st.integers(1, 6))
def test_what_is_fixed_is_measured_from_the_bound_of_the_sweep_itself(seed, sweeps):
    net = Network.of(random_problem(seed, nodes=5))
    dual = Dual(net)
    for _ in range(sweeps):
        dual.sweep()
    if dual.impossible:
        return
    share = np.zeros_like(dual.unary)
    last = dual._kernels.sweep(True, dual._graph(), dual.message, dual.x, share, dual._picked)
    dual._best = (dual.message.copy(), dual.multipliers.copy(), dual.x.copy())
    upper = 2.0 * abs(last) + 1.0
    *_, allowed = dual._slacks(upper + net.offset - float(dual.multipliers @ dual.room))
    assert allowed == pytest.approx(upper - last, rel=1e-6, abs=1e-9 * dual.forbidden)


def test_a_node_with_thousands_of_neighbours_is_minimised_out_in_time():
    """The activations of 5,000 updates: the size of its table was estimated anew for each neighbour that went."""
    leaves = 6000
    rng = np.random.default_rng(0)
    costs = [rng.random(3) for _ in range(leaves + 1)]
    problem = Problem(costs, [(0, i + 1) for i in range(leaves)], [rng.random((3, 3)) for _ in range(leaves)])
    began = time.process_time()
    found = exact_minimum(Network.of(problem))
    assert time.process_time() - began < 20.0
    assert found is not None
    assert found[1] == pytest.approx(evaluate(problem, found[0]).objective)
    each = sum((m + c).min(axis=1) for m, c in zip(problem.edge_costs, costs[1:], strict=True))
    assert found[1] == pytest.approx((costs[0] + each).min())
