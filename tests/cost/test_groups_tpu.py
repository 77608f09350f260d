"""Group norms beside convolutions on TPU, and what two cores write on chip, held against compiled programs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax

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
