"""A plan in transformers' `tp_plan`: taken by transformers in two processes (gloo), against one."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import autoshard
from autoshard.api import Plan
from autoshard.mesh import Mesh
from autoshard.plans.value import PlanMismatchError
from tests.plans import made as plans

transformers = pytest.importorskip("transformers")

ROOT = Path(__file__).resolve().parents[2]
MESH = Mesh((1, 2), device="h100")
EQUAL = 1e-5


def left_whole(plan, *names):
    """The plan with some weights not split."""
    whole = {name: replace(plan.parameters[name], spec=((), ()), copies=()) for name in names}
    return replace(plan, parameters={**plan.parameters, **whole})


def llama():
    config = transformers.LlamaConfig(
        num_hidden_layers=2, hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=96, use_cache=False, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")


@pytest.fixture(scope="module")
def program():
    tokens = torch.zeros(2, 12, dtype=torch.int64)
    with torch.device("meta"):
        model = llama()
    return autoshard.capture(model, {"input_ids": tokens, "labels": tokens}, train=True)


@pytest.fixture(scope="module")
def said(program):
    """What each plan says, and what it cannot."""
    with torch.device("meta"):
        model = llama()
    megatron = autoshard.manual_plan("megatron", program, MESH)
    layers = [name for name, tensor in megatron.parameters.items() if ".layers.1." in name and any(tensor.spec)]
    keys = [name for name in megatron.parameters if "k_proj" in name]
    made = {
        "megatron": megatron,
        "one layer": left_whole(megatron, *layers),
        "no keys": left_whole(megatron, *keys),
        "gathered": autoshard.plan_program(program, MESH, hints={"model.layers.0.mlp.up_proj.weight": "[model],[]"}),
    }
    return {name: plan.to_tp_plan(model) for name, plan in made.items()}


@pytest.fixture(scope="module")
def seen(said, tmp_path_factory):
    directory = tmp_path_factory.mktemp("tp_plan")
    torch.manual_seed(0)
    llama().save_pretrained(directory / "model")
    (directory / "styles.json").write_text(json.dumps({name: styles for name, (styles, _) in said.items()}))
    command = [sys.executable, "-m", "tests.lower.tp_plan_processes", str(directory)]
    processes = [
        subprocess.Popen([*command, str(rank), "2"], cwd=ROOT, stderr=subprocess.PIPE, text=True) for rank in range(2)
    ]
    try:
        errors = [process.communicate(timeout=600)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert (directory / "seen.json").exists(), errors[0][-3000:]
    return json.loads((directory / "seen.json").read_text())


@pytest.mark.parametrize("name", ["megatron", "one layer", "no keys", "gathered"])
def test_transformers_takes_it_and_numbers_are_those_of_one_process(seen, name):
    assert seen[name]["logits"] < EQUAL
    assert seen[name]["gradients"] < EQUAL


def test_a_plan_by_hand_is_transformers_own(said, seen):
    styles, lost = said["megatron"]
    for layer, style in transformers.LlamaConfig.base_model_tp_plan.items():
        assert styles[f"model.{layer}"] == style
    assert lost == []
    assert seen["megatron"]["local"]["model.layers.1.mlp.down_proj.weight"] == [32, 32]


def test_layers_that_are_split_differently_are_named_and_left_whole(said, seen):
    styles, lost = said["one layer"]
    assert styles["model.layers.*.self_attn.q_proj"] == "replicate"
    assert any("model.layers.*.self_attn.q_proj: its layers are split differently" in line for line in lost)
    assert seen["one layer"]["local"]["model.layers.0.self_attn.q_proj.weight"] == [32, 32]


def test_a_slice_never_meets_a_whole_tensor(said):
    styles, lost = said["no keys"]
    assert styles["model.layers.*.self_attn.q_proj"] == "colwise_gather_output"
    assert styles["model.layers.*.self_attn.k_proj"] == "replicate"
    assert any("model.layers.*.self_attn: only some of its layers are split" in line for line in lost)


def test_weights_that_are_kept_split_and_read_whole_are_named(said):
    styles, lost = said["gathered"]
    assert "model.layers.0.mlp.up_proj: Linear kept split [model],[], read [],[]" in lost
    assert styles["model.layers.*.mlp.up_proj"] == "replicate"


def test_an_axis_that_the_mesh_has_not():
    with pytest.raises(ValueError, match=r"no axis 'tp', it has data, model"):
        plans.plan(plans.program()).to_tp_plan(nn.Linear(2, 2), "tp")


def test_what_it_has_no_word_for_is_named():
    """A convolution, a parameter of no layer, a dim split over both axes."""
    model = nn.Sequential(nn.Conv1d(4, 8, 3), nn.Flatten(), nn.Linear(8, 16, bias=False))
    model.register_parameter("scale", nn.Parameter(torch.ones(16)))
    hints = {"0.weight": "[model],[],[]", "2.weight": "[data,model],[]"}
    plan = autoshard.plan(model, torch.zeros(4, 4, 3), mesh=Mesh((2, 2)), hints=hints)
    styles, lost = Plan.from_json(plan.to_json()).to_tp_plan(model)
    assert styles == {}
    assert any(line.startswith("0.weight: split [model],[],[], no weight of an nn.Linear") for line in lost)
    assert any(line.startswith("2: Linear split [data,model],[]") for line in lost)


def test_another_model_is_refused(program):
    megatron = autoshard.manual_plan("megatron", program, MESH)
    with pytest.raises(PlanMismatchError, match=r"another model: this one has no parameter"):
        megatron.to_tp_plan(nn.Linear(2, 2))
