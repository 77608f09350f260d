"""State that an optimizer of the user's own would make in its first step."""

import copy

import pytest
import torch

from autoshard.errors import LoweringError
from autoshard.lower.begin import create_state


class Own(torch.optim.Optimizer):
    """Momentum; `begin` is its buffer in the first step, `later` what later steps do with it."""

    def __init__(self, parameters, begin, later, lr=0.1):
        super().__init__(parameters, {"lr": lr})
        self.begin, self.later = begin, later

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if "buffer" not in state:
                    state["buffer"] = self.begin(p)
                    state["step"] = torch.zeros(())
                state["step"] += 1
                self.later(state["buffer"], p)
                p.sub_(state["buffer"], alpha=group["lr"])


class Average(torch.optim.SGD):
    """An average of the updated weights."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        for p in self.param_groups[0]["params"]:
            self.state[p].setdefault("average", p.clone()).lerp_(p, 0.1)


def adds(buffer, p):
    buffer.mul_(0.9).add_(p.grad)


def moves(buffer, p):
    buffer.lerp_(p.grad, 0.1)


def parameters():
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape)) for shape in ((4, 3), (3,), (2, 4, 3))]


@pytest.mark.parametrize(
    ("begin", "later"),
    [(torch.zeros_like, adds), (torch.zeros_like, moves), (torch.clone, moves), (lambda p: torch.zeros(p.shape), adds)],
)
def test_state_begins_as_the_first_step_begins_it(begin, later):
    ours, theirs = parameters(), parameters()
    optimizer, plain = Own(ours, begin, later), Own(theirs, begin, later)
    create_state(optimizer, ours)
    assert all(optimizer.state[p]["step"] == 0 for p in ours)
    for _ in range(3):
        for p, q in zip(ours, theirs, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        optimizer.step()
        plain.step()
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q)
        torch.testing.assert_close(optimizer.state[p]["buffer"], plain.state[q]["buffer"])


@pytest.mark.parametrize(
    "own",
    [
        lambda p: Own(p, lambda p: p.grad.clone(), moves),
        lambda p: Own(p, lambda p: p.grad.square(), lambda buffer, p: buffer.lerp_(p.grad.square(), 0.1)),
        lambda p: Average(p, lr=0.1),
    ],
)
def test_state_that_begins_as_a_gradient_or_as_an_updated_parameter_is_refused(own):
    held = parameters()
    before, optimizer = copy.deepcopy(held), own(held)
    with pytest.raises(LoweringError, match=r"first step of .* is another one than its later steps.*run a step of it"):
        create_state(optimizer, held)
    assert not any(optimizer.state.get(p) for p in held)
    assert all(p.equal(was) and p.grad is None for p, was in zip(held, before, strict=True))
