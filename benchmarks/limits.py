"""What folding costs, and whether tight memory limits are kept: the solver on real programs.

    python benchmarks/limits.py folded [--models gpt2-12,vit-12,llama-8]
    python benchmarks/limits.py memory [--models gpt2,mlp,…] [--slack 1.1] [--compile]

`folded`: the objective when repeated layers decide together, against that of the whole problem. `memory`: the least
memory predicted of the plans that were found (others may need less); then a plan under a limit of `--slack` times that,
with what is predicted of it and, with `--compile`, what the target's compiler reports.
"""

from __future__ import annotations

import argparse
import math
import time
from functools import partial

from compiled import measured_plan, mesh_on
from models import MODELS, built, hf, program

from autoshard.cost.machine.device import load_device
from autoshard.graph.ops import Graph
from autoshard.mesh import Mesh
from autoshard.planning.memory import within_limit
from autoshard.planning.one_mesh import OneMesh
from autoshard.plans.value import NoPlanError
from autoshard.solver.fold import classes_of, fold
from autoshard.solver.objective import evaluate
from autoshard.solver.solve import solve
from autoshard.stablehlo.reader import build_graph
from autoshard.strategies.formulate import formulate

MODELS |= {
    "gpt2-12": partial(hf, "gpt2"),
    "vit-12": partial(hf, "vit", batch=32, seq=None),
    "llama-8": partial(
        hf, "llama", num_hidden_layers=8, hidden_size=2048, intermediate_size=5632, num_attention_heads=16
    ),
    "moe-8": partial(built, "moe", layers=8),
}


def folded(name: str, mesh: Mesh) -> str:
    """One row: nodes, objective and CPU seconds, folded and whole."""
    graph = build_graph(program(name))
    problem = formulate(graph, mesh, load_device(mesh.device)).problem
    small, expand = fold(problem, classes_of(problem))
    start = time.process_time()
    first = solve(small, fold=False)
    middle = time.process_time()
    whole = solve(problem, fold=False)
    end = time.process_time()
    restricted = evaluate(problem, expand(first.choice)).objective
    return (
        f"{name:10s} {len(small.node_costs):6d} {len(problem.node_costs):6d} {1e3 * restricted:12.6f} "
        f"{1e3 * whole.objective:12.6f} {restricted / whole.objective - 1:9.4%} {whole.gap:8.3%} "
        f"{middle - start:6.1f} {end - middle:6.1f}"
    )


def least_memory(graph: Graph, mesh: Mesh) -> float:
    """The least predicted peak that a plan was found for: the answer to a limit of one byte."""
    try:
        within_limit(OneMesh(graph, mesh), 1.0)
    except NoPlanError as error:
        return error.least
    return math.nan


def limited(name: str, mesh: Mesh, target: str, slack: float, compiled: bool) -> str:
    """One row: least memory, the limit, and what the plan under it takes."""
    graph = build_graph(program(name))
    most = OneMesh(graph, mesh).candidate(None).prediction
    least = min(least_memory(graph, mesh), most.peak_memory_bytes)
    limit = slack * least
    try:
        found = within_limit(OneMesh(graph, mesh), limit)
    except NoPlanError as error:
        return f"{name:10s} {most.peak_memory_bytes / 1e6:9.1f} {least / 1e6:9.1f} {limit / 1e6:9.1f} none: {error}"
    real = ""
    if compiled:
        real = f"{measured_plan(graph, found.annotations, mesh, target)['compiled_memory'] / 1e6:9.1f}"
    return (
        f"{name:10s} {most.peak_memory_bytes / 1e6:9.1f} {least / 1e6:9.1f} {limit / 1e6:9.1f} "
        f"{found.prediction.peak_memory_bytes / 1e6:9.1f} {real:>9s} {1e3 * most.step_time_s:10.3f} "
        f"{1e3 * found.time:10.3f} {found.solver.status} {found.solver.gap:.3%}"
    )


def main() -> None:
    """Print one of the tables, a row as it is made."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=["folded", "memory"])
    parser.add_argument("--models")
    parser.add_argument("--mesh", default="2x4")
    parser.add_argument("--target", default="h100:8", help="device kind of the mesh, and what --compile compiles for")
    parser.add_argument("--slack", type=float, default=1.1)
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    mesh = mesh_on(options.target, options.mesh)
    if options.table == "folded":
        print("model       folded  whole  folded (ms)   whole (ms)      more      gap CPU s folded, whole")
        for name in (options.models or "gpt2-12,vit-12,llama-8").split(","):
            print(folded(name, mesh), flush=True)
        return
    print("MB:        no limit     least     limit predicted  compiled  ms: free    limited   solver")
    for name in (options.models or "mlp,gpt2,llama,vit,bert,dlrm").split(","):
        print(limited(name, mesh, options.target, options.slack, options.compile), flush=True)


if __name__ == "__main__":
    main()
