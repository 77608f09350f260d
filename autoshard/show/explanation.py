"""What each other sharding of a tensor would cost.

The program is solved again with the tensor constrained to each of its possible shardings, all else free. Times are
predictions for the resulting plans, in seconds; bytes are per device.
"""

from __future__ import annotations

import difflib
import fnmatch
import math
import re
from collections.abc import Container, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from autoshard.cost.machine.bars import Bars
from autoshard.cost.predict import Prediction, predict
from autoshard.graph.annotations import Annotations
from autoshard.graph.ops import Graph, Value
from autoshard.mesh import Mesh, Spec
from autoshard.planning.candidate import Candidate
from autoshard.planning.collector import collector_paused
from autoshard.planning.hints import value_named
from autoshard.planning.memory import within_limit
from autoshard.planning.one_mesh import OneMesh, formulated
from autoshard.planning.options import PlanningOptions, Progress, silent
from autoshard.plans.annotated import annotations_of
from autoshard.plans.check import planned_for
from autoshard.plans.json_format import plain
from autoshard.plans.value import NoPlanError, Plan, PlanError, Predicted
from autoshard.program import Program, TensorType
from autoshard.show.report import duration, layout, size
from autoshard.stablehlo.reader import build_graph
from autoshard.strategies.formulate import Formulation
from autoshard.text import columns

_EQUAL = 1e-6
"""Steps whose times differ by at most this fraction count as equal: plans round what they record."""
_MAX_LISTED_TENSORS = 3
"""Most names of changed tensors that are listed."""


@dataclass(frozen=True)
class Alternative:
    """The best plan under one sharding of the tensor.

    Attributes:
        spec: the tensor's sharding.
        step_time_s, compute_s, communication_s, overlapped_s: prediction for that plan; None without one.
        peak_memory_bytes: per device.
        changed: other parameters, buffers and inputs that it splits otherwise than the chosen plan.
        error: why there is no such plan, in words; empty where there is one.
    """

    spec: Spec
    step_time_s: float | None = None
    compute_s: float | None = None
    communication_s: float | None = None
    overlapped_s: float | None = None
    peak_memory_bytes: int | None = None
    changed: tuple[str, ...] = field(default=(), repr=False)
    error: str = ""

    def changes(self) -> str:
        """Tensors split otherwise, numbers of like ones as `*`: `h.*.mlp.c_fc.weight` and 3 more."""
        names = dict.fromkeys(re.sub(r"(?<![^.])\d+(?![^.])", "*", name) for name in self.changed)
        listed = ", ".join(list(names)[:_MAX_LISTED_TENSORS])
        return f"{listed} and {len(names) - _MAX_LISTED_TENSORS} more" if len(names) > _MAX_LISTED_TENSORS else listed


