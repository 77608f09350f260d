"""Small models and what the tests ask of their programs."""

from __future__ import annotations

from collections.abc import Iterator
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


def main_ops(stablehlo: bytes) -> Iterator[Any]:
    """The ops of the main function, while its context is open."""
    from jax._src.interpreters import mlir
    from jaxlib.mlir import ir

    with mlir.make_ir_context():
        module = ir.Module.parse(stablehlo)
        main = next(op for op in module.body.operations if op.attributes["sym_name"].value == "main")
        for op in main.regions[0].blocks[0].operations:
            if op.operation.name != "func.return":
                yield op


def locations(stablehlo: bytes) -> list[tuple[str, str, str]]:
    """(kind, location, custom call target) of each op of main."""
    return [
        (op.operation.name, str(op.operation.location),
         op.attributes["call_target_name"].value if "call_target_name" in op.attributes else "")
        for op in main_ops(stablehlo)
    ]  # fmt: skip


def float_reshapes(stablehlo: bytes) -> set[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(shape before, shape after) of reshapes of float32 tensors, dims of size 1 left out, that change something."""
    from jaxlib.mlir import ir

    found = set()
    for op in main_ops(stablehlo):
        if op.operation.name == "stablehlo.reshape":
            types = [ir.RankedTensorType(value.type) for value in (op.operands[0], op.results[0])]
            before, after = (tuple(size for size in type_.shape if size != 1) for type_ in types)
            if before != after and str(types[0].element_type) == "f32":
                found.add((before, after))
    return found
