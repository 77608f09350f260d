"""Plans held against compiled programs: fidelity of the prediction, and quality of the plan.

For each model, target and plan (auto, by hand, random) the annotated program is compiled and its collectives and step
time under the device model are put beside what was predicted. Compiled programs are cached on disk, every row is written
as it is found, so a run that was stopped goes on where it was.

    python benchmarks/compiled.py --models gpt2,mlp --targets cpu,tpu-v5e:2x4,h100:8 --out out/compiled.jsonl
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from autoshard import manual
from autoshard.api import captured_graph, plan_graph, predict_annotations
from autoshard.capture.program import Program
from autoshard.capture.sources import load_source
from autoshard.cost.device import load_device
from autoshard.graph.annotations import Annotations
from autoshard.graph.ops import Graph
from autoshard.lower.stablehlo import annotate
from autoshard.mesh import Mesh
from autoshard.solver.formulate import random_annotations
from autoshard.verify.compile import compile_module
from autoshard.verify.fidelity import fidelity
from autoshard.verify.judge import judge

DEVICES = {"cpu": "cpu", "tpu-v5e": "tpu-v5e", "h100": "h100"}
RANDOM_PLANS = 5


def hf(model_type: str, **settings: Any) -> Callable[[], Program]:
    def build() -> Program:
        from autoshard.capture.torch_xla import capture

        text = {key: str(value) for key, value in settings.items() if key not in ("batch", "seq")}
        source = load_source(
            f"hf:{model_type}",
            batch=settings.get("batch", 8),
            seq=settings.get("seq", 512),
            settings=text,
            train="adamw",
        )
        return capture(source.model, source.inputs, loss_fn=source.loss_fn, optimizer=source.optimizer)

    return build


def mlp() -> Program:
    import torch

    from autoshard.capture.torch_xla import capture

    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(1024, 4096), torch.nn.GELU(), torch.nn.Linear(4096, 1024))
        inputs = (torch.empty(512, 1024),)
    return capture(
        model,
        inputs,
        loss_fn=lambda out: out.square().mean(),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3),
    )


MODELS: dict[str, Callable[[], Program]] = {
    "mlp": mlp,
    "gpt2": hf("gpt2", n_layer=2),
    "llama": hf("llama", num_hidden_layers=2, hidden_size=2048, intermediate_size=5632, num_attention_heads=16),
}


def plans(graph: Graph, mesh: Mesh) -> dict[str, Callable[[], Annotations]]:
    """Name -> how to make it."""
    found: dict[str, Callable[[], Annotations]] = {"auto": lambda: plan_graph(graph, mesh).annotations}
    for name, build in manual.PLANS.items():
        found[name] = lambda build=build: build(graph, mesh)
    for seed in range(RANDOM_PLANS):
        found[f"random{seed}"] = lambda seed=seed: random_annotations(graph, mesh, seed)
    return found


def row(model: str, target: str, name: str, graph: Graph, mesh: Mesh, annotations: Annotations) -> dict[str, Any]:
    device = load_device(mesh.device)
    predicted = predict_annotations(graph, annotations, mesh)
    donate = {out.updates: i for i, out in enumerate(graph.program.outputs) if out.updates is not None}
    start = time.process_time()
    compiled = compile_module(annotate(graph.program, graph, annotations, mesh), target_text(target, mesh), donate=donate)
    compared = fidelity(predicted.collectives, compiled, mesh, graph)
    measured = judge(compiled, mesh, device)
    return {
        "model": model,
        "target": target,
        "plan": name,
        "fidelity": compared.value,
        "predicted_bytes": compared.predicted_bytes,
        "compiled_bytes": compared.compiled_bytes,
        "predicted_s": predicted.step_time_s,
        "compiled_s": measured.serial_s,
        "predicted_memory": predicted.peak_memory_bytes,
        "compiled_memory": compiled.memory.peak,
        "rematerializations": len(compiled.rematerializations),
        "compile_s": round(compiled.seconds, 1),
        "cpu_s": round(time.process_time() - start, 1),
    }


def target_text(target: str, mesh: Mesh) -> str:
    return f"cpu:{mesh.size}" if target == "cpu" else target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="mlp,gpt2,llama")
    parser.add_argument("--targets", default="cpu,tpu-v5e:2x4,h100:8")
    parser.add_argument("--plans", default="", help="only these, separated by commas")
    parser.add_argument("--mesh", default="2x4")
    parser.add_argument("--out", type=Path, default=Path("out/compiled.jsonl"))
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for model in options.models.split(","):
        graph = captured_graph(MODELS[model]())
        for target in options.targets.split(","):
            mesh = Mesh.parse(options.mesh, device=DEVICES[target.partition(":")[0]])
            for name, build in plans(graph, mesh).items():
                if options.plans and name not in options.plans.split(","):
                    continue
                try:
                    found = row(model, target, name, graph, mesh, build())
                except Exception as error:  # a sweep goes on past one failure, and reports it
                    found = {"model": model, "target": target, "plan": name, "error": f"{type(error).__name__}: {error}"}
                with options.out.open("a") as out:
                    out.write(json.dumps(found) + "\n")
                print(json.dumps(found), file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
