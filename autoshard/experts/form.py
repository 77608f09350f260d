"""The form of a mixture's experts in StableHLO: `custom_call @autoshard.experts`, and its gradient.

`experts(x, ids, weights, up, down) -> y`, with t tokens, k experts a token, e experts, d features and f hidden ones:

- `x` and `y` are `(t, d)`, `ids` is int32 `(t, k)`, `weights` (of the router) is `(t, k)`;
- `up` is `(e, g, f, d)`, with g = 2 (gate, then up) or 1 where there is no gate; `down` is `(e, d, f)`;
- a sixth operand is the bias of `up`, `(e, g, f)`.

`experts_grad(x, ids, weights, up, down, [bias,] grad) -> (dx, dweights, dup, ddown[, dbias])`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields

from autoshard.regions.form import BaseForm

FORWARD, GRADIENT = "experts", "experts_grad"
"""The two ops, as kinds of `graph.ops.Op`."""
KINDS = frozenset({FORWARD, GRADIENT})
ONE_OP = f"autoshard.{FORWARD}.default"
"""Name of its torch op in `Program.ops`."""
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2")


@dataclass(frozen=True)
class Form(BaseForm):
    """What each expert computes between its products, `activation(gate) * (linear + shift)`.

    Attributes:
        activation: one of `ACTIVATIONS`.
        scale: silu is `gate * sigmoid(scale * gate)`.
        limit: the gate is clamped to at most this, the linear half to this and its negative; None: neither is.
    """

    activation: str = "silu"
    scale: float = 1.0
    limit: float | None = None
    shift: float = 0.0

    def __post_init__(self) -> None:
        """Refuse an unknown activation."""
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation {self.activation!r} of experts: one of {', '.join(ACTIVATIONS)} is needed")

    def text(self) -> str:
        """As the custom call's `backend_config`: the activation, and what is not as by default."""
        named = {each.name: getattr(self, each.name) for each in fields(self)}
        changed = {each.name for each in fields(self) if named[each.name] != each.default}
        return json.dumps({name: named[name] for name in sorted({"activation", *changed})})
