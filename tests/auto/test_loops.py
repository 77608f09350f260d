"""Everyday training loops under the automatic mode: none is ended, and all have the numbers of plain PyTorch."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch_xla")

ROOT = Path(__file__).resolve().parents[2]
EQUAL = 1e-5

FOLLOWED = [
    "accumulated_later", "accuracy_logged", "all_saved_and_loaded", "average_of_all_batches",
    "cleared_behind_the_pass", "counter_in_an_attribute", "first_step_skipped", "gradients_kept_as_zeros",
    "group_added", "last_batch_smaller", "modes_around_the_pass", "never_cleared", "output_edited", "read_before",
    "running_loss_in_place", "scheduled", "state_in_an_attribute", "two_optimizers", "validated",
    "weights_loaded_between",
]  # fmt: skip
"""Planned, and every step after the first has nothing that is not."""
IN_PART = {
    "checked_for_nan": "aten.abs.default is no part of the step that was planned",
    "another_optimizer_later": "the model or optimizer that this plan was applied to is gone",
    "clipped_by_hand": "aten.pow.Tensor_Scalar is no part of the step that was planned",
    "clipped_by_norm": "norm.ScalarOpt_dim is no part of the step that was planned",
    "clipped_by_value": "aten.clamp.default is no part of the step that was planned",
    "errors_caught": "aten.ones.default is no part of the step that was planned",
    "frozen_at_first": "is no part of the step that was planned",
    "frozen_for_a_while": "the step ends without op",
    "gradient_norm_at_times": "is no part of the step that was planned",
    "gradients_centred_and_decayed": "aten.mean.default is no part of the step that was planned",
    "gradients_hooked": "aten.clamp.default is no part of the step that was planned",
    "layer_replaced": "is no part of the step that was planned",
    "metrics_between": "is no part of the step that was planned",
    "rectified": "norm.ScalarOpt_dim is no part of the step that was planned",
    "running_loss": "aten.add.Tensor is no part of the step that was planned",
    "scaled": "aten.isinf.default is no part of the step that was planned",
    "sharpness_aware": "is no part of the step that was planned",
    "weights_bounded_before": "aten.clamp.default is no part of the step that was planned",
}
"""Planned, and what is not planned runs beside it."""
NOT_PLANNED = {
    "accumulated": "called more than once before the optimizer's step",
    "adversaries": "requires no gradient",
    "averaged": "the loss follows from more than one pass",
    "closure": "the model is called in optimizer.step(closure)",
    "gradient_penalty": "does not require grad",
    "inputs_without_names": "the model's forward takes *args",
    "not_captured": "indexes with a boolean mask",
    "two_backward_passes": "backward() is called 2 times before the optimizer's step",
    "two_views": "the loss follows from more than one pass",
    "updated_by_hand": "no optimizer has made a step in 10 passes",
}


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """What `loops_eight_devices.py` saw, in a process of its own: SPMD is on for a whole process."""
    out = tmp_path_factory.mktemp("loops") / "seen.json"
    done = subprocess.run(
        [sys.executable, "-m", "tests.lower.torch_xla.loops_eight_devices", str(out)],
        cwd=ROOT, capture_output=True, text=True, timeout=900,
        env=os.environ,
    )  # fmt: skip
    assert out.exists(), done.stderr[-3000:]
    return json.loads(out.read_text())


def equal(found):
    assert "failed" not in found, found.get("failed")
    assert found["losses"] < EQUAL
    assert found["parameters"] < EQUAL


def test_every_loop_is_listed(seen):
    assert set(seen) == {*FOLLOWED, *IN_PART, *NOT_PLANNED}


@pytest.mark.parametrize("name", FOLLOWED)
def test_what_is_planned_is_followed_whatever_is_around_it(seen, name):
    found = seen[name]
    equal(found)
    assert found["planned"]
    assert found["warnings"] == []
    assert found["modes"] == 0


@pytest.mark.parametrize("name", IN_PART)
def test_what_is_not_planned_of_a_step_is_named_once_with_its_place(seen, name):
    found = seen[name]
    equal(found)
    assert found["planned"]
    (said,) = found["warnings"]
    assert IN_PART[name] in said
    assert "loops_eight_devices.py:" in said
    assert found["modes"] == 0


@pytest.mark.parametrize("name", NOT_PLANNED)
def test_what_cannot_be_planned_runs_as_it_is_and_says_why(seen, name):
    found = seen[name]
    equal(found)
    assert not found["planned"]
    (said,) = found["warnings"]
    assert NOT_PLANNED[name] in said
    assert found["modes"] == 0


def test_clipped_gradients_are_read_as_planned(seen):
    assert seen["clipped_by_norm"]["lacking"] == 0
    assert seen["gradients_kept_as_zeros"]["lacking"] == 0
    assert seen["gradients_centred_and_decayed"]["lacking"] == 0
