"""What cannot be captured is refused with one clear error that says where and what to do; the process lives on."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._higher_order_ops.while_loop import while_loop

import autoshard
from autoshard.errors import CaptureError
from autoshard.frontends.torch_xla.program import capture
from tests.frontends.models import Mlp, mean_square, sample


class Block(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x)


class Outer(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.block = Block(function)

    def forward(self, x: torch.Tensor) -> Any:
        return self.block(x)


def refusal(function: Callable[[torch.Tensor], Any]) -> str:
    with pytest.raises(CaptureError) as caught:
        capture(Outer(function), torch.empty(3, 4, device="meta"))
    text = str(caught.value)
    assert "\n" not in text
    assert "module block (Block)" in text
    return text


def set_where(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    y[y > 0] = torch.arange(3.0, device=y.device)
    return y


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * x.sum().item(),
        lambda x: x * x[0, 0].item(),
        lambda x: x if x.sum() > 0 else -x,
        lambda x: x.tolist(),
        lambda x: (x * 2).cpu(),
        lambda x: float(x.mean()),
    ],
)
def test_values_are_not_read(function: Callable[[torch.Tensor], Any]) -> None:
    text = refusal(function)
    assert "reads the value of a tensor" in text
    assert "torch.where" in text
    assert "test_refusals.py" in text  # the line that did it


@pytest.mark.parametrize(
    ("function", "op"),
    [
        (lambda x: x.nonzero(), "aten.nonzero"),
        (lambda x: x[x > 0], "aten.index.Tensor"),
        (lambda x: x.unique(), "aten._unique2"),
        (lambda x: torch.masked_select(x, x > 0), "aten.masked_select"),
        (set_where, "aten.index_put"),
    ],
)
def test_shapes_do_not_depend_on_values(function: Callable[[torch.Tensor], Any], op: str) -> None:
    text = refusal(function)
    assert op in text
    assert "mask" in text


@pytest.mark.parametrize(
    ("function", "op"),
    [
        (lambda x: torch.linalg.lu_factor(x[:3, :3])[0], "aten.linalg_lu_factor_ex"),
        (lambda x: torch.linalg.qr(x[:3, :3])[0], "aten.linalg_qr"),
        (lambda x: torch.mode(x)[0], "aten.mode"),
        (lambda x: torch.special.i0(x), "aten.i0"),
    ],
)
def test_ops_that_torch_xla_cannot_lower_are_named(function: Callable[[torch.Tensor], Any], op: str) -> None:
    text = refusal(function)
    assert op in text
    assert "torch_xla cannot lower" in text


def test_ops_that_torchax_cannot_lower_are_named() -> None:
    class Pooled(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.fractional_max_pool2d(x, 2, output_size=2)

    with pytest.raises(CaptureError, match=r"fractional_max_pool2d, which torchax cannot lower to XLA at .*\.py:"):
        autoshard.capture(Pooled(), torch.zeros(1, 3, 8, 8), train=False, frontend="torchax")


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda x: torch.autograd.grad(x.square().sum(), x.detach())[0], "does not require grad"),
        (lambda x: torch.autograd.grad(x.detach().sum(), x)[0], "does not require grad"),
        (lambda x: torch.autograd.grad(x, x)[0], "only for scalar outputs"),
    ],
)
def test_gradients_that_pytorch_refuses(function: Callable[[torch.Tensor], Any], said: str) -> None:
    assert said in refusal(lambda x: function((x * 1).requires_grad_()))


def test_a_kernel_that_computes_on_the_cpu_given_placeholders_only() -> None:
    backward = torch.ops.aten.upsample_bilinear2d_backward
    with pytest.raises(CaptureError, match=r"module block.*upsample_bilinear2d_backward"):
        capture(
            Outer(lambda x: backward(x, [8, 8], [1, 2, 4, 4], False, None, None)), torch.empty(1, 2, 8, 8)
        )  # fmt: skip


def test_a_target_that_the_loss_closes_over_is_told_where_it_belongs() -> None:
    target = torch.zeros(3, dtype=torch.long)
    with pytest.raises(CaptureError) as caught:
        capture(nn.Linear(4, 5), torch.empty(3, 4), loss_fn=lambda out: nn.functional.cross_entropy(out, target))
    text = str(caught.value)
    assert "loss_fn" in text
    assert "torch.LongTensor of the host" in text
    assert "Give it with the sample inputs" in text


def test_shape_errors_name_module_and_inputs() -> None:
    with pytest.raises(CaptureError, match=r"module first \(Linear\).*16 input features.*input0: float32\[2, 8\]"):
        capture(Mlp(), torch.empty(2, 8))


@pytest.mark.parametrize("nothing", [None, (), {}])
def test_no_inputs(nothing: Any) -> None:
    with pytest.raises(CaptureError, match=r"no sample inputs.*Mlp\.forward\(x\)"):
        capture(Mlp(), nothing)


def test_inputs_that_do_not_fit_say_what_the_model_wants() -> None:
    with pytest.raises(CaptureError, match=r"input1: float32\[2\].*Mlp\.forward\(x\)"):
        capture(Mlp(), (torch.empty(2, 16), torch.empty(2)))
    with pytest.raises(CaptureError, match=r"input_ids.*Mlp\.forward\(x\)"):
        capture(Mlp(), {"input_ids": torch.empty(2, 16)})
    with pytest.raises(CaptureError, match="hold no tensor"):
        capture(Mlp(), (3,))
    with pytest.raises(CaptureError, match="not int"):
        capture(Mlp(), 3)


def test_a_training_step_needs_a_loss() -> None:
    with pytest.raises(CaptureError, match=r"needs a loss.*shape \(4, 6, 16\)"):
        capture(Mlp(), sample()[0], train=True)
    with pytest.raises(CaptureError, match="loss_fn returned"):
        capture(Mlp(), sample()[0], loss_fn=lambda out: out.detach().sum())


def test_optimizers_that_do_not_fit() -> None:
    with pytest.raises(CaptureError, match="no parameter of the model"):
        capture(Mlp(), sample(), loss_fn=mean_square, optimizer=torch.optim.SGD(Mlp().parameters(), lr=0.1))
    with pytest.raises(CaptureError, match="callable from parameters"):
        capture(Mlp(), sample(), loss_fn=mean_square, optimizer="adamw")
    with pytest.raises(CaptureError, match="LBFGS"):
        capture(Mlp(), sample(), loss_fn=mean_square, optimizer=lambda p: torch.optim.LBFGS(list(p)))
    with pytest.raises(CaptureError, match="train=False"):
        capture(Mlp(), sample(), optimizer=lambda p: torch.optim.SGD(p, lr=0.1), train=False)


def test_an_unknown_switch() -> None:
    with pytest.raises(ValueError, match="no capture switch is called 'linears'"):
        capture(Mlp(), sample()[0], switches=("linears",))


def test_the_process_captures_on_after_a_refusal() -> None:
    refusal(lambda x: x.sum().item())
    assert capture(Mlp(), sample()[0]).ops


def test_a_backward_pass_before_torch_xla_was_loaded_does_no_harm() -> None:
    """Autograd counts devices at its first backward pass; at capture it runs on the thread that asks."""
    code = """
