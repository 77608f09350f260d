"""`autoshard lower`: a program's StableHLO module with a plan's annotations in it."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import click

from autoshard import files
from autoshard.api import Plan
from autoshard.cli.progress import Stages
from autoshard.cli.source import JSON, PLAN_FILE, Asked, captured, print_json, with_source
from autoshard.show.terminal import say


@click.command()
@PLAN_FILE
@with_source(train="Default what the plan is for.")
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(path_type=Path),
    metavar="MODULE.MLIR",
    help="Write the module there: text for .mlir, bytecode for other names.",
)
@click.option(
    "--form",
    type=click.Choice(["gspmd", "shardy"]),
    default="gspmd",
    show_default=True,
    help="How annotations are written: custom calls @Sharding, or the sdy dialect.",
)
@JSON
def lower(
    plan_file: Path,
    asked: Asked,
    output: Path,
    form: Literal["gspmd", "shardy"],
    as_json: bool,
) -> None:
    """Write the StableHLO module of SOURCE with the plan's annotations in it."""
    from autoshard.cost.machine.device import load_device, scheduler_options
    from autoshard.planning.collector import collector_paused
    from autoshard.stablehlo.annotate import annotate, check_steps
    from autoshard.stablehlo.reader import build_graph

    files.check_writable(output)
    found = Plan.load(plan_file)
    asked = asked.for_plan(found)
    with Stages() as stages, collector_paused():
        program = captured(asked, stages, found.program.frontend, found.program.switches)
        found.check_program(program)
        check_steps(program)
        stages.begin("lower")
        graph = build_graph(program)
        annotations = found.annotations(graph)
        text = output.suffix == ".mlir"
        device = load_device(found.mesh.device)
        module = annotate(
            program, graph, annotations, found.mesh, form, text=text, partitions=True, platform=device.target
        )
        files.write(output, module)
    pins, copies = len(annotations.pins), len(annotations.copies)
    say(f"Wrote {output}: {len(module):,} bytes, {pins} pins and {copies} copies for {found.mesh.size} devices")
    if options := scheduler_options(found.mesh.device):
        flags = " ".join(f"--{name}={str(value).lower()}" for name, value in options.items())
        say(f"Compile it with XLA_FLAGS='{flags}'")
    if as_json:
        said = {"plan": str(plan_file), "output": str(output), "form": form, "bytes": len(module)}
        print_json({**said, "pins": pins, "copies": copies, **stages.spent()})
