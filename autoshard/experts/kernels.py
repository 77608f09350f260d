"""One device's part of a mixture's experts: its tokens' rows sorted by expert, then grouped products."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np

from autoshard.experts import grouped
from autoshard.experts.dims import UP
from autoshard.experts.form import FORWARD, Form
from autoshard.program import TensorType
from autoshard.regions.kernel import Kernel, Platform, stablehlo_of


@dataclass(frozen=True)
class Part:
    """One device's part of a mixture's experts or of their gradient.

    Attributes:
        kind, form: of the op.
        operands: local types, in its order.
        shards: over how many devices experts are split, contiguously.
    """

    kind: str
    form: Form
    operands: tuple[TensorType, ...]
    shards: int
    platform: Platform


@cache
def lowered(part: Part) -> Kernel:
    """The kernel of a part as StableHLO; its one constant is each device's first expert."""
    count = part.operands[UP].shape[0]
    extras = ((np.arange(part.shards, dtype=np.int32) * count, 0),)

    def run(*given: Any) -> Any:
        *operands, first = given
        if part.kind == FORWARD:
            return (experts(part.form, part.platform, operands, first[0], part.shards),)
        return gradient(part.form, part.platform, operands[:-1], operands[-1], first[0], part.shards)

    entry = f"{part.kind}_{hashlib.sha256(repr(part).encode()).hexdigest()[:12]}"
    text = stablehlo_of(run, part.operands, extras, part.shards, part.platform, entry)
    return Kernel("grouped products", "", entry, text, extras)


def _activation(form: Form) -> Callable[[Any], Any]:
    import jax

    found: dict[str, Callable[[Any], Any]] = {
        "silu": jax.nn.silu if form.scale == 1 else lambda x: x * jax.nn.sigmoid(form.scale * x),
        "gelu": partial(jax.nn.gelu, approximate=False),
        "gelu_tanh": partial(jax.nn.gelu, approximate=True),
        "relu": jax.nn.relu,
        "relu2": lambda x: jax.nn.relu(x) ** 2,
    }
    return found[form.activation]


