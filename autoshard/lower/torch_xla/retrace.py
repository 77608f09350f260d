"""Traces the annotated step on placeholders: the program that lowering would run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from autoshard.frontends.torch_xla.program import XlaLabels, trace
from autoshard.frontends.tracing.device import is_xla
from autoshard.frontends.tracing.modules import ModulePaths
from autoshard.frontends.tracing.sequence import WRITES_BACK, Call
from autoshard.lower.torch_xla import runtime
from autoshard.lower.torch_xla.regions import executing
from autoshard.lower.torch_xla.schedule import Schedule
from autoshard.lower.torch_xla.step import StepWriter
from autoshard.plans.check import planned_for
from autoshard.plans.value import Plan
from autoshard.program import Program
from autoshard.regions.kernel import Platform
from autoshard.stablehlo.annotate import set_boundary


def annotated_program(
    plan: Plan,
    model: torch.nn.Module,
    sample_inputs: Any,
    *,
    loss_fn: Callable[..., Any] | None = None,
    optimizer: Any = None,
    platform: Platform = "cpu",
) -> bytes:
    """The program of the planned step with its annotations, as `apply` and `annotate` would give it to XLA.

    Traced on placeholders by `capture`'s machinery and `annotate`'s writer: needs neither weights nor the plan's
    devices.

    Args:
        platform: whose kernels attentions are lowered to; the other arguments are those of `capture`.

    Returns:
        StableHLO, MLIR bytecode; HLO ops are labelled `op<k>` as in the captured program.

    Raises:
        PlanMismatchError: the program is not the planned one; names the first difference.
        CaptureError: as `capture`.
    """
    schedule = Schedule.of(plan)
    with runtime.logical_devices():
        program = trace(
            lambda xla, paths: _Annotated(xla, paths, schedule, platform),
            model,
            sample_inputs,
            loss_fn=loss_fn,
            optimizer=optimizer,
            train=plan.program.kind == "train",
            switches=plan.program.switches,
        )
    if (same := planned_for(plan, program)) is not plan:  # its ops in another order
        return annotated_program(same, model, sample_inputs, loss_fn=loss_fn, optimizer=optimizer, platform=platform)
    return set_boundary(program, _arguments(program, schedule), plan.mesh)


def _arguments(program: Program, schedule: Schedule) -> dict[int, Any]:
    return {
        index: schedule.arguments[argument.name].spec
        for index, argument in enumerate(program.arguments)
        if argument.name in schedule.arguments
    }


class _Annotated(XlaLabels):
    """Labels ops as capture does, and annotates instead of marking."""

    def __init__(self, xla: Any, paths: ModulePaths, schedule: Schedule, platform: Platform) -> None:
        self._platform: Platform = platform
        self._writer = StepWriter(schedule, self.producer)
        self._planned = True
        super().__init__(xla, paths)

    def name(self, tensor: torch.Tensor, name: str) -> None:
        """Record an argument, and shard it."""
        super().name(tensor, name)
        argument = self._writer.schedule.arguments.get(name)
        if argument is not None:
            runtime.pin(tensor, self._writer.schedule.mesh, argument.spec)

    def run(self, call: Call) -> Any:
        """Run the op on its planned copies; after the first other op nothing is annotated."""
        ops = self._writer.schedule.ops
        planned = self._planned and call.index < len(ops)
        self._planned = planned and (ops[call.index].name, ops[call.index].inputs) == (call.name, call.inputs)
        if not self._planned:
            return super().run(call)
        args, kwargs = self._writer.before(call)
        with executing(self._writer.schedule, call, self._platform):
            return super().run(Call(call.index, call.func, call.tensors, call.inputs, args, kwargs))

    def mark(self, call: Call, outputs: tuple[torch.Tensor, ...]) -> None:
        """Write the plan's pins."""
        if self._planned:
            self._writer.after(call, outputs)

    def uncounted(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Handle write-backs as in a running step."""
        if str(func) in WRITES_BACK and is_xla(args[0]):
            return self._writer.write_back(func, args, kwargs)
        return super().uncounted(func, args, kwargs)
