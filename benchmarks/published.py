"""Training steps that others measured, predicted: one JSON line per row, then errors by set.

    python benchmarks/published.py ROWS.json [ID…]

A row names a decoder's sizes, devices, mesh, batch, what is recomputed and the measured step. Its program is a generic
decoder, f32 parameters under bf16 autocast with AdamW, split by the plan by hand that the row describes, predicted for
two and four layers and extrapolated: XLA's program, or PyTorch's eager runtime where the row ran under PyTorch. A row
that cannot be built so says why.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import autoshard
from autoshard.cost.compiler.eager import Eager
from autoshard.cost.machine.device import load_device
from autoshard.cost.predict import predict
from autoshard.errors import AutoshardError
from autoshard.manual import PLANS
from autoshard.mesh import Mesh
from autoshard.plans.remat import ALL, PRODUCTS
from autoshard.stablehlo.reader import build_graph
from autoshard.strategies.guard import guarded

DEPTHS = 2, 4
"""Layers of the two programs that are predicted."""
KINDS = {
    "A100-SXM-40GB": "a100-40gb",
    "A100-SXM-80GB": "a100-80gb",
    "H100-SXM-80GB": "h100",
    "H100-96GB": "h100-96gb",
    "H200": "h200",
    "B200": "b200",
    "TPU v4": "tpu-v4",
    "TPU v5e": "tpu-v5e",
    "TPU v5p": "tpu-v5p",
    "TPU v6e": "tpu-v6e",
}
"""Start of a row's hardware -> device kind."""
HOST = 8
"""GPUs of a host."""
ACTIVATIONS = {"swiglu": nn.SiLU, "relu": nn.ReLU}
"""By a part of the name of a row's products; others are GELU."""
LEVELS = (("none", ""), ("full", ALL), ("minimal", PRODUCTS), ("attention only", ""), ("selective", PRODUCTS))
"""Part of a row's words for recomputation -> what of each layer is; attention as one op never keeps its scores."""


SHARES = {"median": 0.5, "p90": 0.9, "worst": 1.0}


class UnbuiltError(Exception):
    """A row that cannot be predicted; says why."""


