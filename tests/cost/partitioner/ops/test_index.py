"""Gather, scatter, sort and running sums: what the partitioner is said to emit, held against XLA's CPU compiler."""

from __future__ import annotations

import pytest

from autoshard.cost.partitioner.partition import partition
from autoshard.cost.partitioner.passes.simplify import simplified
from autoshard.cost.partitioner.propagate import propagate
from autoshard.graph.annotations import Annotations
from autoshard.graph.ops import Value
from autoshard.stablehlo.annotate import annotate
from autoshard.verify.collectives import compiled_collectives, normalise
from autoshard.verify.compile import compile_module
from autoshard.verify.fidelity import fidelity
from tests.cost.partitioner.test_partition import MESH, predicted
from tests.cost.zoo import program, random_annotations
from tests.graph.helpers import graph_from_text


def _gather(offset: str, collapsed: str, vector: int, sizes: str, *, indices: str = "{1}", batch: str = "") -> str:
    numbers = f"offset_dims = [{offset}], collapsed_slice_dims = [{collapsed}], {batch}index_vector_dim = {vector}"
    return (
        f'"stablehlo.gather"({{0}}, {indices}) <{{{{dimension_numbers = #stablehlo.gather<{numbers}>, '
        f"slice_sizes = array<i64: {sizes}>}}}}>"
    )


def _scatter(windows: str, inserted: str, vector: int, *, indices: str = "{1}", add: bool = True) -> str:
    numbers = f"update_window_dims = [{windows}], inserted_window_dims = [{inserted}], "
    numbers += f"scatter_dims_to_operand_dims = [{inserted}], index_vector_dim = {vector}"
    made = "%m = stablehlo.add %a, %b : tensor<f32> stablehlo.return %m" if add else "stablehlo.return %b"
    return (
        f'"stablehlo.scatter"({{0}}, {indices}, {{2}}) '
        f"<{{{{scatter_dimension_numbers = #stablehlo.scatter<{numbers}>}}}}>"
        f" ({{{{ ^bb0(%a: tensor<f32>, %b: tensor<f32>): {made} : tensor<f32> }}}})"
    )


def _chosen(name: str, place: int) -> str:
    """Indices of `take_along` and its gradient: two counted dims and the choice, as torch_xla writes them."""
    kind = "tensor<8x32x2x1xi32>"
    return (
        f"%{name}_i = stablehlo.iota dim = 0 : {kind}\n%{name}_j = stablehlo.iota dim = 1 : {kind}\n"
        f"%{name}_k = stablehlo.concatenate %{name}_i, %{name}_j, {{{place}}}, dim = 3 : "
        f"({kind}, {kind}, {kind}) -> tensor<8x32x2x3xi32>\n"
    )


_SUMS = (
    '"stablehlo.reduce_window"({0}, %zero) <{{window_dimensions = array<i64: 1, 64, 1>, '
    "padding = dense<[[0, 0], [63, 0], [0, 0]]> : tensor<3x2xi64>}}> "
    "({{ ^bb0(%a: tensor<f32>, %b: tensor<f32>): %m = stablehlo.add %a, %b : tensor<f32> "
    "stablehlo.return %m : tensor<f32> }})"
)
_SORT = (
    '"stablehlo.sort"({0}) <{{dimension = 2 : i64}}> ({{ ^bb0(%a: tensor<f32>, %b: tensor<f32>): '
    "%m = stablehlo.compare GT, %a, %b : (tensor<f32>, tensor<f32>) -> tensor<i1> "
    "stablehlo.return %m : tensor<i1> }}) : (tensor<8x32x16xf32>) -> tensor<8x32x16xf32>"
)
_ALONG = "(tensor<8x32x16xf32>, tensor<8x32x2x3xi32>) -> tensor<8x32x2xf32>"
_ALONG_BACK = "(tensor<8x32x16xf32>, tensor<8x32x2x3xi32>, tensor<8x32x2xf32>) -> tensor<8x32x16xf32>"

IDS, CHOICE = (8, 32, 1, "i32"), (8, 32, 2, 1, "i32")
ROW = "start_index_map = [0], "

