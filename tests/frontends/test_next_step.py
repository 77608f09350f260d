"""What a forward pass leaves in attributes: where the next pass computes something else, the program is right once."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import autoshard
from autoshard.errors import LoweringError
from autoshard.program import Program

jax = pytest.importorskip("jax")

FRONTENDS = ("torch_xla", "torchax")
Body = Callable[["Net", torch.Tensor], torch.Tensor]


class Net(nn.Module):
    """Computes as it is told; `inner` is a module of its own."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.body, self.layer, self.inner = body, nn.Linear(4, 4), nn.Tanh()
        self.memory = nn.LSTM(4, 4)
        self.frequencies: torch.Tensor
        self.register_buffer("frequencies", torch.arange(4.0))
        self.register_buffer("seen", torch.zeros(4))
        self.count, self.ready, self.states = 1, False, []
        self.hidden: Any = None
        self.mean = torch.zeros(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self, x)


def hidden_state(m: Any, x: torch.Tensor) -> torch.Tensor:
    h = m.layer(x) + (0 if m.hidden is None else m.hidden)
    m.hidden = h.detach()
    return h


def earlier_batch(m: Any, x: torch.Tensor) -> torch.Tensor:
    before, m.inner.batch = getattr(m.inner, "batch", x), x
    return m.layer(x - before)


