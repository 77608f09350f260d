"""The `autoshard` command. Scripts depend on it: options, exit statuses and the last line under `--json` are stable.

Exit status 0: done. 1: `verify` found the plan off (fidelity above the limit, or unequal numbers). 2: bad input, with
one line on standard error that says what to do; nothing was written. 3: `verify --run` could not decide. 70: a bug of
autoshard's, with its traceback.
"""

from __future__ import annotations

import contextlib
import gc
import json
import math
import os
import re
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from autoshard import files
from autoshard.api import Plan
from autoshard.cli.asking import estimate
from autoshard.cli.comparing import compare, explain
from autoshard.cli.lowering import lower
from autoshard.cli.options import (
    SECONDS,
    SEED_RANGE,
    Number,
    pairs,
    parse_hint,
    parse_limit,
    parse_mesh,
)
from autoshard.cli.progress import Stages
from autoshard.cli.source import (
    JSON,
    PLAN_FILE,
    Asked,
    Step,
    known_device,
    loaded,
    module,
    print_json,
    traced,
    with_source,
    with_step,
)
from autoshard.errors import AutoshardError, FileError
from autoshard.show.terminal import say
from autoshard.sources import is_stablehlo
from autoshard.version import __version__

if TYPE_CHECKING:
    from autoshard.mesh import Mesh
    from autoshard.planning.options import OptionKeywords
    from autoshard.plans.remat import Remat
    from autoshard.program import Program

BAD_INPUT, OFF, NOT_DECIDED, BUG, INTERRUPTED = 2, 1, 3, 70, 130
TRACEBACK = "AUTOSHARD_TRACEBACK"
"""Environment variable: when set, bad input shows its traceback as well."""

_EXTRAS = {"torch": "xla", "torch_xla": "xla", "transformers": "hf", "libtpu": "tpu", "jax_plugins": "gpu"}
_EXTRAS |= {"matplotlib": "notebooks"}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and leave with its exit status."""
    with warnings.catch_warnings():
        if not sys.warnoptions:  # libraries' warnings are about code that the user did not write
            warnings.filterwarnings("ignore", module=r"(torch|torch_xla|transformers|jax)(\.|$)")
        try:
            _main(arguments)
        except SystemExit as done:
            _leave(done.code)
            raise
        finally:
            gc.freeze()  # spares the interpreter's last collections a walk over all of torch, jax and the graph


def _leave(status: object) -> None:
    """Exit at once if a solver thread was abandoned at its time limit: the interpreter would wait for it."""
    ilp = sys.modules.get("autoshard.solver.ilp")
    if ilp is not None and ilp.left_behind():
        _flush()
        os._exit(status if isinstance(status, int) else BUG if status else 0)


def _main(arguments: Sequence[str] | None) -> None:
    try:
        with _terminable():
            status = _run(arguments)
            _flush()
    except click.ClickException as error:
        _fail(error.format_message())
    except (click.Abort, KeyboardInterrupt):
        sys.exit(INTERRUPTED)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _EXTRAS:
            _crash()
        _fail(f"{package} is not installed: pip install 'autoshard[{_EXTRAS[package]}]'")
    except (AutoshardError, ValueError) as error:
        _fail(str(error))
    except BrokenPipeError:  # the reader of standard output closed it: `autoshard show plan.json | head`
        _close_output()
        sys.exit(0)
    except OSError as error:  # of the machine: a full disk, no more processes
        _fail(f"{error.filename or 'standard output'}: {error.strerror or error}")
    except Exception:
        _crash()
    sys.exit(status if isinstance(status, int) else 0)


def _run(arguments: Sequence[str] | None) -> Any:
    files.name_user()
    try:
        return commands.main(
            args=None if arguments is None else list(arguments), prog_name="autoshard", standalone_mode=False
        )
    except click.exceptions.NoArgsIsHelpError as asked:
        say(asked.format_message())
        return 0


def _fail(message: str) -> None:
    if os.environ.get(TRACEBACK):
        _traceback()
    try:
        _flush()
    except OSError:
        _close_output()
    with contextlib.suppress(OSError, FileError):  # nobody reads it
        say("autoshard: " + re.sub(r"\s*\n\s*", " ", message.strip()), error=True)
    sys.exit(BAD_INPUT)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # closed by the parent process
            stream.flush()


def _close_output() -> None:
    """Discard a standard output that fails: the interpreter would flush it again at exit."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _crash() -> None:
    _traceback()
    say("autoshard: this is a bug of autoshard's; please report it with the lines above", error=True)
    sys.exit(BUG)


