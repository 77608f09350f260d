"""Grouped convolutions with several features per group, in a form that GSPMD partitions.

XLA's CPU and GPU partitioners all-gather the operands of such a convolution, batch included. They do partition
depthwise ones (one input feature per group), and products with the group as batch dim.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from autoshard.frontends.tracing import ops

MAX_TAPS = 32
"""Most taps of a kernel that becomes one product per tap; larger ones become one convolution per group."""

_SPATIAL = "xyz"


def grouped_convolution(
    input: torch.Tensor,
    weight: torch.Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    convolve: Callable[..., Any],
) -> torch.Tensor:
    """The convolution without its bias.

    Args:
        input: `(batch, features, *extents)`.
        weight: `(out features, features // groups, *taps)`.
        stride, padding, dilation: per spatial dim; padding on both sides.
        convolve: torch's function for convolutions of this rank.
    """
    taps = weight.shape[2:]
    if taps.numel() <= MAX_TAPS or taps.numel() <= groups:
        return _by_taps(input, weight, stride, padding, dilation, groups)
    parts = [
        convolve(x, w, None, tuple(stride), tuple(padding), tuple(dilation))
        for x, w in zip(input.chunk(groups, 1), weight.chunk(groups, 0), strict=True)
    ]
    return torch.cat(parts, 1)


def _by_taps(
    input: torch.Tensor,
    weight: torch.Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> torch.Tensor:
    """Sum over the kernel's taps of products with the shifted input."""
    taps = weight.shape[2:]
    rank = len(taps)
    edges = [size for amount in reversed(padding) for size in (amount, amount)]
    padded = F.pad(input, edges) if any(edges) else input
    reach = [d * (t - 1) + 1 for d, t in zip(dilation, taps, strict=True)]
    extents = [(e - r) // s + 1 for e, r, s in zip(padded.shape[2:], reach, stride, strict=True)]
    kernels = weight.reshape(groups, weight.shape[0] // groups, weight.shape[1], *taps)
    space = _SPATIAL[:rank]
    equation = f"ngc{space},goc->ngo{space}"
    total: torch.Tensor | None = None
    for tap in itertools.product(*map(range, taps)):
        met = padded
        for dim, (at, d, s, extent) in enumerate(zip(tap, dilation, stride, extents, strict=True)):
            first = at * d
            if (first, s, extent) != (0, 1, padded.shape[2 + dim]):
                met = met[(slice(None),) * (2 + dim) + (slice(first, first + s * (extent - 1) + 1, s),)]
        met = met.reshape(input.shape[0], groups, weight.shape[1], *extents)
        kernel = kernels[(..., *tap)]
        product = ops.einsum(equation, met, kernel)
        total = product if total is None else total + product
    assert total is not None
    return total.reshape(input.shape[0], weight.shape[0], *extents)


def grouped_transposed(
    input: torch.Tensor,
    weight: torch.Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    output_padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    convolve: Callable[..., Any],
) -> torch.Tensor:
    """The transposed convolution without its bias; XLA's partitioner aborts on grouped ones.

    Args:
        input: `(batch, features, *extents)`.
        weight: `(features, out features // groups, *taps)`.
        stride, padding, output_padding, dilation: per spatial dim.
        convolve: torch's function for transposed convolutions of this rank.
    """
    taps = weight.shape[2:]
    if taps.numel() > MAX_TAPS and taps.numel() > groups:
        parts = [
            convolve(x, w, None, tuple(stride), tuple(padding), tuple(output_padding), 1, tuple(dilation))
            for x, w in zip(input.chunk(groups, 1), weight.chunk(groups, 0), strict=True)
        ]
        return torch.cat(parts, 1)
    batch, extents = input.shape[0], input.shape[2:]
    space = _SPATIAL[: len(taps)]
    kernels = weight.reshape(groups, weight.shape[0] // groups, weight.shape[1], *taps)
    met = input.reshape(batch, groups, weight.shape[0] // groups, *extents)
    total: torch.Tensor | None = None
    for tap in itertools.product(*map(range, taps)):
        made = ops.einsum(f"ngc{space},gco->ngo{space}", met, kernels[(..., *tap)])
        made = made.reshape(batch, groups * weight.shape[1], *extents)
        for dim, (at, t, s, p, more, d) in enumerate(
            zip(tap, taps, stride, padding, output_padding, dilation, strict=True), 2
        ):
            made = _spread(made, dim, s, at * d - p, (t - 1 - at) * d - p + more)
        total = made if total is None else total + made
    assert total is not None
    return total


def _spread(x: torch.Tensor, dim: int, stride: int, before: int, after: int) -> torch.Tensor:
    """Interior and edge padding of a dim: elements `stride` apart, zeros before and after (fewer elements, if < 0)."""
    after_dims = x.dim() - 1 - dim
    if stride > 1:
        size = x.shape[dim]
        x = F.pad(x.unsqueeze(dim + 1), [0, 0] * after_dims + [0, stride - 1]).flatten(dim, dim + 1)
        x = x.narrow(dim, 0, (size - 1) * stride + 1)
    return F.pad(x, [0, 0] * after_dims + [before, after]) if before or after else x
