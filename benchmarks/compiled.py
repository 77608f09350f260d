"""Plans held against compiled programs: fidelity of the prediction, and quality of the plan.

For each model, target and plan (auto, by hand, random) the annotated program is compiled and its collectives and step
time under the device model are put beside what was predicted. Compiled programs are cached on disk, every row is
written as it is found, so a run that was stopped goes on where it was.

    python benchmarks/compiled.py --models gpt2,mlp --targets cpu,tpu-v5e:2x4,h100:8 --out out/compiled.jsonl
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from models import program
from tabulate import tabulate

from autoshard import manual
from autoshard.api import captured_graph, plan_graph
from autoshard.graph.annotations import Annotations
from autoshard.graph.ops import Graph
from autoshard.lower.stablehlo import annotate
from autoshard.mesh import Mesh
from autoshard.solver.formulate import random_annotations
from autoshard.verify.check import compare_compiled
from autoshard.verify.targets import Target, parse_target

RANDOM_PLANS = 5


PLANS = ["auto", *manual.PLANS, *(f"random{seed}" for seed in range(RANDOM_PLANS))]


def annotations(name: str, graph: Graph, mesh: Mesh) -> Annotations:
    """The plan called `name`: `auto`, one made by hand, or `random<seed>`."""
    if name == "auto":
        return plan_graph(graph, mesh).annotations
    if name.startswith("random"):
        return random_annotations(graph, mesh, int(name.removeprefix("random")))
    return manual.PLANS[name](graph, mesh)


def row(model: str, target: Target, name: str, graph: Graph, mesh: Mesh, annotations: Annotations) -> dict[str, Any]:
    """Compile one plan for one target; figures of the prediction and of the compiled program."""
    report, compiled = compare_compiled(
        graph, annotations, mesh, target, annotate(graph.program, graph, annotations, mesh)
    )
    found = {"model": model, "target": str(target), "plan": name, **report.as_dict()}
    return found | {"compile_s": round(compiled.seconds, 1)}


def tables(rows: list[dict[str, Any]]) -> str:
    """Fidelity and quality, one line per model and target."""
    plans = list(dict.fromkeys(row["plan"] for row in rows))
    hand = [name for name in plans if name in manual.PLANS]
    cells: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for one in rows:
        cells.setdefault((one["model"], one["target"]), {})[one["plan"]] = one
    fidelities, qualities = [], []
    for (model, target), found in cells.items():
        shown = [f"{found[p]['fidelity']:.1%}" if "fidelity" in found.get(p, {}) else "error" for p in plans]
        fidelities.append([model, target, *shown])
        seconds = {p: found[p]["compiled"]["step_time_s"] for p in ["auto", *hand] if "compiled" in found.get(p, {})}
        best = min((seconds[p], p) for p in hand if p in seconds)
        shown = [f"{seconds[p] * 1e3:.2f}" if p in seconds else "error" for p in ["auto", *hand]]
        ratio = f"{seconds['auto'] / best[0]:.3f}" if "auto" in seconds else "error"
        qualities.append([model, target, *shown, best[1], ratio])
    return "\n\n".join(
        [
            "Fidelity: bytes of collectives that differ / bytes compiled\n"
            + tabulate(fidelities, ["model", "target", *plans]),
            "Step time of the compiled program under the device model, ms\n"
            + tabulate(qualities, ["model", "target", "auto", *hand, "best by hand", "auto / best"]),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="mlp,gpt2,llama")
    parser.add_argument("--targets", default="cpu,tpu-v5e:2x4,h100:8")
    parser.add_argument("--plans", default="", help="only these, separated by commas")
    parser.add_argument("--mesh", default="2x4")
    parser.add_argument("--out", type=Path, default=Path("out/compiled.jsonl"))
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    rows = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.exists() else []
    done = {(row["model"], row["target"], row["plan"]) for row in rows if "error" not in row}
    rows = [row for row in rows if "error" not in row]
    for model in options.models.split(","):
        graph = None
        for text in options.targets.split(","):
            mesh = Mesh.parse(options.mesh, device=text.partition(":")[0])
            target = parse_target(text, mesh.size)
            for name in options.plans.split(",") if options.plans else PLANS:
                if (model, str(target), name) in done:
                    continue
                graph = graph or captured_graph(program(model))
                try:
                    found = row(model, target, name, graph, mesh, annotations(name, graph, mesh))
                except Exception as error:  # a sweep goes on past one failure, and shows it in the table
                    found = {
                        "model": model,
                        "target": str(target),
                        "plan": name,
                        "error": f"{type(error).__name__}: {error}",
                    }
                rows.append(found)
                with options.out.open("a") as out:
                    out.write(json.dumps(found) + "\n")
                print(model, target, name, found.get("fidelity", found.get("error")), file=sys.stderr, flush=True)
    print(tables(rows))


if __name__ == "__main__":
    main()
