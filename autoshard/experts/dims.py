"""The dims of the experts' operands and results, by letter, and which of them devices may share.

Letters: `t` token, `k` choice, `e` expert, `g` gate or not, `f` hidden feature, `m` and `d` features of tokens and of
weights. Devices that share tokens make partial sums of the weights' gradients; those that share experts or hidden
features, of tokens' results.
"""

from __future__ import annotations

from collections.abc import Sequence

from autoshard.experts.form import FORWARD
from autoshard.regions.dims import RegionDims, Shape, sizes_of

X, IDS, UP = 0, 1, 3
"""Operands; the shardings of `X` and `UP` say how tokens, and experts and hidden features, are split."""


def experts_dims(kind: str, operands: Sequence[Shape]) -> RegionDims:
    """Of an op of this kind with operands of these shapes.

    Raises:
        ValueError: the operands are not those of such an op.
    """
    weights = ["egfd", "edf", *(["egf"] if biased(kind, len(operands)) else [])]
    reads, makes, scatters = ["tm", "tk", "tk", *weights], ["tm"], ["t"]
    if kind != FORWARD:
        makes = ["tm", "tk", *weights]
        reads, scatters = [*reads, "tm"], ["t", "d", "e", "td", "te"]
    sizes = sizes_of(kind, reads, operands)
    if sizes["m"] != sizes["d"]:
        raise ValueError(f"{kind} of {sizes['m']} features with weights of {sizes['d']}: see autoshard/experts/form.py")
    return RegionDims(tuple(reads), tuple(makes), sizes, "tef", (X, UP), "e", tuple(scatters))


def biased(kind: str, operands: int) -> bool:
    """Whether an op with so many operands has a bias."""
    return operands == (6 if kind == FORWARD else 7)


def products(kind: str) -> tuple[int, int]:
    """(of `up` for each of its g, of `down`): products of all rows that an op computes."""
    return (1, 1) if kind == FORWARD else (3, 2)  # hidden features are computed again
