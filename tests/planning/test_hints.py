"""What the user already decided: hints by name, annotations that tensors carry, and which of them hold."""

import subprocess
import sys
from dataclasses import replace

import pytest

import autoshard
from autoshard.mesh import Mesh
from autoshard.planning.hints import kept, spec_of
from autoshard.stablehlo.annotate import gspmd_sharding
from autoshard.strategies.allowed import argument_specs
from tests.conftest import of_torch_xla
from tests.plans import made as plans

torch = pytest.importorskip("torch")

MESH = Mesh((2, 2), device="h100")


@pytest.fixture(scope="module")
def program():
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
    return autoshard.capture(
        model,
        (torch.zeros(32, 64), torch.zeros(32, 64)),
        loss_fn=torch.nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    )


@pytest.mark.parametrize("mesh", [Mesh((2, 4)), Mesh((8,)), Mesh((2, 2, 2)), Mesh((1, 4))])
def test_every_sharding_that_is_written_is_read_back(mesh):
    for rank in (1, 2, 3):
        seen = {}
        for spec in argument_specs((mesh.size,) * rank, mesh):
            text = gspmd_sharding(spec, mesh)
            assert seen.setdefault(text, spec) == spec
            assert spec_of(text, rank, mesh, "x") == spec


def test_other_ways_to_write_a_sharding_are_read_too():
    mesh = Mesh((2, 4), ("data", "model"))
    assert spec_of("{devices=[2,4]0,1,2,3,4,5,6,7}", 2, mesh, "x") == (("data",), ("model",))
    assert spec_of("{devices=[1,4,2]0,4,1,5,2,6,3,7 last_tile_dim_replicate}", 2, mesh, "x") == ((), ("model",))
    assert spec_of("{devices=[1,4,2]4,0,1,5,2,6,7,3 last_tile_dim_replicate}", 2, mesh, "x") == ((), ("model",))
    assert spec_of("{replicated}", 2, mesh, "x") == ((), ())
    for text in ("{devices=[4,2]0,1,2,3,4,5,7,6}", "{maximal device=3}", "{devices=[2,2]<=[4]}"):
        with pytest.raises(ValueError, match=r"x is annotated as .*2x4 mesh.*keep='none'"):
            spec_of(text, 2, mesh, "x")


def test_which_hints_hold():
    marked = replace(plans.program(), annotated={"h.0.weight": "{devices=[2,1,4]<=[8] last_tile_dim_replicate}"})
    hints = {"h.1.weight": ((), ()), "h.1": ((), ())}
    carried = {"h.0.weight": (("data",), ())}
    assert kept(marked, plans.MESH, hints, "all") == {**carried, **hints}
    assert kept(marked, plans.MESH, hints, "io") == {**carried, "h.1.weight": ((), ())}
    assert kept(marked, plans.MESH, hints, "none") == {}
    own = {"h.0.weight": ((), ("model",))}
    assert kept(marked, plans.MESH, own, "all") == own  # what is said outweighs what is carried


def test_a_value_inside_the_program_is_split_as_hinted(program):
    free = autoshard.plan_program(program, MESH)
    number = next(op.index for op in program.ops if op.module == "1" and op.phase == "forward")

    def activation(plan):
        return next(each.spec for each in plan.activations if each.key.index == number)

    other = ((), ("data",)) if activation(free) != ((), ("data",)) else (("data",), ())
    for name in ("1", f"op{number}"):
        hinted = autoshard.plan_program(program, MESH, hints={name: other})
        assert activation(hinted) == other
        assert hinted.predicted.overlapped_s >= free.predicted.overlapped_s
        assert hinted.options.hints == {name: other}
    outside = autoshard.plan_program(program, MESH, hints={"1": other}, keep="io")
    assert (outside.activations, outside.options.keep, outside.options.hints) == (free.activations, "io", {})


def test_a_hint_for_an_axis_of_one_device_asks_for_nothing(program):
    hints = {"0.weight": [["data"], ["model"]], "2": "[data],[model]"}
    found = autoshard.plan_program(program, Mesh((4, 1), device="h100"), hints=hints)
    assert found.parameters["0.weight"].spec == (("data",), ())
    assert found.options.hints == {"0.weight": (("data",), ()), "2": (("data",), ())}


def test_no_hint_holds_with_none(program):
    free = autoshard.plan_program(program, MESH)
    plan = autoshard.plan_program(program, MESH, hints={"0.weight": "[],[]"}, keep="none")
    assert plan.parameters == free.parameters
    with pytest.raises(ValueError, match="keep is all, io, none, not 'some'"):
        autoshard.plan_program(program, MESH, keep="some")


MARKED = """
import torch, torch_xla, torch_xla.runtime as xr, torch_xla.distributed.spmd as xs, numpy as np
xr.use_spmd()
import autoshard
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64)).to("xla")
mesh = xs.Mesh(np.arange(4), (2, 2), ("data", "model"))
xs.mark_sharding(model[0].weight, mesh, ("model", None))
x = torch.zeros(32, 64, device="xla")
xs.mark_sharding(x, mesh, (("data", "model"), None))
program = autoshard.capture(model, x)
plan = autoshard.plan_program(program, autoshard.Mesh((2, 2), device="h100"))
print(plan.options.hints)
assert plan.parameters["0.weight"].spec == (("model",), ())
assert plan.inputs["input"].spec == (("data", "model"), ())
"""


@of_torch_xla
def test_what_is_marked_on_the_model_is_a_hint():
    environment = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "4", "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1"}
    import os

    run = subprocess.run(
        [sys.executable, "-c", MARKED], env={**os.environ, **environment}, capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert "0.weight" in run.stdout
