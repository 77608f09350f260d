"""`verify`: compiles a plan with the target's own compiler and compares with the prediction."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from autoshard.cost.machine.bars import bar_text
from autoshard.cost.machine.device import load_device
from autoshard.cost.machine.layout import device_order
from autoshard.cost.predict import Prediction, predict
from autoshard.frontends.choose import capture_of
from autoshard.graph.annotations import Annotations
from autoshard.graph.ops import Graph
from autoshard.mesh import Mesh
from autoshard.plans.annotated import annotations_of
from autoshard.plans.check import planned_for
from autoshard.plans.value import Plan
from autoshard.program import Program
from autoshard.regions.kernel import Platform
from autoshard.sources import Source
from autoshard.stablehlo.annotate import annotate, donated
from autoshard.stablehlo.reader import build_graph
from autoshard.strategies.guard import wrong_sums
from autoshard.verify.collectives import compiled_collectives
from autoshard.verify.compile import COMPILE_TIMEOUT_S, Compiled, compile_module
from autoshard.verify.cycles import Cycles, check_clock, compiled_cycles, loop_trips
from autoshard.verify.fidelity import Fidelity, fidelity
from autoshard.verify.hlo_text import parse_hlo
from autoshard.verify.judge import Judged, judged
from autoshard.verify.run import RunReport, run_equal
from autoshard.verify.schedule import overlapped_seconds
from autoshard.verify.targets import Target, TargetError, default_target, on_target, parse_target
from autoshard.verify.work import compiled_work


@dataclass(frozen=True)
class VerifyReport:
    """A plan's prediction beside its compiled program.

    Attributes:
        target: compile target.
        fidelity: collectives, predicted beside compiled.
        prediction: the cost model's figures for the target's device kind.
        judged: step time of the compiled program under the same device model.
        memory_bytes: peak per device by the compiler's buffer assignment.
        rematerializations: values that the partitioner had to fully rematerialize (replicate and slice): defects of
            the plan.
        wrong_sums: convolutions that XLA would miscompute (`strategies/guard.py`): the solver's plans have none, plans
            by hand may.
        run: three training steps under the plan against one device, if asked for.
        cycles: libtpu's own estimate of the kernels, if asked for.
        libraries: whether a GPU's products are all library calls: XLA found no tiling for one of its Triton kernels,
            so that the program was compiled without them.
    """

    target: Target
    fidelity: Fidelity
    prediction: Prediction = field(repr=False)
    judged: Judged
    memory_bytes: int
    rematerializations: tuple[str, ...] = ()
    wrong_sums: tuple[str, ...] = ()
    run: RunReport | None = None
    cycles: Cycles | None = None
    libraries: bool = False

    @property
    def clock_s(self) -> float | None:
        """Step time by libtpu's clock: its estimates, and of the device model what has none and what is not hidden."""
        if self.cycles is None:
            return None
        judged, exposed = self.judged, self.judged.communication_s
        if judged.overlapped_s is not None:
            exposed = max(0.0, judged.overlapped_s - judged.compute_s)
        return self.cycles.seconds + self.cycles.unestimated_s + exposed

    def passes(self, max_fidelity: float, *, decided: bool = True) -> bool:
        """Whether fidelity is within the limit, no sum is known to be wrong and, if run, the numbers are equal.

        Without `decided`, an undecided run passes.
        """
        equal = self.run is None or self.run.equal or (not decided and self.run.status == "not decided")
        right = not self.wrong_sums and equal
        return self.fidelity.value <= max_fidelity and right

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        found: dict[str, Any] = {
            "target": str(self.target),
            **self.fidelity.as_dict(),
            "predicted_step_time_s": self.prediction.step_time_s,
            "predicted_overlapped_s": self.prediction.overlapped_s,
            "bars": self.prediction.bars.as_info(),
            "compiled": self.judged.as_dict(),
            "memory": {
                "predicted_bytes": self.prediction.peak_memory_bytes,
                "compiled_bytes": self.memory_bytes,
            },
            "flops": {"predicted": self.prediction.compiled.flops, "compiled": self.judged.flops},
            "bytes": {"predicted": self.prediction.compiled.moved_bytes, "compiled": self.judged.bytes},
            "rematerializations": len(self.rematerializations),
            "wrong_sums": list(self.wrong_sums),
            "libraries": self.libraries,
        }
        if self.run is not None:
            found["run"] = self.run.as_dict()
        if self.cycles is not None:
            found["cycles"] = {**self.cycles.as_dict(), "step_time_s": self.clock_s}
        return found

    def __str__(self) -> str:
        """Tables for the terminal."""
        predicted, compiled = self.prediction.peak_memory_bytes, self.memory_bytes
        program, bars = self.prediction.compiled, self.prediction.bars
        lines = [
            self.fidelity.table(),
            f"memory per device: predicted {predicted / 1e6:,.1f} MB {bar_text(bars.memory)}, "
            f"compiled {compiled / 1e6:,.1f} MB",
            f"products per device: predicted {program.flops / 1e9:,.3f} GFLOP, "
            f"compiled {self.judged.flops / 1e9:,.3f} GFLOP",
            f"memory traffic per device: predicted {program.moved_bytes / 1e6:,.1f} MB, "
            f"compiled {self.judged.bytes / 1e6:,.1f} MB",
            f"step time: predicted {self.prediction.step_time_s * 1e3:.3f} ms {bars.step_text()}, "
            f"compiled program under the same device model {self.judged.step_time_s * 1e3:.3f} ms",
        ]
        if self.judged.overlapped_s is not None:
            lines.append(
                f"with collectives beside kernels: predicted {self.prediction.overlapped_s * 1e3:.3f} ms, "
                f"as the compiler scheduled them {self.judged.overlapped_s * 1e3:.3f} ms"
            )
        if (clock := self.clock_s) is not None:
            lines.append(str(self.cycles))
            lines.append(f"step time by libtpu's clock, collectives as scheduled: {1e3 * clock:.3f} ms")
        if self.libraries:
            lines.append(
                "XLA found no tiling for one of its Triton kernels: compiled without them, products are library calls "
                "whose operands are padded; memory and time are those of that program"
            )
        if self.rematerializations:
            lines.append(f"the partitioner rematerialised {len(self.rematerializations)} values in full:")
            lines += [f"  {text}" for text in self.rematerializations[:5]]
        if self.wrong_sums:
            lines.append(
                "WRONG NUMBERS: XLA sums over devices that hold the same part. Split neither operand in space in"
            )
            lines += [f"  {text}" for text in self.wrong_sums]
        if self.run is not None:
            lines.append(str(self.run))
        return "\n".join(lines)


