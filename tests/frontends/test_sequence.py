"""The aten sequence is the same at capture and in every real training step, whatever the loop does around it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autoshard.frontends.switches.table import active
from autoshard.frontends.torch_xla.program import capture, prepare_runtime
from autoshard.frontends.tracing.sequence import AtenSequence, Call
from tests.frontends.models import Mlp, mean_square, sample


class Recorded(AtenSequence):
    """Names and makers of the counted ops."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[tuple[str, tuple[Any, ...]]] = []

    def after(self, call: Call, outputs: tuple[torch.Tensor, ...]) -> None:
        self.ops.append((call.name, call.inputs))


@pytest.fixture(scope="module")
def device() -> Any:
    prepare_runtime()
    import torch_xla

    return torch_xla.device()


def arguments(model: torch.nn.Module, optimizer: torch.optim.Optimizer, x: Any, y: Any) -> dict[str, torch.Tensor]:
    named = dict(model.named_parameters()) | dict(model.named_buffers()) | {"x": x, "target": y}
    for name, p in model.named_parameters():
        for key, value in optimizer.state.get(p, {}).items():
            if isinstance(value, torch.Tensor) and value.device.type == "xla":
                named[f"{name}.{key}"] = value
    return named


class Views(torch.nn.Module):
    """Reads views of its parameters, which torch makes anew once the optimizer has written them."""

    def __init__(self) -> None:
        super().__init__()
        self.fused = torch.nn.Parameter(torch.randn(16, 32))
        self.square = torch.nn.Parameter(torch.randn(16, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = self.fused.chunk(2, 1)
        return torch.cat([x[:, 1:] @ left * (x[:, :-1] @ right), x[:, :1]], 1) @ self.square.t()


class Twice(torch.nn.Module):
    """A gradient that is differentiated again, and a product of which torch makes views that are not tagged as such."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.Tanh(), torch.nn.Linear(8, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        slow = dict(self.inner.named_parameters())
        loss = self.inner(x).square().mean()
        slopes = torch.autograd.grad(loss, list(slow.values()), create_graph=True)
        fast = {name: p - 0.1 * g for (name, p), g in zip(slow.items(), slopes, strict=True)}
        spread = torch.kron(self.inner[0].weight[:4, :4], self.inner[2].weight[:4, :4])
        return torch.func.functional_call(self.inner, fast, (x,)) @ spread


@pytest.mark.parametrize("make", [Mlp, Views, Twice])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_real_steps_dispatch_the_captured_ops(device: Any, make: Any, set_to_none: bool) -> None:
    program = capture(
        make(), sample(), loss_fn=mean_square, optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)
    )
    expected = [(op.name, op.inputs) for op in program.ops]

    model = make().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    sequence = Recorded()
    with active(program.switches, model), sequence:
        for number in range(3):
            x, y = (torch.ones(4, 6, 16).to(device) for _ in range(2))  # a loader's transfer
            optimizer.zero_grad(set_to_none=set_to_none)
            sequence.restart(arguments(model, optimizer, x, y))
            sequence.ops.clear()
            loss = mean_square(model(x), y)
            loss.backward()
            optimizer.step()
            ran = list(sequence.ops)
            scheduler.step()
            loss.detach()
            assert sequence.ops == ran  # none of these are counted
            if number > 0:  # the first step has no momentum yet
                assert ran == expected


def test_identity_survives_autograd_and_detach_but_not_writing(device: Any) -> None:
    x = torch.ones(3, device=device, requires_grad=True)
    with AtenSequence({"x": x}) as sequence:
        y = torch.tanh(x)
        assert sequence.producer(x) == sequence.producer(x.detach()) == sequence.producer(x.data) == "x"
        assert sequence.producer(y) == (0, 0)
        assert y.grad_fn._saved_result is not y
        assert sequence.producer(y.grad_fn._saved_result) == (0, 0)
        with torch.no_grad():
            x.mul_(2.0)
        assert sequence.producer(x) == (1, 0)
        assert sequence.producer(torch.ones(3)) is None


def test_what_is_not_counted(device: Any) -> None:
    with AtenSequence() as sequence:
        host = torch.ones(3) * 2 + torch.arange(3)
        moved = host.to(device)
        moved.detach()
        host.to(device).zero_()
        assert sequence.next_index == 0
        torch.zeros(3, device=device)
        moved.to(torch.bfloat16)  # on one device: a conversion, not a transfer
        assert sequence.next_index == 2


def test_several_outputs(device: Any) -> None:
    x = torch.ones(6).to(device)
    with AtenSequence({"x": x}) as sequence:
        parts = x.split(2)
        both = torch.stack([parts[2], parts[0]])
    assert [sequence.producer(p) for p in parts] == [(0, 0), (0, 1), (0, 2)]
    assert sequence.producer(both) is not None