import torch, autoshard
layer = torch.nn.Linear(8, 8)
layer(torch.ones(4, 8)).sum().backward()
print(autoshard.capture(layer, torch.empty(4, 8), loss_fn=torch.sum, optimizer=torch.optim.SGD).kind)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout == "train\n"


def test_nothing_of_a_capture_is_left_for_the_next_sync() -> None:
    """A placeholder that is alive when torch_xla syncs ends the process."""
    code = """
import torch, autoshard
class Reads(torch.nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        return y if y.sum() > 0 else -y
class Branches(torch.nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        return torch.cond(y.sum() > 0, lambda z: z * 2, lambda z: z - 1, (y,))
kept = []
for model in (torch.nn.Linear(8, 8), Reads(8, 8), Branches(8, 8)):
    try:
        autoshard.capture(model, torch.empty(4, 8, device="meta"), loss_fn=torch.sum, optimizer=torch.optim.SGD)
    except autoshard.CaptureError as error:
        kept.append(error)  # as a notebook keeps the last error, frames and all
import torch_xla
layer = torch.nn.Linear(8, 8).to("xla")
layer(torch.ones(4, 8, device="xla")).sum().backward()
torch_xla.sync()
print(len(kept), bool(layer.weight.grad.cpu().eq(4).all()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "2 True", (done.returncode, done.stderr[-2000:])


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.cond(x.sum() > 0, lambda y: y * 2, lambda y: y - 1, (x,)),
        lambda x: while_loop(lambda i, y: i[0] < 5, lambda i, y: (i + 1, y * 2), (torch.tensor([0]).to(x.device), x))[
            1
        ],
    ],
)
def test_branches_and_loops_that_depend_on_values_are_refused(function: Callable[[torch.Tensor], Any]) -> None:
    text = refusal(function)
    assert "torch.where" in text
    assert "test_refusals.py:" in text


def test_a_count_is_refused_with_what_counts_instead():
    class Net(nn.Linear):
        def forward(self, x):
            return torch.bincount(super().forward(x).argmax(-1), minlength=5)

    with pytest.raises(CaptureError, match=r"aten.bincount.*F\.one_hot\(x, n\)\.sum\(0\)"):
        capture(Net(4, 5), torch.empty(3, 4))


def test_what_a_forward_pass_keeps_is_empty_behind_the_capture() -> None:
    """A list of activations held lazy tensors on placeholders: the next sync ended the process."""
    code = """
