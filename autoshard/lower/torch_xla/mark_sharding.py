"""Runs a plan in torch_xla: `apply` once, `annotate` around every step.

    plan.apply(model, optimizer)
    for batch in loader:
        with plan.annotate():
            loss = loss_fn(model(batch.to("xla")))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        torch_xla.sync()

Model code does not change. Batches may come from an ordinary loader (`.to("xla")` inside or outside the context: inputs
are sharded where the step first reads them), or from `MpDeviceLoader(..., input_sharding=input_shardings(plan))`, which
sends each device its shard only. The step may be inside `torch_xla.compile(full_graph=True)`.

The context may also contain `zero_grad`, learning-rate schedulers, transfers of batches, host reads (`loss.item()` runs
what was traced so far), work on CPU tensors, and after the optimizer's step anything that neither runs a backward pass
nor writes parameters, buffers or state. Anything else is refused at the first op that differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from autoshard.errors import LoweringError
from autoshard.frontends.switches import table as switches
from autoshard.frontends.tracing.refusals import refuse_scalers
from autoshard.lower.torch_xla import place, runtime
from autoshard.lower.torch_xla.annotator import Annotator
from autoshard.lower.torch_xla.first_steps import FirstSteps
from autoshard.lower.torch_xla.follower import Follower
from autoshard.lower.torch_xla.regions import warn_of_versions
from autoshard.lower.torch_xla.retrace import annotated_program
from autoshard.lower.torch_xla.schedule import Schedule
from autoshard.plans.annotated import annotations_of
from autoshard.plans.value import Plan
from autoshard.stablehlo.reader import build_graph
from autoshard.strategies.guard import check_compiles, warn_of, warn_of_wrong_sums

__all__ = ["annotate", "annotated_program", "apply", "input_shardings"]


@dataclass(frozen=True)
class Applied:
    """State of `apply` (`Plan.applied`).

    Attributes:
        placed: the model and optimizer on the devices, held weakly.
        schedule: which values of the step are annotated.
        first_steps: of its optimizer, where there is one.
    """

    placed: place.Placed
    schedule: Schedule
    first_steps: FirstSteps | None


_INSIDE: list[Plan] = []
"""The plan of the running step, if any."""


def apply(plan: Plan, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None) -> torch.nn.Module:
    """Move a model, and the state of its optimizer, to the XLA devices, sharded as planned; returns the model.

    Works in place: parameters stay the same objects. The optimizer's state is created as its first step would, so that
    already the first step is the planned program; first steps that are other programs (RAdam, SGD with dampening) run
    without annotations on sharded tensors. Drops gradients. Turns SPMD on.

    Warns (`WrongSumsWarning`) where XLA would miscompute under the plan; for one from a file, from what was found when
    it was made (`Plan.wrong_sums`): after edits by hand run `autoshard verify`.

    Raises:
        LoweringError: a runtime with another number of devices than the plan's mesh, a model without weights (meta),
            an optimizer that is missing or cannot begin with planned state.
        PlanMismatchError: another model or optimizer than the planned one; names the first parameter, buffer or state
            that differs.
    """
    schedule = Schedule.of(plan)
    _check_compiles(plan)
    _warn_of_wrong_sums(plan)
    warn_of_versions(plan)
    place.check_model(plan, model, optimizer)
    runtime.check_runtime(plan.mesh)
    place.place_model(plan, model, plan.mesh)
    if optimizer is not None and plan.program.kind == "train":
        place.place_optimizer(plan, model, optimizer, plan.mesh)
    first_steps = None if optimizer is None else FirstSteps(optimizer)
    object.__setattr__(plan, "applied", Applied(place.Placed(model, optimizer), schedule, first_steps))
    return model


def _check_compiles(plan: Plan) -> None:
    """Refuse a plan by hand on which the compiler aborts, where its program is known."""

    if plan.captured is not None and plan.solver is None:
        graph = build_graph(plan.captured)
        check_compiles(graph, annotations_of(plan, graph), plan.mesh)


def _warn_of_wrong_sums(plan: Plan) -> None:

    program = plan.captured
    if program is None or not any("convolution" in op.name for op in program.ops):
        warn_of(plan.wrong_sums)
        return
    graph = build_graph(program)
    warn_of_wrong_sums(graph, annotations_of(plan, graph), plan.mesh)


@contextmanager
def annotate(plan: Plan, differs: Callable[[str], None] | None = None) -> Iterator[Annotator]:
    """Annotate the step that runs in this context as planned; one context per step.

    Args:
        differs: called with each deviation from the plan, which then runs without annotations; None refuses deviations.

    Raises:
        LoweringError: `apply` was not called for this plan, or the context is nested in another one.
        PlanMismatchError: at the first op that is not the planned one, or where the step ends early. Parameters,
            buffers, optimizer state and gradients are then restored.
    """
    applied: Applied | None = plan.applied
    if applied is None:
        raise LoweringError("this plan has not been applied: call plan.apply(model, optimizer) before plan.annotate()")
    if _INSIDE:
        which = "the same plan's" if _INSIDE[0] is plan else "another plan's"
        raise LoweringError(
            f"plan.annotate() inside {which} annotate(): each would take the other's step for part of its own; use one "
            "around each step, and leave the outer one first"
        )
    placed, schedule, first_steps = applied.placed, applied.schedule, applied.first_steps
    annotator = (
        Annotator(schedule, placed.arguments, placed.snapshot)
        if differs is None
        else Follower(schedule, placed.arguments, placed.gradients(), differs)
    )
    model, optimizer, known = placed.model, placed.optimizer, set(placed.arguments())

    def made() -> None:
        assert optimizer is not None
        try:
            place.place_late_state(plan, model, optimizer, known)
        except RuntimeError as error:
            if differs is None:
                raise
            differs(f"the optimizer's state cannot be placed ({error})")

    watched = nullcontext() if first_steps is None else first_steps.watched(optimizer, annotator, made)
    _INSIDE.append(plan)
    scalers = refuse_scalers(lambda: "a step under annotate()") if differs is None else nullcontext()
    try:
        with scalers, switches.active(plan.program.switches, model), annotator, watched:
            yield annotator
    finally:
        _INSIDE.clear()


def input_shardings(plan: Plan) -> dict[str, Any]:
    """Input name -> `torch_xla.distributed.spmd.ShardingSpec`, for `MpDeviceLoader(input_sharding=...)`.

    A loader of dicts, under the names in `plan.inputs`, takes the whole mapping; one of single tensors takes its only
    value. A loader of tuples cannot use it: torch_xla gives all tensors of a tuple the same sharding.
    """
    import torch_xla.distributed.spmd as xs

    runtime.check_runtime(plan.mesh)
    mesh = runtime.xla_mesh(plan.mesh)
    return {
        name: xs.ShardingSpec(mesh, runtime.partition_spec(plan.mesh, tensor.spec))
        for name, tensor in plan.inputs.items()
    }