class _Sorted:
    """A device's rows, one per token and choice, those of its first expert first, and those of other devices last.

    Args:
        ids: `(t, k)`, of all experts.
        count: of this device's experts.
        first: the number of its first.
        ways: over how many devices experts are split.
    """

    def __init__(self, ids: Any, count: int, first: Any, ways: int) -> None:
        import jax.numpy as jnp

        here = ids.reshape(-1) - first
        here = jnp.where((here >= 0) & (here < count), here, count)
        self.shape = ids.shape
        self.order = jnp.argsort(here, stable=True)
        self.back = jnp.argsort(self.order)
        self.groups = grouped.Groups((here[:, None] == jnp.arange(count)).sum(0, dtype=jnp.int32), ways)
        self.own = (here < count)[:, None]
        self._here = here

    def rows(self, tokens: Any) -> Any:
        """`(t, d)` -> `(t * k, d)`."""
        return tokens[self.order // self.shape[1]]

    def returned(self, rows: Any) -> Any:
        """`(t * k, n)` in the order of tokens, `(t, k, n)`; zeros for rows of other devices."""
        import jax.numpy as jnp

        return jnp.where(self.own, rows[self.back], 0).reshape(*self.shape, -1)

    @property
    def group(self) -> Any:
        """Each row's expert, counted from this device's first; one past its last for rows of other devices."""
        return self._here[self.order]

    def biased(self, rows: Any, bias: Any = None) -> Any:
        """Rows `(t * k, n)` plus their expert's bias, of `(e, ...)`, n elements an expert; unchanged without one."""
        import jax.numpy as jnp

        if bias is None:
            return rows
        return rows + bias.reshape(bias.shape[0], -1)[jnp.minimum(self.group, bias.shape[0] - 1)]

    def summed(self, rows: Any) -> Any:
        """The sum of each expert's rows, `(t * k, n)` -> `(e, n)`, in float32."""
        import jax.numpy as jnp

        count = self.groups.sizes.shape[0]
        one_hot = self.group[:, None] == jnp.arange(count)
        own = jnp.where((self.group < count)[:, None], rows, 0)
        return jnp.einsum(
            "re,rn->en", one_hot.astype(rows.dtype), own, precision="highest", preferred_element_type=jnp.float32
        )


def experts(form: Form, platform: Platform, operands: Sequence[Any], first: Any = 0, ways: int = 1) -> Any:
    """The sum `(t, d)` over the experts `first` to `first + e - 1`, which this device has, for its own tokens.

    Args:
        form: what each expert computes.
        platform: whose kernels compute the products.
        operands: as in `form.py`; ids are those of all experts.
        first: number of this device's first expert.
        ways: over how many devices experts are split.
    """
    import jax.numpy as jnp

    x, ids, weights, up, down, *bias = operands
    count, gates, _, features = up.shape
    by_expert = _Sorted(ids, count, first, ways)
    wide = grouped.product(by_expert.rows(x), up.reshape(count, -1, features), by_expert.groups, platform)
    inner = _gated(form, *jnp.split(by_expert.biased(wide, *bias), gates, 1))
    made = by_expert.returned(grouped.product(inner, down, by_expert.groups, platform))
    return jnp.einsum("tkd,tk->td", made, weights, preferred_element_type=jnp.float32).astype(x.dtype)


def gradient(
    form: Form, platform: Platform, operands: Sequence[Any], grad: Any, first: Any = 0, ways: int = 1
) -> tuple[Any, ...]:
    """The gradients of `x`, `weights`, `up`, `down` and the bias, if there is one, by that of the sum, `(t, d)`.

    Hidden features are computed again. The gradient of a row's weight is a product of hidden features too.
    """
    import jax
    import jax.numpy as jnp

    x, ids, weights, up, down, *bias = operands
    x, grad = jax.lax.optimization_barrier((x, grad))  # else XLA would keep the forward pass's hidden features instead
    count, gates, _, features = up.shape
    flat = up.reshape(count, -1, features)
    by_expert = _Sorted(ids, count, first, ways)
    rows, back = by_expert.rows(x), by_expert.rows(grad)
    wide = by_expert.biased(grouped.product(rows, flat, by_expert.groups, platform), *bias)
    inner, gated_back = jax.vjp(partial(_gated, form), *jnp.split(wide, gates, 1))
    slope = grouped.product(back, down, by_expert.groups, platform, across=True)
    of_weights = (inner.astype(jnp.float32) * slope).sum(1, keepdims=True)
    weight = weights.reshape(-1)[by_expert.order][:, None]
    of_wide = jnp.concatenate(gated_back((slope * weight).astype(inner.dtype)), 1)
    of_rows = grouped.product(of_wide, flat, by_expert.groups, platform, across=True)
    of_up = grouped.outer(of_wide, rows, by_expert.groups, platform).reshape(up.shape)
    of_down = grouped.outer(back, (inner * weight).astype(inner.dtype), by_expert.groups, platform)
    of_x = by_expert.returned(of_rows).sum(1, dtype=jnp.float32).astype(x.dtype)
    of_routing = by_expert.returned(of_weights)[..., 0].astype(weights.dtype)
    made: tuple[Any, ...] = (of_x, of_routing, of_up, of_down)
    made += tuple(by_expert.summed(of_wide).reshape(each.shape).astype(each.dtype) for each in bias)
    if platform == "gpu":  # else XLA:GPU puts the weights' gradients off, and keeps what they read of every layer
        made = jax.lax.optimization_barrier(made)
    return made


def _gated(form: Form, gate: Any, *linear: Any) -> Any:
    import jax.numpy as jnp

    if form.limit is not None:
        gate, linear = jnp.minimum(gate, form.limit), tuple(jnp.clip(each, -form.limit, form.limit) for each in linear)
    inner = _activation(form)(gate)
    return inner * (linear[0] + form.shift) if linear else inner