class FusedLoss(nn.Module):  # type: ignore[misc]
    """Cross-entropy as one kernel in each direction, and two metrics of each batch: llm-foundry's."""

    def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The mean over all tokens."""
        return cross_entropy(logits, labels)


class Measured(nn.Module):  # type: ignore[misc]
    """`LanguageCrossEntropy` and `LanguagePerplexity`: a softmax each, of which one value per token is read."""

    def __init__(self) -> None:
        """With the loss."""
        super().__init__()
        self.loss = FusedLoss()

    def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The loss, with what metrics add."""
        result: torch.Tensor = self.loss(logits, labels)
        for read in (logits.detach(), logits.detach().flatten(0, 1)):
            result = result + read.float().log_softmax(-1)[..., 0].sum()
        return result


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean over all tokens."""
    return functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


class Softmax(nn.Module):  # type: ignore[misc]
    """Scaled, masked and computed as one kernel."""

    def forward(self, scores: torch.Tensor) -> torch.Tensor:
        """Over the last dim; what a mask leaves out is computed as well."""
        return scores.float().softmax(-1).to(scores.dtype)


class Core(nn.Module):  # type: ignore[misc]
    """Megatron's attention before FlashAttention: products, a softmax, dropout."""

    def __init__(self) -> None:
        """Without parameters."""
        super().__init__()
        self.softmax = Softmax()

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Of `(batch, heads, positions, size)`; a negation stands for dropout."""
        return -self.softmax(query @ key.transpose(-1, -2)) @ value


class Attention(nn.Module):  # type: ignore[misc]
    """Causal self-attention with grouped keys, with or without rotary embeddings."""

    def __init__(self, model: Mapping[str, Any]) -> None:
        """Of a row's model."""
        super().__init__()
        self.heads, self.keys = model["heads"], model["kv_heads"]
        width, bias = model["d_model"], bool(model.get("bias"))
        self.size = model.get("head_dim") or width // self.heads
        self.rotary = rotates(model)
        self.fused = nn.Linear(width, (self.heads + 2 * self.keys) * self.size, bias=bias) if is_fused(model) else None
        if self.fused is None:
            self.query = nn.Linear(width, self.heads * self.size, bias=bias)
            self.key, self.value = (nn.Linear(width, self.keys * self.size, bias=bias) for _ in range(2))
        self.out = nn.Linear(self.heads * self.size, width, bias=bias)
        self.core = Core() if is_megatron(model) else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of `(batch, positions, width)`."""
        if self.fused is None:
            parts = [project(x) for project in (self.query, self.key, self.value)]
        else:
            parts = self.fused(x).split([heads * self.size for heads in (self.heads, self.keys, self.keys)], -1)
        query, key, value = (part.unflatten(-1, (-1, self.size)).transpose(1, 2) for part in parts)
        if self.rotary:
            query, key = rotated(query), rotated(key)
        made = (
            functional.scaled_dot_product_attention(
                query, key, value, is_causal=True, enable_gqa=self.keys != self.heads
            )
            if self.core is None
            else self.core(query, key, value)
        )
        result: torch.Tensor = self.out(made.transpose(1, 2).flatten(2))
        return result


class Block(nn.Module):  # type: ignore[misc]
    """A decoder's layer, normalised before attention and before the products."""

    def __init__(self, model: Mapping[str, Any]) -> None:
        """Of a row's model."""
        super().__init__()
        width, inner, bias = model["d_model"], model["d_ff"], bool(model.get("bias"))
        self.gated = "swiglu" in model["mlp"]
        self.activation = next((own for name, own in ACTIVATIONS.items() if name in model["mlp"]), nn.GELU)()
        self.before, self.between = norm(model), norm(model)
        self.attention = Attention(model)
        self.up, self.down = nn.Linear(width, inner, bias=bias), nn.Linear(inner, width, bias=bias)
        self.gate = nn.Linear(width, inner, bias=bias) if self.gated else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of `(batch, positions, width)`."""
        x = x + self.attention(self.before(x))
        read = self.between(x)
        made = self.up(read)
        made = self.activation(self.gate(read)) * made if self.gate is not None else self.activation(made)
        result: torch.Tensor = x + self.down(made)
        return result


class Decoder(nn.Module):  # type: ignore[misc]
    """Embeddings, layers and the head, under bf16 autocast."""

    def __init__(self, model: Mapping[str, Any], layers: int, *, selective: bool = False) -> None:
        """Of a row's model, with fewer layers; `selective`: torchtitan's selective checkpoints."""
        super().__init__()
        self.selective = selective
        width = model["d_model"]
        self.table = nn.Embedding(model["vocab"], width)
        self.places = None if rotates(model) else nn.Embedding(model["seq"], width)
        self.layers = nn.ModuleList(Block(model) for _ in range(layers))
        self.last = norm(model)
        self.head = nn.Linear(width, model["vocab"], bias=False)
        if model["tied_embeddings"]:
            self.head.weight = self.table.weight
        self.loss = Measured() if is_fused(model) else cross_entropy

    @torch.autocast("xla", dtype=torch.bfloat16)  # type: ignore[misc]
    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The loss."""
        x = self.table(tokens).to(torch.bfloat16)
        if self.places is not None:
            x = x + self.places(torch.arange(tokens.shape[1], device=tokens.device)).to(torch.bfloat16)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False, context_fn=half_saved) if self.selective else layer(x)
        result: torch.Tensor = self.loss(self.head(self.last(x)), labels)
        return result