def _traceback() -> None:
    import traceback

    traceback.print_exc()


# --- commands ----------------------------------------------------------------------------------------------------


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="autoshard")
def commands() -> None:
    """Decide how a PyTorch program is split over many devices, and prove how good the decision is.

    SOURCE is hf:<model_type> (transformers' default configuration, no download; --set changes its fields),
    file.py:function, where function() returns a model, (model, sample_inputs), or a dict with model, inputs and
    optionally loss_fn and optimizer, or a StableHLO module from anywhere (step.mlir, bytecode, jax.export's file).
    """


@commands.command()
@with_source(train="Plan a training step; default forward only.")
@click.option("--mesh", "mesh_shape", metavar="2x4", help="Devices along each mesh axis.")
@click.option("--axes", metavar="DATA,MODEL", help="Names of the mesh axes; default data, model, z, w.")
@click.option("--devices", type=click.IntRange(1), metavar="N", help="Instead of --mesh: try every shape.")
@click.option(
    "--device",
    metavar="KIND",
    help="Device kind, such as tpu-v5e or h100, also with its topology: tpu-v5e:4x4:2slices, h100:2x8; default cpu.",
)
@click.option(
    "--placement", metavar="DCN,ICI", help="The link that each axis of --mesh lies on; default: inner ones near."
)
@click.option("--memory", metavar="16GB", help="Limit per device, or none; default what runtimes leave.")
@with_step(
    "as-is",
    "auto",
    "none",
    "products",
    "full",
    help="What the backward pass recomputes of each block; auto: planned with the shardings, so that the step fits.",
)
@click.option("--hint", "hints", multiple=True, metavar="NAME=SPEC", help="Such as 'wte.weight=[model],[]'.")
@click.option(
    "--keep",
    type=click.Choice(["all", "io", "none"]),
    default="all",
    show_default=True,
    help="Which hints and annotations of the model's tensors hold; io: none inside the program.",
)
@click.option(
    "--frontend",
    type=click.Choice(["auto", "torch_xla", "torchax"]),
    default="auto",
    show_default=True,
    help="What captures a model; auto: torch_xla where it is installed, else torchax.",
)
@click.option("--no-fold", is_flag=True, hidden=True, expose_value=False, help="As it is anyway.")
@click.option(
    "--annotations",
    type=click.Choice(["all", "least"]),
    default="all",
    show_default=True,
    help="Pin every value, or only those that XLA would split otherwise.",
)
@click.option(
    "--refine",
    metavar="TARGET",
    help="Compile the few best candidates for it (tpu-v5e:2x4, h100:8, cpu) and take the best compiled one.",
)
@click.option(
    "--confirm",
    type=click.Choice(["never", "auto", "always"]),
    default="auto",
    show_default=True,
    help="Have the target's compiler say whether the plan fits; auto: where it is predicted near the memory limit.",
)
@click.option(
    "--time-limit", type=SECONDS, default=60.0, show_default=True, metavar="S", help="Of the solver, in CPU seconds."
)
@click.option("--seed", type=SEED_RANGE, default=0, show_default=True, help="Of the solver.")
@click.option(
    "--dump-problem",
    type=click.Path(path_type=Path),
    metavar="PROBLEM.JSON[.GZ]",
    help="Write the strategy-selection problem there, for `solve`.",
)
@click.option("-o", "--output", type=click.Path(path_type=Path), metavar="PLAN.JSON", help="Write the plan there.")
@JSON
def plan(
    asked: Asked,
    mesh_shape: str | None,
    axes: str | None,
    devices: int | None,
    device: str | None,
    placement: str | None,
    memory: str | None,
    step: Step,
    hints: Sequence[str],
    keep: Literal["all", "io", "none"],
    frontend: str,
    annotations: Literal["all", "least"],
    refine: str | None,
    confirm: Literal["never", "auto", "always"],
    time_limit: float,
    seed: int,
    dump_problem: Path | None,
    output: Path | None,
    as_json: bool,
) -> None:
    """Plan how SOURCE is split over a mesh, and print the plan."""
    from autoshard.planning.collector import collector_paused
    from autoshard.planning.meshes import device_for, meshes_for

    # Validate the command itself before torch or jax is imported.
    device = device_for(device, refine)
    if device is not None:
        known_device(device)
    mesh = parse_mesh(mesh_shape, axes, devices, device, placement)
    meshes = meshes_for(mesh, devices, device, refine, confirm)
    limit = parse_limit(memory)
    wanted = pairs("the hint", [parse_hint(hint) for hint in hints])
    for path in filter(None, (output, dump_problem)):
        files.check_writable(path)
    with Stages() as stages, collector_paused():
        options: OptionKeywords = {
            "memory": limit,
            "hints": wanted,
            "keep": keep,
            "annotations": annotations,
            "refine": refine,
            "confirm": confirm,
            "time_limit": time_limit,
            "seed": seed,
            "dump_problem": dump_problem,
            "progress": stages.begin,
        }
        found = _planned(asked, stages, frontend, meshes, step, options)
        if output is not None:
            stages.begin("write")
            source = {"source": asked.source, **asked.options.given}
            replace(found, info={**found.info, "source": source}).save(output)
        gc.freeze()  # the command ends here: a collection would walk the program, its graph and the plan for nothing
    say(str(found))
    spent = stages.spent()
    if found.confirmed is not None and found.confirmed.compiles:
        seconds = found.confirmed.seconds
        say(f"\nPlanned in {spent['seconds'] - seconds:.1f} s, and {seconds:.1f} s of compiling")
    if output is not None:
        say(f"\nWrote {output}")
    if as_json:
        print_json({"plan": None if output is None else str(output), **_summary(found), **spent})


