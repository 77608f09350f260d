"""Annotations that are undone right after, and what is rounded before it is gathered, held against the compilers."""

from __future__ import annotations

import pytest

from autoshard.cost.partitioner.partition import partition
from autoshard.cost.partitioner.propagate import propagate
from autoshard.cost.partitioner.undone import undone
from autoshard.graph.annotations import Annotations
from autoshard.graph.ops import Graph, Value
from autoshard.mesh import Mesh, Spec
from autoshard.program import AtenOp, TensorType
from autoshard.stablehlo.annotate import annotate
from autoshard.verify.collectives import compiled_collectives, normalise
from autoshard.verify.compile import compile_module
from autoshard.verify.targets import parse_target
from tests.graph.helpers import graph_from_text

MESH = Mesh((2, 4), ("data", "model"))
ROWS: Spec = (("data", "model"), ())
HALVES: Spec = (("data",), ())
COLUMNS: Spec = ((), ("data", "model"))
WHOLE: Spec = ((), ())
TARGETS = {"cpu": "cpu", "tpu": "tpu-v5e:2x4", "gpu": "h100:8"}
MARK = 'stablehlo.custom_call @Sharding(%{}) {{mhlo.sharding = "{{replicated}}"}} : ({}) -> {}'


def needs(family: str) -> None:
    if family != "cpu":
        pytest.importorskip("libtpu" if family == "tpu" else "jax_plugins.xla_cuda12")


def agree(graph: Graph, wanted: Annotations, family: str) -> dict[object, int]:
    """The bytes of every kind of collective, predicted and compiled, which must be equal."""
    shardings = undone(graph, propagate(graph, wanted, MESH, family), family)
    said: dict[object, int] = {}
    for one in partition(graph, shardings, family).collectives:
        said[one.kind, one.axes] = said.get((one.kind, one.axes), 0) + one.bytes * one.count
    module = annotate(graph.program, graph, wanted, MESH)
    compiled = compile_module(module, parse_target(TARGETS[family], 8))
    assert normalise(compiled_collectives(compiled.hlo_text, MESH, family)) == said
    return said


def looked_up(read_again: bool) -> Graph:
    """Rows of a table by indices, and what is elementwise of them; `read_again`: they are a result themselves, too."""
    rows, table, ids = "tensor<512x256xf32>", "tensor<16x256xf32>", "tensor<512x1xi32>"
    returned, types = ("%m1, %m0", f"{rows}, {rows}") if read_again else ("%m1", rows)
    text = f"""module {{ func.func public @main(%t: {table}, %i: {ids}) -> ({types}) {{
%r0 = "stablehlo.gather"(%t, %i) {{dimension_numbers = #stablehlo.gather<offset_dims = [1], collapsed_slice_dims = [0],
 start_index_map = [0], index_vector_dim = 1>, indices_are_sorted = false, slice_sizes = array<i64: 1, 256>}}
 : ({table}, {ids}) -> {rows} loc("op0")
%m0 = {MARK.format("r0", rows, rows)} loc("op0.out0")
%r1 = stablehlo.exponential %m0 : {rows} loc("op1")
%m1 = {MARK.format("r1", rows, rows)} loc("op1.out0")
return {returned} : {types} }} }}"""
    ops = [AtenOp(k, name, "", "forward", (TensorType((512, 256), "f32"),)) for k, name in enumerate(("rows", "exp"))]
    return graph_from_text(text, ops=ops)


@pytest.mark.parametrize("family", ["cpu", "tpu", "gpu"])
@pytest.mark.parametrize("after", [ROWS, HALVES, COLUMNS])
@pytest.mark.parametrize("read_again", [False, True])
def test_what_is_gathered_and_cut_again_as_it_was_is_not_gathered_on_tpu_and_gpu(family, after, read_again):
    needs(family)
    graph = looked_up(read_again)
    table, ids = (Value(op) for op in graph.arguments)
    looked, made = graph.aten_outputs[0, 0], graph.aten_outputs[1, 0]
    pins = {table: WHOLE, ids: ROWS, looked: WHOLE, made: after}
    said = agree(graph, Annotations(pins, {(looked, 1): after}), family)
    assert (not said) == (after == ROWS and not read_again and family != "cpu")


@pytest.mark.parametrize("family", ["tpu", "gpu"])
def test_a_copy_that_is_made_whole_and_cut_again_moves_nothing(family):
    needs(family)
    graph = looked_up(read_again=False)
    table, ids = (Value(op) for op in graph.arguments)
    looked, made = graph.aten_outputs[0, 0], graph.aten_outputs[1, 0]
    pins = {table: WHOLE, ids: ROWS, looked: ROWS, made: ROWS}
    annotations = Annotations(pins, {(looked, 1): ROWS}, {(looked, ROWS): (WHOLE,)})
    assert not agree(graph, annotations, family)


@pytest.mark.parametrize("size", [1, 3])
def test_a_kernel_that_a_convolution_and_its_gradient_read_is_gathered_in_bf16_once(size):
    needs("tpu")
    images, kernel, turned = "tensor<32x64x16x16xf32>", f"tensor<64x64x{size}x{size}xf32>", f"{size}x{size}x64x64xf32"
    turned = f"tensor<{turned}>"
    pad = [[size // 2] * 2] * 2
    window = f"window = {{pad = {pad}}} {{batch_group_count = 1 : i64, feature_group_count = 1 : i64}}"
    text = f"""module {{ func.func public @main(%x: {images}, %w: {kernel}) -> {images} {{
%r0 = stablehlo.convolution(%x, %w) dim_numbers = [b, f, 0, 1]x[o, i, 0, 1]->[b, f, 0, 1], {window}
 : ({images}, {kernel}) -> {images} loc("op0")
%m0 = {MARK.format("r0", images, images)} loc("op0.out0")
%e = stablehlo.tanh %m0 : {images} loc("op1")
%m1 = {MARK.format("e", images, images)} loc("op1.out0")
%t = stablehlo.transpose %w, dims = [2, 3, 1, 0] : ({kernel}) -> {turned} loc("op2")
%v = stablehlo.reverse %t, dims = [0, 1] : {turned} loc("op2")
%r2 = stablehlo.convolution(%m1, %v) dim_numbers = [b, f, 0, 1]x[0, 1, i, o]->[b, f, 0, 1], {window}
 : ({images}, {turned}) -> {images} loc("op2")
%m2 = {MARK.format("r2", images, images)} loc("op2.out0")
return %m2 : {images} }} }}"""
    names = ("convolution", "tanh", "convolution_backward")
    ops = [AtenOp(k, name, "", "forward", (TensorType((32, 64, 16, 16), "f32"),)) for k, name in enumerate(names)]
    graph = graph_from_text(text, ops=ops)
    x, w = (Value(op) for op in graph.arguments)
    split, whole = (("data", "model"), (), (), ()), ((), (), (), ())
    pins = {x: split, w: split, **dict.fromkeys(graph.aten_outputs.values(), split)}
    said = agree(graph, Annotations(pins, {(w, 0): whole, (w, 2): whole}), "tpu")
    assert said == {("all-gather", ("data", "model")): 2 * 64 * 64 * size * size}
