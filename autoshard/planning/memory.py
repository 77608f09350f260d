"""Solve until the *predicted* memory is within a limit.

The solver counts memory in program order, group by group; the prediction follows the target's compiler. Where the
prediction exceeds the limit, the solver gets a lower one; where the solver's count finds no feasible plan, it gets
none, then higher ones, as long as the prediction stays within the limit. Where it counts near the limit and much less
is predicted, it gets none either, and the faster plan is taken.
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
LOOSE = 0.8
"""Part of the limit: a peak predicted below and counted above says that the solver's count may be in the way."""
_ABOVE = 1 + 1e-6
"""Factor on the least peak that the solver reports, to make it feasible as a limit."""


class Solvable(Protocol):
    """What can be solved under one memory limit after another."""

    def candidate(self, limit: float | None, /) -> Candidate:
        """The solver's choice under a limit of `limit` bytes per device.

        Raises:
            NoPlanError: there is none, or none was found in time.
        """


def within_limit(problem: Solvable, limit: float | None) -> Candidate:
    """A candidate whose predicted peak is at most `limit` bytes per device.

    Raises:
        NoPlanError: none was found; says the least predicted peak.
    """
    asked, least = limit, math.inf
    refused: NoPlanError | None = None
    first: float | None = None  # the limit that the solver found infeasible
    best: Candidate | None = None
    freed = False  # whether the plan without a limit is known to exceed it
    lowest: int | None = None  # predicted peak of the plan of least memory by the solver's count
    for _ in range(TRIES):
        try:
            found = problem.candidate(asked)
        except NoPlanError as error:
            if best is not None:  # time was over
                break
            if refused is None and least == math.inf:
                freed = True
                if (free := _free(problem, limit)) is not None:
                    return free
            if refused is not None or not math.isfinite(error.least):
                if least == math.inf:
                    raise
                break
            refused, first, asked = error, asked, error.least * _ABOVE  # least memory by the solver's count
            continue
        predicted = found.prediction.peak_memory_bytes
        if limit is None or asked is None:
            return found
        if predicted <= limit and refused is None:
            counted = math.inf if found.decision is None else found.decision.counted_bytes
            free = _free(problem, limit) if predicted < LOOSE * limit < counted < math.inf else None
            return found if free is None or free.time >= found.time else free
        if best is not None and (predicted > limit or found.time >= best.time):
            break
        if predicted <= limit:
            best = found
            if TIGHTER * limit <= predicted * WORTH_MORE:
                break
            asked *= TIGHTER * limit / predicted
            continue
        least = min(least, predicted)
        if refused is not None:
            lowest = predicted
            break
        # Lower the solver's limit by the ratio of the limit to the prediction for this plan.
        assert found.decision is not None
        asked = TIGHTER * min(found.decision.counted_bytes, asked) * limit / predicted
    if best is None and not freed:
        best = _free(problem, limit)
    if best is not None:
        return best
    assert limit is not None
    if lowest is None and least < math.inf:
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


def _free(problem: Solvable, limit: float | None) -> Candidate | None:
    """The solver's choice without a limit, if it is predicted to be within `limit`."""
    if limit is None:
        return None
    try:
        found = problem.candidate(None)
    except NoPlanError:
        return None
    return found if found.prediction.peak_memory_bytes <= limit else None


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