def _planned(
    asked: Asked,
    stages: Stages,
    frontend: str,
    meshes: Sequence[Mesh],
    step: Step,
    options: OptionKeywords,
) -> Plan:
    """The plan of SOURCE."""
    from autoshard.api import plan_program
    from autoshard.frontends.choose import blocks_of, switches_for
    from autoshard.planning.options import PlanningOptions
    from autoshard.planning.road import plan_model

    step.check_for(asked.source)
    if is_stablehlo(asked.source):
        return plan_program(module(asked, stages), meshes, **options)
    source = loaded(asked, stages)
    blocks = blocks_of(source.model) if source.train and step.remat != "as-is" else ()

    def capture(remat: Remat | None) -> Program:
        return traced(source, frontend, switches_for(meshes[0].device, remat, step.micro_batches, step.clip_grad_norm))

    return Plan.of(plan_model(capture, blocks, step.remat, meshes, PlanningOptions(**options)))  # type: ignore[arg-type]


@commands.command()
@PLAN_FILE
@with_source(train="Default what the plan is for.")
@click.option(
    "--target",
    metavar="TARGET",
    help="cpu, tpu-v5e:2x4, tpu-v5e:4x4:2slices, h100:8, h100:2x8 (hosts x GPUs); default the plan's device kind.",
)
@click.option("--run", is_flag=True, help="Also train three steps on virtual CPU devices, and on one.")
@click.option(
    "--cycles",
    is_flag=True,
    help="TPU targets: also sum libtpu's own estimates of the kernels. It then compiles to the end: half a minute for "
    "two layers on a quiet machine, minutes for more.",
)
@click.option("--max-fidelity", type=Number(0), default=0.15, show_default=True, metavar="F")
@JSON
def verify(
    plan_file: Path,
    asked: Asked,
    target: str | None,
    run: bool,
    cycles: bool,
    max_fidelity: float,
    as_json: bool,
) -> int:
    """Hold a plan of SOURCE against what the target's compiler makes of it.

    Exit status 1: the share of bytes that differ is above --max-fidelity, or the numbers of --run are unequal.
    3: more than 5 % of the tensors are excused, or PyTorch rounds one away itself: the run decides nothing.
    """
    from autoshard.verify.targets import on_target, parse_target

    found = Plan.load(plan_file)
    if target is not None:
        on_target(found.mesh, parse_target(target, found.mesh.size))
    asked = asked.for_plan(found)
    with Stages() as stages:
        loaded_source = (module if is_stablehlo(asked.source) else loaded)(asked, stages)
        from autoshard.verify.check import verify_plan

        report = verify_plan(found, loaded_source, target, run=run, cycles=cycles, progress=stages.begin)
    passed = report.passes(max_fidelity)
    say(str(report))
    if math.isinf(report.fidelity.value):
        say("not verified: collectives were predicted, but none are compiled")
    elif report.fidelity.value > max_fidelity:
        say(f"not verified: fidelity {report.fidelity.value:.1%} is above the limit of {max_fidelity:.1%}")
    if report.wrong_sums:
        say("not verified: XLA computes wrong sums under these annotations")
    status = report.run.status if report.run is not None else "equal"
    if status == "differ":
        say("not verified: the numbers under the plan are not those of one device")
    elif status == "not decided":
        say("not decided: nothing was found wrong, but PyTorch on one device rounds as much as this (docs/verify.md)")
    if as_json:
        said = {"plan": str(plan_file), "passed": passed, "max_fidelity": max_fidelity}
        print_json({**said, **report.as_dict(), **stages.spent()})
    undecided = status == "not decided" and report.passes(max_fidelity, decided=False)
    return 0 if passed else NOT_DECIDED if undecided else OFF


