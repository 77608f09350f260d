"""What XLA's GPU compiler keeps in memory, on programs of a few ops compiled for 8 H100."""

from __future__ import annotations

import pytest

from autoshard.graph.annotations import Annotations
from autoshard.graph.ops import Value
from autoshard.lower.stablehlo import annotate
from autoshard.mesh import Mesh, Spec
from autoshard.verify.check import VerifyReport, compare_compiled
from autoshard.verify.targets import parse_target
from tests.graph.helpers import graph_of

pytest.importorskip("jax_plugins.xla_cuda12")
jax = pytest.importorskip("jax")
jnp = jax.numpy
MESH = Mesh((2, 4), ("data", "model"), device="h100")
ALL = ("data", "model")


def f32(*shape: int) -> object:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def ids(*shape: int) -> object:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def compiled(function: object, arguments: list[object], specs: list[Spec]) -> VerifyReport:
    graph = graph_of(function, *arguments)
    annotations = Annotations({Value(op): spec for op, spec in zip(graph.arguments, specs, strict=True)})
    module = annotate(graph.program, graph, annotations, MESH)
    return compare_compiled(graph, annotations, MESH, parse_target("h100:8"), module)[0]


def tied(table: object, i: object, u: object, x: object, y: object) -> object:
    """A table that is embedding and head: the gradient of its rows beside that of a product."""
    rows = jnp.zeros_like(table).at[i].add(jnp.tanh(u), mode="promise_in_bounds")
    return table - 0.1 * (jnp.einsum("tv,td->vd", y, x) + rows)


@pytest.mark.parametrize(
    "specs",
    [
        [((), ()), ((),), ((), ()), ((), ()), ((), ())],
        [
            ((), ()),
            (ALL,),
            (ALL, ()),
            (ALL, ()),
            (ALL, ()),
        ],  # both gradients are summed over devices, the product's first
        [(("model",), ()), (("data",),), (("data",), ()), (("data",), ()), (("data",), ("model",))],
    ],
)
def test_rows_are_scattered_onto_the_gradient_that_they_are_added_to(specs: list[Spec]) -> None:
    report = compiled(tied, [f32(4096, 256), ids(512), f32(512, 256), f32(512, 256), f32(512, 4096)], specs)
    assert report.prediction.peak_memory_bytes == pytest.approx(report.memory_bytes, rel=0.002)
    assert report.prediction.compiled.temporary_bytes == 0  # all is done in the result's buffer
