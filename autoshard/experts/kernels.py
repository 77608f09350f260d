"""One device's part of a mixture's experts: its tokens' rows sorted by expert, then grouped products."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np

from autoshard.experts import grouped
from autoshard.experts.dims import UP, up_sizes
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
            return (experts(part.form, part.platform, operands, first[0]),)
        return gradient(part.form, part.platform, operands[:-1], operands[-1], first[0])

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
    """

    def __init__(self, ids: Any, count: int, first: Any) -> None:
        import jax.numpy as jnp

        here = ids.reshape(-1) - first
        here = jnp.where((here >= 0) & (here < count), here, count)
        self.shape = ids.shape
        self.order = jnp.argsort(here, stable=True)
        self.back = jnp.argsort(self.order)
        self.sizes = (here[:, None] == jnp.arange(count)).sum(0, dtype=jnp.int32)
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
        """Of each row; one behind the last for rows of other devices."""
        return self._here[self.order]

    def of_group(self, vectors: Any) -> Any:
        """`(e, n)` -> `(t * k, n)`, each row's own; any for rows of other devices."""
        import jax.numpy as jnp

        return vectors[jnp.minimum(self.group, vectors.shape[0] - 1)]

    def summed(self, rows: Any) -> Any:
        """`(t * k, n)` -> `(e, n)`, in float32."""
        import jax.numpy as jnp

        count = self.sizes.shape[0]
        one_hot = self.group[:, None] == jnp.arange(count)
        own = jnp.where((self.group < count)[:, None], rows, 0)
        return jnp.einsum(
            "re,rn->en", one_hot.astype(rows.dtype), own, precision="highest", preferred_element_type=jnp.float32
        )


class _Up:
    """The products of a form's `up`, and of its gradient."""

    def __init__(self, form: Form, platform: Platform, by_expert: _Sorted, up: Any, bias: Any = None) -> None:
        self.form, self.platform, self.by_expert, self.bias = form, platform, by_expert, bias
        self.gates, self.hidden, features = up_sizes(form, up.shape)
        self.across = form.up_dims[1] == "d"
        shape = (features, self.gates * self.hidden) if self.across else (self.gates * self.hidden, features)
        self.flat, self.shape = up.reshape(up.shape[0], *shape), up.shape

    def halves(self, rows: Any) -> list[Any]:
        """`(rows, d)` -> per gate `(rows, f)`."""
        import jax.numpy as jnp

        wide = grouped.product(rows, self.flat, self.by_expert.sizes, self.platform, across=self.across)
        if self.bias is not None:
            wide += self.by_expert.of_group(self.bias.reshape(self.bias.shape[0], -1))
        if self.form.up_dims[-1] == "g":
            return [wide[:, gate :: self.gates] for gate in range(self.gates)]
        return jnp.split(wide, self.gates, 1)

    def wide(self, halves: Sequence[Any]) -> Any:
        """The gates' gradients as one, in the order of `up`."""
        import jax.numpy as jnp

        if self.form.up_dims[-1] == "g":
            return jnp.stack(halves, -1).reshape(halves[0].shape[0], -1)
        return jnp.concatenate(halves, 1)

    def back(self, of_wide: Any) -> Any:
        """The gradient of rows."""
        return grouped.product(of_wide, self.flat, self.by_expert.sizes, self.platform, across=not self.across)

    def outer(self, of_wide: Any, rows: Any) -> Any:
        """The gradient of `up`."""
        pair = (rows, of_wide) if self.across else (of_wide, rows)
        return grouped.outer(*pair, self.by_expert.sizes, self.platform).reshape(self.shape)


def experts(form: Form, platform: Platform, operands: Sequence[Any], first: Any = 0) -> Any:
    """The sum `(t, d)` over the experts `first` to `first + e - 1`, which this device has, for its own tokens.

    Args:
        form: what each expert computes.
        platform: whose kernels compute the products.
        operands: as in `form.py`; ids are those of all experts.
        first: number of this device's first expert.
    """
    import jax.numpy as jnp

    x, ids, weights, up, down, *bias = operands
    by_expert = _Sorted(ids, up.shape[0], first)
    inner = _gated(form, *_Up(form, platform, by_expert, up, *bias).halves(by_expert.rows(x)))
    across = form.down_dims == "efd"
    made = by_expert.returned(grouped.product(inner, down, by_expert.sizes, platform, across=across))
    return jnp.einsum("tkd,tk->td", made, weights, preferred_element_type=jnp.float32).astype(x.dtype)


def gradient(form: Form, platform: Platform, operands: Sequence[Any], grad: Any, first: Any = 0) -> tuple[Any, ...]:
    """The gradients of `x`, `weights`, `up`, `down` and the bias, if there is one, by that of the sum, `(t, d)`.

    Hidden features are computed again. The gradient of a row's weight is a product of hidden features too.
    """
    import jax
    import jax.numpy as jnp

    x, ids, weights, up, down, *bias = operands
    x, grad = jax.lax.optimization_barrier((x, grad))  # else XLA would keep the forward pass's hidden features instead
    by_expert = _Sorted(ids, up.shape[0], first)
    of_up = _Up(form, platform, by_expert, up, *bias)
    across = form.down_dims == "efd"
    rows, back = by_expert.rows(x), by_expert.rows(grad)
    inner, gated_back = jax.vjp(partial(_gated, form), *of_up.halves(rows))
    slope = grouped.product(back, down, by_expert.sizes, platform, across=not across)
    of_weights = (inner.astype(jnp.float32) * slope).sum(1, keepdims=True)
    weight = weights.reshape(-1)[by_expert.order][:, None]
    of_wide = of_up.wide(gated_back((slope * weight).astype(inner.dtype)))
    scaled = (inner * weight).astype(inner.dtype)
    of_down = grouped.outer(*((scaled, back) if across else (back, scaled)), by_expert.sizes, platform)
    of_x = by_expert.returned(of_up.back(of_wide)).sum(1, dtype=jnp.float32).astype(x.dtype)
    of_routing = by_expert.returned(of_weights)[..., 0].astype(weights.dtype)
    made: tuple[Any, ...] = (of_x, of_routing, of_up.outer(of_wide, rows), of_down)
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