@dataclass(frozen=True)
class Explanation:
    """Costs of every sharding of a tensor.

    Attributes:
        tensor: its name in the request.
        type: of the full tensor.
        chosen: its sharding in the plan.
        alternatives: shortest overlapped step first, then those without a plan; includes the chosen sharding.
        mesh: of the plan.
        bars: how far off the steps may be; None of a plan that was saved without.
    """

    tensor: str
    type: TensorType
    chosen: Spec
    alternatives: tuple[Alternative, ...]
    mesh: Mesh
    bars: Bars | None = None

    def more(self, other: Alternative) -> str:
        """Overlapped step time over the chosen sharding's: `+1.2 ms (+3.4 %)`."""
        mine = self._mine()
        if mine is None or other.overlapped_s is None or other.spec == self.chosen:
            return ""
        difference = other.overlapped_s - mine
        if abs(difference) <= _EQUAL * mine:
            return "equal"
        sign = "+" if difference >= 0 else "-"
        share = f" ({100 * difference / mine:+.2g} %)" if mine else ""
        return f"{sign}{duration(abs(difference))}{share}"

    def _mine(self) -> float | None:
        return next((each.overlapped_s for each in self.alternatives if each.spec == self.chosen), None)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as `explain --json` prints them."""
        return {
            "tensor": self.tensor,
            "shape": list(self.type.shape),
            "dtype": self.type.dtype,
            "chosen": [list(dim) for dim in self.chosen],
            "alternatives": [{**plain(each), "error": each.error or None} for each in self.alternatives],
        }

    def __str__(self) -> str:
        """A table for the terminal."""
        mine = self._mine()
        lines = [("split", "overlapped", "more than chosen", "compute", "communication", "memory", "splits otherwise")]
        errors = []
        for each in self.alternatives:
            near = self.bars is not None and mine and each.overlapped_s and self.bars.tied(mine, each.overlapped_s)
            mark = " *" if each.spec == self.chosen else " ~" if near else ""
            if each.overlapped_s is None:
                errors.append(f"  {layout(each.spec)}: {each.error}")
                continue
            times = (each.overlapped_s, each.compute_s or 0.0, each.communication_s or 0.0)
            step, compute, communication = map(duration, times)
            lines.append(
                (
                    layout(each.spec) + mark,
                    step,
                    self.more(each),
                    compute,
                    communication,
                    size(each.peak_memory_bytes or 0),
                    each.changes(),
                )
            )
        foot = [f"  {self.bars.tie_text()}"] if self.bars else []
        title = f"{self.tensor} {self.type.dtype}[{','.join(map(str, self.type.shape))}], * as planned"
        return "\n".join([title, *("  " + line for line in columns(lines)), *errors, *foot])


def explain(
    plan: Plan,
    tensor: str,
    program: Program | None = None,
    *,
    time_limit: float = 20.0,
    progress: Progress | None = None,
) -> Explanation:
    """Plan again under each sharding of a tensor, and compare costs.

    Args:
        plan: of the program; its options (memory, hints, seed) apply, except a hint for the tensor itself.
        tensor: name of a parameter, buffer, input or optimizer state; with `*` for several that get the same sharding
            (`transformer.h.*.mlp.c_fc.weight`); or a value inside the program: a module's path (its output), or `op12`
            or `op12.1` (output 0 or 1 of aten op 12).
        program: result of `autoshard.capture`; needed for a plan from a file.
        time_limit: of the solver in seconds, per sharding.
        progress: called with the name of each stage as it begins.

    Raises:
        PlanError: no tensor has that name, or the tensors that the pattern fits have different shapes; there is no
            program.
        PlanMismatchError: the plan is for another program.
    """
    return explain_all(plan, [tensor], program, time_limit=time_limit, progress=progress)[0]


def explain_all(
    plan: Plan,
    tensors: Sequence[str],
    program: Program | None = None,
    *,
    time_limit: float = 20.0,
    progress: Progress | None = None,
) -> tuple[Explanation, ...]:
    """`explain` for several tensors."""
    say = progress or silent
    program = program or plan.captured
    if program is None:
        raise PlanError("this plan was read from a file: pass its program, autoshard.capture(model, inputs, ...)")
    plan = planned_for(plan, program)
    with collector_paused():
        say("graph")
        graph = build_graph(program)
        asked = [_asked(graph, plan, name) for name in tensors]
        found = []
        for name, values in zip(tensors, asked, strict=True):
            hints = {
                hinted: spec for hinted, spec in plan.options.hints.items() if value_named(graph, hinted) not in values
            }
            say("strategies")
            formulation = formulated(graph, plan.mesh, plan.options.memory, hints)
            say("solve")
            options = PlanningOptions(seed=plan.options.seed)
            on = OneMesh(graph, plan.mesh, options, hints, plan.options.memory, time_limit)
            found.append(_explained(plan, on, formulation, name, values))
        return tuple(found)


def _asked(graph: Graph, plan: Plan, name: str) -> tuple[Value, ...]:
    """Resolve a name to values."""
    arguments = {
        argument.name: (Value(op), argument.type)
        for op, argument in zip(graph.arguments, graph.program.arguments, strict=True)
        if argument.role != "scalar"
    }
    matches = [name] if name in arguments else fnmatch.filter(arguments, name) if "*" in name else []
    if matches:
        shapes = {arguments[match][1].shape for match in matches}
        if len(shapes) > 1:
            raise PlanError(f"{name} fits tensors of {len(shapes)} shapes: {', '.join(map(str, sorted(shapes)))}")
        specs = {plan.tensor(match).spec for match in matches}
        if len(specs) > 1:
            raise PlanError(
                f"{name} fits tensors that are split differently: {', '.join(sorted(map(layout, specs)))}; name one"
            )
        return tuple(arguments[match][0] for match in matches)
    value = value_named(graph, name)
    if value is not None:
        return (value,)
    near = difflib.get_close_matches(name, arguments, n=3)
    raise PlanError(
        f"the program has no tensor called {name!r}"
        + (f"; did you mean {', '.join(near)}?" if near else "; op12 is the result of aten op 12")
    )


def _explained(plan: Plan, on: OneMesh, formulation: Formulation, name: str, values: Sequence[Value]) -> Explanation:
    graph = on.graph
    try:
        per_value = [formulation.shardings_of(value)[1] for value in values]
    except ValueError as error:
        raise PlanError(f"{name}: {error}") from None
    common = [spec for spec in per_value[0] if all(spec in specs for specs in per_value)]
    planned = annotations_of(plan, graph)
    chosen = planned.pins.get(values[0])
    if chosen is None:  # of a plan that pins only the least
        chosen = predict(graph, planned, plan.mesh).specs[values[0]]
    others = []
    for spec in dict.fromkeys([chosen, *common]):
        if spec == chosen and plan.predicted is not None:
            others.append(_predicted(spec, plan.predicted))
            continue
        fixed = formulation.fixed(dict.fromkeys(values, spec))
        others.append(_alternative(plan, _Fixed(on, fixed), spec, values))
    order = sorted(others, key=lambda each: math.inf if each.overlapped_s is None else each.overlapped_s)
    return Explanation(name, graph.type_of(values[0]), chosen, tuple(order), plan.mesh, Bars.of_info(plan.info))


def _predicted(spec: Spec, figures: Predicted | Prediction, changed: tuple[str, ...] = ()) -> Alternative:
    return Alternative(
        spec,
        figures.step_time_s,
        figures.compute_s,
        figures.communication_s,
        figures.overlapped_s,
        figures.peak_memory_bytes,
        changed,
    )


@dataclass(frozen=True)
class _Fixed:
    """The problem with a tensor constrained to one sharding."""

    on: OneMesh
    formulation: Formulation

    def candidate(self, limit: float | None, before: Candidate | None = None) -> Candidate:
        """The solver's choice under a limit of `limit` bytes per device."""
        on = self.on
        limited = replace(self.formulation, problem=replace(self.formulation.problem, limit=limit))
        return on.better(limited, on.settings(limit), before)


