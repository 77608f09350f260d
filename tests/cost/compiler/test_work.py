"""The program of which nothing is split, which prices groups: made without propagation and partitioner, alike."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoshard.cost.compiler.backends import backend_of
from autoshard.cost.compiler.lowered import lower
from autoshard.cost.compiler.traffic import touched
from autoshard.cost.compiler.work import group_works, larger, replicated_program
from autoshard.cost.machine import cycles
from autoshard.cost.machine.device import load_device
from autoshard.cost.partitioner.partition import partition
from autoshard.cost.partitioner.propagate import propagate
from autoshard.graph.annotations import Annotations
from autoshard.graph.groups import fusion_groups
from autoshard.graph.ops import Value
from autoshard.mesh import Mesh
from tests.cost.zoo import program
from tests.graph.helpers import graph_from_text


@pytest.mark.parametrize("kind", ["cpu", "h100", "tpu-v5e"])
def test_a_program_of_which_nothing_is_split_is_that_of_no_annotations(kind):
    mesh, device = Mesh((2, 4), ("data", "model"), kind), load_device(kind)
    _, graph = program()
    shardings = propagate(graph, Annotations({}), mesh, device.target)
    partitioned = partition(graph, shardings, device.target)
    known = lower(graph, shardings, partitioned, device.compiler)
    found = replicated_program(graph, mesh, device)

    def rows(items):
        return [tuple(getattr(item, name) for name in item.__slots__) for item in items]

    assert rows(found.steps) == rows(known.steps)
    assert rows(found.arrays) == rows(known.arrays)
    assert found.results == known.results


def test_a_tpus_kernels_are_those_of_a_larger_one_placed_anew():
    x, w = "tensor<512x256xf32>", "tensor<256x256xf32>"
    dot = f"contracting_dims = [1] x [0] : ({x}, {w}) -> {x}"
    text = f"""func.func @main(%x: {x}, %w: {w}) -> {x} {{
      %0 = stablehlo.dot_general %x, %w, {dot}
      %1 = stablehlo.dot_general %0, %w, {dot}
      %2 = stablehlo.add %0, %1 : {x}
      %3 = stablehlo.dot_general %2, %w, {dot}
      return %3 : {x}
    }}"""
    mesh, device = Mesh((8,), ("x",), "tpu-v5e"), replace(load_device("tpu-v5e"), on_chip_bytes=2**16)
    whole = replicated_program(graph_from_text(text), mesh, device)
    few, many = backend_of(device), backend_of(larger(device, 64))
    alone, large = few.compile(whole), many.compile(whole)
    again = few.placed(large)
    assert again.placement == alone.placement
    assert again.placement != large.placement
    assert again.peak_bytes == alone.peak_bytes


@pytest.mark.parametrize(("made", "moved"), [("made where it is added", 2 * 8 * 64 * 64 * 4), ("in memory", None)])
def test_a_scatter_of_what_is_made_in_its_kernel_moves_no_more_than_its_target(made, moved):
    """A token's gradient of its expert's weight, an outer product: 512 of them meet in 8 experts."""
    target, updates = "tensor<8x64x64xf32>", "tensor<512x64x64xf32>"
    if moved is None:
        arguments, outer = f"%u: {updates}", ""
    else:
        arguments = "%a: tensor<512x64x1xf32>, %b: tensor<512x1x64xf32>"
        outer = (
            "%u = stablehlo.dot_general %a, %b, batching_dims = [0] x [0], contracting_dims = [2] x [1] : "
            f"(tensor<512x64x1xf32>, tensor<512x1x64xf32>) -> {updates}"
        )
    text = f"""func.func @main(%t: {target}, %i: tensor<512x1xi32>, {arguments}) -> {target} {{
      {outer}
      %s = "stablehlo.scatter"(%t, %i, %u) <{{scatter_dimension_numbers = #stablehlo.scatter<
          update_window_dims = [1, 2], inserted_window_dims = [0], scatter_dims_to_operand_dims = [0],
          index_vector_dim = 1>}}> ({{
        ^bb0(%x: tensor<f32>, %y: tensor<f32>):
          %z = stablehlo.add %x, %y : tensor<f32>
          stablehlo.return %z : tensor<f32>
        }}) : ({target}, tensor<512x1xi32>, {updates}) -> {target}
      return %s : {target} }}"""
    mesh, device = Mesh((8,), ("x",), "h100"), load_device("h100")
    whole = replicated_program(graph_from_text(text), mesh, device)
    (kernel,) = (each for each in backend_of(device).compile(whole).kernels if each.kind == "scatter")
    found = touched(kernel, whole)
    read = sum(size for array, size in found.items() if array in kernel.reads)
    if moved is None:
        assert sum(found.values()) == pytest.approx(3 * 512 * 64 * 64 * 4, rel=0.01)
    else:
        assert sum(found.values()) - read == moved


def test_a_chain_of_sums_of_the_two_before_is_read_once():
    """As many ways lead from its end to its start as the 60th Fibonacci number."""
    x = "tensor<512x256xf32>"
    lines = [f"%{n} = stablehlo.add %{n - 1}, %{n - 2} : {x}" for n in range(2, 62)]
    dot = f"contracting_dims = [1] x [0] : ({x}, tensor<256x256xf32>) -> {x}"
    text = f"""func.func @main(%a: {x}, %b: {x}, %v: tensor<256x256xf32>, %w: tensor<256x256xf32>) -> ({x}, {x}) {{
      %0 = stablehlo.negate %a : {x}
      %1 = stablehlo.negate %b : {x}
      {chr(10).join(lines)}
      %y = stablehlo.dot_general %61, %v, {dot}
      %z = stablehlo.dot_general %61, %w, {dot}
      return %y, %z : {x}, {x}
    }}"""
    mesh, device = Mesh((8,), ("x",), "tpu-v5e"), load_device("tpu-v5e")
    kernels = backend_of(device).compile(replicated_program(graph_from_text(text), mesh, device)).kernels
    assert sum(bool(kernel.flops) for kernel in kernels) >= 2


def test_a_copy_of_an_argument_is_work_on_the_argument(monkeypatch: pytest.MonkeyPatch):
    """A TPU copies a narrow table to lie by rows: that costs as much as the table has rows, however few are read."""
    table, i, rows = "tensor<65536x64xf32>", "tensor<16x1xi32>", "tensor<16x64xf32>"
    text = f"""func.func @main(%table: {table}, %i: {i}) -> {rows} {{
      %0 = "stablehlo.gather"(%table, %i) {{dimension_numbers = #stablehlo.gather<offset_dims = [1],
        collapsed_slice_dims = [0], start_index_map = [0], index_vector_dim = 1>, slice_sizes = array<i64: 1, 64>}}
        : ({table}, {i}) -> {rows}
      return %0 : {rows}
    }}"""
    monkeypatch.setattr(cycles, "model", lambda kind: None)  # traffic, at a roofline
    graph = graph_from_text(text)
    device = replace(load_device("tpu-v5e"), on_chip_bytes=2**16)
    works = group_works(graph, fusion_groups(graph), Mesh((8,), ("x",), "tpu-v5e"), device)
    (work,) = works[8].kept
    assert work.other[Value(0)] == pytest.approx(3, rel=0.1)  # read, and written with as much padding again
    assert work.other.get(Value(2), 0.0) < 10  # none of it is taken for the sixteen rows
