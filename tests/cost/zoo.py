"""Programs of many independent ops, with random shardings: what the partitioner's model is held against."""

from __future__ import annotations

import random
from typing import Any

from autoshard.graph.annotations import Annotations
from autoshard.graph.ops import Graph, Value
from autoshard.mesh import Mesh, Spec
from autoshard.program import Argument, AtenOp, Output, Program, TensorType
from autoshard.stablehlo.reader import build_graph

Shape = tuple[int, ...]
"""Of f32, or with a dtype as its last element: `(16, 1, "i32")`."""

SUM = "applies stablehlo.add across dimensions"

# name -> (operand shapes, result shape, StableHLO with {0}, {1}… for operands and {types} for the signature)
OPS: dict[str, tuple[list[Shape], Shape, str]] = {
    "product": ([(64, 128), (128, 96)], (64, 96), "stablehlo.dot_general {0}, {1}, contracting_dims = [1] x [0]"),
    "linear": (
        [(16, 32, 128), (96, 128)],
        (16, 32, 96),
        "stablehlo.dot_general {0}, {1}, contracting_dims = [2] x [1]",
    ),
    "gradient": (
        [(16, 32, 64), (16, 32, 96)],
        (64, 96),
        "stablehlo.dot_general {0}, {1}, contracting_dims = [0, 1] x [0, 1]",
    ),
    "attention": (
        [(16, 8, 32, 16), (16, 8, 64, 16)],
        (16, 8, 32, 64),
        "stablehlo.dot_general {0}, {1}, batching_dims = [0, 1] x [0, 1], contracting_dims = [3] x [3]",
    ),
    "sum": ([(64, 128), (64, 128)], (64, 128), "stablehlo.add {0}, {1}"),
    "transposed": ([(16, 32, 64)], (64, 16, 32), "stablehlo.transpose {0}, dims = [2, 0, 1]"),
    "reduced": ([(64, 32, 128)], (64, 128), "stablehlo.reduce({0} init: %zero) " + SUM + " = [1]"),
    "total": ([(64, 128)], (128,), "stablehlo.reduce({0} init: %zero) " + SUM + " = [0]"),
    "heads": ([(16, 32, 128)], (16, 32, 8, 16), "stablehlo.reshape {0}"),
    "merged": ([(16, 32, 8, 16)], (512, 128), "stablehlo.reshape {0}"),
    "spread": ([(64,)], (32, 64, 16), "stablehlo.broadcast_in_dim {0}, dims = [1]"),
    "part": ([(64, 192)], (64, 64), "stablehlo.slice {0} [0:64, 64:128]"),
    "joined": ([(64, 32), (64, 32)], (64, 64), "stablehlo.concatenate {0}, {1}, dim = 1"),
}


def _convolution(
    labels: str, stride: int = 1, pad: str = "1, 1", base: int = 1, dilation: int = 1, **groups: int
) -> str:
    window = f"stride = [{stride}, {stride}], pad = [[{pad}], [{pad}]], "
    window += f"lhs_dilate = [{base}, {base}], rhs_dilate = [{dilation}, {dilation}]"
    counts = {"batch_group_count": 1, "feature_group_count": 1} | groups
    attributes = ", ".join(f"{name} = {count} : i64" for name, count in counts.items())
    return f"stablehlo.convolution({{0}}, {{1}}) dim_numbers = {labels}, window = {{{{{window}}}}} {{{{{attributes}}}}}"


def _pool(op: str, operands: str, window: int, stride: int, regions: str) -> str:
    return (
        f'"stablehlo.{op}"({operands}, %zero) <{{{{window_dimensions = array<i64: 1, 1, {window}, {window}>, '
        f"window_strides = array<i64: 1, 1, {stride}, {stride}>, padding = dense<0> : tensor<4x2xi64>}}}}> ({regions})"
    )


def _region(body: str) -> str:
    return f"{{{{ ^bb0(%a: tensor<f32>, %b: tensor<f32>): {body} }}}}"


