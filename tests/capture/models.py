"""Small models and what the tests ask of their programs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Mlp(nn.Module):
    """Two linears with a norm between, and a buffer that each step adds to."""

    def __init__(self, width: int = 16, tied: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.second = nn.Linear(width, width)
        if tied:
            self.second.weight = self.first.weight
        self.register_buffer("steps", torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1.0
        return self.second(torch.relu(self.norm(self.first(x)))) + self.steps


def mean_square(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A loss with a target."""
    return ((output - target) ** 2).mean()


def sample(width: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    """An input of shape (4, 6, width) and its target."""
    return torch.empty(4, 6, width, device="meta"), torch.empty(4, 6, width, device="meta")


def locations(stablehlo: bytes) -> list[tuple[str, str, str]]:
    """(kind, location, custom call target) of each op of main that computes something."""
    from jax._src.interpreters import mlir
    from jaxlib.mlir import ir

    found = []
    with mlir.make_ir_context():
        module = ir.Module.parse(stablehlo)
        main = next(op for op in module.body.operations if op.attributes["sym_name"].value == "main")
        for op in main.regions[0].blocks[0].operations:
            attributes: Any = op.attributes
            target = attributes["call_target_name"].value if "call_target_name" in attributes else ""
            if op.operation.name != "func.return":
                found.append((op.operation.name, str(op.operation.location), target))
    return found
