"""The solver's objective beside the predicted step time, and automatic plans beside those by hand; nothing is compiled.

One row per model, device kind and mesh: what the solver charges for its plan over what is predicted of it, and the
predicted step time of that plan over the best by hand. Rows are written as they are found, and not made twice by the
same sources.

    python benchmarks/priced.py --models gpt2,vit --devices cpu,h100,tpu-v5e --meshes 2x4,8 --out out/priced.jsonl
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from models import MODELS, program
from results import Row, made

from autoshard import manual
from autoshard.cost.predict import predict
from autoshard.errors import ManualPlanError
from autoshard.graph.ops import Graph
from autoshard.mesh import Mesh
from autoshard.planning.one_mesh import OneMesh
from autoshard.stablehlo.reader import build_graph


def priced(graph: Graph, mesh: Mesh) -> Row:
    """Milliseconds: the objective, the automatic plan as predicted, and every plan by hand."""
    decided = OneMesh(graph, mesh).candidate(None)
    hand = {}
    for name, annotate in manual.PLANS.items():
        try:
            hand[name] = predict(graph, annotate(graph, mesh), mesh).step_time_s * 1e3
        except ManualPlanError:
            continue
    return {
        "objective_ms": decided.solver.objective * 1e3,
        "auto_ms": decided.time * 1e3,
        "status": decided.solver.status,
        "hand_ms": hand,
    }


def line(row: Row) -> str:
    """One row for a person."""
    best = min(row["hand_ms"], key=row["hand_ms"].__getitem__)
    return (
        f"{row['model']:9} {row['device']:8} {row['mesh']:6} objective/predicted "
        f"{row['objective_ms'] / row['auto_ms']:.3f}  auto {row['auto_ms']:.3f} ms, "
        f"auto/{best} {row['auto_ms'] / row['hand_ms'][best]:.3f}  {row['status']}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--devices", default="cpu,h100,tpu-v5e")
    parser.add_argument("--meshes", default="2x4")
    parser.add_argument("--out", type=Path, default=Path("out/priced.jsonl"))
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    lines = options.out.read_text().splitlines() if options.out.exists() else []
    known = {(row["model"], row["device"], row["mesh"], row["sources"]): row for row in map(json.loads, lines)}
    for model in options.models.split(","):
        graph = None
        for device in options.devices.split(","):
            for mesh in options.meshes.split(","):
                key = (model, device, mesh, made()["sources"])
                if key not in known:
                    graph = graph or build_graph(program(model))
                    row = {"model": model, "device": device, "mesh": mesh, "sources": made()["sources"]}
                    known[key] = row | priced(graph, Mesh.parse(mesh, device=device))
                    with options.out.open("a") as out:
                        out.write(json.dumps(known[key]) + "\n")
                print(line(known[key]), flush=True)


if __name__ == "__main__":
    main()
