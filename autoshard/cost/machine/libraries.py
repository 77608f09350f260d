"""Seconds of attention by the libraries that PyTorch calls, as their authors measured them.

FlashAttention-2 and cuDNN on an H100 SXM5: arXiv:2407.08608, figures 5 and 6. On an A100 SXM4, and the first
FlashAttention in Triton: arXiv:2307.08691, figure 4 (c) and section 4.1. Head sizes and masks that a figure lacks
follow by the ratios of the others; other devices take the model of `measured.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from autoshard.attention.form import FORWARD, Form
from autoshard.attention.form import KINDS as ATTENTIONS
from autoshard.cost.machine.device import Device
from autoshard.cost.machine.measured import matrix_seconds
from autoshard.graph.ops import Op

Attention = Literal["flash", "cudnn", "triton"]
Library = Callable[[Op, Sequence[Sequence[int]], float, str, Device], float]
"""(op, local operand shapes, FLOP, dtype, device) -> seconds without launch, as `matrix_seconds`."""
Rates = npt.NDArray[np.float64]
SHORTEST = 9
"""Logarithm of the first of the lengths 512, 1k … 16k that rates are of."""
LARGEST = 64
"""Features of the smaller of the two head sizes."""
SLOWER: Mapping[str, tuple[float, float]] = {"triton": (1.4, 2.0)}
"""How many times longer than FlashAttention-2 it takes, forward (1.3 to 1.5) and backward."""
HOPPER = {
    ("flash", 64): ((180, 229, 262, 284, 295, 299), (282, 306, 318, 321, 322, 324), (198, 238, 264, 279, 287, 291)),
    ("flash", 128): ((191, 260, 298, 319, 333, 335), (309, 350, 362, 368, 370, 370), (214, 260, 291, 310, 318, 322)),
    ("cudnn", 64): ((225, 288, 334, 363, 379, 388), (335, 373, 395, 408, 412, 413), (266, 348, 395, 417, 432, 433)),
    ("cudnn", 128): ((315, 410, 484, 518, 529, 539), (497, 574, 617, 609, 600, 595), (305, 408, 465, 499, 518, 516)),
}
"""TFLOP/s by library and head size: causal, not causal, and backward, not causal."""
AMPERE: Mapping[str, tuple[int, ...]] = {
    "flash": (88, 119, 140, 156, 165, 171),
    "triton": (59, 75, 79, 76, 79, 67),
}
"""TFLOP/s of both passes together, causal, of head size 64."""


def library(attention: Attention) -> Library:
    """Seconds of products, and of attention as that library computes it."""

    def seconds(op: Op, shapes: Sequence[Sequence[int]], flops: float, dtype: str, device: Device) -> float:
        if op.kind not in ATTENTIONS or not shapes or "16" not in dtype:
            return matrix_seconds(op, shapes, flops, dtype, device)
        large, causal = shapes[0][-1] > LARGEST, Form.of(op.attrs).causal
        forward, backward = _rates(attention, 128 if large else 64, causal)
        if device.compute_capability == 8.0 and attention in AMPERE:
            one, other = _rates(attention, 64, True)
            slower = np.array(AMPERE[attention]) * (1 / one + 2.5 / other) / 3.5
            forward, backward = forward * slower, backward * slower
        elif device.compute_capability != 9.0:
            return matrix_seconds(op, shapes, flops, dtype, device)
        rates = forward if op.kind == FORWARD else backward
        length = math.log2(max(1, shapes[1][-2])) - SHORTEST
        return flops / (1e12 * float(np.interp(length, range(len(rates)), rates)))

    return seconds


def _rates(attention: str, size: int, causal: bool) -> tuple[Rates, Rates]:
    """TFLOP/s on an H100, forward and backward."""
    masked, full, backward = (np.array(each, float) for each in HOPPER.get((attention, size)) or HOPPER["flash", size])
    first, second = SLOWER.get(attention, (1.0, 1.0))
    share = masked / full if causal else np.ones(len(full))
    return full * share / first, backward * share / second
