"""Compares plans of one program: the automatic one, plans by hand, and any other.

One cost model predicts every plan on the same mesh. With a target, the target's own compiler compiles the program
under each plan, and the same device model times the result (`verify/judge.py`). Bytes are per device, times are
seconds of one step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from autoshard.api import Plan
from autoshard.cost.machine.bars import Bars, bar_text
from autoshard.cost.machine.device import load_device, slop_of, with_slop
from autoshard.errors import ManualPlanError
from autoshard.frontends.choose import blocks_of, capture_of, switches_for
from autoshard.graph.ops import Graph
from autoshard.manual import PLANS, plan_named
from autoshard.mesh import Mesh, describe_mesh
from autoshard.planning.collector import collector_paused
from autoshard.planning.meshes import candidate_meshes
from autoshard.planning.options import DEVICE_MEMORY, Hint, PlanningOptions, Progress
from autoshard.planning.road import plan_graph, remat_of_all
from autoshard.planning.written import written_plan
from autoshard.plans.annotated import annotations_of
from autoshard.plans.check import planned_for
from autoshard.plans.json_format import plain
from autoshard.plans.value import CollectiveTotal, NoPlanError, PlanMismatchError, Predicted
from autoshard.program import Program
from autoshard.show.plots import plot_comparison
from autoshard.show.report import bytes_by_kind, duration, mesh_text, scheduler_lines, size
from autoshard.stablehlo.annotate import annotate, check_steps
from autoshard.stablehlo.reader import build_graph
from autoshard.strategies.guard import UncompilableError
from autoshard.text import columns
from autoshard.verify.check import compare_compiled
from autoshard.verify.compile import CompileError
from autoshard.verify.cycles import check_clock
from autoshard.verify.targets import Target, default_target, on_target, parse_target

AUTO = "auto"


@dataclass(frozen=True)
class Row:
    """One plan.

    Attributes:
        name: its name in the comparison.
        plan: with its prediction.
        compiled: the same figures of the compiled program; None where nothing was compiled.
        fidelity: bytes of collectives without a counterpart over bytes compiled; None where nothing was compiled.
        clock_s: step time of the compiled program by libtpu's own estimates; None where they were not asked for.
        error: why the target's compiler failed on it, in words; empty where it did not, or was not asked.
    """

    name: str
    plan: Plan = field(repr=False)
    compiled: Predicted | None = None
    fidelity: float | None = None
    clock_s: float | None = None
    error: str = ""

    @property
    def predicted(self) -> Predicted:
        """Prediction of the cost model."""
        assert self.plan.predicted is not None
        return self.plan.predicted


@dataclass(frozen=True)
class Comparison:
    """Plans of one program on one mesh, with their figures.

    Attributes:
        mesh: the mesh of all plans.
        memory: limit in bytes per device; None is no limit.
        rows: in the order asked for.
        left_out: name -> why the plan does not apply to this program.
        target: what the rows are compiled for; empty when nothing is.
    """

    mesh: Mesh
    memory: int | None
    rows: tuple[Row, ...]
    left_out: Mapping[str, str] = field(default_factory=dict)
    target: str = ""

    def __getitem__(self, name: str) -> Row:
        """The plan of that name.

        Raises:
            KeyError: there is none; says which there are.
        """
        for row in self.rows:
            if row.name == name:
                return row
        raise KeyError(f"no plan {name!r} was compared; there are {', '.join(row.name for row in self.rows)}")

    def ratio(self, *, compiled: bool = False) -> float | None:
        """Overlapped step time of `auto` over that of the best other plan that fits in memory.

        None where `auto` or every other plan is missing.
        """
        times = {row.name: each.overlapped_s for row, each in self._figures(compiled) if self._fits(each)}
        others = [seconds for name, seconds in times.items() if name != AUTO]
        return times[AUTO] / min(others) if AUTO in times and others else None

    @property
    def bars(self) -> Bars | None:
        """How far off the figures may be: of the plan that is least sure."""
        found = [bars for row in self.rows if (bars := Bars.of_info(row.plan.info)) is not None]
        return max(found, key=lambda bars: bars.step, default=None)

    def tied(self, *, compiled: bool = False) -> bool | None:
        """Whether `auto` and the best other plan that fits are a tie; None where one of them is missing."""
        ratio, bars = self.ratio(compiled=compiled), self.bars
        return None if ratio is None or bars is None else bars.tied(1.0, ratio)

    def _figures(self, compiled: bool) -> list[tuple[Row, Predicted]]:
        both = [(row, row.compiled if compiled else row.predicted) for row in self.rows]
        return [(row, figures) for row, figures in both if figures is not None]

    def _fits(self, figures: Predicted) -> bool:
        return self.memory is None or figures.peak_memory_bytes <= self.memory

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as `compare --json` prints them."""
        return {
            "mesh": {
                "shape": list(self.mesh.shape),
                "axis_names": list(self.mesh.axis_names),
                "device": self.mesh.device,
            },
            "memory": self.memory,
            "target": self.target or None,
            "plans": [
                {
                    "name": row.name,
                    "predicted": plain(replace(row.predicted, modules=())),
                    "bars": row.plan.info.get("bars"),
                    "fits_memory": self._fits(row.predicted),
                    "compiled": row.compiled and plain(replace(row.compiled, modules=())),
                    "fidelity": row.fidelity,
                    "compiler_step_time_s": row.clock_s,
                    "error": row.error or None,
                }
                for row in self.rows
            ],
            "left_out": dict(self.left_out),
            "tie": {
                "predicted": self.tied(),
                "compiled": self.tied(compiled=True) if self.target else None,
            },
            "auto_over_best": {
                "predicted": self.ratio(),
                "compiled": self.ratio(compiled=True) if self.target else None,
            },
        }

    def __str__(self) -> str:
        """Tables for the terminal."""
        limit = "" if self.memory is None else f", {size(self.memory)} each"
        parts = [f"On {mesh_text(self.mesh)}{limit}; predicted:", *self._table(compiled=False)]
        if any(row.compiled for row in self.rows):
            parts += ["", f"Compiled for {self.target}, under the same device model:", *self._table(compiled=True)]
        parts += ["", "Bytes of collectives, per device and step, predicted:", *self._bytes(compiled=False)]
        if any(row.compiled for row in self.rows):
            parts += ["", "Bytes of collectives, per device and step, compiled:", *self._bytes(compiled=True)]
        notes = [f"{name}: left out; {why}" for name, why in self.left_out.items()]
        notes += [f"{row.name}: {line}" for row in self.rows for line in scheduler_lines(row.plan.mesh)]
        notes += [f"{row.name}: not compiled; {row.error}" for row in self.rows if row.error]
        return "\n".join([*parts, *([""] if notes else []), *notes])

    def _table(self, *, compiled: bool) -> list[str]:
        header = ["plan", "step", "overlapped", "compute", "communication", "MFU", "bytes moved", "memory", "of limit"]
        if compiled:
            header.append("bytes mispredicted")
        clocked = compiled and any(row.clock_s is not None for row in self.rows)
        if clocked:
            header.append("step by libtpu")
        lines, bars = [header], self.bars
        fitting = [figures.overlapped_s for _, figures in self._figures(compiled) if self._fits(figures)]
        tied = [each for each in fitting if bars is not None and bars.tied(min(fitting), each)]
        for row, figures in self._figures(compiled):
            times = (figures.step_time_s, figures.overlapped_s, figures.compute_s, figures.communication_s)
            moved, peak = sum(each.bytes for each in figures.collectives), figures.peak_memory_bytes
            share = "" if self.memory is None else f"{peak / self.memory:.0%}" + ("" if self._fits(figures) else " !")
            near = len(tied) > 1 and self._fits(figures) and figures.overlapped_s in tied
            line = [row.name + " ~" * near, *map(duration, times), f"{figures.mfu:.1%}", size(moved), size(peak), share]
            if compiled:
                line.append("-" if row.fidelity is None else f"{row.fidelity:.1%}")
            if clocked:
                line.append("-" if row.clock_s is None else duration(row.clock_s))
            lines.append(line)
        ratio = self.ratio(compiled=compiled)
        said = [] if ratio is None else [f"  auto / best other that fits: {ratio:.3f}"]
        if bars is not None and not compiled:
            said += [f"  steps {bars.step_text()}, memory {bar_text(bars.memory)}. {bars.tie_text()}"]
        return ["  " + line for line in columns(lines, right_from=1)] + said

    def _bytes(self, *, compiled: bool) -> list[str]:
        rows = self._figures(compiled)
        kinds = sorted({each.kind for _, figures in rows for each in figures.collectives})
        if not kinds:
            return ["  none"]
        lines = [["plan", *kinds]]
        for row, figures in rows:
            moved = bytes_by_kind(figures)
            lines.append([row.name, *(size(moved[kind]) if kind in moved else "-" for kind in kinds)])
        return ["  " + line for line in columns(lines, right_from=1)]

    def plot(self, *, compiled: bool = False) -> Any:
        """A matplotlib figure: step time by parts, MFU, bytes per collective, memory against the limit (extra
        `notebooks`); with `compiled` of the compiled programs."""
        what = f"compiled for {self.target}" if compiled else "predicted"
        title = f"{'x'.join(map(str, self.mesh.shape))} of {self.mesh.device}, {what}"
        figures = {row.name: each for row, each in self._figures(compiled)}
        return plot_comparison(figures, self.memory, title, self.bars.step if self.bars else 0.0)


