"""Plans held against compiled programs: collectives and memory predicted, and the quality of the plan.

For each model, target and plan (auto, by hand, random) the annotated program is compiled, and its collectives, memory
and step time under the device model are put beside what was predicted. Compiled programs are cached on disk by what
they are compiled from, and every row is written as it is found, so a run that was stopped goes on where it was. A row
that other sources of autoshard made is kept unless `--again`, which compiles only where the annotated program changed.

    python benchmarks/compiled.py
    python benchmarks/compiled.py --models held-out --targets tpu-v5e:2x4,tpu-v5p:2x2x2 --plans auto,dp,fsdp,megatron
        --out benchmarks/results/held_out.csv

With --cycles, libtpu compiles to the end, and its own estimate of the kernels is kept as `compiler_s`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from models import SETS, program
from results import RESULTS, Row, add, flat, kept, key, read
from tables import PLANS, TARGETS

from autoshard import manual
from autoshard.cost.predict import predict
from autoshard.errors import ManualPlanError
from autoshard.graph.annotations import Annotations, with_regions
from autoshard.graph.ops import Graph
from autoshard.lower.least import least
from autoshard.mesh import Mesh
from autoshard.planning.one_mesh import OneMesh
from autoshard.stablehlo.annotate import annotate
from autoshard.stablehlo.reader import build_graph
from autoshard.strategies.random_plans import random_annotations
from autoshard.verify.check import compare_compiled
from autoshard.verify.targets import on_target, parse_target

RANDOM_PLANS = 2
TIME_LIMIT_S = 900.0
"""Of wall time, for the solver: enough for its proof where other work shares the machine."""
RANDOM = [f"random{seed}" for seed in range(RANDOM_PLANS)]


def annotations(name: str, graph: Graph, mesh: Mesh) -> Annotations:
    """The plan called `name`: `auto`, `least` (auto with only the annotations it needs), by hand, or `random<seed>`."""
    if name in ("auto", "least"):
        chosen = OneMesh(graph, mesh, seconds=TIME_LIMIT_S).candidate(None).annotations
        return least(graph, chosen, mesh) if name == "least" else chosen
    if name.startswith("random"):
        return random_annotations(graph, mesh, int(name.removeprefix("random")))
    return manual.PLANS[name](graph, mesh)


def measured(graph: Graph, mesh_text: str, target_text: str, name: str, cycles: bool = False) -> Row:
    """Compile one plan for one target; figures of the prediction and of the compiled program."""
    mesh = mesh_on(target_text, mesh_text)
    return measured_plan(graph, annotations(name, graph, mesh), mesh, target_text, cycles)


def mesh_on(target_text: str, mesh_text: str) -> Mesh:
    """A mesh as it lies on a target, topology included: what plans for that target are made on."""
    mesh = Mesh.parse(mesh_text, device=target_text.partition(":")[0])
    return on_target(mesh, parse_target(target_text, mesh.size))


def measured_plan(graph: Graph, chosen: Annotations, mesh: Mesh, target_text: str, cycles: bool = False) -> Row:
    """`measured`, of annotations at hand."""
    target = parse_target(target_text, mesh.size)
    chosen = with_regions(graph, chosen, predict(graph, chosen, mesh).specs)
    module = annotate(graph.program, graph, chosen, mesh, platform=target.family)
    report, _ = compare_compiled(graph, chosen, mesh, target, module, cycles=cycles and target.family == "tpu")
    return flat(report.as_dict())


def sweep(
    models: Iterable[str],
    targets: Iterable[str],
    plans: Iterable[str],
    mesh: str,
    out: Path,
    again: bool = False,
    cycles: bool = False,
) -> None:
    """Make the rows that are missing or failed; with `again` and `cycles` others too, as `kept` says."""
    known = {key(row): row for row in read(out)}
    for model in models:
        graph = None
        for target in targets:
            for plan in plans:
                row: Row = {"model": model, "target": target, "mesh": mesh, "plan": plan}
                if kept(known.get(key(row)), again, cycles):
                    continue
                graph = graph or build_graph(program(model))
                try:
                    row |= measured(graph, mesh, target, plan, cycles)
                except ManualPlanError as error:
                    row["left_out"] = str(error)
                except Exception as error:  # a sweep goes on past one failure, and shows it in the table
                    row["error"] = f"{type(error).__name__}: {error}".partition("\n")[0]
                add(out, row)
                print(model, target, plan, _outcome(row), file=sys.stderr, flush=True)


def _outcome(row: Row) -> Any:
    return next(row[name] for name in ("fidelity", "error", "left_out") if name in row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="models", help=f"names by commas, or a set: {', '.join(SETS)}")
    parser.add_argument("--targets", default=",".join(TARGETS))
    parser.add_argument("--plans", default=",".join([*PLANS, *RANDOM]))
    parser.add_argument("--mesh", default="2x4")
    parser.add_argument("--out", type=Path, default=RESULTS / "compiled.csv")
    parser.add_argument("--again", action="store_true", help="rows too that other sources of autoshard made")
    parser.add_argument("--cycles", action="store_true", help="TPU targets: also libtpu's own estimate (slow)")
    options = parser.parse_args()
    models = SETS.get(options.models) or options.models.split(",")
    asked = (options.targets.split(","), options.plans.split(","), options.mesh, options.out)
    sweep(models, *asked, options.again, options.cycles)


if __name__ == "__main__":
    main()
