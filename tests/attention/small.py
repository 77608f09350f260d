"""A decoder whose attention is one op, and splits of it."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from autoshard import api
from autoshard.attention.form import FORWARD, GRADIENT
from autoshard.frontends.choose import capture_of, switches_for
from autoshard.graph.annotations import Annotations
from autoshard.graph.ops import Graph, Value
from autoshard.mesh import Mesh, Spec
from autoshard.planning.written import written_plan
from autoshard.sources import Source
from autoshard.stablehlo.reader import build_graph

SEQ = 512


class Attention(nn.Module):
    """Causal, two query heads for each head of keys."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.key, self.value = nn.Linear(width, width // 2, bias=False), nn.Linear(width, width // 2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (each(x).unflatten(-1, (-1, 16)).transpose(1, 2) for each in (self.query, self.key, self.value))
        made = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return x + self.out(made.transpose(1, 2).flatten(2))


class Decoder(nn.Module):
    """Tokens to a loss."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.tokens = nn.Embedding(64, 128, dtype=dtype)
        self.layers = nn.Sequential(Attention(128).to(dtype), Attention(128).to(dtype))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.layers(self.tokens(ids)).float().square().mean()


def source(dtype: torch.dtype = torch.float32) -> Source:
    """A training step of the decoder; equal weights each time."""
    torch.manual_seed(0)
    model = Decoder(dtype)
    return Source(model, (torch.randint(0, 64, (8, SEQ)),), None, torch.optim.SGD(model.parameters(), 0.1), True)


def graph_of(step: Source, device: str, frontend: str = "torch_xla") -> Graph:
    """The graph of a source's program for a kind of device."""
    program = capture_of(frontend)(step.model, step.inputs, optimizer=step.optimizer, switches=switches_for(device))
    return build_graph(program)


SPLITS: dict[str, tuple[Spec, bool]] = {
    "heads": ((("data",), ("model",), (), (), ()), False),
    "queries": ((("data",), (), (), ("model",), ()), False),
    "queries, scattered": ((("data",), (), (), ("model",), ()), True),
    "one group, all queries": (((), (), ("data",), ("model",), ()), True),
}
"""Name -> split of attentions, and whether the gradients of keys are reduce-scattered."""


def split(graph: Graph, how: str, device: str, ids: Spec = (("data",), ())) -> api.Plan:
    """The plan that splits attentions so, and the input along its batch."""
    spec, scattered = SPLITS[how]
    pins = {Value(op): ((),) * len(graph.ops[op].results[0].shape) for op in graph.arguments}
    pins |= {
        Value(op): ids if spec[0] else ((), ())
        for op, each in zip(graph.arguments, graph.program.arguments, strict=True)
        if each.role == "input"
    }
    for op in graph.ops:
        if op.kind == FORWARD:
            pins |= {Value(op.id): spec, Value(op.id, 1): spec[:4]}
        if op.kind == GRADIENT:
            of_keys = (*spec[:2], (*spec[2], *spec[3]) if scattered else (), ())
            pins |= {Value(op.id): spec, Value(op.id, 1): of_keys, Value(op.id, 2): of_keys}
    return api.Plan.of(written_plan(graph, Mesh((2, 4), (), device), Annotations(pins)))
