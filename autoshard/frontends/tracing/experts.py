"""A mixture's experts as two torch ops, `autoshard::experts` and `autoshard::experts_grad` (`experts/form.py`).

They are differentiable once.
"""

from __future__ import annotations

from typing import Any

import torch

from autoshard.experts.form import FORWARD, GRADIENT, Form
from autoshard.frontends.tracing.regions import Tensors, executed, library, meta

_OPERANDS = "Tensor x, Tensor ids, Tensor weights, Tensor up, Tensor down, Tensor? bias"
library.define(f"experts({_OPERANDS}, str form) -> Tensor")
library.define(f"experts_grad({_OPERANDS}, Tensor grad, str form) -> Tensor[]")


def experts(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, up: torch.Tensor, down: torch.Tensor,
    bias: torch.Tensor | None, form: Form,
) -> torch.Tensor:  # fmt: skip
    """The experts of `form.py`, differentiable in all but `ids`."""
    made: torch.Tensor = torch.ops.autoshard.experts(x, ids.to(torch.int32), weights, up, down, bias, form.text())
    return made


def _experts(*given: Any) -> torch.Tensor:
    return meta(given[0])


def _experts_grad(*given: Any) -> list[torch.Tensor]:
    x, _, *others, _, _ = given
    return [meta(each) for each in (x, *others) if each is not None]


class _Experts(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, *given: Any) -> torch.Tensor:
        *operands, ctx.form = given
        ctx.save_for_backward(*operands)
        with torch._C._AutoDispatchBelowAutograd():
            made: torch.Tensor = torch.ops.autoshard.experts(*given)
        return made

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        *operands, bias = ctx.saved_tensors  # once: checkpoints refuse a second read
        dx, *others = torch.ops.autoshard.experts_grad(*operands, bias, grad, ctx.form)
        return dx, None, *others, *([None] if bias is None else []), None


def _differentiable(*given: Any) -> Any:
    if torch.is_grad_enabled() and any(isinstance(each, torch.Tensor) and each.requires_grad for each in given):
        return _Experts.apply(*given)
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.autoshard.experts(*given)


def _experts_xla(*given: Any) -> torch.Tensor:
    return _computed(FORWARD, given, (_experts(*given),))[0]


def _experts_grad_xla(*given: Any) -> Tensors:
    return list(_computed(GRADIENT, given, _experts_grad(*given)))


def _computed(kind: str, given: Any, results: Tensors) -> Tensors:
    """The results of an op on an XLA device."""
    *operands, form = given
    made = executed(kind, Form.parse(form), [each for each in operands if each is not None], results)
    if made is None:
        raise RuntimeError(f"autoshard::{kind} is computed at capture and under annotate() alone")
    return made


library.impl("experts", _experts, "Meta")
library.impl("experts", _experts_xla, "XLA")
library.impl("experts", _differentiable, "Autograd")
library.impl("experts_grad", _experts_grad, "Meta")
library.impl("experts_grad", _experts_grad_xla, "XLA")
