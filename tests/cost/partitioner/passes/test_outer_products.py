"""Outer products, held against what compilers make of them."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest

from autoshard.mesh import Spec
from autoshard.verify.targets import TargetError, parse_target
from tests.cost.few_ops import compiled_for, f32

BOTH = ("data", "model")


def weighted(gates: jax.Array, x: jax.Array) -> jax.Array:
    """Each row times each of its gates: a product over a dim of one element, as einsums over experts have it."""
    return jax.lax.dot_general(gates[:, :, None], x[:, None, :], (((2,), (1,)), ((0,), (0,))))


def experts(gates: jax.Array, x: jax.Array, w: jax.Array) -> jax.Array:
    """The weighted rows times each expert's matrix."""
    return jax.lax.dot_general(jnp.transpose(weighted(gates, x), (1, 0, 2)), w, (((2,), (1,)), ((0,), (0,))))


def weighted_alone(gates: jax.Array, x: jax.Array, _: jax.Array) -> jax.Array:
    return weighted(gates, x)


@pytest.mark.parametrize("target", ["tpu-v5e:2x4", "h100:8", "cpu:8"])
@pytest.mark.parametrize(
    ("function", "specs"),
    [
        (experts, [(BOTH, ()), (BOTH, ()), (BOTH, (), ())]),
        (experts, [(BOTH, ()), (BOTH, ()), ((), BOTH, ())]),
        (weighted_alone, [((), BOTH), (("data",), ("model",)), ((), (), ())]),
        (weighted_alone, [(BOTH, ()), ((), ()), ((), (), ())]),
    ],
)
def test_an_outer_product_is_as_its_user_is(target: str, function: Callable[..., jax.Array], specs: list[Spec]) -> None:
    """It is broadcasts, multiplied: compilers of GPUs and TPUs pass shardings through broadcasts last."""
    try:
        parse_target(target).packages()
    except TargetError as error:  # the extra with its compiler is not installed
        pytest.skip(str(error))
    report, _ = compiled_for(target, function, [f32(256, 8), f32(256, 128), f32(8, 128, 64)], specs)
    assert report.fidelity.value == 0
