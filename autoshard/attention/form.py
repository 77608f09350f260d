"""The form of an attention op in StableHLO: `custom_call @autoshard.attention`, and its gradient.

`attention(q, k, v[, bias][, q_segments, kv_segments]) -> (out, lse)`:

- `q` is `(batch, kv heads, group, queries, features)`: the heads that share one head of keys are a dim of their own;
- `k` is `(batch, kv heads, keys, features)`, `v` is `(batch, kv heads, keys, value features)`;
- `bias` is added to the scaled scores, `(batch, kv heads, group, queries, keys)` with any dim of size 1;
- segments are int32, `(batch, queries)` and `(batch, keys)`: a query attends to keys of its own segment;
- `out` is as `q` with value features, `lse` the log-sum-exp of each query's scores, f32.

`attention_grad(q, k, v[, bias][, segments], out, lse, grad) -> (dq, dk, dv)`. A bias has no gradient here.
"""

from __future__ import annotations

from dataclasses import dataclass

from autoshard.regions.form import BaseForm

FORWARD, GRADIENT = "attention", "attention_grad"
"""The two ops, as kinds of `graph.ops.Op`."""
KINDS = frozenset({FORWARD, GRADIENT})
FUSED = f"autoshard.{FORWARD}.default"
"""Name of its torch op in `Program.ops`."""
TARGETS = {f"autoshard.{kind}": kind for kind in (FORWARD, GRADIENT)}
"""Target of the custom call -> kind."""


@dataclass(frozen=True)
class Form(BaseForm):
    """What an attention masks and scales.

    Attributes:
        scale: factor of the scores.
        causal: query i attends to keys 0 to i.
        window: query i attends to keys after i - window (and before i + window unless causal); None for all.
        bias, segments: whether these operands are present.
        soft_cap: scores s are `soft_cap * tanh(s / soft_cap)` before they are masked.
    """

    scale: float
    causal: bool = False
    window: int | None = None
    bias: bool = False
    segments: bool = False
    soft_cap: float | None = None

    @property
    def operands(self) -> int:
        """Number of operands of the forward op."""
        return 3 + self.bias + 2 * self.segments

    def attended(self, queries: int, keys: int) -> float:
        """Number of (query, key) pairs that the causal mask and the window leave."""
        import numpy as np

        rows = np.arange(queries, dtype=float)
        last = np.minimum(rows + 1, keys) if self.causal else np.full(queries, float(keys))
        first = np.zeros(queries)
        if self.window is not None:
            first, last = np.maximum(rows + 1 - self.window, 0), np.minimum(rows + self.window, last)
        return float(np.maximum(last - first, 0).sum())

    def unbalanced(self, ways: float) -> float:
        """Where queries are split, the work of the last device, which has the most keys, over the mean."""
        return 2 - 1 / ways if self.causal and self.window is None else 1.0
