"""The captured program is the step that PyTorch takes: losses, parameters, buffers and states after three steps.

`benchmarks/eager.py` looks at more of the same; `autoshard/verify/eager.py` says by how much numbers may differ.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import eager_cases, eager_steps
from tests.frontends import eager_pairs

ROOT = Path(__file__).resolve().parents[2]
REFUSED = {
    "LBFGS": "the step of LBFGS cannot be captured: ",
    "SparseAdam": "the step of SparseAdam cannot be captured: SparseAdam does not support dense gradients",
    "Adafactor": "Adafactor computes ",  # its steps are as long as parameters and gradients are, which it asks for
}
"""What is not compared, because it is refused, and in which words."""
SMALL_STEPS = ("Muon", "ASGD")
"""A step size that hardly changes."""


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    out = tmp_path_factory.mktemp("eager") / "seen.json"
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.frontends.eager_pairs", str(out)],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(out.read_text())


@pytest.mark.parametrize("pair", eager_pairs.looked_at(), ids="/".join)
def test_the_step_is_that_of_eager_pytorch(seen, pair):
    model, optimizer, _, _ = pair
    found = seen["/".join(pair)]
    assert "failed" not in found, found["failed"]
    if optimizer in REFUSED:
        assert found["refused"].startswith(REFUSED[optimizer])
        assert "\n" not in found["refused"]
        return
    assert "refused" not in found, found["refused"]
    assert found["worst"] <= 1, found["where"]
    assert found["tensors"] >= 3 * 5
    if not model.startswith("half") and optimizer not in SMALL_STEPS:  # bf16
        assert found["untold"] == []


def test_there_are_25_pairs_and_every_optimizer_of_torch():
    assert len(eager_pairs.pairs()) - len(REFUSED) >= 25
    found = {optimizer for _, optimizer in eager_pairs.pairs()}
    ours = {c.__name__ for c in vars(torch.optim).values() if isinstance(c, type)} - {"Optimizer"}
    assert {n for n in ours if issubclass(getattr(torch.optim, n), torch.optim.Optimizer)} <= found


@pytest.fixture(scope="module")
def trained():
    """A pair, and PyTorch's own numbers after its steps."""
    pair = eager_steps.Pair(eager_cases.source("perceptron", "AdamW"))
    return pair, [dict(numbers) for numbers in pair.eager[2:]]


def test_pytorch_is_equal_to_itself(trained):
    pair, numbers = trained
    found = pair.compared(numbers, 1)
    assert found.equal
    assert found.untold == ()


@pytest.mark.parametrize("key", [("parameter", "2.bias"), ("optimizer_state", "0.weight.exp_avg")])
def test_an_update_that_is_lost_is_told(trained, key):
    pair, numbers = trained
    lost = pair.compared([{**each, key: pair.eager[1][key]} for each in numbers], 1)
    assert not lost.equal
    assert lost.where.startswith(" ".join(key))


def test_a_state_that_the_program_has_not_is_told(trained):
    pair, numbers = trained
    key = ("optimizer_state", "0.weight.exp_avg_sq")
    found = pair.compared([{k: v for k, v in each.items() if k != key} for each in numbers], 1)
    assert not found.equal
    assert "0.weight.exp_avg_sq is not in the program" in found.where


def test_what_pytorch_leaves_as_it_is_has_to_be_left_so():
    pair = eager_steps.Pair(eager_cases.source("tied", "SGD"))
    key = ("parameter", "frozen.weight")
    numbers = [{**each, key: each[key] * (1 + 1e-6)} for each in pair.eager[2:]]
    found = pair.compared(numbers, 1)
    assert not found.equal
    assert found.where.startswith("parameter frozen.weight")
