"""The least peak usage of any choice: what to tell a user whose memory limit is infeasible."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace

import numpy as np

from autoshard.solver import ilp
from autoshard.solver.dual import Dual
from autoshard.solver.network import Network
from autoshard.solver.objective import evaluate
from autoshard.solver.problem import Array, LeastUsage, Problem
from autoshard.solver.reduce import (
    arc_consistency,
    contract_functions,
    drop_rows,
    eliminate_low_degree,
    remove_dominated,
)

LARGEST_PROGRAM = 500_000
"""Entries of the integer program's matrix up to which it is tried: a solver's time limit does not hold in presolve."""
PEAK_SWEEPS = 20
"""Sweeps of messages before the choice is rounded."""
NAMES_SHOWN = 5
"""How many of the largest users of memory a message names."""


@dataclass(frozen=True)
class LeastPeak:
    """Attributes.

    least: lower bound and reached peak.
    choice: reaches `least.reached`; None if no choice was found.
    time: a point of time that cannot get below `least.bound` (or, when that is not known, where `choice` peaks).
    """

    least: LeastUsage
    choice: list[int] | None
    time: int | None


def least_peak(problem: Problem, *, backend: str = "auto", time_limit: float = 10.0, seed: int = 0) -> LeastPeak:
    """Minimise the peak usage over all choices of finite cost; the limit is ignored.

    Raises:
        ImpossibleError: no choice has finite cost.
    """
    deadline = time.process_time() + time_limit
    known: dict[int, Array] = {}

    def flat(matrix: Array) -> Array:
        if id(matrix) not in known:
            known[id(matrix)] = np.where(np.isfinite(matrix), 0.0, np.inf)
        return known[id(matrix)]

    usage_only = replace(
        problem,
        node_costs=[flat(c) for c in problem.node_costs],
        edge_costs=[flat(m) for m in problem.edge_costs],
        limit=0.0,
    )
    net = Network.of(usage_only)
    size = math.inf
    while size > (size := sum(net.size(i) for i in net.alive)) and time.process_time() < deadline:
        arc_consistency(net, deadline=deadline)
        contract_functions(net, deadline=deadline)
        remove_dominated(net, deadline=deadline)
        eliminate_low_degree(net, deadline=deadline)
    # `room` is now minus the usage common to all choices; the largest is a bound, and rows that cannot reach it go.
    bound = max(0.0, float((-net.room).max(initial=0.0)))
    first = int(net.times[np.argmin(net.room)]) if len(net.room) else None
    net.room = net.room + bound
    drop_rows(net, deadline=deadline)
    eliminate_low_degree(net, deadline=deadline)

    best = _repaired(problem, net, deadline)
    if len(net.room):
        most = evaluate(usage_only, best).peak - bound if best is not None else _most(net)
        name = "highs" if backend == "cp-sat" else ilp.require(backend)  # the violation is not an integer
        left = max(0.1, deadline - time.process_time())
        if most > 0.0 and time.process_time() < deadline and ilp.nonzeros(net) <= LARGEST_PROGRAM:
            choice, overflow, _ = ilp.solve_least_overflow(net, backend=name, time_limit=left, most=most, seed=seed)
            if choice is not None:
                best = _better(usage_only, best, net.expand(choice))
            bound += overflow if math.isfinite(overflow) else 0.0
    if best is None:
        return LeastPeak(LeastUsage(bound, math.inf), None, first)
    result = evaluate(usage_only, best)
    bound = min(bound, result.peak)
    if result.peak - bound <= 1e-9 * result.peak:  # the solver's tolerance
        bound = result.peak
    return LeastPeak(LeastUsage(bound, result.peak), best, result.peak_time)


def _repaired(problem: Problem, net: Network, deadline: float) -> list[int] | None:
    """A choice with a low peak, from local search; None if it contains a forbidden pair."""
    choice = [0] * len(net.cost)
    if net.alive:
        dual = Dual(net)
        dual.multipliers[:] = (
            1.0  # without costs every row has the same multiplier, and the choice uses little everywhere
        )
        for _ in range(PEAK_SWEEPS):
            dual.sweep()
            if time.process_time() > deadline:
                break
        choice = dual.repaired(deadline=deadline)
    full = net.expand(choice)
    return full if math.isfinite(evaluate(replace(problem, limit=None), full).objective) else None


def _better(problem: Problem, one: list[int] | None, two: list[int]) -> list[int] | None:
    second = evaluate(problem, two)
    if math.isinf(second.objective):
        return one
    return two if one is None or second.peak < evaluate(problem, one).peak else one


def _most(net: Network) -> float:
    """A violation that no choice exceeds."""
    highest = sum(float(a.max()) for terms in (*net.node_terms, *net.edge_terms.values()) for a in terms.values())
    return max(0.0, highest - float(net.room.min(initial=0.0)))


def live_at(problem: Problem, choice: list[int], when: int) -> list[tuple[float, str]]:
    """What is live at a point of time under a choice: (bytes per device, name), largest first."""

    def name(node: int) -> str:
        return problem.names[node] if problem.names else f"node {node}"

    found: dict[str, float] = {}
    for usage in problem.node_usages:
        if usage.start <= when < usage.end:
            key = name(usage.index)
            found[key] = found.get(key, 0.0) + float(usage.amount[choice[usage.index]])
    for usage in problem.edge_usages:
        if usage.start <= when < usage.end:
            u, v = problem.edges[usage.index]
            key = f"{name(u)} -> {name(v)}"
            found[key] = found.get(key, 0.0) + float(usage.amount[choice[u], choice[v]])
    return sorted(((b, n) for n, b in found.items() if b > 0.0), key=lambda pair: (-pair[0], pair[1]))


def explain(problem: Problem, found: LeastPeak, *, proven: bool) -> str:
    """A message: the least memory that is possible, when, and what is live there."""
    assert problem.limit is not None
    least = found.least
    if least.bound == least.reached:
        text = f"the least possible peak is {least.reached:,.0f} bytes per device"
    elif math.isinf(least.reached):
        text = f"every choice needs at least {least.bound:,.0f} bytes per device"
    else:
        text = (
            f"every choice needs at least {least.bound:,.0f} bytes per device, "
            f"and the lowest peak found is {least.reached:,.0f}"
        )
    start = "no choice fits" if proven else "no choice was found that fits"
    text = f"{start} in {problem.limit:,.0f} bytes per device: {text}"
    if found.choice is not None and found.time is not None:
        users = live_at(problem, found.choice, found.time)
        shown = ", ".join(f"{n} ({b:,.0f})" for b, n in users[:NAMES_SHOWN])
        rest = f" and {len(users) - NAMES_SHOWN} more" if len(users) > NAMES_SHOWN else ""
        text += f"; it is reached at time {found.time}, where these are live: {shown}{rest}"
    return text
