"""A candidate whose *predicted* memory keeps a limit.

The solver counts memory in program order, group by group; the prediction counts it as the target's compiler runs the
program. Where the second is above the limit, the solver is asked again with a lower one; where the solver counts too
much for there to be a plan, with higher ones, as long as the prediction keeps the limit.
"""

from __future__ import annotations

import math
from typing import Protocol

from autoshard.planning.candidate import Candidate
from autoshard.plans.value import NoPlanError

TRIES = 5
"""How often a plan is sought whose predicted memory is within the limit."""
TIGHTER = 0.99
"""Part of the proportional limit that the solver is asked for next, so that it comes nearer from above."""
WORTH_MORE = 1.02
"""How many times what is predicted the limit must be for the solver to be asked with a higher one."""
_ABOVE = 1 + 1e-6
"""Times the least peak that the solver reaches, what it is asked for to reach it."""


class Solvable(Protocol):
    """What can be solved under one memory limit after another."""

    def candidate(self, limit: float | None, /) -> Candidate:
        """The choice where the solver counts at most `limit` bytes per device.

        Raises:
            NoPlanError: there is none, or none was found in time.
        """


def within_limit(problem: Solvable, limit: float | None) -> Candidate:
    """A candidate whose predicted memory is at most `limit` bytes per device.

    Raises:
        NoPlanError: no plan was found that keeps it; says the least predicted.
    """
    asked, least = limit, math.inf
    refused: NoPlanError | None = None
    first: float | None = None  # the limit that the solver refused
    best: Candidate | None = None
    lowest: int | None = None  # predicted of the plan that uses least as the solver counts
    for _ in range(TRIES):
        try:
            found = problem.candidate(asked)
        except NoPlanError as error:
            if best is not None:  # time was over
                break
            if refused is not None or not math.isfinite(error.least):
                if least == math.inf:
                    raise
                break
            refused, first, asked = error, asked, error.least * _ABOVE  # what uses least as the solver counts
            continue
        predicted = found.prediction.peak_memory_bytes
        if limit is None or asked is None or (predicted <= limit and refused is None):
            return found
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
        # As much less than what the solver counts for this plan as the prediction is above the limit.
        assert found.decision is not None
        asked = TIGHTER * min(found.decision.counted_bytes, asked) * limit / predicted
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


def _lowest(problem: Solvable) -> Candidate | None:
    """The candidate that uses least memory as the solver counts it; None where it finds none in its time."""
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
