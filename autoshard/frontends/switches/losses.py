"""Losses and distances whose kernels or gradients torch_xla computes on the CPU, in ops that it lowers."""

from __future__ import annotations

import math
from typing import Any

import torch


def _reduced(loss: torch.Tensor, reduction: str) -> torch.Tensor:
    return loss.mean() if reduction == "mean" else loss.sum() if reduction == "sum" else loss


def multi_margin(
    input: torch.Tensor,
    target: torch.Tensor,
    p: int = 1,
    margin: float = 1.0,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Any:
    """`F.multi_margin_loss`."""
    if size_average is not None or reduce is not None or input.dim() != 2:
        return NotImplemented
    own = target.unsqueeze(-1) == torch.arange(input.shape[1], device=input.device)
    right = torch.where(own, input, 0.0).sum(1, keepdim=True)
    short = (margin - right + input).clamp(min=0) ** p
    if weight is not None:
        short = short * torch.where(own, weight, 0.0).sum(1, keepdim=True)
    return _reduced(torch.where(own, 0.0, short).sum(1) / input.shape[1], reduction)


def gaussian_nll(
    input: torch.Tensor,
    target: torch.Tensor,
    var: torch.Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> Any:
    """`F.gaussian_nll_loss` without the check for negative variances, which reads values."""
    if not isinstance(var, torch.Tensor):
        var = var * torch.ones_like(input)
    elif var.shape != input.shape and input.shape[:-1] == var.shape:
        var = var.unsqueeze(-1)
    kept = var.detach().clamp(min=eps)
    var = var + (kept - var).detach()  # clamps the value, not the gradient
    loss = 0.5 * (torch.log(var) + (input - target) ** 2 / var)
    return _reduced(loss + 0.5 * math.log(2 * math.pi) if full else loss, reduction)


def cdist(
    x1: torch.Tensor,
    x2: torch.Tensor,
    p: float = 2.0,
    compute_mode: str = "use_mm_for_euclid_dist_if_necessary",
) -> Any:
    """`torch.cdist`; the gradient is 0 where the distance is."""
    if p == 0 or x1.dim() < 2 or x2.dim() < 2 or not (x1.is_floating_point() and x2.is_floating_point()):
        return NotImplemented
    away = x1.unsqueeze(-2) - x2.unsqueeze(-3)
    if p == 1:
        return away.abs().sum(-1)
    if p == math.inf:
        return away.abs().amax(-1)
    total = away.square().sum(-1) if p == 2 else away.abs().pow(p).sum(-1)
    same = total == 0
    return torch.where(same, 0.0, torch.where(same, 1.0, total) ** (1 / p))


def solve(A: torch.Tensor, B: torch.Tensor, *, left: bool = True) -> Any:
    """`torch.linalg.solve` by the inverse, as torch_xla lacks LU."""
    inverse, vectors = torch.linalg.inv(A), B.dim() == 1 or B.shape == A.shape[:-1]
    if vectors:
        return torch.matmul(inverse, B.unsqueeze(-1)).squeeze(-1)
    return torch.matmul(inverse, B) if left else torch.matmul(B, inverse)


def slogdet(A: torch.Tensor) -> Any:
    """`torch.linalg.slogdet`; its gradient, of first order only, is by the inverse."""
    with torch.no_grad():
        sign, log = torch.ops.aten._linalg_slogdet.default(A)[:2]
        slope = torch.linalg.inv(A).mT
    return torch.return_types.linalg_slogdet((sign, log + ((A - A.detach()) * slope).sum((-2, -1))))


def logdet(input: torch.Tensor) -> torch.Tensor:
    """`torch.logdet`: NaN for negative determinants."""
    sign, log = slogdet(input)
    return torch.where(sign < 0, math.nan, log)


def ctc(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Any:
    """The forward recursion of Graves et al. 2006 ("Connectionist Temporal Classification"), section 4.1, in log space.

    Args:
        log_probs: `[T, N, C]`, or `[T, C]`.
        targets: `[N, S]`, or `[S]` beside `[T, C]`; concatenated targets are left to torch.
    """
    if log_probs.dim() == 2 and targets.dim() == 1:
        one, other = (torch.as_tensor(n, device=log_probs.device).reshape(1) for n in (input_lengths, target_lengths))
        loss = ctc(log_probs.unsqueeze(1), targets.unsqueeze(0), one, other, blank, reduction, zero_infinity)
        return loss.squeeze(0) if reduction == "none" else loss
    if log_probs.dim() != 3 or targets.dim() != 2:
        return NotImplemented
    device = log_probs.device
    steps, batch, _ = log_probs.shape
    frames, labels = (torch.as_tensor(n, device=device).long() for n in (input_lengths, target_lengths))
    # Blanks around every label: state 2s + 1 is label s.
    blanks = torch.full_like(targets, blank)
    states = torch.cat([torch.stack([blanks, targets], -1).flatten(1), blanks[:, :1]], 1).long()
    count = states.shape[1]
    at = torch.arange(count, device=device)
    skips = torch.cat([torch.zeros_like(states[:, :2], dtype=torch.bool), states[:, 2:] != states[:, :-2]], 1)
    skips = skips & (at % 2 == 1)
    said = torch.gather(log_probs, 2, states.unsqueeze(0).expand(steps, batch, count))
    low = -1e30 if log_probs.dtype != torch.float16 else -6e4
    alpha = torch.where(at < 2, said[0], low)
    for step in range(1, steps):
        one = torch.nn.functional.pad(alpha[:, :-1], (1, 0), value=low)
        two = torch.where(skips, torch.nn.functional.pad(alpha[:, :-2], (2, 0), value=low), low)
        reached = torch.logsumexp(torch.stack([alpha, one, two]), 0) + said[step]
        alpha = torch.where((step < frames).unsqueeze(-1), reached.clamp(min=low), alpha)
    last = (2 * labels).unsqueeze(-1)
    ends = torch.where((at == last) | (at == last - 1), alpha, low)
    loss = -torch.logsumexp(ends, 1)
    impossible = loss > -low / 2
    loss = torch.where(impossible, 0.0 if zero_infinity else math.inf, loss)
    if reduction == "mean":
        return (loss / labels.clamp(min=1).to(loss.dtype)).mean()
    return _reduced(loss, reduction)


def pdist(input: torch.Tensor, p: float = 2.0) -> Any:
    """`F.pdist`: the distances of each row from those behind it."""
    apart = cdist(input, input, p)
    if apart is NotImplemented:
        return apart
    rows, columns = torch.triu_indices(len(input), len(input), 1, device=input.device)
    return apart.reshape(-1).index_select(0, rows * len(input) + columns)


def histc(input: torch.Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Any:
    """`torch.histc` between given bounds, as mixtures of experts count their tokens."""
    if min >= max:
        return NotImplemented
    wide = input.reshape(-1).to(torch.promote_types(input.dtype, torch.float32))
    place = ((wide - min) * bins / (max - min)).floor()
    place = torch.where(wide == max, bins - 1, place)
    own = place.unsqueeze(1) == torch.arange(bins, device=input.device)
    return own.sum(0, dtype=input.dtype)
