"""What a first user gets wrong, one clear error each: through `plan()`, and on the command line. And what only looks
wrong (batches that do not divide, one device, nothing to train in a layer), which works."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import autoshard
from autoshard.cli import commands as cli
from autoshard.errors import AutoshardError
from autoshard.mesh import Mesh
from tests.conftest import of_torch_xla

X = torch.zeros(6, 8)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))


def mean_square(out: torch.Tensor) -> torch.Tensor:
    return out.square().mean()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


TRAIN: dict[str, Any] = {"loss_fn": mean_square, "optimizer": sgd}


class Calls(nn.Module):
    """A model that calls a function of its layer and its input."""

    def __init__(self, function: Callable[[nn.Module, torch.Tensor], Any]) -> None:
        super().__init__()
        self.function = function
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self.layer, x)


def refused(said: str, model: Any, inputs: Any = X, **options: Any) -> str:
    """Plan, and expect one line that says it."""
    with pytest.raises((ValueError, AutoshardError), match=said) as caught:
        autoshard.plan(model, inputs, **({"mesh": "2x2"} | options))
    text = str(caught.value)
    assert "\n" not in text
    assert text == text.strip()
    return text


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (lambda x: x, "the model is a torch.nn.Module, not a function"),
        (None, "the model is a torch.nn.Module, not a NoneType"),
        (nn.Linear, "the model is a torch.nn.Module, not the class Linear"),
        (nn.LazyLinear(3), "weight has no shape yet"),
        (torch.jit.script(nn.Linear(8, 8)), "scripted"),
    ],
)
def test_what_is_no_model(model: Any, said: str) -> None:
    refused(said, model)


@pytest.mark.parametrize("dtype", [torch.long, torch.float64, torch.bfloat16])
def test_inputs_of_another_dtype_than_the_weights(dtype: torch.dtype) -> None:
    refused(r"module 0 \(Linear\) multiplies tensors of different dtypes", mlp(), X.to(dtype))


def test_inputs_that_torch_would_refuse() -> None:
    refused(r"sparse.*`\.to_dense\(\)`", mlp(), X.to_sparse())
    refused(r"`\.to_padded_tensor", mlp(), torch.nested.nested_tensor([X, X[:2]], layout=torch.jagged))
    refused("classes as whole numbers", nn.Linear(8, 3), (X, X[:, 0]), loss_fn=F.cross_entropy)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"mesh": 8}, r"shape such as \(2, 4\).*devices=8"),
        ({"mesh": (2.5, 2)}, "whole numbers"),
        ({"mesh": ("a", "b")}, "whole numbers"),
        ({"mesh": "1000000x1000000"}, "at most 1,048,576 devices"),
        ({"mesh": None, "devices": 10**12}, "at most 1,048,576"),
        ({"mesh": None, "devices": "8"}, "whole number of devices"),
        ({"mesh": Mesh((2, 2)), "devices": 4}, "not both"),
        ({"mesh": Mesh((2, 2)), "device": "h100"}, "the mesh is of cpu"),
        ({"mesh": Mesh((2, 2), (), "h100", ("wire", "wire"))}, "no link 'wire'"),
        ({"memory": "16GB"}, "number of bytes per device"),
        ({"memory": float("nan")}, "number of bytes per device"),
        ({"memory": float("inf")}, "None for no limit"),
        ({"time_limit": 0}, "positive number of seconds"),
        ({"seed": "a"}, "whole number"),
        ({"hints": ["0.weight"]}, "hints are a dict"),
        ({"hints": {"0.weight": 3}}, "hint for 0.weight: a spec has"),
        ({"hints": {"0.weight": (1, None)}}, "hint for 0.weight: a spec has"),
    ],
)
def test_options_that_mean_nothing(options: dict[str, Any], said: str) -> None:
    refused(said, mlp(), **options)


def test_hints_that_contradict_each_other_are_both_named() -> None:
    hints = {"0.weight": "[data],[]", "0.weight.momentum_buffer": "[],[data]"}
    said = refused("the hints contradict each other", mlp(), hints=hints, **TRAIN)
    assert "0.weight=[data],[]" in said
    assert "0.weight.momentum_buffer=[],[data]" in said
    assert "keep='none'" in said


def test_a_hint_that_pads_too_much_is_named_with_its_dim() -> None:
    hints = {"bias": "[data]"}
    said = refused("pads a dim of", nn.Linear(16, 12), torch.zeros(8, 16), hints=hints, mesh="8", **TRAIN)
    assert "bias=[data] pads a dim of 12 to 16" in said
    assert "contradict" not in said


def test_of_all_meshes_the_least_memory_is_named() -> None:
    said = refused("the least possible peak is", mlp(), mesh=None, devices=4, memory=100)
    least = [
        int(re.search(r"peak is ([\d,]+)", refused("least", mlp(), mesh=mesh, memory=100))[1].replace(",", ""))  # type: ignore[index]
        for mesh in ("4", "2x2")
    ]
    assert f"peak is {min(least):,} bytes" in said


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(lambda layer, x: (repr(x), x)[1], marks=of_torch_xla),
        pytest.param(lambda layer, x: (repr(layer(x)), x)[1], marks=of_torch_xla),
        lambda layer, x: layer(x).detach().numpy(),
        pytest.param(lambda layer, x: torch.empty_like(x).untyped_storage().data_ptr() + x, marks=of_torch_xla),
    ],
)
def test_looking_into_a_tensor(function: Any, capfd: pytest.CaptureFixture[str]) -> None:
    said = refused(r"the model \(Calls\) needs the value of a tensor", Calls(function))
    assert "test_bad_input.py:" in said
    assert "Analysis" not in capfd.readouterr().err  # torch_xla's own page about it


@of_torch_xla
def test_an_op_that_only_the_backward_pass_lacks() -> None:
    model = Calls(lambda layer, x: torch.ops.aten.upsample_bilinear2d(layer(x)[None, None], [12, 16], False))
    said = refused("the backward pass uses aten.upsample_bilinear2d_backward", model, **TRAIN)
    assert "test_bad_input.py" not in said  # who called plan() is not where it went wrong


@of_torch_xla
def test_an_op_that_was_met_before_cannot_end_the_process() -> None:
    """Met with computed operands (and refused), then with arguments themselves; with other options, and lowered."""
    backward = torch.ops.aten.upsample_bilinear2d_backward
    for operand in (lambda layer, x: layer(x), lambda layer, x: x):
        refused(
            "upsample_bilinear2d_backward",
            Calls(lambda layer, x, of=operand: backward(of(layer, x)[None, None], [12, 16], [1, 1, 6, 8], False)),
        )
    for beta in (1.0, 0.5):
        made = autoshard.plan(Calls(lambda layer, x, b=beta: torch.addmm(x, x, layer.weight, beta=b)), X, mesh="2")
        assert made.solver is not None


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_as_torch_has_it(reentrant: bool) -> None:
    """Captured, with the forward pass in it twice."""
    from torch.utils.checkpoint import checkpoint

    def captured(forward: Any) -> list[str]:
        program = autoshard.capture(Calls(forward), X.clone().requires_grad_(), **TRAIN)
        return [op.name for op in program.ops]

    once = captured(lambda layer, x: torch.tanh(layer(x)))
    again = captured(lambda layer, x: checkpoint(lambda y: torch.tanh(layer(y)), x, use_reentrant=reentrant))
    assert (once.count("aten.tanh.default"), again.count("aten.tanh.default")) == (1, 2)


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        (lambda p: sgd(mlp().parameters()), "no parameter of the model.*parameters that the callable is given"),
        (lambda p: sgd(mlp().to("meta").parameters()), "no parameter of the model"),
        (lambda p: torch.optim.SGD(p, lr=-1), "failed with ValueError: Invalid learning rate"),
        (lambda: None, "failed with TypeError"),
        (lambda p: 1 / 0, "failed with ZeroDivisionError"),
        (lambda p: None, "returned NoneType"),
    ],
)
def test_optimizers_that_fit_nothing(optimizer: Any, said: str) -> None:
    refused(said, mlp(), loss_fn=mean_square, optimizer=optimizer)


def test_a_model_without_parameters_cannot_be_trained() -> None:
    refused("empty parameter list", nn.GELU(), X.clone().requires_grad_(), **TRAIN)


def test_losses_that_are_none() -> None:
    refused(r"loss_fn returned a float32 tensor of shape \(6, 8\)\.$", mlp(), loss_fn=lambda out: out)
    refused("loss_fn failed with ZeroDivisionError", mlp(), loss_fn=lambda out: 1 / 0)
    refused("loss_fn is a callable from the model's output to a number, not str", mlp(), loss_fn="mse")
    refused("No parameter of the model requires a gradient", mlp().requires_grad_(False), **TRAIN)
    refused("The model has no parameters to train", nn.Sequential(), loss_fn=mean_square)
    refused("loss_fn reads the value", mlp().to("meta"), loss_fn=lambda out: out.sum() * out.max().item())


# --- what works --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mesh", ["1", "1x1", "8x1", "2x2x2", "3x5"])
def test_meshes_of_any_shape_and_batches_that_do_not_divide(mesh: str) -> None:
    plan = autoshard.plan(mlp(), X, mesh=mesh, **TRAIN)
    assert plan.mesh == Mesh.parse(mesh)
    assert autoshard.Plan.from_json(plan.to_json()) == plan


class Odd(nn.Module):
    """Tied, frozen and unused parameters, buffers of every kind, a scalar input."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.unused = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(3, 5)
        self.down.weight = self.up.weight
        self.down.bias.requires_grad_(False)
        self.register_buffer("order", torch.arange(8))
        self.register_buffer("mask", torch.ones(8, dtype=torch.bool))
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("nothing", None)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return torch.where(self.mask, self.down(self.up(x)[:, self.order]), 0.0) * scale


