"""Group norms beside convolutions on TPU, and what two cores write on chip, held against compiled programs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from autoshard.cost.machine import cycles
from autoshard.mesh import Spec
from autoshard.verify.hlo_text import parse_hlo
from tests.cost.few_ops import compiled_for, f32

pytest.importorskip("libtpu")
ALL = ("data", "model")
SPLIT: Spec = (ALL, (), (), ())
WHOLE: Spec = ((), (), (), ())
ALONE = frozenset({"reshape", "copy", "broadcast", "reduce"})


def normed(x: jax.Array, groups: int) -> jax.Array:
    apart = x.reshape(*x.shape[:1], groups, -1)
    centred = apart - apart.mean(2, keepdims=True)
    return (centred * lax.rsqrt((centred**2).mean(2, keepdims=True) + 1e-5)).reshape(x.shape)


@pytest.mark.parametrize(
    ("target", "images", "groups", "small"),
    [
        *(("tpu-v5p:2x2x2", 8, groups, 8) for groups in (2, 32)),
        *(("tpu-v5p:2x2x2", 8, groups, 0) for groups in (1, 64)),
        ("tpu-v5p:2x2x2", 2, 32, 8),
        ("tpu-v5e:2x4", 8, 32, 8),
    ],
)
def test_statistics_of_groups_are_copied_between_two_sums(target: str, images: int, groups: int, small: int) -> None:
    def block(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.nn.silu(normed(lax.conv_general_dilated(x, w, (1, 1), [(1, 1), (1, 1)]), groups))

    arguments = [f32(8 * images, 64, 32, 32), f32(64, 64, 3, 3)]
    report, compiled = compiled_for(target, block, arguments, [SPLIT, WHOLE])
    module = parse_hlo(compiled.hlo_text)
    entry = module.computations[module.entry].instructions.values()
    made = [one for one in entry if one.opcode in ALONE and one.shapes[0].elements <= images * 64]
    assert len(made) == small
    program = report.prediction.compiled.program
    copies = [kernel for kernel in report.prediction.compiled.kernels if kernel.kind == "copy" and kernel.steps]
    sizes = [program.arrays[kernel.writes[0]].elements for kernel in copies]
    assert len([size for size in sizes if size <= images * 64]) == small


@pytest.mark.parametrize("fused", [False, True])
def test_two_cores_write_on_chip_what_fusions_make(fused: bool) -> None:
    # One op alone is none: a sum of what is squared stays on chip for its reader, a plain sum does not.
    def summed(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.tanh((x * x if fused else x).sum(0)) * w

    arguments = [f32(64, 2**23), f32(2**23)]
    report, _ = compiled_for("tpu-v5p:2x2x2", summed, arguments, [((), ALL), (ALL,)])
    assert report.prediction.compiled.moved_bytes == pytest.approx(report.judged.bytes, rel=0.001)
    assert report.prediction.step_time_s == pytest.approx(report.judged.step_time_s, rel=0.001)


def test_sums_over_what_a_convolution_makes_are_results_of_its_kernel() -> None:
    # Eight images to a device lie whole: the first sum was a kernel that read them once more (25.5 MB for 21.3).
    def block(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.nn.silu(normed(lax.conv_general_dilated(x, w, (1, 1), [(1, 1), (1, 1)]), 64))

    arguments = [f32(64, 64, 32, 32), f32(64, 64, 3, 3)]
    report, _ = compiled_for("tpu-v5p:2x2x2", block, arguments, [SPLIT, WHOLE])
    found = report.prediction.compiled
    assert found.moved_bytes == pytest.approx(report.judged.bytes, rel=0.005)
    (product,) = (kernel for kernel in found.kernels if kernel.flops)
    assert len(product.writes) == 2


@pytest.mark.parametrize("target", ["tpu-v5e:2x4", "tpu-v5p:2x2x2"])
def test_sums_for_each_image_read_a_copy_of_padded_strips(target: str) -> None:
    # Two images of 64 positions, 8 strips of 9: both sums leave out what strips are padded with.
    def block(x: jax.Array, w: jax.Array) -> jax.Array:
        return normed(lax.conv_general_dilated(x, w, (1, 1), [(1, 1), (1, 1)]), 8)

    arguments = [f32(16, 64, 64, 64), f32(64, 64, 3, 3)]
    report, compiled = compiled_for(target, block, arguments, [SPLIT, WHOLE])
    module = parse_hlo(compiled.hlo_text)
    entry = module.computations[module.entry].instructions
    strips = [entry[one.operands[0]] for one in entry.values() if one.name.startswith("slice_reduce_fusion")]
    makers = [entry[one.operands[0]] if one.opcode == "bitcast" else one for one in strips]
    assert [one.opcode for one in makers] == ["copy", "copy"]
    found = report.prediction.compiled
    kernels = {array: kernel for kernel in found.kernels for array in kernel.writes}
    sums = [kernel for kernel in found.kernels if kernel.kind == "reduce"]
    assert [kernels[kernel.reads[0]].kind for kernel in sums] == ["copy", "copy"]


def test_strips_without_padding_are_summed_one_by_one_first() -> None:
    # 32 positions behind a stride of 2 are 8 strips of 4: 16 sums for two images, and a small kernel that adds them.
    def block(x: jax.Array, w: jax.Array) -> jax.Array:
        made = lax.conv_general_dilated(x, w, (1, 1), [(1, 1), (1, 1)])
        return normed(lax.conv_general_dilated(jax.nn.silu(made), w, (2, 2), [(1, 1), (1, 1)]), 8)

    arguments = [f32(16, 64, 64, 64), f32(64, 64, 3, 3)]
    report, compiled = compiled_for("tpu-v5p:2x2x2", block, arguments, [SPLIT, WHOLE])
    module = parse_hlo(compiled.hlo_text)
    entry = module.computations[module.entry].instructions.values()
    parts = [one for one in entry if one.opcode == "fusion" and any(shape.dims == (16, 64) for shape in one.shapes)]
    assert len(parts) == 2
    program = report.prediction.compiled.program
    made = [program.arrays[array].shape for kernel in report.prediction.compiled.kernels for array in kernel.writes]
    assert made.count((8, 2, 64)) == 2


def batch_normed(x: jax.Array) -> jax.Array:
    """A batch norm without parameters, and a ReLU."""
    centred = x - jnp.mean(x, (0, 2, 3), keepdims=True)
    return jax.nn.relu(centred * lax.rsqrt(jnp.mean(centred * centred, (0, 2, 3), keepdims=True) + 1e-5))


def gradients(x: jax.Array, v: jax.Array, w: jax.Array) -> tuple[jax.Array, ...]:
    """Of both kernels of two convolutions, the second of stride 2, with a batch norm and a ReLU between."""

    def loss(kernels: tuple[jax.Array, jax.Array]) -> jax.Array:
        first = batch_normed(lax.conv_general_dilated(x, kernels[0], (1, 1), [(1, 1), (1, 1)]))
        return jnp.sum(batch_normed(lax.conv_general_dilated(first, kernels[1], (2, 2), [(1, 1), (1, 1)])) ** 2)

    return jax.grad(loss)((v, w))


@pytest.fixture
def rooflines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels at their rooflines, predicted and compiled: seconds then tell kernels and traffic apart."""
    monkeypatch.setattr(cycles, "model", lambda kind: None)


@pytest.mark.usefixtures("rooflines")
@pytest.mark.parametrize(
    ("target", "images"), [("tpu-v5e:2x4", 32), ("tpu-v5p:2x2x2", 32), ("tpu-v5e:2x4", 64), ("tpu-v5p:2x2x2", 64)]
)
def test_a_step_between_convolutions_takes_as_long_as_compiled(target: str, images: int) -> None:
    # Four images to a device are strips, which are put together and cut; eight lie whole.
    arguments = [f32(images, 64, 56, 56), f32(128, 64, 3, 3), f32(128, 128, 3, 3)]
    report, _ = compiled_for(target, gradients, arguments, [SPLIT, WHOLE, WHOLE])
    found = report.prediction
    assert found.step_time_s == pytest.approx(report.judged.step_time_s, rel=0.05)
    sums = [kernel for kernel in found.compiled.kernels if kernel.kind == "all-reduce"]
    assert len(sums[-1].writes) == 2  # gradients of kernels are summed over devices as one, apart from statistics
