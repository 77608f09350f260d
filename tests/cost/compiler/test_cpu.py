"""What XLA's CPU compiler runs as one kernel, as read off its optimized programs."""

from __future__ import annotations

import pytest

from autoshard.cost.compiler.backend import Compiled
from autoshard.cost.compiler.kernels import Kernel
from autoshard.cost.predict import predict
from autoshard.graph.annotations import Annotations
from autoshard.mesh import Mesh
from tests.graph.helpers import graph_of

jax = pytest.importorskip("jax")
jnp = jax.numpy
MESH = Mesh((2, 4), ("data", "model"), device="cpu")


def f32(*shape: int) -> object:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def predicted(function: object, *arguments: object) -> Compiled:
    return predict(graph_of(function, *arguments), Annotations({}), MESH).compiled


def kinds(compiled: Compiled, kernel: Kernel) -> list[str]:
    return [compiled.program.steps[number].kind for number in kernel.steps]


def test_an_outer_product_is_a_loop_that_makes_its_operands_again() -> None:
    """What a product keeps of `x * g` does not hold the loop back: both are ready at once."""

    def experts(x: object, g: object, y: object, w: object) -> object:
        scaled = x * g
        return scaled @ w, jnp.einsum("ti,tj->tij", scaled, y)

    found = predicted(experts, f32(64, 32), f32(64, 1), f32(64, 48), f32(32, 16))
    outer = next(kernel for kernel in found.kernels if kernel.flops == 0 and len(kernel.reads) == 3)
    assert kinds(found, outer).count("multiply") == 2
    assert [kernel.kind for kernel in found.kernels].count("dot_general") == 1
    product = next(kernel for kernel in found.kernels if kernel.kind == "dot_general")
    kept = next(kernel for kernel in found.kernels if set(kernel.writes) & set(product.reads))
    assert not set(kept.writes) & set(outer.reads)


def test_a_mean_is_a_sum_alone_and_its_scale_part_of_what_reads_it() -> None:
    def centered(x: object) -> object:
        return x - x.mean(-1, keepdims=True)

    found = predicted(centered, f32(64, 512))
    total, rest = found.kernels
    assert kinds(found, total) == ["reduce"]
    assert "divide" in kinds(found, rest)


def test_what_a_library_kernel_makes_is_in_memory() -> None:
    def turned(x: object, w: object) -> object:
        return (jax.nn.softmax(x, -1) * w).T

    found = predicted(turned, f32(64, 128), f32(128))
    assert len(found.kernels) > 1
    assert not any("reduce" in kinds(found, kernel) for kernel in found.kernels if kernel.kind == "transpose")


def test_a_loop_does_not_write_over_a_product_of_another_shape() -> None:
    """Rows of (batch, position) are one dim of the product: the loop reads it through a reshape."""

    def head(h: object, w: object) -> object:
        return jnp.exp(jnp.einsum("bsd,vd->bsv", h, w)).sum(0) @ w

    three = predicted(head, f32(8, 64, 32), f32(512, 32))
    logits = next(kernel for kernel in three.kernels if kernel.kind == "dot_general").writes[0]
    assert all(logits in kernel.displaced for kernel in three.kernels if logits in kernel.reads)


def test_a_mean_is_scaled_before_it_is_broadcast() -> None:
    """As a norm's gradient has it: the library keeps to the sum, and `x` is read by the loop that follows."""

    def spread(x: object, g: object) -> object:
        scaled = g * x
        return scaled + x - jnp.broadcast_to(scaled.sum(-1)[:, None], x.shape) / 512

    found = predicted(spread, f32(64, 512), f32(64, 512))
    library = next(kernel for kernel in found.kernels if "reduce" in kinds(found, kernel))
    assert [found.program.arrays[array].bytes for array in library.writes] == [4 * 64]
    optimized = jax.jit(spread).lower(f32(64, 512), f32(64, 512)).compile().as_text()
    entry = optimized[optimized.index("ENTRY") :]
    assert "fusion(" in entry
    assert any("f32[64]" in line.split(" = ")[1][:12] for line in entry.splitlines() if "fusion(" in line)