INDEXED = {
    "lookup": ([(1024, 64), IDS], (8, 32, 64), _gather("2", "0", 2, "1, 64", batch=ROW)),
    "lookup_small": ([(64, 16), IDS], (8, 32, 16), _gather("2", "0", 2, "1, 16", batch=ROW)),
    "lookup_back": ([(1024, 64), IDS, (8, 32, 64)], (1024, 64), _scatter("2", "0", 2)),
    "experts": ([(8, 32, 64), (256, 1, "i32")], (256, 32, 64), _gather("1, 2", "0", 1, "1, 32, 64", batch=ROW)),
    "experts_back": ([(8, 32, 64), (256, 1, "i32"), (256, 32, 64)], (8, 32, 64), _scatter("1, 2", "0", 1)),
    "columns": ([(64, 128), (16, "i32")], (64, 16), _gather("0", "1", 1, "64, 1", batch="start_index_map = [1], ")),
    "batched": (
        [(8, 32, 64), (8, 16, 1, "i32")],
        (8, 16, 64),
        _gather(
            "2", "1", 2, "1, 1, 64",
            batch="operand_batching_dims = [0], start_indices_batching_dims = [0], start_index_map = [1], ",
        ),
    ),
    "along": (
        [(8, 32, 16), CHOICE],
        (8, 32, 2),
        _chosen("along", 1)
        + _gather("", "0, 1, 2", 3, "1, 1, 1", indices="%along_k", batch="start_index_map = [0, 1, 2], ")
        + f" : {_ALONG}",
    ),
    "along_back": (
        [(8, 32, 16), CHOICE, (8, 32, 2)],
        (8, 32, 16),
        _chosen("along_back", 1) + _scatter("", "0, 1, 2", 3, indices="%along_back_k", add=False) + f" : {_ALONG_BACK}",
    ),
    "sums": ([(8, 64, 16)], (8, 64, 16), _SUMS),
    "sorted": ([(8, 32, 16)], (8, 32, 16), _SORT),
}  # fmt: skip


@pytest.mark.parametrize(("seed", "results"), [(1, 1.0), (7, 1.0), (6, 0.0), (8, 0.5)])
def test_random_shardings_of_index_ops_compile_to_what_is_predicted(seed: int, results: float) -> None:
    made, graph = program(ops=INDEXED)
    annotations = random_annotations(graph, MESH, seed, results)
    compiled = compile_module(annotate(made, graph, annotations, MESH), "cpu:8")
    found = compiled_collectives(compiled.hlo_text, MESH, "cpu")
    said = partition(graph, propagate(graph, annotations, MESH), "cpu").collectives
    compared = fidelity(said, found, aten_of=lambda op: graph.ops[op].aten)
    assert predicted(graph, annotations) == normalise(found), compared.table()


def _counted_in(dtype: str, name: str) -> tuple[list[tuple[int | str, ...]], tuple[int, ...], str]:
    """`along` or its gradient with indices of another dtype, as torch_xla writes both: of u32 and of i64."""
    operands, result, text = INDEXED[name]
    return (
        [(*each[:-1], dtype) if each[-1] == "i32" else each for each in operands],
        result,
        text.replace("xi32>", f"x{dtype}>"),
    )


@pytest.mark.parametrize(("target", "family"), [("h100:8", "gpu"), ("tpu-v5e:2x4", "tpu")])
@pytest.mark.parametrize(("name", "dtype"), [("along", "ui32"), ("along_back", "i64"), ("along", "i32")])
def test_rows_that_are_read_by_themselves_are_known_by_counts(name: str, dtype: str, target: str, family: str) -> None:
    """Data parallelism behind `torch.gather` was predicted to gather all that it reads."""
    made, graph = program([name], {name: _counted_in(dtype, name)})
    pins = {Value(at): (("data",), *[()] * (len(graph.ops[at].results[0].shape) - 1)) for at in graph.arguments}
    pins[graph.outputs[0]] = (("data",), (), ())
    compiled = compile_module(annotate(made, graph, Annotations(pins), MESH), target)
    found = normalise(compiled_collectives(compiled.hlo_text, MESH, family))
    assert predicted(simplified(graph, family), Annotations(pins), target=family) == found
    assert not found or (family, dtype) == ("tpu", "i64")


BY_ARANGE = """
%c = stablehlo.constant dense<[0, 1, 2, 3, 4, 5, 6, 7]> : tensor<8xi64>
%b = stablehlo.broadcast_in_dim %c, dims = [0] : (tensor<8xi64>) -> tensor<8x4xi64>
%z = stablehlo.constant dense<0> : tensor<8x4xi64>
%n = stablehlo.constant dense<8> : tensor<8x4xi64>
%less = stablehlo.compare LT, %b, %z : (tensor<8x4xi64>, tensor<8x4xi64>) -> tensor<8x4xi1>
%more = stablehlo.add %b, %n : tensor<8x4xi64>
%s = stablehlo.select %less, %more, %b : tensor<8x4xi1>, tensor<8x4xi64>
%i = stablehlo.reshape %s : (tensor<8x4xi64>) -> tensor<8x4x1xi64>
%at = stablehlo.concatenate %i, {1}, dim = 2 : (tensor<8x4x1xi64>, tensor<8x4x1xi64>) -> tensor<8x4x2xi64>
"""


