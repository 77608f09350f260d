"""A mixture's experts as two torch ops, `autoshard::experts` and `autoshard::experts_grad` (`experts/form.py`).

They are differentiable once.
"""

from __future__ import annotations

from typing import Any

import torch

from autoshard.experts.form import FORWARD, GRADIENT, Form
from autoshard.frontends.tracing.regions import Tensors, executed, library, meta

_OPERANDS = "Tensor x, Tensor ids, Tensor weights, Tensor up, Tensor down"
library.define(f"experts({_OPERANDS}, str activation) -> Tensor")
library.define(f"experts_grad({_OPERANDS}, Tensor grad, str activation) -> (Tensor, Tensor, Tensor, Tensor)")


def experts(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, up: torch.Tensor, down: torch.Tensor, form: Form
) -> torch.Tensor:  # fmt: skip
    """The experts of `form.py`, differentiable in all but `ids`."""
    made: torch.Tensor = torch.ops.autoshard.experts(x, ids.to(torch.int32), weights, up, down, form.activation)
    return made


def _experts(*given: Any) -> torch.Tensor:
    return meta(given[0])


def _experts_grad(*given: Any) -> tuple[torch.Tensor, ...]:
    x, _, *others, _, _ = given
    return tuple(map(meta, (x, *others)))


class _Experts(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, x: Any, ids: Any, weights: Any, up: Any, down: Any, activation: str) -> torch.Tensor:
        ctx.activation = activation
        ctx.save_for_backward(x, ids, weights, up, down)
        with torch._C._AutoDispatchBelowAutograd():
            made: torch.Tensor = torch.ops.autoshard.experts(x, ids, weights, up, down, activation)
        return made

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        dx, *others = torch.ops.autoshard.experts_grad(*ctx.saved_tensors, grad, ctx.activation)
        return dx, None, *others, None


def _differentiable(x: Any, ids: Any, weights: Any, up: Any, down: Any, activation: str) -> Any:
    if torch.is_grad_enabled() and any(each.requires_grad for each in (x, weights, up, down)):
        return _Experts.apply(x, ids, weights, up, down, activation)
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.autoshard.experts(x, ids, weights, up, down, activation)


def _experts_xla(*given: Any) -> torch.Tensor:
    return _computed(FORWARD, given, (_experts(*given),))[0]


def _experts_grad_xla(*given: Any) -> Tensors:
    return _computed(GRADIENT, given, _experts_grad(*given))


def _computed(kind: str, given: Any, results: Tensors) -> Tensors:
    """The results of an op on an XLA device."""
    *operands, activation = given
    made = executed(kind, Form(activation), operands, results)
    if made is None:
        raise RuntimeError(f"autoshard::{kind} is computed at capture and under annotate() alone")
    return made


library.impl("experts", _experts, "Meta")
library.impl("experts", _experts_xla, "XLA")
library.impl("experts", _differentiable, "Autograd")
library.impl("experts_grad", _experts_grad, "Meta")
library.impl("experts_grad", _experts_grad_xla, "XLA")
