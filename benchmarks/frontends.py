"""The same programs through torch_xla and through torchax: step times and shardings of their plans, as a table.

python benchmarks/frontends.py OUT.json [--devices cpu,h100]   # resumable
python benchmarks/frontends.py OUT.json --table
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import autoshard
from autoshard.mesh import Mesh
from benchmarks import nets

WITHOUT_DROPOUT = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """The optimizer of every step."""
    return torch.optim.AdamW(parameters, lr=1e-4)


def hf(model: str, config: str, inputs: dict[str, torch.Tensor], **fields: Any) -> Callable[[], dict[str, Any]]:
    """A model of transformers on meta."""

    def build() -> dict[str, Any]:
        import transformers

        with torch.device("meta"):
            made = getattr(transformers, model)(getattr(transformers, config)(**fields))
        return {"model": made, "inputs": inputs, "loss_fn": None}

    return build


def tokens(batch: int, length: int) -> dict[str, torch.Tensor]:
    """Of a causal language model."""
    return {name: torch.zeros(batch, length, dtype=torch.long) for name in ("input_ids", "labels")}


def images(batch: int, size: int) -> dict[str, torch.Tensor]:
    """Of a classifier."""
    return {"pixel_values": torch.zeros(batch, 3, size, size), "labels": torch.zeros(batch, dtype=torch.long)}


def perceptron() -> dict[str, Any]:
    """Two layers, 512 rows."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 1024))
    return {"model": model, "inputs": (torch.zeros(512, 1024), torch.zeros(512, 1024)), "loss_fn": nn.MSELoss()}


MODELS: dict[str, Callable[[], dict[str, Any]]] = {
    "GPT-2, 2 layers": hf("GPT2LMHeadModel", "GPT2Config", tokens(8, 512), n_layer=2, **WITHOUT_DROPOUT),
    "GPT-2 124M": hf("GPT2LMHeadModel", "GPT2Config", tokens(8, 512), **WITHOUT_DROPOUT),
    "Llama, 2 layers": hf(
        "LlamaForCausalLM", "LlamaConfig", tokens(8, 512), num_hidden_layers=2, hidden_size=2048,
        intermediate_size=5504, num_attention_heads=16, num_key_value_heads=16,
    ),
    "BERT, 2 layers": hf(
        "BertForMaskedLM", "BertConfig", tokens(8, 128), num_hidden_layers=2, hidden_dropout_prob=0,
        attention_probs_dropout_prob=0,
    ),
    "ViT, 2 layers": hf("ViTForImageClassification", "ViTConfig", images(8, 224), num_hidden_layers=2),
    "ResNet, 1 block a stage": hf(
        "ResNetForImageClassification", "ResNetConfig", images(32, 64), depths=[1, 1, 1, 1], num_labels=1000
    ),
    "MLP": perceptron,
    "DLRM": nets.dlrm,
    "mixture of experts": nets.moe,
}  # fmt: skip


def measure(name: str, devices: list[str]) -> dict[str, Any]:
    """Both captures of one model, both plans on each device kind."""
    made = MODELS[name]()
    programs, row = {}, {}
    for frontend in ("torch_xla", "torchax"):
        start = time.process_time()
        programs[frontend] = autoshard.capture(
            made["model"], made["inputs"], loss_fn=made["loss_fn"], optimizer=adamw, frontend=frontend
        )
        row[f"capture_{frontend}_cpu_s"] = time.process_time() - start
    row["ops"] = len(programs["torchax"].ops)
    pairs = zip(programs["torch_xla"].ops, programs["torchax"].ops, strict=True)
    row["ops_that_differ"] = sum(a != b for a, b in pairs)
    for device in devices:
        mesh = Mesh((2, 4), device=device)
        # The limit is one of the clock, and no figure may follow from how busy the machine is.
        theirs, mine = (autoshard.plan_program(programs[f], mesh, time_limit=3600) for f in ("torch_xla", "torchax"))
        row[device] = {
            "torch_xla_s": theirs.predicted.step_time_s,
            "torchax_s": mine.predicted.step_time_s,
            "parameters": len(theirs.parameters),
            "split_otherwise": sum(mine.parameters[n].spec != t.spec for n, t in theirs.parameters.items()),
        }
    return row


def table(found: dict[str, Any]) -> str:
    """In Markdown."""
    devices = sorted({key for row in found.values() for key, value in row.items() if isinstance(value, dict)})
    head = ["AdamW step", "aten ops (differing)"]
    head += [f"{d}: ms, both ways" for d in devices] + ["parameters split otherwise"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for name, row in found.items():
        cells = [name, f"{row['ops']} ({row['ops_that_differ']})"]
        for device in devices:
            each = row[device]
            change = each["torchax_s"] / each["torch_xla_s"] - 1
            cells.append(f"{each['torch_xla_s'] * 1e3:.4g}, {each['torchax_s'] * 1e3:.4g} ({change:+.2%})")
        cells.append(", ".join(f"{row[d]['split_otherwise']} of {row[d]['parameters']}" for d in devices))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Measure what is not in the file yet, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--devices", default="cpu,h100")
    parser.add_argument("--table", action="store_true")
    given = parser.parse_args()
    found = json.loads(given.out.read_text()) if given.out.exists() else {}
    if given.table:
        print(table(found))
        return
    from autoshard.frontends.torch_xla.program import prepare_runtime

    prepare_runtime()
    for name in MODELS:
        if name not in found:
            found[name] = measure(name, given.devices.split(","))
            given.out.write_text(json.dumps(found, indent=1))
            print(name, found[name], flush=True)


if __name__ == "__main__":
    main()
