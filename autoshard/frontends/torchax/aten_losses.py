"""Lowerings of aten ops to jax: losses, as torch_xla writes them."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from autoshard.frontends.torchax.aten import Types, lowers, spread

_MEAN, _SUM = 1, 2
"""torch's reduction modes; 0 is none."""


def _chosen(x: Any, target: Any) -> Any:
    """One-hot of the class, of the shape of `x` (rows, classes): needs no gather."""
    classes = lax.broadcast_in_dim(lax.iota(target.dtype, x.shape[1]), x.shape, (1,))
    here = lax.eq(lax.broadcast_in_dim(target, x.shape, (0,)), classes)
    return lax.select(here, lax.full_like(x, 1), lax.full_like(x, 0))


def _weighed(x: Any, target: Any, chosen: Any, weight: Any, ignored: int) -> Any:
    """Weight of each class of each row."""
    counts = lax.broadcast_in_dim(lax.ne(target, lax.full_like(target, ignored)), x.shape, (0,))
    weighed = lax.mul(lax.select(counts, lax.full_like(x, 1), lax.full_like(x, 0)), chosen)
    return weighed if weight is None else lax.mul(weighed, lax.broadcast_in_dim(weight, x.shape, (1,)))


def _total(x: Any, dims: tuple[int, ...]) -> Any:
    return lax.reduce(x, np.array(0, x.dtype), lax.add, dims)


@lowers("nll_loss_forward")
def _nll_loss(out: Types, x: Any, target: Any, weight: Any = None, reduction: int = _MEAN, ignored: int = -100) -> Any:
    rows, targets = _in_rows(x, target)
    chosen = _chosen(rows, targets)
    elsewhere = lax.ne(chosen, lax.full_like(rows, 1))
    found = lax.select(elsewhere, lax.full_like(rows, 0), lax.mul(lax.neg(chosen), rows))
    weighed = _weighed(rows, targets, chosen, weight, ignored)
    losses = lax.mul(found, weighed)
    if reduction not in (_MEAN, _SUM):
        return lax.reshape(_total(losses, (1,)), out[0].shape), lax.full_like(x, 0, shape=())
    total = _total(weighed, (0, 1))
    loss = _total(losses, (0, 1))
    return (lax.div(loss, total) if reduction == _MEAN else loss), total


@lowers("nll_loss_backward")
def _nll_loss_backward(
    out: Types, grad: Any, x: Any, target: Any, weight: Any, reduction: int, ignored: int, *_: Any
) -> Any:
    rows, targets = _in_rows(x, target)
    chosen = _chosen(rows, targets)
    weighed = _weighed(rows, targets, chosen, weight, ignored)
    found = lax.mul(lax.neg(chosen), weighed)
    if reduction == _MEAN:
        total = _total(weighed, (0, 1))
        none = lax.full_like(total, 0)
        found = lax.div(found, spread(lax.select(lax.ne(total, none), total, lax.full_like(total, 1)), rows.shape))
    dims = (0,) if grad.ndim else ()
    return lax.reshape(lax.mul(found, lax.broadcast_in_dim(grad, rows.shape, dims)), out[0].shape)


def _in_rows(x: Any, target: Any) -> tuple[Any, Any]:
    """Unsqueeze a single row."""
    return (x, target) if x.ndim > 1 else (lax.reshape(x, (1, *x.shape)), lax.reshape(target, (1,)))


# Linear algebra.


@lowers("_linalg_slogdet")
def _slogdet(out: Types, x: Any) -> Any:
    sign, length = jnp.linalg.slogdet(x)
    factors, pivots, _ = lax.linalg.lu(x)
    return sign, length, factors, lax.add(pivots, lax.full_like(pivots, 1))


@lowers("_conj_copy _conj_physical")
def _conjugate(out: Types, x: Any) -> Any:
    return lax.conj(x)
