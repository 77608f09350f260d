"""Ops that torch_xla computes wrongly, or outside XLA, in ops that it lowers; for `switches/table.py`."""

from __future__ import annotations

import math
from typing import Any

import torch

SELU_ALPHA, SELU_SCALE = 1.6732632423543772, 1.0507009873554805
"""Klambauer et al. 2017 (arXiv:1706.02515), section 2."""

EXPANDED = "_autoshard_expanded"
"""Attribute of an expanded tensor: of a mask, that of rows, whose last dim is 1; of an index, what was expanded."""


def elu(input: torch.Tensor, alpha: float = 1.0, inplace: bool = False) -> Any:
    """x, or alpha * (exp(x) - 1) where negative; torch_xla is right only in place."""
    return NotImplemented if inplace else _exponential_unit(input, alpha, 1.0, 1.0)


def selu(input: torch.Tensor, inplace: bool = False) -> Any:
    """`elu`, scaled so that activations keep their mean and variance."""
    return NotImplemented if inplace else _exponential_unit(input, SELU_ALPHA, SELU_SCALE, 1.0)


def celu(input: torch.Tensor, alpha: float = 1.0, inplace: bool = False) -> Any:
    """`elu` of x / alpha where negative."""
    return NotImplemented if inplace else _exponential_unit(input, alpha, 1.0, 1 / alpha)


def _exponential_unit(x: torch.Tensor, alpha: float, scale: float, input_scale: float) -> torch.Tensor:
    return scale * torch.where(x > 0, x, alpha * torch.expm1(input_scale * x.clamp(max=0)))


def rrelu(
    input: torch.Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, inplace: bool = False
) -> Any:
    """x, or where negative x times a slope: a random one in training, else the mean one."""
    if inplace:
        return NotImplemented
    if not training:
        return torch.where(input < 0, input * ((lower + upper) / 2), input)
    return torch.where(input < 0, input * torch.empty_like(input).uniform_(lower, upper), input)


