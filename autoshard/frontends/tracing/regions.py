"""Torch ops that are one op in the program: what computes them on an XLA device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch

from autoshard.fused import Form

Tensors = Sequence[torch.Tensor]
Executor = Callable[[str, Form, Tensors, Tensors], Tensors]
"""(kind, form, operands, meta tensors like the results) -> results."""

library = torch.library.Library("autoshard", "FRAGMENT")
"""Of these ops."""
_executors: list[Executor] = []


@contextlib.contextmanager
def executed_by(executor: Executor) -> Iterator[None]:
    """Have these ops on XLA devices computed by `executor`, instead of as written out."""
    _executors.append(executor)
    try:
        yield
    finally:
        _executors.remove(executor)


def executed(kind: str, form: Form, operands: Tensors, results: Tensors) -> Tensors | None:
    """The results as the innermost executor makes them; None without one."""
    return tuple(_executors[-1](kind, form, operands, results)) if _executors else None


def as_custom_call(kind: str, form: Form, operands: Tensors, results: Tensors) -> Tensors:
    """The executor of a capture."""
    from torch_xla.experimental.stablehlo_custom_call import stablehlo_custom_call

    shapes, dtypes = [list(each.shape) for each in results], [each.dtype for each in results]
    made = stablehlo_custom_call(list(operands), f"autoshard.{kind}", shapes, dtypes, False, form.text(), 1)
    return (made,) if isinstance(made, torch.Tensor) else tuple(made)


def meta(like: torch.Tensor, features: int | None = None) -> torch.Tensor:
    """A meta tensor of this type, with so many features."""
    shape = (*like.shape[:-1], like.shape[-1] if features is None else features)
    return torch.empty(shape, dtype=like.dtype, device="meta")
