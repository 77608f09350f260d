import jax
import jax.numpy as jnp

from autoshard.graph.ops import Value
from tests.graph.helpers import graph_of, only


def array(*shape: int):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def test_what_reads_a_value_and_what_flows_to_an_op():
    graph = graph_of(lambda x, y: (jnp.exp(x) * jnp.exp(x), y + 1), array(4, 8), array(4, 8))
    x, y = map(Value, graph.arguments)
    product, plus = only(graph, "multiply"), only(graph, "add")
    assert {op.kind for op in graph.readers(x)} == {"exponential"}
    assert [op.id for op in graph.readers(x)] == sorted({op.id for op in graph.readers(x)})
    assert graph.readers(y) == (plus,)
    assert graph.readers(Value(product.id)) == ()
    assert graph.is_read(Value(product.id))
    assert graph.leading_to([product.id]) == {x.op, product.id, *(value.op for value in product.operands)}
    assert y.op in graph.leading_to([plus.id, product.id])


def test_an_operand_twice_is_two_uses_and_one_reader():
    graph = graph_of(lambda x: x * x, array(4, 8))
    (value,) = map(Value, graph.arguments)
    assert graph.readers(value) == (only(graph, "multiply"),)
    assert graph.uses(value) == 2
