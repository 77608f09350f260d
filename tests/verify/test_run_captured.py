"""`verify --run` looks at the captured program itself: wrong ones are told, rounding is not called wrong."""

import dataclasses
import io
import json

import pytest

pytest.importorskip("torch_xla")

import torch

from autoshard.cli import commands as cli
from autoshard.frontends.torch_xla import program as front_end
from autoshard.sources import Source
from autoshard.stablehlo.context import mlir_context
from autoshard.stablehlo.reader import parse_module
from autoshard.verify import run_worker
from autoshard.verify.batches import random_batch
from autoshard.verify.judged import Causes, of_captured

FILE = """
import torch

class Net(torch.nn.Module):
    def __init__(self, far, scale):
        super().__init__()
        self.scale = scale
        self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)
        self.register_buffer("far", torch.full((8,), float(far)))

    def forward(self, x):
        h = self.up(x)
        if self.scale != 1:
            h.register_hook(lambda gradient: gradient * self.scale)
        out = self.down(torch.tanh(h))
        return ((out + self.far) - self.far).square().mean()  # far away, digits are lost

def build(far=0.0, scale=1.0):
    torch.manual_seed(0)
    return {"model": Net(far, scale), "inputs": (torch.zeros(8, 8),), "loss_fn": lambda loss: loss}
"""


def with_results(program, change):
    """A program whose results, MLIR values of the arguments and results before, are what `change` makes of them."""
    with mlir_context():
        module = parse_module(program.stablehlo)
        main = next(op for op in module.body.operations if op.operation.attributes["sym_name"].value == "main")
        block = main.regions[0].blocks[0]
        last = list(block.operations)[-1].operation
        for index, value in change(list(block.arguments), list(last.operands)).items():
            last.operands[index] = value
        out = io.BytesIO()
        module.operation.write_bytecode(out)
    return dataclasses.replace(program, stablehlo=out.getvalue())


def without_update(program, name):
    """A program that leaves an argument as it was."""
    index = next(i for i, output in enumerate(program.outputs) if output.name == name)
    return with_results(program, lambda before, _: {index: before[program.outputs[index].updates]})


def swapped(program, one, other):
    """A program with two results in each other's place."""
    names = [output.name for output in program.outputs]
    i, j = names.index(one), names.index(other)
    return with_results(program, lambda _, after: {i: after[j], j: after[i]})


# Through the command line.


@pytest.fixture
def verified(capsys, monkeypatch, tmp_path):
    """Plan and verify a net; its exit status and the report."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(FILE)

    def command(*arguments):
        with pytest.raises(SystemExit) as left:
            cli.main([str(argument) for argument in arguments])
        return left.value.code, capsys.readouterr().out

    def verified(*settings, capture=None):
        source = ["net.py:build", "--train", "sgd", *settings]
        if capture is not None:
            monkeypatch.setattr(front_end, "capture", capture)
        assert command("plan", *source, "--mesh", "2x2", "--device", "cpu", "-o", "plan.json")[0] == 0
        status, said = command("verify", "plan.json", *source, "--run", "--json")
        return status, json.loads(said.splitlines()[-1])["run"]

    return verified


def test_a_right_program_is_equal(verified):
    status, run = verified()
    assert (status, run["status"]) == (0, "equal"), run
    assert run["captured"] == 1 + 1 + 4 + 4  # loss, a buffer, parameters and their momentum
    assert run["unsplit"] == []


def test_what_the_loss_takes_may_be_called_like_an_input(verified, tmp_path):
    (tmp_path / "net.py").write_text("""
import torch

class Net(torch.nn.Linear):
    def forward(self, t):
        return super().forward(t)

def build():
    batch = torch.zeros(8, 8), torch.zeros(8, 8)
    return {"model": Net(8, 8), "inputs": batch, "loss_fn": lambda out, t: (out - t).square().mean()}
""")
    status, run = verified()
    assert (status, run["status"]) == (0, "equal"), run


def test_a_capture_that_loses_an_update_is_a_fault(verified):
    whole = front_end.capture
    status, run = verified(capture=lambda *given, **named: without_update(whole(*given, **named), "up.weight"))
    assert (status, run["status"]) == (1, "differ"), run
    assert "parameter up.weight of the captured program" in run["unsplit"]


def test_what_pytorch_itself_rounds_away_decides_nothing(verified):
    status, run = verified("--set", "far=30000")
    assert (status, run["status"]) == (3, "not decided"), run
    assert run["undecided"]
    assert run["unsplit"] == []


# One by one.


@pytest.fixture(scope="module")
def judge():
    """What is said of a net's captured program, of what is made of it, or of one with other gradients."""

    def judge(optimizer, change=lambda program: program, scale=1.0):
        names = {}
        exec(FILE, names)
        source, other = (Source(**names["build"](scale=s), optimizer=optimizer, train=True) for s in (1.0, scale))
        program = change(run_worker.captured(other))
        batches = [random_batch(source, source.model, step) for step in range(3)]
        because = Causes(program, source.model)
        return of_captured(program, source, source.model, batches, because, optimizer.__name__)

    return judge


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.01)


def r_adam(parameters):
    return torch.optim.RAdam(parameters, lr=0.01)


@pytest.mark.parametrize("optimizer", [sgd, adamw, r_adam])
def test_right_programs_have_no_fault(judge, optimizer):
    found = judge(optimizer)
    assert (found.faults, found.undecided, found.refused) == ((), (), "")
    assert found.compared == 1 + 1 + 4 * {sgd: 2, adamw: 3, r_adam: 3}[optimizer]


STATE = {sgd: "momentum_buffer", adamw: "exp_avg"}
WRONG = {
    "lost parameter": lambda program, state: without_update(program, "down.bias"),
    "lost state": lambda program, state: without_update(program, f"up.bias.{state}"),
    "results swapped": lambda program, state: swapped(program, f"up.bias.{state}", "up.bias"),
}


@pytest.mark.parametrize("optimizer", [sgd, adamw])
@pytest.mark.parametrize("change", WRONG)
def test_wrong_programs_are_faults(judge, optimizer, change):
    found = judge(optimizer, lambda program: WRONG[change](program, STATE[optimizer]))
    assert found.faults, found


@pytest.mark.parametrize("optimizer", [sgd, adamw])
def test_a_gradient_that_is_scaled_by_a_hundredth_is_a_fault(judge, optimizer):
    found = judge(optimizer, scale=1.01)
    assert f"optimizer_state up.weight.{STATE[optimizer]} of the captured program" in found.faults
