"""In which order the memory scheduler runs kernels, held against XLA's TPU compiler."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from autoshard.mesh import Spec
from tests.cost.few_ops import compiled_for, f32

pytest.importorskip("libtpu")
jax = pytest.importorskip("jax")
jnp = jax.numpy
ALL = ("data", "model")
ROWS: Spec = (ALL, ())
TWO_CORES = "tpu-v5p:2x2x2"


def adam(layers: int) -> Callable[..., tuple[object, ...]]:
    """A step of a network: `x`, then of each layer a weight and two moments, of which new ones are made."""

    def step(x: object, *held: object) -> tuple[object, ...]:
        passed = [x]
        for weight in held[::3]:
            passed.append(jnp.tanh(passed[-1] @ weight))
        below = 1 - passed[-1] ** 2
        gradients = []
        for layer in reversed(range(layers)):
            gradients.insert(0, passed[layer].T @ below)
            below = (below @ held[3 * layer].T) * (1 - passed[layer] ** 2)
        made: list[object] = []
        for layer, gradient in enumerate(gradients):
            weight, first, second = held[3 * layer : 3 * layer + 3]
            first, second = 0.9 * first + 0.1 * gradient, 0.99 * second + 0.01 * gradient * gradient
            made += [weight - first / (jnp.sqrt(second) + 1e-6), first, second]
        return tuple(made)

    return step


@pytest.mark.parametrize("layers", [2, 3])
def test_the_order_is_chosen_by_what_ends_with_donated_arguments(layers: int) -> None:
    """541 and 810 MB were predicted: every gradient waited, as what an update makes counted as more memory."""
    specs: list[Spec] = [ROWS, *[((), ())] * (3 * layers)]
    sizes = [f32(512, 4096), *[f32(4096, 4096)] * (3 * layers)]
    report, _ = compiled_for(TWO_CORES, adam(layers), sizes, specs, {at: at + 1 for at in range(3 * layers)})
    assert report.prediction.peak_memory_bytes == pytest.approx(report.memory_bytes, rel=0.01)
