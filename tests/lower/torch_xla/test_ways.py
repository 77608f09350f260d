"""torch_xla's ways of working, each training under a plan with the numbers of one device."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch_xla")

ROOT = Path(__file__).resolve().parents[3]
EQUAL, HALF_EQUAL = 1e-5, 2e-2


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """What `ways_eight_devices.py` saw, in a process of its own with eight devices."""
    out = tmp_path_factory.mktemp("ways") / "seen.json"
    done = subprocess.run(
        [sys.executable, "-m", "tests.lower.torch_xla.ways_eight_devices", str(out)],
        cwd=ROOT, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert out.exists(), done.stderr[-3000:]
    return json.loads(out.read_text())


@pytest.mark.parametrize(
    "name",
    [
        "activation_checkpointing",
        "activation_checkpointing_of_torch",
        "autocast",
        "gradients_clipped",
        "micro_batches_clipped",
        "bf16",
        "dynamo",
        "eager_and_compile",
        "fsdpv2_beside",
        "gradient_accumulation",
        "layers_scanned",
        "marks_inside",
        "micro_batches",
        "two_micro_batches",
        "recomputed_as_planned",
        "scalar_parameter",
        "values_read",
    ],
)
def test_numbers_are_those_of_one_device(seen, name):
    assert "failed" not in seen[name], seen[name]["failed"]
    equal = HALF_EQUAL if name in ("autocast", "bf16") else EQUAL
    assert seen[name]["losses"] < equal
    assert seen[name]["parameters"] < equal
    assert seen[name]["split"] > 4
    assert seen[name]["otherwise"] == [], "parameters lie otherwise than planned after training"
    if name != "values_read":  # it runs in pieces, of which none has all
        assert seen[name]["lacking"] == 0, "the step ran, but without annotations of the plan"


def test_recomputation_updates_statistics_once(seen):
    found = seen["statistics_recomputed"]
    assert "failed" not in found, found["failed"]
    assert max(found["buffers"], found["losses"], found["parameters"]) < EQUAL


def test_a_gradient_scaler_in_the_loop_is_refused_by_name(seen):
    assert seen["scaled"]["refused"].startswith("a step under annotate() calls GradScaler.scale at ")


def test_fsdpv2_shards_its_own_beside(seen):
    assert seen["fsdpv2_beside"]["theirs"], "no weight of the model under FSDPv2"
    assert all(spec.startswith(("{devices=[8,1]", "{devices=[1,8]")) for spec in seen["fsdpv2_beside"]["theirs"])


def test_dynamo_leaves_the_planned_step_alone(seen):
    assert seen["dynamo"]["graphs"] == 0


def test_what_is_computed_again_is_planned(seen):
    assert seen["activation_checkpointing"]["computed_again"] > 10
    assert seen["activation_checkpointing_of_torch"]["computed_again"] > 10
    assert seen["recomputed_as_planned"]["computed_again"] > 10


def test_a_value_that_makes_another_program_is_named(seen):
    found = seen["values_read"]
    assert "failed" not in found, found["failed"]
    assert found["reads"] >= 3
    assert "this step is not the one the plan is for" in found["refused"]
    assert "the step reads a value (aten.nonzero.default)" in found["refused"]


def test_sharded_tensors_hold_what_the_plan_says(seen):
    found = seen["sharded_tensors"]
    assert "failed" not in found, found["failed"]
    assert found["split"] > 4
    assert found["differing"] == []


def test_a_checkpoint_of_one_plan_is_loaded_under_another(seen):
    found = seen["checkpoint_between_plans"]
    assert "failed" not in found, found["failed"]
    assert found["partial"] > 0  # tensors that torch_xla's own planner leaves out
    assert found["stored"] == 2 * 14  # parameters and momenta, every one of them
    assert found["difference"] == 0
    assert found["otherwise"] == []
