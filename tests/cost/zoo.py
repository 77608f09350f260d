"""Programs of many independent ops, with random shardings: what the partitioner's model is held against."""

from __future__ import annotations

import random

from autoshard.capture.program import Argument, AtenOp, Output, Program, TensorType
from autoshard.graph.annotations import Annotations
from autoshard.graph.ops import Graph, Value
from autoshard.graph.stablehlo import build_graph
from autoshard.mesh import Mesh, Spec

Shape = tuple[int, ...]

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


def program(names: list[str] | None = None) -> tuple[Program, Graph]:
    """A module that runs each op of `OPS` (or of `names`) on arguments of its own, and returns the results."""
    arguments: list[str] = []
    lines = ["%zero = stablehlo.constant dense<0.0> : tensor<f32>"]
    results, inputs, outputs, atens = [], [], [], []
    for index, (name, (operands, result, text)) in enumerate((n, OPS[n]) for n in names or OPS):
        read = []
        for place, shape in enumerate(operands):
            read.append(f"%{name}{place}")
            arguments.append(f"%{name}{place}: {tensor(shape)}")
            inputs.append(Argument(f"{name}{place}", "input", TensorType(shape, "f32")))
        kinds = [tensor(shape) for shape in operands] + (["tensor<f32>"] if "init" in text else [])
        signature = tensor(result) if name in ("sum",) else f"({', '.join(kinds)}) -> {tensor(result)}"
        lines.append(f'%{name} = {text.format(*read)} : {signature} loc("op{index}")')
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
    return f"tensor<{'x'.join(map(str, (*shape, 'f32')))}>"


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
