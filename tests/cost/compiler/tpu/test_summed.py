"""Sums of products whose parts of lanes are summed next, held against the TPU's compiler."""

from __future__ import annotations

import pytest

from autoshard.graph.annotations import Annotations
from autoshard.graph.ops import Value
from autoshard.mesh import Mesh, Spec
from autoshard.program import AtenOp, TensorType
from autoshard.stablehlo.annotate import annotate
from autoshard.verify.check import compare_compiled
from autoshard.verify.targets import parse_target
from tests.graph.helpers import graph_from_text

pytest.importorskip("libtpu")
ALL = ("data", "model")
COLUMNS: Spec = ((), (), ALL)
WHOLE: Spec = ((), (), ())
MARK = 'stablehlo.custom_call @Sharding(%{}) {{mhlo.sharding = "{{replicated}}"}} : ({}) -> {}'


@pytest.mark.parametrize(
    ("columns", "dims", "kinds"),
    [
        (2560, "0, 1", {"reduce-scatter"}),  # parts of 320 columns, no whole lanes: StableLM's automatic plan
        (2560, "2", {"reduce-scatter"}),
        (8 * 8 * 305, "0, 1", {"all-reduce"}),  # of 305 rows of tiles, one more than a buffer holds
        (8 * 8 * 304, "0, 1", {"reduce-scatter"}),
        (8 * 8 * 320, "2", {"reduce-scatter"}),  # of whole lanes
    ],
)
def test_a_product_is_scattered_whatever_sums_read_unless_its_parts_are_too_long(
    columns: int, dims: str, kinds: set[str]
) -> None:
    rows = 256
    made = str(columns) if dims == "0, 1" else f"8x{rows}"
    x, w, y = f"tensor<8x{rows}x1024xf32>", f"tensor<1024x{columns}xf32>", f"tensor<8x{rows}x{columns}xf32>"
    total = f"tensor<{made}xf32>"
    text = f"""module {{ func.func public @main(%x: {x}, %w: {w}, %z: {y}) -> ({total}, {y}) {{
%r0 = stablehlo.dot_general %x, %w, contracting_dims = [2] x [0] : ({x}, {w}) -> {y} loc("op0")
%m0 = {MARK.format("r0", y, y)} loc("op0.out0")
%c = stablehlo.constant dense<0.0> : tensor<f32> loc("op1")
%r1 = stablehlo.reduce(%m0 init: %c) applies stablehlo.add across dimensions = [{dims}] : ({y}, tensor<f32>) -> {total}
 loc("op1")
%m1 = {MARK.format("r1", total, total)} loc("op1.out0")
%r2 = stablehlo.multiply %m0, %z : {y} loc("op2")
%m2 = {MARK.format("r2", y, y)} loc("op2.out0")
return %m1, %m2 : {total}, {y} }} }}"""
    sizes = [(8, rows, columns), tuple(map(int, made.split("x"))), (8, rows, columns)]
    names = ("product", "sum", "scaled")
    ops = [AtenOp(k, name, "", "forward", (TensorType(sizes[k], "f32"),)) for k, name in enumerate(names)]
    graph = graph_from_text(text, ops=ops)
    first, second, third = (Value(op) for op in graph.arguments)
    product, summed, scaled = (graph.aten_outputs[k, 0] for k in range(3))
    pins: dict[Value, Spec] = {first: COLUMNS, second: (ALL, ()), third: COLUMNS, product: WHOLE, scaled: COLUMNS}
    pins[summed] = (ALL,) if dims == "0, 1" else ((), ())
    wanted = Annotations(pins, {(product, 1): COLUMNS, (product, 2): COLUMNS})
    mesh = Mesh((2, 4), ALL, device="tpu-v5e")
    module = annotate(graph.program, graph, wanted, mesh)
    report, _ = compare_compiled(graph, wanted, mesh, parse_target("tpu-v5e:2x4"), module)
    assert report.fidelity.value == 0
    assert {one.kind for one in report.prediction.collectives if one.bytes > 2**20} == kinds
