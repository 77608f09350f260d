"""Pools that torch_xla does not lower, or wrongly: unequal windows, dilated ones, averages with a ceiling."""

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


def adaptive_average(input: torch.Tensor, output_size: Any, rank: int) -> Any:
    """Means of windows, dim by dim, as products with averaging matrices."""
    x = input
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


def adaptive_largest(input: torch.Tensor, output_size: Any, rank: int) -> Any:
    """Maxima of windows, dim by dim; of equal ones the first, as in torch."""
    x = input
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
    input: torch.Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    """Maxima of dilated windows, dim by dim; of equal ones the first, as in torch."""
    x = input
    gaps = sizes_of(x, dilation, rank)
    if return_indices or all(gap == 1 for gap in gaps) or not x.is_floating_point():
        return NotImplemented
    each = _settings(x, rank, kernel_size, stride, padding)
    for dim, (size, step, pad), gap in reversed(list(zip(range(x.dim() - rank, x.dim()), each, gaps, strict=True))):
        count = _count(x.shape[dim], size, step, pad, gap, ceil_mode)
        x = _taps(x, dim, size, step, pad, gap, count, -math.inf).max(-1).values.transpose(dim, -1)
    return x


def average(
    rank: int,
    input: torch.Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Any:
    """Means of windows that may end outside, dim by dim."""
    x = input
    if not ceil_mode or not x.is_floating_point():
        return NotImplemented
    each = _settings(x, rank, kernel_size, stride, padding)
    for dim, (size, step, pad) in zip(range(x.dim() - rank, x.dim()), each, strict=True):
        old, count = x.shape[dim], _count(x.shape[dim], size, step, pad, 1, ceil_mode)
        first = torch.arange(count, device=x.device) * step - pad
        last = (first + size).clamp(max=old + pad)
        counted = last - first if count_include_pad else last.clamp(max=old) - first.clamp(min=0)
        x = _taps(x, dim, size, step, pad, 1, count, 0.0).sum(-1)
        x = (x if divisor_override else x / counted.to(x.dtype)).transpose(dim, -1)
    return x / divisor_override if divisor_override else x


def _settings(x: torch.Tensor, rank: int, kernel_size: Any, stride: Any, padding: Any) -> list[tuple[int, ...]]:
    """(size, stride, padding) of the windows, per pooled dim."""
    kernel = sizes_of(x, kernel_size, rank)
    steps = kernel if stride is None or stride == [] else sizes_of(x, stride, rank)
    return list(zip(kernel, steps, sizes_of(x, padding, rank), strict=True))


def _count(old: int, size: int, step: int, pad: int, gap: int, ceil_mode: bool) -> int:
    """Windows of a dim; the last one begins inside, or in the padding before."""
    room = old + 2 * pad - gap * (size - 1) - 1
    count = (room + (step - 1 if ceil_mode else 0)) // step + 1
    return count - (ceil_mode and (count - 1) * step >= old + pad)


def _taps(
    x: torch.Tensor, dim: int, size: int, step: int, pad: int, gap: int, count: int, outside: float
) -> torch.Tensor:
    """[..., count, size]: windows of a dim, which comes last; shorter ones where none reaches so far inside."""
    old = x.shape[dim]
    if count == 1 and gap == 1:
        return x.transpose(dim, -1)[..., : size - pad].unsqueeze(-2)
    size = min(size, -(-(old + 2 * pad) // gap))
    end = (count - 1) * step + gap * (size - 1) + 1
    x = functional.pad(x.transpose(dim, -1), (pad, max(end - old - pad, 0)), value=outside)
    return torch.stack([x[..., gap * i : gap * i + (count - 1) * step + 1 : step] for i in range(size)], -1)
