"""The program of which nothing is split, which prices groups: made without propagation and partitioner, alike."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoshard.cost.backend import backend_of
from autoshard.cost.device import load_device
from autoshard.cost.lowered import lower
from autoshard.cost.spmd import partition
from autoshard.cost.work import larger, replicated_program
from autoshard.graph.annotations import Annotations
from autoshard.graph.propagate import propagate
from autoshard.mesh import Mesh
from tests.cost.zoo import program
from tests.graph.helpers import graph_from_text


@pytest.mark.parametrize("kind", ["cpu", "h100", "tpu-v5e"])
def test_a_program_of_which_nothing_is_split_is_that_of_no_annotations(kind):
    mesh, device = Mesh((2, 4), ("data", "model"), kind), load_device(kind)
    _, graph = program()
    shardings = propagate(graph, Annotations({}), mesh, device.target)
    partitioned = partition(graph, shardings, device.target)
    target = device.target
    known = lower(graph, shardings, partitioned, barriers=target != "cpu", ordered=target == "tpu")
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
