"""What planning costs: CPU seconds above the import floor, and peak memory, of `autoshard plan` in a new process.

    python benchmarks/search_cost.py [--jobs gpt2,mlp] [--cold] [--out out/search_cost.jsonl]

The floor is a process that only imports torch, torch_xla, jax and transformers, measured beside every job: on a machine
with other work, compare figures of one line. `--cold` gives every job empty caches for the solver's compiled loops.
Stages are those of `autoshard plan --json`; `source` holds imports too.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

NETS = Path(__file__).with_name("nets.py")
FLOOR = "import torch, torch_xla, jax, transformers"


def llama(layers: int, width: int, inner: int, heads: int) -> list[str]:
    """A Llama 3 of these sizes: 8 key-value heads, vocabulary 128,256; batch 4 of 8,192 tokens, AdamW, f32.

    Without a memory limit: such a step, with whole attention scores and no checkpointing, fits on no 8 devices.
    """
    fields = {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
    }
    settings = [text for key, value in fields.items() for text in ("--set", f"{key}={value}")]
    return ["hf:llama", *settings, "--batch", "4", "--seq", "8192", "--memory", "none"]


def on_h100(model: list[str], mesh: str) -> list[str]:
    """Planned for such a mesh of H100."""
    return [*model, "--mesh", mesh, "--device", "h100"]


JOBS: dict[str, list[str]] = {
    "gpt2 2x4": ["hf:gpt2", "--batch", "8", "--seq", "512", "--mesh", "2x4", "--device", "tpu-v5e"],
    "mlp 2x2x2": [f"{NETS}:perceptron", "--mesh", "2x2x2", "--device", "h100"],
    "gpt2 200 layers 2x4": [
        *("hf:gpt2", "--set", "n_layer=200", "--batch", "8", "--seq", "512", "--mesh", "2x4", "--device", "tpu-v5e"),
        *("--memory", "none"),
    ],
    "5000 parameters 2x4": [f"{NETS}:small_parameters", "--mesh", "2x4", "--device", "tpu-v5e"],
    "llama 100 layers 2x4": [
        *("hf:llama", "--set", "num_hidden_layers=100", "--set", "hidden_size=2048", "--set", "intermediate_size=5632"),
        *("--set", "num_attention_heads=16", "--batch", "8", "--seq", "512", "--mesh", "2x4", "--device", "tpu-v5e"),
        *("--memory", "none"),
    ],
    "resnet 302 layers 2x4": [
        *("hf:resnet", "--set", "depths=[8, 36, 48, 8]", "--batch", "32", "--mesh", "2x4", "--device", "tpu-v5e"),
    ],
    "moe 48 layers 2x4": [
        *(f"{NETS}:moe", "--set", "layers=48", "--mesh", "2x4", "--device", "tpu-v5e", "--memory", "none"),
    ],
    "llama-8b 2x4": on_h100(llama(32, 4096, 14336, 32), "2x4"),
    "llama-8b 4x4x4": on_h100(llama(32, 4096, 14336, 32), "4x4x4"),
    "llama-70b 8x8": on_h100(llama(80, 8192, 28672, 64), "8x8"),
}
"""Name -> arguments of `autoshard plan`; `--train adamw` is added to all."""


def spent(command: list[str], environment: dict[str, str]) -> tuple[float, str]:
    """CPU seconds of a process with its children, and its standard output."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["failed"])[-1])
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, done.stdout


def measure(name: str, extra: list[str], caches: str | None) -> dict[str, Any]:
    """Plan one job, and import beside it; `caches` is an empty directory for compiled loops."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PJRT_DEVICE": "CPU", "JAX_PLATFORMS": "cpu"}
    floor, _ = spent([sys.executable, "-c", FLOOR], environment)
    if caches is not None:
        environment["NUMBA_CACHE_DIR"] = caches
    with tempfile.TemporaryDirectory() as place:
        plan = ["plan", *JOBS[name], "--train", "adamw", "--json", "-o", f"{place}/plan.json", *extra]
        cpu, said = spent([sys.executable, "-m", "autoshard", *plan], environment)
    found = json.loads(said.splitlines()[-1])
    return {
        "job": name,
        "cold": caches is not None,
        "floor": floor,
        "cpu": cpu,
        "rss": found["peak_rss_bytes"],
        "solver": found["solver"],
        "stages": {stage: took["cpu_seconds"] for stage, took in found["stages"].items()},
    }


def line(row: dict[str, Any]) -> str:
    """One row of the table."""
    solver = row["solver"]
    stages = " ".join(f"{stage} {took:.1f}" for stage, took in row["stages"].items() if took >= 0.05)
    return (
        f"{row['job']:16s} {'cold' if row['cold'] else 'warm'} {row['cpu']:7.1f} {row['cpu'] - row['floor']:7.1f} "
        f"{row['floor']:6.1f} {row['rss'] / 1e9:6.2f} {solver['status']:10s} {solver['gap']:8.3%}  {stages}"
    )


def main() -> None:
    """Print the table, a row as it is measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", default=",".join(JOBS))
    parser.add_argument("--cold", action="store_true", help="empty caches for compiled loops")
    parser.add_argument("--plan-options", default="", help="further options of `autoshard plan`, in one string")
    parser.add_argument("--out", type=Path, help="append every row, as JSON, to this file")
    options = parser.parse_args()
    print("job              caches CPU s   above  floor   RSS  status          gap  CPU s by stage")
    for name in options.jobs.split(","):
        with tempfile.TemporaryDirectory() as caches:
            try:
                row = measure(name, options.plan_options.split(), caches if options.cold else None)
            except RuntimeError as error:
                print(f"{name:16s} failed: {error}", flush=True)
                continue
        print(line(row), flush=True)
        if options.out is not None:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            with options.out.open("a") as lines:
                lines.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
