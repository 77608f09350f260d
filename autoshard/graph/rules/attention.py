"""Rules of attention kept as one op (`autoshard/attention/`)."""

from __future__ import annotations

from autoshard.attention.dims import BLOCK, SPLIT, AttentionDims
from autoshard.attention.form import FORWARD, GRADIENT, Form
from autoshard.graph.ops import Rule
from autoshard.graph.rules.base import Dim, Factors, Signature, rule


@rule(FORWARD)
def attention(op: Signature) -> Rule | None:
    """Batch, heads of keys, query heads of one of them, and queries."""
    return _rule(FORWARD, op)


@rule(GRADIENT)
def attention_grad(op: Signature) -> Rule | None:
    """The same; gradients of keys and values are partial sums over the queries that read them."""
    return _rule(GRADIENT, op)


def _rule(kind: str, op: Signature) -> Rule:
    form = Form.of(op.attrs)
    dims = AttentionDims.of(kind, form, op.operands)
    masks_rows = form.causal or form.window is not None
    factors = Factors()
    summed = "" if kind == FORWARD else dims.summed(1)
    found: dict[str, Dim] = {" ": ()}
    for letters, shape in zip((*dims.operands, *dims.results), (*op.operands, *op.results), strict=True):
        for letter, size in zip(letters, shape, strict=True):
            if letter not in found:
                kept = "parallel" if letter in SPLIT else "replicated"
                in_blocks = letter == "s" and size % BLOCK == 0
                if letter == "s" and masks_rows and not in_blocks:
                    kept = "replicated"
                reduces = ("reduce", "add") if letter in summed and kept == "parallel" else (kept, None)
                found[letter] = factors.new(size // BLOCK if in_blocks else size, *reduces, even=True)
                found[letter] += factors.new(BLOCK, "replicated") if in_blocks else ()
    operands, results = (
        [[found[letter] for letter in letters] for letters in side] for side in (dims.operands, dims.results)
    )
    return factors.rule(operands, results)
