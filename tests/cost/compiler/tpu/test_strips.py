"""Activations of few images on a TPU: what is copied around collectives and for the backward pass, and what follows."""

from __future__ import annotations

from autoshard.cost.predict import Prediction, predict
from autoshard.graph.annotations import Annotations
from autoshard.graph.ops import Graph, Value
from autoshard.mesh import Mesh
from autoshard.planning.one_mesh import OneMesh
from tests.graph.helpers import graph_from_text

BOTH = ("data", "model")
BATCH = (BOTH, (), (), ())
WHOLE = ((), (), (), ())


def mesh_of(device: str) -> Mesh:
    return Mesh((2, 4), BOTH, device=device)


def network(images: int, features: int = 256) -> Graph:
    """Three convolutions, and the gradient of the second's kernel: what it reads waits while the third runs."""
    image, kernel = f"tensor<{images}x{features}x16x16xf32>", f"tensor<{features}x{features}x1x1xf32>"
    window = "window = {stride = [1, 1]} {batch_group_count = 1 : i64, feature_group_count = 1 : i64}"

    def convolution(labels: str, operands: str, types: str) -> str:
        return f"stablehlo.convolution({operands}) dim_numbers = {labels}, {window} : {types}"

    forward, kinds = "[b, f, 0, 1]x[o, i, 0, 1]->[b, f, 0, 1]", f"({image}, {kernel}) -> {image}"
    turned = f"tensor<1x1x{features}x{features}xf32>"
    return graph_from_text(
        f"""module {{ func.func public @main(%x: {image}, %u: {kernel}, %v: {kernel}, %w: {kernel}) -> {turned} {{
      %a = {convolution(forward, "%x, %u", kinds)}
      %n = stablehlo.negate %a : {image}
      %b = {convolution(forward, "%n, %v", kinds)}
      %c = {convolution(forward, "%b, %w", kinds)}
      %g = {convolution("[f, b, 0, 1]x[i, o, 0, 1]->[0, 1, b, f]", "%n, %c", f"({image}, {image}) -> {turned}")}
      return %g : {turned} }} }}""",
        roles=["input", *3 * ["parameter"]],
    )


def predicted(graph: Graph, device: str, last: tuple[tuple[str, ...], ...] = WHOLE) -> Prediction:
    """Images are split over all devices, the third kernel as `last` says."""
    pins = {Value(op): spec for op, spec in zip(graph.arguments, (BATCH, WHOLE, WHOLE, last), strict=True)}
    return predict(graph, Annotations(pins), mesh_of(device))


def test_activations_are_put_together_around_an_all_to_all() -> None:
    """Four images to a device are strips; eight fill a tile, and lie as an all-to-all moves them."""
    around = {}
    for images in (32, 64):
        graph = network(images)
        pins = {Value(op): spec for op, spec in zip(graph.arguments, (BATCH, WHOLE, WHOLE, WHOLE), strict=True)}
        first = next(op.id for op in graph.ops if op.kind == "convolution")
        moved = Annotations(pins | {Value(first): BATCH, Value(first + 1): ((), BOTH, (), ())})
        kinds = [kernel.kind for kernel in predict(graph, moved, mesh_of("tpu-v5p")).compiled.kernels]
        before, after = kinds[: kinds.index("all-to-all")], kinds[kinds.index("all-to-all") + 1 :]
        around[images] = before[-1] == "copy", after[0] == "copy"
    assert around == {32: (True, True), 64: (False, False)}


def test_an_input_of_which_parts_are_read_is_split() -> None:
    """A whole one is copied on chip whole, and gives every device all images."""
    graph = network(64)
    chosen = OneMesh(graph, mesh_of("tpu-v5e")).candidate(None).annotations
    assert chosen.pins[Value(graph.arguments[0])][0]
