"""Selects the front end: torch_xla where it is installed, else torchax with jax."""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from autoshard.cost.machine.device import builtin_kinds, load_device
from autoshard.errors import CaptureError
from autoshard.plans.remat import Blocks, Remat, switch_value
from autoshard.program import Program

FRONTENDS = ("auto", "torch_xla", "torchax")


def choose(frontend: str = "auto") -> str:
    """Resolve `auto` to an installed frontend; others are returned unchanged.

    Raises:
        ValueError: there is no such frontend.
        CaptureError: neither torch_xla nor torchax is installed.
    """
    if frontend not in FRONTENDS:
        raise ValueError(f"frontend {frontend!r}: there are {', '.join(FRONTENDS)}")
    if frontend != "auto":
        return frontend
    for package in ("torch_xla", "torchax"):
        if find_spec(package) is not None:
            return package
    raise CaptureError(
        "a PyTorch program is captured through torch_xla (pip install 'autoshard[xla]', with torch 2.9) or through "
        "torchax (pip install 'autoshard[torchax]', with torch 2.9 or later); neither is installed"
    )


def switches_for(
    device: str | None, remat: Remat | None = None, micro_batches: int = 1, clip_grad_norm: float | None = None
) -> tuple[str, ...]:
    """The capture switches of programs for a kind of device; None: for any.

    Args:
        remat: what is recomputed in place of the program's own checkpoints; None: these hold.
        micro_batches: of a step.
        clip_grad_norm: norm of all gradients that they are clipped to.

    Raises:
        ValueError: fewer than one micro-batch; a norm that is not above 0.
    """
    from autoshard.frontends.switches.handlers import ATTENTION, CLIPS, EXPERTS, MICRO_BATCHES, REMAT, SWITCHES

    if not isinstance(micro_batches, int) or micro_batches < 1:
        raise ValueError(f"micro_batches={micro_batches!r}: a step has one micro-batch or more")
    if clip_grad_norm is not None and not (isinstance(clip_grad_norm, int | float) and 0 < clip_grad_norm < math.inf):
        raise ValueError(f"clip_grad_norm={clip_grad_norm!r}: a norm above 0, or None")
    own: tuple[str, ...] = () if remat is None else (f"{REMAT}:{switch_value(remat)}",)
    own += (f"{MICRO_BATCHES}:{micro_batches}",) if micro_batches > 1 else ()
    own += () if clip_grad_norm is None else (f"{CLIPS}:{float(clip_grad_norm)!r}",)
    found = None if device is None else load_device(device)
    if found is None or found.target == "cpu":
        return (*SWITCHES, *own)
    kind = found.kind if found.kind in builtin_kinds() else found.target  # a plan runs where a device's file is not
    return (*SWITCHES, f"{ATTENTION}:{kind}", EXPERTS, *own)


def blocks_of(model: Any) -> tuple[Blocks, ...]:
    """Classes of equal blocks of a torch module, in its order."""
    from autoshard.frontends.switches.remat import blocks_of

    return blocks_of(model)


def capture_of(frontend: str = "auto") -> Callable[..., Program]:
    """The capture function; arguments as those of `autoshard.frontends.torch_xla.program.capture`."""
    chosen: Any
    if choose(frontend) == "torch_xla":
        from autoshard.frontends.torch_xla import program as chosen
    else:
        from autoshard.frontends.torchax import program as chosen
    capture: Callable[..., Program] = chosen.capture
    return capture
