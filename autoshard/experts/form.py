"""The form of a mixture's experts as one op, `autoshard::experts`.

`experts(x, ids, weights, up, down) -> y`, with t tokens, k experts a token, e experts, d features and f hidden ones:

- `x` and `y` are `(t, d)`, `ids` is int32 `(t, k)`, `weights` (of the router) is `(t, k)`;
- `up` is `(e, g, f, d)`, with g = 2 (gate, then up) or 1 where there is no gate; `down` is `(e, d, f)`.

Devices may share t, e and f. `y` and the gradient of `x` and of `weights` are partial sums over e and f, those of
`up` and `down` over t.
"""

from __future__ import annotations

from dataclasses import dataclass

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")


@dataclass(frozen=True)
class Form:
    """What each expert computes between its products.

    Attributes:
        activation: one of `ACTIVATIONS`.
    """

    activation: str = "silu"

    def __post_init__(self) -> None:
        """Refuse an unknown activation."""
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation {self.activation!r} of experts: one of {', '.join(ACTIVATIONS)} is needed")
