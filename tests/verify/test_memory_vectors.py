"""A matrix per token, gathered and multiplied by one vector: XLA's GPU compiler never has the matrices in memory."""

import pytest

from autoshard.cost.machine.device import load_device
from autoshard.cost.predict import predict
from autoshard.graph.annotations import Annotations
from autoshard.graph.ops import Value
from autoshard.mesh import Mesh
from autoshard.stablehlo.annotate import annotate, donated
from autoshard.stablehlo.reader import build_graph
from autoshard.verify.compile import compile_module
from tests.graph.helpers import program_from_text

pytest.importorskip("jax_plugins.xla_cuda12")

W, X, V, R = "tensor<8x128x256xf32>", "tensor<512x1xi32>", "tensor<512x256x1xf32>", "tensor<512x128x1xf32>"
M = "tensor<512x128x256xf32>"
DIMS = "offset_dims = [1, 2], collapsed_slice_dims = [0], start_index_map = [0], index_vector_dim = 1"
TEXT = f"""module @m {{
  func.func @main(%w: {W}, %i: {X}, %v: {V}) -> ({W}, {R}) {{
    %m = "stablehlo.gather"(%w, %i) <{{dimension_numbers = #stablehlo.gather<{DIMS}>,
      slice_sizes = array<i64: 1, 128, 256>}}> : ({W}, {X}) -> {M}
    %o = stablehlo.dot_general %m, %v, batching_dims = [0] x [0], contracting_dims = [2] x [1] : ({M}, {V}) -> {R}
    %d = stablehlo.dot_general %o, %v, batching_dims = [0] x [0], contracting_dims = [2] x [2] : ({R}, {V}) -> {M}
    %zero = stablehlo.constant dense<0.0> : {W}
    %g = "stablehlo.scatter"(%zero, %i, %d) <{{scatter_dimension_numbers = #stablehlo.scatter<
      update_window_dims = [1, 2], inserted_window_dims = [0], scatter_dims_to_operand_dims = [0],
      index_vector_dim = 1>}}> ({{ ^bb0(%a: tensor<f32>, %b: tensor<f32>):
      %s = stablehlo.add %a, %b : tensor<f32>
      stablehlo.return %s : tensor<f32> }}) : ({W}, {X}, {M}) -> {W}
    %n = stablehlo.subtract %w, %g : {W}
    return %n, %o : {W}, {R}
  }}
}}"""


def test_products_with_one_vector_and_outer_products_run_inside_their_readers(tmp_path):
    program = program_from_text(TEXT, ["parameter", "input", "input"], updates={0: 0})
    graph = build_graph(program)
    mesh = Mesh((8,), ("data",), device="h100")
    pins = {Value(0): ((), (), ()), Value(1): (("data",), ()), Value(2): (("data",), (), ())}
    annotations = Annotations(pins)
    module = annotate(program, graph, annotations, mesh)
    compiled = compile_module(module, "h100:8", donate=donated(program), cache_dir=tmp_path).memory.peak
    predicted = predict(graph, annotations, mesh, load_device("h100")).peak_memory_bytes
    matrices = 512 // 8 * 128 * 256 * 4
    assert compiled < matrices  # they would be larger than all of this
    assert predicted == pytest.approx(compiled, rel=0.15)