@pytest.mark.parametrize(("target", "family"), [("h100:8", "gpu"), ("tpu-v5e:2x4", "tpu"), ("cpu:8", "cpu")])
def test_arange_beside_other_indices_counts_on_gpus(target: str, family: str) -> None:
    """`x[torch.arange(B)[:, None], i]`, as BERT's masked positions and CLIP's last tokens are read."""
    rows = _gather("2", "0, 1", 2, "1, 1, 16", indices="%at", batch="start_index_map = [0, 1], ")
    kinds = "(tensor<8x32x16xf32>, tensor<8x4x2xi64>) -> tensor<8x4x16xf32>"
    asked = {"rows": ([(8, 32, 16), (8, 4, 1, "i64")], (8, 4, 16), f"{BY_ARANGE}{rows} : {kinds}")}
    made, graph = program(["rows"], asked)
    pins = {Value(at): (("data",), (), ()) for at in graph.arguments} | {graph.outputs[0]: (("data",), (), ())}
    compiled = compile_module(annotate(made, graph, Annotations(pins), MESH), target)
    found = normalise(compiled_collectives(compiled.hlo_text, MESH, family))
    assert predicted(simplified(graph, family), Annotations(pins), target=family) == found
    assert (found == {}) == (family == "gpu")


ONE = (1, 1, "i32")
SINGLE = {
    "read": ([(1024, 64), ONE], (1, 64), _gather("1", "0", 1, "1, 64", batch=ROW)),
    "written": ([(1024, 64), ONE, (1, 64)], (1024, 64), _scatter("1", "0", 1, add=False)),
    "added": ([(1024, 64), ONE, (1, 64)], (1024, 64), _scatter("1", "0", 1)),
}


@pytest.mark.parametrize("name", SINGLE)
@pytest.mark.parametrize("place", [0, 1])
def test_on_gpus_one_index_makes_a_slice_for_which_split_rows_are_gathered(name: str, place: int) -> None:
    """A decoding step's lookup and cache: they were predicted as a look-up in parts, of a few rows."""
    made, graph = program([name], SINGLE)
    spec = tuple(("data", "model") if dim == place else () for dim in range(2))
    pins = {Value(0): spec, graph.outputs[0]: spec if name != "read" else ((), ())}
    compiled = compile_module(annotate(made, graph, Annotations(pins), MESH), "h100:8")
    found = normalise(compiled_collectives(compiled.hlo_text, MESH, "gpu"))
    assert predicted(simplified(graph, "gpu"), Annotations(pins), target="gpu") == found
    assert (rows_bytes(1024, 64) in found.values()) == (place == 0 or name == "read")


def test_what_experts_sum_over_the_axis_that_splits_them_is_scattered() -> None:
    """Tokens and experts split by one axis, features by the other: it was predicted as an all-reduce."""
    made, graph = program(["experts_back"], INDEXED)
    held = (("data",), (), ("model",))
    pins = {Value(0): held, Value(1): (("data",), ()), Value(2): held, graph.outputs[0]: held}
    compiled = compile_module(annotate(made, graph, Annotations(pins), MESH), "cpu:8")
    found = normalise(compiled_collectives(compiled.hlo_text, MESH, "cpu"))
    assert ("reduce-scatter", ("data",)) in found
    assert predicted(graph, Annotations(pins)) == found


def test_on_gpus_what_is_broadcast_is_gathered_before() -> None:
    """The gradient of a summed bag: every row of a bag gets the same gradient."""
    text = """
    func.func @main(%g: tensor<64x16xf32>, %table: tensor<1024x16xf32>, %i: tensor<64x4x1xi32>) -> tensor<1024x16xf32> {
      %u = stablehlo.broadcast_in_dim %g, dims = [0, 2] : (tensor<64x16xf32>) -> tensor<64x4x16xf32>
      %0 = "stablehlo.scatter"(%table, %i, %u) <{scatter_dimension_numbers = #stablehlo.scatter<
        update_window_dims = [2], inserted_window_dims = [0], scatter_dims_to_operand_dims = [0],
        index_vector_dim = 2>}> ({
        ^bb0(%a: tensor<f32>, %b: tensor<f32>):
          %m = stablehlo.add %a, %b : tensor<f32>
          stablehlo.return %m : tensor<f32>
      }) : (tensor<1024x16xf32>, tensor<64x4x1xi32>, tensor<64x4x16xf32>) -> tensor<1024x16xf32>
      return %0 : tensor<1024x16xf32>
    }"""
    graph = graph_from_text(text)
    everyone = ("data", "model")
    pins = {Value(0): (everyone, ()), Value(1): (everyone, ()), Value(2): (everyone, (), ())}
    indices = 64 * 4 * 4
    for target, gradients in (("cpu", 64 * 4 * 16 * 4), ("gpu", 64 * 16 * 4)):
        found = predicted(graph, Annotations(pins), target=target)
        assert found == {("all-gather", everyone): indices + gradients}, target


