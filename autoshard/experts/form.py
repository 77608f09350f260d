"""The form of a mixture's experts in StableHLO: `custom_call @autoshard.experts`, and its gradient.

`experts(x, ids, weights, up, down) -> y`, with t tokens, k experts a token, e experts, d features and f hidden ones:

- `x` and `y` are `(t, d)`, `ids` is int32 `(t, k)`, `weights` (of the router) is `(t, k)`;
- `up` is `(e, g, f, d)`, with g = 2 (gate, then up) or 1 where there is no gate; `down` is `(e, d, f)`.

`experts_grad(x, ids, weights, up, down, grad) -> (dx, dweights, dup, ddown)`.
"""

from __future__ import annotations

from dataclasses import dataclass

from autoshard.regions.form import BaseForm

FORWARD, GRADIENT = "experts", "experts_grad"
"""The two ops, as kinds of `graph.ops.Op`."""
KINDS = frozenset({FORWARD, GRADIENT})
ONE_OP = f"autoshard.{FORWARD}.default"
"""Name of its torch op in `Program.ops`."""
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2")


@dataclass(frozen=True)
class Form(BaseForm):
    """What each expert computes between its products.

    Attributes:
        activation: one of `ACTIVATIONS`.
    """

    activation: str = "silu"

    def __post_init__(self) -> None:
        """Refuse an unknown activation."""
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation {self.activation!r} of experts: one of {', '.join(ACTIVATIONS)} is needed")
