"""What XLA's propagation does with annotations; the compiled programs of `test_partition.py` are the proof."""

import pytest

from autoshard.cost.partitioner.partition import partition
from autoshard.cost.partitioner.passes.simplify import fold
from autoshard.cost.partitioner.propagate import propagate
from autoshard.graph.annotations import Annotations
from autoshard.graph.ops import Value
from autoshard.mesh import Mesh
from autoshard.program import Argument, Output
from autoshard.stablehlo.annotate import annotate
from autoshard.verify.collectives import compiled_collectives
from autoshard.verify.compile import compile_module
from tests.cost.zoo import program
from tests.graph.helpers import graph_from_text, only, program_from_text

MESH = Mesh((2, 4), ("data", "model"))

CHAIN = """module @m {
  func.func @main(%x: tensor<64x128xf32>, %w: tensor<128x96xf32>, %b: tensor<96xf32>) -> tensor<64x96xf32> {
    %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0]
      : (tensor<64x128xf32>, tensor<128x96xf32>) -> tensor<64x96xf32>
    %1 = stablehlo.broadcast_in_dim %b, dims = [1] : (tensor<96xf32>) -> tensor<64x96xf32>
    %2 = stablehlo.add %0, %1 : tensor<64x96xf32>
    %3 = stablehlo.tanh %2 : tensor<64x96xf32>
    return %3 : tensor<64x96xf32>
  }
}"""
X, W, B = Value(0), Value(1), Value(2)


def specs(text, pins, **kwargs):
    graph = graph_from_text(text)
    return graph, propagate(graph, Annotations(pins, **kwargs), MESH).specs


def test_nothing_annotated_is_replicated():
    graph, found = specs(CHAIN, {})
    assert all(not any(spec) for spec in found.values())
    assert set(found) == {Value(op.id) for op in graph.ops}


def test_shardings_flow_forward_through_products_and_elementwise_ops():
    graph, found = specs(CHAIN, {X: (("data",), ()), W: ((), ("model",))})
    for kind in ("dot_general", "add", "tanh"):
        assert found[Value(only(graph, kind).id)] == (("data",), ("model",))


def test_a_contracted_dim_does_not_flow():
    graph, found = specs(CHAIN, {X: (("data",), ("model",)), W: (("model",), ())})
    assert found[Value(only(graph, "dot_general").id)] == (("data",), ())


def test_shardings_flow_back_from_an_annotation_but_not_into_arguments():
    graph = graph_from_text(CHAIN)
    tanh = only(graph, "tanh")
    found = propagate(graph, Annotations({Value(tanh.id): (("data",), ("model",))}), MESH).specs
    assert found[Value(only(graph, "add").id)] == (("data",), ("model",))
    assert found[Value(only(graph, "broadcast_in_dim").id)] == (("data",), ("model",))
    assert found[X] == found[W] == ((), ())
    assert found[B] == ((),)


def test_what_is_pinned_stays_and_its_op_runs_so():
    graph = graph_from_text(CHAIN)
    product = Value(only(graph, "dot_general").id)
    shardings = propagate(graph, Annotations({X: (("data",), ()), product: ((), ("data",))}), MESH)
    assert shardings.specs[product] == ((), ("data",))
    assert shardings.subaxes.spec(shardings.made[product]) == ((), ("data",))


def test_a_copy_is_read_by_its_consumer_alone():
    _, graph = program(["sum", "product"])
    left = graph.ops[only(graph, "add").id].operands[0]
    copies = {(left, 0): ((), ("model",))}
    shardings = propagate(graph, Annotations({left: (("data",), ())}, copies), MESH)
    add = only(graph, "add")
    assert shardings.subaxes.spec(shardings.read(add.id, left)) == ((), ("model",))
    assert shardings.specs[left] == (("data",), ())
    assert shardings.specs[Value(add.id)] == ((), ("model",))


