"""What compilers rewrite before they fuse, on programs small enough to read."""

from __future__ import annotations

import pytest

from autoshard.cost.compiler.gpu.backend import GpuBackend
from autoshard.cost.compiler.lowered import Lowered, lower
from autoshard.cost.compiler.rewrite import folded_transposes
from autoshard.cost.machine.device import load_device
from autoshard.cost.partitioner.partition import partition
from autoshard.cost.partitioner.propagate import propagate
from autoshard.graph.annotations import Annotations
from autoshard.graph.ops import Value
from autoshard.mesh import Mesh
from tests.graph.helpers import graph_from_text


def turned(order: tuple[int, int, int], returned: bool = False) -> Lowered:
    """A batch of products, one of whose operands goes through a transpose."""
    kind = "tensor<4x8x8xf32>" if order[0] == 0 else "tensor<8x4x8xf32>"
    back = "tensor<4x8x8xf32>"
    result = f"{back}, {back}" if returned else back
    text = f"""module {{ func.func public @main(%x: {back}, %w: {kind}) -> ({result}) {{
      %s = stablehlo.sine %w : {kind}
      %t = stablehlo.transpose %s, dims = {list(order)} : ({kind}) -> {back}
      %z = stablehlo.dot_general %x, %t, batching_dims = [0] x [0], contracting_dims = [2] x [1]
        : ({back}, {back}) -> {back}
      return %z{", %t" if returned else ""} : {result} }} }}"""
    graph = graph_from_text(text)
    shardings = propagate(graph, Annotations({}), Mesh((2, 4), ("data", "model")))
    return lower(graph, shardings, partition(graph, shardings, "cpu"))


@pytest.mark.parametrize(
    ("order", "returned", "kinds"),
    [
        ((0, 2, 1), False, ["sine", "dot_general"]),  # rows and columns: the product reads what is behind
        ((0, 2, 1), True, ["sine", "transpose", "dot_general"]),  # something else needs it
        ((1, 0, 2), False, ["sine", "transpose", "dot_general"]),  # batches are no rows
    ],
)
def test_a_product_reads_what_is_behind_a_transposed_matrix(order, returned, kinds) -> None:
    found = folded_transposes(turned(order, returned))
    assert [step.kind for step in found.steps] == kinds
    sine, product = found.steps[0], found.steps[-1]
    assert (product.reads[1] == sine.writes[0]) == (order == (0, 2, 1))
    assert len(found.steps) - 1 in found.arrays[product.reads[1]].readers


def convolved(split: bool) -> list[tuple[str, tuple[str, ...]]]:
    """Kinds of the steps, with those that make what they read, of a convolution and its input's gradient on a GPU."""
    image, kernel, turned = "tensor<8x16x6x6xf32>", "tensor<8x16x3x3xf32>", "tensor<3x3x16x8xf32>"
    grad = "tensor<8x8x6x6xf32>"
    window = "window = {pad = [[1, 1], [1, 1]]}"
    groups = "{batch_group_count = 1 : i64, feature_group_count = 1 : i64}"
    text = f"""module {{ func.func public @main(%x: {image}, %w: {kernel}) -> {image} {{
      %y = stablehlo.convolution(%x, %w) dim_numbers = [b, f, 0, 1]x[o, i, 0, 1]->[b, f, 0, 1], {window} {groups}
        : ({image}, {kernel}) -> {grad}
      %t = stablehlo.transpose %w, dims = [2, 3, 1, 0] : ({kernel}) -> {turned}
      %r = stablehlo.reverse %t, dims = [0, 1] : {turned}
      %z = stablehlo.convolution(%y, %r) dim_numbers = [b, f, 0, 1]x[0, 1, o, i]->[b, f, 0, 1], {window} {groups}
        : ({grad}, {turned}) -> {image}
      return %z : {image} }} }}"""
    graph = graph_from_text(text)
    mesh = Mesh((2, 4), ("data", "model"))
    batch, rows = (("data", "model"), (), (), ()), (("data", "model"), (), (), ())
    pins = {Value(graph.arguments[0]): batch, Value(graph.arguments[1]): rows if split else ((), (), (), ())}
    shardings = propagate(graph, Annotations(pins | {graph.outputs[0]: batch}), mesh)
    lowered = lower(graph, shardings, partition(graph, shardings, "gpu"))
    found = GpuBackend(load_device("h100")).rewrites(lowered)
    makers = [array.maker for array in found.arrays]
    names = [step.kind for step in found.steps]
    return [
        (step.kind, tuple("argument" if makers[array] < 0 else names[makers[array]] for array in step.reads))
        for step in found.steps
    ]


def test_both_passes_read_one_copy_of_a_kernel_in_the_order_of_cudnn() -> None:
    assert convolved(split=False) == [
        ("transpose", ("argument",)),
        ("transpose", ("argument",)),  # the images, features last
        ("convolution", ("transpose", "transpose")),
        ("convolution", ("convolution", "transpose")),
    ]


def test_a_gradient_gathers_its_kernel_as_the_argument_lies() -> None:
    found = convolved(split=True)
    assert [read for kind, read in found if kind == "all-gather"] == [("argument",)] * 2
    assert [read[1] for kind, read in found if kind == "convolution"] == ["transpose"] * 2
    assert [read for kind, read in found if kind == "transpose"] == [("argument",), ("all-gather",), ("all-gather",)]
