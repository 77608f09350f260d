"""Fusion groups: what shares a kernel, and that the graph of groups stays acyclic."""

from __future__ import annotations

import pytest

from autoshard.graph.groups import fusion_groups
from autoshard.graph.ops import Graph
from tests.graph.helpers import graph_of

jax = pytest.importorskip("jax")
jnp = jax.numpy


def array(*shape: int):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def block(x, first, second):
    """Two linear layers, a normalisation and a residual."""
    hidden = jnp.tanh(x @ first) * 2.0
    out = hidden @ second
    centred = out - out.mean(-1, keepdims=True)
    return centred / jnp.sqrt((centred * centred).mean(-1, keepdims=True) + 1e-5) + x


@pytest.fixture(scope="module")
def graph() -> Graph:
    return graph_of(block, array(32, 16), array(16, 64), array(64, 16))


def kinds(graph: Graph) -> list[list[str]]:
    return [[graph.ops[op].kind for op in group.ops] for group in fusion_groups(graph).groups]


def test_a_dot_is_a_group_of_its_own_and_elementwise_chains_share_one(graph: Graph):
    found = kinds(graph)
    assert found[0] == ["dot_general"]
    assert set(found[1]) == {"tanh", "multiply"}
    assert found[2] == ["dot_general"]
    assert len(found) == 4
    assert found[3].count("reduce") == 2


def test_every_op_that_computes_is_in_one_group(graph: Graph):
    groups = fusion_groups(graph)
    members = [op for group in groups.groups for op in group.ops]
    assert len(members) == len(set(members))
    assert set(members) == {op.id for op in graph.ops if op.kind != "argument" and op.id not in groups.free}


def test_groups_come_in_the_order_of_data_flow(graph: Graph):
    made = set(graph.arguments)
    for group in fusion_groups(graph).groups:
        assert {value.op for value in group.inputs} <= made
        made |= {value.op for value in group.outputs}


def test_a_value_that_a_later_group_reads_leaves_its_group():
    def forward_and_backward(x, weight):
        scaled = jnp.exp(x)
        return scaled @ weight, scaled * 3.0

    graph = graph_of(forward_and_backward, array(8, 4), array(4, 4))
    groups = fusion_groups(graph).groups
    exponential = next(op.id for op in graph.ops if op.kind == "exponential")
    assert [value.op for value in groups[0].outputs] == [exponential]


def test_a_reader_that_could_lead_back_keeps_ops_apart():
    """x feeds a dot and, beside it, an add of the dot's result: one kernel of both would wait for itself."""

    def diamond(x, weight):
        scaled = jnp.exp(x)
        return scaled + scaled @ weight

    graph = graph_of(diamond, array(4, 4), array(4, 4))
    assert kinds(graph) == [["exponential"], ["dot_general"], ["add"]]


def test_what_follows_from_constants_is_free():
    graph = graph_of(lambda x: x + jnp.arange(4.0)[None, :] * 2.0, array(3, 4))
    groups = fusion_groups(graph)
    assert {graph.ops[op].kind for op in groups.free} >= {"iota"}
    assert all(value.op not in groups.free for group in groups.groups for value in group.inputs)


def test_what_a_barrier_passes_on_is_a_group_each():
    def passed(x, y, z):
        first, second, _ = jax.lax.optimization_barrier((jnp.tanh(x), y, z))
        return jnp.exp(first), second

    graph = graph_of(passed, array(8, 4), array(4, 4), array(2, 2))
    assert kinds(graph) == [["tanh"], ["optimization_barrier"], ["optimization_barrier"], ["exponential"]]
    groups = fusion_groups(graph)
    assert [(group.operand_number, graph.type_of(group.inputs[0]).shape) for group in groups.groups[1:3]] == [
        (0, (8, 4)),
        (1, (4, 4)),
    ]
    assert [groups.maker(value) for group in groups.groups for value in group.outputs] == [0, 1, 2, 3]


def test_the_sum_of_two_losses_does_not_join_their_groups():
    """A head for the next token and one for the token after it: their logits may be split differently."""

    def losses(x, one, two):
        near, far = x @ one, jnp.tanh(x) @ two
        return (near - near.max(-1, keepdims=True)).sum() + 0.3 * (far - far.max(-1, keepdims=True)).sum()

    graph = graph_of(losses, array(64, 32), array(32, 128), array(32, 128))
    groups = fusion_groups(graph)
    maxima = [op.id for op in graph.ops if op.kind == "reduce" and len(op.results[0].shape) == 1]
    assert len({groups.of[op] for op in maxima}) == 2