def test_a_copy_is_made_from_its_last_hop():
    _, graph = program(["sum", "product"])
    left = graph.ops[only(graph, "add").id].operands[0]
    end, hop = ((), ("model",)), (("data",), ("model",))
    shardings = propagate(graph, Annotations({left: (("data",), ())}, {(left, 0): end}, {(left, end): (hop,)}), MESH)
    add = only(graph, "add")
    read = shardings.copies[shardings.copy_read(add.id, left)]
    assert read.spec == end
    assert shardings.copies[read.source].spec == hop
    assert shardings.copies[read.source].source == shardings.pins.get(left)
    assert shardings.subaxes.spec(shardings.read(add.id, left)) == end


def test_a_result_that_updates_an_argument_has_its_sharding():
    text = CHAIN.replace("%b: tensor<96xf32>", "%b: tensor<96xf32>, %state: tensor<64x96xf32>")
    made = program_from_text(text)
    state = made.arguments[3]
    outputs = (Output("state", "buffer", state.type, updates=3),)
    arguments = (*made.arguments[:3], Argument("state", "buffer", state.type))
    from dataclasses import replace

    from autoshard.stablehlo.reader import build_graph

    graph = build_graph(replace(made, arguments=arguments, outputs=outputs))
    found = propagate(graph, Annotations({Value(3): (("data",), ("model",))}), MESH).specs
    assert found[Value(only(graph, "tanh").id)] == (("data",), ("model",))


def test_equal_constants_are_one_and_ops_that_change_nothing_go():
    graph = graph_from_text("""module @m {
      func.func @main(%x: tensor<8x8xf32>) -> (tensor<8x8xf32>, tensor<8x8xf32>) {
        %one = stablehlo.constant dense<1.0> : tensor<f32>
        %ones = stablehlo.broadcast_in_dim %one, dims = [] : (tensor<f32>) -> tensor<8x8xf32>
        %two = stablehlo.add %ones, %ones : tensor<8x8xf32>
        %same = stablehlo.multiply %x, %ones : tensor<8x8xf32>
        %double = stablehlo.multiply %same, %two : tensor<8x8xf32>
        return %same, %double : tensor<8x8xf32>, tensor<8x8xf32>
      }
    }""")
    folded = fold(graph)
    multiply = [op for op in graph.ops if op.kind == "multiply"]
    assert folded.resolve(Value(multiply[0].id)) == Value(0)
    assert folded.splat[Value(only(graph, "add").id)] == 2.0
    assert Value(multiply[1].id) not in folded.same


@pytest.mark.parametrize("shape", [(8,), (2, 4), (2, 2, 2), (3, 5), (1, 8)])
def test_every_spec_fits_the_mesh(shape):
    mesh = Mesh(shape)
    _, graph = program()
    axis = mesh.axis_names[-1]
    pins = {Value(op): ((axis,), *((),) * (len(graph.ops[op].results[0].shape) - 1)) for op in graph.arguments}
    for value, spec in propagate(graph, Annotations(pins), mesh).specs.items():
        mesh.check(spec, graph.type_of(value).shape, str(value))


UPDATES = """module @m {
  func.func @main(%p: tensor<256xf32>, %q: tensor<256xf32>, %rate: tensor<f32>) -> (tensor<256xf32>, tensor<256xf32>) {
    %0 = stablehlo.broadcast_in_dim %rate, dims = [] : (tensor<f32>) -> tensor<256xf32>
    %1 = stablehlo.multiply %p, %0 : tensor<256xf32>
    %2 = stablehlo.broadcast_in_dim %rate, dims = [] : (tensor<f32>) -> tensor<256xf32>
    %3 = stablehlo.multiply %q, %2 : tensor<256xf32>
    return %1, %3 : tensor<256xf32>, tensor<256xf32>
  }
}"""