def test_odd_parts_of_a_model() -> None:
    plan = autoshard.plan(Odd(), (X, torch.tensor(2.0)), mesh="2x2", **TRAIN)
    assert "down.weight" not in plan.parameters
    assert {name.rpartition(".")[0] for name in plan.optimizer_state} == {"up.weight", "up.bias"}
    assert {"order", "mask", "calls"} <= set(plan.buffers)


def test_a_model_that_computes_nothing() -> None:
    plan = autoshard.plan(nn.Sequential(), X, mesh="2x2")
    assert plan.outputs["output"].shape == (6, 8)
    assert plan.predicted is not None
    assert plan.predicted.compute_s == 0


@pytest.mark.parametrize("rows", [0, 1])
def test_empty_and_single_batches(rows: int) -> None:
    assert autoshard.plan(mlp(), torch.zeros(rows, 8), mesh="2x2", **TRAIN).solver is not None


def test_complex_numbers() -> None:
    model = nn.Module()
    model.forward = lambda x: torch.view_as_complex(x.reshape(-1, 4, 2)) * torch.ones(1, dtype=torch.complex64)  # type: ignore[method-assign]
    assert autoshard.plan(model, X, mesh="2").outputs


def test_inference_mode_of_the_caller() -> None:
    with torch.inference_mode():
        assert autoshard.plan(mlp(), X, mesh="2", **TRAIN).program.kind == "train"


