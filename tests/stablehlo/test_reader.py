"""What the importer makes of a module."""

from __future__ import annotations

import copy
import os
import pickle
from pathlib import Path

import networkx as nx
import numpy as np
import pytest

from autoshard.graph.ops import Value
from autoshard.program import AtenOp, Program, TensorType
from autoshard.stablehlo.reader import build_graph
from tests.graph.helpers import graph_from_text, graph_of, only, program_from_text

jax = pytest.importorskip("jax")
jnp = jax.numpy
lax = jax.lax

MARKED = """
func.func @main(%w: tensor<4x8xf32>, %x: tensor<2x4xf32>, %unused: tensor<3xi64>)
    -> (tensor<2x8xf32>, tensor<4x8xf32>) {
  %0 = stablehlo.dot %x, %w : (tensor<2x4xf32>, tensor<4x8xf32>) -> tensor<2x8xf32> loc("op0.1/aten__mm")
  %1 = stablehlo.custom_call @Sharding(%0) : (tensor<2x8xf32>) -> tensor<2x8xf32> loc("op0.out0")
  %2 = stablehlo.tanh %1 : tensor<2x8xf32> loc("op12.30/aten__tanh"("model.py":7:0))
  %3 = stablehlo.custom_call @Sharding(%2) : (tensor<2x8xf32>) -> tensor<2x8xf32> loc("op12.out0")
  %4 = stablehlo.custom_call @Sharding(%3) : (tensor<2x8xf32>) -> tensor<2x8xf32> loc("op13.out1")
  %5 = stablehlo.custom_call @Sharding(%w) : (tensor<4x8xf32>) -> tensor<4x8xf32> loc("op14.out0")
  %6 = stablehlo.negate %4 : tensor<2x8xf32> loc("op15")
  %7 = stablehlo.custom_call @Sharding(%6) : (tensor<2x8xf32>) -> tensor<2x8xf32> loc("op15.out0")
  return %3, %5 : tensor<2x8xf32>, tensor<4x8xf32>
}
"""


def test_markers_become_aten_outputs() -> None:
    aten = [
        AtenOp(0, "aten.mm.default", "layer.0", "forward", ()),
        AtenOp(12, "aten.tanh.default", "act", "forward", ()),
    ]
    graph = graph_from_text(MARKED, ops=aten)
    dot, tanh = only(graph, "dot_general"), only(graph, "tanh")
    assert "custom_call" not in {op.kind for op in graph.ops}
    assert tanh.operands == (Value(dot.id),)
    assert graph.outputs == (Value(tanh.id), Value(0))
    assert graph.aten_outputs == {
        (0, 0): Value(dot.id),
        (12, 0): Value(tanh.id),
        (13, 1): Value(tanh.id),  # an alias
        (14, 0): Value(0),  # a detached argument
    }  # op15 is dead
    assert (dot.aten, dot.module, tanh.aten, tanh.module) == (0, "layer.0", 12, "act")


NOTHING = """
func.func @main(%x: tensor<2x8xf32>) -> (tensor<2x8xf32>, tensor<8x8xf32>) {
  %0 = stablehlo.tanh %x : tensor<2x8xf32> loc("op0")
  %1 = stablehlo.custom_call @Sharding(%0) : (tensor<2x8xf32>) -> tensor<2x8xf32> loc("op0.out0")
  %2 = stablehlo.broadcast_in_dim %1, dims = [0, 1] : (tensor<2x8xf32>) -> tensor<2x8xf32> loc("op1")
  %3 = stablehlo.transpose %2, dims = [0, 1] : (tensor<2x8xf32>) -> tensor<2x8xf32> loc("op1")
  %4 = stablehlo.concatenate %3, dim = 0 : (tensor<2x8xf32>) -> tensor<2x8xf32> loc("op1")
  %5 = stablehlo.negate %4 : tensor<2x8xf32> loc("op1")
  %6 = stablehlo.custom_call @Sharding(%5) : (tensor<2x8xf32>) -> tensor<2x8xf32> loc("op1.out0")
  %7 = stablehlo.reshape %6 : (tensor<2x8xf32>) -> tensor<2x8xf32> loc("op2")
  %8 = stablehlo.custom_call @Sharding(%7) : (tensor<2x8xf32>) -> tensor<2x8xf32> loc("op2.out0")
  %9 = stablehlo.dot_general %x, %8, contracting_dims = [0] x [0]
    : (tensor<2x8xf32>, tensor<2x8xf32>) -> tensor<8x8xf32>
  %10 = stablehlo.transpose %9, dims = [1, 0] : (tensor<8x8xf32>) -> tensor<8x8xf32> loc("op3")
  return %8, %10 : tensor<2x8xf32>, tensor<8x8xf32>
}
"""


