"""A plan carried out by torch_xla: `apply` once, `annotate` around every step.

    plan.apply(model, optimizer)
    for batch in loader:
        with plan.annotate():
            loss = loss_fn(model(batch.to("xla")))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        torch_xla.sync()

Model code stays as it is. Batches may come from an ordinary loader (`.to("xla")` inside or outside the context: inputs
are sharded where the step first reads them), or from `MpDeviceLoader(..., input_sharding=input_shardings(plan))`, which
sends each device its shard only. The whole may stand in a function under `torch_xla.compile(full_graph=True)`.

What may stand in the context beside the planned step: `zero_grad` (before or after), learning-rate schedulers, moving
batches to the device, reading values (`loss.item()` runs what was traced so far), work on CPU tensors, and after the
optimizer's step anything that neither runs a backward pass nor writes parameters, buffers or state. Anything else is
another program, and refused at the op that differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from autoshard.errors import LoweringError
from autoshard.frontends.switches import table as switches
from autoshard.lower.torch_xla import place, runtime
from autoshard.lower.torch_xla.annotator import Annotator
from autoshard.lower.torch_xla.first_steps import FirstSteps
from autoshard.lower.torch_xla.follower import Follower
from autoshard.lower.torch_xla.retrace import annotated_program
from autoshard.lower.torch_xla.schedule import Schedule
from autoshard.plans.annotated import annotations_of
from autoshard.plans.value import Plan
from autoshard.stablehlo.reader import build_graph
from autoshard.strategies.guard import check_compiles, warn_of, warn_of_wrong_sums

__all__ = ["annotate", "annotated_program", "apply", "input_shardings"]


@dataclass(frozen=True)
class Applied:
    """What a plan keeps of `apply` (`Plan.applied`).

    Attributes:
        placed: the model and optimizer on the devices, held weakly.
        schedule: which values of the step are annotated.
        first_steps: of its optimizer, where there is one.
    """

    placed: place.Placed
    schedule: Schedule
    first_steps: FirstSteps | None


_INSIDE: list[Plan] = []
"""The plan whose step runs now, if one does."""


def apply(plan: Plan, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None) -> torch.nn.Module:
    """Move a model, and the state of its optimizer, to the XLA devices, sharded as planned; returns the model.

    Everything happens in place: parameters stay the objects they are. The optimizer's state is created as its own first
    step would, so that the first step is the planned program already, but for optimizers whose first steps are other
    programs (RAdam, SGD with dampening): these run as they are, on what is sharded as planned. Gradients are dropped.
    Turns SPMD on.

    Warns (`WrongSumsWarning`) where XLA would compute wrong numbers under the plan; of one from a file, where it was
    found when the plan was made (`Plan.wrong_sums`): after edits by hand ask `autoshard verify`.

    Raises:
        LoweringError: a runtime with another number of devices than the plan's mesh, a model without weights (meta),
            an optimizer that is missing or cannot begin with planned state.
        PlanMismatchError: a model or optimizer that is not the planned one: the first parameter, buffer or state that
            differs.
    """
    schedule = Schedule.of(plan)
    _check_compiles(plan)
    _warn_of_wrong_sums(plan)
    place.check_model(plan, model, optimizer)
    runtime.check_runtime(plan.mesh)
    place.place_model(plan, model, plan.mesh)
    if optimizer is not None and plan.program.kind == "train":
        place.place_optimizer(plan, model, optimizer, plan.mesh)
    first_steps = None if optimizer is None else FirstSteps(optimizer)
    object.__setattr__(plan, "applied", Applied(place.Placed(model, optimizer), schedule, first_steps))
    return model


def _check_compiles(plan: Plan) -> None:
    """Refuse a plan that no solver made and that the compiler aborts on, where its program is known."""

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
    """Annotate the step that runs in this context as planned; use it anew for every step.

    Args:
        differs: told what of the step is not the planned one, which then runs as it is; without it, that is refused.

    Raises:
        LoweringError: `apply` was not called for this plan, or the context stands in another one.
        PlanMismatchError: at the first op of the step that is not the planned one, or where the step ends early. The
            parameters, buffers, optimizer state and gradients are then as before the step.
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
    try:
        with switches.active(plan.program.switches, model), annotator, watched:
            yield annotator
    finally:
        _INSIDE.clear()


def input_shardings(plan: Plan) -> dict[str, Any]:
    """Input name -> `torch_xla.distributed.spmd.ShardingSpec`, for `MpDeviceLoader(input_sharding=...)`.

    A loader of dicts, under the names in `plan.inputs`, takes the whole mapping; one of single tensors takes its only
    value. One of tuples can take none: torch_xla gives all tensors of a tuple the same sharding.
    """
    import torch_xla.distributed.spmd as xs

    runtime.check_runtime(plan.mesh)
    mesh = runtime.xla_mesh(plan.mesh)
    return {
        name: xs.ShardingSpec(mesh, runtime.partition_spec(plan.mesh, tensor.spec))
        for name, tensor in plan.inputs.items()
    }
