"""Kernels of several results, held against the TPU's compiler."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable

import pytest

from autoshard.cost.machine.compute import CONTRACTIONS
from tests.cost.few_ops import compiled_for, f32

pytest.importorskip("libtpu")
jax = pytest.importorskip("jax")
jnp = jax.numpy
ROWS, WHOLE = (("data", "model"), ()), ((), ())
TARGETS = ["tpu-v5e:2x4", "tpu-v5p:2x2x2"]
X, W = f32(4096, 1024), f32(1024, 2048)


def kernels(target: str, function: Callable[..., object], *arguments: object) -> list[Counter[tuple[bool, int]]]:
    """Predicted and compiled, how many kernels there are of each (whether it has a product, number of results).

    Of products and of sums alone; rows of the first argument are split, so that sums over columns need no all-reduce.
    """
    report, compiled = compiled_for(target, function, list(arguments), [ROWS, *[WHOLE] * (len(arguments) - 1)])
    program = report.prediction.compiled.program
    said: Counter[tuple[bool, int]] = Counter()
    for kernel in report.prediction.compiled.kernels:
        kinds = {program.steps[number].kind for number in kernel.steps}
        if kinds & {*CONTRACTIONS, "reduce"}:
            said[bool(kinds & CONTRACTIONS), len(kernel.writes)] += 1
    bodies = {part.split(" ", 1)[0]: part for part in re.split(r"\n\n%", compiled.hlo_text)}
    found: Counter[tuple[bool, int]] = Counter()
    for results, name in re.findall(r"= (.*?) fusion\(.*?calls=%([\w.\-]+)", compiled.hlo_text.split("\nENTRY")[1]):
        body = bodies[name]
        if " convolution(" in body or " reduce(" in body:
            found[" convolution(" in body, len(re.findall(r"\w+\[[\d,]*\]", results))] += 1
    return [said, found]


def sums(x: jax.Array, w: jax.Array) -> tuple[jax.Array, ...]:
    y = x @ w
    return y, y.sum(1), (y * y).sum(1)


def gelu(x: jax.Array, w: jax.Array) -> tuple[jax.Array, ...]:
    y = x @ w
    t = jnp.tanh(y)
    return y * t, y * (1 - t * t)


def loop(x: jax.Array, y: jax.Array) -> tuple[jax.Array, ...]:
    z = jnp.tanh(x) + y
    return z, z.sum(1)


def siblings(x: jax.Array, y: jax.Array) -> tuple[jax.Array, ...]:
    return (jnp.tanh(x) * y).sum(1), jnp.exp(x).sum(1)


def variance(x: jax.Array, y: jax.Array) -> jax.Array:
    z = jnp.tanh(x) + y
    mean = z.mean(1, keepdims=True)
    return ((z - mean) ** 2).sum(1)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("function", "arguments", "expected"),
    [
        (sums, (X, W), {(True, 3): 1}),
        (gelu, (X, W), {(True, 2): 1}),
        (loop, (X, f32(4096, 1024)), {(False, 2): 1}),
        (siblings, (X, f32(4096, 1024)), {(False, 2): 1}),
    ],
    ids=["sums of a product", "loops over a product", "a loop and its sum", "sums of one array"],
)
def test_what_reads_the_result_of_a_kernel_is_part_of_it(target, function, arguments, expected):
    said, found = kernels(target, function, *arguments)
    assert found == expected
    assert said == expected


@pytest.mark.parametrize("target", TARGETS)
def test_a_sum_that_needs_another_is_a_kernel_of_its_own(target):
    said, found = kernels(target, variance, X, f32(4096, 1024))
    assert sum(found.values()) == 2
    assert sum(said.values()) == 2


def test_logits_in_bf16_are_kept_as_they_are_and_widened_by_each_reader() -> None:
    """OPT's training step in bf16: memory 96 % too much under Megatron, traffic 228."""
    words = 32768

    def loss(x: jax.Array, w: jax.Array) -> jax.Array:
        logits = jnp.einsum("bsh,vh->bsv", x, w).astype(jnp.float32)
        return (jax.nn.logsumexp(logits, -1) - logits[..., 0]).sum()

    def step(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax.grad(loss, (0, 1))(x, w)

    arguments = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((4, 1024, 512), (words, 512))]
    report, _ = compiled_for("tpu-v5e:2x4", step, arguments, [((), (), ()), ((), ())])
    made = [
        report.prediction.compiled.program.arrays[array]
        for k in report.prediction.compiled.kernels
        for array in k.writes
    ]
    assert {array.dtype for array in made if array.elements == 4 * 1024 * words} == {"bf16"}
    assert report.prediction.peak_memory_bytes == pytest.approx(report.memory_bytes, rel=0.05)