def compare_compiled(
    graph: Graph,
    annotations: Annotations,
    mesh: Mesh,
    target: Target,
    module: bytes,
    *,
    cycles: bool = False,
) -> tuple[VerifyReport, Compiled]:
    """Compile an annotated module for `target` and compare with the prediction for its device kind.

    With `cycles` a TPU's compiler also generates code, and its estimates of the kernels are read.
    """

    targeted = on_target(mesh, target)
    kind = load_device(targeted.device)
    if cycles:
        check_clock(target, kind)
    prediction = predict(graph, annotations, targeted, as_compiled=True)
    compiled = compile_annotated(graph, mesh, target, module, whole=cycles)
    parsed = parse_hlo(compiled.hlo_text)
    collectives = compiled_collectives(parsed, targeted, target.family)
    names = {op.index: (op.name, op.module) for op in graph.program.ops}
    report = VerifyReport(
        target=target,
        fidelity=fidelity(
            prediction.collectives,
            collectives,
            target=str(target),
            aten_of=lambda op: graph.ops[op].aten,
            names=names,
        ),
        prediction=prediction,
        judged=judged(
            collectives, compiled_work(parsed, target.family), targeted, kind, compiled.memory.peak
        ).scheduled(overlapped_seconds(parsed, targeted, kind, target.family)),
        memory_bytes=compiled.memory.peak,
        rematerializations=compiled.rematerializations,
        wrong_sums=wrong_sums(graph, annotations, targeted),
        cycles=compiled_cycles(parsed, kind, loop_trips(graph)) if cycles else None,
        libraries="__cublas$" in compiled.hlo_text and "gemm_fusion" not in compiled.hlo_text,
    )
    return report, compiled


