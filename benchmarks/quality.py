"""The quality table: the automatic plan's compiled step time over that of the best plan written by hand.

Every model of `models.py` below, on each target: the solver's automatic plan (`solver`: no plan by hand and no target
compiler in its loop), what `plan()` returns (`plan()`: the solver's, or a plan by hand that is predicted faster), and
every plan by hand that has a form for the model, are compiled by the target's own compiler and judged under the device
model (`verify/judge.py`). Rows are written as they are found and compiled programs are cached, so a run that was
stopped goes on where it was, and `plan()` costs no compilation where it is one of the others; rows that other sources
of autoshard made are kept unless `--again`. With `--best 3` only the three plans by hand that are predicted best are
compiled; of the others a row has what is predicted. Batches of models with 8 rows have a row per
device. With --cycles, libtpu compiles to the end, and its own estimate of the kernels is kept as `compiler_s`.

    python benchmarks/quality.py --targets tpu-v5e:2x4
    python benchmarks/quality.py --targets h100:8,h100:2x8 --best 2
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from compiled import TIME_LIMIT_S, measured_plan, mesh_on
from models import program
from results import RESULTS, Row, add, kept, key, read
from tables import QUALITY_MODELS

from autoshard import manual
from autoshard.cost.predict import predict
from autoshard.errors import ManualPlanError
from autoshard.graph.annotations import Annotations
from autoshard.graph.ops import Graph
from autoshard.mesh import Mesh
from autoshard.planning.one_mesh import candidate_on
from autoshard.planning.options import PlanningOptions
from autoshard.planning.rivals import or_by_hand
from autoshard.stablehlo.reader import build_graph

TARGETS = {"h100:8": "2x4", "h100:2x8": "2x8", "tpu-v5e:2x4": "2x4"}
"""Target -> the mesh that plans for it are made on."""
SOLVER, PLAN = "solver", "plan()"
"""The automatic plans: the solver's alone, and what `plan()` returns."""


def plans(graph: Graph, mesh: Mesh, wanted: list[str]) -> tuple[dict[str, Annotations], dict[str, str]]:
    """What each plan annotates; and why there is no plan of a name."""
    found: dict[str, Annotations] = {}
    left_out: dict[str, str] = {}
    if {SOLVER, PLAN} & {*wanted}:
        options = PlanningOptions(time_limit=TIME_LIMIT_S)
        alone = candidate_on(graph, mesh, options, TIME_LIMIT_S)
        found[SOLVER] = alone.annotations
        found[PLAN] = or_by_hand(alone, graph, options, {}).annotations
    for name in wanted:
        if name in found:
            continue
        try:
            found[name] = manual.PLANS[name](graph, mesh)
        except ManualPlanError as error:
            left_out[name] = str(error)
    return {name: made for name, made in found.items() if name in wanted}, left_out


def sweep(
    models: list[str],
    targets: list[str],
    wanted: list[str],
    out: Path,
    again: bool,
    best: int | None,
    cycles: bool = False,
) -> None:
    """Make the rows that are missing or failed; with `again`, also those that other sources made.

    Args:
        best: how many plans by hand are compiled, those that are predicted fastest; None for all.
        cycles: whether those that were compiled for TPUs are to have libtpu's own figure too.
    """
    known = {key(row): row for row in read(out)}
    for target in targets:
        shape = TARGETS[target]
        mesh = mesh_on(target, shape)
        for model in models:
            row: Row = {"model": model, "target": target, "mesh": shape}
            rows = {name: known.get(key(row | {"plan": name})) for name in wanted}
            missing = {name for name in wanted if _missing(rows[name], again, cycles, best)}
            if not missing and _compiled_by_hand(rows) >= _wanted_by_hand(rows, best):
                continue
            graph = build_graph(program(model, mesh.size))
            made, left_out = plans(graph, mesh, wanted if best is not None else [*missing])
            times = {name: predict(graph, each, mesh).overlapped_s for name, each in made.items()}
            order = sorted(made, key=lambda each: (each in manual.PLANS, each != SOLVER, times[each]))
            compiled = [name for name in order if name not in manual.PLANS]
            compiled += [name for name in order if name in manual.PLANS][:best]
            for name in [*order, *left_out]:
                if name not in missing and not (name in compiled and "compiled_s" not in (rows[name] or {})):
                    continue
                found: Row = {**row, "plan": name}
                try:
                    if name in left_out:
                        found["left_out"] = left_out[name]
                    elif name in compiled:
                        found = {**measured_plan(graph, made[name], mesh, target, cycles), **found}
                    else:
                        found["predicted_s"] = times[name]
                except Exception as error:  # a sweep goes on past one failure, and shows it in the table
                    found["error"] = f"{type(error).__name__}: {error}".partition("\n")[0]
                add(out, found)
                print(target, model, name, _outcome(found), file=sys.stderr, flush=True)


def _missing(row: Row | None, again: bool, cycles: bool, best: int | None) -> bool:
    if row is None or not kept(row, again, cycles):
        return True
    return best is None and not {"compiled_s", "left_out"} & {*row}


def _compiled_by_hand(rows: dict[str, Row | None]) -> int:
    return sum("compiled_s" in (row or {}) for name, row in rows.items() if name in manual.PLANS)


def _wanted_by_hand(rows: dict[str, Row | None], best: int | None) -> int:
    """How many plans by hand are to be compiled, of those that the model has."""
    there = sum("left_out" not in (row or {}) for name, row in rows.items() if name in manual.PLANS)
    return there if best is None else min(best, there)


def _outcome(row: Row) -> str:
    if "error" in row or "left_out" in row:
        return str(row.get("error", row.get("left_out")))
    predicted = row["predicted_s"]
    if "compiled_s" not in row:
        return f"{1e3 * predicted:.3f} ms predicted, not compiled"
    return f"{1e3 * row['compiled_s']:.3f} ms compiled, {1e3 * predicted:.3f} predicted, fidelity {row['fidelity']}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(QUALITY_MODELS))
    parser.add_argument("--targets", default=",".join(TARGETS))
    parser.add_argument("--plans", default=",".join([SOLVER, PLAN, *manual.PLANS]))
    parser.add_argument("--out", type=Path, default=RESULTS / "quality.csv")
    parser.add_argument("--best", type=int, help="compile only so many plans by hand, those predicted fastest")
    parser.add_argument("--again", action="store_true", help="also make rows anew that other sources made")
    parser.add_argument("--cycles", action="store_true", help="TPU targets: also libtpu's own estimate (slow)")
    options = parser.parse_args()
    asked = (each.split(",") for each in (options.models, options.targets, options.plans))
    sweep(*asked, options.out, options.again, options.best, options.cycles)


if __name__ == "__main__":
    main()
