"""Gathers of what was converted to a wider type: on GPU they move the narrow one."""

from __future__ import annotations

import pytest

from autoshard.cost.partitioner.partition import partition
from autoshard.cost.partitioner.propagate import propagate
from autoshard.graph.annotations import Annotations
from autoshard.graph.ops import Graph, Value
from autoshard.mesh import Mesh, Spec
from autoshard.program import AtenOp, TensorType
from autoshard.stablehlo.annotate import annotate
from autoshard.verify.collectives import compiled_collectives, normalise
from autoshard.verify.compile import compile_module
from autoshard.verify.targets import TargetError, parse_target
from tests.graph.helpers import graph_from_text

MESH = Mesh((2, 4), ("data", "model"))
ROWS: Spec = (("model",), ())
COLUMNS: Spec = ((), ("model",))
WHOLE: Spec = ((), ())
BYTES = {"i1": 1, "bf16": 2, "f32": 4}


def converted(narrow: str, wide: str) -> Graph:
    """The exponential of an argument that is converted first."""
    before, after = f"tensor<64x64x{narrow}>", f"tensor<64x64x{wide}>"
    mark = f'stablehlo.custom_call @Sharding(%{{}}) {{{{mhlo.sharding = "{{{{replicated}}}}"}}}} : ({after}) -> {after}'
    text = f"""module {{ func.func public @main(%a: {before}) -> {after} {{
%r0 = stablehlo.convert %a : ({before}) -> {after} loc("op0")
%m0 = {mark.format("r0")} loc("op0.out0")
%r1 = stablehlo.exponential %m0 : {after} loc("op1")
%m1 = {mark.format("r1")} loc("op1.out0")
return %m1 : {after} }} }}"""
    ops = [AtenOp(k, name, "", "forward", (TensorType((64, 64), wide),)) for k, name in enumerate(("to", "exp"))]
    return graph_from_text(text, ops=ops)


@pytest.mark.parametrize(
    ("narrow", "wide", "after", "kind", "part"),
    [
        ("bf16", "f32", WHOLE, "all-gather", 1),
        ("i1", "f32", COLUMNS, "all-to-all", 4),
        ("f32", "bf16", WHOLE, "all-gather", 1),
    ],
)
def test_a_gpu_moves_what_is_converted_to_a_wider_type_before_it_is(narrow, wide, after, kind, part):
    graph = converted(narrow, wide)
    pins = {Value(graph.arguments[0]): ROWS, graph.aten_outputs[0, 0]: ROWS, graph.aten_outputs[1, 0]: after}
    wanted = Annotations(pins, {(graph.aten_outputs[0, 0], 1): after})
    said = {}
    for one in partition(graph, propagate(graph, wanted, MESH), "gpu").collectives:
        said[one.kind, one.axes] = said.get((one.kind, one.axes), 0) + one.bytes * one.count
    assert said == {(kind, ("model",)): 64 * 64 * min(BYTES[narrow], BYTES[wide]) // part}
    try:
        parse_target("h100:8", 8).packages()
    except TargetError as error:
        pytest.skip(str(error))
    compiled = compile_module(annotate(graph.program, graph, wanted, MESH), "h100:8")
    assert normalise(compiled_collectives(compiled.hlo_text, MESH, "gpu")) == said
