"""Programs that people train, at their size: planned, compiled, and held against each other.

One process plans a row of `real_programs.toml`, another compiles the plan for the target. A line per row says CPU
seconds and memory of planning, the solver's gap, attentions kept as one op, and step, memory and bytes as predicted and
compiled. A row that is in the file is not made again unless `--again`.

    python benchmarks/real.py
    python benchmarks/real.py llama3-8b/h100:8 --layers 8 --again
    python benchmarks/real.py llama3-8b --remat auto        # and none, products, full
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import resource
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from results import RESULTS, made

from autoshard.sources import LAYERS

ROOT = Path(__file__).parents[1]
COLUMNS = (
    *("row", "layers", "remat", "mesh", "plan_cpu_s", "rss_gb", "gap", "fused", "written_out", "limit", "fidelity"),
    *(f"{side}_{what}" for what in ("s", "memory", "bytes") for side in ("predicted", "compiled")),
    *("compile_cpu_s", "recomputed", "error", "sources", "commit", "date", "versions"),
    *("predicted_overlapped_s", "compiled_overlapped_s"),  # last: older rows have none
)


def main() -> None:
    """Make the rows asked for, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW", help="PROGRAM/TARGET, or PROGRAM for all of its targets")
    parser.add_argument("--programs", type=Path, default=Path(__file__).with_name("real_programs.toml"))
    parser.add_argument("--layers", type=int, help="instead of the program's")
    parser.add_argument("--remat", default="", help="as `autoshard plan --remat`")
    parser.add_argument("--only-plan", action="store_true", help="compile nothing")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS / "real.csv")
    asked = parser.parse_args()
    document = tomllib.loads(asked.programs.read_text())
    for program, places in document["rows"].items():
        for target, mesh in places:
            name = f"{program}/{target}"
            if asked.rows and not {program, name} & set(asked.rows):
                continue
            if not asked.again and any(matches(row, name, asked) for row in kept(asked.out)):
                continue
            row = made_row(name, document["programs"][program], target, mesh, asked)
            write(asked.out, row, asked)
            print(said(row), flush=True)


def made_row(name: str, program: dict[str, Any], target: str, mesh: str, asked: argparse.Namespace) -> dict[str, Any]:
    """Plan and compile one program."""
    row: dict[str, Any] = {"row": name, "layers": asked.layers or "", "remat": asked.remat, "mesh": mesh, **made()}
    given = [program["source"], "--train", program["optimizer"]]
    for option in ("dtype", "batch", "seq", "memory"):
        given += [f"--{option}", str(program[option])] if option in program else []
    given += ["--checkpoint"] if program.get("checkpoint") else []
    wanted = program.get("settings", {})
    settings = {key: wanted[key] for key in wanted if not (asked.layers and key in LAYERS)}
    given += [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    given += ["--layers", str(asked.layers)] if asked.layers else []
    remat = ["--remat", asked.remat] if asked.remat else []
    with tempfile.TemporaryDirectory() as folder:
        plan = Path(folder) / "plan.json"
        place = ["--device", target, "--mesh", mesh, "-o", str(plan), "--json"]
        found, cpu, rss = run(["plan", *given, *remat, *place])
        row |= {"plan_cpu_s": round(cpu, 1), "rss_gb": round(rss / 2**30, 2)}
        if isinstance(found, str):
            return row | {"error": found}
        written = json.loads(plan.read_text())
        attention = written.get("info", {}).get("attention", {})
        row |= {
            "gap": (written["solver"] or {}).get("gap"),
            "limit": written["options"]["memory"],
            "fused": attention.get("fused", 0),
            "written_out": len(attention.get("written_out", [])),
            "recomputed": next((name for name in written["program"]["switches"] if name.startswith("remat:")), ""),
            "predicted_s": written["predicted"]["step_time_s"],
            "predicted_overlapped_s": written["predicted"]["overlapped_s"],
            "predicted_memory": written["predicted"]["peak_memory_bytes"],
        }
        if asked.only_plan or not program.get("compile", True):
            return row
        report, cpu, _ = run(["verify", str(plan), program["source"], "--max-fidelity", "10", "--json"])
        row["compile_cpu_s"] = round(cpu, 1)
        if isinstance(report, str):
            return row | {"error": report}
        return row | {
            "fidelity": report["fidelity"],
            "predicted_bytes": report["predicted_bytes"],
            "compiled_bytes": report["compiled_bytes"],
            "compiled_memory": report["memory"]["compiled_bytes"],
            "compiled_s": report["compiled"]["step_time_s"],
            "compiled_overlapped_s": report["compiled"]["overlapped_s"],
        }


def run(arguments: Sequence[str]) -> tuple[dict[str, Any] | str, float, int]:
    """What a command of `autoshard` printed as JSON, or its error; its CPU seconds; most bytes of it in memory."""
    command = [sys.executable, "-m", "autoshard", *arguments]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    out, error = process.communicate()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    if process.returncode:
        return (error.strip().splitlines() or ["no message"])[-1], cpu, after.ru_maxrss * 1024
    found: dict[str, Any] = json.loads(out.strip().splitlines()[-1])
    return found, cpu, after.ru_maxrss * 1024


def matches(row: dict[str, str], name: str, asked: argparse.Namespace) -> bool:
    """Whether a kept row is of this program and target, with what was asked for beside."""
    return (row["row"], row["layers"], row.get("remat", "")) == (name, str(asked.layers or ""), asked.remat)


def kept(path: Path) -> list[dict[str, str]]:
    """The rows of a file, none if there is no file."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def write(path: Path, row: dict[str, Any], asked: argparse.Namespace) -> None:
    """Put a row into the file, in place of an older one."""
    rows = [each for each in kept(path) if not matches(each, row["row"], asked)]
    rows.append({column: str(row.get(column, "")) for column in COLUMNS})
    partial = path.with_suffix(".partial")
    with partial.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    os.replace(partial, path)


def said(row: dict[str, Any]) -> str:
    """A row in one line."""
    if row.get("error"):
        return f"{row['row']}: {row['error']} ({row['plan_cpu_s']} CPU s)"
    recomputed = f" {row['recomputed']}" if row["recomputed"] else ""
    line = (
        f"{row['row']}{recomputed}: planned in {row['plan_cpu_s']} CPU s, {row['rss_gb']} GB, gap {row['gap']:.2%}, "
        f"{row['fused']} attentions as one op, {row['written_out']} written out; "
        f"step {row['predicted_s'] * 1e3:.1f} ms ({row['predicted_overlapped_s'] * 1e3:.1f} overlapped), "
        f"memory {row['predicted_memory'] / 1e9:.2f} GB"
    )
    if "compiled_s" not in row:
        return line
    fits = "fits" if row["limit"] is None or row["compiled_memory"] <= row["limit"] else "does NOT fit"
    return (
        f"{line}; compiled in {row['compile_cpu_s']} CPU s: step {row['compiled_s'] * 1e3:.1f} ms "
        f"({row['compiled_overlapped_s'] * 1e3:.1f} overlapped), memory "
        f"{row['compiled_memory'] / 1e9:.2f} GB ({row['predicted_memory'] / row['compiled_memory'] - 1:+.1%}, {fits}), "
        f"bytes {row['fidelity']:.1%} off"
    )


if __name__ == "__main__":
    main()
