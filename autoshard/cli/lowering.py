"""`autoshard lower`: a program's StableHLO module with a plan's annotations in it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import click

from autoshard import files
from autoshard.api import Plan
from autoshard.cli.options import pairs, parse_setting
from autoshard.cli.progress import Stages
from autoshard.cli.source import JSON, PLAN_FILE, captured, planned_with, print_json, with_source
from autoshard.show.terminal import say


@click.command()
@PLAN_FILE
@with_source
@click.option("--train", type=click.Choice(["adamw", "sgd"]), help="Default what the plan is for.")
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
    source: str,
    batch: int | None,
    seq: int | None,
    settings: Sequence[str],
    train: str | None,
    output: Path,
    form: Literal["gspmd", "shardy"],
    as_json: bool,
) -> None:
    """Write the StableHLO module of SOURCE with the plan's annotations in it."""
    from autoshard.planning.collector import collector_paused
    from autoshard.stablehlo.annotate import annotate, check_steps
    from autoshard.stablehlo.reader import build_graph

    files.check_writable(output)
    found = Plan.load(plan_file)
    fields = pairs("--set", [parse_setting(setting) for setting in settings])
    if source.startswith("hf:"):
        planned_batch, planned_seq, planned_train = planned_with(found)
        batch, seq, train = batch or planned_batch, seq or planned_seq, train or planned_train
    with Stages() as stages, collector_paused():
        program = captured(source, batch, seq, fields, train, stages, found.program.frontend)
        found.check_program(program)
        check_steps(program)
        stages.begin("lower")
        graph = build_graph(program)
        annotations = found.annotations(graph)
        text = output.suffix == ".mlir"
        module = annotate(program, graph, annotations, found.mesh, form, text=text, partitions=True)
        files.write(output, module)
    pins, copies = len(annotations.pins), len(annotations.copies)
    say(f"Wrote {output}: {len(module):,} bytes, {pins} pins and {copies} copies for {found.mesh.size} devices")
    if as_json:
        said = {"plan": str(plan_file), "output": str(output), "form": form, "bytes": len(module)}
        print_json({**said, "pins": pins, "copies": copies, **stages.spent()})