def compile_annotated(
    graph: Graph, mesh: Mesh, target: Target, module: bytes, *, whole: bool = False, timeout: float = COMPILE_TIMEOUT_S
) -> Compiled:
    """Compile a program's annotated module for `target`, with the mesh laid on its devices; see `compile_module`."""
    targeted = on_target(mesh, target)
    order = device_order(targeted, load_device(targeted.device))
    return compile_module(module, target, donate=donated(graph.program), order=order, whole=whole, timeout=timeout)


def verify_plan(
    plan: Plan,
    source: Source | Program,
    target: str | None = None,
    *,
    run: bool = False,
    cycles: bool = False,
    progress: Callable[[str], None] | None = None,
) -> VerifyReport:
    """Compile the program under the plan for `target`, and compare with the prediction.

    For TPUs and the CPU torch_xla traces the annotated step again, as in training. For GPUs, which torch_xla does not
    run, the annotations are written into the captured module in GSPMD's form: the program of `to_jax().step(…,
    partitioner="gspmd")`, not of Shardy, its default. As torch_xla's device lists, the same annotations would keep
    XLA's GPU compiler from forming reduce-scatters over devices in an order other than the mesh's.

    Args:
        source: the model, sample inputs, loss and optimizer of the plan; or a program read from a StableHLO file, whose
            module is annotated as `autoshard lower` does.
        target: `cpu`, `tpu-v5e:2x4`, `h100:8`…; default the plan's own device kind.
        run: also train three steps under the plan on virtual CPU devices, against one device.
        cycles: also have a TPU's compiler generate code (up to minutes) and sum its own estimates of the kernels.

    Raises:
        PlanMismatchError: the source is another program than the plan's.
        TargetError, CompileError: the target's compiler is missing, refuses the program, or estimates no cycles.
    """

    say = progress or (lambda stage: None)
    chosen = parse_target(target or default_target(plan.mesh), plan.mesh.size)
    targeted = on_target(plan.mesh, chosen)
    if cycles:
        check_clock(chosen, load_device(targeted.device))
    chosen.packages()
    without_torch_xla = plan.program.frontend == "torchax"
    if run and isinstance(source, Program):
        raise TargetError("a StableHLO file has no PyTorch model to run beside it: leave out --run")
    if run and without_torch_xla:
        raise TargetError("the plan was made without torch_xla, and --run trains through it: leave out --run")
    if run and plan.micro_batches > 1:
        raise TargetError("--run trains steps of one batch, and the plan is of several micro-batches: leave out --run")
    if isinstance(source, Program) or without_torch_xla or chosen.family == "gpu":
        graph, module = _written_into(plan, source, chosen.family, say)
    else:
        graph, module = _traced_again(plan, source, chosen.family, say)
    say(f"compile for {chosen}")
    report, _ = compare_compiled(graph, annotations_of(plan, graph), plan.mesh, chosen, module, cycles=cycles)
    if run and not isinstance(source, Program):
        say("run")
        report = dataclasses.replace(report, run=run_equal(plan, source, program=graph.program))
    return report


def _written_into(
    plan: Plan, source: Source | Program, platform: Platform, say: Callable[[str], None]
) -> tuple[Graph, bytes]:
    """The graph of a program, and its module annotated for GSPMD as `autoshard lower` writes it."""

    if not isinstance(source, Program):
        say("capture")
        source = capture_of(plan.program.frontend)(
            source.model, source.inputs, loss_fn=source.loss_fn, optimizer=source.optimizer,
            switches=plan.program.switches,
        )  # fmt: skip
    plan = planned_for(plan, source)
    graph = build_graph(source)
    say("lower")
    return graph, annotate(source, graph, annotations_of(plan, graph), plan.mesh, platform=platform)


def _traced_again(plan: Plan, source: Source, platform: Platform, say: Callable[[str], None]) -> tuple[Graph, bytes]:
    """The graph of a source's program, and its module as torch_xla traces it under the plan."""
    from autoshard.frontends.torch_xla.program import capture
    from autoshard.lower.torch_xla.mark_sharding import annotated_program

    say("capture")
    given = {"loss_fn": source.loss_fn, "optimizer": source.optimizer, "switches": plan.program.switches}
    program = capture(source.model, source.inputs, **given)
    plan = planned_for(plan, program)
    graph = build_graph(program)
    say("lower")
    module = annotated_program(
        plan, source.model, source.inputs, loss_fn=source.loss_fn, optimizer=source.optimizer, platform=platform
    )
    return graph, module
