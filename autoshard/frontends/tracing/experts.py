"""A mixture's experts as two torch ops, `autoshard::experts` and `autoshard::experts_grad` (`experts/form.py`).

They are differentiable once. Off XLA devices every expert computes all tokens.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from autoshard.experts.form import FORWARD, GRADIENT, Form
from autoshard.frontends.tracing.regions import executed, library, meta

_OPERANDS = "Tensor x, Tensor ids, Tensor weights, Tensor up, Tensor down"
library.define(f"experts({_OPERANDS}, str activation) -> Tensor")
library.define(f"experts_grad({_OPERANDS}, Tensor grad, str activation) -> (Tensor, Tensor, Tensor, Tensor)")

_ACTIVATIONS: dict[str, Any] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x) ** 2,
}


def experts(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, up: torch.Tensor, down: torch.Tensor, form: Form
) -> torch.Tensor:  # fmt: skip
    """The experts of `form.py`, differentiable in all but `ids`."""
    made: torch.Tensor = torch.ops.autoshard.experts(x, ids.to(torch.int32), weights, up, down, form.activation)
    return made


def _experts(x: Any, ids: Any, weights: Any, up: Any, down: Any, activation: str) -> torch.Tensor:
    total = torch.zeros(x.shape, dtype=torch.promote_types(x.dtype, weights.dtype), device=x.device)
    for number in range(up.shape[0]):
        gate, *linear = (x @ part.T for part in up[number])
        inner = _ACTIVATIONS[activation](gate)
        inner = inner * linear[0] if linear else inner
        weight = torch.where(ids == number, weights, 0).sum(1, keepdim=True)
        total = total + (inner @ down[number].T) * weight
    return total.to(x.dtype)


def _experts_grad(
    x: Any, ids: Any, weights: Any, up: Any, down: Any, grad: Any, activation: str
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    with torch.enable_grad():
        given = [each.detach().requires_grad_() for each in (x, weights, up, down)]
        made = _experts(given[0], ids, given[1], given[2], given[3], activation)
        found: tuple[torch.Tensor, ...] = torch.autograd.grad(made, given, grad)
        return found


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


def _experts_xla(*given: Any) -> Any:
    *operands, activation = given
    made = executed(FORWARD, Form(activation), operands, (meta(operands[0]),))
    return _experts(*given) if made is None else made[0]


def _experts_grad_xla(*given: Any) -> Any:
    *operands, activation = given
    x, _, weights, up, down, _ = operands
    made = executed(GRADIENT, Form(activation), operands, tuple(map(meta, (x, weights, up, down))))
    return _experts_grad(*given) if made is None else made


library.impl("experts", _experts, "CompositeExplicitAutograd")
library.impl("experts", _experts_xla, "XLA")
library.impl("experts", _differentiable, "Autograd")
library.impl("experts_grad", _experts_grad, "CompositeExplicitAutograd")
library.impl("experts_grad", _experts_grad_xla, "XLA")
