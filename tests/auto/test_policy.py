"""One line: training loops under `use_spmd(auto=True)` and `auto_policy`, on eight virtual devices."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch_xla")

import autoshard
from autoshard.auto import policy as auto

ROOT = Path(__file__).resolve().parents[2]
EQUAL = 1e-5


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """What `auto_eight_devices.py` saw: SPMD is on for a whole process, and with eight devices, so it has its own."""
    directory = tmp_path_factory.mktemp("auto")
    done = subprocess.run(
        [sys.executable, "-m", "tests.lower.torch_xla.auto_eight_devices", str(directory / "seen.json")],
        cwd=ROOT, capture_output=True, text=True, timeout=900,
        env={**os.environ, "AUTOSHARD_CACHE": str(directory / "cache")},
    )  # fmt: skip
    assert (directory / "seen.json").exists(), done.stderr[-3000:]
    return json.loads((directory / "seen.json").read_text())


def scenario(seen, name):
    assert "failed" not in seen[name], seen[name].get("failed")
    return seen[name]


@pytest.mark.parametrize(
    "name",
    [
        "spmd",
        "policy",
        "policy_recurrent",
        "positions",
        "module_loss",
        "every_mesh",
        "accumulation",
        "clipping",
        "odd_batch",
        "cached",
        "after_a_step",
    ],
)
def test_numbers_are_those_of_one_device(seen, name):
    found = scenario(seen, name)
    assert found["losses"] < EQUAL
    assert found["parameters"] < EQUAL
    assert found["evaluated"] < EQUAL


@pytest.mark.parametrize("name", ["spmd", "module_loss", "odd_batch"])
def test_the_first_step_is_planned_and_the_others_follow_the_plan(seen, name):
    found = scenario(seen, name)
    assert found["plans"] == [True] * 4
    assert found["planned"] == [["model"], []]
    assert found["sharding"] == "{devices=[4,1,2]0,4,1,5,2,6,3,7 last_tile_dim_replicate}"
    assert found["warnings"] == []


@pytest.mark.parametrize(
    "name", ["spmd", "policy", "policy_recurrent", "positions", "module_loss", "every_mesh", "cached"]
)
def test_steps_after_the_first_have_every_annotation_of_the_plan(seen, name):
    found = scenario(seen, name)
    assert found["lacking"] == [0, 0, 0]
    assert found["otherwise"] == []


def test_the_planned_program_is_compiled_once(seen):
    assert scenario(seen, "spmd")["compiles"][2:] == [0, 0]


def test_the_policy_splits_parameters_before_any_step(seen):
    found = scenario(seen, "policy")
    assert found["at_once"] == "{devices=[8,1]0,1,2,3,4,5,6,7}"
    assert found["mesh"] == [2, 4]


def test_without_a_mesh_every_shape_is_tried(seen):
    assert scenario(seen, "every_mesh")["mesh"] is not None


def test_what_cannot_be_planned_is_left_to_propagation_with_a_warning(seen):
    found = scenario(seen, "accumulation")
    assert found["planned"] is None
    assert len(found["warnings"]) == 1
    assert "called more than once before the optimizer's step" in found["warnings"][0]
    assert found["sharding"] == "{devices=[8,1]0,1,2,3,4,5,6,7}", "still split, so that no device holds the whole model"


def test_clipping_runs_under_propagation_between_what_is_planned(seen):
    found = scenario(seen, "clipping")
    assert found["plans"] == [True] * 4
    assert found["lacking"] == [0, 0, 0]
    (said,) = found["warnings"]
    assert "norm.ScalarOpt_dim is no part of the step that was planned" in said


def test_an_optimizer_of_other_parameters_is_named(seen):
    (said,) = scenario(seen, "stale")["warnings"]
    assert "holds no parameter of the model that was trained" in said


def test_a_mesh_of_other_devices_is_refused_before_anything_is_placed(seen):
    found = scenario(seen, "small_mesh")
    assert "the mesh 2x2 has 4 devices, and this program runs on 8" in found["said"]
    assert not found["sharding"]


def test_a_second_start_finds_its_plan(seen):
    found = scenario(seen, "cached")
    assert found["made"] == 0, "the scenario before had planned the same"
    assert found["same"]


def test_torch_xla_does_not_take_the_policy_for_its_own():
    assert autoshard.auto_policy.__name__ != "auto_policy"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"auto_sharding": {"meshes": "2x4"}}, "spmd_config has 'meshes'; auto_sharding takes mesh, axes, device"),
        ({"sharding": {}}, "spmd_config has 'sharding'"),
    ],
)
def test_options_that_there_are_not_are_named(config, message):
    with pytest.raises(ValueError, match=message):
        autoshard.use_spmd(auto=True, spmd_config=config)


def test_options_come_from_the_environment_where_they_are_not_given(monkeypatch):
    monkeypatch.setenv("AUTOSHARD_MESH", "4x2")
    monkeypatch.setenv("AUTOSHARD_MEMORY", "16GB")
    assert auto._options({"auto_sharding": {"mesh": "2x4"}}) == {"mesh": "2x4", "memory": 16_000_000_000}
    assert auto._options(None)["mesh"] == "4x2"


def test_weights_that_an_earlier_forward_pass_holds_are_named(seen):
    said = scenario(seen, "after_a_step")["said"]
    assert "weight cannot be moved to the devices in place" in said
    assert "del loss" in said


def test_the_package_hands_on_what_the_documentation_names():
    """`docs/lowering.md` names `autoshard.auto.current_plan`, and programs import it from there."""
    code = "import sys; from autoshard.auto import auto_policy, current_plan, use_spmd; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
