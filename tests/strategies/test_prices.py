"""What groups cost in the solver follows the kernels that the target's compiler is predicted to make of them."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from autoshard.cost.machine.collectives import seconds
from autoshard.cost.machine.device import load_device
from autoshard.cost.predict import predict
from autoshard.graph.groups import fusion_groups
from autoshard.graph.ops import Graph, Value
from autoshard.mesh import Mesh
from autoshard.program import AtenOp
from autoshard.solver.objective import evaluate
from autoshard.solver.solve import solve
from autoshard.strategies.formulate import formulate
from autoshard.strategies.guard import guarded
from autoshard.strategies.prices import Prices
from tests.graph.helpers import graph_from_text

KINDS = ["cpu", "h100", "tpu-v5e"]
ROWS, WIDE = 65536, 1024


def chain() -> str:
    """A product, a softmax without its maximum, and a product."""
    x, w, s = f"tensor<{ROWS}x{WIDE}xf32>", f"tensor<{WIDE}x{WIDE}xf32>", f"tensor<{ROWS}xf32>"
    dot = f"contracting_dims = [1] x [0] : ({x}, {w}) -> {x}"
    return f"""func.func @main(%x: {x}, %v: {w}, %w: {w}) -> {x} {{
      %zero = stablehlo.constant dense<0.0> : tensor<f32>
      %0 = stablehlo.dot_general %x, %v, {dot}
      %1 = stablehlo.exponential %0 : {x}
      %2 = stablehlo.reduce(%1 init: %zero) applies stablehlo.add across dimensions = [1]
        : ({x}, tensor<f32>) -> {s}
      %3 = stablehlo.broadcast_in_dim %2, dims = [0] : ({s}) -> {x}
      %4 = stablehlo.divide %1, %3 : {x}
      %5 = stablehlo.dot_general %4, %w, {dot}
      return %5 : {x}
    }}"""


def annotatable(graph: Graph) -> Graph:
    """Every op as an aten op of its own, whose result can be annotated."""
    ops = tuple(op if op.kind in ("argument", "constant") else replace(op, aten=op.id) for op in graph.ops)
    return replace(graph, ops=ops, aten_outputs={(op.id, 0): Value(op.id) for op in ops if op.aten is not None})


@pytest.mark.parametrize("kind", KINDS)
def test_the_objective_is_the_step_time_that_is_predicted(kind):
    graph, mesh, device = (
        annotatable(graph_from_text(chain())),
        Mesh((2, 4), ("data", "model"), kind),
        load_device(kind),
    )
    formulation = formulate(graph, mesh, device)
    solution = solve(formulation.problem)
    found = predict(graph, guarded(graph, formulation.annotations(solution.choice), mesh), mesh, device)
    assert solution.objective == pytest.approx(found.step_time_s, rel=0.05)


@pytest.mark.parametrize("kind", KINDS)
def test_every_choice_is_priced_near_what_is_predicted(kind):
    """Whole groups on every axis that they can take: rows, columns, the contracted dim, nothing."""
    graph, mesh, device = annotatable(graph_from_text(chain())), Mesh((8,), ("x",), kind), load_device(kind)
    formulation = formulate(graph, mesh, device)
    problem = formulation.problem
    draw = np.random.default_rng(0)
    ratios = []
    for _ in range(40):
        choice = [int(draw.integers(len(costs))) for costs in problem.node_costs]
        priced = evaluate(problem, choice).objective
        if math.isfinite(priced):
            annotations = guarded(graph, formulation.annotations(choice), mesh)
            ratios.append(priced / predict(graph, annotations, mesh, device).step_time_s)
    assert len(ratios) > 10
    assert 0.9 < float(np.median(ratios)) < 1.1


def convolutions(rows: int) -> str:
    """Two convolutions of 64 features with a loop between them, on `rows` images."""
    x, w = f"tensor<{rows}x64x56x56xbf16>", "tensor<64x64x3x3xbf16>"
    how = """dim_numbers = [b, f, 0, 1]x[o, i, 0, 1]->[b, f, 0, 1], window = {stride = [1, 1], pad = [[1, 1], [1, 1]]}
      {batch_group_count = 1 : i64, feature_group_count = 1 : i64}"""
    return f"""func.func @main(%x: {x}, %v: {w}, %w: {w}) -> {x} {{
      %0 = stablehlo.convolution(%x, %v) {how} : ({x}, {w}) -> {x}
      %1 = stablehlo.exponential %0 : {x}
      %2 = stablehlo.convolution(%1, %w) {how} : ({x}, {w}) -> {x}
      return %2 : {x}
    }}"""


def test_padding_of_a_device_s_part_is_priced():
    """On a TPU 64 features fill half a tile unless 128 images lie along its lanes: 16 of them take twice the bytes."""
    graph, mesh = annotatable(graph_from_text(convolutions(128))), Mesh((8,), ("x",), "tpu-v5e")
    device = replace(load_device(mesh.device), on_chip_bytes=0)
    formulation = formulate(graph, mesh, device)
    choice = solve(formulation.problem).choice
    found = predict(graph, formulation.annotations(choice), mesh, device)
    last = len(formulation.kernels) - 1
    priced = formulation.kernels[last][choice[len(formulation.argument_values) + last]]
    assert priced == pytest.approx(found.kernel_s[-1][1], rel=0.05)


@pytest.mark.parametrize("kind", KINDS)
def test_kernels_and_collectives_are_repriced_apart(kind):
    graph, mesh = annotatable(graph_from_text(chain())), Mesh((8,), ("x",), kind)
    formulation = formulate(graph, mesh, load_device(kind))
    again = formulation.repriced(1.5, 0.5).repriced(1.0, 3.0)
    assert again.prices == (1.5, 1.5)
    draw, checked = np.random.default_rng(0), 0
    for _ in range(40):
        choice = [int(draw.integers(len(costs))) for costs in formulation.problem.node_costs]
        priced = evaluate(formulation.problem, choice).objective
        if math.isfinite(priced):
            half = evaluate(formulation.repriced(1.0, 0.5).problem, choice).objective
            assert evaluate(again.problem, choice).objective == pytest.approx(1.5 * priced)
            assert half == pytest.approx((priced + formulation.kernel_seconds(choice)) / 2)
            checked += 1
    assert checked > 10


def test_work_that_is_not_split_is_not_free_on_a_chip_that_could_hold_its_parts():
    """8 devices hold 16 MB on chip between them, one device does not hold them all."""
    graph, kind = graph_from_text(chain()), "tpu-v5e"
    mesh, device = Mesh((8,), ("x",), kind), load_device(kind)
    groups = fusion_groups(graph)
    formulation = formulate(graph, mesh, device)
    for group, ways in zip(groups.groups, formulation.strategies, strict=True):
        whole = next(i for i, each in enumerate(ways.assignments) if not any(each))
        prices = Prices(graph, groups, mesh, device)
        costs = prices.kernels(group, ways) + prices.collectives(group, ways)
        split = min(cost for cost, sums in zip(costs, ways.collectives, strict=True) if not sums)
        work = costs[whole] - device.kernel_overhead
        assert work == 0 or work > 4 * (split - device.kernel_overhead)


@pytest.mark.parametrize(("kind", "copied"), [("cpu", 0), ("h100", 4), ("tpu-v5e", 0)])
def test_gradients_share_the_start_of_the_sum_that_they_are_combined_into(kind, copied):
    kinds = ", ".join(f"%{name}: tensor<4096x256xf32>" for name in "xabcd")
    dims = "contracting_dims = [0] x [0] : (tensor<4096x256xf32>, tensor<4096x256xf32>) -> tensor<256x256xf32>"
    lines = "\n".join(f"%{i} = stablehlo.dot_general %x, %{name}, {dims}" for i, name in enumerate("abcd"))
    made = ", ".join(["tensor<256x256xf32>"] * 4)
    text = f"func.func @main({kinds}) -> ({made}) {{\n{lines}\nreturn %0, %1, %2, %3 : {made}\n}}"
    graph, mesh, device = graph_from_text(text), Mesh((8,), ("x",), kind), load_device(kind)
    formulation = formulate(graph, mesh, device)
    groups = formulation.groups
    prices = Prices(graph, groups, mesh, device)
    ways = formulation.strategies[0]
    summed = next(i for i, each in enumerate(ways.collectives) if each and each[0].kind == "all-reduce")
    size = 256 * 256 * 4
    copies = copied * size / (device.memory_bandwidth * device.achievable_memory)
    launched = device.kernel_overhead if copied else 0.0
    (sums,) = ways.collectives[summed]
    assert prices.collective_seconds(sums, groups.groups[0]) == pytest.approx(
        seconds("all-reduce", ("x",), size, mesh, device, 4) + copies + launched
    )


def weights(count: int) -> Graph:
    """A chain of products with as many weights."""
    x, w = "tensor<512x256xf32>", "tensor<256x256xf32>"
    given = ", ".join(f"%w{i}: {w}" for i in range(count))
    dot = f"contracting_dims = [1] x [0] : ({x}, {w}) -> {x}"
    lines = [f"%{i} = stablehlo.dot_general %{'x' if i == 0 else i - 1}, %w{i}, {dot}" for i in range(count)]
    body = "\n".join([*lines, f"return %{count - 1} : {x}"])
    text = f"func.func @main(%x: {x}, {given}) -> {x} {{\n{body}\n}}"
    return annotatable(graph_from_text(text, roles=["input", *["parameter"] * count]))


def gather_cost(graph: Graph, mesh: Mesh) -> float:
    """What the problem charges for gathering the last weight, whose rows are split."""
    formulation = formulate(graph, mesh, load_device(mesh.device))
    value = formulation.argument_values[-1]
    node = len(formulation.argument_values) - 1
    row = next(i for i, spec in enumerate(formulation.argument_specs[node].choices) if spec == (("x",), ()))
    reader = formulation.groups.groups[-1]
    ways = formulation.strategies[-1]
    column = next(i for i in range(len(ways)) if not any(ways.assignments[i]))
    assert reader.inputs[1] == value
    edges = zip(formulation.problem.edges, formulation.problem.edge_costs, strict=True)
    return next(float(costs[row, column]) for (tail, _), costs in edges if tail == node)


@pytest.mark.parametrize(("kind", "combines"), [("cpu", False), ("h100", True), ("tpu-v5e", False)])
def test_gathers_of_weights_start_together_where_the_compiler_combines_them(kind, combines):
    mesh, device = Mesh((8,), ("x",), kind), load_device(kind)
    size = 256 * 256 * (2 if kind == "tpu-v5e" else 4)  # a TPU rounds what it gathers for a product
    for count, together in ((1, 1), (4, 4 if combines else 1)):
        expected = seconds("all-gather", ("x",), size, mesh, device, together)
        assert gather_cost(weights(count), mesh) == pytest.approx(expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_slice_before_a_product_is_a_kernel_of_its_own_but_on_a_tpu(kind):
    graph = weights(1)
    mesh, device = Mesh((8,), ("x",), kind), load_device(kind)
    formulation = formulate(graph, mesh, device)
    ways = formulation.strategies[0]
    column = next(i for i in range(len(ways)) if ways.inputs[0][i] == (("x",), ()))
    whole = formulation.argument_specs[0].choices.index(((), ()))
    costs = formulation.problem.edge_costs[formulation.problem.edges.index((0, 2))]
    part = 512 * 256 * 4 / 8 / (device.memory_bandwidth * device.achievable_memory)
    cut = 8 * part if kind == "tpu-v5e" else 2 * part + device.kernel_overhead  # a TPU reads an input whole
    assert costs[whole, column] == pytest.approx(cut)


def test_a_gradient_is_a_group_of_its_own_which_the_optimizer_may_read_scattered():
    text = """func.func @main(%w: tensor<64xf32>, %g: tensor<512x64xf32>) -> tensor<64xf32> {
      %zero = stablehlo.constant dense<0.0> : tensor<f32>
      %0 = stablehlo.reduce(%g init: %zero) applies stablehlo.add across dimensions = [0]
        : (tensor<512x64xf32>, tensor<f32>) -> tensor<64xf32>
      %1 = stablehlo.subtract %w, %0 : tensor<64xf32>
      return %1 : tensor<64xf32>
    }"""
    graph = graph_from_text(text, updates={0: 0})
    aten = [AtenOp(i, "op", "", phase, (graph.ops[0].results[0],)) for i, phase in enumerate(["backward", "optimizer"])]
    graph = replace(graph, program=replace(graph.program, ops=tuple(aten)))
    reduce, subtract = (next(op.id for op in graph.ops if op.kind == kind) for kind in ("reduce", "subtract"))
    assert len(fusion_groups(graph).groups) == 1
    ops = tuple(replace(op, aten={reduce: 0, subtract: 1}.get(op.id)) for op in graph.ops)
    graph = replace(graph, ops=ops, aten_outputs={(0, 0): Value(reduce), (1, 0): Value(subtract)})
    assert [group.ops for group in fusion_groups(graph).groups] == [(reduce,), (subtract,)]
    ways = formulate(graph, Mesh((8,), ("x",), "h100"), load_device("h100")).strategies[0]
    assert any(each[:1] and each[0].kind == "reduce-scatter" for each in ways.collectives)


def test_a_convolution_that_cannot_be_annotated_is_not_resharded_behind_it():
    x, w = "tensor<8x16x8x8xf32>", "tensor<16x16x3x3xf32>"
    text = f"""func.func @main(%x: {x}, %w: {w}) -> {x} {{
      %0 = stablehlo.convolution(%x, %w) dim_numbers = [b, f, 0, 1]x[o, i, 0, 1]->[b, f, 0, 1],
        window = {{stride = [1, 1], pad = [[1, 1], [1, 1]]}}
        {{batch_group_count = 1 : i64, feature_group_count = 1 : i64}} : ({x}, {w}) -> {x}
      %1 = stablehlo.tanh %0 : {x}
      return %1 : {x}
    }}"""
    whole = annotatable(graph_from_text(text))
    within = replace(whole, aten_outputs={key: value for key, value in whole.aten_outputs.items() if value.op != 2})
    mesh = Mesh((8,), ("x",), "h100")
    for graph, free in ((whole, True), (within, False)):
        formulation = formulate(graph, mesh, load_device("h100"))
        edge = formulation.problem.edges.index((2, 3))
        made, read = formulation.strategies[0].outputs[0], formulation.strategies[1].inputs[0]
        costs = formulation.problem.edge_costs[edge]
        for (row, column), cost in np.ndenumerate(costs):
            assert math.isfinite(cost) == (free or made[row] == read[column])


def test_the_sum_of_a_kernels_gradient_is_scattered_through_the_transpose_that_its_aten_op_ends_with():
    x, k, w = "tensor<64x16x16x64xf32>", "tensor<3x3x64x64xf32>", "tensor<64x64x3x3xf32>"
    text = f"""func.func @main(%w: {w}, %x: {x}, %g: {x}) -> {w} {{
      %0 = stablehlo.convolution(%x, %g) dim_numbers = [f, 0, 1, b]x[i, 0, 1, o]->[0, 1, b, f],
        window = {{stride = [1, 1], pad = [[1, 1], [1, 1]]}}
        {{batch_group_count = 1 : i64, feature_group_count = 1 : i64}} : ({x}, {x}) -> {k}
      %1 = stablehlo.transpose %0, dims = [3, 2, 0, 1] : ({k}) -> {w}
      %2 = stablehlo.subtract %w, %1 : {w}
      return %2 : {w}
    }}"""
    graph = graph_from_text(text, updates={0: 0})
    number = {op.kind: op.id for op in graph.ops}
    made = ["convolution", "transpose", "subtract"]
    ops = tuple(replace(op, aten={"transpose": 0, "convolution": 0, "subtract": 1}.get(op.kind)) for op in graph.ops)
    phases = [AtenOp(0, "convolution_backward", "", "backward", ()), AtenOp(1, "sub", "", "optimizer", ())]
    graph = replace(graph, ops=ops, program=replace(graph.program, ops=tuple(phases)))
    outputs = {(0, 0): Value(number["transpose"]), (1, 0): Value(number["subtract"])}
    graph = replace(graph, aten_outputs=outputs)
    mesh = Mesh((8,), ("x",), "h100")
    formulation = formulate(graph, mesh, load_device("h100"))
    assert [[graph.ops[op].kind for op in group.ops] for group in formulation.groups.groups] == [
        [kind] for kind in made
    ]
    conv, turned, _ = formulation.strategies
    (scattering,) = [
        (i, ways) for i, ways in enumerate(turned.collectives) if ways and turned.outputs[0][i] == (("x",), (), (), ())
    ]
    row, (scatter,) = scattering
    assert (scatter.kind, scatter.bytes) == ("reduce-scatter", 64 * 64 * 9 * 4)
    partial = turned.inputs[0][row]
    left = [i for i in range(len(conv)) if conv.outputs[0][i] == partial]
    assert len(left) == 1
    assert not conv.collectives[left[0]]
    # What the annotations come to is that reduce-scatter.
    data = (("x",), (), (), ())
    fixed = formulate(graph, mesh, load_device("h100"), hints={"arg0": data, "arg1": data, "arg2": data})
    solution = solve(fixed.problem)
    found = predict(graph, fixed.annotations(solution.choice), mesh, load_device("h100"))
    assert [each.kind for each in found.collectives] == ["reduce-scatter"]


@pytest.mark.parametrize("kind", ["h100", "tpu-v5e"])
def test_a_scatter_into_a_part_of_the_columns_of_a_large_table_moves_a_part_of_the_numbers(kind):
    """Compiled for a v5e (libtpu 0.0.51): 12.6 MB for the whole table, 1.6 for 16 of its columns, where they lie."""
    table, tokens = "tensor<2000000x128xf32>", "tensor<8192x128xf32>"
    text = f"""func.func @main(%w: {table}, %i: tensor<8192x1xi32>, %u: {tokens}) -> {table} {{
      %0 = "stablehlo.scatter"(%w, %i, %u) <{{scatter_dimension_numbers = #stablehlo.scatter<
        update_window_dims = [1], inserted_window_dims = [0], scatter_dims_to_operand_dims = [0],
        index_vector_dim = 1>}}> ({{ ^bb0(%a: tensor<f32>, %b: tensor<f32>):
        %s = stablehlo.add %a, %b : tensor<f32>
        stablehlo.return %s : tensor<f32> }}) : ({table}, tensor<8192x1xi32>, {tokens}) -> {table}
      return %0 : {table}
    }}"""
    device = load_device(kind)
    formulation = formulate(graph_from_text(text, updates={0: 0}), Mesh((8,), ("x",), kind), device)
    (ways,) = formulation.strategies
    costs = formulation.problem.node_costs[-1] - device.kernel_overhead
    whole, columns = (
        min(cost for i, cost in enumerate(costs) if ways.outputs[0][i] == spec and not ways.collectives[i])
        for spec in (((), ()), ((), ("x",)))
    )
    assert columns < whole / (7 if kind == "h100" else 2)
