"""Whether tight memory limits are kept: the solver on real programs.

    python benchmarks/limits.py [tight] [--models gpt2,mlp] [--targets h100:8] [--again]

`tight`: a plan within `SLACK` times the least memory predicted of the plans that were found (others may need less),
against the `unlimited` one, both compiled. Every row is written as it is found, as `compiled.py` does.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from functools import cache
from itertools import product
from pathlib import Path

from compiled import TIME_LIMIT_S, measured_plan, mesh_on
from models import program
from results import RESULTS, Row, add, kept, key, read
from tables import SOLVED

from autoshard.graph.ops import Graph
from autoshard.mesh import Mesh
from autoshard.planning.memory import within_limit
from autoshard.planning.one_mesh import OneMesh
from autoshard.plans.value import NoPlanError
from autoshard.stablehlo.reader import build_graph

SLACK = 1.1


def tight(graph: Graph, mesh: Mesh, target: str) -> dict[str, Row]:
    """Rows `unlimited` and `tight`."""
    problem = OneMesh(graph, mesh, seconds=TIME_LIMIT_S)
    free = problem.candidate(None)
    limit = SLACK * min(_least_memory(problem), free.prediction.peak_memory_bytes)
    rows: dict[str, Row] = {"unlimited": measured_plan(graph, free.annotations, mesh, target), "tight": {}}
    try:
        found = within_limit(problem, limit)
    except NoPlanError as error:
        rows["tight"]["left_out"] = str(error)
    else:
        rows["tight"] = measured_plan(graph, found.annotations, mesh, target) | {"gap": found.solver.gap}
    rows["tight"]["limit"] = limit
    return rows


def _least_memory(problem: OneMesh) -> float:
    """The least predicted peak that a plan was found for: the answer to a limit of one byte."""
    try:
        return within_limit(problem, 1.0).prediction.peak_memory_bytes
    except NoPlanError as error:
        return error.least


MADE: dict[str, Callable[[Graph, Mesh, str], dict[str, Row]]] = {"tight": tight}


def sweep(table: str, models: Iterable[str], targets: Iterable[str], mesh: str, out: Path, again: bool = False) -> None:
    """Make the rows of a table that are missing or failed; with `again`, also those that other sources made."""
    known = {key(row): row for row in read(out)}
    for model, target in product(models, targets):
        place: Row = {"model": model, "target": target, "mesh": mesh}
        if all(kept(known.get(key(place | {"plan": plan})), again) for plan in SOLVED[table][2]):
            continue
        try:
            made = MADE[table](graph_of(model), mesh_on(target, mesh), target)
        except Exception as error:  # a sweep goes on past one failure, and shows it in the table
            text = f"{type(error).__name__}: {error}".partition("\n")[0]
            made = {plan: {"error": text} for plan in SOLVED[table][2]}
        for plan, row in made.items():
            add(out, place | {"plan": plan} | row)
            print(model, target, plan, row, file=sys.stderr, flush=True)


@cache
def graph_of(model: str) -> Graph:
    """Of the model's training step."""
    return build_graph(program(model))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", default=[*SOLVED], help=f"of {', '.join(SOLVED)}; default all")
    parser.add_argument("--models")
    parser.add_argument("--targets", help="device kinds of the mesh, and what plans are compiled for")
    parser.add_argument("--mesh", default="2x4")
    parser.add_argument("--out", type=Path, default=RESULTS / "limits.csv")
    parser.add_argument("--again", action="store_true", help="rows too that other sources of autoshard made")
    options = parser.parse_args()
    for table in options.tables:
        asked = [each and each.split(",") for each in (options.models, options.targets)]
        models, targets = (some or own for some, own in zip(asked, SOLVED[table], strict=False))
        sweep(table, models, targets, options.mesh, options.out, options.again)


if __name__ == "__main__":
    main()
