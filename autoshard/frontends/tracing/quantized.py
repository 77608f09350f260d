"""Fake quantization, which torch_xla computes on the CPU, in ops that it lowers; for `decompositions.py`.

Each gives the rounded values, and a mask of those within the limits, which have a gradient.
"""

from __future__ import annotations

from typing import Any

import torch

from autoshard.errors import CaptureError


def per_tensor(x: torch.Tensor, scale: float, zero_point: int, quant_min: int, quant_max: int) -> Any:
    """One scale and zero point, numbers."""
    return _rounded(x, scale, zero_point, quant_min, quant_max)


def by_tensors(
    x: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor,
    fake_quant_enabled: torch.Tensor,
    quant_min: int,
    quant_max: int,
) -> Any:
    """One scale and zero point, tensors of one element, as is whether it is on."""
    values, mask = _rounded(x, scale.reshape(()), zero_point.reshape(()).to(x.dtype), quant_min, quant_max)
    on = fake_quant_enabled.reshape(()) == 1
    return torch.where(on, values, x), mask | ~on


def per_channel(
    x: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor, axis: int, quant_min: int, quant_max: int
) -> Any:
    """A scale and a zero point per element of the dim `axis`."""
    shape = [-1 if dim == axis % x.dim() else 1 for dim in range(x.dim())]
    return _rounded(x, scale.reshape(shape), zero_point.reshape(shape).to(x.dtype), quant_min, quant_max)


def observed(  # noqa: PLR0913  (as the op)
    x: torch.Tensor,
    observer_on: torch.Tensor,
    fake_quant_on: torch.Tensor,
    running_min: torch.Tensor,
    running_max: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor,
    averaging_const: float,
    quant_min: int,
    quant_max: int,
    ch_axis: int,
    per_row_fake_quant: bool = False,
    symmetric_quant: bool = False,
) -> Any:
    """`FusedMovingAvgObsFakeQuantize`: limits averaged over steps, of all elements or for each of `ch_axis`."""
    rows = x.movedim(ch_axis, 0).flatten(1) if per_row_fake_quant else x.reshape(1, -1)
    on, rounds = observer_on.reshape(()) == 1, fake_quant_on.reshape(()) == 1
    limits = []
    for running, now in ((running_min, rows.amin(1)), (running_max, rows.amax(1))):
        if running.numel() != now.numel():
            raise CaptureError(
                f"an observer of fake quantization holds limits of {running.numel()} channels for a tensor of "
                f"{now.numel()}: it takes their shape in the first step. Run the model once, then plan it"
            )
        now = now.reshape(running.shape)
        averaged = torch.where(running.isinf(), now, running + averaging_const * (now - running))
        limits.append(torch.where(on, averaged, running))
    low, high = limits[0].clamp(max=0), limits[1].clamp(min=0)
    if symmetric_quant:
        half = (quant_max - quant_min) // 2
        reach = torch.maximum(-low / (half + 1), high / half)
        both = (low < 0) & (high > 0)
        low, high = torch.where(both, -reach * (half + 1), low), torch.where(both, reach * half, high)
    steps = (high - low) / (quant_max - quant_min)
    steps = torch.where((steps == 0) | (1 / steps).isinf(), 0.1, steps)
    below, above = quant_min - low / steps, quant_max - high / steps
    nearer = abs(quant_min) - (low / steps).abs() < abs(quant_max) - (high / steps).abs()
    zero = torch.where(nearer, below, above)
    if symmetric_quant:
        zero = torch.where(both, (quant_min + quant_max) / 2, zero)
    zero = zero.round().clamp(quant_min, quant_max)
    scale = torch.where(rounds, steps.reshape(-1), scale)
    zero_point = torch.where(rounds, zero.reshape(-1).to(zero_point.dtype), zero_point)
    shape = [-1 if per_row_fake_quant and dim == ch_axis % x.dim() else 1 for dim in range(x.dim())]
    values, mask = _rounded(x, scale.reshape(shape), zero_point.reshape(shape).to(x.dtype), quant_min, quant_max)
    return torch.where(rounds, values, x), mask | ~rounds, *limits, scale, zero_point


def _rounded(x: torch.Tensor, scale: Any, zero_point: Any, quant_min: int, quant_max: int) -> Any:
    steps = (x * (1 / scale)).round() + zero_point
    inside = (steps >= quant_min) & (steps <= quant_max)
    return ((steps.clamp(quant_min, quant_max) - zero_point) * scale).to(x.dtype), inside
