"""What XLA's GPU compiler keeps in memory, on programs of a few ops compiled for 8 H100."""

from __future__ import annotations

import pytest

from autoshard.mesh import Spec
from autoshard.verify.check import VerifyReport
from tests.cost.few_ops import bf16, compiled_for, f32, ids

pytest.importorskip("jax_plugins.xla_cuda12")
jax = pytest.importorskip("jax")
jnp = jax.numpy
ALL = ("data", "model")


def compiled(function: object, arguments: list[object], specs: list[Spec], target: str = "h100:8") -> VerifyReport:
    return compiled_for(target, function, arguments, specs)[0]


def tied(table: object, i: object, u: object, x: object, y: object) -> object:
    """A table that is embedding and head: the gradient of its rows beside that of a product."""
    rows = jnp.zeros_like(table).at[i].add(jnp.tanh(u), mode="promise_in_bounds")
    return table - 0.1 * (jnp.einsum("tv,td->vd", y, x) + rows)


@pytest.mark.parametrize(
    "specs",
    [
        [((), ()), ((),), ((), ()), ((), ()), ((), ())],
        [
            ((), ()),
            (ALL,),
            (ALL, ()),
            (ALL, ()),
            (ALL, ()),
        ],  # both gradients are summed over devices, the product's first
        [(("model",), ()), (("data",),), (("data",), ()), (("data",), ()), (("data",), ("model",))],
    ],
)
def test_rows_are_scattered_onto_the_gradient_that_they_are_added_to(specs: list[Spec]) -> None:
    report = compiled(tied, [f32(4096, 256), ids(512), f32(512, 256), f32(512, 256), f32(512, 4096)], specs)
    assert report.prediction.peak_memory_bytes == pytest.approx(report.memory_bytes, rel=0.002)
    assert report.prediction.compiled.temporary_bytes == 0  # all is done in the result's buffer


IMAGES = [f32(32, 32, 64, 64), f32(64, 32, 3, 3), f32(64, 64, 3, 3)]
OVER_BATCH: list[Spec] = [(ALL, (), (), ()), ((), (), (), ()), ((), (), (), ())]


def convolved(x: object, w: object) -> object:
    return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NCHW", "OIHW", "NCHW"))


def halved(x: object) -> object:
    """A max pool of 2 x 2."""
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")


def two_convolutions(x: object, w: object, v: object) -> object:
    y, back = jax.vjp(lambda w, v: jnp.tanh(convolved(jnp.tanh(convolved(x, w)), v)), w, v)
    return back(y)


def pooled(x: object, w: object) -> object:
    y, back = jax.vjp(lambda w: halved(jnp.tanh(convolved(x, w))), w)
    return back(jnp.sin(y))


def pooled_and_kept(x: object, w: object) -> object:
    """As in a U-Net: what is pooled is also read by something else, whose gradient the pool's is added to."""

    def both(w: object) -> object:
        z = jnp.tanh(convolved(x, w))
        return halved(z), convolved(z, jnp.ones((64, 64, 1, 1)))

    y, back = jax.vjp(both, w)
    return back((jnp.sin(y[0]), y[1]))


@pytest.mark.parametrize(
    ("function", "apart"),
    [(two_convolutions, 0.001), (pooled, 0.001), (pooled_and_kept, 0.05)],
)
def test_images_are_copied_and_activations_lie_as_they_are_read(function: object, apart: float) -> None:
    """Also with a kernel that is a constant, which had ended in an IndexError."""
    count = 3 if function is two_convolutions else 2
    report = compiled(function, IMAGES[:count], OVER_BATCH[:count])
    assert report.prediction.peak_memory_bytes == pytest.approx(report.memory_bytes, rel=apart)


def test_a_result_of_uneven_parts_is_whole() -> None:
    """GPT-2's logits, forward only, under Megatron: 2.1 GB, of which 0.1 had been counted."""
    report = compiled(
        lambda x, w: jnp.tanh(x) @ w, [f32(512, 256), f32(256, 1001)], [(("data",), ()), ((), ("model",))]
    )
    found = report.prediction.compiled
    assert found.output_bytes == 512 * 1001 * 4  # as compiled
    assert report.prediction.peak_memory_bytes == pytest.approx(report.memory_bytes, rel=0.06)


def joined(x: object, w: object) -> object:
    """Of two convolutions a product, that a third reads."""
    z = jnp.tanh(convolved(x, w)) * jnp.sin(convolved(x, 2 * w))
    return convolved(z, jnp.ones((8, 64, 1, 1)))


def attended(x: object, w: object, v: object) -> object:
    return jax.nn.softmax(x @ w, -1) @ v


