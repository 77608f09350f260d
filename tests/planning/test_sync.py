"""Plans without XLA's latency hiding scheduler, where memory is short."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import autoshard
from autoshard.comparison.compared import compare_program
from autoshard.manual import PLANS
from autoshard.mesh import Mesh
from autoshard.planning.one_mesh import candidate_on
from autoshard.planning.options import PlanningOptions
from autoshard.planning.rivals import that_fits
from autoshard.program import Program
from autoshard.show.report import SYNC_LINE
from autoshard.stablehlo.reader import build_graph

MESH = Mesh((2, 4), device="h100:2x4")
SECONDS = 5.0
"""Time limit of each solve."""


class Blocks(torch.nn.Module):
    """Pairs of linear layers that are computed again in the backward pass."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        two = (torch.nn.Linear(width, 4 * width, False), torch.nn.Tanh(), torch.nn.Linear(4 * width, width, False))
        self.blocks = torch.nn.ModuleList(torch.nn.Sequential(*two) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return x


@pytest.fixture(scope="module")
def program() -> Program:
    with torch.device("meta"):
        model = Blocks(2048, 6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return autoshard.capture(
        model, (torch.zeros(4096, 2048),), loss_fn=lambda y: y.square().mean(), optimizer=optimizer
    )


def test_a_plan_that_does_not_fit_is_compiled_without_latency_hiding(program: Program) -> None:
    hiding = autoshard.plan_program(program, MESH, memory=None, time_limit=SECONDS)
    sync = autoshard.plan_program(program, replace(MESH, device="h100+sync:2x4"), memory=None, time_limit=SECONDS)
    assert hiding.mesh == MESH
    assert hiding.predicted.overlapped_s < hiding.predicted.step_time_s
    assert sync.predicted.overlapped_s == sync.predicted.step_time_s
    limit = sync.predicted.peak_memory_bytes
    assert limit < hiding.predicted.peak_memory_bytes
    found = autoshard.plan_program(program, MESH, memory=limit, time_limit=SECONDS)
    assert found.mesh == sync.mesh
    assert found.predicted.peak_memory_bytes <= limit
    assert SYNC_LINE in str(found)
    assert autoshard.Plan.from_json(found.to_json()) == found


def test_where_the_solver_finds_none_a_plan_by_hand_may_fit(program: Program) -> None:
    graph = build_graph(program)
    under_fsdp = autoshard.manual_plan("fsdp", program, MESH)
    limit = under_fsdp.predicted.peak_memory_bytes
    found = that_fits(graph, [MESH], limit, {}, bound=0.1 * under_fsdp.predicted.overlapped_s)
    assert found is not None
    assert found.prediction.peak_memory_bytes <= limit
    assert found.solver is not None
    assert found.solver.overruled in PLANS
    assert found.solver.gap == pytest.approx(1 - found.solver.bound / found.time)
    assert that_fits(graph, [MESH], 1000, {}, bound=None) is None


def test_it_stands_beside_others_as_it_is_compiled(program: Program) -> None:
    limit = autoshard.manual_plan("fsdp", program, replace(MESH, device="h100+sync:2x4")).predicted.peak_memory_bytes
    found = compare_program(program, MESH, plans=["auto", "fsdp"], options=PlanningOptions(memory=limit, time_limit=SECONDS))
    auto = found["auto"].plan
    assert auto.mesh.device == "h100+sync:2x4"
    assert found["fsdp"].plan.mesh == MESH
    assert f"auto: {SYNC_LINE}" in str(found)
    again = compare_program(program, MESH, plans=["fsdp"], others={"saved": auto})
    assert again["saved"].plan.predicted == auto.predicted


def test_a_goal_that_is_out_of_reach_without_latency_hiding_may_be_met_with_it(program: Program) -> None:
    graph = build_graph(program)
    hiding = candidate_on(graph, MESH, PlanningOptions(memory=None), SECONDS)
    sync = candidate_on(graph, replace(MESH, device="h100+sync:2x4"), PlanningOptions(memory=None), SECONDS)
    assert hiding.solver is not None
    assert sync.solver is not None
    goal = (hiding.solver.objective + sync.solver.bound) / 2
    limit = hiding.prediction.peak_memory_bytes - 1
    found = candidate_on(graph, MESH, PlanningOptions(memory=limit), SECONDS, goal)
    assert found.mesh == MESH
    assert found.prediction.peak_memory_bytes <= limit