@commands.command()
@PLAN_FILE
@click.option(
    "--html", type=click.Path(path_type=Path), metavar="OUT.HTML", help="Write it as a page, with all modules."
)
@JSON
def show(plan_file: Path, html: Path | None, as_json: bool) -> None:
    """Print a plan: what splits what, what it is predicted to cost, how good it is proved to be.

    --html writes one self-contained page instead, with shardings drawn and costs module by module.
    """
    found = Plan.load(plan_file)
    if html is None:
        say(str(found))
    else:
        files.write(html, found.to_html())
        say(f"Wrote {html}")
    if as_json:
        written = {} if html is None else {"html": str(html)}
        print_json({"plan": str(plan_file), **written, **_summary(found)})


@commands.command()
@click.argument("problem_file", metavar="PROBLEM.JSON[.GZ]", type=click.Path(path_type=Path))
@click.option(
    "--time-limit", type=SECONDS, default=60.0, show_default=True, metavar="S", help="CPU seconds, reading included."
)
@click.option("--seed", type=SEED_RANGE, default=0, show_default=True, help="Of the solver.")
@click.option(
    "-o", "--output", metavar="SOLUTION.JSON", type=click.Path(path_type=Path), help="Write the choice there."
)
@JSON
def solve(problem_file: Path, time_limit: float, seed: int, output: Path | None, as_json: bool) -> int:
    """Solve a strategy-selection problem in IOPDDL JSON: one strategy per node, with a proven bound.

    The solution is a list of one strategy index per node. Exit status 1: there is none, or none was found in time.
    The time limit includes reading; Ctrl-C (or SIGTERM) ends the solve with the best found so far.
    """
    started = time.process_time()
    from autoshard.solver import iopddl
    from autoshard.solver.solve import solve as solved

    if output is not None:
        files.check_writable(output)
    with Stages() as stages:
        stages.begin("read")
        try:
            problem = iopddl.read(problem_file)
        except OSError as error:
            raise click.ClickException(f"cannot read {problem_file}: {error.strerror}") from error
        stages.begin("solve")
        left = max(0.0, time_limit - (time.process_time() - started))

        def progress(stage: str, objective: float, bound: float) -> None:
            stages.say(f"solve ({stage}): objective {objective:,.10g}, bound {bound:,.10g}")

        found = solved(problem, time_limit=left, seed=seed, progress=progress)
    exists = math.isfinite(found.objective)
    if exists and output is not None:
        files.write(output, json.dumps(list(found.choice)))
    said = f"objective {found.objective:,.10g}, bound {found.bound:,.10g}, gap {found.gap:.3%}, {found.backend}"
    say(f"{found.status.value}: {said if exists else found.message}")
    if as_json:
        figures = {"objective": found.objective, "bound": found.bound, "gap": found.gap}
        finite = {name: figure if math.isfinite(figure) else None for name, figure in figures.items()}
        print_json({"problem": str(problem_file), "status": found.status.value, **finite, **stages.spent()})
    return 0 if exists else OFF


