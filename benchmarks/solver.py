"""Measure the solver on problems in IOPDDL JSON: cost, bound, gap, CPU seconds, peak memory.

    python benchmarks/solver.py [PROBLEM.json[.gz] …] [--models out/problems] [--time-limit 60] [--ilp highs,cbc,cp-sat]

Without files: the contest's instances in ../shared/iopddl (outside this project: the `benchmarks` of the repository
google/iopddl, Apache License 2.0). Problems of one's own: `autoshard plan … --dump-problem problem.json.gz`; `--models`
does that for a few small models (`MODELS`), into a folder, where they are not there yet. Each
solve runs in a process of its own, so that peak memory is its own. `--ilp` also hands the unreduced integer program to
these solvers, under the same limit; one that is too large for them is left out.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

INSTANCES = Path(__file__).resolve().parents[2] / "shared" / "iopddl"
BEST_KNOWN = {
    "asplos-2025-iopddl-A": (6_548_641_531, 6_513_812_172),
    "asplos-2025-iopddl-G": (217_039, 217_039),
    "asplos-2025-iopddl-M": (49_928_200_000, 49_429_153_686),
    "asplos-2025-iopddl-N": (199_470_000_000, 191_320_000_000),
    "asplos-2025-iopddl-S": (1_521_950_000, 1_511_240_136),
    "asplos-2025-iopddl-V": (1_617_084, 1_617_084),
}
"""Best cost and best lower bound known: results of the contest (ASPLOS 2025 / EuroSys 2025) and of its winners."""
_GPT2 = ["hf:gpt2", "--batch", "8", "--seq", "512", "--train", "adamw", "--device", "tpu-v5e"]
_PERCEPTRON = [f"{Path(__file__).with_name('nets.py')}:perceptron", "--device", "h100"]
MODELS = {
    "mlp-2x2": [*_PERCEPTRON, "--mesh", "2x2"],
    "mlp-2x4": [*_PERCEPTRON, "--mesh", "2x4"],
    "gpt2-1-layer-8": [*_GPT2, "--set", "n_layer=1", "--mesh", "8"],
    "gpt2-1-layer-2x2": [*_GPT2, "--set", "n_layer=1", "--mesh", "2x2"],
}
"""Arguments of `autoshard plan` by problem."""
LARGEST_PROGRAM = 3_000_000
"""Entries of the matrix of an unreduced program that is still handed to an ILP solver."""


def measure(path: Path, solver: str, time_limit: float) -> dict[str, Any]:
    """Solve one problem in this process: `solver` is "autoshard" or a backend for the unreduced program."""
    from autoshard.solver import ilp
    from autoshard.solver.iopddl import read
    from autoshard.solver.network import Network
    from autoshard.solver.objective import evaluate
    from autoshard.solver.solve import solve

    start, wall = time.process_time(), time.perf_counter()
    problem = read(path)
    if solver == "autoshard":
        solution = solve(problem, time_limit=time_limit - (time.perf_counter() - wall))
        status, bound, choice = solution.status.value, solution.bound, list(solution.choice)
    else:
        net = Network.of(problem)
        if ilp.nonzeros(net) > LARGEST_PROGRAM:
            return {"status": "too large", "cost": math.inf, "bound": -math.inf, "cpu": 0.0, "wall": 0.0, "rss": 0.0}
        result = ilp.solve_ilp(net, backend=solver, time_limit=time_limit)
        status, bound, choice = "finished" if result.finished else "time limit", result.bound, result.choice or []
    checked = evaluate(problem, choice) if choice else None
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "status": status,
        "cost": checked.objective if checked is not None and checked.feasible else math.inf,
        "bound": bound,
        "cpu": time.process_time() - start + children.ru_utime + children.ru_stime,
        "wall": time.perf_counter() - wall,
        "rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def dumped(folder: Path) -> list[Path]:
    """The problems of `MODELS`, planned where they are not in `folder` yet."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, arguments in MODELS.items():
        paths.append(folder / f"{name}.json.gz")
        if not paths[-1].exists():
            command = [sys.executable, "-m", "autoshard", "plan", *arguments, "--dump-problem", str(paths[-1])]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                sys.exit(f"{name}: {done.stderr.strip()}")
    return paths


def separately(path: Path, solver: str, time_limit: float) -> dict[str, Any]:
    """`measure` in a new process, stopped when it runs far over its limit."""
    command = [sys.executable, __file__, str(path), "--one", solver, "--time-limit", str(time_limit)]
    nothing = {"cost": math.inf, "bound": -math.inf, "cpu": math.nan, "wall": math.nan, "rss": math.nan}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=2 * time_limit + 120, check=False)
    except subprocess.TimeoutExpired:
        return {"status": "stopped", **nothing}
    if done.returncode:
        return {"status": (done.stderr.strip().splitlines() or ["failed"])[-1][:40], **nothing}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def line(name: str, solver: str, found: dict[str, Any]) -> str:
    """One row of the table."""
    cost, bound = found["cost"], found["bound"]
    gap = (cost - bound) / abs(cost) if math.isfinite(cost) and cost and math.isfinite(bound) else math.nan
    best = BEST_KNOWN.get(name)
    against = f"{cost / best[0] - 1:+9.3%} {bound / best[1] - 1:+9.3%}" if best and math.isfinite(cost) else ""
    return (
        f"{name:28s} {solver:10s} {found['status']:11s} {cost:15.9g} {bound:15.9g} {gap:8.3%} "
        f"{found['cpu']:7.1f} {found['rss'] / 1e9:6.2f} {against}"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("problems", nargs="*", type=Path)
    parser.add_argument("--models", type=Path, metavar="FOLDER", help="plan a few small models for their problems")
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds per solve")
    parser.add_argument("--ilp", default="", help="backends for the unreduced program, for example highs,cbc,cp-sat")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.problems[0], options.one, options.time_limit)), flush=True)
        os._exit(0)  # a solver that ignores its limit is left behind, and would be waited for
    own = dumped(options.models) if options.models else []
    problems = [*options.problems, *own] or sorted(INSTANCES.glob("*.json.gz"))
    if not problems:
        sys.exit(f"no problems: name IOPDDL files, or put the contest's instances into {INSTANCES}")
    print(
        f"{'problem':28s} {'solver':10s} {'status':11s} {'cost':>15s} {'bound':>15s} {'gap':>8s} {'CPU s':>7s} "
        f"{'GB':>6s} cost and bound against the best known"
    )
    for path in problems:
        name = path.name.removesuffix(".gz").removesuffix(".json")
        for solver in ("autoshard", *filter(None, options.ilp.split(","))):
            print(line(name, solver, separately(path, solver, options.time_limit)), flush=True)


if __name__ == "__main__":
    main()