def test_a_small_table_is_gathered_and_a_large_one_looked_up_in_parts() -> None:
    """XLA takes the way in which the largest single op touches least: not the sum over ops."""
    everyone = ("data", "model")
    ids, width = 8 * 32 * 4, 16
    for rows, found in ((64, {("all-gather", everyone): rows_bytes(64, width)}), (1024, None)):
        _, graph = program(["table"], {"table": ([(rows, width), IDS], (8, 32, width), INDEXED["lookup_small"][2])})
        pins = {Value(0): (everyone, ()), Value(1): (everyone, (), ())}
        made = predicted(graph, Annotations(pins | {graph.outputs[0]: (everyone, (), ())}))
        assert made == (
            found or {("all-gather", everyone): ids, ("reduce-scatter", everyone): rows_bytes(8 * 32, width)}
        )


def rows_bytes(rows: int, width: int) -> int:
    """Of f32."""
    return rows * width * 4


SHARED = """
    func.func @main(%x: tensor<64x16xf32>, %g: tensor<64x1024xf32>, %u: tensor<64x4x16xf32>, %v: tensor<64x4x16xf32>,
                    %i: tensor<64x4x1xi32>, %j: tensor<64x4x1xi32>) -> tensor<1024x16xf32> {
      %zero = stablehlo.constant dense<0.0> : tensor<1024x16xf32>
      %head = stablehlo.dot_general %g, %x, contracting_dims = [0] x [0]
        : (tensor<64x1024xf32>, tensor<64x16xf32>) -> tensor<1024x16xf32>
      %0 = SCATTER(%zero, %i, %u) NUMBERS
      %1 = stablehlo.add %head, %0 : tensor<1024x16xf32>
      %2 = SCATTER(%zero, %j, %v) NUMBERS
      %3 = stablehlo.add %1, %2 : tensor<1024x16xf32>
      return %3 : tensor<1024x16xf32>
    }""".replace("SCATTER", '"stablehlo.scatter"').replace(
    "NUMBERS",
    """<{scatter_dimension_numbers = #stablehlo.scatter<update_window_dims = [2], inserted_window_dims = [0],
        scatter_dims_to_operand_dims = [0], index_vector_dim = 2>}> ({
        ^bb0(%a: tensor<f32>, %b: tensor<f32>):
          %m = stablehlo.add %a, %b : tensor<f32>
          stablehlo.return %m : tensor<f32>
      }) : (tensor<1024x16xf32>, tensor<64x4x1xi32>, tensor<64x4x16xf32>) -> tensor<1024x16xf32>""",
)


def test_two_gradients_of_a_shared_table_are_one_scatter_unless_annotated() -> None:
    """T5's encoder and decoder share their embedding: its gradient used to be predicted as summed twice."""
    graph = graph_from_text(SHARED)
    batch = ("data",)
    pins = {op: (batch, *[()] * (len(graph.ops[op].results[0].shape) - 1)) for op in graph.arguments}
    annotations = Annotations({Value(op): spec for op, spec in pins.items()})
    table, updates, indices = 1024 * 16 * 4, 64 * 4 * 16 * 4 // 2, 64 * 4 * 4 // 2
    apart = predicted(graph, annotations)
    assert apart == {("all-reduce", batch): 3 * table}
    scatters = [Value(op.id) for op in graph.ops if op.kind == "scatter"]
    annotated = Annotations(annotations.pins | dict.fromkeys(scatters, ((), ())))
    between = next(Value(op.id) for op in graph.ops if op.kind == "add" and scatters[0] in op.operands)
    held = Annotations(annotations.pins | {between: ((), ())})
    for target in ("gpu", "tpu"):
        joined = predicted(graph, annotations, target=target)
        assert joined == {("all-reduce", batch): 2 * table, ("all-to-all", batch): 4 * (updates + indices)}
        # Summed once, with the head's gradient (as compiled for v5e and 8 H100; T5's automatic plan there).
        assert predicted(graph, annotated, target=target) == {("all-reduce", batch): table}
        assert predicted(graph, held, target=target) == {("all-reduce", batch): 3 * table}  # one onto the other's sum
