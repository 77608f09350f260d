"""A candidate whose predicted memory keeps a limit that the solver counts otherwise."""

from types import SimpleNamespace

import pytest

from autoshard.planning.memory import within_limit
from autoshard.plans.value import NoPlanError


class Counted:
    """A program of which the solver counts at least 40 bytes, and the prediction `times` as many as the solver.

    Attributes:
        asked: the limits it was solved under.
        most: bytes that the solver counts without a limit.
        ends: the limit above which time runs out.
        jumps: the limit from which a plan is predicted faster, with 31 bytes.
    """

    def __init__(self, times=1.0, most=1e9, ends=None, jumps=None):
        self.times, self.most, self.ends, self.jumps = times, most, ends, jumps
        self.asked = []

    def candidate(self, limit, before=None):
        self.asked.append(limit)
        limit = self.most if limit is None else limit
        if limit < 40:
            raise NoPlanError(f"no choice fits in {limit:.0f}", 40.0)
        if self.ends is not None and limit > self.ends:
            raise NoPlanError("no plan was found")
        counted = min(limit, self.most)
        peak, time = self.times * counted, 1 / limit
        if self.jumps is not None and limit >= self.jumps:
            peak, time = 31.0, 0.0
        return SimpleNamespace(
            decision=SimpleNamespace(counted_bytes=counted),
            prediction=SimpleNamespace(peak_memory_bytes=peak),
            time=time,
        )


def peak(problem, limit):
    return within_limit(problem, limit).prediction.peak_memory_bytes


def test_where_the_prediction_is_above_the_limit_the_solver_is_asked_with_a_lower_one():
    problem = Counted(times=1.5, most=100.0)
    assert peak(problem, 90.0) <= 90.0
    assert problem.asked == [None, 90.0, pytest.approx(59.4)]
    assert peak(problem, None) == 150.0


def test_a_limit_that_is_hardly_lower_may_be_lowered_again():
    """Mixtral 8x7B on 32 v5p: 103.6 GB predicted under 102.8, 104.6 under 100.7: a plan by hand was taken."""

    class Uneven(Counted):
        def candidate(self, limit, before=None):
            found = super().candidate(limit, before)
            if limit is not None and limit > 100:
                found.prediction.peak_memory_bytes = 103.6 if limit > 102 else 104.6
            return found

    problem = Uneven(times=1.04, most=110.0)
    assert peak(problem, 102.8) <= 102.8
    assert len(problem.asked) == 4


def test_where_nothing_keeps_the_limit_the_least_predicted_is_said():
    problem = Counted(times=1.5, most=100.0)
    with pytest.raises(NoPlanError, match=r"no plan was found .* within 50 bytes .*: the least predicted .* is 60"):
        within_limit(problem, 50.0)
    assert problem.asked == [None, 50.0, pytest.approx(33.0), pytest.approx(40.0)]
    with pytest.raises(NoPlanError, match=r"no plan was found .*; counted op by op, no choice fits in 30"):
        within_limit(problem, 30.0)


def test_where_the_solver_counts_too_much_the_limit_is_used_up():
    """The toy GPT-2 within 6 MB: 294 us with what uses least memory as the solver counts, 228 with all of the limit."""
    problem = Counted(times=0.5)
    assert peak(problem, 30.0) == pytest.approx(29.7, rel=1e-4)
    assert problem.asked == [None, 30.0, pytest.approx(40.0), pytest.approx(59.4)]
    assert peak(Counted(times=0.5, jumps=41), 30.0) == pytest.approx(20.0, rel=1e-4)
    assert peak(Counted(times=0.5, ends=41), 30.0) == pytest.approx(20.0, rel=1e-4)


@pytest.mark.parametrize(("times", "limit"), [(0.25, 30.0), (0.5, 90.0), (0.9, 90.0)])
def test_the_plan_without_a_limit_is_the_plan_where_it_is_predicted_to_keep_it(times, limit):
    """GPT-2 on v5e: 211 MB are predicted without a limit, and the solver counts 467 MB of any plan."""
    problem = Counted(times=times, most=100.0)
    assert peak(problem, limit) == 100.0 * times
    assert problem.asked == [None]
