"""Grouped convolutions and interpolation, as ops that partitioners split."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from autoshard.frontends.switches import interpolation, pools
from autoshard.frontends.switches.dots import matmul, same_dtype
from autoshard.frontends.switches.grouped import grouped_convolution, grouped_transposed
from autoshard.frontends.switches.handlers import UNTOUCHED, replaces

# Convolutions.


def _of_dims(value: Any, rank: int) -> list[int]:
    """A convolution's setting per dim, given so or once for all."""
    return list(value) * (rank // len(value)) if isinstance(value, tuple | list) else [value] * rank


def _replace_convolution(convolve: Any, rank: int) -> None:
    """Register handlers of convolutions of `rank` spatial dims."""

    @replaces("groups", convolve)
    def convolution(
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Any:
        if groups == 1 or weight.shape[1] == 1 or input.dim() != rank + 2 or isinstance(padding, str):
            return UNTOUCHED
        if input.shape[1] != groups * weight.shape[1] or weight.shape[0] % groups:
            return UNTOUCHED  # torch raises the error
        stride, padding, dilation = (_of_dims(value, rank) for value in (stride, padding, dilation))
        input, weight = same_dtype(input, weight)
        return _biased(grouped_convolution(input, weight, stride, padding, dilation, groups, convolve), bias)


def _replace_transposed(convolve: Any, rank: int) -> None:
    """Register handlers of transposed convolutions of `rank` spatial dims."""

    @replaces("groups", convolve)
    def transposed(
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        output_padding: Any = 0,
        groups: int = 1,
        dilation: Any = 1,
    ) -> Any:
        if groups == 1 or input.dim() != rank + 2 or input.shape[1] != weight.shape[0] or weight.shape[0] % groups:
            return UNTOUCHED
        stride, padding, output_padding, dilation = (
            _of_dims(value, rank) for value in (stride, padding, output_padding, dilation)
        )
        input, weight = same_dtype(input, weight)
        out = grouped_transposed(input, weight, stride, padding, output_padding, dilation, groups, convolve)
        return _biased(out, bias)


def _biased(out: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return out if bias is None else out + bias.to(out.dtype).view(-1, *[1] * (out.dim() - 2))


for _rank, _function in enumerate((F.conv1d, F.conv2d, F.conv3d), 1):
    _replace_convolution(_function, _rank)
for _rank, _function in enumerate((F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d), 1):
    _replace_transposed(_function, _rank)


# Interpolation.

_AVERAGES = (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d)


@replaces("interpolate", F.interpolate)
def _interpolate(
    input: torch.Tensor,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Any:
    rank = input.dim() - 2
    sizes = _per_dim(size, rank)
    factors = _per_dim(scale_factor, rank)
    if mode == "area" and rank in (1, 2, 3) and sizes is not None and factors is not None:
        into = [
            new or math.floor(old * factor) for new, old, factor in zip(sizes, input.shape[2:], factors, strict=True)
        ]
        pooled = pools.adaptive_average(input, into, rank)
        return (_AVERAGES[rank - 1](input, into)) if pooled is UNTOUCHED else pooled
    if antialias or rank < 1 or sizes is None or factors is None:
        return UNTOUCHED
    extents = input.shape[2:]
    into = [new or math.floor(old * (factor or 1)) for new, old, factor in zip(sizes, extents, factors, strict=True)]
    exact = [None if recompute_scale_factor else factor for factor in factors]
    for dim, (new, old, factor) in enumerate(zip(into, extents, exact, strict=True), 2):
        if mode in ("nearest", "nearest-exact"):
            input = interpolation.nearest(input, dim, new, factor, mode == "nearest-exact")
        elif new != old or (mode == "bicubic" and factor not in (None, 1)):
            weights = interpolation.weights_of(mode, old, new, factor, bool(align_corners), input)
            if weights is None:
                return UNTOUCHED
            input = matmul(input.transpose(dim, -1), weights).transpose(dim, -1)
    return input


replaces("interpolate", F.affine_grid)(interpolation.affine_grid)


@replaces("interpolate", F.grid_sample)
def _grid_sample(
    input: torch.Tensor,
    grid: torch.Tensor,
    mode: str = "bilinear",
    padding_mode: str = "zeros",
    align_corners: bool | None = None,
) -> Any:
    modes, paddings = ("bilinear", "nearest", "bicubic"), ("zeros", "border", "reflection")
    if mode not in modes or padding_mode not in paddings:
        return UNTOUCHED  # torch raises the error
    return _grid_sampler(input, grid, modes.index(mode), paddings.index(padding_mode), bool(align_corners))


@replaces("interpolate", torch.grid_sampler)
def _grid_sampler(input: torch.Tensor, grid: torch.Tensor, mode: int, padding: int, corners: bool) -> Any:
    if input.dim() == 5 and mode < 2:
        return interpolation.sampled(input, grid, nearest=mode == 1, padding=padding, corners=corners)
    if input.dim() != 4:
        return UNTOUCHED
    from torch._decomp.decompositions import _grid_sampler_2d

    return _grid_sampler_2d(input, grid, mode, padding, corners)


def _per_dim(value: Any, rank: int) -> list[Any] | None:
    values = list(value) if isinstance(value, list | tuple) else [value] * rank
    return values if len(values) == rank else None
