"""Programs that are seldom written, and once ended a prediction in a traceback."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from autoshard.cost.machine.device import load_device
from autoshard.cost.partitioner.ops.kernel import Gathering
from autoshard.cost.predict import Prediction, predict
from autoshard.graph.annotations import Annotations
from autoshard.graph.ops import Op, Value
from autoshard.mesh import Mesh, Spec
from tests.cost.few_ops import f32
from tests.graph.helpers import graph_of

jax = pytest.importorskip("jax")
jnp, lax = jax.numpy, jax.lax
BATCH: Spec = (("data", "model"), (), (), ())


def predicted(device: str, function: Callable[..., object], *shapes: tuple[int, ...], first: Spec = ()) -> Prediction:
    graph = graph_of(function, *(f32(*shape) for shape in shapes))
    annotations = Annotations({Value(graph.arguments[0]): first} if first else {})
    return predict(graph, annotations, Mesh((2, 4), ("data", "model"), device=device), load_device(device))


def convolution(x: jax.Array, w: jax.Array, stride: tuple[int, int] = (1, 1), padding: str = "SAME") -> jax.Array:
    return lax.conv_general_dilated(x, w, stride, padding, dimension_numbers=("NCHW", "OIHW", "NCHW"))


def flops(found: Prediction) -> float:
    return sum(kernel.flops for kernel in found.compiled.kernels)


@pytest.mark.parametrize("device", ["cpu", "h100", "tpu-v5e", "tpu-v5p"])
def test_sums_of_single_numbers(device: str) -> None:
    sums = predicted(device, lambda x: jnp.sum(jnp.mean(x, 0, keepdims=True).reshape(())), (8,))
    mean = predicted(device, lambda x: jnp.mean(jnp.sum(x).reshape(1, 1)), (8, 8))
    assert not sums.collectives
    assert not mean.collectives
    assert all(found.compiled.kernels and found.peak_memory_bytes < 2**17 for found in (sums, mean))


@pytest.mark.parametrize("device", ["cpu", "h100", "tpu-v5e", "tpu-v5p"])
def test_arrays_without_elements(device: str) -> None:
    def of_no_images(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.sum(convolution(x, w).reshape(0, 4), 0)

    none = predicted(device, of_no_images, (0, 3, 8, 8), (4, 3, 3, 3))
    valid = predicted(device, lambda x, w: convolution(x, w, padding="VALID"), (16, 4, 2, 2), (4, 4, 3, 3), first=BATCH)
    assert flops(none) == flops(valid) == 0
    assert not none.collectives
    assert not valid.collectives


@pytest.mark.parametrize("device", ["cpu", "h100", "tpu-v5e", "tpu-v5p"])
def test_views_and_sums_of_no_elements(device: str) -> None:
    """They are constants, as is a sum over none: without a kernel or a collective."""

    def between(x: jax.Array, w: jax.Array, y: jax.Array) -> tuple[jax.Array, ...]:
        of_none = jnp.sum(jnp.ones((1, 8, 3, 0)), (0, 1, 3))
        none = convolution(jnp.sin(jnp.reshape(x, (1, 0, 12))).reshape(1, 4, 0, 3), w)
        return none, jnp.einsum("ab,bcd->acd", y, jnp.ones((64, 32, 0))).sum(2), of_none

    found = predicted(device, between, (12, 0), (4, 4, 1, 1), (16, 64))
    assert flops(found) == 0
    padded = predicted(device, lambda x: jnp.pad(jnp.sin(x), ((0, 1), (1, 1))), (8, 0), first=(("data",), ("model",)))
    assert not padded.collectives
    assert not found.collectives


@pytest.mark.parametrize("device", ["cpu", "h100", "tpu-v5e", "tpu-v5p"])
def test_a_barrier_of_which_nothing_that_is_computed_is_read(device: str) -> None:
    """What is computed again behind a checkpoint inside a checkpoint may need arguments alone."""

    def held(x: jax.Array) -> jax.Array:
        y = jnp.maximum(x @ x, 0.0)
        z, _ = lax.optimization_barrier((x, y))
        return y + jnp.sin(z)

    def bare(x: jax.Array) -> jax.Array:
        return jnp.maximum(x @ x, 0.0) + jnp.sin(x)

    with_it, without = (predicted(device, each, (64, 64), first=(("data",), ())).compiled for each in (held, bare))
    assert [kernel.kind for kernel in with_it.kernels] == [kernel.kind for kernel in without.kernels]


def test_long_chains_of_moves_and_of_broadcasts_between_convolutions() -> None:
    def moved(x: jax.Array, w: jax.Array) -> jax.Array:
        y = convolution(x, w)
        for _ in range(1200):
            y = jnp.transpose(y, (1, 0, 2, 3))
        return convolution(y, w)

    def spread(x: jax.Array, w: jax.Array, s: jax.Array) -> jax.Array:
        y = jnp.broadcast_to(s[:, None, None, None], (16, 4, 16, 16))
        for _ in range(1200):
            y = jnp.sin(y)
        return y + convolution(x, w)

    one = flops(predicted("tpu-v5e", convolution, (16, 4, 16, 16), (4, 4, 3, 3), first=BATCH))
    assert flops(predicted("tpu-v5e", spread, (16, 4, 16, 16), (4, 4, 3, 3), (16,), first=BATCH)) == one > 0
    assert len(predicted("tpu-v5e", moved, (4, 4, 16, 16), (4, 4, 3, 3), first=BATCH).specs) > 1200


def test_readers_of_one_value_are_asked_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """1,500 products of one value took 18 s of CPU: each was asked what all the others want of it."""
    asked = 0
    ask = Gathering._asked

    def counted(self: Gathering, op: Op, place: int) -> object:
        nonlocal asked
        asked += 1
        return ask(self, op, place)

    def products(x: jax.Array, *weights: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(jnp.tanh(x @ each) for each in weights)

    monkeypatch.setattr(Gathering, "_asked", counted)
    predicted("tpu-v5e", products, (4096, 256), *[(256, 128)] * 50, first=(("data", "model"), ()))
    assert 50 <= asked <= 4 * 50


@pytest.mark.parametrize("stride", [1, 2])
def test_sums_of_features_leave_strips_as_they_are(stride: int) -> None:
    """They are summed by one kernel that reads them as they lie: no copy of them, and no sum for each strip."""

    def features(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.sum(convolution(jnp.tanh(convolution(x, w)), w, (stride, stride)), 1)

    found = predicted("tpu-v5p", features, (16, 64, 64, 64), (64, 64, 3, 3), first=BATCH).compiled
    kinds = [kernel.kind for kernel in found.kernels]
    assert kinds[-2:] == ["edges", "reduce"]
    assert kinds.count("reduce") == 1
