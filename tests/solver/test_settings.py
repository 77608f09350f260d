"""Time limits of the solves of a plan."""

import time

from autoshard.solver import settings
from autoshard.solver.problem import Problem
from autoshard.solver.settings import Settings


def test_a_busy_machine_leaves_as_much_time(monkeypatch):
    """Time in which other processes run is no time of the solver: the plan is the same."""
    limits = []
    monkeypatch.setattr(settings, "solve", lambda problem, time_limit, **_: limits.append(time_limit))
    wanted = Settings(time.process_time() + 60.0)
    time.sleep(1.0)
    wanted.solve(Problem([]))
    assert limits[0] > 59.5
