"""Solve until the *predicted* memory is within a limit.

First without a limit: where that plan is predicted to be within it, none is faster. Otherwise the solver counts memory
in program order, group by group; the prediction follows the target's compiler. Where the prediction exceeds the limit,
the solver gets a lower one; where the solver's count finds no feasible plan, it gets none, then higher ones, as long as
the prediction stays within the limit.
"""

from __future__ import annotations

import math
from typing import Protocol

from autoshard.planning.candidate import Candidate
from autoshard.plans.value import NoPlanError

TRIES = 5
"""Most solves in search of a plan whose predicted memory is within the limit."""
TIGHTER = 0.99
"""Factor on the proportional limit of the next solve, so that its prediction undershoots the limit."""
WORTH_MORE = 1.02
"""How many times the predicted memory the limit must be for a solve with a higher limit."""
SAME, LOWER = 0.98, 0.95
"""Part of the predicted memory of one solve that is no less for the next, with so much lower a limit: no lower one
helps.
"""
_ABOVE = 1 + 1e-6
"""Factor on the least peak that the solver reports, to make it feasible as a limit."""


class Solvable(Protocol):
    """What can be solved under one memory limit after another."""

    def candidate(self, limit: float | None, before: Candidate | None = None, /) -> Candidate:
        """The solver's choice under a limit of `limit` bytes per device.

        Args:
            before: that under another limit.

        Raises:
            NoPlanError: there is none, or none was found in time.
        """


def within_limit(problem: Solvable, limit: float | None, free: Candidate | None = None) -> Candidate:
    """A candidate whose predicted peak is at most `limit` bytes per device.

    Args:
        free: the candidate without a limit, where it is known.

    Raises:
        NoPlanError: none was found; says the least predicted peak.
    """
    least = math.inf
    try:
        free = free or problem.candidate(None)
        least = free.prediction.peak_memory_bytes
        if limit is None or least <= limit:
            return free
    except NoPlanError:
        if limit is None:
            raise
    asked, latest = limit, free
    refused: NoPlanError | None = None
    first: float | None = None  # the limit that the solver found infeasible
    best: Candidate | None = None
    lowest: int | None = None  # predicted peak of the plan of least memory by the solver's count
    for _ in range(TRIES):
        try:
            latest = found = problem.candidate(asked, latest)
        except NoPlanError as error:
            if best is not None:  # time was over
                break
            if refused is not None or not math.isfinite(error.least):
                if least == math.inf:
                    raise
                break
            refused, first, asked = error, asked, error.least * _ABOVE  # least memory by the solver's count
            continue
        predicted = found.prediction.peak_memory_bytes
        if predicted <= limit and refused is None:
            return found
        if best is not None and (predicted > limit or found.time >= best.time):
            break
        if predicted <= limit:
            best = found
            if TIGHTER * limit <= predicted * WORTH_MORE:
                break
            asked *= TIGHTER * limit / predicted
            continue
        stuck = asked < LOWER * limit and predicted > SAME * least
        least = min(least, predicted)
        if refused is not None:
            lowest = predicted
        if refused is not None or stuck:
            break
        # Lower the solver's limit by the ratio of the limit to the prediction for this plan.
        assert found.decision is not None
        asked = TIGHTER * min(found.decision.counted_bytes, asked) * limit / predicted
    if best is not None:
        return best
    if lowest is None:
        plainest = _lowest(problem)
        if plainest is not None and plainest.prediction.peak_memory_bytes <= limit:
            return plainest
        lowest = None if plainest is None else plainest.prediction.peak_memory_bytes
    least = least if lowest is None else lowest  # what is found again when it is asked for
    said = f"; counted op by op, {refused}" if refused is not None and first == limit else ""
    raise NoPlanError(
        f"no plan was found whose predicted memory is within {limit:,.0f} bytes per device: "
        f"the least predicted of those tried is {least:,.0f}{said}",
        least,
    )


def _lowest(problem: Solvable) -> Candidate | None:
    """The candidate of least memory by the solver's count; None where the solver finds none in its time."""
    try:
        return problem.candidate(0.0)
    except NoPlanError as error:
        if not math.isfinite(error.least):
            return None
        asked = error.least * _ABOVE
    try:
        return problem.candidate(asked)
    except NoPlanError:
        return None
