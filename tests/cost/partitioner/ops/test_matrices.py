"""What a product multiplies on one device: batch, m, n and k, whatever arrays its operands lie in."""

from __future__ import annotations

import math
import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.cost.compiler.lowered import Lowered, Step, matrices_of
from autoshard.cost.compiler.work import replicated_program
from autoshard.cost.machine.compute import op_flops
from autoshard.cost.machine.device import load_device
from autoshard.cost.predict import predict
from autoshard.graph.annotations import Annotations
from autoshard.graph.ops import Graph, Value
from autoshard.mesh import Mesh, Spec
from tests.cost.few_ops import f32
from tests.graph.helpers import graph_of

jax = pytest.importorskip("jax")
jnp, lax = jax.numpy, jax.lax
DEVICES = ["cpu", "h100", "tpu-v5e"]
MESH = Mesh((2, 4), ("data", "model"))


def products(program: Lowered) -> list[Step]:
    return [step for step in program.steps if step.kind == "dot_general"]


def whole(graph: Graph) -> list[tuple[int, int, int, int]]:
    program = replicated_program(graph, MESH, load_device("h100"))
    return [tuple(matrices_of(program, step)) for step in products(program)]


def test_operands_are_read_as_views_of_another_shape() -> None:
    """Queries and keys of an attention lie as the projection made them: (8, 64, 32), where heads are a dim."""

    def scores(x: jax.Array, w: jax.Array) -> jax.Array:
        q, k = ((x @ w).reshape(8, 64, 4, 8) for _ in range(2))
        return jnp.einsum("bqhd,bkhd->bhqk", q, k)

    def chunks(x: jax.Array, w: jax.Array) -> jax.Array:
        q, k = ((x @ w).reshape(8, 4, 16, 4, 8) for _ in range(2))
        return jnp.einsum("bnchk,bnshk->bnhcs", q, k)

    assert whole(graph_of(scores, f32(8, 64, 32), f32(32, 32)))[-1] == (8 * 4, 64, 64, 8)
    assert whole(graph_of(chunks, f32(8, 64, 32), f32(32, 32)))[-1] == (8 * 4 * 4, 16, 16, 8)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("spec", [(("data",), (), ()), ((), ("data", "model"), ()), (("data",), (), ("model",))])
def test_views_that_are_split_are_predicted(device: str, spec: Spec) -> None:
    """Products of views of every rank, with one dim or none that they share."""

    def views(x: jax.Array, w: jax.Array) -> tuple[jax.Array, ...]:
        y = jnp.tanh(x @ w)
        a, b = y.reshape(8, 4, 16, 4, 8), jnp.sin(y).reshape(512, 32)
        return (
            jnp.einsum("bnchk,bnshk->bnhcs", a, jnp.cos(y).reshape(8, 4, 16, 4, 8)),
            b.T @ jnp.cos(y).reshape(512, 32),
            jnp.einsum("abc,abc->ab", y.reshape(64, 8, 32), jnp.sin(y).reshape(64, 8, 32)),
            jnp.tensordot(a, w.reshape(4, 8, 4, 8), ((3, 4), (0, 1))),
        )

    graph = graph_of(views, f32(8, 64, 32), f32(32, 32))
    pinned = Annotations({Value(graph.arguments[0]): spec})
    assert predict(graph, pinned, Mesh(MESH.shape, MESH.axis_names, device), load_device(device)).step_time_s > 0


@st.composite
def einsums(draw: st.DrawFn) -> tuple[str, dict[str, int], list[str]]:
    """An equation of two operands, the size of each dim, and the letters of batch, rows, columns and contraction."""
    counts = [draw(st.integers(0, 2)) for _ in range(4)]
    letters = iter(string.ascii_lowercase)
    kinds = ["".join(next(letters) for _ in range(count)) for count in counts]
    batch, rows, columns, contracted = kinds
    lhs, rhs = (
        "".join(draw(st.permutations(own))) for own in (batch + rows + contracted, batch + columns + contracted)
    )
    sizes = {letter: draw(st.sampled_from([1, 2, 8, 16])) for letter in "".join(kinds)}
    return f"{lhs},{rhs}->{batch}{rows}{columns}", sizes, kinds


@settings(max_examples=40, deadline=None)
@given(einsums(), st.data())
def test_they_are_the_op_s_own_whatever_it_reads(
    drawn: tuple[str, dict[str, int], list[str]], data: st.DataObject
) -> None:
    """Operands are views of flat arrays; whole and split, the FLOPs are those of the op, and of its share."""
    equation, sizes, kinds = drawn
    lhs, rhs = ([sizes[letter] for letter in side] for side in equation.split("->")[0].split(","))

    def product(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.einsum(equation, jnp.sin(x).reshape(lhs), jnp.cos(y).reshape(rhs))

    graph = graph_of(product, f32(math.prod(lhs)), f32(math.prod(rhs)))
    dots = [op for op in graph.ops if op.kind == "dot_general"]
    if len(dots) != 1:  # an outer product of nothing shared is a broadcast
        return
    batch, m, n, k = (math.prod(sizes[letter] for letter in kind) for kind in kinds)
    assert whole(graph) in ([(batch, m, n, k)], [(batch, n, m, k)])  # jax may swap the operands
    assert op_flops(dots[0], graph) == 2 * batch * m * n * k
    device = data.draw(st.sampled_from(DEVICES))
    axes = data.draw(st.sampled_from([(), ("data",), ("model",), ("data", "model")]))
    split = Annotations({Value(graph.arguments[0]): (axes,)} if lhs and math.prod(lhs) % 8 == 0 else {})
    found = predict(graph, split, Mesh(MESH.shape, MESH.axis_names, device), load_device(device))
    for step in products(found.compiled.program):
        assert step.flops == 2 * math.prod(matrices_of(found.compiled.program, step))
