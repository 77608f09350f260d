"""A small captured program, written by hand: a linear layer, tanh, a gradient and an update."""

from __future__ import annotations

from autoshard.graph.ops import Graph, Value
from autoshard.mesh import Mesh
from autoshard.program import Argument, AtenOp, Output, Program, TensorType
from autoshard.stablehlo.reader import build_graph

MESH = Mesh((2, 4), ("data", "model"))

# The updated weight is `w - x^T tanh(x w)`; a private function, a view that is its base, and a value without a marker.
TEXT = """module @m {{
  func.func private @f(%a: tensor<{B}x{N}x{T}>) -> tensor<{B}x{N}x{T}> {{
    %0 = stablehlo.tanh %a : tensor<{B}x{N}x{T}>
    return %0 : tensor<{B}x{N}x{T}>
  }}
  func.func @main(%x: tensor<{B}x{K}x{T}>, %w: tensor<{K}x{N}x{T}>) -> (tensor<{K}x{N}x{T}>, tensor<{B}x{N}x{T}>) {{
    %0 = stablehlo.dot %x, %w : (tensor<{B}x{K}x{T}>, tensor<{K}x{N}x{T}>) -> tensor<{B}x{N}x{T}> loc("op0")
    %1 = stablehlo.custom_call @Sharding(%0) {{mhlo.sharding = "{{replicated}}"}}
      : (tensor<{B}x{N}x{T}>) -> tensor<{B}x{N}x{T}> loc("op0.out0")
    %2 = stablehlo.custom_call @Sharding(%1) {{mhlo.sharding = "{{replicated}}"}}
      : (tensor<{B}x{N}x{T}>) -> tensor<{B}x{N}x{T}> loc("op1.out0")
    %3 = func.call @f(%2) : (tensor<{B}x{N}x{T}>) -> tensor<{B}x{N}x{T}> loc("op2")
    %4 = stablehlo.custom_call @Sharding(%3) {{mhlo.sharding = "{{replicated}}"}}
      : (tensor<{B}x{N}x{T}>) -> tensor<{B}x{N}x{T}> loc("op2.out0")
    %5 = stablehlo.transpose %x, dims = [1, 0] : (tensor<{B}x{K}x{T}>) -> tensor<{K}x{B}x{T}> loc("op3")
    %6 = stablehlo.dot_general %5, %4, contracting_dims = [1] x [0]
      : (tensor<{K}x{B}x{T}>, tensor<{B}x{N}x{T}>) -> tensor<{K}x{N}x{T}> loc("op3")
    %7 = stablehlo.custom_call @Sharding(%6) {{mhlo.sharding = "{{replicated}}"}}
      : (tensor<{K}x{N}x{T}>) -> tensor<{K}x{N}x{T}> loc("op3.out0")
    %8 = stablehlo.subtract %w, %7 : tensor<{K}x{N}x{T}> loc("op4")
    %9 = stablehlo.custom_call @Sharding(%8) {{mhlo.sharding = "{{replicated}}"}}
      : (tensor<{K}x{N}x{T}>) -> tensor<{K}x{N}x{T}> loc("op4.out0")
    return %9, %4 : tensor<{K}x{N}x{T}>, tensor<{B}x{N}x{T}>
  }}
}}"""

X, W = Value(0), Value(1)


def program(batch: int = 64, inner: int = 32, outer: int = 16, dtype: str = "f32") -> tuple[Program, Graph]:
    """The program `w - x^T tanh(x w)` with x [batch, inner] and w [inner, outer], and its graph."""
    x, w, y = ((batch, inner), (inner, outer), (batch, outer))
    names = [("aten.mm", y), ("aten.view_copy", y), ("aten.tanh", y), ("aten.mm", w), ("aten.sub.Tensor", w)]
    made = Program(
        kind="train",
        frontend="torch_xla",
        versions={},
        switches=(),
        stablehlo=TEXT.format(B=batch, K=inner, N=outer, T=dtype).encode(),
        arguments=(Argument("x", "input", TensorType(x, dtype)), Argument("w", "parameter", TensorType(w, dtype))),
        outputs=(
            Output("w", "parameter", TensorType(w, dtype), updates=1),
            Output("y", "output", TensorType(y, dtype)),
        ),
        ops=tuple(
            AtenOp(index, name, "net.fc", "forward", (TensorType(shape, dtype),))
            for index, (name, shape) in enumerate(names)
        ),
    )
    return made, build_graph(made)
