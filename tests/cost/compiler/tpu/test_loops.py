"""Products that libtpu runs as loops of permutes: what they hold in memory beside arguments and results."""

from __future__ import annotations

import pytest

from autoshard.mesh import Spec
from tests.cost.few_ops import compiled_for, f32

pytest.importorskip("libtpu")
jax = pytest.importorskip("jax")
jnp = jax.numpy
ALL = ("data", "model")
ROWS: Spec = (ALL, ())
COLUMNS: Spec = ((), ALL)


def step(a: object, x: object, w: object) -> object:
    return a - x @ w


@pytest.mark.parametrize("target", ["tpu-v5e:2x4", "tpu-v5p:2x2x2"])
@pytest.mark.parametrize(
    ("sizes", "x", "w"),
    [
        ((4096, 131072, 4096), COLUMNS, ROWS),  # partial sums go round
        ((131072, 4096, 4096), ROWS, ROWS),  # rows of the weight, which are contracted: results are added up
        ((131072, 4096, 4096), ROWS, COLUMNS),  # its columns: results are written side by side
        ((131072, 8192, 8192), ROWS, COLUMNS),
    ],
    ids=["partial sums", "rows", "columns", "more columns"],
)
def test_a_loop_holds_copies_of_its_operands_and_the_parts_that_go_round(
    target: str, sizes: tuple[int, int, int], x: Spec, w: Spec
) -> None:
    rows, inner, columns = sizes
    arguments = [f32(rows, columns), f32(rows, inner), f32(inner, columns)]
    report, compiled = compiled_for(target, step, arguments, [ROWS, x, w])
    assert " while(" in compiled.hlo_text
    assert report.fidelity.value == 0.0
    copied = rows * inner // 8 * 2 + (inner * columns // 8 * 2 if x is COLUMNS else 0)
    assert compiled.memory.temp > copied
    assert report.prediction.peak_memory_bytes == pytest.approx(report.memory_bytes, rel=0.03)


@pytest.mark.parametrize("sizes", [(4096, 30522, 3072), (8192, 131072, 768)])
def test_among_four_devices_a_loop_is_none_and_holds_nothing(sizes: tuple[int, int, int]) -> None:
    """Copies of its operands were predicted: +46 and +49 %."""
    rows, inner, columns = sizes
    arguments = [f32(rows, columns), f32(rows, inner), f32(inner, columns)]
    specs = [(("data",), ("model",)), (("data",), ("model",)), (("model",), ())]
    report, compiled = compiled_for("tpu-v5e:2x4", step, arguments, specs)
    assert " while(" not in compiled.hlo_text
    assert {row.kind for row in report.fidelity.rows} == {"collective-permute"}
    assert report.fidelity.value == 0.0
    assert report.prediction.peak_memory_bytes == pytest.approx(report.memory_bytes, rel=0.01)


def checkpointed(*arguments: object) -> object:
    """One update of six blocks of two products, each recomputed."""
    *weights, x, wanted = arguments
    half = len(weights) // 2

    def block(x: object, up: object, down: object) -> object:
        return x + jax.nn.relu(x @ up) @ down

    def loss(*weights: object) -> object:
        hidden = x
        for up, down in zip(weights[:half], weights[half:], strict=True):
            hidden = jax.checkpoint(block)(hidden, up, down)
        return ((hidden - wanted) ** 2).mean()

    gradients = jax.grad(loss, argnums=tuple(range(len(weights))))(*weights)
    return tuple(w - (0.1 * g).astype(w.dtype) for w, g in zip(weights, gradients, strict=True))


def test_loops_of_gradients_of_weights_wait_behind_the_backward_pass() -> None:
    """No more than five permutes are in flight, and a loop has two: -62 % of the memory without it."""
    types = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in [(2048, 8192)] * 6 + [(8192, 2048)] * 6]
    types += [jax.ShapeDtypeStruct((131072, 2048), jnp.bfloat16)] * 2
    report, compiled = compiled_for(
        "tpu-v5p:2x2x2", checkpointed, types, [ROWS] * 14, updates={number: number for number in range(12)}
    )
    assert " while(" in compiled.hlo_text
    assert report.fidelity.value == 0.0
    assert report.prediction.peak_memory_bytes == pytest.approx(report.memory_bytes, rel=0.05)


def network(*arguments: object) -> object:
    """One update of eight layers of one product, whose results are kept for the backward pass."""
    *weights, x, wanted = arguments

    def loss(*weights: object) -> object:
        hidden = x
        for weight in weights[:-1]:
            hidden = jnp.tanh(hidden @ weight)
        return ((hidden @ weights[-1] - wanted) ** 2).mean()

    gradients = jax.grad(loss, argnums=tuple(range(len(weights))))(*weights)
    return tuple(w - (0.1 * g).astype(w.dtype) for w, g in zip(weights, gradients, strict=True))


def test_what_a_loop_slices_is_stored_in_two_layouts_where_others_read_it() -> None:
    """Of partial sums, on v5e: -44 % without it."""
    types = [jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)] * 8
    types += [jax.ShapeDtypeStruct((131072, 4096), jnp.bfloat16)] * 2
    report, _ = compiled_for(
        "tpu-v5e:2x4", network, types, [ROWS] * 10, updates={number: number for number in range(8)}
    )
    assert report.prediction.peak_memory_bytes == pytest.approx(report.memory_bytes, rel=0.12)
