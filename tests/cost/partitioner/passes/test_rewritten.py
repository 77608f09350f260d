"""Products and sums of what is reshaped, and masks of ReLUs, held against what compilers make of them."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest

from autoshard.cost.machine.device import load_device
from autoshard.cost.partitioner.passes.rewritten import rewritten
from autoshard.cost.predict import predict
from autoshard.graph.annotations import Annotations
from autoshard.graph.ops import Value
from autoshard.mesh import Mesh, Spec
from autoshard.verify.targets import TargetError, parse_target
from tests.cost.few_ops import compiled_for, f32
from tests.graph.helpers import graph_of

BOTH = ("data", "model")
SEQUENCE, BATCH, WIDTH = 64, 16, 256
FIRST = (SEQUENCE, BATCH, WIDTH)
"""An array with the sequence first, of which the batch is split."""
SPLIT: Spec = ((), BOTH, ())


def rows(x: jax.Array) -> jax.Array:
    return x.reshape(-1, x.shape[-1])


def linear(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.tanh((rows(x) @ w).reshape(FIRST))


def heads(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.tanh((rows(x) @ w).reshape(SEQUENCE, BATCH, 4, 64))


def regrouped(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.tanh((rows(x) @ w).reshape(2 * SEQUENCE, BATCH // 2, WIDTH))


def read_twice(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
    made = rows(x) @ w
    return jnp.tanh(made.reshape(FIRST)), jnp.exp(made)


def with_rows(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
    return heads(x, w), jnp.sin(rows(x))


def gradient(x: jax.Array, y: jax.Array) -> jax.Array:
    return rows(x).T @ rows(y)


def gradient_of_others(x: jax.Array, y: jax.Array) -> jax.Array:
    return rows(x).T @ y


def sums(x: jax.Array) -> jax.Array:
    return jnp.sum(rows(x), 0)


def bias(x: jax.Array) -> jax.Array:
    return jnp.sum(x.reshape(SEQUENCE, BATCH * WIDTH), 0).reshape(1, -1)


def greatest(x: jax.Array) -> jax.Array:
    return jnp.max(rows(x), 0)


WEIGHT: tuple[tuple[int, ...], Spec] = ((WIDTH, WIDTH), (BOTH, ()))
IMAGES: tuple[tuple[int, ...], Spec] = (FIRST, SPLIT)


@pytest.mark.parametrize("target", ["tpu-v5e:2x4", "h100:8", "cpu:8"])
@pytest.mark.parametrize(
    ("function", "second"),
    [
        (linear, WEIGHT),
        (heads, WEIGHT),
        (regrouped, WEIGHT),
        (read_twice, WEIGHT),
        (with_rows, WEIGHT),
        (gradient, IMAGES),
        (gradient_of_others, ((SEQUENCE * BATCH, WIDTH), (BOTH, ()))),
        (sums, None),
        (greatest, None),
        (bias, None),
    ],
)
def test_collectives_are_as_compiled(
    target: str, function: Callable[..., object], second: tuple[tuple[int, ...], Spec] | None
) -> None:
    # Predicted on rows, which hold no sharding of the batch, a TPU's gathers were up to 35 times those compiled.
    try:
        parse_target(target, 8).packages()
    except TargetError as error:
        pytest.skip(str(error))
    given = [IMAGES, *([] if second is None else [second])]
    report, _ = compiled_for(target, function, [f32(*shape) for shape, _ in given], [spec for _, spec in given])
    assert report.fidelity.value < 0.01


def test_what_is_not_made_any_more_has_a_sharding_all_the_same() -> None:
    graph = graph_of(heads, f32(*FIRST), f32(*WEIGHT[0]))
    mesh = Mesh((2, 4), BOTH, device="tpu-v5e")
    specs = [SPLIT, WEIGHT[1]]
    annotations = Annotations({Value(op): spec for op, spec in zip(graph.arguments, specs, strict=True)})
    (product,) = [op for op in graph.ops if op.kind == "dot_general"]
    changed, apart = rewritten(graph, annotations, "tpu")
    assert [op.kind for op in changed.ops if op.kind == "dot_general"] == ["dot_general"]
    assert changed.ops[product.id].kind == "reshape"
    assert Value(product.id) in apart
    found = predict(graph, annotations, mesh, load_device("tpu-v5e")).specs
    made = [Value(op.id, result) for op in graph.ops for result in range(len(op.results))]
    assert {value: len(spec) for value, spec in found.items()} == {
        value: len(graph.type_of(value).shape) for value in made
    }


def test_annotated_products_and_those_that_undo_moves_stay() -> None:
    def undone(x: jax.Array, w: jax.Array) -> jax.Array:
        made = jnp.tanh(2 * (x @ w).reshape(FIRST).transpose(1, 0, 2)).transpose(1, 0, 2)
        return (rows(made) @ w).reshape(FIRST)

    graph = graph_of(undone, f32(SEQUENCE * BATCH, WIDTH), f32(WIDTH, WIDTH))
    assert rewritten(graph, Annotations(), "tpu") == (graph, {})
    graph = graph_of(linear, f32(*FIRST), f32(*WEIGHT[0]))
    (product,) = [Value(op.id) for op in graph.ops if op.kind == "dot_general"]
    assert rewritten(graph, Annotations({product: ((), ())}), "tpu") == (graph, {})


@pytest.mark.parametrize("target", ["tpu-v5e:2x4", "h100:8"])
@pytest.mark.parametrize("mask", [lambda made: made > 0, lambda made: jnp.less(0.0, made), lambda made: made > 1])
def test_the_mask_of_a_relu_splits_its_result_on_gpu_alone(target: str, mask: Callable[[jax.Array], jax.Array]) -> None:
    try:
        parse_target(target, 8).packages()
    except TargetError as error:
        pytest.skip(str(error))

    def passes(x: jax.Array, w: jax.Array, g: jax.Array) -> tuple[jax.Array, jax.Array]:
        made = jnp.maximum(x, 0.0)
        return made @ w, jnp.where(mask(made), g, 0.0)

    specs: list[Spec] = [(("data",), ()), ((), ()), (("data",), ("model",))]
    report, _ = compiled_for(target, passes, [f32(512, 512), f32(512, 128), f32(512, 512)], specs)
    assert report.fidelity.value == 0


def test_a_weight_and_its_transpose_are_gathered_once() -> None:
    # The loops of permutes that each alone would be are not made for two readers (a chain of products: 66 off).
    pytest.importorskip("libtpu")

    def chain(x: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        return x - 0.1 * jax.grad(lambda x: jnp.sum((x @ a @ b) ** 2))(x)

    def transposed(x: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        made = jnp.tanh(x @ a) @ b
        return made @ jnp.transpose(b) @ jnp.transpose(a)

    specs: list[Spec] = [(BOTH, ())] * 3
    for function in (chain, transposed):
        report, _ = compiled_for("tpu-v5e:2x4", function, [f32(16384, 1024), f32(1024, 1024), f32(1024, 1024)], specs)
        assert report.fidelity.value == 0
        assert {one.kind for one in report.prediction.collectives} == {"all-gather"}


def weighted(gates: jax.Array, x: jax.Array) -> jax.Array:
    """Each row times each of its gates: a product over a dim of one element, as einsums over experts have it."""
    return jax.lax.dot_general(gates[:, :, None], x[:, None, :], (((2,), (1,)), ((0,), (0,))))


def experts(gates: jax.Array, x: jax.Array, w: jax.Array) -> jax.Array:
    """The weighted rows times each expert's matrix."""
    return jax.lax.dot_general(jnp.transpose(weighted(gates, x), (1, 0, 2)), w, (((2,), (1,)), ((0,), (0,))))


def weighted_alone(gates: jax.Array, x: jax.Array, _: jax.Array) -> jax.Array:
    return weighted(gates, x)


@pytest.mark.parametrize("target", ["tpu-v5e:2x4", "h100:8", "cpu:8"])
@pytest.mark.parametrize(
    ("function", "specs"),
    [
        (experts, [(BOTH, ()), (BOTH, ()), (BOTH, (), ())]),
        (experts, [(BOTH, ()), (BOTH, ()), ((), BOTH, ())]),
        (weighted_alone, [((), BOTH), (("data",), ("model",)), ((), (), ())]),
        (weighted_alone, [(BOTH, ()), ((), ()), ((), (), ())]),
    ],
)
def test_an_outer_product_is_as_its_user_is(target: str, function: Callable[..., jax.Array], specs: list[Spec]) -> None:
    """It is broadcasts, multiplied: compilers of GPUs and TPUs pass shardings through broadcasts last."""
    try:
        report, _ = compiled_for(target, function, [f32(256, 8), f32(256, 128), f32(8, 128, 64)], specs)
    except TargetError as error:
        pytest.skip(str(error))
    assert report.fidelity.value == 0