import torch, torch_xla
import autoshard
kept = []
class Keeps(torch.nn.Linear):
    def forward(self, x):
        made = super().forward(x)
        kept.extend([made, made.view(4, 16), made.t()[1], x.relu()[1:]])
        return made.sum() if self.training else made
autoshard.use_spmd()
for train in (True, False):
    autoshard.capture(Keeps(32, 8).train(train), torch.ones(8, 32), train=train, frontend="torch_xla")
    given = torch.ones(4).to("xla") + 1
    torch_xla.sync()
    print([each.cpu().numel() for each in kept], given.cpu().tolist())
    kept.clear()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout.splitlines() == 2 * ["[0, 0, 0, 0] [2.0, 2.0, 2.0, 2.0]"], done.stderr[-2000:]


def test_a_capture_beside_a_step_that_is_running() -> None:
    """torch_xla crashes as it lowers what a running step has yet to make."""
    code = """
import torch, torch_xla
import autoshard
from autoshard.frontends.tracing.device import current
class Scales(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x) * made
autoshard.use_spmd()
made = torch.rand(512, 512).to("xla")
model = Scales(512, 512).to("xla").eval()
for number in range(12):
    for _ in range(30):
        made = (made @ made).tanh()
    torch_xla.sync()
    if number % 2:
        autoshard.capture(model, torch.ones(512, 512).to("xla"), frontend="torch_xla")
    else:
        assert current().reads_data(made) and current().reads_data(made + 1)
    one = torch.arange(5, device="xla") + torch.ones((), device="xla")
    assert not current().reads_data(one)
print("ended")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout == "ended\n", done.stderr[-2000:]


@pytest.mark.parametrize("frontend", ["torch_xla", "torchax"])
def test_a_parameter_outside_the_model_is_named(frontend: str) -> None:
    scale = nn.Parameter(torch.ones(16))
    given: dict[str, Any] = {"frontend": frontend, "train": True}
    for optimizer in (None, lambda parameters: torch.optim.SGD(parameters, lr=0.1)):
        with pytest.raises(
            CaptureError, match=r"shape \(16,\) that requires a gradient and is no parameter of the model"
        ):
            autoshard.capture(
                Mlp(), sample()[0], loss_fn=lambda y: (y * scale).sum(), optimizer=optimizer, **given
            )  # fmt: skip
    held = nn.Module()
    held.scale = scale
    held.forward = lambda y: (y * held.scale).sum()  # type: ignore[method-assign]
    program = autoshard.capture(Mlp(), sample()[0], loss_fn=held, **given)
    assert "loss_fn.scale" in [argument.name for argument in program.arguments]