def test_updates_share_the_broadcast_of_a_learning_rate_where_the_program_is_simplified():
    # BERT under Megatron on v5e: the split biases of queries split every replicated vector of their length, by way of
    # the optimizer, and the residual stream with them.
    graph = graph_from_text(UPDATES)
    annotations = Annotations({X: (("model",),), W: ((),)})
    split, whole = (Value(op.id) for op in graph.ops if op.kind == "multiply")
    plain = propagate(graph, annotations, MESH).specs
    assert (plain[split], plain[whole]) == ((("model",),), ((),))
    simplified = propagate(graph, annotations, MESH, "tpu").specs
    assert (simplified[split], simplified[whole]) == ((("model",),), (("model",),))


MASKS = """module @m {
  func.func @main(%x: tensor<64x32xf32>, %y: tensor<64x32xf32>) -> (tensor<64x32xf32>, tensor<64x32xf32>) {
    %zero = stablehlo.constant dense<0.0> : tensor<64x32xf32>
    %0 = stablehlo.maximum %x, %zero : tensor<64x32xf32>
    %1 = stablehlo.maximum %y, %zero : tensor<64x32xf32>
    return %0, %1 : tensor<64x32xf32>, tensor<64x32xf32>
  }
}"""


def test_every_reader_has_a_constant_of_its_own_where_the_program_is_simplified():
    # DLRM on v5e: the zeros of a split relu split the mask of a replicated one, which was gathered.
    graph = graph_from_text(MASKS)
    annotations = Annotations({X: (("data",), ()), W: ((), ())})
    split, whole = (op for op in graph.ops if op.kind == "maximum")
    zero = only(graph, "constant")
    shared = propagate(graph, annotations, MESH)
    assert shared.read(whole.id, Value(zero.id)) == shared.read(split.id, Value(zero.id))
    found = propagate(graph, annotations, MESH, "tpu")
    rows = found.made[Value(split.id)]
    assert any(rows)
    assert (found.read(split.id, Value(zero.id)), found.read(whole.id, Value(zero.id))) == (rows, ((), ()))
    assert found.specs[Value(whole.id)] == ((), ())


TOP_K = """module @m {
  func.func @main(%x: tensor<64x8xf32>) -> (tensor<64x2xf32>, tensor<64x2xi32>) {
    %0 = stablehlo.tanh %x : tensor<64x8xf32>
    %1 = stablehlo.iota dim = 1 : tensor<64x8xi32>
    %2:2 = "stablehlo.sort"(%0, %1) <{dimension = 1 : i64, is_stable = false}> ({
    ^bb0(%a: tensor<f32>, %b: tensor<f32>, %i: tensor<i32>, %j: tensor<i32>):
      %c = stablehlo.compare GT, %a, %b, TOTALORDER : (tensor<f32>, tensor<f32>) -> tensor<i1>
      stablehlo.return %c : tensor<i1>
    }) : (tensor<64x8xf32>, tensor<64x8xi32>) -> (tensor<64x8xf32>, tensor<64x8xi32>)
    %3 = stablehlo.slice %2#0 [0:64, 0:2] : (tensor<64x8xf32>) -> tensor<64x2xf32>
    %4 = stablehlo.slice %2#1 [0:64, 0:2] : (tensor<64x8xi32>) -> tensor<64x2xi32>
    return %3, %4 : tensor<64x2xf32>, tensor<64x2xi32>
  }
}"""


def test_what_is_asked_of_sorted_values_is_not_asked_of_their_places():
    # Mixtral's experts under a random plan on 8 H100: 107 % of the bytes, as each gathered the weights of its tokens.
    graph = graph_from_text(TOP_K)
    made, order = only(graph, "tanh"), only(graph, "sort")
    values, places = (Value(op.id) for op in graph.ops if op.kind == "slice")
    whole, split = ((), ()), (("data",), ())
    found = propagate(graph, Annotations({Value(made.id): whole, values: split}), MESH)
    assert [found.specs[value] for value in (Value(order.id), Value(order.id, 1), places)] == [split, whole, whole]


