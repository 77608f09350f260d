"""Plans for which XLA's latency hiding scheduler gets less memory, where memory is short."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import autoshard
from autoshard.comparison.compared import compare_program
from autoshard.cost.machine.device import with_slop
from autoshard.cost.predict import predict, rescheduled
from autoshard.manual import PLANS, plan_named
from autoshard.mesh import Mesh
from autoshard.planning.candidate import SLOPS, Candidate
from autoshard.planning.one_mesh import candidate_on
from autoshard.planning.options import PlanningOptions
from autoshard.planning.rivals import or_by_hand, that_fits
from autoshard.plans.value import SolverInfo
from autoshard.program import Program
from autoshard.show.report import scheduler_lines
from autoshard.stablehlo.reader import build_graph

MESH = Mesh((2, 4), device="h100:2x4")
LESS = SLOPS[-1]
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
        model = Blocks(8192, 6)
        inputs = torch.zeros(16384, 8192)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return autoshard.capture(model, (inputs,), loss_fn=lambda y: y.square().mean(), optimizer=optimizer)


def peak(mesh: Mesh, program: Program, name: str = "fsdp") -> int:
    return autoshard.manual_plan(name, program, mesh).predicted.peak_memory_bytes


def test_another_schedule_is_predicted_as_the_kind_that_has_it(program: Program) -> None:
    graph = build_graph(program)
    made = plan_named("fsdp")(graph, MESH)
    usual = predict(graph, made, MESH)
    less = with_slop(MESH, LESS)
    found, wanted = rescheduled(usual, less), predict(graph, made, less)
    assert found.peak_memory_bytes == wanted.peak_memory_bytes < 0.8 * usual.peak_memory_bytes
    assert found.overlapped_s == wanted.overlapped_s > usual.overlapped_s
    assert (found.kernel_s, found.step_time_s) == (wanted.kernel_s, pytest.approx(usual.step_time_s))


def test_a_plan_that_does_not_fit_is_scheduled_within_less_memory(program: Program) -> None:
    free = autoshard.plan_program(program, MESH, memory=None, time_limit=SECONDS)
    limit = autoshard.plan_program(
        program, with_slop(MESH, LESS), memory=None, time_limit=SECONDS
    ).predicted.peak_memory_bytes
    assert limit < free.predicted.peak_memory_bytes
    found = autoshard.plan_program(program, MESH, memory=limit, time_limit=SECONDS, rivals=False)
    assert found.mesh in [with_slop(MESH, percent) for percent in SLOPS]
    assert found.predicted.peak_memory_bytes <= limit
    assert found.predicted.overlapped_s >= free.predicted.overlapped_s
    assert scheduler_lines(found.mesh)[0] in str(found)
    assert autoshard.Plan.from_json(found.to_json()) == found


@pytest.mark.parametrize(
    ("usual", "unhidden", "limit", "taken", "tries"),
    [(105, 110, 100, 60, 2), (90, 110, 70, 10, 4), (90, 110, 50, 0, 5), (90, 110, 40, 0, 1), (250, 60, 100, 60, 3)],
    ids=["near", "less", "none", "far", "far, fits"],
)
def test_the_most_memory_is_taken_with_which_it_fits(
    program: Program, monkeypatch: pytest.MonkeyPatch, usual: int, unhidden: int, limit: int, taken: int, tries: int
) -> None:
    graph = build_graph(program)
    made = plan_named("fsdp")(graph, MESH)
    predicted = replace(predict(graph, made, MESH), peak_memory_bytes=usual)
    # as predicted for Mixtral 8x7B on 16 H100: without latency hiding it takes more than with little memory for it
    peaks, seen = {80: 101, 60: 95, 30: 99, 10: 69, 0: unhidden}, list[int]()

    def scheduled(candidate: Candidate, percent: int) -> Candidate:
        seen.append(percent)
        return replace(candidate, prediction=replace(predicted, peak_memory_bytes=peaks[percent]), slop=percent)

    monkeypatch.setattr(Candidate, "with_slop", scheduled)
    found = Candidate(MESH, made, predicted, memory=limit)
    assert (found.rescheduled().slop, len(seen)) == (taken, tries)


def test_a_kind_with_a_percentage_keeps_it(program: Program) -> None:
    mesh = with_slop(MESH, 60)
    limit = autoshard.plan_program(program, mesh, memory=None, time_limit=SECONDS).predicted.peak_memory_bytes - 1
    found = autoshard.plan_program(program, mesh, memory=limit, time_limit=SECONDS)
    assert found.mesh == mesh


def test_what_is_refined_is_compiled_as_its_target_says(program: Program) -> None:
    graph = build_graph(program)
    options = PlanningOptions(memory=None, refine="h100:8", time_limit=SECONDS)
    usual = candidate_on(graph, MESH, options, SECONDS)
    limit = candidate_on(graph, with_slop(MESH, LESS), options, SECONDS).prediction.peak_memory_bytes
    assert candidate_on(graph, MESH, replace(options, memory=limit), SECONDS).mesh == usual.mesh == MESH


def test_a_rival_of_a_plan_without_latency_hiding_keeps_its_own(program: Program) -> None:
    graph = build_graph(program)
    fsdp = autoshard.manual_plan("fsdp", program, MESH).predicted
    hidden = predict(graph, plan_named("dp")(graph, MESH), MESH)
    # in place of a choice that hides nothing in that memory, and is slower than FSDP with its gathers hidden
    made = replace(hidden, overlapped_s=0.5 * (fsdp.overlapped_s + fsdp.step_time_s), peak_memory_bytes=0)
    solver = SolverInfo("optimal", 1e-9, 1e-9, 0.0, "dual")
    found = Candidate(
        with_slop(MESH, LESS),
        plan_named("dp")(graph, MESH),
        made,
        memory=fsdp.peak_memory_bytes,
        solver=solver,
        slop=LESS,
    )
    taken = or_by_hand(found, graph, PlanningOptions(), {})
    assert taken.mesh == MESH
    assert taken.slop is None
    assert taken.time <= fsdp.overlapped_s


def test_where_the_solver_finds_none_a_plan_by_hand_may_fit(program: Program) -> None:
    graph = build_graph(program)
    limit = peak(with_slop(MESH, LESS), program)
    bound = 0.1 * autoshard.manual_plan("fsdp", program, MESH).predicted.overlapped_s
    found = that_fits(graph, MESH, limit, {}, bound=bound)
    assert found is not None
    assert found.prediction.peak_memory_bytes <= limit
    assert found.solver is not None
    assert found.solver.overruled in PLANS
    assert found.solver.gap == pytest.approx(1 - found.solver.bound / found.time)
    assert that_fits(graph, MESH, 1000, {}, bound=None) is None


def test_it_stands_beside_others_as_it_is_compiled(program: Program) -> None:
    limit = autoshard.plan_program(
        program, with_slop(MESH, LESS), memory=None, time_limit=SECONDS
    ).predicted.peak_memory_bytes
    options = PlanningOptions(memory=limit, time_limit=SECONDS, rivals=False)
    found = compare_program(program, MESH, plans=["auto", "fsdp"], options=options)
    auto = found["auto"].plan
    assert auto.mesh in [with_slop(MESH, percent) for percent in SLOPS]
    assert found["fsdp"].plan.mesh == MESH
    assert f"auto: {scheduler_lines(auto.mesh)[0]}" in str(found)
    again = compare_program(program, MESH, plans=["fsdp"], others={"saved": auto})
    assert again["saved"].plan.predicted == auto.predicted
