import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.solver.fold import classes_of, fold
from autoshard.solver.objective import evaluate
from autoshard.solver.problem import Problem, Usage
from autoshard.solver.solve import solve
from tests.solver.random_problems import examples, random_problem
from tests.solver.transformer_like import transformer_like


@examples(150)
@given(st.integers(0, 2**32 - 1), st.randoms(use_true_random=False))
def test_a_folded_choice_costs_and_uses_what_its_expansion_does(seed, random):
    problem = random_problem(seed, nodes=5)
    keys = [(len(c), random.randrange(2)) for c in problem.node_costs]
    order = list(dict.fromkeys(keys))
    folded, expand = fold(problem, [order.index(key) for key in keys])
    for choice in itertools.product(*[range(len(c)) for c in folded.node_costs]):
        small, large = evaluate(folded, choice), evaluate(problem, expand(choice))
        assert small.objective == pytest.approx(large.objective, rel=1e-9, abs=1e-15)
        assert small.peak == pytest.approx(large.peak)
        assert small.feasible == large.feasible


def test_repeated_layers_fall_together():
    problem = transformer_like(layers=12)
    classes = classes_of(problem)
    assert max(classes) + 1 < len(classes) / 2
    longer = transformer_like(layers=16)
    assert max(classes_of(longer)) == max(classes)  # what is added is more of the same


def test_the_fold_of_a_stack_is_nearly_as_good_as_the_whole():
    problem = transformer_like(layers=12)
    folded, expand = fold(problem, classes_of(problem))
    solution, whole = solve(folded), solve(problem)
    full = evaluate(problem, expand(solution.choice))
    assert full.feasible
    assert full.objective == pytest.approx(solution.objective, rel=1e-9)
    assert whole.objective <= full.objective * (1 + 1e-12)


def test_direction_and_costs_of_edges_tell_nodes_apart():
    a, b = np.array([[0.0, 1.0], [2.0, 0.0]]), np.array([[0.0, 3.0], [3.0, 0.0]])
    chain = Problem([np.zeros(2)] * 4, [(0, 1), (2, 3)], [a, a])
    assert classes_of(chain) == (0, 1, 0, 1)
    assert classes_of(Problem([np.zeros(2)] * 4, [(0, 1), (2, 3)], [a, b])) == (0, 1, 2, 3)
    used = Problem([np.zeros(2)] * 2, node_usages=[Usage(1, 0, 1, np.ones(2))])
    assert classes_of(used) == (0, 1)


def test_classes_that_do_not_fit_are_refused():
    problem = Problem([np.zeros(2), np.zeros(3)])
    with pytest.raises(ValueError, match="class 0 has nodes with 2 and with 3 strategies"):
        fold(problem, [0, 0])
    with pytest.raises(ValueError, match="1 classes for 2 nodes"):
        fold(problem, [0])
    with pytest.raises(ValueError, match="without gaps"):
        fold(problem, [0, 2])
    assert math.isfinite(solve(problem).objective)


def test_a_large_problem_has_the_choice_of_its_fold_before_its_dual(monkeypatch):
    stages = []
    problem = transformer_like(layers=12)
    monkeypatch.setattr("autoshard.solver.solve.exact_minimum", lambda net, deadline: None)  # as if it were too large
    for first, early in ((10**9, False), (10, True)):
        monkeypatch.setattr("autoshard.solver.solve.FOLDED_FIRST", first)
        stages.clear()
        found = solve(problem, progress=lambda stage, objective, bound: stages.append(stage))
        assert "dual" in stages
        assert ("fold" in stages[: stages.index("dual")]) == early
    assert found.objective >= found.bound * (1 - 1e-9)
