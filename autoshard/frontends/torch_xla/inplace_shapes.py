"""Fast shape inference for the in-place ops of optimizers.

Before functionalization makes an in-place op out-of-place, it runs the op on meta tensors, to refuse wrong shapes. For
interpolation and fused multiplications that is Python code with all broadcasting rules: a tenth of the capture of many
parameters. Operands of equal shape and float dtype do not need it; all others still go through torch.
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
    """Make those ops return the written tensor where all operands are like it."""
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
    """Whether every operand has the shape and dtype of the written tensor."""
    dtype, shape = written.dtype, written.shape
    return dtype.is_floating_point and all(
        each.dtype is dtype and each.shape == shape if isinstance(each, torch.Tensor) else isinstance(each, float | int)
        for each in read
    )