def half_saved() -> Any:
    """Contexts that save attention and every second product (torchtitan's `_save_list`)."""
    seen: Counter[bool] = Counter()

    def policy(context: Any, op: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        products = op == torch.ops.aten.mm.default
        seen[context.is_recompute] += products
        saved = seen[context.is_recompute] % 2 if products else "scaled_dot_product" in str(op)
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def is_megatron(model: Mapping[str, Any]) -> bool:
    """Whether a model is Megatron's of 2021 or 2022: no FlashAttention, gradients summed after the backward pass."""
    return model["name"].startswith(("GPT", "Megatron"))


def is_fused(model: Mapping[str, Any]) -> bool:
    """Whether queries, keys and values are one product."""
    return model["name"].startswith("MPT")


def rotates(model: Mapping[str, Any]) -> bool:
    """Whether positions are rotary rather than learned."""
    return "learned" not in model.get("positions", "learned" if "gelu" in model["mlp"] else "rotary")


def norm(model: Mapping[str, Any]) -> nn.Module:
    """A row's normalisation."""
    default = "rmsnorm" if "swiglu" in model["mlp"] else "layernorm"
    width = model["d_model"]
    return nn.RMSNorm(width) if "rms" in model.get("norm", default) else nn.LayerNorm(width)


def rotated(x: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of `(batch, heads, positions, size)`; its angles cost nothing that counts."""
    half = x.shape[-1] // 2
    frequencies = 10_000.0 ** (-torch.arange(half, device=x.device) / half)
    angles = torch.arange(x.shape[2], device=x.device)[:, None] * frequencies
    cos, sin = (torch.cat([each, each], -1).to(x.dtype) for each in (angles.cos(), angles.sin()))
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


def place(row: Mapping[str, Any]) -> tuple[Mesh, str]:
    """The mesh of a row on its devices, and the plan by hand that it describes."""
    kind = next((own for start, own in KINDS.items() if row["hardware"].startswith(start)), None)
    if kind is None:
        raise UnbuiltError(f"no device kind for {row['hardware']}")
    mesh = row["mesh"]
    for axis, called in (("pp", "pipeline"), ("cp", "context"), ("ep", "expert")):
        if mesh.get(axis, 1) > 1:
            raise UnbuiltError(f"{called} parallelism")
    copies, shards, tensors = mesh["dp"], mesh["fsdp"], mesh["tp"]
    chip = load_device(kind).chip_devices
    shards *= chip if shards > 1 or copies == tensors == 1 else 1
    sizes = {"dp": copies, "fsdp": shards, "tp": tensors}
    axes = {name: size for name, size in sizes.items() if size > 1} or {"fsdp": 1}
    where = f"{kind}{topology(kind, copies, shards * tensors, row['devices'])}"
    found = Mesh(tuple(axes.values()), tuple(axes), device=where)
    if tensors > 1:
        if "no sequence" in row["remat"]:
            return found, "megatron"
        return found, "sequence" if shards == copies == 1 else "maxtext" if "jax" in row["tags"] else "torchtitan"
    if copies > 1:
        return found, "hsdp" if shards > 1 else "dp"
    return found, "zero1" if row.get("zero_stage") == 1 else "fsdp"


def topology(kind: str, slices: int, inside: int, devices: int) -> str:
    """`:HOSTSxGPUS`, or a TPU's torus and slices."""
    if not kind.startswith("tpu"):
        return f":{devices // HOST}x{HOST}" if devices > HOST else f":{devices}"
    chips, dims = inside // load_device(kind).chip_devices, 2 if kind in ("tpu-v5e", "tpu-v6e") else 3
    shape = min(
        (each for each in factors(chips, dims)), key=lambda each: (sum(size % 4 != 0 for size in each), max(each))
    )
    return f":{'x'.join(map(str, sorted(shape)))}" + (f":{slices}slices" if slices > 1 else "")


def factors(number: int, count: int) -> Iterator[tuple[int, ...]]:
    """All ways to write a number as a product of `count` factors."""
    if count == 1:
        yield (number,)
        return
    for first in range(1, number + 1):
        if number % first == 0:
            yield from ((first, *rest) for rest in factors(number // first, count - 1))


def recomputed(row: Mapping[str, Any], layers: int) -> dict[str, str]:
    """What a row recomputes of each layer."""
    text = row["remat"]
    if "offload" in text:
        raise UnbuiltError("activations offloaded to the host")
    level = next((own for words, own in LEVELS if words in text), None)
    if level is None:
        raise UnbuiltError(f"recomputation {text!r}")
    if "attention only" in text and is_megatron(row["model"]):
        return {f"layers.{number}.attention.core": ALL for number in range(layers)}
    return {f"layers.{number}": level for number in range(layers) if level}


def runtime(row: Mapping[str, Any]) -> Eager | None:
    """PyTorch as a row ran it.

    llm-foundry's benchmarks set attention in Triton (`--attn_impl`), torchtitan takes cuDNN's from its #1000 on.
    """
    if "pytorch" not in row["tags"]:
        return None
    late = any(pull in row.get("source", "") for pull in ("pull/1881", "pull/3429"))
    kept = row.get("zero_stage") == 2
    return Eager("triton" if is_fused(row["model"]) else "cudnn" if late else "flash", gathers_again=not kept)


def of_depth(row: Mapping[str, Any], layers: int) -> tuple[float, float, float]:
    """(overlapped seconds, serial seconds, bytes per device) of a row's step with that many layers."""
    mesh, name = place(row)
    model = dict(row["model"])
    ways = row["mesh"]["dp"] * row["mesh"]["fsdp"]
    steps = row.get("grad_accum") or max(1, round(row["global_batch_sequences"] / (row["microbatch"] * ways)))
    batch = row["global_batch_sequences"] // steps
    selective = "per-op SAC" in row["remat"] or "default policy" in row["remat"]
    with torch.device("meta"):
        network = Decoder(model, layers, selective=selective)
        tokens = torch.zeros(batch, model["seq"], dtype=torch.long)
    program = autoshard.capture(
        network,
        (tokens, tokens),
        loss_fn=lambda loss: loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
        device=mesh.device,
        remat=None if selective else recomputed(row, layers),
        micro_batches=steps,
    )
    graph = build_graph(program)
    found = predict(graph, guarded(graph, PLANS[name](graph, mesh), mesh), mesh, eager=runtime(row))
    seconds = found.step_time_s if is_megatron(model) else found.overlapped_s
    return seconds, found.step_time_s, found.peak_memory_bytes


def predicted(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row's line."""
    measured = row["measured"]
    seconds = measured.get("step_time_s") or measured.get("step_time_s_derived")
    line: dict[str, Any] = {"id": row["id"], "measured_s": seconds}
    if "peak_memory_gib" in measured:
        line["measured_bytes"] = measured["peak_memory_gib"] * 2**30
    started = time.process_time()
    try:
        if row["dtype"] not in ("bf16", "fp16"):
            raise UnbuiltError(f"dtype {row['dtype']}")
        low, high = (of_depth(row, layers) for layers in DEPTHS)
    except (UnbuiltError, AutoshardError, ValueError) as error:
        return line | {"why": f"{type(error).__name__}: {error}".removeprefix("UnbuiltError: ").splitlines()[0]}
    more = (row["model"]["layers"] - DEPTHS[0]) / (DEPTHS[1] - DEPTHS[0])
    overlapped, serial, memory = (one + more * (two - one) for one, two in zip(low, high, strict=True))
    line |= {"predicted_s": overlapped, "serial_s": serial, "memory_bytes": round(memory)}
    line["cpu_s"] = round(time.process_time() - started, 1)
    return line | ({"ratio": overlapped / seconds} if seconds else {})


def families(rows: Sequence[Mapping[str, Any]], lines: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Errors of each (model family, device), and over all, each counted alike."""
    sets: dict[str, list[float]] = {}
    for row, line in zip(rows, lines, strict=True):
        if "ratio" in line:
            key = f"{row['model']['name'].split('-')[0]} {row['hardware'].split(' (')[0]}"
            sets.setdefault(key, []).append(abs(math.log(line["ratio"])))
    for key, errors in sorted(sets.items()):
        shares = ", ".join(f"{name} {percent(errors, share)}" for name, share in SHARES.items())
        yield f"{key}: {len(errors)} rows, {shares}"
    if sets:
        medians = [statistics.median(errors) for errors in sets.values()]
        yield f"each set alike: median of medians {statistics.median(medians):.1%}"
    both = (line for line in lines if {"memory_bytes", "measured_bytes"} <= {*line})
    memory = [line["memory_bytes"] / line["measured_bytes"] for line in both]
    if memory:
        yield f"memory: {len(memory)} rows, predicted over measured {min(memory):.2f} to {max(memory):.2f}"


def percent(errors: Sequence[float], share: float) -> str:
    """The error that this share of rows does not exceed."""
    return f"{sorted(errors)[max(0, math.ceil(share * len(errors)) - 1)]:.1%}"


def order(rows: Sequence[Mapping[str, Any]], lines: Sequence[Mapping[str, Any]]) -> str:
    """How many pairs of set-ups of one model on as many devices of one kind are ordered right, by seconds per token."""
    right = pairs = 0
    each = [
        (row["model"]["name"], row["model"]["seq"], row["hardware"], row["devices"], row["global_batch_tokens"], line)
        for row, line in zip(rows, lines, strict=True)
        if "ratio" in line
    ]
    for number, (*one, tokens, line) in enumerate(each):
        for *two, others, other in each[:number]:
            mine, yours = line["predicted_s"] / tokens, other["predicted_s"] / others
            if one == two and mine != yours:
                pairs += 1
                right += (mine < yours) == (line["measured_s"] / tokens < other["measured_s"] / others)
    return f"order: {right} of {pairs} pairs right"


def main() -> None:
    """Predict the rows asked for, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path, metavar="ROWS.json")
    parser.add_argument("ids", nargs="*", metavar="ID")
    asked = parser.parse_args()
    rows = [row for row in json.loads(asked.rows.read_text()) if not asked.ids or row["id"] in asked.ids]
    lines = []
    for row in rows:
        lines.append(predicted(row))
        print(json.dumps(lines[-1]), flush=True)
    for text in (*families(rows, lines), order(rows, lines)):
        print(text)


if __name__ == "__main__":
    main()
