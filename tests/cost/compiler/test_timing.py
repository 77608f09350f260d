"""Seconds of a step: the compiler's kernels, and collectives as it combines them."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest

from autoshard.cost.compiler.lowered import matrices_of
from autoshard.cost.machine.collectives import seconds
from autoshard.cost.machine.device import load_device
from autoshard.cost.predict import predict
from autoshard.graph.annotations import Annotations
from autoshard.graph.ops import Value
from autoshard.mesh import Mesh
from tests.graph.helpers import graph_from_text


def two_products() -> str:
    """Two products of one x, each summed over its rows."""
    kinds = "%x: tensor<64x16xf32>, %a: tensor<64x32xf32>, %b: tensor<64x32xf32>"
    dims = "contracting_dims = [0] x [0] : (tensor<64x16xf32>, tensor<64x32xf32>) -> tensor<16x32xf32>"
    return f"""func.func @main({kinds}) -> (tensor<16x32xf32>, tensor<16x32xf32>) {{
      %0 = stablehlo.dot_general %x, %a, {dims}
      %1 = stablehlo.dot_general %x, %b, {dims}
      return %0, %1 : tensor<16x32xf32>, tensor<16x32xf32>
    }}"""


@pytest.mark.parametrize("kind", ["cpu", "h100", "tpu-v5e"])
def test_collectives_that_are_combined_start_once(kind):
    graph = graph_from_text(two_products())
    mesh, device = Mesh((2, 4), ("data", "model"), kind), load_device(kind)
    rows = (("data", "model"), ())
    found = predict(graph, Annotations({Value(i): rows for i in range(3)}), mesh, device)
    assert [each.kind for each in found.collectives] == ["all-reduce"] * 2
    assert found.communication_s == pytest.approx(
        2 * seconds("all-reduce", mesh.axis_names, 16 * 32 * 4, mesh, device, 2)
    )


def test_a_windowed_einsum_within_groups_of_devices_reads_the_shapes_of_its_flops():
    graph = graph_from_text(
        """func.func @main(%x: tensor<32x2048x32768xbf16>, %w: tensor<10240x32768xbf16>) -> tensor<32x2048x10240xbf16> {
          %0 = stablehlo.dot_general %x, %w, contracting_dims = [2] x [1] :
            (tensor<32x2048x32768xbf16>, tensor<10240x32768xbf16>) -> tensor<32x2048x10240xbf16>
          return %0 : tensor<32x2048x10240xbf16>
        }"""
    )
    mesh, device = Mesh((2, 4, 4), ("dp", "fsdp", "tp"), "tpu-v5p"), load_device("tpu-v5p")
    rows, (made,) = (("dp", "fsdp"), (), ("tp",)), graph.outputs
    graph = replace(graph, ops=tuple(replace(op, aten=op.id) if op.id == made.op else op for op in graph.ops))
    graph = replace(graph, aten_outputs={(made.op, 0): made})
    found = predict(graph, Annotations({Value(0): rows, Value(1): (("fsdp",), ("tp",)), made: rows}), mesh, device)
    assert "collective-permute" in {each.kind for each in found.collectives}
    (product,) = (step for step in found.compiled.program.steps if step.kind == "dot_general")
    assert product.flops == 2 * prod(matrices_of(found.compiled.program, product))


def test_a_product_within_groups_of_devices_reads_the_shapes_of_its_flops():
    graph = graph_from_text(
        """func.func @main(%g: tensor<8x64x32xf32>, %x: tensor<8x64x16xf32>) -> tensor<32x16xf32> {
          %0 = stablehlo.dot_general %g, %x, contracting_dims = [0, 1] x [0, 1] :
            (tensor<8x64x32xf32>, tensor<8x64x16xf32>) -> tensor<32x16xf32>
          return %0 : tensor<32x16xf32>
        }"""
    )
    mesh, device = Mesh((2, 4), ("data", "model"), "h100"), load_device("h100")
    specs = (("data",), (), ("model",)), (("data",), ("model",), ()), (("model", "data"), ())
    found = predict(graph, Annotations({Value(i): spec for i, spec in enumerate(specs)}), mesh, device)
    (product,) = (step for step in found.compiled.program.steps if step.kind == "dot_general")
    assert product.flops == 2 * prod(matrices_of(found.compiled.program, product))


def test_a_gpu_copies_combined_sums_into_one_array_and_out_of_it():
    graph = graph_from_text(two_products())
    mesh, device = Mesh((2, 4), ("data", "model"), "h100"), load_device("h100")
    rows = (("data", "model"), ())
    found = predict(graph, Annotations({Value(i): rows for i in range(3)}), mesh, device)
    sums, products = 2 * 16 * 32 * 4, (8 * 16 + 2 * (8 * 32 + 16 * 32)) * 4  # x is read once
    assert found.compiled.moved_bytes == products + 4 * sums


@pytest.mark.parametrize("kind", ["cpu", "h100"])
def test_what_runs_in_its_readers_kernel_takes_no_time_of_its_own(kind):
    elementwise = "stablehlo.add %x, %x : tensor<1024x1024xf32>"
    chain = f"""func.func @main(%x: tensor<1024x1024xf32>, %y: tensor<1024x1024xf32>) -> tensor<1024x1024xf32> {{
      %0 = {elementwise}
      %1 = stablehlo.transpose %0, dims = [1, 0] : (tensor<1024x1024xf32>) -> tensor<1024x1024xf32>
      %2 = stablehlo.multiply %1, %y : tensor<1024x1024xf32>
      return %2 : tensor<1024x1024xf32>
    }}"""
    mesh, device = Mesh((2, 4), ("data", "model"), kind), load_device(kind)
    found = predict(graph_from_text(chain), Annotations({}), mesh, device)
    moved = found.compiled.moved_bytes / (device.memory_bandwidth * device.achievable_memory)
    assert len(found.compiled.kernels) == 1
    assert found.step_time_s == found.compute_s == pytest.approx(moved + device.kernel_overhead)
    assert seconds("all-reduce", ("data",), 0, mesh, device) == 0
