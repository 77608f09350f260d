"""HLO ops of one aten op that are decided apart read one copy of a value: what that is, and what it costs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from autoshard.cost.machine.device import load_device
from autoshard.cost.predict import predict
from autoshard.graph.ops import Graph, Value
from autoshard.mesh import Mesh
from autoshard.solver.problem import Problem
from autoshard.solver.solve import solve
from autoshard.strategies.formulate import formulate, one_copy
from autoshard.strategies.space import plain
from tests.graph.helpers import graph_from_text

WHOLE, ROWS = ((), ()), (("data",), ())
BOTH = (("data",), ("model",))


@pytest.mark.parametrize(
    ("wants", "read"),
    [
        ([ROWS, ROWS], ROWS),
        ([BOTH, ROWS], ROWS),
        ([ROWS, BOTH], ROWS),
        ([ROWS, WHOLE, BOTH], WHOLE),
        ([ROWS, ((), ("data",))], ((), ("data",))),
    ],
)
def test_the_copy_that_all_others_are_slices_of_is_read(wants, read):
    assert one_copy(wants) == read


def backward(rows: int = 4096, width: int = 2048) -> Graph:
    """A gradient that one aten op multiplies by a weight and by what went in, as a convolution's gradients do."""
    x, w = f"tensor<{rows}x{width}xf32>", f"tensor<{width}x{width}xf32>"
    graph = graph_from_text(
        f"""func.func @main(%x: {x}, %g: {x}, %w: {w}) -> ({x}, {w}) {{
          %t = stablehlo.tanh %g : {x}
          %d = stablehlo.dot_general %t, %w, contracting_dims = [1] x [1] : ({x}, {w}) -> {x}
          %e = stablehlo.dot_general %x, %t, contracting_dims = [0] x [0] : ({x}, {x}) -> {w}
          return %d, %e : {x}, {w}
        }}""",
        roles=["input", "input", "parameter"],
    )
    tanh, *products = (op for op in graph.ops if op.kind != "argument")
    atens = {tanh.id: 0, **{op.id: 1 for op in products}}
    ops = tuple(replace(op, aten=atens.get(op.id)) for op in graph.ops)
    values = [Value(op) for op in atens]
    return replace(graph, ops=ops, aten_outputs={(0, 0): values[0], (1, 0): values[1], (1, 1): values[2]})


def forbidding(problem: Problem, node: int, allowed: np.ndarray) -> Problem:
    costs = list(problem.node_costs)
    costs[node] = np.where(allowed, costs[node], np.inf)
    return replace(problem, node_costs=costs)


@pytest.mark.parametrize("kind", ["h100", "cpu"])
def test_groups_of_one_aten_op_pay_for_what_they_want_otherwise(kind):
    graph, mesh = backward(), Mesh((2, 4), ("data", "model"), kind)
    formulation = formulate(graph, mesh, load_device(kind))
    gradient = next(Value(op.id) for op in graph.ops if op.kind == "tanh")
    readers = [
        (len(formulation.argument_values) + group.id, ways.inputs[group.inputs.index(gradient)])
        for group, ways in zip(formulation.groups.groups, formulation.strategies, strict=True)
        if gradient in group.inputs
    ]
    (first, one), (last, other) = readers
    problem = formulation.problem
    for wanted, specs in ((first, one), (last, other)):
        split = (("data", "model"), ()) if wanted == first else ((), ("data", "model"))
        problem = forbidding(problem, wanted, np.array([plain(specs[i]) == split for i in range(len(specs.index))]))
    solution = solve(problem)
    annotations = formulation.annotations(solution.choice)
    columns = ((), ("data", "model"))
    assert annotations.copies.get((gradient, 1), annotations.pins[gradient]) == columns
    (price,) = [
        costs[solution.choice[last], solution.choice[first]]
        for edge, costs in zip(problem.edges, problem.edge_costs, strict=True)
        if edge == (last, first)
    ]
    assert 0 < price <= predict(graph, annotations, mesh).communication_s
