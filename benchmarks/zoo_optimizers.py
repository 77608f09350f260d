"""Optimizers, and what loops do around them, for `coverage.py`.

Those that divide by moments of gradients have an `eps` that is large beside rounding, so that parameters can be judged.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from benchmarks.zoo_entry import BATCH, WIDTH, classes, entry, floats
from benchmarks.zoo_steps import Language, text

EPS = 1e-3


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 128), nn.LayerNorm(128), nn.Tanh(), nn.Linear(128, 8))


def under(make: Any) -> Any:
    return net(), (floats(BATCH, WIDTH), classes()), F.cross_entropy, make


@entry
def adam_with_amsgrad() -> Any:
    return under(lambda p: torch.optim.Adam(p, lr=1e-3, eps=EPS, amsgrad=True, weight_decay=0.01))


@entry
def adam_of_foreach() -> Any:
    return under(lambda p: torch.optim.Adam(p, lr=1e-3, eps=EPS, foreach=True))


@entry
def adamw_capturable() -> Any:
    return under(lambda p: torch.optim.AdamW(p, lr=1e-3, eps=EPS, capturable=True, foreach=False))


@entry
def adamw_of_two_groups() -> Any:
    def groups(parameters: list[Tensor]) -> torch.optim.Optimizer:
        decayed = [p for p in parameters if p.dim() > 1]
        others = [p for p in parameters if p.dim() < 2]
        return torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}], lr=1e-3, eps=EPS)

    return Language(), text(), None, groups


@entry
def nesterov() -> Any:
    return under(lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True, weight_decay=1e-3))


@entry
def maximized() -> Any:
    return under(lambda p: torch.optim.SGD(p, lr=0.01, maximize=True, dampening=0.1, momentum=0.5))


@entry
def rms_prop() -> Any:
    return under(lambda p: torch.optim.RMSprop(p, lr=1e-3, eps=EPS, momentum=0.9, centered=True))


@entry
def adagrad() -> Any:
    return under(lambda p: torch.optim.Adagrad(p, lr=1e-2, eps=EPS, lr_decay=0.1))


@entry
def adadelta() -> Any:
    return under(lambda p: torch.optim.Adadelta(p, lr=0.1, eps=EPS))


@entry
def adamax() -> Any:
    return under(lambda p: torch.optim.Adamax(p, lr=1e-3, eps=EPS))


@entry
def n_adam() -> Any:
    return under(lambda p: torch.optim.NAdam(p, lr=1e-3, eps=EPS))


@entry
def r_adam() -> Any:
    return under(lambda p: torch.optim.RAdam(p, lr=1e-3, eps=EPS))


@entry
def adafactor() -> Any:
    return under(lambda p: torch.optim.Adafactor(p, lr=1e-3))


@entry
def adafactor_of_transformers() -> Any:
    from transformers.optimization import Adafactor

    return under(lambda p: Adafactor(p, lr=1e-3, relative_step=False, scale_parameter=False))


@entry
def averaged_sgd() -> Any:
    return under(lambda p: torch.optim.ASGD(p, lr=1e-3))


@entry
def r_prop() -> Any:
    return under(lambda p: torch.optim.Rprop(p, lr=1e-3))


class Lion(torch.optim.Optimizer):
    """Signs of an average of gradients (arXiv:2302.06675)."""

    def __init__(self, parameters: Any, lr: float = 1e-3, decay: float = 0.01) -> None:
        super().__init__(parameters, {"lr": lr, "decay": decay, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            slow, fast = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["average"] = torch.zeros_like(p)
                p.mul_(1 - group["lr"] * group["decay"])
                p.add_(torch.sign(state["average"] * slow + p.grad * (1 - slow)), alpha=-group["lr"])
                state["average"].mul_(fast).add_(p.grad, alpha=1 - fast)


@entry
def lion() -> Any:
    return under(Lion)


class Lamb(torch.optim.Optimizer):
    """Adam whose steps are as long as the weights are, layer by layer (arXiv:1904.00962)."""

    def __init__(self, parameters: Any, lr: float = 1e-3) -> None:
        super().__init__(parameters, {"lr": lr, "betas": (0.9, 0.999), "eps": EPS, "weight_decay": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            a, b = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"] = 0
                    state["first"], state["second"] = torch.zeros_like(p), torch.zeros_like(p)
                state["step"] += 1
                state["first"].mul_(a).add_(p.grad, alpha=1 - a)
                state["second"].mul_(b).addcmul_(p.grad, p.grad, value=1 - b)
                first = state["first"] / (1 - a ** state["step"])
                second = state["second"] / (1 - b ** state["step"])
                update = first / (second.sqrt() + group["eps"]) + group["weight_decay"] * p
                long, step = p.norm(), update.norm()
                trust = torch.where((long > 0) & (step > 0), long / step, torch.ones_like(long))
                p.sub_(group["lr"] * trust * update)


@entry
def lamb() -> Any:
    return under(Lamb)


class Muon(torch.optim.SGD):
    """Momentum made orthogonal by Newton and Schulz's iteration, for matrices."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.dim() == 2:
                    x = p.grad / (p.grad.norm() + 1e-7)
                    for _ in range(3):
                        gram = x @ x.T
                        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
                    p.grad.copy_(x)
        return super().step(closure)


