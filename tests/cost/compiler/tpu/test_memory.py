"""Memory predicted for TPUs against what libtpu lays out: a step of a three-layer network, written by hand.

One phenomenon a case: everything on chip; saved activations in device memory, those of products alone; gradients that
are all-reduced; weights gathered for one product each.
"""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch

import autoshard
from autoshard.cost.predict import Prediction
from autoshard.graph.annotations import Annotations
from autoshard.graph.ops import Graph, Value
from autoshard.mesh import Mesh, Spec
from autoshard.program import Argument, AtenOp, Output, Program, TensorType
from autoshard.stablehlo.reader import build_graph
from autoshard.verify.compile import Compiled, compile_module
from autoshard.verify.work import compiled_work
from tests.graph.helpers import program_from_text

pytest.importorskip("libtpu")
MESH = Mesh((2, 4), ("data", "model"), device="tpu-v5e")


def network(rows: int, width: int) -> Graph:
    """`x -> tanh(x w0) -> tanh(. w1) -> . w2`, half its squared norm differentiated by hand, and one step of SGD."""
    x, w = f"tensor<{rows}x{width}xf32>", f"tensor<{width}x{width}xf32>"
    atens: list[AtenOp] = []
    lines: list[str] = []

    def emit(name: str, text: str, kind: str) -> str:
        shape = (rows, width) if kind == x else (width, width)
        number = len(atens)
        atens.append(AtenOp(number, name, "net", "forward", (TensorType(shape, "f32"),)))
        lines.append(f'%{name} = stablehlo.{text} loc("op{number}")')
        lines.append(
            f'%{name}_ = stablehlo.custom_call @Sharding(%{name}) {{mhlo.sharding = "{{replicated}}"}}'
            f' : ({kind}) -> {kind} loc("op{number}.out0")'
        )
        return f"%{name}_"

    def product(name: str, one: str, other: str, dims: str, kinds: str, kind: str) -> str:
        return emit(name, f"dot_general {one}, {other}, contracting_dims = {dims} : ({kinds}) -> {kind}", kind)

    def binary(name: str, what: str, one: str, other: str, kind: str) -> str:
        return emit(name, f"{what} {one}, {other} : {kind}", kind)

    inputs = ["%x"]
    for layer in range(3):
        made = product(f"z{layer}", inputs[-1], f"%w{layer}", "[1] x [0]", f"{x}, {w}", x)
        inputs.append(emit(f"a{layer}", f"tanh {made} : {x}", x) if layer < 2 else made)
    gradient = inputs[-1]
    updated = []
    for layer in (2, 1, 0):
        if layer < 2:
            square = binary(f"s{layer}", "multiply", inputs[layer + 1], inputs[layer + 1], x)
            part = binary(f"t{layer}", "multiply", gradient, square, x)
            gradient = binary(f"g{layer}", "subtract", gradient, part, x)
        step = product(f"d{layer}", inputs[layer], gradient, "[0] x [0]", f"{x}, {x}", w)
        updated.append(binary(f"u{layer}", "subtract", f"%w{layer}", step, w))
        if layer:
            gradient = product(f"b{layer}", gradient, f"%w{layer}", "[1] x [1]", f"{x}, {w}", x)
    body = "\n    ".join(lines)
    text = (
        f"module @net {{\n  func.func @main(%x: {x}, %w0: {w}, %w1: {w}, %w2: {w}) -> ({w}, {w}, {w}) {{\n    {body}\n"
        f"    return {', '.join(updated)} : {w}, {w}, {w}\n  }}\n}}"
    )
    weight = TensorType((width, width), "f32")
    program = Program(
        "train",
        "torch_xla",
        {},
        (),
        text.encode(),
        (
            Argument("x", "input", TensorType((rows, width), "f32")),
            *(Argument(f"w{layer}", "parameter", weight) for layer in range(3)),
        ),
        tuple(Output(f"w{layer}", "parameter", weight, updates=layer + 1) for layer in (2, 1, 0)),
        tuple(atens),
    )
    return build_graph(program)


