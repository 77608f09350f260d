"""Adaptive pools with overlapping or unequal windows, which torch_xla computes on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def windows(old: int, new: int) -> list[tuple[int, int]]:
    """First and last + 1 of each window, by torch's rule."""
    return [(i * old // new, -(-(i + 1) * old // new)) for i in range(new)]


def sizes_of(x: torch.Tensor, output_size: Any, rank: int) -> list[int]:
    """One per pooled dim; None leaves a dim as it is."""
    given = list(output_size) if isinstance(output_size, Sequence) else [output_size] * rank
    return [old if new is None else int(new) for new, old in zip(given, x.shape[-rank:], strict=True)]


def adaptive_average(x: torch.Tensor, output_size: Any, rank: int) -> Any:
    """Means of windows, dim by dim, as products with averaging matrices."""
    sizes = sizes_of(x, output_size, rank)
    if all(old % new == 0 for new, old in zip(sizes, x.shape[-rank:], strict=True)):
        return NotImplemented
    for dim, new in enumerate(sizes, x.dim() - rank):
        old = x.shape[dim]
        if new != old:
            at = torch.arange(old, device=x.device).unsqueeze(-1)
            first = torch.arange(new, device=x.device) * old // new
            last = ((torch.arange(new, device=x.device) + 1) * old + new - 1) // new
            share = ((at >= first) & (at < last)).to(x.dtype) / (last - first).to(x.dtype)
            x = torch.matmul(x.transpose(dim, -1), share).transpose(dim, -1)
    return x


def adaptive_largest(x: torch.Tensor, output_size: Any, rank: int) -> Any:
    """Maxima of windows, dim by dim; of equal ones the first, as in torch."""
    sizes = sizes_of(x, output_size, rank)
    if all(old % new == 0 for new, old in zip(sizes, x.shape[-rank:], strict=True)):
        return NotImplemented
    for dim, new in reversed(list(enumerate(sizes, x.dim() - rank))):
        if new != x.shape[dim]:
            parts = [x.narrow(dim, a, b - a).max(dim).values for a, b in windows(x.shape[dim], new)]
            x = torch.stack(parts, dim)
    return x