@pytest.mark.parametrize(("target", "spec"), [("cpu", (("data",), ())), ("gpu", ((), ()))])
@pytest.mark.parametrize(
    ("before", "after", "cut"),
    [
        ("GT", "GT", True),
        ("GT", "LT", False),
        ("GT, %a, %b", "GT, %b, %a", False),
        ("%2#1 [0:64, 0:2]", "%2#1 [0:64, 2:4]", False),
        ("iota dim = 1", "iota dim = 0", False),
    ],
)
def test_nothing_passes_a_sort_whose_greatest_are_taken_on_gpus(target, spec, before, after, cut):
    graph = graph_from_text(TOP_K.replace(before, after))
    order, split = only(graph, "sort"), (("data",), ())
    found = propagate(graph, Annotations({X: split}), MESH, target).specs
    assert found[Value(order.id)] == (spec if cut else split)
    assert found[graph.outputs[1]] == (spec if cut else split)


def test_the_greatest_of_rows_are_taken_on_each_device_where_rows_are_split_over_all():
    """Compiled for 8 H100: 65,536 bytes of 4,096 pairs of values and places are gathered, not rows of 1,024."""
    graph = graph_from_text(TOP_K)
    order, rows = only(graph, "sort"), (("data", "model"), ())
    assert propagate(graph, Annotations({X: rows}), MESH, "gpu").specs[Value(order.id)] == rows


def test_results_of_a_barrier_follow_their_own_operands():
    """Activation checkpointing puts values of several ranks through one barrier."""
    text = """module @m {
  func.func @main(%x: tensor<64x128xf32>, %y: tensor<8x4x16xf32>, %z: tensor<64x128xf32>)
      -> (tensor<64x128xf32>, tensor<8x4x16xf32>, tensor<64x128xf32>) {
    %0:3 = stablehlo.optimization_barrier %x, %y, %z : tensor<64x128xf32>, tensor<8x4x16xf32>, tensor<64x128xf32>
    %1 = stablehlo.tanh %0#0 : tensor<64x128xf32>
    %2 = stablehlo.tanh %0#1 : tensor<8x4x16xf32>
    %3 = stablehlo.tanh %0#2 : tensor<64x128xf32>
    return %1, %2, %3 : tensor<64x128xf32>, tensor<8x4x16xf32>, tensor<64x128xf32>
  }
}"""
    pins = {Value(0): (("data",), ()), Value(2): ((), ("model",))}
    graph, found = specs(text, pins)
    barrier = only(graph, "optimization_barrier")
    made = [found[Value(barrier.id, result)] for result in range(3)]
    assert made == [(("data",), ()), ((), (), ()), ((), ("model",))]
    tanh = [op for op in graph.ops if op.kind == "tanh"]
    backward = propagate(graph, Annotations({Value(tanh[2].id): (("data",), ())}), MESH).specs
    assert [backward[Value(barrier.id, result)] for result in range(3)] == [((), ()), ((), (), ()), (("data",), ())]


def test_a_result_of_a_barrier_that_nothing_reads_is_as_its_operand():
    """A checkpoint's barrier waits for a gradient that nothing reads behind it: it was predicted to be gathered."""
    text = """module @m {
  func.func @main(%x: tensor<64x128xf32>, %z: tensor<32x64xf32>) -> tensor<64x128xf32> {
    %0:2 = stablehlo.optimization_barrier %x, %z : tensor<64x128xf32>, tensor<32x64xf32>
    %1 = stablehlo.tanh %0#0 : tensor<64x128xf32>
    return %1 : tensor<64x128xf32>
  }
}"""
    split = (("data", "model"), ())
    graph = graph_from_text(text)
    wanted = Annotations({Value(0): split, Value(1): split})
    shardings = propagate(graph, wanted, MESH, "gpu")
    assert shardings.specs[Value(only(graph, "optimization_barrier").id, 1)] == split
    assert not partition(graph, shardings, "gpu").collectives
    pytest.importorskip("jax_cuda12_plugin")
    compiled = compile_module(annotate(graph.program, graph, wanted, MESH), "h100:8")
    assert not compiled_collectives(compiled.hlo_text, MESH, "gpu")
