"""One device's part of a mixture's experts: its tokens' rows sorted by expert, then grouped products."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from autoshard.experts.form import Form


def _activations() -> dict[str, Callable[[Any], Any]]:
    import jax

    return {
        "silu": jax.nn.silu,
        "gelu": partial(jax.nn.gelu, approximate=False),
        "gelu_tanh": partial(jax.nn.gelu, approximate=True),
        "relu": jax.nn.relu,
    }


def experts(form: Form, x: Any, ids: Any, weights: Any, up: Any, down: Any, first: Any = 0) -> Any:
    """The sum `(t, d)` over the experts `first` to `first + e - 1`, which this device has, for its own tokens.

    Args:
        form: what each expert computes.
        x: `(t, d)`.
        ids: `(t, k)`, of all experts.
        weights: `(t, k)`.
        up: `(e, g, f, d)`.
        down: `(e, d, f)`.
        first: number of this device's first expert.
    """
    import jax.numpy as jnp
    from jax import lax

    count, gates, hidden, features = up.shape
    here = ids.reshape(-1) - first
    here = jnp.where((here >= 0) & (here < count), here, count)
    order = jnp.argsort(here, stable=True)
    sizes = (here[:, None] == jnp.arange(count)).sum(0, dtype=jnp.int32)
    token = order // ids.shape[1]
    valid = (jnp.arange(order.size) < sizes.sum())[:, None]
    rows = jnp.where(valid, x[token], 0)
    wide = lax.ragged_dot(rows, up.reshape(count, gates * hidden, features).swapaxes(1, 2), sizes)
    wide = jnp.where(valid, wide, 0).reshape(-1, gates, hidden)
    inner = _activations()[form.activation](wide[:, 0])
    inner = inner if gates == 1 else inner * wide[:, 1]
    made = jnp.where(valid, lax.ragged_dot(inner, down.swapaxes(1, 2), sizes), 0)
    made = made * weights.reshape(-1)[order][:, None]
    return jnp.zeros_like(x).at[token].add(made.astype(x.dtype))


def gradient(
    form: Form, x: Any, ids: Any, weights: Any, up: Any, down: Any, grad: Any, first: Any = 0
) -> tuple[Any, Any, Any, Any]:
    """The gradients of `x`, `weights`, `up` and `down` by that of the sum, `grad` `(t, d)`."""
    import jax

    def run(x: Any, weights: Any, up: Any, down: Any) -> Any:
        return experts(form, x, ids, weights, up, down, first)

    found: tuple[Any, Any, Any, Any] = jax.vjp(run, x, weights, up, down)[1](grad)
    return found
