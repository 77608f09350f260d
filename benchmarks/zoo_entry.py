"""What the entries of the zoo that are no transformers' type are made with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from autoshard.sources import Source
from benchmarks.zoo_hf import classes, floats, sgd, tokens

BATCH, SEQ, WIDTH = 8, 16, 64
ENTRIES: dict[str, Callable[[], Source]] = {}


def entry(build: Callable[[], tuple[Any, ...]]) -> Callable[[], tuple[Any, ...]]:
    """List a function that gives a model, inputs, a loss, and an optimizer if it is not SGD; the entry has its name."""

    def source() -> Source:
        torch.manual_seed(0)
        model, inputs, loss_fn, *optimizer = build()
        return Source(model.train(), inputs, loss_fn, optimizer[0] if optimizer else sgd, train=True)

    ENTRIES[build.__name__.replace("_", "-")] = source
    return build


def uniform(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(4))


def mean_square(out: Tensor) -> Tensor:
    return out.square().mean()


__all__ = ["BATCH", "ENTRIES", "SEQ", "WIDTH", "classes", "entry", "floats", "mean_square", "tokens", "uniform"]
