"""The solver's objective beside the predicted step time of its plan; nothing is compiled.

Each row is one random triple of program, mesh and target, or with `--models` one of the models in `models.py`: what the
solver charges for its plan, what is predicted of it, serial, and of both how much is kernels and how much collectives,
in seconds; CPU seconds of planning without capture. A row is given by seed and number, written as it is found and not
made twice.

    python benchmarks/priced.py --seed 1 --rows 200 --out benchmarks/results/priced.jsonl
    python benchmarks/priced.py --seed 2 --rows 100 --out benchmarks/results/priced.jsonl
    python benchmarks/priced.py --models gpt2,vit --targets tpu-v5e --meshes 3x3 --out out/priced.jsonl
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from models import MODELS, program
from random_nets import graph_of
from results import Row

from autoshard.api import capture
from autoshard.graph.ops import Graph
from autoshard.mesh import Mesh
from autoshard.planning import one_mesh
from autoshard.solver.objective import evaluate
from autoshard.sources import load_source
from autoshard.stablehlo.reader import build_graph

TARGETS = ("cpu", "tpu-v5e", "tpu-v5p", "tpu-v6e", "h100", "a100-80gb")
MESHES = ("4", "6", "8", "16", "2x3", "2x4", "3x3", "4x4", "4x8", "2x2x2")
NETS = Path(__file__).with_name("nets.py")

Drawn = tuple[str, dict[str, Any]]
"""What `load_source` is given."""


def triple(seed: int, number: int) -> tuple[str, str, str, Callable[[], Graph]]:
    """Dtype, target and mesh of a row, and its program, named by the first of them."""
    of = random.Random(f"{seed} {number}")
    target, mesh, dtype = of.choice(TARGETS), of.choice(MESHES), of.choice(("f32", "bf16"))
    if of.random() < 0.1:
        return "random net f32", target, mesh, lambda: graph_of(1000 * seed + number)
    source, given = of.choice((_perceptron, _text, _text, _text, _images, _dlrm, _moe))(of)
    train = of.choice(("adamw", "adamw", "sgd", None))
    name = f"{source.rsplit('/', 1)[-1]} {dtype} {train or 'forward'}"

    def made() -> Graph:
        found = load_source(source, dtype=dtype, train=train, **given)
        return build_graph(capture(found.model, found.inputs, loss_fn=found.loss_fn, optimizer=found.optimizer))

    return name, target, mesh, made


def _settings(**given: object) -> dict[str, str]:
    return {name: str(value) for name, value in given.items()}


def _perceptron(of: random.Random) -> Drawn:
    sizes = _settings(rows=2 ** of.randint(6, 15), width=64 * of.randint(2, 64), hidden=64 * of.randint(2, 128))
    return f"{NETS}:perceptron", {"settings": sizes}


def _text(of: random.Random) -> Drawn:
    heads, batch, seq = of.choice((8, 12, 16, 20)), of.choice((8, 16, 32, 64)), 64 * of.choice((2, 4, 8))
    width, vocabulary, layers = heads * of.choice((64, 128)), of.choice((8192, 30522, 32000)), of.choice((1, 1, 2))
    kind = of.choice(("gpt2", "llama", "bert", "opt", "qwen2", "gpt_neox", "t5"))
    inside = width * of.choice((2, 3, 4))
    if kind == "gpt2":
        given = _settings(n_layer=layers, n_embd=width, n_head=heads, n_inner=inside, vocab_size=vocabulary)
    elif kind == "t5":
        given = _settings(num_layers=1, num_decoder_layers=layers, d_model=width, num_heads=heads, d_ff=inside)
    else:
        given = _settings(num_hidden_layers=layers, hidden_size=width, num_attention_heads=heads, vocab_size=vocabulary)
        given |= _settings(**{"ffn_dim" if kind == "opt" else "intermediate_size": inside})
        if kind in ("llama", "qwen2"):
            given |= _settings(num_key_value_heads=heads // of.choice((1, 2)))
    return f"hf:{kind}", {"batch": batch, "seq": seq, "settings": given}


def _images(of: random.Random) -> Drawn:
    batch, heads = of.choice((16, 32, 64, 128)), of.choice((6, 8, 12, 16))
    if of.random() < 0.5:
        widths = sorted(of.choice((64, 96, 128, 256, 384, 512)) for _ in range(2))
        given = _settings(depths="[1, 1]", hidden_sizes=widths, embedding_size=of.choice((32, 64)))
        return "hf:resnet", {"batch": batch, "settings": given}
    given = _settings(num_hidden_layers=1, hidden_size=64 * heads, num_attention_heads=heads)
    return "hf:vit", {"batch": batch, "settings": given | _settings(intermediate_size=64 * heads * of.choice((2, 4)))}


def _dlrm(of: random.Random) -> Drawn:
    sizes = _settings(tables=of.randint(2, 6), width=of.choice((16, 32, 64, 128)), hidden=of.choice((256, 512, 1024)))
    return f"{NETS}:dlrm", {"batch": 2 ** of.randint(8, 14), "settings": sizes}


def _moe(of: random.Random) -> Drawn:
    sizes = _settings(width=64 * of.choice((8, 12, 16)), hidden=256 * of.randint(4, 16), experts=of.choice((4, 6, 8)))
    given = {"batch": of.choice((8, 16, 32)), "seq": of.choice((256, 512)), "layers": 1}
    return f"{NETS}:moe", given | {"settings": sizes | _settings(heads=of.choice((4, 8, 16)), vocabulary=8192)}


def priced(graph: Graph, mesh: Mesh) -> Row:
    """The figures of one row, in sequence; `priced_…` of the plan taken are those of prices that were not corrected."""
    began, formulated, problems = time.process_time(), one_mesh.formulated, []

    def kept(*args: Any, **given: Any) -> Any:
        problems.append(formulated(*args, **given))
        return problems[-1]

    with mock.patch.object(one_mesh, "formulated", kept):
        decided = one_mesh.OneMesh(graph, mesh).candidate(None)
    spent = time.process_time() - began
    assert decided.decision is not None
    assert decided.solver is not None
    problem, found = problems[0], decided.prediction
    choice = decided.decision.solution.choice[: len(problem.problem.node_costs)]
    kernels = problem.kernel_seconds(choice)
    seconds = {
        "objective_s": decided.solver.objective + decided.hidden * decided.prices[1] * problem.hideable(choice),
        "predicted_s": found.step_time_s,
        "priced_kernels_s": kernels,
        "predicted_kernels_s": found.compute_s,
        "priced_collectives_s": evaluate(problem.problem, choice).objective - kernels,
        "predicted_collectives_s": found.communication_s,
    }
    short = {name: float(f"{figure:.5g}") for name, figure in seconds.items()}
    return short | {"status": decided.solver.status, "cpu_s": round(spent, 2)}


def summary(rows: Sequence[Row]) -> str:
    """How far objectives are off, all together and by target."""
    lines = []
    for target in (None, *dict.fromkeys(row["target"] for row in rows)):
        own = [row for row in rows if target in (None, row["target"])]
        ratios = np.array([row["objective_s"] / row["predicted_s"] for row in own])
        off = np.abs(ratios - 1)
        middle, most = np.quantile(off, (0.5, 0.95))
        lines.append(
            f"{target or 'all':10} {len(own):4} rows, objective/predicted {ratios.min():.3f} to {ratios.max():.3f}; "
            f"{np.mean(off <= 0.05):.1%} within 5 %, off by {middle:.1%} (p50), {most:.1%} (p95), {off.max():.1%} "
            f"(most); {sum(row['cpu_s'] for row in own):.0f} CPU s"
        )
    return "\n".join(lines)


def line(row: Row) -> str:
    """One row for a person."""
    kernels = row["priced_kernels_s"] / max(row["predicted_kernels_s"], 1e-12)
    shared = row["predicted_collectives_s"] / row["predicted_s"]
    return (
        f"{row['id']:8} {row['program']:26} {row['target']:9} {row['mesh']:5} {row['predicted_s'] * 1e3:9.3f} ms, "
        f"objective/predicted {row['objective_s'] / row['predicted_s']:.3f}, kernels as priced {kernels:.3f}, "
        f"collectives {shared:.0%}, {row['status']}, {row['cpu_s']} CPU s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rows", type=int, default=200)
    parser.add_argument("--models", help=f"instead of random triples: {', '.join(MODELS)}")
    parser.add_argument("--targets", default="cpu,h100,tpu-v5e")
    parser.add_argument("--meshes", default="2x4")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    written = options.out.read_text().splitlines() if options.out.exists() else []
    known = {row["id"]: row for row in map(json.loads, written)}
    wanted = [(f"{options.seed}-{number}", *triple(options.seed, number)) for number in range(options.rows)]
    if options.models:
        wanted = [
            (f"{model} {target} {mesh}", model, target, mesh, lambda model=model: build_graph(program(model)))
            for model in options.models.split(",")
            for target in options.targets.split(",")
            for mesh in options.meshes.split(",")
        ]
    for name, label, target, mesh, made in wanted:
        if name not in known:
            row = {"id": name, "program": label, "target": target, "mesh": mesh}
            known[name] = row | priced(made(), Mesh.parse(mesh, device=target))
            with options.out.open("a") as out:
                out.write(json.dumps(known[name]) + "\n")
            print(line(known[name]), flush=True)
    print(summary([known[name] for name, *_ in wanted]))


if __name__ == "__main__":
    main()
