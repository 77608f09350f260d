"""A mixture's experts in transformers, kept as one op (`experts/form.py`) or written out as gathers of weights.

transformers' own implementations sort tokens by `histc`, loop over `nonzero`, or gather every token's weights
(`batched_mm`): only the last can be captured.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch

from autoshard.experts.form import Form
from autoshard.frontends.switches import dots
from autoshard.frontends.switches.handlers import EXPERTS, note
from autoshard.frontends.tracing import experts as one_op
from autoshard.frontends.tracing.device import is_xla

_REPLACED = ("eager", "grouped_mm", "batched_mm")
_ACTIVATIONS = {
    "SiLU": "silu", "SiLUActivation": "silu", "GELUActivation": "gelu", "ReLU": "relu",
    "PytorchGELUTanh": "gelu_tanh", "GELUTanh": "gelu_tanh", "NewGELUActivation": "gelu_tanh",
    "ReLUSquaredActivation": "relu2",
}  # fmt: skip
"""Class of a module -> activation."""


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
            why = _why_written_out(module, x, library)
            if as_one_op and not why:
                return _as_one_op(module, x, ids, weights)
            if as_one_op:
                note(EXPERTS, why)
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


def _as_one_op(module: Any, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    up = module.gate_up_proj if module.has_gate else module.up_proj
    x, up, down = dots.same_dtype(x, up, module.down_proj)
    gates = 2 if module.has_gate else 1
    up = up.reshape(up.shape[0], gates, up.shape[1] // gates, up.shape[2])
    return one_op.experts(x, ids, weights, up, down, Form(_ACTIVATIONS[type(module.act_fn).__name__]))


def _why_written_out(module: Any, x: torch.Tensor, library: Any) -> str:
    """Why experts have not the form of the op; empty if they do."""
    activation = type(getattr(module, "act_fn", None)).__name__
    gate = getattr(type(module), "_apply_gate", None)
    reasons = {
        "their weights have biases": module.has_bias,
        "their weights are stored transposed": module.is_transposed,
        "gates and features are interleaved": module.has_gate and not module.is_concatenated,
        "their gate is the model's own": module.has_gate and gate is not library._default_apply_gate,
        "a norm follows each expert": module.has_post_expert_norm,
        f"their activation is {activation}": activation not in _ACTIVATIONS,
        f"tokens have {x.dim()} dims, not 2": x.dim() != 2,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")
