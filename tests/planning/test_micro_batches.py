"""Steps of several micro-batches: two are captured, and the second counts for all after the first."""

from __future__ import annotations

import pytest
import torch

import autoshard
from autoshard.errors import CaptureError, LoweringError
from autoshard.graph.groups import fusion_groups
from autoshard.mesh import Mesh
from autoshard.plans.value import PlanMismatchError
from autoshard.stablehlo.annotate import check_steps
from autoshard.stablehlo.reader import build_graph
from tests.conftest import FRONTENDS

MESH = Mesh((2, 2), device="h100")


def program(count: int = 1, frontend: str = "auto") -> autoshard.Program:
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 256))
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.empty(512, 256, device="meta")
    how = {"loss_fn": lambda y: y.square().mean(), "optimizer": optimizer, "frontend": frontend}
    return autoshard.capture(model, x, **how, micro_batches=count)


@pytest.fixture(scope="module")
def plans() -> dict[int, autoshard.Plan]:
    return {count: autoshard.plan_program(program(count), MESH) for count in (1, 4, 8, 16)}


def test_a_program_does_not_grow_with_its_micro_batches() -> None:
    two, many = program(2), program(16)
    assert [op.name for op in two.ops] == [op.name for op in many.ops]
    assert two.fingerprint != many.fingerprint
    assert many.micro_steps is not None
    assert many.micro_steps.count == 16
    assert sorted(two.inputs) == ["input", "input@2"]


def test_each_micro_batch_costs_as_much(plans: dict[int, autoshard.Plan]) -> None:
    steps = {count: plan.predicted.overlapped_s for count, plan in plans.items() if plan.predicted is not None}
    one_more = (steps[16] - steps[8]) / 8
    assert steps[8] - steps[4] == pytest.approx(4 * one_more, rel=0.05)  # each count has its own optimum
    assert 0.3 * steps[1] < one_more < steps[1]


def test_inputs_of_all_micro_batches_are_split_alike(plans: dict[int, autoshard.Plan]) -> None:
    inputs = plans[4].inputs
    assert inputs["input"].spec == inputs["input@2"].spec


def test_a_plan_says_how_many_there_are(plans: dict[int, autoshard.Plan]) -> None:
    text = plans[4].to_json()
    assert '"version": 2' in text
    assert '"version": 1' in plans[1].to_json()
    again = autoshard.Plan.from_json(text)
    assert again == plans[4]
    assert again.micro_batches == 4
    assert "4 micro-batches and one update" in str(again)
    with pytest.raises(PlanMismatchError, match="micro"):
        again.check_program(program(2))


def test_what_cannot_be_run_or_captured_is_said() -> None:
    four = program(4)
    with pytest.raises(LoweringError, match="of 4 micro-batches, and jax would run two of them"):
        autoshard.plan_program(four, Mesh((1,))).to_jax().step(four, torch.optim.AdamW([torch.zeros(1)]))
    with pytest.raises(CaptureError, match="micro_batches=2 is of a training step"):
        autoshard.capture(torch.nn.Linear(4, 4), torch.zeros(4, 4), micro_batches=2)
    with pytest.raises(ValueError, match="micro_batches=0: a step has one micro-batch or more"):
        program(0)


def test_an_export_that_would_lack_micro_steps_is_refused(plans: dict[int, autoshard.Plan]) -> None:
    check_steps(program(2))
    with pytest.raises(LoweringError, match="a step of 4 micro-batches is captured as two micro-steps"):
        check_steps(program(4))


def test_a_norms_gradient_is_summed_over_both_batches_split_alike() -> None:
    """One group of both sums could split only one of the two batches over an axis."""

    class Norm(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1024))
            self.up = torch.nn.Linear(1024, 4096, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.up(x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * self.weight).square().mean()

    with torch.device("meta"):
        model = Norm()
        x = torch.empty(8, 4096, 1024)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = autoshard.capture(model, x, loss_fn=lambda y: y, optimizer=optimizer, micro_batches=4)
    graph = build_graph(step)
    for group in fusion_groups(graph).groups:
        others = [op for op in group.ops if graph.runs(op) != graph.runs(group.ops[-1])]
        assert {graph.ops[op].kind for op in others} <= {"add"}
    mesh = Mesh((8,), device="tpu-v6e:2x4")
    found = autoshard.plan_program(step, mesh, rivals=False)
    by_hand = autoshard.manual_plan("dp", step, mesh)
    assert found.predicted.overlapped_s <= 1.01 * by_hand.predicted.overlapped_s


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_gradients_are_clipped_before_the_update(frontend: str) -> None:
    model, step = torch.nn.Linear(4, 4), {"loss_fn": torch.sum, "frontend": frontend}
    plain = autoshard.capture(model, torch.zeros(4, 4), **step)
    program = autoshard.capture(model, torch.zeros(4, 4), **step, clip_grad_norm=0.5)
    more = [op for op in program.ops if op.phase == "optimizer"]
    assert len(program.ops) == len(plain.ops) + len(more)
    assert {each.name for each in program.outputs} == {each.name for each in plain.outputs}
    plan = autoshard.plan_program(program, autoshard.Mesh((2,), device="h100"))
    assert plan.clip_grad_norm == 0.5
    assert "gradients clipped to norm 0.5" in str(plan)


def test_a_norm_that_clips_nothing_sensible_is_refused() -> None:
    for norm in (0, -1.0, float("inf"), "1"):
        with pytest.raises(ValueError, match="a norm above 0, or None"):
            autoshard.capture(torch.nn.Linear(4, 4), torch.zeros(4, 4), loss_fn=torch.sum, clip_grad_norm=norm)
    with pytest.raises(CaptureError, match=r"clip_grad_norm=1\.0 is of a training step"):
        autoshard.capture(torch.nn.Linear(4, 4), torch.zeros(4, 4), clip_grad_norm=1.0)
