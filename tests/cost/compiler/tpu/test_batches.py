"""Products with batch dims on TPU: their operands and results have the two other dims in tiles."""

from __future__ import annotations

import pytest

from autoshard.cost.compiler.tpu.layout import tiled
from tests.cost.few_ops import compiled_for

pytest.importorskip("libtpu")
jax = pytest.importorskip("jax")
jnp = jax.numpy


def windows(x: object, table: object) -> object:
    """Attention within windows, written out, there and back."""
    split = (65536, 4, 49, 32)

    def loss(x: object) -> object:
        q, k, v = (each.reshape(split) for each in jnp.split(x @ table, 3, -1))
        scores = jnp.einsum("bhqd,bhkd->bhqk", q, k)
        return jnp.einsum("bhqk,bhkd->bhqd", jax.nn.softmax(scores, -1), v).astype(jnp.float32).sum()

    return jax.grad(loss)(x)


def test_scores_of_small_windows_are_mostly_padding() -> None:
    """49 x 49 take 56 x 128: Swin on v5e was predicted 36 % too small."""
    types = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((65536, 4 * 49 * 32), (4 * 49 * 32, 12 * 49 * 32))]
    report, _ = compiled_for("tpu-v5e:2x4", windows, types, [(("data", "model"), ()), ((), ())])
    assert report.memory_bytes > 2 * tiled((8192, 4, 49, 49), (2, 3))
    assert report.prediction.peak_memory_bytes == pytest.approx(report.memory_bytes, rel=0.1)
