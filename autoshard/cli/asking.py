"""`autoshard estimate`: how long one kernel or collective takes."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from autoshard.cli.source import JSON, print_json
from autoshard.quantities import parse_bytes
from autoshard.show.terminal import say

_SIZES = {
    "m": "Rows of a matmul [m, k] x [k, n].",
    "k": "What a matmul sums over.",
    "n": "Columns of a matmul.",
    "batch": "Products, or sequences of an attention.",
    "seq": "Queries and keys of a sequence.",
    "heads": "Of queries.",
    "kv-heads": "Of keys and values; default as many.",
    "head-dim": "Features of a head.",
    "window": "Keys that a query attends to; default all.",
    "devices": "Between how many a collective runs; default all of the topology.",
}


def _with_sizes(function: Any) -> Any:
    for name, text in reversed(_SIZES.items()):
        function = click.option(f"--{name}", type=click.IntRange(1), metavar="N", help=text)(function)
    return function


@click.command()
@click.argument("device")
@click.argument("op")
@_with_sizes
@click.option("--causal/--full", default=None, help="Whether an attention is causal, as by default.")
@click.option("--backward", is_flag=True, default=None, help="An attention's gradient.")
@click.option("--bytes", "size", metavar="64MiB", help="The larger of a collective's operand and result, per device.")
@click.option("--dtype", default="bf16", show_default=True)
@JSON
def estimate(device: str, op: str, size: str | None, dtype: str, as_json: bool, **sizes: Any) -> None:
    """Estimate how long OP takes on DEVICE: matmul, attention, all-reduce, all-gather...

    With what nine of ten measurements lie between, and where the figure is from.
    """
    from autoshard.cost.machine.asked import estimate as asked

    given = {name: value for name, value in sizes.items() if value is not None}
    if size is not None:
        given["bytes"] = parse_bytes(size)
    found = asked(device, op, dtype=dtype, **given)
    say(str(found))
    if as_json:
        print_json({"device": device, "op": op, "dtype": dtype, **given, **asdict(found)})