def test_what_changes_nothing_inside_an_aten_op_stands_between_no_values() -> None:
    """But an aten op's own result stays where it can be annotated, and a square transpose is one."""
    graph = graph_from_text(NOTHING, ops=[AtenOp(k, "op", "", "forward", ()) for k in range(4)])
    kinds = [op.kind for op in graph.ops]
    assert kinds == ["argument", "tanh", "negate", "reshape", "dot_general", "transpose"]
    assert graph.ops[2].operands == (Value(1),)
    assert graph.aten_outputs == {(0, 0): Value(1), (1, 0): Value(2), (2, 0): Value(3)}


SCALED = """
func.func @main(%x: tensor<2x8xf32>, %y: tensor<2x8xf32>) -> tensor<2x8xf32> {
  %c = stablehlo.constant dense<1.0> : tensor<f32> loc("op0")
  %b = stablehlo.broadcast_in_dim %c, dims = [] : (tensor<f32>) -> tensor<2x8xf32> loc("op0")
  %0 = stablehlo.multiply %b, %y : tensor<2x8xf32> loc("op0")
  %1 = stablehlo.add %x, %0 : tensor<2x8xf32> loc("op0")
  %2 = stablehlo.convert %1 : tensor<2x8xf32> loc("op0")
  %3 = stablehlo.custom_call @Sharding(%2) : (tensor<2x8xf32>) -> tensor<2x8xf32> loc("op0.out0")
  %4 = stablehlo.multiply %3, %b : tensor<2x8xf32> loc("op1")
  %5 = stablehlo.custom_call @Sharding(%4) : (tensor<2x8xf32>) -> tensor<2x8xf32> loc("op1.out0")
  return %5 : tensor<2x8xf32>
}
"""


def test_products_with_one_inside_an_aten_op_are_what_they_multiply() -> None:
    """So `torch.add(x, y)`, which torch_xla multiplies by its alpha; but one that is asked for can be annotated.

    A conversion of what the same op made is that value: it was a kernel of its own.
    """
    graph = graph_from_text(SCALED, ops=[AtenOp(k, "op", "", "forward", ()) for k in range(2)])
    assert [op.kind for op in graph.ops] == ["argument", "argument", "add", "constant", "broadcast_in_dim", "multiply"]
    assert graph.ops[2].operands == (Value(0), Value(1))
    assert graph.aten_outputs == {(0, 0): Value(2), (1, 0): Value(5)}


def test_what_is_dead_does_not_order_what_is_not() -> None:
    """As XLA: once nothing is dead, each op stands behind those that it reads, the first result's first."""
    graph = graph_from_text("""
      func.func @main(%x: tensor<4xf32>) -> (tensor<4xf32>, tensor<4xf32>) {
        %0 = stablehlo.negate %x : tensor<4xf32>
        %1 = stablehlo.tanh %x : tensor<4xf32>
        %2 = stablehlo.add %0, %1 : tensor<4xf32>
        %3 = stablehlo.exponential %1 : tensor<4xf32>
        return %3, %0 : tensor<4xf32>, tensor<4xf32>
      }""")
    assert [op.kind for op in graph.ops] == ["argument", "tanh", "exponential", "negate"]
    assert graph.outputs == (Value(2), Value(3))


