"""What compilers write in another way before they propagate shardings."""

from __future__ import annotations

import pytest

from autoshard.cost.partitioner.passes.simplify import simplified
from autoshard.graph.ops import Value
from tests.graph.helpers import graph_of, only

jax = pytest.importorskip("jax")
jnp = jax.numpy


def f32(*shape: int) -> object:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def written(x: object, part: object) -> object:
    """What a slice's gradient is: zeros with a part at a known place."""
    return x * jax.lax.dynamic_update_slice(jnp.zeros_like(x), jnp.tanh(part), (0, 3))


def test_a_part_written_into_zeros_is_padded() -> None:
    graph = graph_of(written, f32(8, 16), f32(8, 4))
    update = only(graph, "dynamic_update_slice")
    for target in ("tpu", "gpu"):
        found = simplified(graph, target)
        pad = found.ops[update.id]
        assert pad.kind == "pad"
        assert pad.operands == (Value(only(graph, "tanh").id),)
        assert pad.attrs == {"low": (0, 3), "high": (0, 9), "interior": (0, 0)}
        assert pad.results == update.results
        assert list(found.nx.predecessors(pad.id)) == [only(graph, "tanh").id]
        assert [op for op in found.ops if op.id != pad.id] == [op for op in graph.ops if op.id != pad.id]
    assert update.kind == "dynamic_update_slice"  # the program's own graph is left as it is
    assert list(graph.nx.predecessors(update.id)) != [only(graph, "tanh").id]


def test_the_compiler_of_cpus_partitions_the_update() -> None:
    graph = graph_of(written, f32(8, 16), f32(8, 4))
    assert simplified(graph, "cpu") is graph


def onto_values(x: object, part: object) -> object:
    return jax.lax.dynamic_update_slice(jnp.tanh(x), part, (0, 3))


def anywhere(x: object, part: object) -> object:
    return jax.lax.dynamic_update_slice(jnp.zeros_like(x), part, (0, jnp.int32(part[0, 0])))


def beyond_the_end(x: object, part: object) -> object:
    """The start is clamped when it runs: no padding could be negative."""
    return jax.lax.dynamic_update_slice(jnp.zeros_like(x), part, (jnp.int32(0), jnp.int32(14)))


@pytest.mark.parametrize("function", [onto_values, anywhere, beyond_the_end])
def test_other_updates_are_left(function: object) -> None:
    graph = graph_of(function, f32(8, 16), f32(8, 4))
    assert simplified(graph, "tpu") is graph