_MAXIMUM = _region("%m = stablehlo.maximum %a, %b : tensor<f32> stablehlo.return %m : tensor<f32>")
_ADD = _region("%m = stablehlo.add %a, %b : tensor<f32> stablehlo.return %m : tensor<f32>")
_GE = _region(
    "%m = stablehlo.compare GE, %a, %b : (tensor<f32>, tensor<f32>) -> tensor<i1> stablehlo.return %m : tensor<i1>"
)
_FORWARD = "[b, f, 0, 1]x[o, i, 0, 1]->[b, f, 0, 1]"
_TO_INPUT = "[b, f, 0, 1]x[0, 1, o, i]->[b, f, 0, 1]"
_TO_WEIGHT = "[f, b, 0, 1]x[i, o, 0, 1]->[0, 1, b, f]"

# What torch_xla makes of convolutions and pools, forwards and backwards; kernels are reversed before they arrive here.
WINDOWS: dict[str, tuple[list[Shape], Shape, str]] = {
    "conv": ([(16, 32, 32, 32), (64, 32, 3, 3)], (16, 64, 32, 32), _convolution(_FORWARD)),
    "conv_strided": ([(16, 32, 32, 32), (64, 32, 3, 3)], (16, 64, 16, 16), _convolution(_FORWARD, stride=2)),
    "conv_of_one": ([(16, 32, 16, 16), (64, 32, 1, 1)], (16, 64, 16, 16), _convolution(_FORWARD, pad="0, 0")),
    "conv_patches": ([(16, 8, 64, 64), (64, 8, 8, 8)], (16, 64, 8, 8), _convolution(_FORWARD, stride=8, pad="0, 0")),
    "conv_input": ([(16, 64, 32, 32), (3, 3, 32, 64)], (16, 32, 32, 32), _convolution(_TO_INPUT)),
    "conv_input_strided": (
        [(16, 64, 16, 16), (3, 3, 32, 64)],
        (16, 32, 32, 32),
        _convolution(_TO_INPUT, pad="1, 2", base=2),
    ),
    "conv_weight": ([(16, 32, 32, 32), (16, 64, 32, 32)], (3, 3, 32, 64), _convolution(_TO_WEIGHT)),
    "conv_weight_of_one": (
        [(16, 32, 16, 16), (16, 64, 16, 16)],
        (1, 1, 32, 64),
        _convolution(_TO_WEIGHT, pad="0, 0"),
    ),
    "conv_weight_strided": (
        [(16, 32, 32, 32), (16, 64, 16, 16)],
        (3, 3, 32, 64),
        _convolution(_TO_WEIGHT, pad="1, 0", dilation=2),
    ),
    "depthwise": ([(16, 32, 32, 32), (32, 1, 3, 3)], (16, 32, 32, 32), _convolution(_FORWARD, feature_group_count=32)),
    "depthwise_weight": (
        [(16, 32, 32, 32), (16, 32, 32, 32)],
        (3, 3, 1, 32),
        _convolution(_TO_WEIGHT, batch_group_count=32),
    ),
    "grouped": ([(16, 32, 32, 32), (64, 8, 3, 3)], (16, 64, 32, 32), _convolution(_FORWARD, feature_group_count=4)),
    "grouped_weight": (
        [(16, 32, 32, 32), (16, 64, 32, 32)],
        (3, 3, 8, 64),
        _convolution(_TO_WEIGHT, batch_group_count=4),
    ),
    "pool": ([(16, 32, 32, 32)], (16, 32, 16, 16), _pool("reduce_window", "{0}", 2, 2, _MAXIMUM)),
    "pool_overlapping": ([(16, 32, 33, 33)], (16, 32, 16, 16), _pool("reduce_window", "{0}", 3, 2, _MAXIMUM)),
    "pool_back": (
        [(16, 32, 32, 32), (16, 32, 16, 16)],
        (16, 32, 32, 32),
        _pool("select_and_scatter", "{0}, {1}", 2, 2, f"{_GE}, {_ADD}"),
    ),
    "pool_overlapping_back": (
        [(16, 32, 32, 32), (16, 32, 15, 15)],
        (16, 32, 32, 32),
        _pool("select_and_scatter", "{0}, {1}", 3, 2, f"{_GE}, {_ADD}"),
    ),
}


