"""Memory of a step under data parallelism, as predicted and as compiled for devices that are not there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import autoshard
from autoshard import manual
from autoshard.cost.predict import predict
from autoshard.mesh import Mesh
from autoshard.stablehlo.annotate import annotate, donated
from autoshard.stablehlo.reader import build_graph
from autoshard.verify.compile import Compiled, compile_module


def squares(made: torch.Tensor) -> torch.Tensor:
    """A loss of any result."""
    return made.float().pow(2).mean()


def peak_and_compiled(
    target: str, model: torch.nn.Module, inputs: tuple[torch.Tensor, ...], loss: Callable[..., Any] = squares
) -> tuple[int, Compiled]:
    """The predicted peak per device, in bytes, and the compiled program, of a step of SGD on a 2x4 mesh."""
    program = autoshard.capture(model, inputs, loss_fn=loss, optimizer=lambda own: torch.optim.SGD(own, lr=0.1))
    graph, mesh = build_graph(program), Mesh((2, 4), ("data", "model"), device=target.partition(":")[0])
    annotations = manual.PLANS["dp"](graph, mesh)
    compiled = compile_module(annotate(program, graph, annotations, mesh), target, donate=donated(program))
    return predict(graph, annotations, mesh).peak_memory_bytes, compiled
