"""How far off a plan's figures are, from kept rows: the bars that reports print (`autoshard/cost/machine/bars.toml`).

Step times: whole steps that others measured, as `published.py` predicts them (`results/published.jsonl`); per target
with each (model family, device) counted alike, and per device kind that has ten rows. Ties: pairs of such rows, of one
model on as many devices and of one publication; by how much the ratio of their times is mispredicted. Memory: predicted
beside compiled in the files of `results/`, `real.csv` too, each counted alike. Printed with each bar: which share of
one half of its rows a bar from the other half covers.

    python benchmarks/bars.py STEPS.json
    python benchmarks/bars.py STEPS.json --write
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from hashlib import sha256
from itertools import combinations
from pathlib import Path
from typing import Any

from published import KINDS
from real import kept
from results import RESULTS, read

import autoshard
from autoshard.cost.machine.device import load_device

SHARE = 0.9
"""Of the rows, counted by their weights, that a bar covers."""
OF_ONE_KIND = 10
"""Rows from which a device kind has a bar of its own."""
MEMORY = ("bf16_gpu", "bf16_tpu", "compiled", "held_out", "quality")
"""Files of `results/` with memory predicted and compiled; plans that were drawn at random are not among them."""
TOML = Path(autoshard.__file__).parent / "cost" / "machine" / "bars.toml"

Errors = Mapping[tuple[Any, ...], Sequence[float]]
"""Set -> the absolute logarithms of predicted over true."""
Case = tuple[tuple[Any, ...], str, float]
"""Set, name, and absolute logarithm of predicted over true."""


def bar(sets: Errors) -> float:
    """The relative error that 90 % of the rows do not exceed, each set counted alike."""
    weighed = sorted((error, 1 / len(errors)) for errors in sets.values() for error in errors)
    covered, found = 0.0, 0.0
    for error, weight in weighed:
        if covered < SHARE * sum(map(bool, sets.values())) - 1e-9:
            covered, found = covered + weight, error
    return math.expm1(found)


def grouped(rows: Sequence[Case]) -> dict[tuple[Any, ...], list[float]]:
    """Errors by set."""
    found: dict[tuple[Any, ...], list[float]] = {}
    for key, _, error in rows:
        found.setdefault(key, []).append(error)
    return found


def covered(rows: Sequence[Case]) -> str:
    """Which share of one half of the rows a bar from the other half covers, both ways."""

    def half(name: str) -> int:
        return sha256(name.encode()).digest()[0] % 2

    shares = []
    for side in (0, 1):
        within = math.log1p(bar(grouped([each for each in rows if half(each[1]) != side])))
        judged = [error <= within for _, name, error in rows if half(name) == side]
        shares.append(f"{sum(judged) / len(judged):.0%} of {len(judged)}" if judged else "none")
    return " and ".join(shares)


def published_rows(path: Path) -> list[tuple[dict[str, Any], float]]:
    """Rows of STEPS.json that are predicted, each with the logarithm of predicted over measured."""
    lines = map(json.loads, (RESULTS / "published.jsonl").read_text().splitlines())
    ratios = {line["id"]: math.log(line["ratio"]) for line in lines if "ratio" in line}
    return [(row, ratios[row["id"]]) for row in json.loads(path.read_text()) if row["id"] in ratios]


def kind_of(row: Mapping[str, Any]) -> str:
    """The device kind of a published row."""
    return next(kind for start, kind in KINDS.items() if row["hardware"].startswith(start))


def pairs(rows: Sequence[tuple[dict[str, Any], float]]) -> list[Case]:
    """Pairs of one model on as many devices, of one publication."""

    def what(row: Mapping[str, Any]) -> tuple[Any, ...]:
        return row["model"]["name"], row["model"]["seq"], row["hardware"], row["devices"], row["source"]

    return [
        (what(one), f"{one['id']} {other['id']}", abs(mine - yours))
        for (one, mine), (other, yours) in combinations(rows, 2)
        if what(one) == what(other)
    ]


def memory_rows() -> dict[str, list[Case]]:
    """Target family -> rows of predicted and compiled memory."""
    found: dict[str, list[Case]] = {}
    for name in MEMORY:
        for row in read(RESULTS / f"{name}.csv"):
            if "compiled_memory" in row:
                error = abs(math.log(row["predicted_memory"] / row["compiled_memory"]))
                target = load_device(row["target"]).target
                found.setdefault(target, []).append(((name,), f"{row['model']} {row['plan']}", error))
    for row in kept(RESULTS / "real.csv"):
        if row["compiled_memory"]:
            error = abs(math.log(float(row["predicted_memory"]) / float(row["compiled_memory"])))
            target = load_device(row["row"].partition("/")[2]).target
            found.setdefault(target, []).append((("real",), row["row"], error))
    return found


def main() -> None:
    """Print every bar with its rows and coverage; write the file where that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", type=Path, metavar="STEPS.json")
    parser.add_argument("--write", action="store_true", help=f"write {TOML.name}")
    asked = parser.parse_args()
    lines = ["# Relative errors that 90 % of kept rows do not exceed; written by benchmarks/bars.py."]

    def said(name: str, rows: Sequence[Case]) -> None:
        found = bar(grouped(rows))
        print(f"{name}: {found:.1%} of {len(rows)} rows in {len(grouped(rows))} sets; halves cover {covered(rows)}")
        lines.append(f"{json.dumps(name.rpartition(' ')[2])} = {found:.3f} # {len(rows)} rows")

    steps = published_rows(asked.steps)
    families: list[Case] = [
        ((row["model"]["name"].split("-")[0], kind_of(row)), row["id"], abs(error)) for row, error in steps
    ]
    for target in ("gpu", "tpu"):
        lines += ["", f"[step.{target}]"]
        kinds = [kind for kind in KINDS.values() if load_device(kind).target == target]
        said(f"step {target} all", [each for each in families if each[0][1] in kinds])
        for kind in kinds:
            of_kind = [each for each in families if each[0][1] == kind]
            if len(of_kind) >= OF_ONE_KIND:
                said(f"step {kind}", of_kind)
    lines += ["", "[tie]"]
    said("tie all", pairs(steps))
    lines += ["", "[memory]"]
    for target, rows in sorted(memory_rows().items()):
        said(f"memory {target}", rows)
    if asked.write:
        TOML.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
