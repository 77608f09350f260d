"""Training in bf16: collectives and memory predicted beside compiled, of ten small programs and four deep ones.

Decoders (grouped queries, rotary embeddings, RMSNorm, SwiGLU) with and without checkpoints, tied and untied, with
float32 masters and under autocast; GPT-2's layers, a mixture of experts, a ViT and an MLP. Deep ones have 12 layers
(the mixture of experts 4) and 2,048 tokens a row. A row that is in the file is not made again unless `--again`.

    python benchmarks/bf16.py
    python benchmarks/bf16.py --targets tpu-v5e:2x4,tpu-v5p:2x2x2 --plans dp,fsdp,megatron,auto
        --out benchmarks/results/bf16_tpu.csv
    python benchmarks/bf16.py --full --targets h100:8,tpu-v5e:2x4,tpu-v5p:2x2x2,tpu-v6e:2x4 --plans fsdp
        --out benchmarks/results/full_size.csv
    python benchmarks/bf16.py --deep --targets tpu-v5e:2x4 --plans dp,fsdp,megatron,auto
        --out benchmarks/results/bf16_tpu.csv
    python benchmarks/bf16.py --deep --targets h100:8 --plans dp,fsdp,megatron,auto
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from compiled import annotations, measured, mesh_on
from results import RESULTS, add, kept, key, read
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from autoshard import api
from autoshard.cost.predict import predict
from autoshard.stablehlo.reader import build_graph
from autoshard.verify.compile import CompileError

MESHES = {"h100:2x8": "2x8"}
"""Target -> its mesh, where that is not 2x4."""
HEAD = 64


class GroupedAttention(nn.Module):
    """Causal attention with rotary embeddings, several query heads for each head of keys."""

    def __init__(self, width: int, head: int = HEAD, group: int = 2) -> None:
        """Of heads `head` wide, `group` of queries for each of keys."""
        super().__init__()
        self.head = head
        self.query, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.key, self.value = (nn.Linear(width, width // group, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of (batch, positions, width)."""
        query, key, value = (
            project(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for project in (self.query, self.key, self.value)
        )
        attended = functional.scaled_dot_product_attention(
            rotated(query), rotated(key), value, is_causal=True, enable_gqa=True
        )
        merged: torch.Tensor = self.out(attended.transpose(1, 2).flatten(2))
        return merged


def rotated(x: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding (arXiv:2104.09864) of (batch, heads, positions, features), in float32."""
    frequency = 1e4 ** (-torch.arange(0, x.shape[-1], 2, device=x.device) / x.shape[-1])
    angle = torch.outer(torch.arange(x.shape[-2], device=x.device).float(), frequency)
    first, second = x.float().chunk(2, -1)
    turned = (first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin())
    return torch.cat(turned, -1).to(x.dtype)


class SwiGLU(nn.Module):
    """Shazeer 2020 (arXiv:2002.05202)."""

    def __init__(self, width: int, hidden: int | None = None) -> None:
        """`hidden` wide inside; default three times as wide."""
        super().__init__()
        hidden = hidden or 3 * width
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of (..., width)."""
        out: torch.Tensor = self.down(functional.silu(self.gate(x)) * self.up(x))
        return out


class Experts(nn.Module):
    """Eight experts; each token's output is the sum of all of them, weighted by the two best gates."""

    def __init__(self, width: int) -> None:
        """Twice as wide inside."""
        super().__init__()
        self.router = nn.Linear(width, 8, bias=False)
        self.up = nn.Parameter(torch.empty(8, width, 2 * width))
        self.down = nn.Parameter(torch.empty(8, 2 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of (batch, positions, width)."""
        scores = self.router(x).float()
        best, chosen = scores.topk(2, -1)
        gates = torch.zeros_like(scores).scatter(-1, chosen, best.softmax(-1)).to(x.dtype)
        hidden = functional.gelu(torch.einsum("bsw,ewh->besh", x, self.up))
        return torch.einsum("besh,ehw,bse->bsw", hidden, self.down, gates)


class Block(nn.Module):
    """Attention and a feed-forward part, each on a norm of what it is added to."""

    def __init__(
        self,
        width: int,
        feed: Callable[[int], nn.Module] = SwiGLU,
        attention: Callable[[int], nn.Module] = GroupedAttention,
    ) -> None:
        """`feed` makes the feed-forward part."""
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.attention, self.feed = attention(width), feed(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of (batch, positions, width)."""
        x = x + self.attention(self.norms[0](x))
        out: torch.Tensor = x + self.feed(self.norms[1](x))
        return out


class Decoder(nn.Module):
    """Embedding, blocks, norm and head."""

    def __init__(
        self, block: Callable[[], nn.Module], width: int, vocab: int, tied: bool, saved: bool, layers: int
    ) -> None:
        """`tied`: the head is the embedding. `saved`: activations are kept, not computed again behind checkpoints."""
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(block() for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, vocab, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.saved = saved

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x) if self.saved else checkpoint(block, x, use_reentrant=False)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


class Autocast(nn.Module):
    """A float32 model whose products are computed in bf16."""

    def __init__(self, model: nn.Module) -> None:
        """Around `model`."""
        super().__init__()
        self.model = model

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        """What the model makes."""
        with torch.autocast("xla", dtype=torch.bfloat16):
            out: torch.Tensor = self.model(*inputs)
            return out


class Masters(torch.optim.Optimizer):
    """Momentum on float32 masters, which are copied into parameters of bf16."""

    def __init__(self, parameters: Any) -> None:
        """Of these parameters."""
        super().__init__(parameters, {"lr": 1e-3})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """One step."""
        for parameter in (one for group in self.param_groups for one in group["params"] if one.grad is not None):
            state = self.state[parameter]
            if not state:
                state["master"] = parameter.detach().float()
                state["momentum"] = torch.zeros_like(parameter, dtype=torch.float32)
            state["momentum"].mul_(0.9).add_(parameter.grad.float())
            state["master"].add_(state["momentum"], alpha=-1e-3)
            parameter.copy_(state["master"])


class ViT(nn.Module):
    """Dosovitskiy et al. 2020 (arXiv:2010.11929): patches of 8, two encoder layers, the mean of them classified."""

    def __init__(self, width: int) -> None:
        """Of heads 64 wide."""
        super().__init__()
        self.patches = nn.Conv2d(3, width, 8, stride=8)
        self.positions = nn.Parameter(torch.empty(1, 64, width))
        layer = partial(nn.TransformerEncoderLayer, width, width // HEAD, 4 * width, 0.0, functional.gelu)
        self.layers = nn.Sequential(*(layer(batch_first=True, norm_first=True) for _ in range(2)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1000)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Logits of (batch, 3, 64, 64)."""
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        logits: torch.Tensor = self.head(self.norm(self.layers(x)).mean(1))
        return logits


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """The optimizer of most."""
    return torch.optim.AdamW(parameters, lr=1e-3)


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """In float32."""
    return functional.cross_entropy(logits.float().flatten(0, -2), labels.flatten())


def decoder(
    *,
    tied: bool = True,
    saved: bool = False,
    vocab: int = 4096,
    width: int = 512,
    block: Any = Block,
    layers: int = 3,
    batch: tuple[int, int] = (32, 256),
    **settings: Any,
) -> dict[str, Any]:
    """A decoder of `layers` blocks on a batch of rows of tokens."""
    tokens, labels = (torch.zeros(batch, dtype=torch.int64) for _ in range(2))
    return step(lambda: Decoder(partial(block, width), width, vocab, tied, saved, layers), (tokens, labels), **settings)


def gpt_block(width: int) -> nn.Module:
    """A layer with LayerNorm, biases and as many heads of keys as of queries, as in GPT-2."""
    return nn.TransformerEncoderLayer(
        width, width // HEAD, 4 * width, 0.0, functional.gelu, batch_first=True, norm_first=True
    )


def vit() -> dict[str, Any]:
    """On 64 images."""
    images, labels = torch.zeros(64, 3, 64, 64, dtype=torch.bfloat16), torch.zeros(64, dtype=torch.int64)
    return step(lambda: ViT(512), (images, labels))


def mlp() -> dict[str, Any]:
    """Four linear layers on RMS norms, classified."""
    layers = [nn.Linear(512, 2048), nn.Linear(2048, 2048), nn.Linear(2048, 512), nn.Linear(512, 256)]
    parts = [part for layer in layers for part in (nn.RMSNorm(layer.in_features), layer, nn.SiLU())]
    inputs = torch.zeros(1024, 512, dtype=torch.bfloat16), torch.zeros(1024, dtype=torch.int64)
    return step(lambda: nn.Sequential(*parts), inputs)


def step(make: Callable[[], nn.Module], inputs: Any, autocast: bool = False, optimizer: Any = adamw) -> dict[str, Any]:
    """What `api.capture` is given: parameters of bf16, or of float32 under autocast."""
    with torch.device("meta"):
        model = make()
    model = Autocast(model) if autocast else model.to("meta", torch.bfloat16)
    return {"model": model, "sample_inputs": inputs, "loss_fn": cross_entropy, "optimizer": optimizer}


PROGRAMS: dict[str, Callable[[], dict[str, Any]]] = {
    "decoder": decoder,
    "decoder, no checkpoints": partial(decoder, saved=True),
    "decoder, untied": partial(decoder, tied=False),
    "decoder, 32,000 tokens": partial(decoder, vocab=32000),
    "decoder, float32 masters": partial(decoder, optimizer=Masters),
    "decoder, autocast": partial(decoder, autocast=True),
    "GPT-2's layers, autocast, untied": partial(decoder, block=gpt_block, saved=True, tied=False, autocast=True),
    "mixture of experts": partial(decoder, block=partial(Block, feed=Experts), width=256),
    "ViT": vit,
    "MLP with RMSNorm": mlp,
}

large = partial(decoder, width=1024, layers=12, vocab=32000, batch=(16, 2048), tied=False)
DEEP: dict[str, Callable[[], dict[str, Any]]] = {
    "deep decoder": large,
    "deep decoder, no checkpoints": partial(large, saved=True, batch=(8, 2048)),
    "deep GPT-2, autocast": partial(large, block=gpt_block, autocast=True, saved=True, tied=True, batch=(8, 2048)),
    "deep mixture of experts": partial(large, block=partial(Block, feed=Experts), layers=4, width=512),
}
"""At full depth, on 2,048 tokens a row."""

llama_block = partial(Block, feed=partial(SwiGLU, hidden=14336), attention=partial(GroupedAttention, head=128, group=4))
FULL: dict[str, Callable[[], dict[str, Any]]] = {
    "Llama-3-8B": partial(
        decoder, width=4096, layers=32, vocab=128256, batch=(8, 8192), tied=False, block=llama_block, autocast=True
    ),
}
"""At full size; attention is written out. Some targets have not the memory: libtpu says so, and the row has it."""


def main() -> None:
    """Make the rows that are missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", default="", help="only those whose names have one of these words, by commas")
    parser.add_argument("--deep", action="store_true", help="the deep programs")
    parser.add_argument("--full", action="store_true", help="the program of full size")
    parser.add_argument("--targets", default="h100:8,h100:2x8")
    parser.add_argument("--plans", default="auto,fsdp")
    parser.add_argument("--again", action="store_true", help="rows too that other sources of autoshard made")
    parser.add_argument("--out", type=Path, default=RESULTS / "bf16_gpu.csv")
    options = parser.parse_args()
    known = {key(row): row for row in read(options.out)}
    for name, make in (FULL if options.full else DEEP if options.deep else PROGRAMS).items():
        rows = [
            {"model": name, "target": target, "mesh": MESHES.get(target, "2x4"), "plan": plan}
            for target in options.targets.split(",")
            for plan in options.plans.split(",")
        ]
        asked = [row for row in rows if not kept(known.get(key(row)), options.again)]
        if not asked or not any(word in name for word in options.programs.split(",")):
            continue
        graph = build_graph(api.capture(**make()))
        for row in asked:
            try:
                made = add(options.out, row | measured(graph, row["mesh"], row["target"], row["plan"]))
            except CompileError as error:
                mesh = mesh_on(row["target"], row["mesh"])
                found = predict(graph, annotations(row["plan"], graph, mesh), mesh)
                figures = {"predicted_memory": found.peak_memory_bytes, "predicted_s": found.step_time_s}
                made = add(options.out, row | figures | {"error": str(error).partition("\n")[0]})
            print(f"{name}, {row['target']}, {row['plan']}: {made.get('error') or made['fidelity']}", flush=True)


if __name__ == "__main__":
    main()
