"""What a step writes in place is in its program: run, the program leaves what eager PyTorch leaves."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import autoshard
from autoshard.errors import CaptureError
from autoshard.lower import arrays, to_jax
from autoshard.program import Program

FRONTENDS = ("torch_xla", "torchax")
Write = Callable[["Net", torch.Tensor, torch.Tensor], Any]


class Net(nn.Module):
    """Writes its buffers as it is told; `x` and the hidden `h` are 4 x 4, as is half of `queue`."""

    def __init__(self, write: Write) -> None:
        super().__init__()
        self.write = write
        self.layer, self.teacher = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)
        self.register_buffer("queue", torch.arange(32.0).view(8, 4) / 5)
        self.register_buffer("other", torch.full((8, 4), 0.3))
        self.register_buffer("square", torch.full((4, 4), 2.0))
        self.register_buffer("count", torch.tensor(2))
        self.register_buffer("kept", torch.tensor(0.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.layer(x)
        with torch.no_grad():
            self.write(self, x, h.detach())
        read = (self.queue + self.other) @ h.t()
        return h.square().mean() + read.mean() + self.square.mean() + self.teacher(x).mean() + self.count


def twice(h: torch.Tensor) -> torch.Tensor:
    return torch.cat([h, h])


def swap(m: Net, x: torch.Tensor, h: torch.Tensor) -> None:
    before = m.queue.clone()
    m.queue.copy_(m.other)
    m.other.copy_(before)


def ring(m: Net, x: torch.Tensor, h: torch.Tensor) -> None:
    at = (torch.arange(4, device=h.device) + m.count) % 8
    m.queue[at] = h
    m.count.copy_((m.count + 4) % 8)


def average(m: Net, x: torch.Tensor, h: torch.Tensor) -> None:
    for mine, theirs in zip(m.teacher.parameters(), m.layer.parameters(), strict=True):
        mine.copy_(0.5 * mine + 0.5 * theirs)


def average_data(m: Net, x: torch.Tensor, h: torch.Tensor) -> None:
    for mine, theirs in zip(m.teacher.parameters(), m.layer.parameters(), strict=True):
        mine.data = mine.data * 0.5 + theirs.data * 0.5


def assign(m: Net, x: torch.Tensor, h: torch.Tensor) -> None:
    m.queue = torch.cat([h, m.queue[:4]])


def swapped_contents(m: Net, x: torch.Tensor, h: torch.Tensor) -> None:
    torch.utils.swap_tensors(m.queue, twice(h).clone())


def old_view(m: Net, x: torch.Tensor, h: torch.Tensor) -> None:
    view = m.queue[:4]
    m.queue.copy_(twice(h))
    m.square.copy_(view)


def old_value(m: Net, x: torch.Tensor, h: torch.Tensor) -> None:
    value = m.queue.clone()
    m.queue.copy_(twice(h))
    m.square.copy_(value[:4])


def seen_through_a_view(m: Net, x: torch.Tensor, h: torch.Tensor) -> None:
    view = m.queue.view(-1)
    view.add_(1.0)
    m.queue.mul_(2.0)
    view.copy_(view * 3)


WRITES: dict[str, Write] = {
    "of what was read": lambda m, x, h: m.queue.copy_(torch.cat([h, m.queue[:4]])),
    "rolled": lambda m, x, h: m.queue.copy_(m.queue.roll(1, 0)),
    "itself": lambda m, x, h: m.queue.copy_(m.queue),
    "data": lambda m, x, h: m.queue.data.copy_(m.queue * 0.5),
    "all rows": lambda m, x, h: m.queue.__setitem__(slice(None), twice(h)),
    "ellipsis": lambda m, x, h: m.queue.data.__setitem__(..., twice(h)),
    "some rows": lambda m, x, h: m.queue[:4].copy_(x),
    "flat": lambda m, x, h: m.queue.view(-1).copy_(twice(h).view(-1)),
    "transposed": lambda m, x, h: m.queue.t().copy_(torch.cat([h, h], 1)),
    "permuted": lambda m, x, h: m.queue.view(2, 4, 4).permute(1, 0, 2).copy_(torch.stack([h, h], 1)),
    "strided": lambda m, x, h: m.queue.as_strided((4, 4), (8, 1)).copy_(h),
    "diagonal": lambda m, x, h: m.square.diagonal().copy_(h[0]),
    "half precision": lambda m, x, h: m.queue.copy_(twice(h).bfloat16()),
    "to whole numbers": lambda m, x, h: m.count.copy_(h.sum() * 10),
    "broadcast": lambda m, x, h: m.queue.copy_(h[0]),
    "a number of the device": lambda m, x, h: m.queue.fill_(h.mean()),
    "filled": lambda m, x, h: m.queue.fill_(2.0),
    "cleared, added to": lambda m, x, h: m.queue.zero_().add_(twice(h)),
    "cleared, added an argument": lambda m, x, h: m.queue.zero_().add_(m.other),
    "written, multiplied": lambda m, x, h: m.queue.copy_(twice(h)).mul_(2.0),
    "of the host": lambda m, x, h: m.queue.copy_(torch.arange(32.0, dtype=torch.float64).view(8, 4) / 7),
    "of the host, broadcast": lambda m, x, h: m.queue.copy_(torch.tensor([1.0, 2.0, 3.0, 4.0])),
    "an input": lambda m, x, h: m.square.copy_(x),
    "another buffer": lambda m, x, h: m.queue.copy_(m.other),
    "several at once": lambda m, x, h: torch._foreach_copy_([m.queue, m.other], [twice(h), m.queue * 2]),
    "a result": lambda m, x, h: torch.cat([h, h], out=m.queue),
    "never read": lambda m, x, h: m.kept.copy_(h.mean()),
    "new memory": lambda m, x, h: m.queue.set_(twice(h)),
    "new data": lambda m, x, h: setattr(m.queue, "data", twice(h)),
    **{
        each.__name__: each
        for each in (
            swap, ring, average, average_data, assign, swapped_contents, old_view, old_value, seen_through_a_view,
        )
    },
}  # fmt: skip


class Run:
    """A program that is run on arrays, from one step to the next."""

    def __init__(self, program: Program, model: nn.Module) -> None:
        self.program = program
        self.call = to_jax._exported_call(program.stablehlo, program, 1, "highest")
        self.tensors = {name: t.detach().clone() for name, t in (*model.named_parameters(), *model.named_buffers())}

    def __call__(self, *inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        import jax

        given = self.tensors | dict(zip(self.program.inputs, inputs, strict=True)) | dict(self.program.values)
        with jax.enable_x64(True):
            made = self.call(*(arrays.to_numpy(given[argument.name]) for argument in self.program.arguments))
        found = {}
        for output, value in zip(self.program.outputs, made, strict=True):
            name = output.name if output.updates is None else self.program.arguments[output.updates].name
            (found if output.updates is None else self.tensors)[name] = arrays.to_torch(np.asarray(value))
        return found


@pytest.mark.parametrize("frontend", FRONTENDS)
@pytest.mark.parametrize("write", WRITES)
def test_what_is_written_is_in_the_program(write: str, frontend: str) -> None:
    torch.manual_seed(0)
    model = Net(WRITES[write])
    eager, batches = copy.deepcopy(model), torch.randn(2, 4, 4)
    program = autoshard.capture(model, batches[0], train=False, frontend=frontend)
    run = Run(program, model)
    assert all(output.updates is not None for output in program.outputs if output.role != "output")
    for batch in batches:
        wanted = eager(batch)
        torch.testing.assert_close(run(batch)["output"], wanted, rtol=1e-5, atol=1e-5)
    for name, tensor in (*eager.named_parameters(), *eager.named_buffers()):
        torch.testing.assert_close(run.tensors[name], tensor.detach(), rtol=1e-5, atol=1e-5, msg=name)


def shared_memory(m: Net, x: torch.Tensor, h: torch.Tensor) -> None:
    m.queue.set_(m.other)


def shared_assignment(m: Net, x: torch.Tensor, h: torch.Tensor) -> None:
    m.queue = m.other = twice(h)


def narrower(m: Net, x: torch.Tensor, h: torch.Tensor) -> None:
    m.queue.data = twice(h).half()


@pytest.mark.parametrize("frontend", FRONTENDS)
@pytest.mark.parametrize(
    ("write", "message"),
    [
        (shared_memory, "other and queue are one tensor after the step"),
        (shared_assignment, "queue and other are one tensor after the step"),
        (narrower, r"leaves f16\[8,4\] in queue, which was f32\[8,4\]"),
    ],
)
def test_what_makes_the_next_step_another_program_is_refused(write: Write, message: str, frontend: str) -> None:
    with pytest.raises(CaptureError, match=message) as raised:
        autoshard.capture(Net(write), torch.zeros(4, 4), train=False, frontend=frontend)
    assert "\n" not in str(raised.value)


class Own(torch.optim.Optimizer):
    """Steps as it is told: `write(p, master)` for each parameter, where `master` has been updated."""

    def __init__(self, parameters: Any, write: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
        self.write = write
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["master"] = p.detach().float().clone()
                state["master"].sub_(p.grad.float(), alpha=0.1)
                self.write(p, state["master"])


def mean(output: torch.Tensor) -> torch.Tensor:
    return output.float().square().mean()


@pytest.mark.parametrize("frontend", FRONTENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "write",
    [
        lambda p, master: p.copy_(master),
        lambda p, master: p.data.copy_(master),
        lambda p, master: torch._foreach_copy_([p], [master]),
        lambda p, master: setattr(p, "data", master.to(p.dtype, copy=True)),
        lambda p, master: p.zero_().add_(master),
    ],
    ids=["copy_", "data.copy_", "_foreach_copy_", "data =", "zero_().add_"],
)
def test_parameters_written_from_masters(write: Any, dtype: torch.dtype, frontend: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 4).to(dtype)
    eager, batches = copy.deepcopy(model), torch.randn(2, 4, 4).to(dtype)
    program = autoshard.capture(model, batches[0], loss_fn=mean, optimizer=lambda ps: Own(ps, write), frontend=frontend)
    run, optimizer = Run(program, model), Own(eager.parameters(), write)
    run.tensors |= {f"{name}.master": p.detach().float() for name, p in model.named_parameters()}
    close = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 1e-2}
    for batch in batches:
        loss = mean(eager(batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(run(batch)["loss"], loss.detach(), **close)
    for name, parameter in eager.named_parameters():
        torch.testing.assert_close(run.tensors[name], parameter.detach(), **close)
        torch.testing.assert_close(run.tensors[f"{name}.master"], optimizer.state[parameter]["master"], **close)


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_a_trained_parameter_that_is_not_updated_is_named(frontend: str) -> None:
    def matrices_only(p: torch.Tensor, master: torch.Tensor) -> None:
        if p.dim() > 1:
            p.copy_(master)

    with pytest.raises(CaptureError, match="the step of Own leaves bias as it was, though it has a gradient"):
        autoshard.capture(
            nn.Linear(4, 4), torch.zeros(4, 4), loss_fn=mean,
            optimizer=lambda ps: Own(ps, matrices_only), frontend=frontend,
        )  # fmt: skip


class Branches(nn.Module):
    """One layer is not used in this step, one is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused, self.frozen = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(self.used(x))


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_parameters_without_gradients_need_no_update(frontend: str) -> None:
    program = autoshard.capture(
        Branches(), torch.zeros(4, 4), loss_fn=mean, optimizer=lambda ps: torch.optim.SGD(ps, lr=0.0),
        frontend=frontend,
    )  # fmt: skip
    assert {output.name for output in program.outputs} == {"loss", "used.weight", "used.bias"}


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_one_tensor_given_twice_is_two_inputs(frontend: str) -> None:
    class Difference(nn.Module):
        def forward(self, x: torch.Tensor, more: dict[str, torch.Tensor]) -> torch.Tensor:
            return x - 2 * more["y"]

    same = torch.ones(4)
    model = Difference()
    program = autoshard.capture(model, (same, {"y": same}), train=False, frontend=frontend)
    assert program.inputs == ("x", "more.y")
    torch.testing.assert_close(Run(program, model)(same, 3 * same)["output"], torch.full((4,), -5.0))