def _alternative(plan: Plan, problem: _Fixed, spec: Spec, values: Sequence[Value]) -> Alternative:
    """The best plan under one sharding of the tensor."""
    try:
        found = within_limit(problem, plan.options.memory)
    except NoPlanError as error:
        if math.isfinite(error.least):
            return Alternative(spec, error=f"needs at least {size(error.least)} per device")
        if plan.options.memory is not None:
            return Alternative(spec, error="no plan was found that keeps the memory limit")
        return Alternative(spec, error="what the program ties to it cannot be split so")
    changed = _changed(plan, problem.on.graph, found.annotations, {value.op for value in values})
    return _predicted(spec, found.prediction, changed)


def _changed(plan: Plan, graph: Graph, written: Annotations, fixed: Container[int]) -> tuple[str, ...]:
    """Parameters, buffers and inputs split otherwise than planned."""
    pins = {value.op: spec for value, spec in written.pins.items()}
    planned = {
        op: (argument, plan.argument(argument))
        for op, argument in zip(graph.arguments, graph.program.arguments, strict=True)
        if argument.role in ("parameter", "buffer", "input") and op not in fixed
    }
    return tuple(
        argument.name
        for op, (argument, before) in planned.items()
        if before is not None and pins.get(op, before.spec) != before.spec
    )