@pytest.mark.parametrize("instance", [False, True])
def test_an_optimizer_that_makes_its_state_at_construction(instance: bool) -> None:
    model = mlp()
    optimizer: Any = torch.optim.Adagrad(model.parameters()) if instance else torch.optim.Adagrad
    plan = autoshard.plan(model, X, mesh="2", loss_fn=mean_square, optimizer=optimizer)
    assert set(plan.optimizer_state) == {f"{name}.sum" for name, _ in model.named_parameters()}


def test_model_and_optimizer_are_left_alone_whatever_happens() -> None:
    model = Calls(lambda layer, x: layer(x).sum().item())
    optimizer = sgd(model.parameters())
    before = {name: (id(p), p.detach().clone()) for name, p in model.named_parameters()}
    random = torch.get_rng_state()
    for options in ({}, {"optimizer": optimizer, "loss_fn": mean_square}, {"memory": 1}):
        refused(".", model, **options)
    for name, p in model.named_parameters():
        assert id(p) == before[name][0]
        assert torch.equal(p, before[name][1])
        assert p.grad is None
    assert not optimizer.state
    assert torch.equal(torch.get_rng_state(), random)
    assert autoshard.plan(mlp(), X, mesh="2").solver is not None  # and the process plans on


def test_an_interrupt_leaves_the_model_as_it_was() -> None:
    def interrupted(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        raise KeyboardInterrupt

    model = Calls(interrupted)
    weight = model.layer.weight
    with pytest.raises(KeyboardInterrupt):
        autoshard.plan(model, X, mesh="2")
    assert model.layer.weight is weight
    assert autoshard.plan(mlp(), X, mesh="2").solver is not None


# --- the command line --------------------------------------------------------------------------------------------

NETS = """
import sys, torch

def mlp():
    return torch.nn.Sequential(torch.nn.Linear(8, 8)), torch.zeros(6, 8)

def leaves():
    sys.exit("a script\\nthat ends")

def no_model():
    return (lambda x: x), torch.zeros(6, 8)

def prints():
    class Prints(torch.nn.Module):
        def forward(self, x):
            print(x + 1)
            return x
    return Prints(), torch.zeros(6, 8)

def bad_optimizer():
    model, x = mlp()
    return {"model": model, "inputs": x, "loss_fn": lambda out: out.sum(), "optimizer": lambda parameters: 1 / 0}

def interrupted():
    raise KeyboardInterrupt
"""


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["nets.py:leaves"], 2, "nets.py:leaves failed: it ended the process (SystemExit: a script that ends)"),
        (["ends.py:f"], 2, "ends.py cannot be imported: it ended the process (SystemExit: 3)"),
        (["nets.py:no_model"], 2, "its model is a function"),
        (["nets.py"], 2, "did you mean nets.py:mlp, nets.py:leaves, nets.py:no_model?"),
        (["gpt2"], 2, "did you mean hf:gpt2?"),
        (["nosuch"], 2, "'nosuch' names no program"),
        pytest.param(["nets.py:prints"], 2, "needs the value of a tensor", marks=of_torch_xla),
        (["nets.py:bad_optimizer"], 2, "optimizer(parameters) failed with ZeroDivisionError"),
        (["nets.py:mlp", "--memory", "1e309GB"], 2, "bytes are written"),
        (["hf:gpt2", "--set", "n_layer=1e400"], 2, "gpt2's n_layer is of type int (default 12), not '1e400'"),
        (["hf:gpt2", "--set", "activation_function=none_such"], 2, "KeyError: 'none_such'"),
        (["nets.py:interrupted"], 130, ""),
    ],
)
def test_on_the_command_line(arguments, status, said, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nets.py").write_text(NETS)
    (tmp_path / "ends.py").write_text("import sys; sys.exit(3)")
    with pytest.raises(SystemExit) as left:
        cli.main(["plan", *arguments, "--mesh", "2x2", "-o", "plan.json"])
    out, err = capfd.readouterr()
    assert (left.value.code, out) == (status, "")
    assert re.fullmatch(r"autoshard: [^\n]*\n" if said else "\n?", err)
    assert said in err
    assert not (tmp_path / "plan.json").exists()
