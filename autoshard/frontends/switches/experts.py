"""A mixture's experts in transformers, kept as one op (`experts/form.py`) or written out as gathers of weights.

transformers' own implementations sort tokens by `histc`, loop over `nonzero`, or gather every token's weights
(`batched_mm`): only the last can be captured.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes

from autoshard.experts.form import Form
from autoshard.frontends.switches import dots
from autoshard.frontends.switches.handlers import EXPERTS, note
from autoshard.frontends.tracing import experts as one_op
from autoshard.frontends.tracing.device import is_xla

_REPLACED = ("eager", "grouped_mm", "batched_mm")
_PROBED = 128
"""How many magnitudes, from a thousandth to ten thousand, a gate is recognised by."""
_ACTIVATIONS = {
    "SiLU": "silu", "SiLUActivation": "silu", "GELUActivation": "gelu", "ReLU": "relu",
    "PytorchGELUTanh": "gelu_tanh", "GELUTanh": "gelu_tanh", "NewGELUActivation": "gelu_tanh",
    "ReLUSquaredActivation": "relu2",
}  # fmt: skip
"""Class of a module -> activation."""
_TORCH: dict[str, Callable[[torch.Tensor, float], torch.Tensor]] = {
    "silu": lambda x, scale: x * torch.sigmoid(scale * x),
    "gelu": lambda x, _: functional.gelu(x),
    "gelu_tanh": lambda x, _: functional.gelu(x, approximate="tanh"),
    "relu": lambda x, _: functional.relu(x),
    "relu2": lambda x, _: functional.relu(x).square(),
}


@contextlib.contextmanager
def experts_traced(*, as_one_op: bool) -> Iterator[None]:
    """Replace transformers' implementations of experts while programs are captured, and run under a plan.

    Args:
        as_one_op: keep as one op those that have its form.
    """
    library: Any = sys.modules.get("transformers.integrations.moe")
    table: Any = getattr(library, "ALL_EXPERTS_FUNCTIONS", None)
    if table is None:
        yield
        return
    own = table._local_mapping

    def implementation(name: str) -> Any:
        def experts(module: Any, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            if not is_xla(x):
                return before(module, x, ids, weights)
            form = _form(module, x, library)
            if as_one_op and isinstance(form, Form):
                return _as_one_op(module, form, x, ids, weights)
            if as_one_op:
                note(EXPERTS, str(form))
            made: torch.Tensor = library.batched_mm_experts_forward(module, x, ids, weights)
            return made

        def before(module: Any, *given: torch.Tensor) -> torch.Tensor:
            eager = type(module).forward.__wrapped__
            found = saved.get(name) or table._global_mapping.get(name) or eager
            made: torch.Tensor = found(module, *given)
            return made

        return experts

    saved = dict(own)
    own.update({name: implementation(name) for name in _REPLACED})
    try:
        yield
    finally:
        own.clear()
        own.update(saved)


def _as_one_op(module: Any, form: Form, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    names = ("gate_up_proj", "down_proj") if module.has_gate else ("up_proj", "down_proj")
    biases = [getattr(module, f"{name}_bias") for name in names] if module.has_bias else []
    x, up, down, *biases = dots.same_dtype(x, *(getattr(module, name) for name in names), *biases)
    if module.is_transposed:
        up, down = up.transpose(1, 2), down.transpose(1, 2)

    def by_gate(wide: torch.Tensor) -> torch.Tensor:
        if not _interleaved(module):
            return wide.unflatten(1, (2 if module.has_gate else 1, -1))
        return wide.unflatten(1, (-1, 2)).transpose(1, 2)

    bias = by_gate(biases[0]) if biases else None
    made = one_op.experts(x, ids, weights, by_gate(up), down, bias, form)
    if not biases:
        return made
    chosen = ids[..., None] == torch.arange(up.shape[0], device=ids.device)
    return made + (chosen.to(weights.dtype) * weights[..., None]).sum(1).to(x.dtype) @ biases[1]


def _form(module: Any, x: torch.Tensor, library: Any) -> Form | str:
    """What a module's experts compute, or why that has not the form of the op."""
    kind = type(getattr(module, "act_fn", None)).__name__
    own_gate = getattr(type(module), "_apply_gate", None) is not library._default_apply_gate
    activation = _ACTIVATIONS.get(kind, "silu" if own_gate else "")
    reasons = {
        "a norm follows each expert": module.has_post_expert_norm,
        f"their activation is {kind}": not activation,
        f"tokens have {x.dim()} dims, not 2": x.dim() != 2,
    }
    if why := next((reason for reason, holds in reasons.items() if holds), ""):
        return why
    form = Form(activation)
    if not module.has_gate or not own_gate:
        return form
    limits = [None, *_numbers(module, "limit", "swiglu_limit")]
    scales = [1.0, *(_numbers(module, "alpha", "swiglu_alpha") if activation == "silu" else [])]
    forms = [
        replace(form, limit=limit, scale=scale, shift=shift)
        for limit, scale, shift in product(limits, scales, (0.0, 1.0))
    ]
    return next((each for each in forms if _is_gate(module, each)), "their gate is the model's own")


def _interleaved(module: Any) -> bool:
    return bool(module.has_gate and not module.is_concatenated)


def _numbers(module: Any, *names: str) -> list[float]:
    found = [getattr(module, name, None) for name in names]
    return [float(each) for each in found if isinstance(each, int | float)]


def _is_gate(module: Any, form: Form) -> bool:
    """Whether a module's own gate computes this form's, on magnitudes beyond any limit that it may have."""
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
        sizes = torch.logspace(-3, 4, _PROBED)
        gate = torch.cat((-sizes, sizes))
        linear = gate[torch.arange(gate.numel()) * 37 % gate.numel()]
        wide = torch.stack((gate, linear), -1 if _interleaved(module) else 0).reshape(1, -1)
        try:
            found = module._apply_gate(wide)
        except Exception:  # a gate that wants other arguments has not the form: written out, and the plan says so
            return False
        if form.limit is not None:
            gate, linear = gate.clamp(max=form.limit), linear.clamp(-form.limit, form.limit)
        made = _TORCH[form.activation](gate, form.scale) * (linear + form.shift)
        return found.shape == (1, gate.numel()) and bool(torch.allclose(found[0], made, 1e-4, 1e-4))
