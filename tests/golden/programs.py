"""The programs whose plans are golden: small models of real widths, and what is asked of each plan.

Nothing is downloaded and no weights are allocated. Every solve ends in seconds with a proof of optimality, so no plan
follows from how busy the machine is. Of each, the best plan is one: where two cost the same, the last bits of float
sums decide, which differ by CPU. A new one keeps its decisions where all bandwidths are 1e-9 higher.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import autoshard
from autoshard.frontends.stablehlo_file import read_program
from autoshard.mesh import Mesh
from autoshard.planning.meshes import candidate_meshes
from autoshard.program import Program
from autoshard.sources import Source
from benchmarks import models

NO_TIME_LIMIT = 3600.0
"""Seconds for the solver; the limit is one of the clock, and no decision may follow from it."""


FORWARD = """
func.func private @gate(%a: tensor<512x2048xf32>, %b: tensor<512x2048xf32>) -> tensor<512x2048xf32> {
  %0 = stablehlo.logistic %a : tensor<512x2048xf32>
  %1 = stablehlo.multiply %0, %b : tensor<512x2048xf32>
  return %1 : tensor<512x2048xf32>
}
func.func @main(%x: tensor<512x1024xf32>, %gate: tensor<1024x2048xf32>, %up: tensor<1024x2048xf32>,
                %down: tensor<2048x1024xf32>) -> (tensor<512x1024xf32>, tensor<512xf32>) {
  %zero = stablehlo.constant dense<0.0> : tensor<f32>
  %0 = stablehlo.dot_general %x, %gate, contracting_dims = [1] x [0]
     : (tensor<512x1024xf32>, tensor<1024x2048xf32>) -> tensor<512x2048xf32>
  %1 = stablehlo.dot_general %x, %up, contracting_dims = [1] x [0]
     : (tensor<512x1024xf32>, tensor<1024x2048xf32>) -> tensor<512x2048xf32>
  %2 = call @gate(%0, %1) : (tensor<512x2048xf32>, tensor<512x2048xf32>) -> tensor<512x2048xf32>
  %3 = stablehlo.dot_general %2, %down, contracting_dims = [1] x [0]
     : (tensor<512x2048xf32>, tensor<2048x1024xf32>) -> tensor<512x1024xf32>
  %4 = stablehlo.reduce(%3 init: %zero) applies stablehlo.add across dimensions = [1]
     : (tensor<512x1024xf32>, tensor<f32>) -> tensor<512xf32>
  return %3, %4 : tensor<512x1024xf32>, tensor<512xf32>
}
"""
"""A gated feed-forward part by hand: three products, a call, the sums of rows."""


@dataclass(frozen=True)
class Golden:
    """A program, the devices it is planned for, and what is asked.

    Attributes:
        program: captures it; what several ask for is captured once.
        mesh: a shape, or the number of devices for a search over all shapes.
        device: the device kind, with a topology where that matters.
        options: further arguments of `autoshard.plan_program`.
        unlimited: of a golden plan whose memory limit binds, the one of the same program without it.
    """

    program: Callable[[], Program]
    mesh: str | int
    device: str
    options: Mapping[str, Any] = field(default_factory=dict)
    unlimited: str | None = None

    def plan(self) -> autoshard.Plan:
        """Made anew."""
        if isinstance(self.mesh, int):
            meshes = candidate_meshes(None, self.mesh, self.device)
        else:
            meshes = [Mesh.parse(self.mesh, device=self.device)]
        return autoshard.plan_program(self.program(), meshes, time_limit=NO_TIME_LIMIT, **self.options)


@cache
def captured(make: Callable[[], Source], frontend: str = "torch_xla") -> Program:
    """A training step."""
    source = make()
    return autoshard.capture(
        source.model, source.inputs, loss_fn=source.loss_fn, optimizer=source.optimizer, frontend=frontend
    )


def decoder(**how: Any) -> Source:
    """Causal layers in bf16 behind checkpoints, the head tied to the embedding; or in float32 under autocast."""
    import torch

    from tests.golden.decoder import Decoder

    with torch.device("meta"):
        model = Decoder(**how)
        tokens, labels = (torch.empty(16, 256, dtype=torch.int64) for _ in range(2))
    return Source(
        model if how.get("autocast") else model.bfloat16(),
        (tokens, labels),
        lambda logits, labels: torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten()),
        models.adamw,
        train=True,
    )


@cache
def stablehlo(make: Callable[[], tuple[str, bytes]]) -> Program:
    """A StableHLO file: its name, and what is in it."""
    name, content = make()
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / name
        file.write_bytes(content)
        return read_program(file)


def by_hand() -> tuple[str, bytes]:
    """A forward pass as text."""
    return "forward.mlir", FORWARD.encode()


def jax_step(layers: int = 0) -> tuple[str, bytes]:
    """A step of SGD with momentum on a gated network, as jax exports it; with `layers`, scanned over so many."""
    import jax
    import jax.export
    import jax.numpy as jnp

    def block(x: Any, w: Any) -> Any:
        return x + (jax.nn.silu(x @ w["gate"]) * (x @ w["up"])) @ w["down"]

    def loss(params: Any, batch: Any) -> Any:
        with jax.named_scope("blocks"):
            if layers:
                x, _ = jax.lax.scan(lambda x, w: (block(x, w), None), batch["x"], params)
            else:
                x = block(batch["x"], params)
        return jnp.mean((x - batch["y"]) ** 2)

    def step(state: Any, batch: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(state["params"], batch)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state["momentum"], gradients)
        params = jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], momentum)
        return {"params": params, "momentum": momentum}, value

    def of(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    stack = (layers,) if layers else ()
    params = {"gate": of(*stack, 512, 2048), "up": of(*stack, 512, 2048), "down": of(*stack, 2048, 512)}
    batch = {"x": of(2048, 512), "y": of(2048, 512)}
    exported = jax.export.export(jax.jit(step, donate_argnums=0), platforms=["cpu"])(
        {"params": params, "momentum": params}, batch
    )
    return "step.jax_export", bytes(exported.serialize())


GPT2 = partial(
    captured, partial(models.hf, "gpt2", seq=256, n_layer=1, n_embd=512, n_head=8, vocab_size=8192, n_positions=256)
)
LLAMA = partial(
    captured,
    partial(
        models.hf, "llama", 16, 256, num_hidden_layers=1, hidden_size=1024, intermediate_size=2816,
        num_attention_heads=8, num_key_value_heads=4, vocab_size=8192,
    ),
)  # fmt: skip
BERT = partial(
    captured,
    partial(
        models.hf, "bert", seq=128, num_hidden_layers=1, hidden_size=256, num_attention_heads=4,
        intermediate_size=1024, vocab_size=4096,
    ),
)  # fmt: skip
VIT = partial(
    captured,
    partial(
        models.hf, "vit", 32, None, num_hidden_layers=1, image_size=64, hidden_size=512, num_attention_heads=8,
        intermediate_size=2048,
    ),
    "torchax",
)  # fmt: skip
RESNET = partial(
    captured,
    partial(models.hf, "resnet", 16, None, depths="[1, 1]", hidden_sizes="[128, 256]", embedding_size=32),
)
UNET = partial(captured, models.unet, "torchax")
MOE = partial(
    captured, partial(models.built, "moe", layers=1, seq=128, width=512, hidden=2048, heads=8, vocabulary=4096)
)
DLRM = partial(captured, partial(models.built, "dlrm", tables=8, width=64, hidden=256), "torchax")
MLP = partial(captured, partial(models.built, "perceptron"))
CHECKPOINTS = partial(captured, partial(decoder, checkpoints=True))
AUTOCAST = partial(captured, partial(decoder, layers=1, autocast=True), "torchax")
TEXT = partial(stablehlo, by_hand)
JAX_STEP = partial(stablehlo, jax_step)
JAX_SCAN = partial(stablehlo, partial(jax_step, 4))

GOLDEN: dict[str, Golden] = {
    "mlp-cpu": Golden(MLP, "2x4", "cpu"),
    "mlp-hosts": Golden(MLP, "2x4", "h100:2x4"),
    "mlp-hosts-limited": Golden(MLP, "2x4", "h100:2x4", {"memory": 24_800_000}, "mlp-hosts"),
    "mlp-hints-inside": Golden(
        MLP, "2x4", "h100:8", {"hints": {"0": "[data],[model]", "2.weight": "[],[model]", "2.bias": "[model]"}}
    ),
    "mlp-hints-io": Golden(
        MLP, "2x4", "h100:8", {"hints": {"0": "[data],[model]", "2.weight": "[],[model]"}, "keep": "io"}
    ),
    "mlp-all-meshes": Golden(MLP, 8, "tpu-v5e:2x4"),
    "stablehlo-text": Golden(TEXT, "2x2", "cpu"),
    "jax-step": Golden(JAX_STEP, "8", "h100:8"),
    "jax-step-limited": Golden(JAX_STEP, "8", "h100:8", {"memory": 24_000_000}, "jax-step"),
    "jax-step-hint": Golden(JAX_STEP, "4x2", "tpu-v6e", {"hints": {"state.params.gate": "[],[model]"}}),
    "jax-scan": Golden(JAX_SCAN, "8", "tpu-v5p:2x2x2"),
    "jax-scan-limited": Golden(JAX_SCAN, "8", "tpu-v5p:2x2x2", {"memory": 160_000_000}, "jax-scan"),
    "gpt2-v5e": Golden(GPT2, "2x4", "tpu-v5e:2x4"),
    "gpt2-h100": Golden(GPT2, "2x4", "h100:8"),
    "gpt2-h100-limited": Golden(GPT2, "2x4", "h100:8", {"memory": 60_000_000}, "gpt2-h100"),
    "llama-hosts": Golden(LLAMA, "2x8", "h100:2x8"),
    "llama-v5p": Golden(LLAMA, "2x2x2", "tpu-v5p:2x2x2"),
    "bert-cpu": Golden(BERT, "2x4", "cpu"),
    "bert-least": Golden(BERT, "2x2", "a100-80gb", {"annotations": "least"}),
    "vit-v5e": Golden(VIT, "8", "tpu-v5e:2x4"),
    "checkpoints-bf16": Golden(CHECKPOINTS, "2x4", "h100:2x4"),
    "autocast": Golden(AUTOCAST, "2x4", "h100:8"),
    "moe-v5e": Golden(MOE, "2x4", "tpu-v5e:2x4"),
    "moe-experts-split": Golden(MOE, "4x2", "h100:8", {"hints": {"layers.0.experts.wi": "[model],[],[]"}}),
    "dlrm-v5e": Golden(DLRM, "8", "tpu-v5e:2x4"),
    "dlrm-h100": Golden(DLRM, "2x4", "h100:8"),
    "resnet-v5e": Golden(RESNET, "2x4", "tpu-v5e:2x4"),
    "resnet-cpu": Golden(RESNET, "2x2", "cpu"),
    "unet-h100": Golden(UNET, "8", "h100:8"),
}
"""Name -> the golden plan of `tests/golden/NAME.json.gz`; `make golden` writes the file of one that is added here."""