@entry
def muon() -> Any:
    return under(lambda p: Muon(p, lr=1e-3, momentum=0.9))


class Guarded(torch.optim.SGD):
    """SGD under a scaled loss: gradients are scaled back and clipped, and a step with one that is no number is none."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        found = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        fine = torch.stack([torch.isfinite(g).all() for g in found]).all()
        for g in found:
            g.copy_(torch.where(fine, g / 128.0, 0.0))
        torch.nn.utils.clip_grad_value_([p for group in self.param_groups for p in group["params"]], 0.01)
        return super().step(closure)


@entry
def scaled_loss() -> Any:
    def loss(scores: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(scores, labels) * 128.0

    return net(), (floats(BATCH, WIDTH), classes()), loss, lambda p: Guarded(p, lr=0.01)


@entry
def autocast_of_cuda_to_f16_under_a_scaled_loss() -> Any:
    class Mixed(Language):
        def forward(self, text: Tensor, labels: Tensor) -> Tensor:
            with torch.amp.autocast("cuda"):
                return super().forward(text, labels) * 128.0

    return Mixed(), text(), None, lambda parameters: Guarded(parameters, lr=0.01)


class Masters(torch.optim.Optimizer):
    """SGD with momentum of f32 copies, which parameters in bf16 are rounded from."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})
        for p in [p for group in self.param_groups for p in group["params"]]:
            self.state[p] = {"master": p.detach().float(), "momentum": torch.zeros_like(p, dtype=torch.float32)}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["momentum"].mul_(0.9).add_(p.grad)
                p.copy_(state["master"].sub_(state["momentum"], alpha=group["lr"]))


@entry
def f32_masters_of_bf16_weights() -> Any:
    return Language().to(torch.bfloat16), text(), None, Masters


@entry
def scheduled() -> Any:
    def make(parameters: Any) -> torch.optim.Optimizer:
        made = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        torch.optim.lr_scheduler.LambdaLR(made, lambda step: 0.5 / (step + 1))
        return made

    return under(make)


@entry
def learning_rate_in_a_tensor() -> Any:
    return under(lambda p: torch.optim.SGD(p, lr=torch.tensor(0.01)))


@entry
def regularized_weights() -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = net()

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            weights = [p for p in self.parameters() if p.dim() == 2]
            decay = sum(w.square().sum() for w in weights) + sum(w.abs().sum() for w in weights)
            return F.cross_entropy(self.inner(x), labels) + 1e-4 * decay

    return Net(), (floats(BATCH, WIDTH), classes()), None
