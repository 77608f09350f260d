"""The quality table: the automatic plan's compiled step time over that of the best plan written by hand.

Every model of `models.py` below, on each target: the solver's automatic plan (`solver`: no plan by hand and no target
compiler in its loop), what `plan()` returns (`plan()`: the solver's, or a plan by hand that is predicted faster), and
every plan by hand that has a form for the model, are compiled by the target's own compiler and judged under the device
model (`verify/judge.py`). Rows are written as they are found and compiled programs are cached, so a run that was
stopped goes on where it was, and `plan()` costs no compilation where it is one of the others; rows that other sources
of autoshard made are kept unless `--again`. With `--best 3` only the three plans by hand that are predicted best are
compiled; of the others the table has what is predicted, in parentheses. Batches of models with 8 rows have a row per
device.

    python benchmarks/quality.py --models gpt2,mlp --targets h100:8,h100:2x8 --out out/quality.jsonl
    python benchmarks/quality.py --tables --out out/quality.jsonl
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from compiled import key, measured_plan, mesh_on, read, sources
from models import program
from tabulate import tabulate

from autoshard import manual
from autoshard.api import plan_captured
from autoshard.errors import ManualPlanError
from autoshard.graph.annotations import Annotations
from autoshard.graph.ops import Graph
from autoshard.mesh import Mesh
from autoshard.rivals import or_by_hand
from autoshard.written import captured_graph, predict_annotations

MODELS = [
    *("mlp", "gpt2", "llama", "bert", "moe", "dlrm", "vit", "resnet"),
    *("gpt2-2b", "llama2-2b", "gpt-neo-2.7b", "t5", "mixtral"),
]
TARGETS = {"h100:8": "2x4", "h100:2x8": "2x8", "tpu-v5e:2x4": "2x4", "tpu-v5e:4x4": "4x4"}
"""Target -> the mesh that plans for it are made on."""
SOLVER, PLAN = "solver", "plan()"
"""The automatic plans: the solver's alone, and what `plan()` returns."""
TIME_LIMIT_S = 900.0
"""Of wall time, for the solver: enough for its proof where other work shares the machine."""

Row = dict[str, Any]


def plans(graph: Graph, mesh: Mesh, wanted: list[str]) -> tuple[dict[str, Annotations], dict[str, str]]:
    """What each plan annotates; and why there is no plan of a name."""
    found: dict[str, Annotations] = {}
    left_out: dict[str, str] = {}
    if {SOLVER, PLAN} & {*wanted}:
        alone = plan_captured(graph, mesh, rivals=False, time_limit=TIME_LIMIT_S)
        found[SOLVER] = alone.annotations(graph)
        found[PLAN] = or_by_hand(alone, graph, lambda annotations: annotations).annotations(graph)
    for name in wanted:
        if name in found:
            continue
        try:
            found[name] = manual.PLANS[name](graph, mesh)
        except ManualPlanError as error:
            left_out[name] = str(error)
    return {name: made for name, made in found.items() if name in wanted}, left_out


def sweep(models: list[str], targets: list[str], wanted: list[str], out: Path, again: bool, best: int | None) -> None:
    """Make the rows that are missing or failed; with `again`, also those that other sources made.

    Args:
        best: how many plans by hand are compiled, those that are predicted fastest; None for all.
    """
    known = read(out)
    for target in targets:
        shape = TARGETS[target]
        mesh = mesh_on(target, shape)
        for model in models:
            row: Row = {"model": model, "target": target, "mesh": shape}
            rows = {name: known.get(key(row | {"plan": name})) for name in wanted}
            missing = {name for name in wanted if _missing(rows[name], again, best)}
            if not missing and _compiled_by_hand(rows) >= _wanted_by_hand(rows, best):
                continue
            graph = captured_graph(program(model, mesh.size))
            made, left_out = plans(graph, mesh, wanted if best is not None else [*missing])
            times = {name: predict_annotations(graph, each, mesh).step_time_s for name, each in made.items()}
            order = sorted(made, key=lambda each: (each in manual.PLANS, each != SOLVER, times[each]))
            compiled = [name for name in order if name not in manual.PLANS]
            compiled += [name for name in order if name in manual.PLANS][:best]
            for name in [*order, *left_out]:
                if name not in missing and not (name in compiled and "compiled" not in (rows[name] or {})):
                    continue
                found: Row = {**row, "plan": name, "sources": sources()}
                try:
                    if name in left_out:
                        found["left_out"] = left_out[name]
                    elif name in compiled:
                        found = {**measured_plan(graph, made[name], mesh, target), **found}
                    else:
                        found["predicted_step_time_s"] = times[name]
                except Exception as error:  # a sweep goes on past one failure, and shows it in the table
                    found["error"] = f"{type(error).__name__}: {error}"
                with out.open("a") as lines:
                    lines.write(json.dumps(found) + "\n")
                print(target, model, name, _outcome(found), file=sys.stderr, flush=True)


