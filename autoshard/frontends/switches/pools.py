"""Adaptive pools with overlapping or unequal windows, and dilated ones, which torch_xla does not lower, or wrongly."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional


def windows(old: int, new: int) -> list[tuple[int, int]]:
    """First and last + 1 of each window, by torch's rule."""
    return [(i * old // new, -(-(i + 1) * old // new)) for i in range(new)]


def sizes_of(x: torch.Tensor, output_size: Any, rank: int) -> list[int]:
    """One per pooled dim; None leaves a dim as it is."""
    given = list(output_size) if isinstance(output_size, Sequence) else [output_size]
    given = given * (rank // len(given))
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
        pool = (functional.max_pool1d, functional.max_pool2d, functional.max_pool3d)[rank - 1]
        return pool(x, [old // new for new, old in zip(sizes, x.shape[-rank:], strict=True)])
    for dim, new in reversed(list(enumerate(sizes, x.dim() - rank))):
        if new != x.shape[dim]:
            parts = [x.narrow(dim, a, b - a).max(dim).values for a, b in windows(x.shape[dim], new)]
            x = torch.stack(parts, dim)
    return x


def dilated_largest(
    rank: int,
    x: torch.Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    """Maxima of dilated windows, dim by dim; of equal ones the first, as in torch."""
    kernel = sizes_of(x, kernel_size, rank)
    steps = kernel if stride is None or stride == [] else sizes_of(x, stride, rank)
    pads, gaps = sizes_of(x, padding, rank), sizes_of(x, dilation, rank)
    if return_indices or all(gap == 1 for gap in gaps) or not x.is_floating_point():
        return NotImplemented
    for dim in reversed(range(x.dim() - rank, x.dim())):
        size, step, pad, gap = (each[dim - x.dim()] for each in (kernel, steps, pads, gaps))
        reach, old = gap * (size - 1), x.shape[dim]
        count = (old + 2 * pad - reach - 1 + (step - 1 if ceil_mode else 0)) // step + 1
        count -= ceil_mode and (count - 1) * step >= old + pad
        end = (count - 1) * step + reach + 1
        x = functional.pad(x.transpose(dim, -1), (pad, max(end - old - pad, 0)), value=-math.inf)
        taps = [x[..., gap * i : gap * i + (count - 1) * step + 1 : step] for i in range(size)]
        x = torch.stack(taps, -1).max(-1).values.transpose(dim, -1)
    return x