def compare(
    model: Any,
    sample_inputs: Any,
    *,
    mesh: Mesh | Sequence[int] | str | None = None,
    device: str | None = None,
    loss_fn: Callable[..., Any] | None = None,
    optimizer: Any = None,
    train: bool | None = None,
    plans: Sequence[str] | None = None,
    others: Mapping[str, Plan] | None = None,
    target: str | None = None,
    cycles: bool = False,
    memory: float | Literal["device"] | None = DEVICE_MEMORY,
    remat: Literal["as-is", "none", "products", "full"] = "as-is",
    micro_batches: int = 1,
    clip_grad_norm: float | None = None,
    hints: Mapping[str, Hint] | None = None,
    time_limit: float = 60.0,
    progress: Progress | None = None,
) -> Comparison:
    """Compare the automatic plan of a program with plans by hand, and any others.

    Args:
        model, sample_inputs, mesh, device, loss_fn, optimizer, train, time_limit, progress: as for `plan`; without a
            device kind, that of the target.
        memory, hints: as for `plan`, for the automatic plan.
        remat, micro_batches, clip_grad_norm: as for `plan`, of the step that all plans are for.
        plans: names: `auto`, and those of `autoshard.manual.PLANS`; default `auto` and all that apply.
        others: name -> any other plan of the same program for the same mesh.
        target: also compile every plan for it, such as `tpu-v5e:2x4` or `h100:8`; its devices need not be present.
        cycles: a TPU's compiler also estimates every kernel (minutes for each plan).

    Raises:
        ValueError: a name that no plan has; and as `plan`.
        PlanMismatchError: one of `others` is for another program or mesh.
    """
    check_names(plans)
    options = PlanningOptions(memory=memory, hints=hints, time_limit=time_limit, progress=progress)  # type: ignore[arg-type]
    where = comparison_mesh(mesh, device, target)
    with collector_paused():
        options.progress("capture")
        trains = bool(loss_fn is not None or optimizer is not None) if train is None else train
        recomputed = remat_of_all(remat, blocks_of(model) if trains else ())
        switches = switches_for(where.device, recomputed, micro_batches, clip_grad_norm)
        given = {"loss_fn": loss_fn, "optimizer": optimizer, "train": train, "switches": switches}
        program = capture_of()(model, sample_inputs, **given)
        return compare_program(
            program, where, plans=plans, others=others, target=target, cycles=cycles, options=options
        )


