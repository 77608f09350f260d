"""Mixtures of experts are one op where they have its form, and a plan says why others are not."""

import pytest
from torch import nn

from autoshard.experts.form import FORWARD, GRADIENT, Form
from tests.conftest import FRONTENDS
from tests.experts.small import TOKENS, D, E, F, gpt_oss, graph_of, source


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("frontend", FRONTENDS)
def test_experts_and_their_gradient_are_one_op_each(frontend, implementation):
    graph = graph_of(source(implementation=implementation), "tpu-v5e", frontend)
    found = [op for op in graph.ops if op.kind in (FORWARD, GRADIENT)]
    assert [op.kind for op in found] == [FORWARD, FORWARD, GRADIENT, GRADIENT]
    shapes = [graph.type_of(value).shape for value in found[0].operands]
    assert shapes == [(TOKENS, D), (TOKENS, 2), (TOKENS, 2), (E, 2, F, D), (E, D, F)]
    assert Form.of(found[0].attrs) == Form("silu")
    assert not graph.program.written_out


def test_for_a_cpu_or_no_device_they_are_written_out():
    for device in (None, "cpu"):
        graph = graph_of(source(), device, "torchax")
        assert not any(op.kind in (FORWARD, GRADIENT) for op in graph.ops)
        assert not graph.program.written_out


def test_a_plan_says_why_experts_are_written_out():
    graph = graph_of(source(activation="tanh"), "tpu-v5e", "torchax")
    assert [(module, why) for _, module, why in graph.program.written_out if "experts" in module] == [
        (f"model.layers.{layer}.mlp.experts", "their activation is Tanh") for layer in range(2)
    ]


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_biased_experts_with_their_own_gate_are_one_op_under_checkpoints(frontend):
    step = gpt_oss()
    step.model.gradient_checkpointing_enable()
    graph = graph_of(step, "h100", frontend)
    found = [op for op in graph.ops if op.kind in (FORWARD, GRADIENT)]
    assert [op.kind for op in found].count(GRADIENT) == 2
    shapes = [graph.type_of(value).shape for value in found[0].operands[3:]]
    assert shapes == [(E, 2, F, D), (E, D, F), (E, 2, F)]
    made = Form(scale=1.702, limit=0.5, shift=1.0)
    assert {Form.of(op.attrs) for op in found} == {made}
    assert not any("experts" in module for _, module, _ in graph.program.written_out)


def test_a_limit_is_recognised_that_few_values_reach():
    step = gpt_oss(limit=7.0)
    graph = graph_of(step, "h100", "torchax")
    assert {Form.of(op.attrs).limit for op in graph.ops if op.kind in (FORWARD, GRADIENT)} == {7.0}


def test_a_limit_under_another_name_is_written_out(monkeypatch):
    step = gpt_oss()
    experts = type(step.model.model.layers[0].mlp.experts)

    def gate(self, wide):
        return nn.functional.silu(wide[..., ::2].clamp(max=30.0)) * wide[..., 1::2]

    monkeypatch.setattr(experts, "_apply_gate", gate)
    assert any("experts" in module for _, module, _ in graph_of(step, "h100", "torchax").program.written_out)


def test_a_gate_that_is_not_of_the_form_is_written_out(monkeypatch):
    step = gpt_oss()
    experts = type(step.model.model.layers[0].mlp.experts)
    monkeypatch.setattr(experts, "_apply_gate", lambda self, wide: wide[..., ::2] * wide[..., 1::2].cos())
    graph = graph_of(step, "h100", "torchax")
    assert {why for _, module, why in graph.program.written_out if "experts" in module} == {
        "their gate is the model's own"
    }