def _missing(row: Row | None, again: bool, best: int | None) -> bool:
    if row is None or "error" in row or (again and row["sources"] != sources()):
        return True
    return best is None and not {"compiled", "left_out"} & {*row}


def _compiled_by_hand(rows: dict[str, Row | None]) -> int:
    return sum("compiled" in (row or {}) for name, row in rows.items() if name in manual.PLANS)


def _wanted_by_hand(rows: dict[str, Row | None], best: int | None) -> int:
    """How many plans by hand are to be compiled, of those that the model has."""
    there = sum("left_out" not in (row or {}) for name, row in rows.items() if name in manual.PLANS)
    return there if best is None else min(best, there)


def _outcome(row: Row) -> str:
    if "error" in row or "left_out" in row:
        return str(row.get("error", row.get("left_out")))
    predicted = row["predicted_step_time_s"]
    if "compiled" not in row:
        return f"{1e3 * predicted:.3f} ms predicted, not compiled"
    compiled = row["compiled"]["step_time_s"]
    return f"{1e3 * compiled:.3f} ms compiled, {1e3 * predicted:.3f} predicted, fidelity {row['fidelity']}"


def table(rows: list[Row], style: str) -> str:
    """One line per model and target: times of all plans in ms, and the automatic ones over the best by hand.

    Both ratios serial; that of `plan()` also where collectives overlap. In parentheses: predicted, not compiled.
    """
    cells: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        if "predicted_step_time_s" in row:
            cells.setdefault((row["model"], f"{row['target']}, {row['mesh']}"), {})[row["plan"]] = row
    lines = []
    for place, shown in cells.items():
        times = (_ms(shown.get(name)) for name in (SOLVER, PLAN, *manual.PLANS))
        found = {name: row for name, row in shown.items() if "compiled" in row}
        by_hand = [(_seconds(row), name) for name, row in found.items() if name in manual.PLANS]
        best = min(by_hand, default=(0.0, ""))[1]
        ratios = [(SOLVER, "step_time_s"), (PLAN, "step_time_s"), (PLAN, "overlapped_s")]
        lines.append([*place, *times, best, *(_over_best(found, *each) for each in ratios)])
    over = [f"{SOLVER} / best", f"{PLAN} / best", "overlapped"]
    headers = ["model", "target, mesh", SOLVER, PLAN, *manual.PLANS, "best by hand", *over]
    return tabulate(lines, headers, style, disable_numparse=True)


def _over_best(found: dict[str, Row], name: str, figure: str) -> str:
    by_hand = [row["compiled"][figure] for each, row in found.items() if each in manual.PLANS]
    best = min((each for each in by_hand if each is not None), default=None)
    if name not in found or best is None:
        return ""
    return f"{found[name]['compiled'][figure] / best:.3f}"


def _seconds(row: Row) -> float:
    return float(row["compiled"]["step_time_s"])


def _ms(row: Row | None) -> str:
    if row is None:
        return ""
    return f"{1e3 * _seconds(row):.3f}" if "compiled" in row else f"({1e3 * row['predicted_step_time_s']:.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--targets", default=",".join(TARGETS))
    parser.add_argument("--plans", default=",".join([SOLVER, PLAN, *manual.PLANS]))
    parser.add_argument("--out", type=Path, default=Path("out/quality.jsonl"))
    parser.add_argument("--best", type=int, help="compile only so many plans by hand, those predicted fastest")
    parser.add_argument("--again", action="store_true", help="also make rows anew that other sources made")
    parser.add_argument("--tables", action="store_true", help="only print what the file holds")
    parser.add_argument("--markdown", action="store_true", help="print the table as markdown")
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    if not options.tables:
        asked = (each.split(",") for each in (options.models, options.targets, options.plans))
        sweep(*asked, options.out, options.again, options.best)
    print(table(list(read(options.out).values()), "pipe" if options.markdown else "simple"))


if __name__ == "__main__":
    main()