def comparison_mesh(
    mesh: Mesh | Sequence[int] | str | None, device: str | None, target: str | None, axes: str | None = None
) -> Mesh:
    """The mesh to compare on, by default of the target's device kind.

    Raises:
        ValueError: no mesh, or one that does not match the topology of the device or the target.
    """
    if mesh is None:
        raise ValueError("plans are compared on one mesh: give it, such as mesh='2x4'")
    if isinstance(mesh, str):
        mesh = Mesh.parse(mesh, axes, device or "cpu")
    elif not isinstance(mesh, Mesh):
        mesh = Mesh(tuple(mesh), (), device or "cpu")
    elif target is not None:
        device = mesh.device
    if target is None:
        return candidate_meshes(mesh, None, device)[0]
    parsed = parse_target(target, mesh.size)
    return on_target(mesh if device is not None else replace(mesh, device=parsed.device), parsed)


def compare_program(
    program: Program,
    mesh: Mesh,
    *,
    plans: Sequence[str] | None = None,
    others: Mapping[str, Plan] | None = None,
    target: str | None = None,
    cycles: bool = False,
    options: PlanningOptions | None = None,
) -> Comparison:
    """`compare` of a captured program; `options` are for the automatic plan."""
    names, options = check_names(plans), options or PlanningOptions()
    for_target = None if target is None else parse_target(target, mesh.size)
    if cycles and for_target is None:
        raise ValueError("cycles=True needs a target whose compiler estimates them, such as target='tpu-v5e:2x4'")
    if cycles and for_target is not None:
        check_clock(for_target, load_device(for_target.device))
    if for_target is not None:
        check_steps(program)
    options.progress("graph")
    graph = build_graph(program)
    made: dict[str, Plan] = {}
    left_out: dict[str, str] = {}
    for name in names:
        try:
            if name == AUTO:
                made[name] = Plan.of(plan_graph(graph, [mesh], options))
            else:
                options.progress("plans by hand")
                made[name] = Plan.of(written_plan(graph, mesh, plan_named(name)(graph, mesh)))
        except (ManualPlanError, NoPlanError, UncompilableError) as error:
            if plans is None and isinstance(error, ManualPlanError) and name in PLANS:
                continue  # nobody asked for it
            left_out[name] = str(error)
    for name, plan in (others or {}).items():
        if name in made:
            raise ValueError(f"two plans are called {name!r}")
        made[name] = _other(plan, graph, mesh)
    rows = tuple(Row(name, plan) for name, plan in made.items())
    if for_target is not None:
        rows = tuple(_compiled(row, graph, for_target, cycles, options.progress) for row in rows)
    return Comparison(mesh, options.memory_on(mesh), rows, left_out, target or "")


