"""Autocast as users of CUDA and torch_xla write it, f32 beside bf16 parameters, scaled losses; fp8 is refused."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import autoshard
from autoshard.cli.progress import Stages
from autoshard.cli.source import Asked, loaded
from autoshard.errors import CaptureError
from autoshard.frontends.switches.autocast import autocast_on
from autoshard.mesh import Mesh
from autoshard.sources import SourceOptions
from autoshard.verify.eager import eager_step
from tests.conftest import FRONTENDS

HALF = 2e-2
"""`verify.run.HALF_TOLERANCE`, whose module wants torch_xla."""


class Net(nn.Module):
    """Products around what autocast leaves as it is, under `how`."""

    def __init__(self, how: Callable[[torch.Tensor], Any] | None = None) -> None:
        super().__init__()
        self.up, self.down, self.how = nn.Linear(8, 16), nn.Linear(16, 4), how

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.gelu(self.up(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how is None:
            return self.body(x)
        with self.how(x):
            return self.body(x)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def mean_square(y: torch.Tensor) -> torch.Tensor:
    return y.float().square().mean()


def captured(model: nn.Module, frontend: str, loss_fn: Any = mean_square, optimizer: Any = sgd) -> Any:
    x = torch.zeros(4, 8, dtype=next(model.parameters()).dtype)
    return autoshard.capture(model, x, loss_fn=loss_fn, optimizer=optimizer, frontend=frontend)


def of_torch_xla(x: torch.Tensor) -> Any:
    amp = pytest.importorskip("torch_xla.amp")
    return amp.autocast(x.device)


bf16, f16 = torch.bfloat16, torch.float16
FORMS: dict[str, tuple[Callable[[torch.Tensor], Any], torch.dtype | None]] = {
    "cuda": (lambda x: torch.autocast("cuda"), f16),
    "cuda, bf16": (lambda x: torch.autocast("cuda", dtype=bf16), bf16),
    "cuda, in places": (lambda x: torch.autocast("cuda", bf16, True, False), bf16),
    "torch.amp": (lambda x: torch.amp.autocast("cuda"), f16),
    "torch.cuda.amp": (lambda x: torch.cuda.amp.autocast(), f16),
    "torch.cuda.amp, bf16": (lambda x: torch.cuda.amp.autocast(dtype=bf16), bf16),
    "cuda, off": (lambda x: torch.autocast("cuda", enabled=False), None),
    "the device's": (lambda x: torch.autocast(x.device.type), bf16),
    "torch_xla.amp": (of_torch_xla, bf16),
}
"""Name -> autocast of an input, and the dtype that it computes in; None: it is off."""


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("frontend", FRONTENDS)
@pytest.mark.parametrize("form", FORMS)
def test_forms_of_autocast_are_that_of_xla(form: str, frontend: str) -> None:
    how, dtype = FORMS[form]
    wanted = captured(Net(None if dtype is None else lambda x: torch.autocast("xla", dtype=dtype)), frontend)
    assert captured(Net(how), frontend).ops == wanted.ops
    kinds = {kind.dtype for op in wanted.ops for kind in op.outputs}
    assert kinds == {"f32"} | ({"f16"} if dtype is f16 else {"bf16"} if dtype is bf16 else set())


class Whole(torch.autograd.Function):
    """A product in f32 under autocast."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float32)
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        return a @ b

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        a, b = ctx.saved_tensors
        return gradient @ b.mT, a.mT @ gradient


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_functions_that_cast_for_cuda(frontend: str) -> None:
    class Custom(Net):
        def body(self, x: torch.Tensor) -> torch.Tensor:
            assert torch.is_autocast_enabled()
            assert torch.get_autocast_dtype("cuda") is bf16
            return Whole.apply(self.up(x), self.down.weight.t())

    program = captured(Custom(lambda x: torch.autocast("cuda", dtype=bf16)), frontend)
    kinds = [op.outputs[0].dtype for op in program.ops if op.name.startswith(("aten.mm", "autoshard.einsum"))]
    assert kinds == ["bf16", *["f32"] * 3, "bf16"]


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_autocast_of_cuda_around_the_capture_is_that_of_xla(frontend: str) -> None:
    wanted = captured(Net(lambda x: torch.autocast("xla", dtype=f16)), frontend, loss_fn=torch.sum)
    before = torch.is_autocast_enabled("cuda"), torch.is_autocast_enabled("xla")
    torch.set_autocast_enabled("cuda", True)  # as autocast does where CUDA is
    try:
        found = captured(Net(), frontend, loss_fn=torch.sum)
    finally:
        torch.set_autocast_enabled("cuda", before[0])
    assert [op.name for op in found.ops] == [op.name for op in wanted.ops]
    assert torch.is_autocast_enabled("xla") == before[1]


