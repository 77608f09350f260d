"""`autoshard compare` and `explain`: a plan beside other plans, and beside other shardings of a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from autoshard import files
from autoshard.api import Plan
from autoshard.cli.options import SECONDS, pairs, parse_hint, parse_limit
from autoshard.cli.progress import Stages
from autoshard.cli.source import (
    JSON,
    PLAN_FILE,
    Asked,
    Step,
    captured,
    known_device,
    loaded,
    module,
    print_json,
    traced,
    with_source,
    with_step,
)
from autoshard.mesh import Mesh
from autoshard.show.terminal import say
from autoshard.sources import is_stablehlo


@click.command()
@with_source(train="Compare training steps; default forward only.")
@click.option("--mesh", "mesh_shape", metavar="2x4", required=True, help="Devices along each mesh axis.")
@click.option("--axes", metavar="DATA,MODEL", help="Names of the mesh axes; default data, model, z, w.")
@click.option("--device", metavar="KIND", help="Device kind, also with its topology; default the target's, or cpu.")
@click.option("--placement", metavar="DCN,ICI", help="The link that each axis lies on; default: inner ones near.")
@click.option(
    "--plans",
    metavar="AUTO,DP,…",
    help="auto, dp, fsdp, megatron, sequence, hf-tp…, or PLAN.JSON files; default auto and all that fit the program.",
)
@click.option("--target", metavar="TARGET", help="Also compile every plan for it: tpu-v5e:2x4, h100:8, cpu.")
@click.option(
    "--cycles", is_flag=True, help="TPU targets: also libtpu's own estimate of a step; minutes for each plan."
)
@click.option("--memory", metavar="16GB", help="Limit per device; default what the device kind has; none: no limit.")
@with_step("as-is", "none", "products", "full", help="What the backward pass recomputes of each block.")
@click.option("--hint", "hints", multiple=True, metavar="NAME=SPEC", help="For the automatic plan, as of `plan`.")
@click.option(
    "--time-limit", type=SECONDS, default=60.0, show_default=True, metavar="S", help="Of the solver, in CPU seconds."
)
@click.option("--plot", type=click.Path(path_type=Path), metavar="FIGURE.PNG", help="Draw the figures (png, svg, pdf).")
@JSON
def compare(
    asked: Asked,
    mesh_shape: str,
    axes: str | None,
    device: str | None,
    placement: str | None,
    plans: str | None,
    target: str | None,
    cycles: bool,
    memory: str | None,
    step: Step,
    hints: Sequence[str],
    time_limit: float,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Compare the automatic plan of SOURCE with plans written by hand, as predicted and as compiled."""
    if device is not None:
        known_device(device)
    from autoshard.comparison import compared as comparison
    from autoshard.planning.collector import collector_paused
    from autoshard.planning.options import PlanningOptions

    if device is None and placement is None:
        mesh = comparison.comparison_mesh(mesh_shape, None, target, axes)
    else:
        mesh = comparison.comparison_mesh(Mesh.parse(mesh_shape, axes, device or "cpu", placement), device, target)
    if cycles and target is None:
        raise ValueError("--cycles is what a TPU's compiler says of compiled plans: give --target, too")
    step.check_for(asked.source)
    limit = parse_limit(memory)
    wanted = pairs("the hint", [parse_hint(hint) for hint in hints])
    names, paths = _asked(plans)
    comparison.check_names(names)
    others = {path.name: Plan.load(path) for path in paths}
    if plot is not None:
        files.check_writable(plot)
        from autoshard.show import plots

        plots.check_format(plot)
    with Stages() as stages, collector_paused():
        if is_stablehlo(asked.source):
            program = module(asked, stages)
        else:
            source = loaded(asked, stages)
            stages.begin("capture")
            program = traced(source, "auto", step.switches(source, mesh.device))
        found = comparison.compare_program(
            program,
            mesh,
            plans=names,
            others=others,
            target=target,
            cycles=cycles,
            options=PlanningOptions(memory=limit, hints=wanted, time_limit=time_limit, progress=stages.begin),
        )
        if plot is not None:
            stages.begin("plot")
            plots.save(found.plot(compiled=target is not None), plot)
    say(str(found))
    if plot is not None:
        say(f"\nWrote {plot}")
    if as_json:
        print_json({**found.to_dict(), **stages.spent()})


def _asked(plans: str | None) -> tuple[list[str] | None, list[Path]]:
    """Names of plans, None for the default, and plan files among them."""
    if plans is None:
        return None, []
    asked = [each.strip() for each in plans.split(",") if each.strip()]
    if not asked:
        raise ValueError("--plans names none: auto, dp, fsdp, megatron…, or files of plans")
    return [each for each in asked if not each.endswith(".json")], [
        Path(each) for each in asked if each.endswith(".json")
    ]


@click.command()
@PLAN_FILE
@with_source(train="Default what the plan is for.")
@click.argument("tensors", metavar="TENSOR...", nargs=-1, required=True)
@click.option(
    "--time-limit", type=SECONDS, default=20.0, show_default=True, metavar="S", help="Of the solver, in CPU seconds."
)
@click.option("--html", type=click.Path(path_type=Path), metavar="OUT.HTML", help="Also write the plan's page with it.")
@JSON
def explain(
    plan_file: Path,
    asked: Asked,
    tensors: Sequence[str],
    time_limit: float,
    html: Path | None,
    as_json: bool,
) -> None:
    """Say what each other sharding of TENSORs would cost, SOURCE planned again around it.

    A TENSOR is a parameter, buffer, input or optimizer state (with * for several that are fixed alike), a module's path
    for what it returns, or op12 for the result of aten op 12.
    """
    from autoshard.show.explanation import explain_all

    found = Plan.load(plan_file)
    if html is not None:
        files.check_writable(html)
    asked = asked.for_plan(found)
    with Stages() as stages:
        program = captured(asked, stages, found.program.frontend, found.program.switches)
        said = explain_all(found, tensors, program, time_limit=time_limit, progress=stages.begin)
        if html is not None:
            stages.begin("write")
            files.write(html, found.to_html(said))
    say("\n\n".join(map(str, said)))
    if html is not None:
        say(f"\nWrote {html}")
    if as_json:
        written = None if html is None else str(html)
        print_json(
            {"plan": str(plan_file), "html": written, "explained": [each.to_dict() for each in said], **stages.spent()}
        )