def check_names(plans: Sequence[str] | None) -> tuple[str, ...]:
    """The names of plans to compare, each once; default all.

    Raises:
        ValueError: a name that no plan has.
    """
    if isinstance(plans, str):
        plans = [plans]
    names = tuple(dict.fromkeys((AUTO, *PLANS) if plans is None else plans))
    for name in names:
        if name != AUTO and name not in PLANS:
            raise ValueError(f"no plan is called {name!r}; there are {', '.join((AUTO, *PLANS))}")
    return names


def _other(plan: Plan, graph: Graph, mesh: Mesh) -> Plan:
    """A plan made elsewhere, predicted anew by this cost model on this mesh."""
    plan = planned_for(plan, graph.program)
    if (plan.mesh.shape, plan.mesh.axis_names) != (mesh.shape, mesh.axis_names):
        raise PlanMismatchError(f"a plan for the mesh {describe_mesh(plan.mesh)} is not one for {describe_mesh(mesh)}")
    percent = slop_of(plan.mesh.device)
    where = mesh if percent is None else with_slop(mesh, percent)
    found = written_plan(graph, where, annotations_of(plan, graph), options=plan.options, solver=plan.solver)
    return Plan.of(found)


def _compiled(row: Row, graph: Graph, target: Target, cycles: bool, say: Progress) -> Row:
    """The row with the figures of the compiled program."""
    mesh = row.plan.mesh
    if slop_of(mesh.device) is not None:
        target = parse_target(default_target(mesh), mesh.size)
    say(f"compile {row.name} for {target}")
    annotations = annotations_of(row.plan, graph)
    try:
        report, _ = compare_compiled(
            graph,
            annotations,
            mesh,
            target,
            annotate(graph.program, graph, annotations, mesh, platform=target.family),
            cycles=cycles,
        )
    except CompileError as error:
        return Row(row.name, row.plan, error=str(error))
    judged, useful = report.judged, row.predicted.mfu * row.predicted.step_time_s
    compiled = Predicted(
        step_time_s=judged.step_time_s,
        compute_s=judged.compute_s,
        communication_s=judged.communication_s,
        overlapped_s=judged.step_time_s if judged.overlapped_s is None else judged.overlapped_s,
        mfu=useful / judged.step_time_s if judged.step_time_s else 0.0,
        collectives=tuple(
            CollectiveTotal(each.kind, each.axes, each.compiled_count, each.compiled_bytes)
            for each in report.fidelity.rows
            if each.compiled_bytes
        ),
        peak_memory_bytes=report.memory_bytes,
    )
    fidelity = report.fidelity.value
    return Row(row.name, row.plan, compiled, None if fidelity == float("inf") else fidelity, report.clock_s)
