"""Says at once what shape the in-place steps of optimizers leave, where there is nothing to work out.

Before functionalization turns an in-place op into one that makes a new tensor, it asks what the op would do to tensors
without data, so that wrong shapes are refused. Of interpolation and of the fused multiplications that is worked out in
Python, with all rules of broadcasting: a tenth of the time of a capture of many parameters. Tensors of one shape and
one dtype of floats need none of that; all else is still asked of torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

_OPS = {"lerp_": ("Scalar", "Tensor"), "addcmul_": ("",), "addcdiv_": ("",)}
"""Ops of `torch._meta_registrations`, and their overloads."""


@contextlib.contextmanager
def quick_inplace_shapes() -> Iterator[None]:
    """Meanwhile those ops give back what they write where all that they read is like it."""
    import torch._meta_registrations as known

    library = torch.library.Library("aten", "IMPL", "Meta")
    try:
        for name, overloads in _OPS.items():
            asked: Callable[..., Any] = getattr(known, name)
            for overload in overloads:
                library.impl(f"{name}.{overload}" if overload else name, _quick(asked), allow_override=True)
        yield
    finally:
        library._destroy()


def _quick(asked: Callable[..., Any]) -> Callable[..., Any]:
    def shape(written: torch.Tensor, *read: Any, **options: Any) -> torch.Tensor:
        if _alike(written, read) and not any(isinstance(each, torch.Tensor) for each in options.values()):
            return written
        found: torch.Tensor = asked(written, *read, **options)
        return found

    return shape


def _alike(written: torch.Tensor, read: tuple[Any, ...]) -> bool:
    """Whether every tensor has the shape and the dtype of what is written."""
    dtype, shape = written.dtype, written.shape
    return dtype.is_floating_point and all(
        each.dtype is dtype and each.shape == shape if isinstance(each, torch.Tensor) else isinstance(each, float | int)
        for each in read
    )
