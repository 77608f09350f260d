"""A plan carried out by torch_xla on eight virtual devices; the plans split neighbours differently, on purpose."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch_xla")

ROOT = Path(__file__).resolve().parents[3]
EQUAL = 1e-5


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """What `eight_devices.py` saw: SPMD is on for a whole process, and with eight devices, so it has its own."""
    out = tmp_path_factory.mktemp("lower") / "seen.json"
    done = subprocess.run(
        [sys.executable, "-m", "tests.lower.torch_xla.eight_devices", str(out)],
        cwd=ROOT, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert out.exists(), done.stderr[-3000:]
    return json.loads(out.read_text())


def scenario(seen, name):
    assert "failed" not in seen[name], seen[name].get("failed")
    return seen[name]


@pytest.mark.parametrize(
    "name",
    [
        "sgd",
        "adamw",
        "adamw_foreach",
        "radam",
        "dampened",
        "torch_xla_compile",
        "loader",
        "one_context",
        "resumed",
        "torus",
    ],
)
def test_numbers_are_those_of_one_device(seen, name):
    found = scenario(seen, name)
    assert found["losses"] < EQUAL
    assert found["parameters"] < EQUAL


@pytest.mark.parametrize(
    "name",
    ["sgd", "adamw", "adamw_foreach", "radam", "dampened", "torch_xla_compile", "loader", "one_context", "resumed"],
)
def test_the_running_step_has_every_annotation_of_the_plan(seen, name):
    """Of its own program, as torch_xla has traced it: what equal numbers would not show."""
    found = scenario(seen, name)
    assert found["lacking"] == 0
    assert found.get("otherwise", []) == [], "parameters lie otherwise than planned after the last step"


@pytest.mark.parametrize(("name", "first"), [("radam", 5), ("dampened", 1)])
def test_first_steps_that_are_other_programs_run_on_what_is_sharded_as_planned(seen, name, first):
    found = scenario(seen, name)
    assert found["compiled"][first] == 1  # the planned program
    assert not any(found["compiled"][first + 1 :])
    assert "devices" in found["weight"]
    assert "devices" in found["state"]


def test_on_a_torus_devices_stand_where_the_plan_was_priced(seen):
    found = scenario(seen, "torus")
    ids = [int(number) for number in re.findall(r"\d+", found["weight"].partition("]")[2])][:8]
    assert sorted(ids) == list(range(8))
    assert ids != sorted(ids)
    assert not found["moved"], "the program that verify compiles names places of the mesh"


@pytest.mark.parametrize("name", ["sgd", "adamw", "adamw_foreach"])
def test_annotations_were_written(seen, name):
    found = scenario(seen, name)
    assert found["pins"] > 20
    assert found["copies"] > 10


@pytest.mark.parametrize("name", ["sgd", "adamw", "adamw_foreach"])
def test_the_first_step_is_compiled_and_no_other(seen, name):
    assert scenario(seen, name)["compiled"] == [1, 0, 0, 0]


def test_torch_xla_compile_does_not_compile_again(seen):
    assert scenario(seen, "torch_xla_compile")["compiled"][1:] == [0, 0, 0]


@pytest.mark.parametrize("name", ["sgd", "adamw", "adamw_foreach"])
def test_parameters_stay_the_same_objects_and_are_sharded_like_their_states(seen, name):
    found = scenario(seen, name)
    assert found["same_objects"]
    assert found["weight"] == found["state"]
    assert "devices=" in found["weight"]


def test_a_plan_holds_where_the_ops_run_in_another_order(seen):
    found = scenario(seen, "another_order")
    assert found["losses"] < EQUAL
    assert found["lacking"] == 0
    assert found["annotated"]


def test_a_loader_sends_shards(seen):
    found = scenario(seen, "loader")
    assert found["names"] == ["target", "x"]
    assert all("devices=" in spec for spec in found["inputs"])
    assert found["inputs_otherwise"] == []


def test_a_running_loss_may_be_kept_in_the_context(seen):
    assert scenario(seen, "one_context")["running"] < EQUAL


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("extra_op", "at op 0: autoshard.einsum.default -> f32[8,24] expected, aten.add.Tensor seen"),
        ("other_loss", "aten._log_softmax.default -> f32[8,10] expected"),
        ("stops_early", "the step ended there; aten.ones_like.default -> f32[] should follow"),
        ("other_batch", "input x is f32[4,16], the plan has f32[8,16]"),
        ("on_the_host", "It reads a tensor of the host: are all inputs moved to the device, .to('xla')?"),
        ("swapped", "aten.lerp.Scalar reads output 0 of op"),
        ("other_optimizer", "aten.mul.Tensor -> f32[24,16] expected"),
        ("half_a_step", "the step ended there"),
        ("second_backward", "goes on with aten.mul.Tensor in a backward pass"),
        ("second_step", "the step goes on and writes up.weight"),
    ],
)
def test_another_program_is_refused_and_leaves_everything_as_it_was(seen, case, words):
    found = scenario(seen, "other_programs")[case]
    assert found["error"].startswith("PlanMismatchError: this step is not the one the plan is for; first difference at")
    assert words in found["error"]
    assert (found["parameters"], found["states"], found["gradients"]) == (0, 0, 0)
    assert found["compiled"] == 0  # nothing of the refused step is left that a sync would run


def test_training_goes_on_after_a_refusal(seen):
    assert scenario(seen, "other_programs")["afterwards"] < EQUAL


@pytest.mark.parametrize(
    ("case", "error"),
    [
        (
            "larger_mesh",
            "LoweringError: mesh larger than the machine: it has 8 CPU devices, the plan's mesh 4x4 needs 16",
        ),
        ("smaller_mesh", "LoweringError: mesh smaller than the machine: it has 8 CPU devices"),
        ("on_meta", "LoweringError: up.weight is on the meta device: applying a plan needs the weights"),
        ("another_model", "PlanMismatchError: the plan is for another model: this one has no parameter"),
        ("wider", "PlanMismatchError: the plan is for another model: parameter up.bias is f32[25], planned f32[24]"),
        (
            "another_optimizer",
            "PlanMismatchError: the plan is for another optimizer: it has no state up.weight.exp_avg",
        ),
        (
            "no_optimizer",
            "LoweringError: the plan is for a training step with optimizer state: apply(model, optimizer)",
        ),
        ("not_applied", "LoweringError: this plan has not been applied"),
        ("inside_itself", "LoweringError: plan.annotate() inside the same plan's annotate(): each would take"),
        ("inside_another", "LoweringError: plan.annotate() inside another plan's annotate(): each would take"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_to_do(seen, case, error):
    assert scenario(seen, "unfit")[case].startswith(error)


def test_the_traced_program_has_every_annotation(seen):
    found = scenario(seen, "traced")
    assert found["sharded_arguments"] == found["planned_arguments"]
    assert found["annotations"] >= found["written"]


def test_the_traced_program_must_be_the_planned_one(seen):
    assert scenario(seen, "traced")["other"].startswith("PlanMismatchError: this plan is for another program")