def list_of_states(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.states.append(m.layer(x).detach())
    return m.layer(x) + torch.stack(m.states).mean(0)


def running_mean(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.mean = 0.9 * m.mean.to(x.device) + 0.1 * x.mean(0)
    return m.layer(x) - m.mean


def once_only_noise(m: Any, x: torch.Tensor) -> torch.Tensor:
    if m.hidden is None:
        m.hidden = torch.rand(4, device=x.device)
    return m.layer(x) + m.hidden


def counted(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.count += 1
    return m.layer(x) / m.count


def counted_on_the_host(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.mean += 1
    return m.layer(x) * m.mean.to(x.device)


def first_batch_sets_a_buffer(m: Any, x: torch.Tensor) -> torch.Tensor:
    if not m.ready:
        m.seen.copy_(x.mean(0))
        m.ready = True
    return m.layer(x) - m.seen


def drops_tokens_drawn_on_the_host(m: Any, x: torch.Tensor) -> torch.Tensor:
    kept = torch.rand(len(x)).topk(2).indices
    return m.layer(x[kept])


def logs_and_draws(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.count += 1
    return m.layer(x) * torch.tensor(random.random())


DRAWN = "computes with random numbers that the host drew"

ONCE: dict[Body, str] = {
    drops_tokens_drawn_on_the_host: DRAWN,
    logs_and_draws: DRAWN,
    hidden_state: "reads what the pass before it left in attribute hidden of the model",
    earlier_batch: "reads what the pass before it left in attribute batch of module inner",
    list_of_states: "reads what the pass before it left in attribute states of the model",
    running_mean: "reads what the pass before it left in attribute mean of the model",
    once_only_noise: "reads what the pass before it left in attribute hidden of the model",
    counted: "computes something else when it runs once more, for it changes attribute count of the model (1, then 2)",
    counted_on_the_host: "computes something else when it runs once more, for it changes attribute mean of the model",
    first_batch_sets_a_buffer: "for it changes attribute ready of the model (False, then True)",
}


def kept_for_a_look(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.hidden = m.layer(x)
    m.inner.last = (x, m.hidden.detach())
    return torch.tanh(m.hidden)


def mask_made_once(m: Any, x: torch.Tensor) -> torch.Tensor:
    if m.hidden is None or m.count != x.shape[0]:
        m.hidden, m.count = torch.ones(len(x), 4, device=x.device).tril() + torch.zeros_like(x), x.shape[0]
    return m.layer(x) * m.hidden


def made_once_of_a_buffer(m: Any, x: torch.Tensor) -> torch.Tensor:
    if m.hidden is None:
        m.hidden = m.frequencies.cos()
    return m.layer(x) * m.hidden


def cleared_first(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.states.clear()
    for _ in range(2):
        m.states.append(m.layer(x))
    return sum(m.states)


def cleared_by_the_loop(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.states.append(m.layer(x))
    return sum(m.states)


def counted_for_a_log(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.count += 1
    m.ready = True
    return m.layer(x)


def buffer_under_no_grad(m: Any, x: torch.Tensor) -> torch.Tensor:
    h = m.layer(x)
    with torch.no_grad():
        m.seen.lerp_(h.mean(0), 0.1)
    m.hidden = m.seen
    return h + m.seen


def recurrent(m: Any, x: torch.Tensor) -> torch.Tensor:
    """An LSTM keeps its weights in a list, made anew where they are others."""
    return m.memory(m.layer(x)[None])[0]


def drops_no_layer(m: Any, x: torch.Tensor) -> torch.Tensor:
    h = m.layer(x)
    return h if torch.rand([]) < 0 or random.random() < 0 else h + F.dropout(h)


FINE = [
    recurrent, drops_no_layer,
    kept_for_a_look, mask_made_once, made_once_of_a_buffer, cleared_first, cleared_by_the_loop, counted_for_a_log,
    buffer_under_no_grad,
]  # fmt: skip


def captured(body: Body, frontend: str, train: bool = True) -> Program:
    step: dict[str, Any] = {"loss_fn": torch.sum, "optimizer": lambda p: torch.optim.SGD(p, lr=0.1)} if train else {}
    return autoshard.capture(Net(body), torch.ones(4, 4), frontend=frontend, **step)


@pytest.mark.parametrize("frontend", FRONTENDS)
@pytest.mark.parametrize("body", ONCE)
def test_state_of_which_a_program_knows_nothing_is_named(body: Body, frontend: str) -> None:
    once = captured(body, frontend).once
    assert ONCE[body] in once
    assert "\n" not in once
    assert "input" in once if DRAWN in once else "buffer" in once


@pytest.mark.parametrize("frontend", FRONTENDS)
@pytest.mark.parametrize("body", FINE)
def test_what_is_left_and_makes_no_difference_is_none(body: Body, frontend: str) -> None:
    program = captured(body, frontend)
    assert program.once == ""
    assert len({op.index for op in program.ops}) == len(program.ops)


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_a_forward_pass_alone(frontend: str) -> None:
    assert captured(kept_for_a_look, frontend, train=False).once == ""
    assert "attribute hidden" in captured(hidden_state, frontend, train=False).once


def test_no_function_is_made_of_such_a_step() -> None:
    from autoshard.verify.captured import CapturedStep

    model = Net(hidden_state)
    program = autoshard.capture(model, torch.ones(4, 4), train=False)
    plan = autoshard.plan_program(program, autoshard.Mesh((1, 1)))
    for make in (lambda: CapturedStep(program), lambda: plan.to_jax(jax.devices()[:1]).step(program)):
        with pytest.raises(LoweringError, match=r"right once, the next one is another program: .* attribute hidden"):
            make()


def test_the_command_line_writes_no_such_module(run: Any, tmp_path: Any) -> None:
    (tmp_path / "net.py").write_text(
        "import torch\n\n\nclass Net(torch.nn.Linear):\n    calls = 1\n\n    def forward(self, x):\n"
        "        self.calls += 1\n        return super().forward(x) * self.calls\n\n\n"
        "def net():\n    return Net(4, 4), torch.ones(4, 4)\n"
    )
    assert run("plan", "net.py:net", "--mesh", "2x2", "-o", "plan.json")[0] == 0
    status, _, error = run("lower", "plan.json", "net.py:net", "-o", "net.mlir")
    assert status == 2
    assert "changes attribute calls of the model (1, then 2)" in error
    assert len(error.splitlines()) == 1
    assert not (tmp_path / "net.mlir").exists()


def test_the_model_and_the_random_numbers_of_the_host_are_left_as_they_were() -> None:
    def draws(m: Any, x: torch.Tensor) -> torch.Tensor:
        m.count += 1
        m.mean += 1
        return m.layer(x) if torch.rand(()) < 0.5 else m.layer(x) * 2

    model = Net(draws)
    torch.manual_seed(0)
    autoshard.capture(model, torch.ones(4, 4), train=False)
    assert (model.count, model.mean.sum()) == (1, 0)
    drawn = torch.rand(())
    torch.manual_seed(0)
    assert drawn == torch.rand(())


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_what_an_object_keeps_of_the_device_is_on_the_host_again(frontend: str) -> None:
    """As a scheduler of diffusers keeps its noise levels."""
    table = [torch.linspace(0.9, 0.1, 4)]

    def scaled(m: Any, x: torch.Tensor) -> torch.Tensor:
        table[0] = table[0].to(device=x.device)
        return m.layer(x) * table[0]

    before = table[0]
    captured(scaled, frontend)
    assert table[0] is before
