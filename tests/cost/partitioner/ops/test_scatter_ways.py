"""When a scatter changes ways as its table grows, held against XLA's CPU and GPU compilers."""

from __future__ import annotations

import pytest

from autoshard.cost.partitioner.partition import partition
from autoshard.cost.partitioner.propagate import propagate
from autoshard.graph.annotations import Annotations
from autoshard.graph.ops import Graph, Value
from autoshard.mesh import Mesh
from autoshard.program import AtenOp, TensorType
from autoshard.stablehlo.annotate import annotate
from autoshard.verify.collectives import compiled_collectives, normalise
from autoshard.verify.compile import compile_module
from tests.graph.helpers import graph_from_text

MESH = Mesh((2, 4), ("data", "model"))
EVERYONE = (("data", "model"), ())
TOKENS, WIDTH = 512, 64


def added_rows(rows: int) -> str:
    """%r: the rows %u of the tokens %i added into zeros."""
    table, tokens = f"tensor<{rows}x{WIDTH}xf32>", f"tensor<{TOKENS}x{WIDTH}xf32>"
    return f"""
      %z = stablehlo.constant dense<0.0> : {table} loc("op0")
      %r = "stablehlo.scatter"(%z, %i, %u) <{{indices_are_sorted = false, unique_indices = false,
          scatter_dimension_numbers = #stablehlo.scatter<update_window_dims = [1], inserted_window_dims = [0],
          scatter_dims_to_operand_dims = [0], index_vector_dim = 1>}}> ({{
        ^bb0(%a: tensor<f32>, %b: tensor<f32>):
          %s = stablehlo.add %a, %b : tensor<f32>
          stablehlo.return %s : tensor<f32>
      }}) : ({table}, tensor<{TOKENS}x1xi32>, {tokens}) -> {table} loc("op0")"""


def gradient_of_a_table(rows: int) -> Graph:
    """The gradient of an embedding: rows of the tokens added into zeros."""
    table, tokens = f"tensor<{rows}x{WIDTH}xf32>", f"tensor<{TOKENS}x{WIDTH}xf32>"
    text = f"""module {{ func.func public @main(%i: tensor<{TOKENS}x1xi32>, %u: {tokens}) -> {table} {{
      {added_rows(rows)}
      %m = stablehlo.custom_call @Sharding(%r) {{mhlo.sharding = "{{replicated}}"}} :
        ({table}) -> {table} loc("op0.out0")
      return %m : {table} }} }}"""
    return graph_from_text(text, ops=[AtenOp(0, "index_put", "", "backward", (TensorType((rows, WIDTH), "f32"),))])


@pytest.mark.parametrize(
    ("rows", "kinds"), [(256, {"reduce-scatter"}), (504, {"reduce-scatter"}), (536, {"all-gather"})]
)
def test_a_small_table_is_summed_and_for_a_large_one_the_tokens_are_gathered(rows, kinds):
    # The way was chosen by the sum of what it allocates, where XLA takes the largest step: a small table's tokens
    # were predicted to be gathered.
    graph = gradient_of_a_table(rows)
    pins = {Value(argument): EVERYONE for argument in graph.arguments} | {graph.aten_outputs[0, 0]: EVERYONE}
    wanted = Annotations(pins)
    said = {}
    for one in partition(graph, propagate(graph, wanted, MESH), "cpu").collectives:
        said[one.kind, one.axes] = said.get((one.kind, one.axes), 0) + one.bytes
    assert {kind for kind, _ in said} == kinds
    compiled = compile_module(annotate(graph.program, graph, wanted, MESH), "cpu:8")
    assert said == normalise(compiled_collectives(compiled.hlo_text, MESH, "cpu"))


@pytest.mark.parametrize(("rows", "gathered"), [(256, 256 * WIDTH * 4), (536, TOKENS * WIDTH * 4)])
def test_what_a_gradient_is_added_to_is_gathered_with_the_table(rows, gathered):
    # The gradient scatters onto the term that it is added to, as that of a head tied to the embedding: the partitioner
    # gathers that term where it gathers the table. The zeros that the program scatters onto were predicted to be free.
    table, tokens = f"tensor<{rows}x{WIDTH}xf32>", f"tensor<{TOKENS}x{WIDTH}xf32>"
    text = f"""module {{ func.func public @main(%i: tensor<{TOKENS}x1xi32>, %u: {tokens}, %x: {table}) -> {table} {{
      {added_rows(rows)}
      %y = stablehlo.add %x, %r : {table} loc("op1")
      %m = stablehlo.custom_call @Sharding(%y) {{mhlo.sharding = "{{replicated}}"}} :
        ({table}) -> {table} loc("op1.out0")
      return %m : {table} }} }}"""
    results = (TensorType((rows, WIDTH), "f32"),)
    ops = [AtenOp(0, "embedding_grad", "", "backward", results), AtenOp(1, "add", "", "backward", results)]
    graph = graph_from_text(text, ops=ops)
    pins = {Value(argument): EVERYONE for argument in graph.arguments} | {graph.aten_outputs[1, 0]: EVERYONE}
    wanted = Annotations(pins)
    said = {}
    for one in partition(graph, propagate(graph, wanted, MESH), "gpu").collectives:
        said[one.kind, one.axes] = said.get((one.kind, one.axes), 0) + one.bytes
    compiled = compile_module(annotate(graph.program, graph, wanted, MESH), "h100:8")
    assert said == normalise(compiled_collectives(compiled.hlo_text, MESH, "gpu"))
    assert any(kind == "all-gather" and size >= gathered for (kind, _), size in said.items())
