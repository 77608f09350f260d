"""A step of a small Mixtral or gpt-oss whose experts are one op, and splits of it."""

from __future__ import annotations

import torch
from transformers import GptOssConfig, GptOssForCausalLM, MixtralConfig, MixtralForCausalLM

from autoshard import api
from autoshard.experts.dims import UP, X
from autoshard.experts.form import GRADIENT, KINDS
from autoshard.frontends.choose import capture_of, switches_for
from autoshard.fused import dims_of_attrs
from autoshard.graph.annotations import Annotations, with_regions
from autoshard.graph.ops import Graph, Value
from autoshard.mesh import Mesh, Spec
from autoshard.planning.written import written_plan
from autoshard.sources import Source
from autoshard.stablehlo.reader import build_graph

TOKENS, D, F, E = 8 * 64, 128, 256, 4


def source(dtype: torch.dtype = torch.float32, implementation: str = "eager", activation: str = "silu") -> Source:
    """A training step whose experts have this activation; equal weights each time."""
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=64, hidden_size=D, intermediate_size=F, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=E, num_experts_per_tok=2, hidden_act=activation,
    )  # fmt: skip
    config._experts_implementation = implementation
    model = MixtralForCausalLM._from_config(config, dtype=dtype, attn_implementation="eager")
    ids = torch.randint(0, 64, (8, TOKENS // 8))
    return Source(model, {"input_ids": ids, "labels": ids}, None, torch.optim.SGD(model.parameters(), 0.1), True)


def gpt_oss(dtype: torch.dtype = torch.float32, limit: float = 0.5) -> Source:
    """One whose experts have biases, transposed weights, interleaved gates, and a gate of their own."""
    torch.manual_seed(0)
    config = GptOssConfig(
        vocab_size=64, hidden_size=D, intermediate_size=F, num_hidden_layers=2, num_attention_heads=4, head_dim=32,
        num_key_value_heads=2, num_local_experts=E, num_experts_per_tok=2, layer_types=["full_attention"] * 2,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4}, swiglu_limit=limit,
    )  # fmt: skip
    config._experts_implementation = "eager"
    model = GptOssForCausalLM._from_config(config, dtype=dtype, attn_implementation="eager")
    for name, each in model.named_parameters():
        if "experts" in name:
            torch.nn.init.normal_(each, std=0.1)
    ids = torch.randint(0, 64, (8, TOKENS // 8))
    return Source(model, {"input_ids": ids, "labels": ids}, None, torch.optim.SGD(model.parameters(), 0.1), True)


def graph_of(step: Source, device: str, frontend: str = "torch_xla") -> Graph:
    """The graph of a source's program for a kind of device."""
    program = capture_of(frontend)(step.model, step.inputs, optimizer=step.optimizer, switches=switches_for(device))
    return build_graph(program)


SPLITS: dict[str, dict[str, tuple[str, ...]]] = {
    "tokens": {"t": ("data", "model")},
    "tokens, scattered": {"t": ("data", "model"), "scatter": ("td",)},
    "experts": {"t": ("data",), "e": ("model",)},
    "features": {"t": ("data",), "f": ("model",)},
    "experts, scattered": {"t": ("data",), "e": ("model",), "scatter": ("td",)},
    "experts and features": {"e": ("data",), "f": ("model",)},
}
"""Name -> the axes that split tokens, experts and hidden features, and letters along which sums are scattered."""


def split(graph: Graph, how: str, device: str) -> api.Plan:
    """The plan that splits experts so, and the input along its batch by the axes of tokens."""
    asked = SPLITS[how]
    mesh = Mesh((2, 4), ("data", "model"), device)
    pins: dict[Value, Spec] = {Value(op): ((),) * len(graph.ops[op].results[0].shape) for op in graph.arguments}
    copies: dict[tuple[Value, int], Spec] = {}
    t, e, f = (asked.get(letter, ()) for letter in "tef")
    pins |= {
        Value(op): (t, ())
        for op, each in zip(graph.arguments, graph.program.arguments, strict=True)
        if each.role == "input"
    }
    for op in graph.ops:
        if op.kind not in KINDS:
            continue
        dims = dims_of_attrs(op.kind, op.attrs, [graph.type_of(value).shape for value in op.operands])
        x, up = op.operands[X], op.operands[UP]
        copies |= {(x, op.aten): (t, ()), (up, op.aten): dims.tiling(dims.operands[UP], {"e": e, "f": f})}
        scatter = bool(asked.get("scatter"))
        made = {"t": (*t, *e, *f) if scatter else t, "e": e, "f": f, "d": t if scatter else ()}
        pins |= {Value(op.id, number): dims.tiling(letters, made) for number, letters in enumerate(dims.results)}
    assert any(op.kind == GRADIENT for op in graph.ops)
    return written_plan(graph, mesh, Annotations(pins, copies))


__all__ = ["SPLITS", "gpt_oss", "graph_of", "source", "split", "with_regions"]
