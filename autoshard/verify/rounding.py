"""Which numbers of a step are rounding: what one device itself does not compute to the tolerance.

Some numbers cannot be computed in float32, split or not: a gradient of which nearly all cancels, or one behind a ReLU
whose input is zero to all digits but the last, where either side is right. On which side a step falls depends on the
order of its sums, and so on the machine as on the plan.

Such a number is told on one device alone, by the same step in float64 (the *exact* numbers), and by a few *neighbours*:
the same step in float32 in which the result of every op is off in its last bits, at random (Monte Carlo arithmetic:
Parker, *Monte Carlo Arithmetic*, UCLA 1997; Higham, *Accuracy and Stability of Numerical Algorithms*, chapter 2.8), by
no more than some sixteen terms are when they are added up in another order. A number is rounding where one device is
off from the exact one by more than the tolerance. Then that is what it is judged by: under the plan it may be off by
`ROUNDING_SLACK` times as much as the worst run on one device, and by no more.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

NEIGHBOURS = 8
"""Runs on one device with results that are off in their last bits."""
APART = {torch.float32: 2.0**-22, torch.float16: 2.0**-9, torch.bfloat16: 2.0**-6}
"""By how much a result is off at most, relative: four times the unit roundoff of its type."""
ROUNDING_SLACK = 10.0
"""How much further than the worst run on one device a number under the plan may be from the exact one: XLA's CPU
kernels add up one by one, of which the error grows with the number of terms, and PyTorch's by halves."""

ZERO = 1e-12
"""Below this part of the largest of all gradients a gradient of the float64 run is zero in exact arithmetic, as is the
bias of a convolution before a batch norm. It is judged on the scale of the largest gradient."""

TensorKey = tuple[str, str]
Numbers = Mapping[TensorKey, torch.Tensor]
"""(`loss`, `gradients`, `parameters`, `outputs` or `buffers`; which one) -> the numbers of a run."""


def scales(expected: Numbers) -> dict[TensorKey, float]:
    """What differences are relative to: parameters to 1, all else to the tensor's largest element (but see `ZERO`)."""
    largest = {key: float(each.double().abs().max()) if each.numel() else 1.0 for key, each in expected.items()}
    of_all = max((each for (kind, _), each in largest.items() if kind == "gradients"), default=0.0)
    return {
        key: 1.0 if key[0] == "parameters" else of_all if key[0] == "gradients" and each <= ZERO * of_all else each
        for key, each in largest.items()
    }


def beyond(
    found: Numbers, expected: Numbers, keys: Iterable[TensorKey], most: float, tolerance: float
) -> list[TensorKey]:
    """Those of `keys` that are off by more than can be excused: `most` of their tensor's largest element.

    A gradient may be as far off as rounding is on the scale of the largest one (`tolerance`): behind two norms in a row
    a gradient follows from their epsilon alone, and no float32 program has its digits.
    """
    largest = {key: float(each.double().abs().max()) if each.numel() else 0.0 for key, each in expected.items()}
    of_all = max((each for (kind, _), each in largest.items() if kind == "gradients"), default=0.0)
    cap = {key: max(most * each, tolerance * of_all if key[0] == "gradients" else 0.0) for key, each in largest.items()}
    return [key for key in keys if apart(found[key], expected[key]) > cap[key]]


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference; infinite where it is none."""
    found = float((a.double() - b.double()).abs().max()) if b.numel() else 0.0
    return math.inf if math.isnan(found) else found


def off(found: Numbers, expected: Numbers, tolerance: float) -> list[TensorKey]:
    """Those that differ by more than the tolerance."""
    scale = scales(expected)
    return [key for key in expected if key in found and apart(found[key], expected[key]) > tolerance * scale[key]]


def rounding(
    keys: Iterable[TensorKey],
    found: Numbers,
    expected: Numbers,
    exact: Numbers | None,
    neighbours: Iterable[Numbers],
    tolerance: float,
) -> dict[TensorKey, float]:
    """Those of `keys` that are rounding and nothing else.

    Args:
        keys: what `off` says.
        found: under the plan.
        expected: on one device.
        exact: in float64, or None where that cannot be had: then those on one device stand for them.
        neighbours: taken one by one, until there is nothing left to explain.
        tolerance: relative (see `scales`).

    Returns:
        Key -> how far the plan's are from the exact ones, as a part of how far one device's are at worst.
    """
    truth = expected if exact is None else exact
    left = [key for key in keys if key in truth]
    alone = {key: apart(expected[key], truth[key]) for key in left}
    excused: dict[TensorKey, float] = {}
    scale = scales(truth)

    def look() -> None:
        for key in list(left):
            planned, worst = apart(found[key], truth[key]), alone[key]
            if math.isfinite(worst) and worst > tolerance * scale[key] and planned <= ROUNDING_SLACK * worst:
                excused[key] = planned / worst
                left.remove(key)

    look()
    runs = iter(neighbours)
    while left and (run := next(runs, None)) is not None:
        for key in left:
            if key in run and math.isfinite(distance := apart(run[key], truth[key])):
                alone[key] = max(alone[key], distance)
        look()
    return excused


class LastBits(TorchDispatchMode):  # type: ignore[misc]
    """In this mode every result that is rounded is off in its last bits; differently for every `number`."""

    def __init__(self, number: int) -> None:
        """`number` is a seed."""
        super().__init__()
        self._generator = torch.Generator().manual_seed(number)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the op, and move what it made."""
        made = func(*args, **(kwargs or {}))
        if not func.is_view and _EXACT.isdisjoint(func.overloadpacket.__name__.split("_")):
            for each in tree_leaves(made):
                if isinstance(each, torch.Tensor) and each.dtype in APART and each.device.type == "cpu":
                    apart = APART[each.dtype]
                    off = torch.empty(each.shape).uniform_(1 - apart, 1 + apart, generator=self._generator)
                    each.mul_(off)
        return made


_AS_THEY_ARE = """
copy clone cat stack where relu relu6 hardtanh leaky clamp threshold max min amax amin pad flip roll gather scatter
index embedding masked fill zero zeros ones full empty tril triu neg abs sort topk select slice repeat detach lift set
resize
"""
_EXACT = frozenset(_AS_THEY_ARE.split())
"""Words in names of ops that hand numbers on as they are: equal ones stay equal, and what is larger stays larger."""


def wide(tree: Any) -> Any:
    """Floats as float64."""
    return tree_map(
        lambda leaf: leaf.double() if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf, tree
    )


def flat(
    losses: Iterable[float],
    gradients: Mapping[str, torch.Tensor],
    parameters: Mapping[str, torch.Tensor],
    outputs: Mapping[str, torch.Tensor],
    buffers: Mapping[str, torch.Tensor],
) -> dict[TensorKey, torch.Tensor]:
    """All numbers of a run, by kind and name."""
    return dict(
        _flat(losses, {"gradients": gradients, "parameters": parameters, "outputs": outputs, "buffers": buffers})
    )


def _flat(
    losses: Iterable[float], kinds: Mapping[str, Mapping[str, torch.Tensor]]
) -> Iterator[tuple[TensorKey, torch.Tensor]]:
    for step, loss in enumerate(losses, 1):
        yield ("loss", str(step)), torch.tensor(loss, dtype=torch.float64)
    for kind, tensors in kinds.items():
        for name, tensor in tensors.items():
            yield (kind, name), tensor


def said(key: TensorKey) -> str:
    """For a person."""
    kind, name = key
    if kind == "loss":
        return f"the loss of step {name}"
    return f"{name} after the last step" if kind in ("parameters", "buffers") else name
