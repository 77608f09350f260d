"""What compilers rewrite before they fuse, on programs small enough to read."""

from __future__ import annotations

import pytest

from autoshard.cost.lowered import Lowered, lower
from autoshard.cost.rewrite import folded_transposes
from autoshard.cost.spmd import partition
from autoshard.graph.annotations import Annotations
from autoshard.graph.propagate import propagate
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