@pytest.mark.parametrize("dtype", [bf16, f16])
@pytest.mark.parametrize("frontend", FRONTENDS)
def test_numbers_are_those_of_autocast_on_the_cpu(frontend: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, x = Net(lambda x: torch.autocast("cuda", dtype=dtype)), torch.randn(4, 8)
    eager = copy.deepcopy(model)
    eager.how = lambda x: torch.autocast("cpu", dtype=dtype)
    optimizer, theirs = sgd(model.parameters()), sgd(eager.parameters())
    compare_steps(captured(model, frontend, optimizer=optimizer), model, optimizer, eager, theirs, x)


@pytest.mark.parametrize("device", ["cuda", "xla"])
def test_pytorch_itself_runs_the_step_in_the_same_dtype(device: str) -> None:
    """What a plan's numbers are held against: on a CPU such autocast cast nothing, or raised an error."""
    torch.manual_seed(0)
    model, x = Net(lambda x: torch.autocast(device, dtype=bf16)), torch.randn(4, 8)
    loss = eager_step(model, None, x, mean_square)
    model.how = lambda x: torch.autocast("cpu", dtype=bf16)
    assert loss.item() == mean_square(model(x)).item()
    model.how = None
    assert loss.item() != mean_square(model(x)).item()


def compare_steps(program: Any, model: Any, optimizer: Any, eager: Any, theirs: Any, x: torch.Tensor) -> None:
    """Two steps of the program in jax, beside two of eager PyTorch."""
    step = autoshard.plan_program(program, Mesh((1,))).to_jax().step(program, optimizer)
    state = step.place(model, optimizer)
    for _ in range(2):
        state, out = step(state, (x,))
        theirs.zero_grad()
        loss = mean_square(eager(x))
        loss.backward()
        theirs.step()
        np.testing.assert_allclose(float(out["loss"]), loss.item(), rtol=HALF)
    for name, parameter in eager.named_parameters():
        made = np.asarray(state[name]).astype(np.float32)
        np.testing.assert_allclose(made, parameter.detach().float().numpy(), rtol=HALF, atol=HALF / 10)


FILE = """
import torch

class Net(torch.nn.Linear):
    @torch.autocast("cuda", dtype=torch.bfloat16)
    def forward(self, x):
        return super().forward(x)

def source():
    return Net(8, 8), torch.zeros(4, 8)
"""


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_a_decorator_of_a_file_asks_for_cuda_that_is_not_here(tmp_path: Any, frontend: str) -> None:
    """torch 2.9 beside torch_xla refused bf16 there, and without torch_xla turned it off."""
    (tmp_path / "net.py").write_text(FILE)
    source = loaded(Asked(f"{tmp_path}/net.py:source", SourceOptions()), Stages())
    program = autoshard.capture(source.model, source.inputs, frontend=frontend)
    assert "bf16" in {kind.dtype for op in program.ops for kind in op.outputs}


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_a_decorator_made_where_cuda_is(frontend: str) -> None:
    """Its device is `cuda` again after the capture."""
    made = torch.autocast("cuda", enabled=False)
    made.__dict__.update(_enabled=True, fast_dtype=bf16)
    model = Net()
    model.body = made(model.body)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
        program = captured(model, frontend)
    assert "bf16" in {kind.dtype for op in program.ops for kind in op.outputs}
    assert made.device == "cuda"


def test_a_decorator_that_pytorch_has_turned_off_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: True)
    with pytest.warns(UserWarning, match="CUDA is not available"):
        made = torch.autocast("cuda")
    with pytest.warns(UserWarning, match=r"made before the capture, such as a decorator, is off"):
        captured(Net(lambda x: made), FRONTENDS[-1])


def test_nothing_of_torch_stays_replaced() -> None:
    kind = torch.amp.autocast_mode.autocast
    before = kind.__init__, kind.__enter__, torch.amp.GradScaler.scale
    with autocast_on():
        pass
    captured(Net(), FRONTENDS[-1])
    assert before == (kind.__init__, kind.__enter__, torch.amp.GradScaler.scale)


# f32 beside bf16.


