"""Handlers of torch functions, by capture switch: registered here, called while `switches.active`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from autoshard.frontends.tracing.device import is_xla

Handler = Callable[..., Any]
SWITCHES: tuple[str, ...] = (
    "linear",
    "matmul",
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
"""All there are; what each is for says `table.py`."""
HANDLERS: dict[str, dict[Any, Handler]] = {name: {} for name in SWITCHES}
"""By switch: what torch function is handled by what."""

UNTOUCHED = NotImplemented
"""What a handler returns when the call is none that it can do better."""


def replaces(switch: str, *functions: Any) -> Callable[[Handler], Handler]:
    """Register a handler for calls of `functions` under `switch`; it may return `UNTOUCHED`."""

    def register(handler: Handler) -> Handler:
        HANDLERS[switch].update(dict.fromkeys(functions, handler))
        return handler

    return register


def on_xla(value: Any) -> bool:
    """Whether this is a tensor on an XLA device."""
    return isinstance(value, torch.Tensor) and is_xla(value)
