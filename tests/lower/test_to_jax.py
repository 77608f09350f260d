"""A plan carried out by jax, on eight virtual CPU devices, and on GPUs where there are some."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import autoshard
from autoshard.errors import LoweringError
from autoshard.mesh import Mesh
from tests.plans import made as plans

ROOT = Path(__file__).resolve().parents[2]
EQUAL = 1e-5
HALF_EQUAL = 2e-2


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """What `jax_eight_devices.py` saw: the number of jax's CPU devices is that of a whole process."""
    out = tmp_path_factory.mktemp("jax") / "seen.json"
    done = subprocess.run(
        [sys.executable, "-m", "tests.lower.jax_eight_devices", str(out)],
        cwd=ROOT, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert out.exists(), done.stderr[-3000:]
    return json.loads(out.read_text())


def scenario(seen, name):
    assert "failed" not in seen[name], seen[name].get("failed")
    return seen[name]


@pytest.mark.parametrize("name", ["sgd", "sgd_gspmd", "schedule", "adamw", "masters", "counting", "bf16", "autocast"])
def test_numbers_are_those_of_eager_pytorch_on_one_device(seen, name):
    found = scenario(seen, name)
    equal = HALF_EQUAL if name in ("bf16", "autocast") else EQUAL
    assert found["losses"] < equal
    assert found["parameters"] < equal
    assert found["states"] < equal
    assert found["compiled"] == 1, "the steps after the first are the same program"


def test_uneven_arguments_are_kept_padded_and_sharded(seen):
    found = scenario(seen, "sgd")
    assert found["weight"] == ["P('model', None)", [200, 16], [50, 16]]
    assert {"embed.weight", "down.weight", "embed.weight.momentum_buffer"} <= set(found["uneven"])


@pytest.mark.parametrize("partitioner", ["shardy", "gspmd"])
def test_either_partitioner_makes_the_collectives_that_are_predicted(seen, partitioner):
    found = scenario(seen, f"{partitioner}_collectives")
    assert found["bytes"] > 0
    assert found["fidelity"] == 0
    assert found["form"] == [partitioner == "shardy", partitioner == "gspmd"]
    assert found["highest"] == found["products"] > 0


def test_random_numbers_are_other_ones_in_each_step_and_the_same_in_each_run(seen):
    found = scenario(seen, "dropout")
    assert abs(found["zeros"] - 0.5) < 0.05
    assert found["steps_differ"]
    assert found["runs_equal"]


def test_a_step_that_jax_exported_runs_under_its_plan(seen):
    found = scenario(seen, "stablehlo_file")
    assert found["losses"] < EQUAL
    assert found["parameters"] < EQUAL


def test_too_few_devices_are_refused():
    plan = plans.plan(plans.program())
    with pytest.raises(LoweringError, match=r"has 8 devices, jax has 1 \(cpu\); for a trial run set XLA_FLAGS="):
        plan.to_jax()


@pytest.fixture(scope="module")
def made():
    """A step planned for a mesh of one device: refusals need no more."""
    import torch

    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.zeros(4, 8)
    program = autoshard.capture(model, (x, x), loss_fn=torch.nn.functional.mse_loss, optimizer=optimizer)
    return model, optimizer, program, autoshard.plan_program(program, Mesh((1,)))


def test_an_optimizer_that_works_on_the_host_is_asked_for(made):
    _, _, program, plan = made
    with pytest.raises(LoweringError, match="pass the torch optimizer"):
        plan.to_jax().step(program)


def test_another_program_is_refused(made):
    import torch

    _, _, _, plan = made
    other = autoshard.capture(torch.nn.Linear(8, 8), torch.zeros(4, 8))
    with pytest.raises(autoshard.PlanMismatchError, match="for a training step, this is a forward pass"):
        plan.to_jax().step(other)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"x": 0}, "has no input x; it has input, target"),
        ({}, "input input was not given"),
        ((0, 0, 0), "has 2 inputs"),
        ({"input": [[1.0]], "target": 0}, r"input is float64\[1,1\], planned was f32\[4,8\]"),
    ],
)
def test_inputs_that_do_not_fit_are_named(made, inputs, message):
    _, optimizer, program, plan = made
    step = plan.to_jax().step(program, optimizer)
    with pytest.raises(LoweringError, match=message):
        step.place_inputs(inputs)


@pytest.mark.parametrize("frontend", ["torch_xla", "torchax"])
def test_inputs_in_a_row_are_in_the_order_of_the_call(frontend):
    import torch

    if (
        importlib.util.find_spec(frontend) is None
    ):  # torchax is imported by its frontend alone, which readies torch for it
        pytest.skip(f"needs {frontend}")
    trained = torch.nn.Linear(3, 5)
    program = autoshard.capture(
        trained, (torch.zeros(4, 3), torch.zeros(4, 5)), loss_fn=torch.nn.functional.mse_loss,
        optimizer=torch.optim.SGD(trained.parameters(), lr=0.1), frontend=frontend,
    )  # fmt: skip
    step = (
        autoshard.plan_program(program, Mesh((1,))).to_jax().step(program, torch.optim.SGD(trained.parameters(), 0.1))
    )
    placed = step.place_inputs((torch.zeros(4, 3), torch.zeros(4, 5)))
    assert {name: value.shape for name, value in placed.items()} == {"input": (4, 3), "target": (4, 5)}
    with pytest.raises(LoweringError, match="input is float32"):
        step.place_inputs((torch.zeros(4, 5), torch.zeros(4, 3)))


def test_placing_leaves_the_optimizer_as_it_was(made):
    model, optimizer, program, plan = made
    step = plan.to_jax().step(program, optimizer)
    state = step.place(model, optimizer)
    assert set(state) == {"weight", "bias", *(f"{n}.{k}" for n in ("weight", "bias") for k in STATES)}
    assert not optimizer.state
    with pytest.raises(LoweringError, match=r"nothing was given for weight\.exp_avg"):
        step.place(tensors={"weight": model.weight, "bias": model.bias})


STATES = ("exp_avg", "exp_avg_sq")


def test_on_nvidia_gpus():
    """Three steps of the example on the GPUs that are there, against one CPU."""
    count = subprocess.run(
        [sys.executable, "-c", "import jax; print(len(jax.devices('cuda')))"],
        capture_output=True, text=True, env={**os.environ, "JAX_PLATFORMS": "cuda,cpu"},
    ).stdout.strip()  # fmt: skip
    if not count.isdigit():
        pytest.skip("no NVIDIA GPU that jax can use here")
    done = subprocess.run(
        [sys.executable, "examples/run_in_jax.py", "--mesh", count],
        cwd=ROOT, capture_output=True, text=True, timeout=600, env={**os.environ, "JAX_PLATFORMS": "cuda,cpu"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "losses differ by at most" in done.stdout
    assert "cuda" in done.stdout.lower(), "it ran on something else"


def test_what_is_placed_is_no_longer_the_models_memory():
    """jax's CPU devices take aligned memory of the host as theirs, which a step in PyTorch then writes into."""
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    program = autoshard.capture(model, torch.zeros(8, 64), loss_fn=lambda y: y.square().mean(), optimizer=optimizer)
    state = autoshard.plan_program(program, Mesh((1,))).to_jax().step(program, optimizer).place(model, optimizer)
    before = {name: np.array(value) for name, value in state.items()}
    with torch.no_grad():
        model.weight.fill_(7.0)
        model.bias.fill_(7.0)
    assert {"weight", "bias"} <= set(before)
    for name, value in state.items():
        np.testing.assert_array_equal(np.asarray(value), before[name])
