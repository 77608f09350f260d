"""FLOPs, traffic and kernels of convolutions on TPU: in strips, and in loops of permutes."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from autoshard.cost.machine.device import load_device
from autoshard.cost.predict import predict
from autoshard.graph.annotations import Annotations
from autoshard.graph.ops import Value
from autoshard.mesh import Mesh, Spec
from tests.cost.few_ops import compiled_for, f32
from tests.graph.helpers import graph_of

pytest.importorskip("libtpu")
ALL = ("data", "model")
SPLIT: Spec = (ALL, (), (), ())
WHOLE: Spec = ((), (), (), ())


def forward(x: jax.Array, w: jax.Array) -> jax.Array:
    return lax.conv_general_dilated(x, w, (1, 1), [(1, 1), (1, 1)])


@pytest.mark.parametrize(("wide", "strips"), [(64, 9), (56, 8), (32, 5)])
def test_strips_are_convolved_with_what_they_are_padded_with(wide: int, strips: int) -> None:
    # Two images to a device: 64 positions are 8 strips of 9. FLOPs of ResNet, U-Net and a denoiser were 7 to 17 % low.
    arguments = [f32(16, 64, 64, wide), f32(128, 64, 3, 3)]
    report, _ = compiled_for("tpu-v5e:2x4", forward, arguments, [SPLIT, WHOLE])
    assert report.prediction.compiled.flops == pytest.approx(report.judged.flops, rel=0.025)


@pytest.mark.parametrize(
    ("images", "read", "made", "wide", "estimate"), [(4, 128, 64, 32, 213928), (2, 64, 64, 64, 702576)]
)
def test_each_shard_of_a_kernel_is_convolved_with_padding_and_put_in_place(
    images: int, read: int, made: int, wide: int, estimate: int
) -> None:
    """Cycles that libtpu estimates of the loop and of what fills its result, as of a net under FSDP.

    They were a twentieth: 8 of 64 features at a time take as many passes as 128, and slices more than that.
    """
    graph = graph_of(forward, f32(8 * images, read, wide, wide), f32(made, read, 3, 3))
    pins: dict[Value, Spec] = {Value(each): (ALL, (), (), ()) for each in graph.arguments} | {graph.outputs[0]: SPLIT}
    device = load_device("tpu-v5e")
    found = predict(graph, Annotations(pins), Mesh((2, 4), ALL, device="tpu-v5e"), device)
    assert abs(math.log(max(seconds for _, seconds in found.kernel_s) * device.clock / estimate)) < 0.25


def test_an_annotated_update_of_a_kernel_of_one_dim_is_no_larger_for_it() -> None:
    # Read as a kernel of height one it is of another rank than annotated, and was laid out in tiles of 1 x 3 numbers:
    # 268 MB for 0.8, so that the automatic plan of a WaveNet was predicted to take 50 times as long as it does.
    def update(w: jax.Array, x: jax.Array) -> jax.Array:
        def loss(w: jax.Array) -> jax.Array:
            high = x.reshape(64, 256, 1, 128), w.reshape(256, 256, 1, 3)
            made = lax.conv_general_dilated(*high, (1, 1), [(0, 0), (1, 1)])
            return jnp.sum(made**2)

        return w - 0.1 * jax.grad(loss)(w)

    arguments = [f32(256, 256, 3), f32(64, 256, 128)]
    graph = graph_of(update, *arguments, updates={0: 0})
    pins: dict[Value, Spec] = {Value(graph.arguments[0]): ((), (), ()), graph.outputs[0]: ((), (), ())}
    pins[Value(graph.arguments[1])] = (ALL, (), ())
    mesh = Mesh((2, 4), ALL, device="tpu-v5e")
    predicted = predict(graph, Annotations(pins), mesh, load_device("tpu-v5e")).compiled
    assert predicted.moved_bytes < 12e6