def program(names: list[str] | None = None, ops: dict[str, Any] = OPS) -> tuple[Program, Graph]:
    """A module that runs each of `ops` (or those of `names`) on arguments of its own, and returns the results."""
    arguments: list[str] = []
    lines = ["%zero = stablehlo.constant dense<0.0> : tensor<f32>"]
    results, inputs, outputs, atens = [], [], [], []
    for index, (name, (operands, result, text)) in enumerate((n, ops[n]) for n in names or ops):
        read = []
        for place, shape in enumerate(operands):
            read.append(f"%{name}{place}")
            arguments.append(f"%{name}{place}: {tensor(shape)}")
            dtyped = shape if isinstance(shape[-1], str) else (*shape, "f32")
            inputs.append(Argument(f"{name}{place}", "input", TensorType(dtyped[:-1], dtyped[-1])))
        kinds = [tensor(shape) for shape in operands] + (["tensor<f32>"] if "%zero" in text else [])
        signature = tensor(result) if name in ("sum",) else f"({', '.join(kinds)}) -> {tensor(result)}"
        *before, last = text.format(*read).splitlines()
        lines += [f'{line} loc("op{index}")' for line in before]
        lines.append(f'%{name} = {last}{"" if last.endswith("xf32>") else f" : {signature}"} loc("op{index}")')
        marker = '{mhlo.sharding = "{replicated}"}'
        lines.append(
            f"%{name}_ = stablehlo.custom_call @Sharding(%{name}) {marker} : "
            f'({tensor(result)}) -> {tensor(result)} loc("op{index}.out0")'
        )
        results.append(f"%{name}_")
        outputs.append(Output(name, "output", TensorType(result, "f32")))
        atens.append(AtenOp(index, name, name, "forward", (TensorType(result, "f32"),)))
    kinds = ", ".join(tensor(output.type.shape) for output in outputs)
    body = "\n    ".join(lines)
    text = (
        f"module @zoo {{\n  func.func @main({', '.join(arguments)}) -> ({kinds}) {{\n    {body}\n"
        f"    return {', '.join(results)} : {kinds}\n  }}\n}}"
    )
    made = Program("forward", "torch_xla", {}, (), text.encode(), tuple(inputs), tuple(outputs), tuple(atens))
    return made, build_graph(made)


def tensor(shape: Shape) -> str:
    """A tensor type in MLIR."""
    return f"tensor<{'x'.join(map(str, shape if isinstance(shape[-1], str) else (*shape, 'f32')))}>"


def random_annotations(graph: Graph, mesh: Mesh, seed: int, results: float = 1.0) -> Annotations:
    """A random spec for every argument, and for a part `results` of the results; axes divide their dims."""
    rng = random.Random(seed)
    pins: dict[Value, Spec] = {
        Value(op): random_spec(rng, graph.ops[op].results[0].shape, mesh) for op in graph.arguments
    }
    for value in graph.outputs:
        if rng.random() < results:
            pins[value] = random_spec(rng, graph.type_of(value).shape, mesh)
    return Annotations(pins)


def random_spec(rng: random.Random, shape: Shape, mesh: Mesh) -> Spec:
    """Each axis on some dim that it divides, or on none."""
    dims: list[list[str]] = [[] for _ in shape]
    for axis in rng.sample(mesh.axis_names, len(mesh.axis_names)):
        fits = [d for d, size in enumerate(shape) if size % (mesh.ways(dims[d]) * mesh.axis_size(axis)) == 0]
        if fits and rng.random() < 0.7:
            dims[rng.choice(fits)].append(axis)
    return tuple(tuple(dim) for dim in dims)
