"""Separable interpolation, in ops whose gradients torch_xla can lower."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch

_CUBIC = -0.75
"""The slope parameter of torch's cubic convolution (Keys, "Cubic convolution interpolation", 1981: `a`)."""


def nearest(x: torch.Tensor, dim: int, new: int, factor: float | None, exact: bool) -> torch.Tensor:
    """Nearest-neighbour resize of `dim` to `new` positions (`exact`: by centres).

    As ATen on the CPU: in float32, and by whole numbers in more than one dim, whatever the factor.
    """
    old = x.shape[dim]
    whole = x.dim() > 3 and not exact and new in (old, 2 * old)
    if whole or (new % old == 0 and factor in (None, new // old)):
        return repeated(x, dim, new // old)
    scale = np.float32(1 / factor if factor else old / new)
    at = np.arange(new, dtype=np.float32) + np.float32(0.5 if exact else 0.0)
    places = np.minimum(np.floor(at * scale).astype(np.int64), old - 1)
    return x.index_select(dim, torch.tensor(places.tolist(), device=x.device))


def repeated(x: torch.Tensor, dim: int, times: int) -> torch.Tensor:
    """Each element of `dim` several times, side by side."""
    if times == 1:
        return x
    shape = list(x.shape)
    spread = x.unsqueeze(dim + 1).expand(*shape[: dim + 1], times, *shape[dim + 1 :])
    return spread.reshape(*shape[:dim], shape[dim] * times, *shape[dim + 1 :])


def weights_of(
    mode: str, old: int, new: int, factor: float | None, corners: bool, like: torch.Tensor
) -> torch.Tensor | None:
    """Interpolation matrix [old, new]; None for a mode that is not linear."""
    if mode in ("linear", "bilinear", "trilinear"):
        return _linear(old, new, factor, corners, like)
    return _cubic(old, new, factor, corners, like) if mode == "bicubic" else None


def affine_grid(theta: torch.Tensor, size: Sequence[int], align_corners: bool | None = None) -> torch.Tensor:
    """`F.affine_grid` without in-place writes.

    Args:
        theta: `[N, d, d + 1]`.
        size: `N, C`, and d extents.
    """
    extents = list(size[2:])
    like = {"device": theta.device, "dtype": theta.dtype}
    # Rounds once, symmetrically: XLA's linspace accumulates steps, which shifts all positions to one side.
    lines = [(torch.arange(1 - n, n, 2, **like)) / (max(n - 1, 1) if align_corners else n) for n in extents]
    places = torch.meshgrid(*lines, indexing="ij")[::-1]  # x before y before z
    base = torch.stack([*places, torch.ones_like(places[0])], -1)
    flat = torch.matmul(base.reshape(1, -1, base.shape[-1]), theta.mT)
    return flat.reshape(theta.shape[0], *extents, len(extents))


def _positions(old: int, new: int, factor: float | None, corners: bool, like: torch.Tensor) -> torch.Tensor:
    at = torch.arange(new, device=like.device, dtype=torch.float32)
    if corners:
        return at * ((old - 1) / max(new - 1, 1))
    return (at + 0.5) * (1 / factor if factor else old / new) - 0.5


def _linear(old: int, new: int, factor: float | None, corners: bool, like: torch.Tensor) -> torch.Tensor:
    """Linear interpolation matrix."""
    at = _positions(old, new, factor, corners, like).clamp(min=0, max=old - 1)
    elements = torch.arange(old, device=like.device, dtype=torch.float32)
    return (1 - (at - elements.unsqueeze(-1)).abs()).clamp(min=0).to(like.dtype)


def _cubic(old: int, new: int, factor: float | None, corners: bool, like: torch.Tensor) -> torch.Tensor:
    """Cubic interpolation matrix: four taps per position, edges replicated."""
    at = _positions(old, new, factor, corners, like)
    first = at.floor()
    elements = torch.arange(old, device=like.device, dtype=torch.float32).unsqueeze(-1)
    weights = torch.zeros(old, new, device=like.device)
    for place in range(-1, 3):
        away = (at - (first + place)).abs()
        near = ((_CUBIC + 2) * away - (_CUBIC + 3)) * away * away + 1
        far = ((away - 5) * away + 8) * away * _CUBIC - 4 * _CUBIC
        weight = torch.where(away <= 1, near, far)
        weights = weights + torch.where((first + place).clamp(min=0, max=old - 1) == elements, weight, 0.0)
    return weights.to(like.dtype)


def sampled(input: torch.Tensor, grid: torch.Tensor, *, nearest: bool, padding: int, corners: bool) -> torch.Tensor:
    """`F.grid_sample` of volumes: a gather per corner of the cell that holds a point, or of the nearest element.

    Args:
        input: [N, C, D, H, W].
        grid: [N, d, h, w, 3], of points (x, y, z) in [-1, 1].
        padding: outside of the volume: 0 zeros, 1 the border, 2 a reflection.
    """
    sizes = input.shape[:1:-1]
    points = [_within(grid[..., i], size, padding, corners) for i, size in enumerate(sizes)]
    first = [(at.round() if nearest else at.floor()) for at in points]
    flat, out = input.flatten(2), None
    for corner in itertools.product(*[(0,) if nearest else (0, 1)] * len(sizes)):
        places = [low + step for low, step in zip(first, corner, strict=True)]
        weight = torch.ones_like(points[0])
        number = torch.zeros_like(points[0], dtype=torch.int64)
        for at, low, place, step, size in reversed(list(zip(points, first, places, corner, sizes, strict=True))):
            share = torch.ones_like(at) if nearest else (at - low if step else 1 - (at - low))
            weight = weight * torch.where((place >= 0) & (place < size), share, 0.0)
            number = number * size + place.clamp(0, size - 1).to(torch.int64)
        number = number.flatten(1).unsqueeze(1).expand(-1, flat.shape[1], -1)
        taken = torch.gather(flat, 2, number).unflatten(2, weight.shape[1:]) * weight.unsqueeze(1)
        out = taken if out is None else out + taken
    assert out is not None
    return out


def _within(x: torch.Tensor, size: int, padding: int, corners: bool) -> torch.Tensor:
    """A coordinate in [-1, 1] as a position in a dim, moved inside where the padding asks for it."""
    at = (x + 1) / 2 * (size - 1) if corners else ((x + 1) * size - 1) / 2
    if padding == 2:  # reflected at the elements, or half an element further out
        low, span = (0.0, float(size - 1)) if corners else (-0.5, float(size))
        if span == 0:
            return torch.zeros_like(at)
        away = (at - low).abs() % (2 * span)
        at = torch.where(away > span, 2 * span - away, away) + low
    return at.clamp(0, size - 1) if padding else at
