"""Parts written into zeros, as the gradients of slices are, held against the compilers of TPUs and GPUs."""

from __future__ import annotations

import pytest

from autoshard.mesh import Spec
from tests.cost.few_ops import compiled_for, f32

jax = pytest.importorskip("jax")
jnp = jax.numpy
TARGETS = ["tpu-v5e:2x4", "h100:8"]
BATCH, DIM, LAST = (("data",), (), ()), (("data",), ("model",), ()), (("data",), (), ("model",))


def needs(target: str) -> None:
    pytest.importorskip("libtpu" if target.startswith("tpu") else "jax_plugins.xla_cuda12")


def written(x: object, *parts: object) -> object:
    """`x` times zeros into which every part is written at its own place, 7 behind the one before."""
    total = 0.0
    for i, part in enumerate(parts):
        total = total + jax.lax.dynamic_update_slice(jnp.zeros_like(x), jnp.tanh(part), (0, 1 + 7 * i, 0))
    return x * total


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("whole", "parts"),
    [(DIM, [BATCH, BATCH, DIM]), (DIM, [LAST, LAST, LAST]), (LAST, [BATCH, DIM, LAST])],
)
def test_collectives_are_those_of_a_pad(target: str, whole: Spec, parts: list[Spec]) -> None:
    needs(target)
    sizes = [f32(64, 32, 256), f32(64, 1, 256), f32(64, 5, 256), f32(64, 16, 256)]
    report, _ = compiled_for(target, written, sizes, [whole, parts[0], parts[1], parts[2]])
    assert report.fidelity.compiled_bytes > 0
    assert [(row.kind, row.axes, row.predicted_bytes) for row in report.fidelity.rows] == [
        (row.kind, row.axes, row.compiled_bytes) for row in report.fidelity.rows
    ]


@pytest.mark.parametrize("target", TARGETS)
def test_a_long_sum_of_parts_keeps_none_of_its_terms(target: str) -> None:
    """The backward pass of a recurrence: every step's part padded to the whole sequence, one after the other."""
    needs(target)
    steps = 60
    parts = [f32(64, 1, 256)] * steps
    report, _ = compiled_for(target, written, [f32(64, 7 * steps + 1, 256), *parts], [BATCH] * (steps + 1))
    assert report.prediction.peak_memory_bytes == pytest.approx(report.memory_bytes, rel=0.05)
    assert report.prediction.compiled.moved_bytes == pytest.approx(report.judged.bytes, rel=0.2)


def interleaved(x: object, weight: object, back: object) -> object:
    """The gradient of a gate whose halves alternate (GPT-OSS), between products that are split as under Megatron."""

    def gated(x: object) -> object:
        both = x @ weight
        return jnp.sum((both[:, ::2] * jnp.tanh(both[:, 1::2])) @ back)

    return jax.grad(gated)(x)


@pytest.mark.parametrize("target", [*TARGETS, "cpu:8"])
def test_elements_that_alternate_are_spread_in_place(target: str) -> None:
    """Both halves were gathered in the backward pass."""
    if not target.startswith("cpu"):
        needs(target)
    specs: list[Spec] = [(("data",), ()), ((), ("model",)), (("model",), ())]
    report, _ = compiled_for(target, interleaved, [f32(512, 256), f32(256, 2048), f32(1024, 256)], specs)
    assert report.fidelity.value == 0
    assert {row.kind for row in report.fidelity.rows} == {"all-reduce"}
