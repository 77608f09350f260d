"""What lies on chip when a program begins, held against the TPU's compiler."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from autoshard.cost.compiler.tpu.ahead import fetched_ahead
from autoshard.verify.compile import Compiled
from tests.cost.few_ops import compiled_for, f32, ids

pytest.importorskip("libtpu")
jax = pytest.importorskip("jax")
jnp = jax.numpy


def layers(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    return jnp.tanh(x @ up) @ down


def head(table: jax.Array, i: jax.Array) -> jax.Array:
    return jnp.tanh(table[i]) @ table.T


def returned(x: jax.Array, up: jax.Array, down: jax.Array) -> tuple[jax.Array, jax.Array]:
    return layers(x, up, down), down


def scaled(x: jax.Array, w: jax.Array, scale: jax.Array) -> jax.Array:
    return jnp.tanh(x * scale) + w.sum(0)


def fetched(compiled: Compiled) -> list[tuple[int, ...]]:
    """The shapes of what the compiled program finds on chip."""
    lines = [line for line in compiled.hlo_text.splitlines() if "cross_program_prefetch_index" in line]
    shapes = [part for line in lines for part in re.findall(r"f32\[([\d,]+)\]", line)[:1]]
    return [tuple(map(int, shape.split(","))) for shape in shapes]


@pytest.mark.parametrize(
    ("target", "function", "arguments", "ahead"),
    [
        ("tpu-v5e:2x4", layers, [f32(512, 768), f32(768, 2048), f32(2048, 1024)], (2048, 1024)),
        ("tpu-v5p:2x2x2", layers, [f32(512, 768), f32(768, 2048), f32(2048, 1024)], (2048, 1024)),
        ("tpu-v5e:2x4", head, [f32(30000, 768), ids(512)], (30000, 768)),
        ("tpu-v5e:2x4", head, [f32(60000, 768), ids(512)], None),  # 184 MB: on-chip memory has 112 MiB
        ("tpu-v5e:2x4", scaled, [f32(4096, 1024), f32(512, 1024), f32(1024)], None),
    ],
)
def test_the_largest_weight_is_on_chip(
    target: str, function: Callable[..., object], arguments: list[object], ahead: tuple[int, ...] | None
) -> None:
    """BERT's forward pass: 36 % less traffic was predicted, and 22 % less memory, as its logits found no room."""
    specs = [((),) * len(argument.shape) for argument in arguments]  # type: ignore[attr-defined]
    report, compiled = compiled_for(target, function, arguments, specs)
    assert fetched(compiled) == ([] if ahead is None else [ahead])
    if target.startswith("tpu-v5e"):  # on a v5p what the first product makes is predicted in device memory
        assert report.prediction.compiled.moved_bytes == pytest.approx(report.judged.bytes, rel=0.02)
        assert report.prediction.peak_memory_bytes == pytest.approx(report.memory_bytes, rel=0.02)


def test_an_argument_that_is_returned_is_not() -> None:
    report, compiled = compiled_for(
        "tpu-v5e:2x4", returned, [f32(512, 768), f32(768, 2048), f32(2048, 1024)], [((), ())] * 3
    )
    program = report.prediction.compiled.program
    found = fetched_ahead(report.prediction.compiled.kernels, program, lambda array: array.bytes, 2**27)
    assert found is not None
    assert fetched(compiled) == [program.arrays[found].shape] == [(768, 2048)]