def weight_norm(v: torch.Tensor, g: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """`v` scaled to the norms `g`: one per slice along `dim`, or one in all (-1)."""
    dims = [d for d in range(v.dim()) if d != dim]
    return v * (g / v.square().sum(dims, keepdim=True).sqrt())


def of_truth(reduce: Any, input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """`all` or `any` of numbers, by whether each is nonzero."""
    if input.dtype == torch.bool or "out" in kwargs:
        return NotImplemented
    found = reduce(input != 0, *args, **kwargs)
    return found.to(torch.uint8) if input.dtype == torch.uint8 else found  # as in torch


def masked_write(x: torch.Tensor, index: Any, value: Any) -> Any:
    """`x[mask] = value` as a select, for a value that is a number or broadcasts over the trailing dims.

    Args:
        x: written in place.
        index: a boolean mask of the leading dims of `x`, alone or in a tuple.
        value: a number, or a tensor that broadcasts over the dims of `x` behind the mask.
    """
    mask = index[0] if isinstance(index, tuple) and len(index) == 1 else index
    if not is_mask(mask) or not isinstance(x, torch.Tensor) or x.shape[: mask.dim()] != mask.shape:
        return NotImplemented
    if isinstance(value, torch.Tensor):  # no op may run before it is clear that a select suffices
        behind = x.shape[x.dim() - value.dim() :] if value.dim() else ()
        if value.dim() > x.dim() - index_dims(index) or any(
            v not in (1, b) for v, b in zip(value.shape, behind, strict=True)
        ):
            return NotImplemented
    mask = mask.to(torch.bool).reshape(*mask.shape, *[1] * (x.dim() - mask.dim()))
    if not isinstance(value, torch.Tensor):
        x.masked_fill_(mask, value)
        return x
    x.copy_(torch.where(mask, value.to(x.dtype), x))
    return x


def masked_scatter(input: torch.Tensor, mask: torch.Tensor, source: torch.Tensor) -> Any:
    """`source`'s elements in place of those of `input` where a mask is true, in order; by rows for a mask of rows.

    A false one gathers some element of `source`, which is not chosen. torch_xla's op has a shape that depends on data.

    Args:
        mask: broadcasts to `input`; one of rows was expanded along the last dim.
        source: of the dtype of `input`, with at least as many elements as the mask has true ones.
    """
    x = input
    if mask.dtype != torch.bool or x.dtype != source.dtype or not x.numel():
        return NotImplemented
    if not source.numel():  # nothing is true
        return x.expand(torch.broadcast_shapes(x.shape, mask.shape)).clone()
    of_rows = getattr(mask, EXPANDED, mask)
    width = x.shape[-1] if of_rows is not mask and source.numel() % x.shape[-1] == 0 else 1
    chosen = of_rows.expand(*x.shape[:-1], 1) if width > 1 else mask.expand(x.shape)
    from_row = (chosen.flatten().long().cumsum(0) - 1).clamp(0, source.numel() // width - 1)
    taken = source.reshape(-1, width).index_select(0, from_row).reshape(x.shape)
    return torch.where(mask, taken, x)


def gathered(input: torch.Tensor, dim: Any, index: torch.Tensor, **options: Any) -> Any:
    """`torch.gather` of whole slices, or at 32-bit indices: a TPU's compiler sees that each row is read by itself."""
    if options or not isinstance(dim, int):
        return NotImplemented
    if (places := _places_of_slices(input, dim, index)) is not None:
        return input.index_select(dim, places)
    if index.dtype != torch.int64:
        return NotImplemented
    if any(size >= 2**31 for size in input.shape):
        return NotImplemented
    return torch.gather(input, dim, index.to(torch.int32))


def scatter_added(input: torch.Tensor, dim: Any, index: torch.Tensor, src: torch.Tensor) -> Any:
    """`torch.scatter_add` of whole slices."""
    places = _places_of_slices(input, dim, index) if isinstance(dim, int) and index.shape == src.shape else None
    return NotImplemented if places is None else input.index_add(dim, places, src)


def _places_of_slices(input: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor | None:
    """The positions along `dim` in an index that was expanded along all other dims; None where it was not.

    Without this, a compiler sees an index of its own for each element: PyTorch Geometric expands its edges so.
    """
    source = getattr(index, EXPANDED, None)
    if source is None or not 1 < input.dim() == index.dim():
        return None
    sizes = (*[1] * (index.dim() - source.dim()), *source.shape)
    others = [at for at in range(index.dim()) if at != dim % index.dim()]
    if any(sizes[at] != 1 or index.shape[at] != input.shape[at] for at in others) or sizes[dim] != index.shape[dim]:
        return None
    return source.reshape(-1)


def scatter_reduced(
    input: torch.Tensor, dim: int, index: torch.Tensor, src: torch.Tensor, reduce: str, *, include_self: bool = True
) -> Any:
    """`torch.scatter_reduce` of means, or without what the elements were; torch_xla lowers the rest."""
    if include_self and reduce == "sum":
        return scatter_added(input, dim, index, src)
    if (include_self and reduce != "mean") or reduce not in _IDENTITIES or not input.is_floating_point():
        return NotImplemented
    counts = _added(torch.full_like(input, float(include_self)), dim, index, torch.ones_like(src))
    begun = input if include_self else torch.where(counts > 0, _IDENTITIES[reduce], input)
    if reduce in ("sum", "mean"):
        made = _added(begun, dim, index, src)
    else:
        made = begun.scatter_reduce(dim, index, src, reduce)
    return made / counts.clamp(min=1) if reduce == "mean" else made


def _added(input: torch.Tensor, dim: int, index: torch.Tensor, src: torch.Tensor) -> torch.Tensor:
    made = scatter_added(input, dim, index, src)
    return input.scatter_add(dim, index, src) if made is NotImplemented else made


def index_reduced(
    input: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor, reduce: str, *, include_self: bool = True
) -> Any:
    """`torch.index_reduce`: the same by whole slices."""
    shape = [-1 if at == dim % input.dim() else 1 for at in range(input.dim())]
    places = index.reshape(shape).expand(source.shape)
    made = scatter_reduced(input, dim, places, source, reduce, include_self=include_self)
    return input.scatter_reduce(dim, places, source, reduce) if made is NotImplemented else made


def in_place(function: Any, input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """What a function makes of a tensor, written into it."""
    made = function(input, *args, **kwargs)
    return made if made is NotImplemented else input.copy_(made)


_IDENTITIES = {"sum": 0.0, "mean": 0.0, "prod": 1.0, "amax": -math.inf, "amin": math.inf}
"""What a reduction begins with."""


def is_mask(index: Any) -> bool:
    """Whether an index is a boolean mask (`uint8` is one too) of at least one dim."""
    return isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8) and index.dim() > 0


def index_dims(index: Any) -> int:
    """Number of dims that a mask, alone or in a tuple, indexes."""
    mask = index[0] if isinstance(index, tuple) else index
    return int(mask.dim())