def both(graph: Graph, annotations: Annotations, device: str, target: str) -> tuple[Prediction, Compiled]:
    """What is predicted and what is compiled."""
    from autoshard.cost.predict import predict
    from autoshard.stablehlo.annotate import annotate, donated

    mesh = dataclasses.replace(MESH, device=device, placement=())
    module = annotate(graph.program, graph, annotations, mesh)
    compiled = compile_module(module, target, donate=donated(graph.program))
    return predict(graph, annotations, mesh), compiled


ROWS: Spec = (("data", "model"), ())
WHOLE: Spec = ((), ())


@pytest.mark.parametrize(
    ("rows", "weights", "device", "target"),
    [
        (16384, WHOLE, "tpu-v5e", "tpu-v5e:2x4"),  # activations of 8 MB: all on chip
        (524288, WHOLE, "tpu-v5e", "tpu-v5e:2x4"),  # of 268 MB: none
        (524288, ROWS, "tpu-v5e", "tpu-v5e:2x4"),  # weights gathered, gradients scattered
    ],
)
def test_predicted_peaks_are_what_is_laid_out(rows: int, weights: Spec, device: str, target: str) -> None:
    graph = network(rows, 1024)
    pins = {Value(op): ROWS if number == 0 else weights for number, op in enumerate(graph.arguments)}
    pins |= dict.fromkeys(graph.outputs, weights)
    predicted, compiled = both(graph, Annotations(pins), device, target)
    work = compiled_work(compiled.hlo_text, "tpu")
    assert predicted.peak_memory_bytes == pytest.approx(compiled.memory.peak, rel=0.15)
    assert predicted.compiled.flops == pytest.approx(work.flops, rel=0.01)


def test_images_are_copied_once_in_tiles_of_batch_and_channels() -> None:
    """Three channels take four rows of a tile, 16 images 128 lanes: 25 MB are 268, for patches and their gradient."""
    x, w, y = "tensor<128x3x512x512xf32>", "tensor<128x3x16x16xf32>", "tensor<128x128x32x32xf32>"
    ones = "{batch_group_count = 1 : i64, feature_group_count = 1 : i64}"
    text = f"""module @patches {{
  func.func @main(%x: {x}, %w: {w}) -> {w} {{
    %y = stablehlo.convolution(%x, %w) dim_numbers = [b, f, 0, 1]x[o, i, 0, 1]->[b, f, 0, 1],
      window = {{stride = [16, 16]}} {ones} : ({x}, {w}) -> {y}
    %d = stablehlo.tanh %y : {y}
    %g = stablehlo.convolution(%x, %d) dim_numbers = [f, b, 0, 1]x[i, o, 0, 1]->[0, 1, b, f],
      window = {{rhs_dilate = [16, 16]}} {ones} : ({x}, {y}) -> tensor<16x16x3x128xf32>
    %t = stablehlo.transpose %g, dims = [3, 2, 0, 1] : (tensor<16x16x3x128xf32>) -> {w}
    %n = stablehlo.subtract %w, %t : {w}
    return %n : {w}
  }}
}}"""
    graph = build_graph(program_from_text(text, ["input", "parameter"], updates={0: 1}))
    images = Annotations({Value(0): (("data", "model"), (), (), ())})
    predicted, compiled = both(graph, images, "tpu-v5e", "tpu-v5e:2x4")
    assert predicted.compiled.temporary_bytes == pytest.approx(compiled.memory.temp, rel=0.02)


