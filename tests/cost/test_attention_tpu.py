"""Softmaxes that become one kernel with the product behind them, held against the TPU's compiler."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from autoshard.cost.lowered import ATTENTION
from autoshard.mesh import Spec
from tests.cost.few_ops import compiled_for

pytest.importorskip("libtpu")
HEADS: Spec = (("data",), ("model",), (), ())
ROWS: Spec = (("data",), (), ("model",), ())
KEYS: Spec = (("data",), (), (), ())


def softmax(logits: jax.Array, largest: bool) -> jax.Array:
    """As PyTorch writes it."""

    def along(sums: jax.Array) -> jax.Array:
        return lax.broadcast_in_dim(sums, logits.shape, tuple(range(logits.ndim - 1)))

    shifted = logits - along(logits.max(-1)) if largest else logits
    exponentials = jnp.exp(shifted)
    return exponentials / along(exponentials.sum(-1))


def attention(kind: str) -> object:
    """Of queries, keys and values (batch, heads, rows, width)."""

    def forward(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        logits = lax.dot_general(q, k, (((3,), (3,)), ((0, 1), (0, 1)))) * 0.125
        weights = softmax(logits, kind != "no largest")
        if kind == "dropout":
            weights = weights * (logits > 0)
        if kind == "values first":
            return lax.dot_general(v, weights, (((2,), (3,)), ((0, 1), (0, 1))))
        return lax.dot_general(weights, v, (((3,), (2,)), ((0, 1), (0, 1))))

    def trained(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
        made, pull = jax.vjp(forward, q, k, v)
        return (made, *pull(made))

    return trained if kind == "trained" else forward


CASES = [
    ((8, 8, 256, 64), "forward", HEADS, "tpu-v5e:2x4", "f32"),
    ((8, 8, 256, 64), "trained", HEADS, "tpu-v5p:2x2x2", "f32"),
    ((8, 8, 640, 32), "forward", HEADS, "tpu-v5e:2x4", "f32"),
    ((8, 8, 640, 32), "forward", HEADS, "tpu-v6e:2x4", "f32"),
    ((8, 8, 768, 32), "forward", HEADS, "tpu-v6e:2x4", "f32"),
    ((8, 3, 512, 128), "forward", ROWS, "tpu-v5e:2x4", "f32"),
    ((8, 8, 256, 64), "forward", HEADS, "tpu-v4:2x2x1", "f32"),
    ((2, 8, 256, 64), "forward", HEADS, "tpu-v5e:2x4", "f32"),
    ((8, 4, 256, 64), "trained", HEADS, "tpu-v5e:2x4", "f32"),
    ((8, 3, 256, 64), "forward", ROWS, "tpu-v5e:2x4", "f32"),
    ((8, 8, 192, 64), "forward", HEADS, "tpu-v5e:2x4", "f32"),
    ((8, 8, 256, 64), "forward", HEADS, "tpu-v5e:2x4", "bf16"),
    ((8, 8, 256, 64), "forward", HEADS, "tpu-v5e:2x4", "f16"),
    ((8, 8, 256, 64), "dropout", HEADS, "tpu-v5e:2x4", "f32"),
    ((8, 8, 256, 64), "no largest", HEADS, "tpu-v5e:2x4", "f32"),
    ((8, 8, 256, 64), "values first", HEADS, "tpu-v5e:2x4", "f32"),
]
TYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16, "f16": jnp.float16}


@pytest.mark.parametrize(("shape", "kind", "queries", "target", "dtype"), CASES)
def test_a_kernel_of_attention_is_one_where_the_compiler_makes_one(
    shape: tuple[int, ...], kind: str, queries: Spec, target: str, dtype: str
) -> None:
    made: list[object] = [jax.ShapeDtypeStruct(shape, TYPES[dtype])] * 3
    keys = HEADS if queries == HEADS else KEYS
    report, compiled = compiled_for(target, attention(kind), made, [queries, keys, keys])
    said = [step for step in report.prediction.compiled.program.steps if step.kind == ATTENTION]
    found = re.findall(r' custom-call\(.*op_name="online-softmax"', compiled.hlo_text)
    assert len(said) == len(found)
    assert report.fidelity.value == 0
    assert report.judged.flops == pytest.approx(report.prediction.compiled.flops, rel=0.01)


def test_values_are_copied_for_it_and_its_result_is() -> None:
    made: list[object] = [jax.ShapeDtypeStruct((8, 8, 256, 64), jnp.float32)] * 3
    report, _ = compiled_for("tpu-v5e:2x4", attention("forward"), made, [HEADS] * 3)
    steps = report.prediction.compiled.program.steps
    (one,) = [number for number, step in enumerate(steps) if step.kind == ATTENTION]
    assert [steps[one - 1].kind, steps[one + 1].kind] == ["copy", "copy"]


def plain_product(weigh_first: bool) -> object:
    """A softmax times values, and its logits times the same, in either order."""

    def both(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
        logits = lax.dot_general(q, k, (((3,), (3,)), ((0, 1), (0, 1)))) * 0.125
        read = [softmax(logits, True), logits] if weigh_first else [logits, softmax(logits, True)]
        return tuple(lax.dot_general(each, v, (((3,), (2,)), ((0, 1), (0, 1)))) for each in read)

    return both


@pytest.mark.parametrize("weigh_first", [False, True])
def test_it_and_a_plain_product_of_the_same_are_two(weigh_first: bool) -> None:
    made: list[object] = [jax.ShapeDtypeStruct((8, 8, 256, 64), jnp.float32)] * 3
    report, _ = compiled_for("tpu-v5e:2x4", plain_product(weigh_first), made, [HEADS] * 3)
    kinds = [step.kind for step in report.prediction.compiled.program.steps]
    assert (kinds.count(ATTENTION), kinds.count("dot_general")) == (1, 2)
    assert report.judged.flops == pytest.approx(report.prediction.compiled.flops, rel=0.01)


def test_one_whose_values_are_constant_is_a_product() -> None:
    def summed(q: jax.Array, k: jax.Array) -> jax.Array:
        weights = softmax(lax.dot_general(q, k, (((3,), (3,)), ((0, 1), (0, 1)))) * 0.125, True)
        return lax.dot_general(weights, jnp.ones((8, 8, 256, 64)), (((3,), (2,)), ((0, 1), (0, 1))))

    made: list[object] = [jax.ShapeDtypeStruct((8, 8, 256, 64), jnp.float32)] * 2
    report, _ = compiled_for("tpu-v5e:2x4", summed, made, [HEADS] * 2)
    assert all(step.kind != ATTENTION for step in report.prediction.compiled.program.steps)
