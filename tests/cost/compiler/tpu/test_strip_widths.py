"""How wide the strips are that a TPU's compiler cuts few images into, and what is in memory because of them."""

from __future__ import annotations

import pytest

from autoshard.cost.compiler.backend import Compiled
from autoshard.cost.compiler.tpu.strip_widths import Window
from autoshard.cost.compiler.tpu.strips import EDGES, MASK
from autoshard.cost.predict import predict
from autoshard.graph.annotations import Annotations
from autoshard.graph.ops import Graph, Value
from autoshard.mesh import Mesh
from autoshard.stablehlo.annotate import annotate
from autoshard.verify.compile import compile_module
from autoshard.verify.targets import parse_target
from tests.cost.compiler.tpu.test_conv import Written
from tests.graph.helpers import graph_from_text

BOTH = ("data", "model")
BATCH = (BOTH, (), (), ())
ONES = "{batch_group_count = 1 : i64, feature_group_count = 1 : i64}"

# As seen in steps of ResNet, U-Net and a denoiser compiled for v5e and v5p (libtpu 0.0.51): size, result, taps, stride,
# padding below and above, how far apart what is read lies; stride of a pooling behind -> width of the result's strips.
FIRST = [
    ((64, 64, 3, 1, 1, 1, 1), 1, 9),
    ((128, 128, 3, 1, 1, 1, 1), 1, 17),
    ((32, 32, 3, 1, 1, 1, 1), 1, 5),
    ((56, 56, 1, 1, 0, 0, 1), 1, 7),
    ((224, 112, 7, 2, 3, 3, 1), 2, 16),
    ((96, 96, 3, 1, 1, 1, 1), 1, 13),
    ((14, 14, 1, 1, 0, 0, 1), 1, 0),
]
FOLLOWING = [
    ((64, 64, 3, 1, 1, 1, 1), 9, 9),
    ((64, 32, 3, 2, 1, 1, 1), 9, 4),
    ((32, 32, 3, 1, 1, 1, 1), 4, 4),
    ((56, 28, 3, 2, 1, 1, 1), 7, 4),
    ((28, 14, 3, 2, 1, 1, 1), 4, 2),
    ((28, 56, 1, 1, 0, 1, 2), 4, 8),
]


@pytest.mark.parametrize(("window", "pooled", "width"), FIRST)
def test_strips_hold_the_padding_of_the_first_window(window: tuple[int, ...], pooled: int, width: int) -> None:
    found = Window(*window)
    assert found.fits
    assert found.result(found.first(pooled)) == width


@pytest.mark.parametrize("size", [32, 64, 96])
def test_the_compiler_cuts_strips_as_wide(size: int) -> None:
    """Two images to a device, 8 strips each; a result is (rows, images in strips, width, features)."""
    pytest.importorskip("libtpu")
    written = Written()
    images, kernel = written.argument((16, 64, size, size)), written.argument((64, 64, 3, 3))
    written.convolution("forward", images, kernel, 3)
    graph, _ = written.graph()
    pins = {Value(graph.arguments[images]): BATCH, Value(graph.arguments[kernel]): ((),) * 4}
    mesh = Mesh((2, 4), BOTH, device="tpu-v5e")
    module = annotate(graph.program, graph, Annotations(pins | {graph.aten_outputs[0, 0]: BATCH}), mesh)
    compiled = compile_module(module, parse_target("tpu-v5e:2x4", mesh.size))
    window = Window(size, size, 3, 1, 1, 1, 1)
    assert f" = f32[{size},16,{window.result(window.first(1))},64]" in next(
        line for line in compiled.hlo_text.splitlines() if " convolution(" in line
    )


@pytest.mark.parametrize(("window", "before", "after"), FOLLOWING)
def test_convolutions_keep_strips_as_wide_as_they_come_where_they_can(
    window: tuple[int, ...], before: int, after: int
) -> None:
    found = Window(*window)
    assert found.result(found.following(before)) == after


def test_a_halo_wider_than_a_strip_is_not_cut() -> None:
    assert not Window(32, 32, 9, 1, 4, 4, 1).fits


def compiled(graph: Graph, device: str = "tpu-v5e") -> Compiled:
    """Images, the first argument, are split over all devices."""
    mesh = Mesh((2, 4), BOTH, device=device)
    whole = {Value(op): ((),) * len(graph.type_of(Value(op)).shape) for op in graph.arguments}
    return predict(graph, Annotations(whole | {Value(graph.arguments[0]): BATCH}), mesh).compiled


def normalised(images: int, dims: str = "0, 1") -> Graph:
    """A convolution of 3 x 3 taps, its sum over space scaled by the mean of each image and feature, and another."""
    image, kernel, stat = f"tensor<{images}x64x64x64xf32>", "tensor<64x64x3x3xf32>", f"tensor<{images}x64xf32>"
    if dims == "1":
        stat = "tensor<64xf32>"
    over = "2, 3" if dims == "0, 1" else "0, 2, 3"
    window = f"window = {{stride = [1, 1], pad = [[1, 1], [1, 1]]}} {ONES}"
    labels = "dim_numbers = [b, f, 0, 1]x[o, i, 0, 1]->[b, f, 0, 1]"
    return graph_from_text(
        f"""module {{ func.func public @main(%x: {image}, %u: {kernel}, %v: {kernel}) -> {image} {{
      %zero = stablehlo.constant dense<0.0> : tensor<f32>
      %a = stablehlo.convolution(%x, %u) {labels}, {window} : ({image}, {kernel}) -> {image}
      %s = stablehlo.reduce(%a init: %zero) applies stablehlo.add across dimensions = [{over}]
        : ({image}, tensor<f32>) -> {stat}
      %m = stablehlo.broadcast_in_dim %s, dims = [{dims}] : ({stat}) -> {image}
      %n = stablehlo.subtract %a, %m : {image}
      %b = stablehlo.convolution(%n, %v) {labels}, {window} : ({image}, {kernel}) -> {image}
      return %b : {image} }} }}""",
        roles=["input", "parameter", "parameter"],
    )


def test_what_differs_between_images_is_broadcast_before_it_is_cut_into_strips() -> None:
    for images, dims, expected in ((16, "0, 1", 1), (16, "1", 0), (64, "0, 1", 0)):
        kernels = compiled(normalised(images, dims)).kernels
        assert sum(kernel.kind == "broadcast_in_dim" for kernel in kernels) == expected


def test_strips_are_padded_in_memory_and_their_sums_read_a_mask() -> None:
    found = compiled(normalised(16, "1"))
    arrays = found.program.arrays
    first = next(kernel for kernel in found.kernels if kernel.flops)
    assert [arrays[array].strips for array in first.writes] == [9, 0]  # the sum is a result of its kernel
    assert arrays[first.writes[0]].bytes == 64 * 16 * 9 * 128 * 4  # rows, images in strips, width, lanes
    assert sum(step.kind == MASK for step in found.program.steps) == 1
    assert not any(step.kind == MASK for step in compiled(normalised(64, "1")).program.steps)


def test_a_convolution_with_a_halo_reads_strips_from_memory() -> None:
    found = compiled(normalised(16))
    last = [kernel for kernel in found.kernels if kernel.flops][-1]
    assert [found.program.steps[step].kind for step in last.steps] == ["convolution"]
    edges = [kernel for kernel in found.kernels if kernel.kind == EDGES]
    assert {array for kernel in edges[-2:] for array in kernel.writes} <= {*last.reads}
    found = compiled(normalised(64))
    whole = [kernel for kernel in found.kernels if kernel.flops][-1]
    assert "subtract" in {found.program.steps[step].kind for step in whole.steps}
