"""Tells rounding errors from faults in a step under a plan.

Some numbers are not computable in float32, split or not: a gradient with total cancellation, or one behind a ReLU at
zero. Their value depends on the order of sums, so on the machine as on the plan.

They are identified on one device, by the step in float64 (*exact*) and by a few *neighbours*: the step in float32 with
every op's result perturbed in its last bits at random (Monte Carlo arithmetic: Parker, UCLA 1997; Higham, *Accuracy and
Stability of Numerical Algorithms*, chapter 2.8), by about the error of a reordered sum of sixteen terms. A number is
rounding where the error on one device exceeds the tolerance; its error under the plan may then be `ROUNDING_SLACK`
times that of the worst run on one device.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

NEIGHBOURS = 8
"""Perturbed runs on one device."""
APART = {torch.float32: 2.0**-22, torch.float16: 2.0**-9, torch.bfloat16: 2.0**-6}
"""Largest relative perturbation of a result: four times the unit roundoff of its type."""
ROUNDING_SLACK = 10.0
"""Allowed error under the plan over that of the worst run on one device: XLA's CPU kernels sum sequentially, of which
the
error grows with the number of terms, PyTorch's pairwise."""

ZERO = 1e-12
"""A gradient below this fraction of the largest float64 gradient is zero in exact arithmetic, as for the bias of a
convolution before a batch norm. It is judged on the scale of the largest gradient."""

TensorKey = tuple[str, str]
Numbers = Mapping[TensorKey, torch.Tensor]
"""(`loss`, `gradients`, `parameters`, `outputs` or `buffers`; which one) -> the numbers of a run."""


def scales(expected: Numbers) -> dict[TensorKey, float]:
    """What errors are relative to: 1 for parameters, else the tensor's largest element (but see `ZERO`)."""
    largest = {key: largest_of(each, 1.0) for key, each in expected.items()}
    of_all = max((each for (kind, _), each in largest.items() if kind == "gradients"), default=0.0)
    return {
        key: 1.0 if key[0] == "parameters" else of_all if key[0] == "gradients" and each <= ZERO * of_all else each
        for key, each in largest.items()
    }


def beyond(
    found: Numbers, expected: Numbers, keys: Iterable[TensorKey], most: float, tolerance: float
) -> list[TensorKey]:
    """Those of `keys` with inexcusable errors: above `most` of their tensor's largest element.

    A gradient's error may be `tolerance` on the scale of the largest one: between two norms in a row a gradient depends
    on their epsilon alone, beyond float32's digits.
    """
    largest = {key: largest_of(each) for key, each in expected.items()}
    of_all = max((each for (kind, _), each in largest.items() if kind == "gradients"), default=0.0)
    cap = {key: max(most * each, tolerance * of_all if key[0] == "gradients" else 0.0) for key, each in largest.items()}
    return [key for key in keys if apart(found[key], expected[key]) > cap[key]]


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """In float64, complex numbers by their two parts."""
    return torch.view_as_real(tensor.to(torch.complex128)) if tensor.is_complex() else tensor.double()


def largest_of(tensor: torch.Tensor, empty: float = 0.0) -> float:
    """The largest finite element; `empty` where there is none."""
    finite = widened(tensor[tensor.isfinite()])
    return float(finite.abs().max()) if finite.numel() else empty


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference; NaN and infinities differ from all but themselves."""
    if not b.numel():
        return 0.0
    a, b = widened(a), widened(b)
    same = (a == b) | (a.isnan() & b.isnan())
    found = float(torch.where(same, 0.0, (a - b).abs()).max())
    return math.inf if math.isnan(found) else found


def off(found: Numbers, expected: Numbers, tolerance: float) -> list[TensorKey]:
    """Those whose error exceeds the tolerance."""
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
    """Those of `keys` that are explained by rounding.

    Args:
        keys: result of `off`.
        found: under the plan.
        expected: on one device.
        exact: in float64, or None where unavailable: then `expected` stands in.
        neighbours: consumed one by one, until all are explained.
        tolerance: relative (see `scales`).

    Returns:
        Key -> error under the plan over the worst error on one device.
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
    """In this mode every rounded result is perturbed in its last bits, by a random stream per `number`."""

    def __init__(self, number: int) -> None:
        """`number` is a seed."""
        super().__init__()
        self._generator = torch.Generator().manual_seed(number)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the op, and perturb its results."""
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
"""Words in names of ops that return elements unchanged: equal ones stay equal, and order is kept."""


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
    """The name in messages."""
    kind, name = key
    if kind == "loss":
        return f"the loss of step {name}"
    return f"{name} after the last step" if kind in ("parameters", "buffers") else name