@pytest.mark.parametrize(
    ("function", "arguments", "specs"),
    [
        (joined, IMAGES[:2], OVER_BATCH[:2]),
        (attended, [f32(4096, 256), f32(256, 4096), f32(4096, 128)], [(ALL, ()), ((), ()), ((), ())]),
    ],
)
def test_results_of_convolutions_and_softmaxes_are_not_written_over(
    function: object, arguments: list[object], specs: list[Spec]
) -> None:
    """ResNet forward only on 8 H100: -17 %, now 0.0."""
    report = compiled(function, arguments, specs)
    assert report.prediction.peak_memory_bytes == pytest.approx(report.memory_bytes, rel=0.001)


@pytest.mark.parametrize("split", [((), ALL, ()), ((), (), ALL)])
def test_what_is_gathered_along_an_inner_dim_is_copied_for_a_batch_of_products(split: Spec) -> None:
    """Four transformer blocks under FSDP, forward only: -11 %, now +3."""
    report = compiled(
        lambda x, w: jnp.tanh(jnp.einsum("etd,edf->etf", x, w)),
        [f32(8, 512, 256), f32(8, 256, 512)],
        [((), ALL, ()), split],
    )
    assert report.prediction.peak_memory_bytes == pytest.approx(report.memory_bytes, rel=0.001)


def recomputed(x: object, *weights: object) -> object:
    """A step of blocks that are computed again in the backward pass."""

    def loss(weights: tuple[object, ...]) -> object:
        y = x
        for up, down in zip(weights[::2], weights[1::2], strict=True):
            y = jax.checkpoint(lambda y, up, down: y + jnp.tanh(y @ up) @ down)(y, up, down)
        return jnp.square(y).sum()

    return tuple(w - 0.1 * g for w, g in zip(weights, jax.grad(loss)(weights), strict=True))


WEIGHTS = [f32(2048, 8192), f32(8192, 2048)] * 8
UNDER_FSDP: list[Spec] = [(ALL, ())] * 17


def test_weights_are_gathered_for_a_second_pass_once_it_may_begin() -> None:
    """Under FSDP, gathers of weights wait for the barrier, as the kernels that read them do."""
    report = compiled(recomputed, [f32(8192, 2048), *WEIGHTS], UNDER_FSDP)
    assert report.prediction.peak_memory_bytes == pytest.approx(report.memory_bytes, rel=0.01)


def test_without_latency_hiding_weights_are_gathered_late() -> None:
    arguments = [bf16(65536, 1024), *([bf16(1024, 4096), bf16(4096, 1024)] * 8)]
    hiding, sync = (compiled(recomputed, arguments, UNDER_FSDP, target) for target in ("h100:8", "h100+slop0:8"))
    assert sync.prediction.peak_memory_bytes == pytest.approx(sync.memory_bytes, rel=0.001)
    assert sync.memory_bytes < 0.5 * hiding.memory_bytes


def test_with_less_memory_the_scheduler_gathers_fewer_weights_early() -> None:
    arguments = [f32(65536, 8192), *([f32(8192, 32768), f32(32768, 8192)] * 6)]
    usual, less = (compiled(recomputed, arguments, UNDER_FSDP[:13], target) for target in ("h100:8", "h100+slop5:8"))
    assert less.memory_bytes < 0.7 * usual.memory_bytes
    assert less.prediction.peak_memory_bytes == pytest.approx(less.memory_bytes, rel=0.001)


@pytest.mark.parametrize("target", ["a100-80gb:8", "l40s:8"])
def test_before_hopper_nothing_hides_latency(target: str) -> None:
    """Qwen 3 8B on 16 A100s was predicted to hold 62 % too much: gradients that wait for their sum."""
    report = compiled(recomputed, [f32(8192, 2048), *WEIGHTS], UNDER_FSDP, target)
    assert report.prediction.peak_memory_bytes == pytest.approx(report.memory_bytes, rel=0.02)


@pytest.mark.parametrize("classes", [16400, 50304])
def test_longer_rows_are_summed_by_kernels_of_their_own(classes: int) -> None:
    """A cross-entropy's gradient is written over logits where no single kernel sums a row: half as many bytes."""

    def step(head: object, x: object, y: object) -> object:
        shifted = (logits := (x @ head).astype(jnp.float32)) - logits.max(-1, keepdims=True)
        logs = shifted - jnp.log(jnp.exp(shifted).sum(-1, keepdims=True))
        hot = jnp.arange(classes) == y[:, None]
        back = jnp.where(hot, -1 / 65536, 0.0)
        back -= jnp.exp(logs) * back.sum(-1, keepdims=True)
        return jnp.where(hot, logs, 0.0).sum(), x.T @ back.astype(x.dtype)

    arguments = [jax.ShapeDtypeStruct((64, classes), jnp.bfloat16), jax.ShapeDtypeStruct((65536, 64), jnp.bfloat16)]
    report = compiled(step, [*arguments, ids(65536)], [((), ()), (ALL, ()), (ALL,)])
    assert report.prediction.peak_memory_bytes == pytest.approx(report.memory_bytes, rel=0.02)