@commands.command()
@click.option("-o", "--output", metavar="DEVICE.TOML", type=click.Path(path_type=Path), help="Write the kind there.")
@click.option("--backend", type=click.Choice(["auto", "jax", "torch"]), default="auto", show_default=True)
@click.option("--platform", type=click.Choice(["cpu", "gpu", "tpu"]), help="Default the best that is there.")
@click.option("--devices", type=click.IntRange(1), metavar="N", help="Virtual CPU devices, or how many to use.")
@click.option("--base", metavar="KIND", help="Where the rest is from; default the built-in kind of the device's name.")
@click.option("--name", metavar="NAME", help="Of the new kind; default the base's, with -measured.")
@click.option("--quick", is_flag=True, help="Fewer sizes and dtypes, less time for each.")
@JSON
def calibrate(
    output: Path | None,
    backend: Literal["auto", "jax", "torch"],
    platform: Literal["cpu", "gpu", "tpu"] | None,
    devices: int | None,
    base: str | None,
    name: str | None,
    quick: bool,
    as_json: bool,
) -> None:
    """Measure this machine and write it as a device kind, for `plan --device DEVICE.TOML`."""
    from autoshard.cost.machine import calibrate as fitting

    if base is not None:
        known_device(base)
    if output is not None:
        files.check_writable(output)
    with Stages() as stages:
        stages.begin("measure")
        facts, points = fitting.measured(
            backend=backend, platform=platform, devices=devices, quick=quick, progress=stages.begin
        )
        stages.begin("fit")
        found = fitting.calibrate(facts, points, base=base, name=name)
    text = fitting.to_toml(found)
    if output is None:
        say(text, newline=False)
    else:
        files.write(output, text)
        say("\n".join([f"{found.device.name}: {found.device.source}", *map(str, found.fits)]))
        say(f"\nWrote {output}: autoshard plan … --device {output}")
    if as_json:
        print_json({"output": None if output is None else str(output), **found.as_dict(), **stages.spent()})


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM interrupts like Ctrl-C: a solve ends with its incumbent, workers and temporary files are removed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _summary(found: Plan) -> dict[str, Any]:
    """A plan's summary for `plan --json` and `show --json`."""
    from autoshard.plans.json_format import plain

    return {
        "fingerprint": found.program.fingerprint,
        "kind": found.program.kind,
        "mesh": plain(found.mesh),
        "predicted": found.predicted and plain(replace(found.predicted, modules=())),
        "solver": plain(found.solver),
        "refined": plain(found.refined),
        "confirmed": plain(found.confirmed),
        "activations": len(found.activations),
        "replicated_ops": len(found.replicated_ops),
        "replicated_cost_s": sum(op.cost_s for op in found.replicated_ops),
    }


commands.add_command(compare)
commands.add_command(estimate)
commands.add_command(explain)
commands.add_command(lower)
