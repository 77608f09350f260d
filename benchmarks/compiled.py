"""Plans held against compiled programs: collectives and memory predicted, and the quality of the plan.

For each model, target and plan (auto, by hand, random) the annotated program is compiled, and its collectives, memory
and step time under the device model are put beside what was predicted. Compiled programs are cached on disk by what
they are compiled from, and every row is written as it is found, so a run that was stopped goes on where it was. A row
that other sources of autoshard made is made again: that compiles only where the annotated program changed.

    python benchmarks/compiled.py --models gpt2,mlp --targets cpu,tpu-v5e:2x4,h100:8 --out out/compiled.jsonl
    python benchmarks/compiled.py --tables --out out/compiled.jsonl
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from compiled_tables import markdown, tables
from models import MODELS, program

import autoshard
from autoshard import manual
from autoshard.decision import plan_graph
from autoshard.errors import ManualPlanError
from autoshard.graph.annotations import Annotations
from autoshard.graph.ops import Graph
from autoshard.lower.least import least
from autoshard.lower.stablehlo import annotate
from autoshard.mesh import Mesh
from autoshard.solver.random_plans import random_annotations
from autoshard.verify.check import compare_compiled
from autoshard.verify.targets import on_target, parse_target
from autoshard.written import captured_graph

RANDOM_PLANS = 5
PLANS = ["auto", *manual.PLANS, *(f"random{seed}" for seed in range(RANDOM_PLANS))]
TARGETS = ["cpu", "h100:8", "h100:2x4", "tpu-v5e:2x4", "tpu-v5p:2x2x2"]

Row = dict[str, Any]


@cache
def sources() -> str:
    """What autoshard's code and data files are, in a few letters."""
    digest = hashlib.sha256()
    root = Path(autoshard.__file__).parent
    for path in sorted(path for end in ("py", "json", "toml", "npz") for path in root.rglob(f"*.{end}")):
        digest.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def annotations(name: str, graph: Graph, mesh: Mesh) -> Annotations:
    """The plan called `name`: `auto`, `least` (auto with only the annotations it needs), by hand, or `random<seed>`."""
    if name in ("auto", "least"):
        chosen = plan_graph(graph, mesh).annotations
        return least(graph, chosen, mesh) if name == "least" else chosen
    if name.startswith("random"):
        return random_annotations(graph, mesh, int(name.removeprefix("random")))
    return manual.PLANS[name](graph, mesh)


def measured(graph: Graph, mesh_text: str, target_text: str, name: str) -> Row:
    """Compile one plan for one target; figures of the prediction and of the compiled program."""
    mesh = mesh_on(target_text, mesh_text)
    return measured_plan(graph, annotations(name, graph, mesh), mesh, target_text)


def mesh_on(target_text: str, mesh_text: str) -> Mesh:
    """A mesh as it lies on a target, topology included: what plans for that target are made on."""
    mesh = Mesh.parse(mesh_text, device=target_text.partition(":")[0])
    return on_target(mesh, parse_target(target_text, mesh.size))


def measured_plan(graph: Graph, chosen: Annotations, mesh: Mesh, target_text: str) -> Row:
    """`measured`, of annotations at hand."""
    target = parse_target(target_text, mesh.size)
    report, compiled = compare_compiled(graph, chosen, mesh, target, annotate(graph.program, graph, chosen, mesh))
    return report.as_dict() | {"compile_s": round(compiled.seconds, 1)}


def read(path: Path) -> dict[tuple[str, ...], Row]:
    """The rows of a file; the last of each model, target, mesh and plan counts."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {key(row): row for row in map(json.loads, lines)}


def key(row: Row) -> tuple[str, ...]:
    """What a row is about."""
    return row["model"], row["target"], row["mesh"], row["plan"]


def sweep(models: Iterable[str], targets: Iterable[str], plans: Iterable[str], mesh: str, out: Path) -> None:
    """Make the rows that are missing, failed or were made by other sources."""
    known = read(out)
    for model in models:
        graph = None
        for target in targets:
            for plan in plans:
                row: Row = {"model": model, "target": target, "mesh": mesh, "plan": plan, "sources": sources()}
                before = known.get(key(row), {"error": "not there"})
                if before.get("sources") == sources() and "error" not in before:
                    continue
                graph = graph or captured_graph(program(model))
                try:
                    row |= {"target": target, **measured(graph, mesh, target, plan), **row}
                except ManualPlanError as error:
                    row["left_out"] = str(error)
                except Exception as error:  # a sweep goes on past one failure, and shows it in the table
                    row["error"] = f"{type(error).__name__}: {error}"
                with out.open("a") as lines:
                    lines.write(json.dumps(row) + "\n")
                print(model, target, plan, _outcome(row), file=sys.stderr, flush=True)


def _outcome(row: Row) -> Any:
    return next(row[name] for name in ("fidelity", "error", "left_out") if name in row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--targets", default=",".join(TARGETS))
    parser.add_argument("--plans", default=",".join(PLANS))
    parser.add_argument("--mesh", default="2x4")
    parser.add_argument("--out", type=Path, default=Path("out/compiled.jsonl"))
    parser.add_argument("--tables", action="store_true", help="only print what the file holds")
    parser.add_argument("--markdown", action="store_true", help="print the tables of docs/fidelity.md")
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    if not options.tables:
        sweep(
            options.models.split(","), options.targets.split(","), options.plans.split(","), options.mesh, options.out
        )
    shown = markdown if options.markdown else tables
    print(shown(list(read(options.out).values()), list(manual.PLANS)))


if __name__ == "__main__":
    main()