def test_ids_are_arguments_first_then_program_order() -> None:
    graph = graph_from_text(MARKED)
    assert [op.id for op in graph.ops] == list(range(len(graph.ops)))
    assert graph.arguments == (0, 1, 2)  # an unused one too
    assert [graph.ops[i].attrs["index"] for i in graph.arguments] == [0, 1, 2]
    assert graph.type_of(Value(2)) == TensorType((3,), "i64")
    assert all(operand.op < op.id for op in graph.ops for operand in op.operands)


def test_networkx_edges_carry_the_values_that_flow() -> None:
    graph = graph_of(lambda x: lax.sort((x, x * 2.0), num_keys=1), np.zeros(4, np.float32))
    sort = only(graph, "sort")
    assert nx.is_directed_acyclic_graph(graph.nx)
    assert graph.nx.nodes[sort.id]["op"] is sort
    assert graph.nx.edges[0, sort.id]["values"] == (Value(0),)
    edges = {(operand.op, op.id) for op in graph.ops for operand in op.operands}
    assert set(graph.nx.edges) == edges


def test_dead_ops_go_and_calls_are_inlined() -> None:
    @jax.jit
    def inner(x: jax.Array) -> jax.Array:
        jnp.exp(x)  # unused
        return jnp.sin(x)

    graph = graph_of(lambda x: inner(inner(x)), np.zeros((2, 3), np.float32))
    assert [op.kind for op in graph.ops] == ["argument", "sine", "sine"]


def test_an_inlined_op_without_a_label_has_its_callers() -> None:
    graph = graph_from_text("""
      module {
        func.func private @f(%x: tensor<4xf32>) -> tensor<4xf32> {
          %0 = stablehlo.negate %x : tensor<4xf32> loc(unknown)
          return %0 : tensor<4xf32>
        }
        func.func @main(%x: tensor<4xf32>) -> tensor<4xf32> {
          %0 = func.call @f(%x) : (tensor<4xf32>) -> tensor<4xf32> loc("op7")
          return %0 : tensor<4xf32>
        }
      }""")
    assert only(graph, "negate").aten == 7


def test_tuples_are_taken_apart() -> None:
    graph = graph_from_text("""
      func.func @main(%x: tensor<4xf32>) -> (tensor<4xi32>, tensor<4xf32>) {
        %0 = stablehlo.custom_call @two(%x) : (tensor<4xf32>) -> tuple<tensor<4xf32>, tensor<4xi32>>
        %1 = stablehlo.get_tuple_element %0[1] : (tuple<tensor<4xf32>, tensor<4xi32>>) -> tensor<4xi32>
        %2 = stablehlo.tuple %1, %x : tuple<tensor<4xi32>, tensor<4xf32>>
        %3 = stablehlo.get_tuple_element %2[1] : (tuple<tensor<4xi32>, tensor<4xf32>>) -> tensor<4xf32>
        return %1, %3 : tensor<4xi32>, tensor<4xf32>
      }""")
    call = only(graph, "custom_call")
    assert call.attrs["target"] == "two"
    assert call.results == (TensorType((4,), "f32"), TensorType((4,), "i32"))
    assert graph.outputs == (Value(call.id, 1), Value(0))


CONSTANTS = """
func.func @main(%x: tensor<4xf32>) -> tensor<4xf32> {
  %a = stablehlo.constant dense<0.0> : tensor<f32>
  %b = stablehlo.constant dense<-0.0> : tensor<f32>
  %c = stablehlo.constant dense<0.0> : tensor<f32>
  %d = stablehlo.constant dense<[1.0, 2.0, 3.0, 4.0]> : tensor<4xf32>
  %e = stablehlo.constant dense<[1.0, 2.0, 3.0, 5.0]> : tensor<4xf32>
  %0 = stablehlo.broadcast_in_dim %a, dims = [] : (tensor<f32>) -> tensor<4xf32>
  %1 = stablehlo.broadcast_in_dim %b, dims = [] : (tensor<f32>) -> tensor<4xf32>
  %2 = stablehlo.broadcast_in_dim %c, dims = [] : (tensor<f32>) -> tensor<4xf32>
  %3 = stablehlo.add %0, %1 : tensor<4xf32>
  %4 = stablehlo.add %3, %2 : tensor<4xf32>
  %5 = stablehlo.add %4, %d : tensor<4xf32>
  %6 = stablehlo.add %5, %e : tensor<4xf32>
  return %6 : tensor<4xf32>
}
"""


