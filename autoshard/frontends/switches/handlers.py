"""Registry of torch function handlers by capture switch; called while `switches.active`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from autoshard.frontends.tracing.device import is_xla

Handler = Callable[..., Any]
SWITCHES: tuple[str, ...] = (
    "linear",
    "matmul",
    "multihead",
    "norm",
    "cross_entropy",
    "embedding",
    "interpolate",
    "groups",
    "scan",
    "activation",
    "index",
    "truth",
    "losses",
    "pools",
    "checkpoint",
    "checks",
    "transformers",
)
"""All switches that are on for every device, as described in `table.py`."""
ATTENTION = "attention"
"""The switch that is on for a kind of device: `attention:h100`."""
EXPERTS = "experts"
"""The switch that keeps a mixture's experts as one op; on for TPUs and GPUs."""
REMAT = "remat"
"""The switch that says which blocks are recomputed: `remat:all=model.layers.0-31`."""
MICRO_BATCHES = "micro_batches"
"""The switch that says of how many micro-batches a step is: `micro_batches:4`. Capture traces two of them."""
CLIPS = "clip_grad_norm"
"""The switch that says to which norm gradients are clipped before the update: `clip_grad_norm:1.0`."""
HANDLERS: dict[str, dict[Any, Handler]] = {
    name: {} for name in (*SWITCHES, ATTENTION, EXPERTS, REMAT, MICRO_BATCHES, CLIPS)
}
"""Switch -> torch function -> handler."""

UNTOUCHED = NotImplemented
"""Returned by a handler that declines a call."""


def replaces(switch: str, *functions: Any) -> Callable[[Handler], Handler]:
    """Register a handler for calls of `functions` under `switch`; it may return `UNTOUCHED`."""

    def register(handler: Handler) -> Handler:
        HANDLERS[switch].update(dict.fromkeys(functions, handler))
        return handler

    return register


def on_xla(value: Any) -> bool:
    """Whether this is a tensor on an XLA device."""
    return isinstance(value, torch.Tensor) and is_xla(value)


_told: list[Callable[[str, str], None]] = []


@contextlib.contextmanager
def noting(tell: Callable[[str, str], None]) -> Iterator[None]:
    """Have `tell` told, by switch, why what could be one op is written out."""
    _told.append(tell)
    try:
        yield
    finally:
        _told.remove(tell)


def note(switch: str, why: str) -> None:
    """Say why an op is written out."""
    for tell in _told:
        tell(switch, why)
