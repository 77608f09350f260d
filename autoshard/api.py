"""The public functions: from a PyTorch program to its plan, and the plan's methods.

Light to import: what plans (`planning/road.py`), predicts, lowers and shows is imported on first use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack

from autoshard.frontends.choose import blocks_of, capture_of, switches_for
from autoshard.mesh import Mesh
from autoshard.planning.collector import collector_paused
from autoshard.planning.meshes import meshes_for
from autoshard.planning.options import (
    DEVICE_MEMORY,
    Confirm,
    Hint,
    OptionKeywords,
    PlanningOptions,
    Progress,
    RematOption,
)
from autoshard.plans import json_format, value
from autoshard.plans.check import check_mesh, planned_for
from autoshard.plans.value import Keep

if TYPE_CHECKING:
    from autoshard.cost.compiler.eager import Eager
    from autoshard.cost.predict import Prediction
    from autoshard.graph.annotations import Annotations
    from autoshard.graph.ops import Graph
    from autoshard.lower.dtensor.distribute import DTensorPlan
    from autoshard.lower.to_jax import JaxShardings
    from autoshard.plans.remat import Remat
    from autoshard.program import Program
    from autoshard.show.explanation import Explanation


def plan(
    model: Any,
    sample_inputs: Any,
    *,
    mesh: Mesh | Sequence[int] | str | None = None,
    devices: int | None = None,
    device: str | None = None,
    loss_fn: Callable[..., Any] | None = None,
    optimizer: Any = None,
    train: bool | None = None,
    memory: float | Literal["device"] | None = DEVICE_MEMORY,
    remat: RematOption = "as-is",
    micro_batches: int = 1,
    clip_grad_norm: float | None = None,
    hints: Mapping[str, Hint] | None = None,
    keep: Keep = "all",
    fold: bool = True,
    time_limit: float = 60.0,
    seed: int = 0,
    backend: str = "auto",
    frontend: str = "auto",
    annotations: Literal["all", "least"] = "all",
    refine: str | None = None,
    confirm: Confirm = "never",
    dump_problem: str | Path | None = None,
    progress: Progress | None = None,
) -> Plan:
    """Decide how every tensor of a PyTorch program is split over a device mesh.

    Runs nothing and allocates no weights: the model may be on meta, and no accelerator is needed.

    Args:
        model: a `torch.nn.Module`; left as it is.
        sample_inputs: arguments of the model: a tensor, a tuple, or a dict of keyword arguments (any device).
        mesh: a Mesh, a shape such as `(2, 4)`, or `"2x4"`.
        devices: number of devices, without a mesh: every shape of up to three axes is tried.
        device: its device kind, if `mesh` is not a Mesh, also with a topology: `h100:2x8`, `tpu-v5e:4x4:2slices`.
        loss_fn: from the model's output to a scalar; default, with an optimizer, the output's own `.loss`.
        optimizer: a torch optimizer over the model's parameters, or a callable from parameters to one. With a loss or
            an optimizer a training step is planned, else the forward pass.
        memory: limit of the step in bytes per device; default what runtimes leave of the kind's; None is no limit.
        remat: what the backward pass recomputes: `as-is`, what checkpoints say; `none`; `full`, each of equal blocks;
            `products`, these but for products and attentions; `auto`: chosen by block (`remat.py`).
        micro_batches: forward and backward passes of a step, each on inputs like the samples, before one update.
        clip_grad_norm: norm that gradients are clipped to before the update (`torch.nn.utils.clip_grad_norm_`).
        hints: name of a parameter, buffer, input or optimizer state -> the sharding it must have; or of a value inside
            the program: a module's path (its output), `op12` or `op12.1` (outputs of aten op 12).
        keep: which hints, `mark_sharding` on tensors too, constrain it: `all`; `io`, none inside the program; `none`.
        time_limit: of the solver, in CPU seconds; each of several mesh shapes gets a quarter, the best is solved again.
        seed, fold, backend: of the solver, `backend` of its integer programs; `fold` has no effect.
        frontend: `torch_xla`, `torchax` (torch 2.9 or later), or `auto`, the first that is installed.
        annotations: `all` pins every output of every aten op; `least` only those that propagation would not choose.
        refine: a target (`h100:8`, none of which is needed): the best few candidates are compiled, the best one taken.
        confirm: whether the target's compiler has to say that the plan fits (`confirm.py`); `auto`: where the predicted
            peak is above 80 % of `memory`.
        dump_problem: write the strategy-selection problem of the plan to this file, as IOPDDL JSON (`.gz`: compressed).
        progress: called with the name of each stage as it begins.

    Raises:
        ValueError: the mesh, a hint or an option is wrong.
        CaptureError: the program cannot be captured; names the op or input, and where.
        PlanError: no plan meets the memory limit, as predicted or as compiled; says the least found.
    """
    meshes = meshes_for(mesh, devices, device, refine, confirm)
    wanted: OptionKeywords = {"memory": memory, "hints": hints, "keep": keep, "fold": fold, "annotations": annotations}
    wanted |= {"time_limit": time_limit, "seed": seed, "backend": backend, "dump_problem": dump_problem}
    wanted |= {"refine": refine, "confirm": confirm, "progress": progress}
    asked = PlanningOptions(**wanted)  # type: ignore[arg-type]

    def captured(remat: Remat | None) -> Program:
        given: Any = {"loss_fn": loss_fn, "optimizer": optimizer, "train": train, "frontend": frontend, "remat": remat}
        given |= {"micro_batches": micro_batches, "clip_grad_norm": clip_grad_norm}
        return capture(model, sample_inputs, **given, device=meshes[0].device)

    with collector_paused():
        from autoshard.planning.road import plan_model

        trains = bool(loss_fn is not None or optimizer is not None) if train is None else train
        blocks = blocks_of(model) if trains and remat != "as-is" else ()
        return Plan.of(plan_model(captured, blocks, remat, meshes, asked))


def capture(
    model: Any,
    sample_inputs: Any,
    *,
    loss_fn: Any = None,
    optimizer: Any = None,
    train: bool | None = None,
    frontend: str = "auto",
    device: str | None = None,
    remat: Remat | None = None,
    micro_batches: int = 1,
    clip_grad_norm: float | None = None,
) -> Program:
    """Capture a program for `plan_program`, `evaluate` and `verify`; arguments as for `plan`.

    Args:
        device: kind of device that the program is for: attentions that it has fused kernels for are kept as one op.
            Without one they are written out.
        remat: path of a module -> `all` or `products`, what is recomputed of it; replaces the model's own checkpoints.
        micro_batches: forward and backward passes of a step before one update.
        clip_grad_norm: norm that gradients are clipped to before the update.
    """
    switches = switches_for(device, remat, micro_batches, clip_grad_norm)
    given = {"loss_fn": loss_fn, "optimizer": optimizer, "train": train, "switches": switches}
    return capture_of(frontend)(model, sample_inputs, **given)


def plan_program(program: Program, mesh: Mesh | Sequence[Mesh], **options: Unpack[OptionKeywords]) -> Plan:
    """Plan a captured program; of several meshes, on the one with the shortest predicted step.

    Args:
        options: those of `plan` from `memory` on; and `rivals=False`, to ignore plans by hand.
    """
    from autoshard.planning.road import plan_graph
    from autoshard.stablehlo.reader import build_graph

    asked = PlanningOptions(**options)  # type: ignore[arg-type]
    asked.progress("graph")
    return Plan.of(plan_graph(build_graph(program), [mesh] if isinstance(mesh, Mesh) else mesh, asked))


def evaluate(program: Program, plan: value.Plan, eager: Eager | None = None) -> Prediction:
    """Predict any plan of a program, full or partial.

    Shardings that the plan lacks follow from XLA's propagation, not from the solver.

    Args:
        eager: PyTorch without a compiler as the runtime, instead of XLA; for plans on GPUs.

    Raises:
        PlanError: the plan is for another program; names the first difference.
        ValueError: `eager` on other devices.
    """
    from autoshard.cost.predict import predict
    from autoshard.plans.annotated import annotations_of
    from autoshard.stablehlo.reader import build_graph

    plan = planned_for(plan, program)
    graph = build_graph(program)
    return predict(graph, annotations_of(plan, graph), plan.mesh, eager=eager)


def register_rule(
    target: str, dims: str | None = None, *, whole: str = "", sums: str = "", partitioned: bool = True
) -> Any:
    """Register the sharding rule of custom calls with this target; see `autoshard.graph.rules.custom.register_rule`.

    >>> autoshard.register_rule("my_attention", "b h q d, b h k d, b h k d -> b h q d", whole="q k d")
    """
    from autoshard.graph.rules import custom as rules_custom

    return rules_custom.register_rule(target, dims, whole=whole, sums=sums, partitioned=partitioned)


def manual_plan(name: str, program: Program, mesh: Mesh) -> Plan:
    """A plan by hand: `dp`, `fsdp`, `megatron`… (see `autoshard.manual.PLANS`).

    Raises:
        ValueError: no manual plan has that name.
        ManualPlanError: the plan does not apply to the program.
    """
    from autoshard.manual import plan_named
    from autoshard.planning.written import written_plan
    from autoshard.stablehlo.reader import build_graph

    by_hand = plan_named(name)
    graph = build_graph(program)
    return Plan.of(written_plan(graph, mesh, by_hand(graph, mesh)))


@dataclass(frozen=True)
class Plan(value.Plan):
    """A plan with methods, each delegating to the package that implements it."""

    @classmethod
    def of(cls, plan: value.Plan) -> Plan:
        """The same plan, with methods."""
        if isinstance(plan, Plan):
            return plan
        return cls(**{each.name: getattr(plan, each.name) for each in fields(plan) if each.init})

    def to_json(self) -> str:
        """The plan as JSON; equal plans give equal text."""
        return json_format.dumps(self)

    @classmethod
    def from_json(cls, text: str | bytes, source: str = "plan") -> Plan:
        """The plan that `to_json` wrote; `source` names the text in messages.

        Raises:
            PlanError: not JSON, another format, an unknown version, or malformed: with the path of the bad field.
        """
        return cls.of(json_format.loads(text, source))

    def save(self, path: str | Path) -> None:
        """Write the plan to a file atomically.

        Raises:
            PlanError: the path cannot be written.
        """
        json_format.save(self, path)

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan that `save` wrote.

        Raises:
            PlanError: the file cannot be read, or as `from_json`.
        """
        return cls.of(json_format.load(path))

    def check_program(self, program: Program) -> None:
        """Refuse a program that is not the planned one; its ops may run in another order.

        Raises:
            PlanMismatchError: names the first difference: kind, switches, argument, aten op.
        """
        planned_for(self, program)

    def check_mesh(self, mesh: Mesh) -> None:
        """Refuse a mesh of another shape, with other axis names, or of another device kind.

        Raises:
            PlanMismatchError: with both meshes.
        """
        check_mesh(self, mesh)

    def annotations(self, graph: Graph) -> Annotations:
        """The annotations of this plan on the graph of its program.

        Raises:
            PlanMismatchError: the graph is of another program.
            PlanError: two entries pin one value differently, or an entry names a value that the graph lacks.
        """
        from autoshard.plans.annotated import annotations_of

        return annotations_of(self, graph)

    def __str__(self) -> str:
        """The report: shardings per module, totals, what could not be split."""
        from autoshard.show.report import plan_report

        return plan_report(self)

    def to_html(self, explanations: Sequence[Explanation] = ()) -> str:
        """The plan as one self-contained HTML page, with `autoshard.explain`'s results for some tensors."""
        from autoshard.show.page import page

        return page(self, explanations)

    def apply(self, model: Any, optimizer: Any = None) -> Any:
        """Move `model` to the XLA devices, sharded as planned, with its optimizer state; see `lower.torch_xla`."""
        from autoshard.lower.torch_xla.mark_sharding import apply

        return apply(self, model, optimizer)

    def annotate(self) -> AbstractContextManager[Any]:
        """A context for one ordinary step, whose values are annotated as planned; see `lower.torch_xla`."""
        from autoshard.lower.torch_xla.mark_sharding import annotate

        return annotate(self)

    def to_jax(self, devices: Sequence[Any] | None = None) -> JaxShardings:
        """The plan for jax's devices: NamedShardings, and the step as a function; see `lower.to_jax`."""
        from autoshard.lower.to_jax import to_jax

        return to_jax(self, devices)

    def to_dtensor(self, device_mesh: Any) -> DTensorPlan:
        """The plan as DTensor placements on a `torch.distributed` device mesh; see `lower.dtensor`."""
        from autoshard.lower.dtensor.distribute import to_dtensor

        return to_dtensor(self, device_mesh)

    def to_tp_plan(self, model: Any, axis: str | None = None) -> tuple[dict[str, str], list[str]]:
        """The plan as transformers' `tp_plan`, and what that cannot express; see `lower.tp_plan`."""
        from autoshard.lower.tp_plan import to_tp_plan

        return to_tp_plan(self, model, axis)
