"""Rows of the benchmarks: CSV files in `results/`, each row with the commit, the date and the versions that made it.

A row is one plan of one program on one target, or why there is none (`left_out`, `error`). Bytes are per device,
seconds per step. `collectives` has `kind axes predicted compiled difference` of each kind over each set of axes, in
bytes; `difference` is what has no counterpart (`autoshard/verify/fidelity.py`). `compiler_s`, if `--cycles` asked for
it, is what libtpu itself says that the kernels take (`autoshard/verify/cycles.py`), and `compiler_step_s` a step. Of a
solve: the `limit` of memory that it was to keep, the objective, the problem's nodes, the gap as a part of the
objective, its CPU seconds.
"""

from __future__ import annotations

import csv
import datetime
import hashlib
import subprocess
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import autoshard

RESULTS = Path(__file__).with_name("results")
Row = dict[str, Any]

KEY = ("model", "target", "mesh", "plan")
SIDES = ("bytes", "memory", "s", "flops", "traffic")
"""Figures that are there as `predicted_…` and as `compiled_…`."""
FIGURES = (
    "fidelity",
    *(f"{side}_{figure}" for figure in SIDES for side in ("predicted", "compiled")),
    "compiled_overlapped_s",
)
CYCLES = "compiler_s"
CLOCK = "compiler_step_s"
HIDDEN = "predicted_overlapped_s"
SOLVE = ("limit", "gap")
COLUMNS = (
    *KEY,
    *FIGURES,
    "collectives",
    "left_out",
    "error",
    "sources",
    "commit",
    "date",
    "versions",
    CYCLES,
    *SOLVE,
    CLOCK,
    HIDDEN,
)
"""New ones come last, so that rows without them stay as they are."""
PACKAGES = ("jax", "libtpu", "torch", "torch_xla", "transformers")


@cache
def made() -> Row:
    """What makes the rows here and now."""
    digest = hashlib.sha256()
    root = Path(autoshard.__file__).parent
    for path in sorted(path for end in ("py", "json", "toml", "npz") for path in root.rglob(f"*.{end}")):
        digest.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    commit = subprocess.run(["git", "rev-parse", "--short=8", "HEAD"], cwd=root, capture_output=True, text=True)
    return {
        "sources": digest.hexdigest()[:12],
        "commit": commit.stdout.strip(),
        "date": datetime.date.today().isoformat(),
        "versions": " ".join(f"{name}-{metadata.version(name)}" for name in PACKAGES),
    }


def flat(report: Row) -> Row:
    """The columns of what `VerifyReport.as_dict` says."""
    compiled = report["compiled"]
    figures = {
        "bytes": (report["predicted_bytes"], report["compiled_bytes"]),
        "memory": (report["memory"]["predicted_bytes"], report["memory"]["compiled_bytes"]),
        "s": (report["predicted_step_time_s"], compiled["step_time_s"]),
        "flops": (report["flops"]["predicted"], report["flops"]["compiled"]),
        "traffic": (report["bytes"]["predicted"], report["bytes"]["compiled"]),
    }
    fields = ("predicted_bytes", "compiled_bytes", "difference_bytes")
    collectives = (
        " ".join([each["kind"], "+".join(each["axes"]), *(str(each[field]) for field in fields)])
        for each in report["collectives"]
    )
    both = {
        f"{side}_{name}": pair[n] for name, pair in figures.items() for n, side in enumerate(("predicted", "compiled"))
    }
    overlapped = {"compiled_overlapped_s": compiled["overlapped_s"], HIDDEN: report["predicted_overlapped_s"]}
    cycles = {}
    if "cycles" in report:
        cycles = {CYCLES: report["cycles"]["seconds"], CLOCK: report["cycles"]["step_time_s"]}
    fidelity = float("inf") if report["fidelity"] is None else report["fidelity"]
    return {"fidelity": fidelity, **both, **overlapped, **cycles, "collectives": "; ".join(collectives)}


def read(path: Path) -> list[Row]:
    """The rows of a file, none if it is not there; of several with one key the last, at the place of the first."""
    if not path.exists():
        return []
    with path.open(newline="") as lines:
        rows: list[Row] = [{name: text for name, text in each.items() if text} for each in csv.DictReader(lines)]
    for row in rows:
        row.update({name: float(row[name]) for name in (*FIGURES, CYCLES, CLOCK, HIDDEN, *SOLVE) if name in row})
    return list({key(row): row for row in rows}.values())


def timed(row: Row | None) -> bool:
    """Whether a row has libtpu's own figure, or is of no plan that was compiled for a TPU."""
    return row is None or CYCLES in row or "compiled_s" not in row or not row["target"].startswith("tpu")


def key(row: Row) -> tuple[str, ...]:
    """What a row is about."""
    return tuple(row[name] for name in KEY)


def add(path: Path, row: Row) -> Row:
    """Append a row, with what made it; returns it."""
    row = made() | row
    path.parent.mkdir(parents=True, exist_ok=True)
    head, _, rows = path.read_text().partition("\n") if path.exists() else ("", "", "")
    if head != ",".join(COLUMNS):
        path.write_text(",".join(COLUMNS) + "\n" + rows)
    with path.open("a", newline="") as lines:
        writer = csv.writer(lines, lineterminator="\n")
        values = (row.get(name, "") for name in COLUMNS)
        writer.writerow(f"{each:.6g}" if isinstance(each, float) else each for each in values)
    return row


def current(row: Row | None) -> bool:
    """Whether a row is there that today's sources made, and is no failure."""
    return row is not None and "error" not in row and row["sources"] == made()["sources"]


def kept(row: Row | None, again: bool, cycles: bool = False) -> bool:
    """Whether a row need not be made: it is there and no failure.

    With `again` today's sources made it; with `cycles` it has libtpu's own figure where there is one.
    """
    if row is None or "error" in row:
        return False
    return (not again or current(row)) and (not cycles or timed(row))