def activation(rows: int, width: int) -> Graph:
    """`z = x w`, `m = z tanh(z)`, of which a product reads the whole, and another one a device's part."""
    x, w = f"tensor<{rows}x{width}xf32>", f"tensor<{width}x{width}xf32>"
    texts = {
        "z": (f"dot_general %x, %w, contracting_dims = [1] x [0] : ({x}, {w}) -> {x}", x),
        "t": (f"tanh %z_ : {x}", x),
        "m": (f"multiply %z_, %t_ : {x}", x),
        "o": (f"dot_general %m_, %w, contracting_dims = [1] x [0] : ({x}, {w}) -> {x}", x),
        "d": (f"dot_general %m_, %x, contracting_dims = [0] x [0] : ({x}, {x}) -> {w}", w),
        "e": (f"dot_general %o_, %o_, contracting_dims = [0] x [0] : ({x}, {x}) -> {w}", w),
    }
    lines = [
        f'%{name} = stablehlo.{text} loc("op{number}")\n    %{name}_ = stablehlo.custom_call @Sharding(%{name})'
        f' {{mhlo.sharding = "{{replicated}}"}} : ({kind}) -> {kind} loc("op{number}.out0")'
        for number, (name, (text, kind)) in enumerate(texts.items())
    ]
    body = "\n    ".join(lines)
    text = (
        f"module @net {{\n  func.func @main(%x: {x}, %w: {w}) -> ({w}, {w}) {{\n    {body}\n"
        f"    return %d_, %e_ : {w}, {w}\n  }}\n}}"
    )
    types = {x: TensorType((rows, width), "f32"), w: TensorType((width, width), "f32")}
    atens = tuple(
        AtenOp(number, name, "net", "forward", (types[kind],)) for number, (name, (_, kind)) in enumerate(texts.items())
    )
    arguments = (Argument("x", "input", types[x]), Argument("w", "parameter", types[w]))
    outputs = (Output("d", "result", types[w]), Output("e", "result", types[w]))
    return build_graph(Program("train", "torch_xla", {}, (), text.encode(), arguments, outputs, atens))


@pytest.mark.parametrize("target", ["tpu-v5e:2x4", "tpu-v5p:2x2x2"])
def test_what_a_part_is_taken_of_is_kept(target: str) -> None:
    """GPT-2's automatic plan on v5p, four f32 arrays of a GELU: -20 %. What reads the whole makes it again."""
    graph = activation(65536, 1024)
    found = {op.aten: Value(op.id) for op in graph.ops if op.aten is not None}
    quarter: Spec = (("model",), ())
    pins = {Value(graph.arguments[0]): quarter, Value(graph.arguments[1]): WHOLE, found[3]: (("model", "data"), ())}
    pins |= dict.fromkeys((found[0], found[1], found[2]), quarter) | dict.fromkeys(graph.outputs, WHOLE)
    predicted, compiled = both(graph, Annotations(pins), target.partition(":")[0], target)
    entry = compiled.hlo_text[compiled.hlo_text.index("\nENTRY") :]
    made = {
        (kind, int(rows))
        for results in re.findall(r"= (\S+|\(.*?\)) fusion\(", entry)
        for kind, rows in re.findall(r"(f32|bf16)\[(\d+),1024\]", results)
    }
    program = predicted.compiled.program
    writes = [program.arrays[array] for kernel in predicted.compiled.kernels for array in kernel.writes]
    assert made == {(array.dtype, array.shape[0]) for array in writes if array.shape}
    assert ("bf16", 16384) in made
    product = next(k for k in predicted.compiled.kernels if any(program.steps[s].op == found[4].op for s in k.steps))
    assert {program.arrays[array].dtype for array in product.reads} == {"f32"}


class Shifted(torch.nn.Module):
    """A penalty on the logits of all but the last position."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head = torch.nn.Linear(256, 256), torch.nn.Linear(256, 262144, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.trunk(x))[:, :-1].flatten(0, 1).float().logsumexp(-1).pow(2).mean()


def test_logits_without_the_last_position_are_copied_to_be_flattened() -> None:
    """511 positions make no whole tiles: libtpu stores the logits, and their f32 copy."""
    program = autoshard.capture(
        Shifted().bfloat16(),
        (torch.randn(8, 512, 256, dtype=torch.bfloat16),),
        loss_fn=lambda loss: loss,
        optimizer=lambda own: torch.optim.SGD(own, lr=0.1),
    )
    graph = build_graph(program)
    plan = autoshard.plan_program(program, MESH, hints={"head.weight": [("data", "model"), ()], "x": ((), (), ())})
    predicted, compiled = both(graph, plan.annotations(graph), "tpu-v5e", "tpu-v5e:2x4")
    assert predicted.peak_memory_bytes == pytest.approx(compiled.memory.peak, rel=0.15)
