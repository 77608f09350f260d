"""The public functions: from a PyTorch program to its plan.

Light to import: what plans (`road.py`), predicts and reads modules is imported when it is called.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack

from autoshard.frontends.choose import capture_of, choose
from autoshard.mesh import Mesh
from autoshard.planning.meshes import meshes_for
from autoshard.planning.options import DEVICE_MEMORY, Hint, OptionKeywords, PlanningOptions, Progress, silent

if TYPE_CHECKING:
    from autoshard.cost.predict import Prediction
    from autoshard.plans.value import Keep, Plan
    from autoshard.program import Program


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
    hints: Mapping[str, Hint] | None = None,
    keep: Keep = "all",
    time_limit: float = 60.0,
    seed: int = 0,
    backend: str = "auto",
    frontend: str = "auto",
    annotations: Literal["all", "least"] = "all",
    refine: str | None = None,
    dump_problem: str | Path | None = None,
    progress: Progress | None = None,
) -> Plan:
    """Decide how every tensor of a PyTorch program is split over a device mesh.

    Nothing is run and no weights are allocated: the model may be on meta, and no accelerator is needed.

    Args:
        model: a `torch.nn.Module`; left as it is.
        sample_inputs: what the model is called with: a tensor, a tuple, or a dict of keyword arguments (any device).
        mesh: a Mesh, a shape such as `(2, 4)`, or `"2x4"`.
        devices: how many devices there are, when no mesh is given: every shape of up to three axes is tried.
        device: device kind of the mesh, when `mesh` is not a Mesh: `tpu-v5e`, `h100`… also with its topology
            (`tpu-v5e:4x4:2slices`, `h100:2x8`).
        loss_fn: from the model's output to a scalar; default, with an optimizer, the output's own `.loss`.
        optimizer: a torch optimizer over the model's parameters, or a callable from parameters to one. Given a loss
            or an optimizer, a whole training step is planned, else the forward pass.
        memory: bytes per device that the step may use; default what the device kind has; None is no limit.
        hints: name of a parameter, buffer, input or optimizer state -> the sharding it must have; or of a value inside
            the program: a module's path for what it returns, `op12` or `op12.1` for results of aten op 12.
        keep: which hints hold, those among them that the model's and inputs' tensors carry (`mark_sharding`): `all`;
            `io`, no values inside the program; `none`.
        time_limit: seconds for the solver; of several shapes each has a quarter, and the best is solved again. An
            interrupt ends it too: with the best plan so far, if there is one.
        seed: of the solver.
        backend: of the solver's integer programs.
        frontend: what captures: `torch_xla`, `torchax` (torch 2.9 or later), or `auto`, the first that is installed.
        annotations: `all` pins every output of every aten op; `least` not what propagation, as modelled, chooses too.
        refine: a target such as `tpu-v5e:2x4` or `h100:8`, whose devices need not be there: the few best candidates,
            plans written by hand among them, are compiled for it, and the best compiled one is taken. What was compiled
            is recorded in the plan, the predicted choice beside it (see `refine.py`).
        dump_problem: write the strategy-selection problem of the plan to this file, as IOPDDL JSON (`.gz`: packed).
        progress: called with the name of each stage as it begins.

    Raises:
        ValueError: the mesh, a hint or an option is wrong.
        CaptureError: the program cannot be captured; says which op or input, and where.
        PlanError: no plan meets the memory limit; says the least that is possible.
    """
    through = choose(frontend)
    meshes = meshes_for(mesh, devices, device, refine)
    with collector_paused():
        (progress or silent)("capture")
        program = capture(model, sample_inputs, loss_fn=loss_fn, optimizer=optimizer, train=train, frontend=through)
        return plan_program(
            program,
            meshes,
            memory=memory,
            hints=hints,
            keep=keep,
            time_limit=time_limit,
            seed=seed,
            backend=backend,
            annotations=annotations,
            refine=refine,
            dump_problem=dump_problem,
            progress=progress,
        )


@contextmanager
def collector_paused() -> Iterator[None]:
    """Hold back the cyclic garbage collector: a capture and a graph are many small objects that all stay alive.

    With torch loaded, walking all objects again and again doubles the time of building a graph.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def capture(
    model: Any,
    sample_inputs: Any,
    *,
    loss_fn: Any = None,
    optimizer: Any = None,
    train: bool | None = None,
    frontend: str = "auto",
) -> Program:
    """The program that `plan`, `evaluate` and `verify` work on; see `plan` for the arguments."""
    return capture_of(frontend)(model, sample_inputs, loss_fn=loss_fn, optimizer=optimizer, train=train)


def plan_program(program: Program, mesh: Mesh | Sequence[Mesh], **options: Unpack[OptionKeywords]) -> Plan:
    """Plan a captured program; of several meshes the one whose predicted step is shortest.

    Args:
        options: those of `plan` from `memory` on; and `rivals=False`, to leave plans by hand out.
    """
    from autoshard.planning.road import plan_graph
    from autoshard.stablehlo.reader import build_graph

    asked = PlanningOptions(**options)  # type: ignore[arg-type]
    asked.progress("graph")
    return plan_graph(build_graph(program), [mesh] if isinstance(mesh, Mesh) else mesh, asked)


def evaluate(program: Program, plan: Plan) -> Prediction:
    """The cost model's figures for any plan of a program, full or partial, made by whomever.

    What the plan does not give follows from propagation as XLA does it, not from the solver.

    Raises:
        PlanError: the plan is for another program; says the first difference.
    """
    from autoshard.cost.predict import predict
    from autoshard.stablehlo.reader import build_graph

    plan.check_program(program)
    graph = build_graph(program)
    return predict(graph, plan.annotations(graph), plan.mesh)


def register_rule(
    target: str, dims: str | None = None, *, whole: str = "", sums: str = "", partitioned: bool = True
) -> Any:
    """Say how a custom call with this target may be split; see `autoshard.graph.rules.custom.register_rule`.

    >>> autoshard.register_rule("my_attention", "b h q d, b h k d, b h k d -> b h q d", whole="q k d")
    """
    from autoshard.graph.rules import custom as rules_custom

    return rules_custom.register_rule(target, dims, whole=whole, sums=sums, partitioned=partitioned)


def manual_plan(name: str, program: Program, mesh: Mesh) -> Plan:
    """A plan as people write it by hand: `dp`, `fsdp`, `megatron`… (see `autoshard.manual.PLANS`).

    Raises:
        ValueError: no manual plan has that name.
        ManualPlanError: nobody makes such a plan for a program of this kind.
    """
    from autoshard.manual import plan_named
    from autoshard.planning.written import written_plan
    from autoshard.stablehlo.reader import build_graph

    by_hand = plan_named(name)
    graph = build_graph(program)
    return written_plan(graph, mesh, by_hand(graph, mesh))
