"""What came of every shape of mesh of a number of devices, and what the whole search cost.

    python benchmarks/mesh_search.py [--jobs "llama-8b 64 v5e"] [--out out/mesh_search.jsonl]

Each job is `autoshard plan --devices N` in a process of its own, with warm caches; its CPU seconds hold imports too.
The steps are those of `search_cost.py`: batch 4 of 8,192 tokens, AdamW, f32, no memory limit.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from search_cost import llama, spent
from tabulate import tabulate

from autoshard.api import Plan

LLAMA_8B = llama(32, 4096, 14336, 32)
JOBS: dict[str, list[str]] = {
    "llama-8b 64 v5e": [*LLAMA_8B, "--devices", "64", "--device", "tpu-v5e"],
    "llama-8b 64 h100": [*LLAMA_8B, "--device", "h100:8x8"],
    "gpt2 8 v5e": ["hf:gpt2", "--batch", "8", "--seq", "512", "--devices", "8", "--device", "tpu-v5e"],
}
"""Name -> arguments of `autoshard plan`; `--train adamw` is added to all."""


def measure(name: str, time_limit: float) -> dict[str, Any]:
    """Search for one job, with so many seconds of wall time for the solver."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PJRT_DEVICE": "CPU", "JAX_PLATFORMS": "cpu"}
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "plan.json"
        command = ["plan", *JOBS[name], "--train", "adamw", "--time-limit", str(time_limit), "--json", "-o", str(path)]
        begun = time.perf_counter()
        cpu, said = spent([sys.executable, "-m", "autoshard", *command], environment)
        wall = time.perf_counter() - begun
        plan = Plan.load(path)
    found = json.loads(said.splitlines()[-1])
    stages = {stage: round(took["cpu_seconds"], 1) for stage, took in found["stages"].items()}
    shapes = [
        {
            "shape": list(tried.shape),
            "outcome": tried.outcome,
            "step_time_s": tried.step_time_s,
            "objective": tried.objective,
            "bound": tried.bound,
            "peak_memory_bytes": tried.peak_memory_bytes,
            "note": tried.note,
        }
        for tried in plan.search
    ]
    return {
        "job": name,
        "cpu": cpu,
        "wall": wall,
        "rss": found["peak_rss_bytes"],
        "chosen": list(plan.mesh.shape),
        "stages": stages,
        "shapes": shapes,
    }


def table(row: dict[str, Any]) -> str:
    """One job: a line of what it cost, and its shapes, the best first."""

    def milliseconds(seconds: float | None) -> str:
        return "" if seconds is None else f"{1e3 * seconds:,.1f}"

    lines = [
        (
            "x".join(map(str, each["shape"])),
            each["outcome"],
            milliseconds(each["step_time_s"]),
            milliseconds(each["objective"]),
            milliseconds(each["bound"]),
            "" if each["peak_memory_bytes"] is None else f"{each['peak_memory_bytes'] / 1e9:,.1f}",
            each["note"],
        )
        for each in sorted(row["shapes"], key=lambda each: (each["step_time_s"] or float("inf"), each["shape"]))
    ]
    heads = ("mesh", "outcome", "predicted ms", "objective ms", "bound ms", "GB", "")
    chosen = "x".join(map(str, row["chosen"]))
    cost = f"{row['cpu']:.0f} CPU s, {row['wall']:.0f} s, peak RSS {row['rss'] / 1e9:.2f} GB; stages {row['stages']}"
    return f"{row['job']}: {chosen} of {len(lines)} shapes; {cost}\n{tabulate(lines, heads, tablefmt='pipe')}\n"


def main() -> None:
    """Print a table for each job as it ends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", default=",".join(JOBS))
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds of wall time for each job's solver")
    parser.add_argument("--out", type=Path, help="append every job, as JSON, to this file")
    options = parser.parse_args()
    for name in options.jobs.split(","):
        row = measure(name, options.time_limit)
        print(table(row), flush=True)
        if options.out is not None:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            with options.out.open("a") as lines:
                lines.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
