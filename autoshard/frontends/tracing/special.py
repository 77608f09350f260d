"""Special functions that torch_xla computes on the CPU, in ops that it lowers; for `decompositions.py`."""

from __future__ import annotations

import math

import torch

LANCZOS = 7.0
LANCZOS_OF = (
    0.99999999999980993227684700473478,
    676.520368121885098567009190444019,
    -1259.13921672240287047156078755283,
    771.3234287776530788486528258894,
    -176.61502916214059906584551354,
    12.507343278686904814458936853,
    -0.13857109526572011689554707,
    9.984369578019570859563e-6,
    1.50563273514931155834e-7,
)
"""Lanczos' approximation of the gamma function, g = 7, nine terms (Godfrey 2001): 15 digits."""

BERNOULLI = (1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66, -691 / 2730, 7 / 6)
"""B2, B4, ..., B14."""

TERMS_OF_ZETA = 10
"""Terms of the zeta function that are added up before the rest is taken from Euler and Maclaurin's formula."""


def lgamma(x: torch.Tensor) -> torch.Tensor:
    """`torch.lgamma`, by reflection below 1/2; infinite at 0, -1, -2, ..."""
    low = x < 0.5
    z = torch.where(low, -x, x - 1)
    total, _ = _lanczos(z)
    log_t = math.log(LANCZOS + 0.5) + torch.log1p(z / (LANCZOS + 0.5))
    t = z + (LANCZOS + 0.5)
    value = (z + 0.5 - t / log_t) * log_t + math.log(2 * math.pi) / 2 + total.log()
    part = x.abs() - x.abs().floor()
    sine = torch.sin(math.pi * torch.where(part > 0.5, 1 - part, part))
    below = math.log(math.pi) - torch.where(sine > 0, sine.log(), -math.inf) - value
    found = torch.where(low, below, value)
    return torch.where(x.isinf(), math.inf, found)


def digamma(x: torch.Tensor) -> torch.Tensor:
    """`torch.digamma`: the derivative of `lgamma`; NaN at -1, -2, ..., infinite at 0."""
    low = x < 0.5
    z = torch.where(low, -x, x - 1)
    total, slope = _lanczos(z)
    t = z + (LANCZOS + 0.5)
    log_t = math.log(LANCZOS + 0.5) + torch.log1p(z / (LANCZOS + 0.5))
    value = log_t + slope / total - LANCZOS / t
    part = x - x.round()
    below = value - math.pi * torch.cos(math.pi * part) / torch.sin(math.pi * part)
    found = torch.where(low, below, value)
    pole = (x < 0) & (x == x.floor())
    return torch.where(pole, math.nan, torch.where(x == 0, -1 / x, found))


def _lanczos(z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of Lanczos' series at z >= -1/2, and its derivative."""
    total, slope = torch.full_like(z, LANCZOS_OF[0]), torch.zeros_like(z)
    for k, each in enumerate(LANCZOS_OF[1:], 1):
        share = each / (z + k)
        total, slope = total + share, slope - share / (z + k)
    return total, slope


def polygamma(n: int, x: torch.Tensor) -> torch.Tensor:
    """`torch.polygamma` of order n: the n-th derivative of `digamma`; of negative numbers for n up to 1, else NaN."""
    if n == 0:
        return digamma(x)
    if n == 1:
        low = x < 0.5
        value = _zeta(2, torch.where(low, 1 - x, x))
        sine = torch.sin(math.pi * (x - x.round()))
        return torch.where(low, (math.pi / sine).square() - value, value)
    found = (-1) ** (n + 1) * math.factorial(n) * _zeta(n + 1, x.clamp(min=0))
    return torch.where(x < 0, math.nan, found)


def _zeta(s: int, x: torch.Tensor) -> torch.Tensor:
    """Hurwitz' zeta function of x >= 0, by Euler and Maclaurin's formula."""
    total = torch.zeros_like(x)
    for k in range(TERMS_OF_ZETA):
        total = total + (x + k) ** -s
    a = x + TERMS_OF_ZETA
    total = total + a ** (1 - s) / (s - 1) + a**-s / 2
    rising = float(s)
    for j, number in enumerate(BERNOULLI, 1):
        total = total + number / math.factorial(2 * j) * rising * a ** (1 - s - 2 * j)
        rising *= (s + 2 * j - 1) * (s + 2 * j)
    return total


def hypot(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """`torch.hypot`, without squares that overflow."""
    x, y = x.abs(), y.abs()
    large, small = torch.maximum(x, y), torch.minimum(x, y)
    share = torch.where(large == 0, 0.0, small / large)
    return torch.where(large.isinf(), math.inf, large * (1 + share * share).sqrt())


def signbit(x: torch.Tensor) -> torch.Tensor:
    """`torch.signbit`, true for -0 too."""
    return (x < 0) | ((x == 0) & (1 / x < 0)) if x.is_floating_point() else x < 0


def copysign(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """`torch.copysign` of floats."""
    return torch.where(signbit(y), -x.abs(), x.abs())


def exp2(x: torch.Tensor) -> torch.Tensor:
    """`torch.exp2`."""
    return torch.exp(x * math.log(2))
