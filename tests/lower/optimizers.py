"""Optimizers of a user's own: what they keep, they make in their first step, or when they are made."""

import torch


class Masters(torch.optim.Optimizer):
    """Steps masters in f32, made in the first step, and copies them into the parameters; a list of momenta."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state["master"] = p.detach().float().clone()
                    state["momenta"] = [torch.zeros_like(p), torch.zeros_like(p)]
                fast, slow = state["momenta"]
                fast.mul_(0.5).add_(p.grad)
                slow.lerp_(p.grad, 0.1)
                state["master"].sub_(fast + slow, alpha=group["lr"])
                p.copy_(state["master"])


class Counting(torch.optim.Optimizer):
    """Makes its state when it is made, and counts its steps in its groups."""

    def __init__(self, params, rate):
        super().__init__(params, {"rate": rate})
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["average"] = torch.zeros_like(p)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                if p.grad is not None:
                    average = self.state[p]["average"].lerp_(p.grad, 0.1)
                    p.add_(average, alpha=-group["rate"] / (1 - 0.9 ** group["step"]))


def masters(parameters):
    return Masters(parameters)


def counting(parameters):
    return Counting(parameters, 0.1)
