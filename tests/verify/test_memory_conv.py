"""Memory predicted for a convolution, a max pool and their gradients, against what XLA's CPU compiler lays out."""

from __future__ import annotations

from functools import cache

import pytest

from autoshard.cost.machine.device import load_device
from autoshard.cost.predict import Prediction, predict
from autoshard.graph.annotations import Annotations
from autoshard.graph.ops import Value
from autoshard.mesh import Mesh
from autoshard.stablehlo.annotate import annotate, donated
from autoshard.stablehlo.reader import build_graph
from autoshard.verify.compile import Compiled, compile_module
from autoshard.verify.targets import parse_target
from autoshard.verify.work import compiled_work
from tests.graph.helpers import program_from_text

pytest.importorskip("jaxlib")

X, W, Y, P = "tensor<16x8x32x32xf32>", "tensor<16x8x3x3xf32>", "tensor<16x16x32x32xf32>", "tensor<16x16x16x16xf32>"
WINDOW = (
    "window = {stride = [1, 1], pad = [[1, 1], [1, 1]]} {batch_group_count = 1 : i64, feature_group_count = 1 : i64}"
)
POOL = "window_dimensions = array<i64: 1, 1, 2, 2>, window_strides = array<i64: 1, 1, 2, 2>"
STEPS = {
    "convolution": f"""
    %y = stablehlo.convolution(%x, %w) dim_numbers = [b, f, 0, 1]x[o, i, 0, 1]->[b, f, 0, 1], {WINDOW}
      : ({X}, {W}) -> {Y}
    %d = stablehlo.tanh %y : {Y}""",
    "convolution of a view": f"""
    %x3 = stablehlo.reshape %x : ({X}) -> tensor<16x8x1024xf32>
    %t3 = stablehlo.tanh %x3 : tensor<16x8x1024xf32>
    %t = stablehlo.reshape %t3 : (tensor<16x8x1024xf32>) -> {X}
    %d = stablehlo.convolution(%t, %w) dim_numbers = [b, f, 0, 1]x[o, i, 0, 1]->[b, f, 0, 1], {WINDOW}
      : ({X}, {W}) -> {Y}""",
    "max pool": f"""
    %y = stablehlo.convolution(%x, %w) dim_numbers = [b, f, 0, 1]x[o, i, 0, 1]->[b, f, 0, 1], {WINDOW}
      : ({X}, {W}) -> {Y}
    %t = stablehlo.tanh %y : {Y}
    %low = stablehlo.constant dense<0xFF800000> : tensor<f32>
    %zero = stablehlo.constant dense<0.0> : tensor<f32>
    %p = "stablehlo.reduce_window"(%t, %low) <{{{POOL}}}> ({{ ^bb0(%a: tensor<f32>, %b: tensor<f32>):
      %m = stablehlo.maximum %a, %b : tensor<f32>
      stablehlo.return %m : tensor<f32> }}) : ({Y}, tensor<f32>) -> {P}
    %d = "stablehlo.select_and_scatter"(%t, %p, %zero) <{{{POOL}}}> ({{ ^bb0(%a: tensor<f32>, %b: tensor<f32>):
      %m = stablehlo.compare GE, %a, %b : (tensor<f32>, tensor<f32>) -> tensor<i1>
      stablehlo.return %m : tensor<i1> }}, {{ ^bb0(%a: tensor<f32>, %b: tensor<f32>):
      %m = stablehlo.add %a, %b : tensor<f32>
      stablehlo.return %m : tensor<f32> }}) : ({Y}, {P}, tensor<f32>) -> {Y}""",
}
"""How the gradient of the convolution's result is made; its weight is updated by it."""


@cache
def both(step: str) -> tuple[Prediction, Compiled]:
    """What is predicted and what is compiled, for 16 images over 8 CPU devices."""
    text = f"""module @m {{
  func.func @main(%x: {X}, %w: {W}) -> {W} {{{STEPS[step]}
    %dw = stablehlo.convolution(%x, %d) dim_numbers = [f, b, 0, 1]x[i, o, 0, 1]->[0, 1, b, f], {WINDOW}
      : ({X}, {Y}) -> tensor<3x3x8x16xf32>
    %dt = stablehlo.transpose %dw, dims = [3, 2, 0, 1] : (tensor<3x3x8x16xf32>) -> {W}
    %w1 = stablehlo.subtract %w, %dt : {W}
    return %w1 : {W}
  }}
}}"""
    program = program_from_text(text, ["input", "parameter"], updates={0: 1})
    graph = build_graph(program)
    mesh = Mesh((2, 4), ("data", "model"), device="cpu")
    annotations = Annotations({Value(0): (("data", "model"), (), (), ())}, {})
    compiled = compile_module(
        annotate(program, graph, annotations, mesh), parse_target("cpu", mesh.size), donate=donated(program)
    )
    return predict(graph, annotations, mesh, load_device("cpu")), compiled


@pytest.mark.parametrize("step", list(STEPS))
def test_memory_is_what_the_compiler_lays_out(step: str) -> None:
    prediction, compiled = both(step)
    assert prediction.compiled.temporary_bytes == pytest.approx(compiled.memory.temp, rel=0.05)


@pytest.mark.parametrize("step", list(STEPS))
def test_traffic_is_the_compiled_one(step: str) -> None:
    prediction, compiled = both(step)
    work = compiled_work(compiled.hlo_text, compiled.target.family)
    assert prediction.compiled.moved_bytes == pytest.approx(work.bytes, rel=0.15)
