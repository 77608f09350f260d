"""The dims of an attention's operands and results, by letter, and which of them devices may share.

Letters: `b` batch, `k` head of keys, `g` query head within its group, `s` query, `t` key, `d` and `e` features of keys
and values. Batch and heads are independent; queries are too (context parallelism), each device reading all keys; their
gradients of keys and values are then partial sums, as those of heads that share keys.
"""

from __future__ import annotations

from collections.abc import Sequence

from autoshard.attention.form import FORWARD, Form
from autoshard.regions.dims import RegionDims, Shape, sizes_of

SPLIT = "bkgs"
"""The dims that devices may share, none of them unevenly."""
BLOCK = 128
"""Queries that stay on one device where a mask depends on their position: a TPU's kernel has no part of fewer."""
_MASKS = ("bkgst", "bs", "bt")


def attention_dims(kind: str, form: Form, operands: Sequence[Shape]) -> RegionDims:
    """Of an op of this kind and form with operands of these shapes.

    Raises:
        ValueError: the operands are not those of such an op.
    """
    masks = [_MASKS[0]] * form.bias + [*_MASKS[1:]] * form.segments
    reads = ["bkgsd", "bktd", "bkte", *masks]
    makes = ["bkgse", "bkgs"]
    if kind != FORWARD:
        reads, makes = [*reads, *makes, "bkgse"], ["bkgsd", "bktd", "bkte"]
    spread = (3,) if form.bias else ()
    sizes = sizes_of(kind, reads, operands, spread)
    for place in spread:
        reads[place] = "".join(" " if n == 1 else c for c, n in zip(reads[place], operands[place], strict=True))
    return RegionDims(tuple(reads), tuple(makes), sizes, SPLIT, extras="s", scatters=("t",))
