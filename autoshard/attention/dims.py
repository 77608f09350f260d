"""The dims of an attention's operands and results, by letter, and which of them devices may share.

Letters: `b` batch, `k` head of keys, `g` query head within its group, `s` query, `t` key, `d` and `e` features of keys
and values. Batch and heads are independent; queries are too (context parallelism), each device reading all keys; their
gradients of keys and values are then partial sums, as those of heads that share keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autoshard.attention.form import FORWARD, Form

Shape = Sequence[int]
SPLIT = "bkgs"
"""The dims that devices may share, none of them unevenly."""
BLOCK = 128
"""Queries that stay on one device where a mask depends on their position: a TPU's kernel has no part of fewer."""
_MASKS = ("bkgst", "bs", "bt")


@dataclass(frozen=True)
class AttentionDims:
    """Letters per dim; a space for a dim of size 1 that is broadcast.

    Attributes:
        operands, results: one text per tensor.
    """

    operands: tuple[str, ...]
    results: tuple[str, ...]

    @classmethod
    def of(cls, kind: str, form: Form, operands: Sequence[Shape]) -> AttentionDims:
        """Of an op of this kind and form with operands of these shapes.

        Raises:
            ValueError: the operands are not those of such an op.
        """
        masks = [_MASKS[0]] * form.bias + [*_MASKS[1:]] * form.segments
        reads = ["bkgsd", "bktd", "bkte", *masks]
        makes = ["bkgse", "bkgs"]
        if kind != FORWARD:
            reads, makes = [*reads, *makes, "bkgse"], ["bkgsd", "bktd", "bkte"]
        found: dict[str, int] = {}
        named = []
        if len(reads) != len(operands):
            raise ValueError(f"an {kind} with {len(operands)} operands: {len(reads)} are needed")
        for place, (letters, shape) in enumerate(zip(reads, operands, strict=True)):
            spread = form.bias and place == 3
            if len(letters) != len(shape) or any(
                found.setdefault(letter, size) != size
                for letter, size in zip(letters, shape, strict=True)
                if not (spread and size == 1)
            ):
                raise ValueError(
                    f"operand {place} of an {kind} has shape {tuple(shape)}: see autoshard/attention/form.py"
                )
            named.append("".join(" " if spread and n == 1 else c for c, n in zip(letters, shape, strict=True)))
        return cls(tuple(named), tuple(makes))

    def summed(self, result: int) -> str:
        """The split dims over which this result is a partial sum."""
        return "".join(letter for letter in SPLIT if letter not in self.results[result])