class Adam(torch.optim.Optimizer):
    """Masters and both averages in f32 for parameters in bf16, made at the start or at the first step."""

    def __init__(self, parameters: Any, lr: float = 0.01, at_once: bool = True) -> None:
        super().__init__(parameters, {"lr": lr})
        for p in [p for group in self.param_groups for p in group["params"]] if at_once else ():
            self.begin(p)

    def begin(self, p: torch.Tensor) -> None:
        first, second = torch.zeros_like(p, dtype=torch.float32), torch.zeros(p.shape, device=p.device)
        self.state[p] = {"master": p.detach().float().clone(), "first": first, "second": second}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p not in self.state:
                    self.begin(p)
                state, gradient = self.state[p], p.grad.float()
                state["first"].lerp_(gradient, 0.1)
                state["second"].mul_(0.9).addcmul_(gradient, gradient, value=0.1)
                state["master"].addcdiv_(state["first"], state["second"].sqrt() + 1e-3, value=-group["lr"])
                p.copy_(state["master"])


class Late(Adam):
    def __init__(self, parameters: Any, lr: float = 0.01) -> None:
        super().__init__(parameters, lr, at_once=False)


@pytest.mark.parametrize("kind", [Adam, Late])
@pytest.mark.parametrize("frontend", FRONTENDS)
def test_bf16_parameters_with_masters_and_averages_in_f32(frontend: str, kind: type[Adam]) -> None:
    """Made with the optimizer they ended in torch's functionalization, through torchax."""
    torch.manual_seed(0)
    model, x = Net().to(bf16), torch.randn(4, 8).to(bf16)
    eager = copy.deepcopy(model)
    optimizer, theirs = kind(model.parameters()), kind(eager.parameters())
    program = captured(model, frontend, optimizer=optimizer)
    states = {a.name: a.type.dtype for a in program.arguments if a.role == "optimizer_state"}
    assert set(states.values()) == {"f32"}
    assert {a.type.dtype for a in program.arguments if a.role == "parameter"} == {"bf16"}
    compare_steps(program, model, optimizer, eager, theirs, x)


class HeldApart(Adam):
    """Keeps masters in a list of its own."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.masters = [[p.detach().float() for p in group["params"]] for group in self.param_groups]


class OverMasters(torch.optim.SGD):
    """Steps the masters, and copies them."""

    def __init__(self, parameters: Any) -> None:
        super().__init__([p.detach().float().requires_grad_() for p in parameters], 0.1)


@pytest.mark.parametrize("built", [False, True])
@pytest.mark.parametrize(
    ("kind", "why"), [(HeldApart, "in its attribute masters"), (OverMasters, "that is no parameter of the model")]
)
@pytest.mark.parametrize("frontend", FRONTENDS)
def test_masters_that_are_no_state_are_refused(frontend: str, kind: Any, why: str, built: bool) -> None:
    model = Net().to(bf16)
    with pytest.raises(CaptureError, match=rf'{why}.*f32 masters, in its state: state\[p\]\["master"\]'):
        captured(model, frontend, optimizer=kind(model.parameters()) if built else kind)


# Scaled losses, and fp8.


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_a_gradient_scaler_is_refused_by_name(frontend: str) -> None:
    scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(CaptureError, match=r"loss_fn calls GradScaler\.scale at .*Leave it out: bf16 needs no"):
        captured(Net(), frontend, loss_fn=lambda y: scaler.scale(mean_square(y)))
    assert scaler._scale is None

    class Scaled(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            scaler.unscale_(self)
            super().step()

    with pytest.raises(CaptureError, match=r"the optimizer calls GradScaler\.unscale_"):
        captured(Net(), frontend, optimizer=lambda parameters: Scaled(parameters, lr=0.1))


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_a_gradient_scaler_that_is_off_does_nothing(frontend: str) -> None:
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    found = captured(Net(), frontend, loss_fn=lambda y: scaler.scale(mean_square(y)))
    assert found.ops == captured(Net(), frontend).ops


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_fp8_is_refused_by_name(frontend: str) -> None:
    class Cast(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.to(torch.float8_e4m3fn).to(x.dtype))

    with pytest.raises(CaptureError, match=r"\(Cast\) computes in torch.float8_e4m3fn at .*: training in fp8 goes"):
        captured(Cast(), frontend)
    with pytest.raises(CaptureError, match=r"dtype torch.float8_e5m2 cannot be captured: training in fp8 goes"):
        captured(Net().to(torch.float8_e5m2), frontend)


def test_optimizers_that_keep_other_things_are_captured() -> None:
    """Numbers, and tensors of other shapes, in attributes are none of the step's state."""

    class Keeps(torch.optim.SGD):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, 0.1)
            self.seen, self.scale = defaultdict(int), torch.tensor(2.0)

    assert captured(Net(), FRONTENDS[-1], optimizer=Keeps).outputs
