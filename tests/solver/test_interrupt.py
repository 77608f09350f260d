"""Time is over, or someone ends the solve: what has been found by then is returned, and called what it is."""

import itertools
import json
import subprocess
import sys
import time

import numpy as np
import pytest

from autoshard.solver import iopddl
from autoshard.solver import solve as solver
from autoshard.solver.objective import evaluate
from autoshard.solver.problem import Problem, Status, Usage
from autoshard.solver.solve import solve
from autoshard.solver.start import first_choices, least_sum
from tests.solver.random_problems import random_problem


def hard():
    """Every node with every other, at random costs: far from its bound for long. What uses least memory fits."""
    rng = np.random.default_rng(0)
    n, k = 50, 7
    edges = [(u, v) for v in range(n) for u in range(v)]
    usages = [Usage(i, i // 5, i // 5 + 3, rng.integers(1, 100, k).astype(float)) for i in range(n)]
    costs = [rng.integers(1, 100, k).astype(float) for _ in range(n)]
    matrices = [rng.integers(0, 100, (k, k)).astype(float) for _ in edges]
    return Problem(costs, edges, matrices, usages, limit=500.0)


@pytest.mark.parametrize("stage", ["reduced", "dual", "search"])
def test_an_interrupt_ends_the_solve_with_the_best_so_far(stage):
    problem = hard()
    seen = []

    def interrupt(at, objective, bound):
        if at == stage:
            seen.append((objective, bound))
            raise KeyboardInterrupt

    solution = solve(problem, progress=interrupt)
    assert solution.status is Status.INTERRUPTED
    assert evaluate(problem, solution.choice).feasible
    assert (solution.objective, solution.bound) == seen[0]
    assert solution.gap > 0.0


def test_an_interrupt_before_anything_is_found_stays_one():
    either = np.array([[np.inf, 0.0], [0.0, 3.0]])  # what costs least by itself is forbidden together
    problem = Problem([np.array([0.0, 1.0])] * 2, [(0, 1)], [either])
    assert not any(evaluate(problem, choice).feasible for choice in first_choices(problem))

    def interrupt(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        solve(problem, progress=interrupt)


SIGNALLED = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
from autoshard import cli
from autoshard.solver import solve
report = solve._Run.report

def signalled(self, stage):
    report(self, stage)
    if stage == "dual":
        os.kill(os.getpid(), getattr(signal, sys.argv[1]))

solve._Run.report = signalled
cli.main(["solve", sys.argv[2], "-o", sys.argv[3], "--json"])
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_ends_the_command_which_still_writes(name, tmp_path):
    problem, out = tmp_path / "problem.json", tmp_path / "solution.json"
    iopddl.write(hard(), problem)
    done = subprocess.run(
        [sys.executable, "-c", SIGNALLED, name, str(problem), str(out)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["status"] == "interrupted"
    found = evaluate(iopddl.read(problem), json.loads(out.read_text()))
    assert found.feasible
    assert found.objective == said["objective"]
    assert said["bound"] < said["objective"]


@pytest.mark.parametrize("looks", [0, 5, 50, 500, 5000])
def test_little_is_done_after_the_deadline(looks, monkeypatch):
    """Time is counted in looks at the clock: whatever is running, the solve ends within a few more."""
    count = 0

    def clock():
        nonlocal count
        count += 1
        return float(count)

    solve(hard(), time_limit=1.0)  # the loops are compiled, which looks at the clock too
    for entries in ("NEAR_PROGRAM", "LARGEST_PROGRAM", "LARGEST_UNKNOWN"):  # integer programs wait for real seconds
        monkeypatch.setattr(solver, entries, 0)
    monkeypatch.setattr(time, "process_time", clock)
    problem = hard()
    solution = solve(problem, time_limit=float(looks))
    assert solution.status in (Status.TIME_LIMIT, Status.FEASIBLE)
    assert evaluate(problem, solution.choice).feasible
    assert count <= looks + 60


def test_a_busy_machine_finds_the_same(monkeypatch):
    rng = np.random.default_rng(0)
    edges = [(i, i + step) for i in range(60) for step in (1, 6) if i + step < 60]
    problem = Problem([rng.random(5) for _ in range(60)], edges, [rng.random((5, 5)) for _ in edges])
    quiet = solve(problem, time_limit=20.0)
    busy = itertools.count(step=100.0)  # seconds between two looks at a clock on the wall
    monkeypatch.setattr(time, "perf_counter", lambda: next(busy))
    assert solve(problem, time_limit=20.0) == quiet
    assert quiet.status is Status.OPTIMAL


def test_a_bound_is_known_at_once():
    for seed in range(50):
        problem = random_problem(seed)
        solution = solve(problem)
        if solution.choice:
            assert least_sum(problem) <= solution.objective + 1e-9 * abs(solution.objective)
    assert least_sum(Problem([])) == 0.0
