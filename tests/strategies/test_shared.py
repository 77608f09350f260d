"""What a TPU's compiler makes once for several groups: the solver prices what they disagree on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoshard.cost.machine.device import load_device
from autoshard.cost.predict import predict
from autoshard.graph.ops import Graph, Value
from autoshard.mesh import Mesh
from autoshard.planning.one_mesh import OneMesh
from autoshard.solver.problem import Status
from autoshard.solver.settings import Settings
from autoshard.solver.solve import solve
from autoshard.strategies.formulate import formulate
from autoshard.strategies.shared import disagreeing, joined, shared_values, solved_together
from tests.graph.helpers import graph_from_text

ALL = ("data", "model")
WHOLE = {"arg1": ((),), "arg3": ((),)}


def updates(size: int = 1 << 16) -> Graph:
    """Two parameters of one shape, each updated by one aten op that scales its gradient by one rate."""
    kind = f"tensor<{size}xf32>"

    def update(parameter: str, gradient: str, to: str) -> str:
        return f"""%{to}r = stablehlo.broadcast_in_dim %rate, dims = [] : (tensor<f32>) -> {kind}
          %{to}s = stablehlo.multiply %{to}r, %{gradient} : {kind}
          %{to} = stablehlo.add %{parameter}, %{to}s : {kind}"""

    graph = graph_from_text(
        f"""func.func @main(%p: {kind}, %q: {kind}, %g: {kind}, %h: {kind}, %rate: tensor<f32>) -> ({kind}, {kind}) {{
          {update("p", "g", "a")}
          {update("q", "h", "b")}
          return %a, %b : {kind}, {kind}
        }}""",
        roles=["parameter", "parameter", "input", "input", "scalar"],
        updates={0: 0, 1: 1},
    )
    made = [op for op in graph.ops if op.kind != "argument"]
    ops = [op if op.kind == "argument" else replace(op, aten=made.index(op) // 3) for op in graph.ops]
    outputs = {(place, 0): value for place, value in enumerate(graph.outputs)}
    return replace(graph, ops=tuple(ops), aten_outputs=outputs)


@pytest.mark.parametrize(("kind", "wanted"), [("tpu-v5e", ()), ("h100", ALL), ("cpu", ALL)])
def test_an_update_is_split_only_if_what_it_shares_may_be(kind, wanted):
    """One of the two must stay whole: where both read one broadcast of the rate, splitting the other takes a gather."""
    graph, mesh = updates(), Mesh((2, 4), ALL, kind)
    decided = OneMesh(graph, mesh, hints=WHOLE).candidate(None)
    assert decided.annotations.pins[Value(0)] == (wanted,)
    found = predict(graph, decided.annotations, mesh)
    assert not found.collectives
    assert decided.solver.status == "optimal"


def test_what_groups_disagree_on_is_priced_as_it_is_predicted():
    graph, mesh = updates(), Mesh((2, 4), ALL, "tpu-v5e")
    hints = {**WHOLE, "arg0": (ALL,)}
    device = load_device("tpu-v5e")
    formulation = formulate(graph, mesh, device, hints=hints)
    alone = solve(formulation.problem)
    annotations = formulation.annotations(alone.choice)
    shared = shared_values(formulation, annotations, mesh)
    assert [len(one.groups) for one in shared] == [2]
    assert disagreeing(formulation, shared, alone.choice) == shared
    priced = solve(joined(formulation, shared, mesh, device).problem)
    communication = predict(graph, annotations, mesh).communication_s
    assert communication > 0
    assert priced.objective - alone.objective == pytest.approx(communication, rel=1e-6)


class _OutOfTime(Settings):
    """Settings under which a solve proves nothing beyond the trivial bound."""

    def solve(self, problem, starts=()):
        return replace(solve(problem), bound=0.0, status=Status.TIME_LIMIT)


def test_a_bound_holds_for_the_problem_with_more_costs_too():
    # Llama 3 8B with checkpoints: the second problem had one second left, and its gap of 25 % became the plan's.
    graph, mesh = updates(), Mesh((2, 4), ALL, "tpu-v5e")
    device = load_device("tpu-v5e")
    formulation = formulate(graph, mesh, device, hints={**WHOLE, "arg0": (ALL,)})
    alone = solve(formulation.problem)
    _, found = solved_together(formulation, alone, mesh, device, _OutOfTime(0.0))
    assert found.status is Status.TIME_LIMIT
    assert found.bound == alone.bound < found.objective
