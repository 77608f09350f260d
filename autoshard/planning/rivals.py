"""Plans by hand that are predicted faster than what the solver chose.

The solver prices each op by itself; the prediction follows the whole compiled program, and the two differ by some
percent. Where a plan that people write is nearly optimal it may be predicted faster than the choice; then it is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from autoshard.graph.ops import Value
from autoshard.mesh import Mesh, Spec, replicated

if TYPE_CHECKING:
    from autoshard.graph.annotations import Annotations
    from autoshard.graph.ops import Graph
    from autoshard.plans.value import Plan, Predicted

PREDICTED_OPS = 10_000
"""Ops of the program times plans by hand that are predicted, at most: what that takes stays below a second or two."""
_MISPRICED_OPS = 5 * PREDICTED_OPS
"""Likewise where the prediction of the solver's own choice says that its prices are wrong for this program."""
_MISPRICED = 0.05
"""A choice is mispriced when its prediction is above the solver's objective by more than this part of it."""
_UNPROVED = 0.05
"""A choice whose gap is above this is held against one plan by hand, however large the program is."""

_FASTER = 1e-4
"""Part of a step by which a plan by hand must be faster."""
_ROUNDING = 1e-6
"""Part of a step by which a recorded time is rounded, at most."""


def by_hand(graph: Graph, mesh: Mesh, hints: Mapping[str, Spec]) -> Iterator[tuple[str, Annotations]]:
    """The plans by hand that hold the hints, best estimated first (`manual/rank.py`); without those XLA gets wrong."""
    from autoshard.cost.machine.device import load_device
    from autoshard.manual import PLANS
    from autoshard.manual.rank import ranked
    from autoshard.planning.hints import value_named
    from autoshard.strategies.guard import UncompilableError, WrongNumbersError, guarded

    wanted = {value_named(graph, name): spec for name, spec in hints.items()}
    for name, made in ranked(graph, mesh, load_device(mesh.device), PLANS):
        if any(value is None or made.pins.get(value) != spec for value, spec in wanted.items()):
            continue
        try:
            yield name, guarded(graph, made, mesh)
        except (UncompilableError, WrongNumbersError):
            continue


def or_by_hand(plan: Plan, graph: Graph, written: Callable[[Annotations], Annotations]) -> Plan:
    """The solver's plan, or the plan by hand that is predicted faster and keeps its memory limit and hints.

    A plan by hand that is the solver's own, predicted alike, is taken too: it pins fewer values, and compilers combine
    more then (on TPU v5e, where ResNet's plan is data parallel, 2.59 ms with every value pinned and 2.55 without).

    Args:
        written: what of a plan's annotations is written (all, or the least that are needed).
    """
    from autoshard.cost.predict import predict
    from autoshard.planning.written import totals, written_plan

    assert plan.predicted is not None
    assert plan.solver is not None
    proved = plan.solver.gap is not None and plan.solver.gap <= _UNPROVED
    mispriced = plan.predicted.step_time_s > (1 + _MISPRICED) * plan.solver.objective
    most = _MISPRICED_OPS if mispriced else PREDICTED_OPS
    count = max(most // max(1, len(graph.ops)), 0 if proved else 1)
    if not count:  # making the plans by hand alone takes 40 CPU s at 200 layers
        return plan
    own = plan.annotations(graph)
    memory, best = plan.options.memory, plan
    fastest = plan.predicted.step_time_s
    for number, (name, made) in enumerate(by_hand(graph, plan.mesh, plan.options.hints)):
        fewer = best is plan and len(made.pins) < len(own.pins)
        same = fewer and _arguments(graph, made) == _arguments(graph, own)
        if number >= count and not same:
            continue
        chosen = written(made)
        prediction = predict(graph, chosen, plan.mesh)
        fits = memory is None or prediction.peak_memory_bytes <= memory
        alike = same and _alike(totals(prediction), plan.predicted)
        if fits and (alike or prediction.step_time_s < fastest * (1 - _FASTER)):
            fastest, solver = prediction.step_time_s, replace(plan.solver, overruled=name)
            found = written_plan(graph, plan.mesh, chosen, prediction, options=plan.options, solver=solver)
            best = replace(found, search=plan.search)
    return best


def _arguments(graph: Graph, annotations: Annotations) -> list[Spec]:
    """How every argument is split: one that nothing is said of (a count of batches, by hand) is whole."""
    whole = ((Value(op), replicated(len(graph.type_of(Value(op)).shape))) for op in graph.arguments)
    return [annotations.pins.get(value, spec) for value, spec in whole]


def _alike(one: Predicted, other: Predicted) -> bool:
    """Whether both communicate the same, in the same time and memory."""
    close = abs(one.step_time_s - other.step_time_s) <= _ROUNDING * other.step_time_s
    return close and (one.collectives, one.peak_memory_bytes) == (other.collectives, other.peak_memory_bytes)
