"""What is rounded before it is gathered, held against the compiler."""

from __future__ import annotations

import pytest

from autoshard.cost.partitioner.partition import partition
from autoshard.cost.partitioner.propagate import propagate
from autoshard.graph.annotations import Annotations
from autoshard.graph.ops import Value
from autoshard.mesh import Mesh
from autoshard.program import AtenOp, TensorType
from autoshard.stablehlo.annotate import annotate
from autoshard.verify.collectives import compiled_collectives, normalise
from autoshard.verify.compile import compile_module
from autoshard.verify.targets import parse_target
from tests.graph.helpers import graph_from_text

MESH = Mesh((2, 4), ("data", "model"))
MARK = 'stablehlo.custom_call @Sharding(%{}) {{mhlo.sharding = "{{replicated}}"}} : ({}) -> {}'


def predicted(graph, wanted):
    """Predicted bytes by kind and axes."""
    collectives = partition(graph, propagate(graph, wanted, MESH, "tpu"), "tpu").collectives
    return {(one.kind, one.axes): one.bytes * one.count for one in collectives}


def compiled(graph, wanted):
    """The same, as libtpu compiles it for v5e."""
    module = compile_module(annotate(graph.program, graph, wanted, MESH), parse_target("tpu-v5e:2x4", 8))
    return normalise(compiled_collectives(module.hlo_text, MESH, "tpu"))


@pytest.mark.parametrize("size", [1, 3])
def test_a_kernel_that_a_convolution_and_its_gradient_read_is_gathered_in_bf16_once(size):
    pytest.importorskip("libtpu")
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
    wanted = Annotations(pins, {(w, 0): whole, (w, 2): whole})
    assert (
        predicted(graph, wanted)
        == compiled(graph, wanted)
        == {("all-gather", ("data", "model")): 2 * 64 * 64 * size * size}
    )


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_a_weight_that_a_checkpointed_block_reads_again_is_gathered_in_bf16(dtype):
    """Under autocast a decoder's weights were predicted in f32: conversions and barriers were taken for users of it."""
    pytest.importorskip("libtpu")
    rows, weight = "tensor<512x256xf32>", "tensor<256x256xf32>"
    low, narrow = f"tensor<512x256x{dtype}>", f"tensor<256x256x{dtype}>"
    dims = "contracting_dims = [1] x [0]"
    text = f"""module {{ func.func public @main(%x: {rows}, %w: {weight}) -> ({low}, {low}) {{
%x1 = stablehlo.convert %x : ({rows}) -> {low} loc("op0")
%w1 = stablehlo.convert %w : ({weight}) -> {narrow} loc("op0")
%r0 = stablehlo.dot_general %x1, %w1, {dims} : ({low}, {narrow}) -> {low} loc("op0")
%m0 = {MARK.format("r0", low, low)} loc("op0.out0")
%b:2 = stablehlo.optimization_barrier %m0, %w : {low}, {weight} loc("op1")
%w2 = stablehlo.convert %b#1 : ({weight}) -> {narrow} loc("op2")
%r2 = stablehlo.dot_general %b#0, %w2, {dims} : ({low}, {narrow}) -> {low} loc("op2")
%m2 = {MARK.format("r2", low, low)} loc("op2.out0")
return %m0, %m2 : {low}, {low} }} }}"""
    ops = [AtenOp(k, name, "", "forward", (TensorType((512, 256), dtype),)) for k, name in enumerate(("mm", "b", "mm"))]
    graph = graph_from_text(text, ops=ops)
    x, w = (Value(op) for op in graph.arguments)
    split, whole = (("data", "model"), ()), ((), ())
    pins = {x: split, w: split, **dict.fromkeys(graph.aten_outputs.values(), split)}
    wanted = Annotations(pins, {(w, 0): whole, (w, 1): whole})
    assert predicted(graph, wanted) == compiled(graph, wanted) == {("all-gather", ("data", "model")): 2 * 256 * 256}


def test_a_weight_that_is_cut_and_converted_is_gathered_in_bf16():
    """Cross attention under autocast: keys' and values' parts of one weight (`nn.MultiheadAttention`)."""
    pytest.importorskip("libtpu")
    rows, weight, part = "tensor<512x256xbf16>", "tensor<512x256xf32>", "tensor<256x256xf32>"
    dims, low = "contracting_dims = [1] x [1]", "tensor<256x256xbf16>"
    text = f"""module {{ func.func public @main(%x: {rows}, %w: {weight}) -> ({rows}, {rows}) {{
%k = stablehlo.slice %w [0:256, 0:256] : ({weight}) -> {part} loc("op0")
%k1 = stablehlo.convert %k : ({part}) -> {low} loc("op0")
%r0 = stablehlo.dot_general %x, %k1, {dims} : ({rows}, {low}) -> {rows} loc("op0")
%m0 = {MARK.format("r0", rows, rows)} loc("op0.out0")
%v = stablehlo.slice %w [256:512, 0:256] : ({weight}) -> {part} loc("op1")
%v1 = stablehlo.convert %v : ({part}) -> {low} loc("op1")
%r1 = stablehlo.dot_general %x, %v1, {dims} : ({rows}, {low}) -> {rows} loc("op1")
%m1 = {MARK.format("r1", rows, rows)} loc("op1.out0")
return %m0, %m1 : {rows}, {rows} }} }}"""
    ops = [AtenOp(k, "mm", "", "forward", (TensorType((512, 256), "bf16"),)) for k in range(2)]
    graph = graph_from_text(text, ops=ops)
    x, w = (Value(op) for op in graph.arguments)
    split, whole = (("data", "model"), ()), ((), ())
    pins = {x: split, w: split, **dict.fromkeys(graph.aten_outputs.values(), split)}
    wanted = Annotations(pins, {(w, 0): whole, (w, 1): whole})
    assert predicted(graph, wanted) == compiled(graph, wanted) == {("all-gather", ("data", "model")): 2 * 512 * 256}
