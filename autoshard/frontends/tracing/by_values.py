"""Ops with data-dependent shapes, and ops that torch_xla computes on the CPU.

Neither is part of a captured program: their results are host constants, as in torch_xla. A boolean mask used as index
becomes the positions of its true elements.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from autoshard.frontends.tracing.decompositions import decomposition_of
from autoshard.frontends.tracing.device import current

SHAPED_BY_VALUES = frozenset(
    f"aten.{name}"
    for name in (
        "nonzero.default",
        "nonzero_numpy.default",
        "_unique.default",
        "_unique2.default",
        "unique_dim.default",
        "unique_consecutive.default",
        "unique_dim_consecutive.default",
        "bincount.default",
        "repeat_interleave.Tensor",
        "argwhere.default",
    )
)
_INDEXES = frozenset(
    f"aten.{name}"
    for name in (
        "index.Tensor",
        "_unsafe_index.Tensor",
        "index_put.default",
        "index_put_.default",
        "_unsafe_index_put.default",
        "_index_put_impl.default",
        "_index_put_impl_.default",
    )
)


def on_host(func: Any) -> bool:
    """Whether an op is computed on the host."""
    return _on_host(func, current().type)


@cache
def _on_host(func: Any, device: str) -> bool:
    if str(func) in SHAPED_BY_VALUES:
        return True
    seeded = torch.Tag.nondeterministic_seeded in func.tags
    return not seeded and current().falls_back(func.name()) and decomposition_of(func) is None


def may_index(func: Any) -> bool:
    """Whether a boolean mask may index an op (`by_positions`)."""
    return func is torch.ops.aten.masked_select.default or _indexes(func)


def by_positions(func: Any, args: tuple[Any, ...]) -> Callable[..., Any] | None:
    """The form by positions of an op indexed by a boolean mask; None for other ops."""
    if func is torch.ops.aten.masked_select.default:
        return _masked_select
    if not _indexes(func) or not any(_is_mask(index) for index in args[1]):
        return None

    def indexed(x: torch.Tensor, indices: Any, *more: Any, **kwargs: Any) -> Any:
        return func(x, positions(indices, x.device), *more, **kwargs)

    return indexed


@cache
def _indexes(func: Any) -> bool:
    return str(func) in _INDEXES


def positions(indices: Any, device: torch.device) -> list[torch.Tensor | None]:
    """Indices with positions for masks: one tensor per dim of the mask."""
    found: list[torch.Tensor | None] = []
    for index in indices:
        if _is_mask(index):
            at = torch.ops.aten.nonzero.default(index)
            at = at if at.device == device else at.to(device)
            found += [torch.ops.aten.select_copy.int(at, 1, dim) for dim in range(index.dim())]
        else:
            found.append(index)
    return found


def _masked_select(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    shape = torch.broadcast_shapes(x.shape, mask.shape)
    x, mask = (torch.ops.aten.expand_copy.default(each, shape) for each in (x, mask))
    selected: torch.Tensor = torch.ops.aten.index.Tensor(x, positions([mask], x.device))
    return selected


def _is_mask(index: Any) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)


__all__ = ["SHAPED_BY_VALUES", "by_positions", "may_index", "on_host"]