def test_cse_merges_equal_constants_and_nothing_else() -> None:
    program = program_from_text(CONSTANTS)
    plain, merged = build_graph(program), build_graph(program, cse=True)
    values = [op.attrs["value"] for op in plain.ops if op.kind == "constant"]
    assert values == [0.0, -0.0, 0.0, None, None]

    def count(kind: str) -> tuple[int, int]:
        first, second = ([op.kind for op in graph.ops].count(kind) for graph in (plain, merged))
        return first, second

    assert count("constant") == (5, 4)
    assert count("broadcast_in_dim") == (3, 2)
    assert count("add") == (4, 4)


@pytest.mark.parametrize(
    ("function", "reducer"),
    [(lax.add, "add"), (lax.max, "max"), (lax.min, "min"), (lax.mul, "mul"), (lambda a, b: a - b, "other")],
)
def test_reducers_are_read_from_the_region(function: object, reducer: str) -> None:
    graph = graph_of(lambda x, i: lax.reduce(x, i, function, (0,)), np.zeros((4, 2), np.float32), np.float32(0))
    assert only(graph, "reduce").attrs == {"dims": (0,), "reducer": reducer}


def test_a_reducer_is_seen_through_conversions() -> None:
    graph = graph_from_text("""
      func.func @main(%x: tensor<4xbf16>, %i: tensor<bf16>) -> tensor<bf16> {
        %0 = stablehlo.reduce(%x init: %i) across dimensions = [0] : (tensor<4xbf16>, tensor<bf16>) -> tensor<bf16>
          reducer(%a: tensor<bf16>, %b: tensor<bf16>) {
            %1 = stablehlo.convert %a : (tensor<bf16>) -> tensor<f32>
            %2 = stablehlo.convert %b : (tensor<bf16>) -> tensor<f32>
            %3 = stablehlo.add %1, %2 : tensor<f32>
            %4 = stablehlo.convert %3 : (tensor<f32>) -> tensor<bf16>
            stablehlo.return %4 : tensor<bf16>
          }
        return %0 : tensor<bf16>
      }""")
    assert only(graph, "reduce").attrs["reducer"] == "add"


def test_argmax_reduces_by_something_else() -> None:
    graph = graph_of(lambda x: jnp.argmax(x, axis=1), np.zeros((4, 6), np.float32))
    assert only(graph, "reduce").attrs["reducer"] == "other"


def test_scatter_and_gather_attributes() -> None:
    def loss(table: jax.Array, ids: jax.Array) -> jax.Array:
        return jnp.take(table, ids, axis=0, mode="clip").sum()

    graph = graph_of(jax.grad(loss), np.zeros((10, 4), np.float32), np.zeros((2, 3), np.int32))
    attrs = only(graph, "scatter").attrs
    assert attrs["reducer"] == "add"
    assert (attrs["inserted_dims"], attrs["scatter_dims"], attrs["window_dims"]) == ((0,), (0,), (2,))
    graph = graph_of(lambda t, i: jnp.take(t, i, axis=0, mode="clip"), np.zeros((10, 4)), np.zeros((2, 3), np.int32))
    attrs = only(graph, "gather").attrs
    assert (attrs["collapsed_dims"], attrs["start_index_map"], attrs["slice_sizes"]) == ((0,), (0,), (1, 4))
    assert attrs["index_vector_dim"] == 2


