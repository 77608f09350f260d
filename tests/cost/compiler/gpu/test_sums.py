"""Sums over what convolutions make, held against the GPU's compiler."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from autoshard.cost.compiler.gpu.sums import _reshaped
from autoshard.mesh import Spec
from tests.cost.few_ops import compiled_for, f32

LAST = (0, 2, 3, 1)


@pytest.mark.parametrize(
    ("before", "after", "order"),
    [
        ((4, 64, 8, 8), (4, 16, 4, 8, 8), (0, 3, 4, 1, 2)),  # channels split: nothing moves
        ((4, 64, 8, 8), (4, 64, 64), (0, 2, 1)),  # positions merged
        ((4, 64, 8, 8), (4, 16, 256), None),  # channels and positions, which do not lie side by side
        ((4, 64, 8, 8), (4, 1, 64, 64), (1, 0, 3, 2)),
        ((1, 64, 8, 8), (64, 64), (1, 0)),
        ((4, 64, 8, 8), (256, 8, 8), None),
    ],
)
def test_how_a_reshape_of_what_lies_channels_last_lies(before, after, order) -> None:
    """Dims that are split stay side by side; dims that are merged must be."""
    assert _reshaped(LAST, before, after) == order


def grouped(images: jax.Array, kernel: jax.Array, scale: jax.Array) -> jax.Array:
    """A convolution, and its features normalised in groups of four."""
    made = jax.lax.conv(images, kernel, (1, 1), "SAME")
    parts = made.reshape(made.shape[0], -1, 4, *made.shape[2:])
    centred = parts - parts.mean((2, 3, 4), keepdims=True)
    normal = centred * jax.lax.rsqrt((centred * centred).mean((2, 3, 4), keepdims=True) + 1e-5)
    return jax.nn.relu(normal.reshape(made.shape) * scale[:, None, None])


def layers(images: jax.Array, *weights: jax.Array) -> jax.Array:
    """Two of them, and the mean."""
    return jnp.mean(grouped(grouped(images, *weights[:2]), *weights[2:]))


def test_statistics_of_groups_of_features_are_kernels_of_their_own() -> None:
    """Channels lie last: a group's numbers do not lie side by side, and a kernel that sums them ends there."""
    pytest.importorskip("jax_plugins.xla_cuda12")
    width = 64
    arguments = [f32(32, width, 128, 128), f32(width, width, 3, 3), f32(width), f32(width, width, 3, 3), f32(width)]
    batch: Spec = (("data", "model"), (), (), ())
    whole: list[Spec] = [((),) * 4, ((),), ((),) * 4, ((),)]
    report, _ = compiled_for("h100:8", layers, arguments, [batch, *whole])
    assert report.prediction.compiled.moved_bytes == pytest.approx(report.judged.bytes, rel=0.03)
