"""`plan()` and what goes with it: the steps from a PyTorch program to a sharding plan, readable from top to bottom."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from autoshard.cost.predict import predict
from autoshard.mesh import Mesh, Spec, as_spec, parse_spec
from autoshard.planning.decision import Decision, Progress, plan_graph, within_limit
from autoshard.planning.written import written_plan
from autoshard.stablehlo.reader import build_graph

if TYPE_CHECKING:
    from autoshard.cost.predict import Prediction
    from autoshard.graph.annotations import Annotations
    from autoshard.graph.ops import Graph
    from autoshard.planning.meshes import Watch
    from autoshard.plans.value import Keep, Plan
    from autoshard.program import Program
    from autoshard.solver.problem import Problem
    from autoshard.strategies.carry import Carried

Hint = Spec | Sequence[Sequence[str] | str | None] | str
DEVICE_MEMORY: Literal["device"] = "device"
"""Default of `memory`: what the device kind has."""


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
    fold: bool = True,
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
        fold: let equal layers share their decision (faster; the bound is still that of the whole program).
        time_limit: seconds for the solver; of several shapes each has a quarter, and the best is solved again. An
            interrupt ends it too: with the best plan so far, if there is one.
        seed: of the solver.
        backend: of the solver's integer programs.
        frontend: what captures: `torch_xla`, `torchax` (on any torch from 2.9 on), or `auto`, the first that is
            installed; docs/capture.md.
        annotations: `all` pins every output of every aten op; `least` leaves out what GSPMD's propagation, as modelled,
            chooses by itself (see `lower/least.py`).
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
    from autoshard.frontends.choose import choose

    through = choose(frontend)
    meshes = meshes_for(mesh, devices, device, refine)
    say = progress or (lambda stage: None)
    say("capture")
    with collector_paused():
        program = capture(model, sample_inputs, loss_fn=loss_fn, optimizer=optimizer, train=train, frontend=through)
        return plan_program(
            program,
            meshes,
            memory=memory,
            hints=hints,
            keep=keep,
            fold=fold,
            time_limit=time_limit,
            seed=seed,
            backend=backend,
            annotations=annotations,
            refine=refine,
            dump_problem=dump_problem,
            progress=progress,
        )


def meshes_for(
    mesh: Mesh | Sequence[int] | str | None, devices: int | None, device: str | None, refine: str | None
) -> list[Mesh]:
    """The meshes to plan for; without a device kind, of the target that the choice is refined for.

    Raises:
        ValueError: there is none, or it does not lie on that target.
    """
    from autoshard.planning.meshes import candidate_meshes

    if refine is None:
        return candidate_meshes(mesh, devices, device)
    from autoshard.planning.refine import check_refine

    meshes = candidate_meshes(mesh, devices, device if isinstance(mesh, Mesh) else device_for(device, refine))
    check_refine(refine, meshes[0])
    return meshes


def device_for(device: str | None, refine: str | None) -> str | None:
    """The device kind to plan for: as given, else of the target that the choice is refined for."""
    return refine if device is None and refine is not None and not refine.startswith("cpu") else device


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
    from autoshard.frontends.choose import capture_of

    return capture_of(frontend)(model, sample_inputs, loss_fn=loss_fn, optimizer=optimizer, train=train)


def plan_program(
    program: Program,
    mesh: Mesh | Sequence[Mesh],
    *,
    memory: float | Literal["device"] | None = DEVICE_MEMORY,
    hints: Mapping[str, Hint] | None = None,
    keep: Keep = "all",
    fold: bool = True,
    time_limit: float = 60.0,
    seed: int = 0,
    backend: str = "auto",
    annotations: Literal["all", "least"] = "all",
    refine: str | None = None,
    rivals: bool = True,
    dump_problem: str | Path | None = None,
    progress: Progress | None = None,
) -> Plan:
    """Plan a captured program; of several meshes the one whose predicted step is shortest. See `plan`.

    Args:
        rivals: also predict the plans by hand that are estimated best, and take one that is faster (`rivals.py`).
    """
    check_options(time_limit, seed)
    wanted = _hints(hints)
    (progress or (lambda stage: None))("graph")
    return plan_captured(
        build_graph(program),
        mesh,
        memory=memory,
        hints=wanted,
        keep=keep,
        fold=fold,
        time_limit=time_limit,
        seed=seed,
        backend=backend,
        annotations=annotations,
        refine=refine,
        rivals=rivals,
        dump_problem=dump_problem,
        progress=progress,
    )


def plan_captured(
    graph: Graph,
    mesh: Mesh | Sequence[Mesh],
    *,
    memory: float | Literal["device"] | None = DEVICE_MEMORY,
    hints: Mapping[str, Hint] | None = None,
    keep: Keep = "all",
    fold: bool = True,
    time_limit: float = 60.0,
    seed: int = 0,
    backend: str = "auto",
    annotations: Literal["all", "least"] = "all",
    refine: str | None = None,
    rivals: bool = True,
    dump_problem: str | Path | None = None,
    progress: Progress | None = None,
) -> Plan:
    """`plan_program`, of the graph of a program."""
    from autoshard.lower.least import least
    from autoshard.planning.hints import check_keep, kept
    from autoshard.planning.meshes import plan_best
    from autoshard.planning.rivals import or_by_hand
    from autoshard.plans.value import Options, SolverInfo
    from autoshard.solver import iopddl

    if annotations not in ("all", "least"):
        raise ValueError(f"annotations are all or least, not {annotations!r}")
    say = progress or (lambda stage: None)
    wanted = _hints(hints)
    check_options(time_limit, seed)
    check_keep(keep)

    others: list[Carried] = []

    def plan_on(mesh: Mesh, seconds: float, watch: Watch | None) -> tuple[Plan, Problem]:
        limit = memory_limit(memory, mesh)
        held = kept(graph.program, mesh, wanted, keep)

        def attempt(asked: float | None) -> tuple[Decision, Annotations, Prediction]:
            decided = plan_graph(
                graph,
                mesh,
                memory=asked,
                hints=held,
                fold=fold,
                time_limit=seconds,
                seed=seed,
                backend=backend,
                progress=progress,
                watch=watch if asked == limit else None,  # a bound under a lower limit is not one of the plan asked for
                others=others,
            )
            say("predict")
            written = decided.annotations if annotations == "all" else least(graph, decided.annotations, mesh)
            return decided, written, predict(graph, written, mesh)

        decided, written, prediction = within_limit(limit, attempt)
        if decided.carried is not None:
            others.append(decided.carried)
        solved = decided.solution
        found = written_plan(
            graph,
            mesh,
            written,
            prediction,
            options=Options(memory=limit, hints=held, keep=keep, fold=fold, seed=seed),
            solver=SolverInfo(solved.status.value, solved.objective, solved.bound, solved.gap, solved.backend),
        )
        return found, decided.problem

    found, problem = plan_best([mesh] if isinstance(mesh, Mesh) else mesh, plan_on, time_limit)
    if dump_problem is not None:
        say("dump")
        iopddl.write(problem, dump_problem, name=f"autoshard {found.program.fingerprint[:12]}")

    def written(chosen: Annotations) -> Annotations:
        return chosen if annotations == "all" else least(graph, chosen, found.mesh)

    if refine is None and rivals:
        say("plans by hand")
        return or_by_hand(found, graph, written)
    if refine is None:
        return found
    from autoshard.planning.refine import check_refine, refined

    target = check_refine(refine, found.mesh)
    return refined(found, graph, target, time_limit=time_limit, written=written, progress=progress)


def evaluate(program: Program, plan: Plan) -> Prediction:
    """The cost model's figures for any plan of a program, full or partial, made by whomever.

    What the plan does not give follows from propagation as XLA does it, not from the solver.

    Raises:
        PlanError: the plan is for another program; says the first difference.
    """
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

    by_hand = plan_named(name)
    graph = build_graph(program)
    return written_plan(graph, mesh, by_hand(graph, mesh))


def check_options(time_limit: float, seed: int) -> None:
    """Raise ValueError for options of the solver that mean nothing."""
    if not isinstance(time_limit, int | float) or not time_limit > 0:
        raise ValueError(f"time_limit={time_limit!r}: a positive number of seconds is needed")
    if not isinstance(seed, int):
        raise ValueError(f"seed={seed!r}: a whole number is needed")


def _hints(hints: Mapping[str, Hint] | None) -> dict[str, Spec]:
    if hints is None:
        return {}
    if not isinstance(hints, Mapping) or not all(isinstance(name, str) for name in hints):
        raise ValueError("hints are a dict from names of tensors to specs, such as {'wte.weight': '[model],[]'}")
    return {name: _hint(name, hint) for name, hint in sorted(hints.items())}


def _hint(name: str, hint: Hint) -> Spec:
    try:
        return parse_spec(hint) if isinstance(hint, str) else as_spec(hint)
    except (ValueError, TypeError) as error:
        raise ValueError(f"hint for {name}: {error}") from error


def memory_limit(memory: float | Literal["device"] | None, mesh: Mesh) -> int | None:
    """Bytes per device that a step on `mesh` may use; None is no limit."""
    from autoshard.cost.machine.device import load_device

    if memory == DEVICE_MEMORY:
        return load_device(mesh.device).memory_bytes
    if memory is not None and (not isinstance(memory, int | float) or math.isnan(memory) or math.isinf(memory)):
        raise ValueError(f"memory={memory!r}: a number of bytes per device is needed; None for no limit")
    if memory is not None and memory <= 0:
        raise ValueError(f"memory={memory}: bytes per device must be positive")
    return None if memory is None else int(memory)