def test_convolution_attributes() -> None:
    graph = graph_of(
        lambda x, w: lax.conv_general_dilated(
            x, w, (2, 1), ((1, 2), (0, 0)), dimension_numbers=("NHWC", "HWIO", "NCHW")
        ),
        np.zeros((2, 8, 8, 4), np.float32),
        np.zeros((3, 3, 4, 6), np.float32),
    )
    attrs = only(graph, "convolution").attrs
    assert (attrs["lhs"], attrs["rhs"], attrs["out"]) == ((0, 3, 1, 2), (3, 2, 0, 1), (0, 1, 2, 3))
    assert (attrs["stride"], attrs["padding"]) == ((2, 1), ((1, 2), (0, 0)))
    assert (attrs["feature_groups"], attrs["batch_groups"]) == (1, 1)


def test_loops_have_a_trip_count_and_read_what_their_bodies_capture() -> None:
    graph = graph_of(lambda x, w: lax.fori_loop(0, 5, lambda i, c: c @ w, x), np.zeros((2, 2)), np.ones((2, 2)))
    loop = only(graph, "while")
    assert loop.attrs["trip_count"] == 5
    condition, body = (each.graph for each in loop.attrs["bodies"])
    assert [op.kind for op in body.ops if op.kind == "dot_general"] == ["dot_general"]
    assert [output.updates for output in body.program.outputs] == list(range(len(loop.results)))
    assert len(body.arguments) == len(condition.arguments) == len(loop.operands)
    assert Value(1) in loop.operands
    graph = graph_of(lambda x: lax.while_loop(lambda c: c.sum() < 3, lambda c: c * 2, x), np.ones(4))
    assert only(graph, "while").attrs["trip_count"] is None


def test_every_attribute_can_be_hashed_and_every_op_pickled() -> None:
    def step(x: jax.Array, w: jax.Array) -> jax.Array:
        y = lax.conv_general_dilated(x, w, (1,), [(1, 1)])
        return jnp.argmax(jnp.pad(y, ((0, 0), (0, 0), (1, 0)))[:, ::-1].cumsum(1), axis=0)

    graph = graph_of(step, np.zeros((2, 4, 8), np.float32), np.zeros((4, 4, 3), np.float32))
    for op in graph.ops:
        hash(tuple(op.attrs.items()))
    assert pickle.loads(pickle.dumps(graph.ops)) == graph.ops
    assert copy.deepcopy(graph.ops) == graph.ops


def test_a_module_that_cannot_be_used_is_refused() -> None:
    def build(text: str) -> None:
        build_graph(Program("train", "torch_xla", {}, (), text.encode(), (), (), ()))

    with pytest.raises(ValueError, match="cannot be parsed"):
        build("this is no module")
    with pytest.raises(ValueError, match="no function main, only f"):
        build("func.func @f(%x: tensor<4xf32>) -> tensor<4xf32> { return %x : tensor<4xf32> }")
    with pytest.raises(ValueError, match="shapes that depend on data"):
        build("func.func @main(%x: tensor<?xf32>) -> tensor<?xf32> { return %x : tensor<?xf32> }")


def test_what_is_split_by_hand_is_refused() -> None:
    """XLA ends the process where annotations and manual shardings meet."""
    call = "%y = stablehlo.custom_call @SPMDFullToShardShape(%x) : (tensor<8xf32>) -> tensor<4xf32>"
    with pytest.raises(ValueError, match="split by hand in places"):
        graph_from_text(f"func.func @main(%x: tensor<8xf32>) -> tensor<4xf32> {{ {call} return %y : tensor<4xf32> }}")


def test_the_importer_leaves_jax_and_torch_alone() -> None:
    """It costs jaxlib's MLIR, not the import of jax."""
    import subprocess
    import sys

    code = (
        "import sys; from autoshard.stablehlo.reader import build_graph; from autoshard.program import Program;"
        "text = b'func.func @main(%x: tensor<4xf32>) -> tensor<4xf32> { return %x : tensor<4xf32> }';"
        "build_graph(Program('train', 'torch_xla', {}, (), text, (), (), ()));"
        "print([name for name in ('jax', 'torch') if name in sys.modules])"
    )
    root = Path(__file__).parents[2]
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=root, env=os.environ, timeout=120, check=True
    )
    assert run.stdout.strip() == "[]"
