"""Rules of ops that are lowered as manual regions: attention and a mixture's experts (`autoshard/fused.py`)."""

from __future__ import annotations

from autoshard.attention.dims import BLOCK
from autoshard.attention.form import FORWARD, GRADIENT
from autoshard.experts.form import FORWARD as EXPERTS
from autoshard.experts.form import GRADIENT as EXPERTS_GRADIENT
from autoshard.fused import dims_of_attrs
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


@rule(EXPERTS)
def experts(op: Signature) -> Rule | None:
    """Tokens, experts and hidden features; over the last two the result is a partial sum."""
    return _rule(EXPERTS, op)


@rule(EXPERTS_GRADIENT)
def experts_grad(op: Signature) -> Rule | None:
    """The same; gradients of weights are partial sums over tokens."""
    return _rule(EXPERTS_GRADIENT, op)


def _rule(kind: str, op: Signature) -> Rule:
    dims = dims_of_attrs(kind, op.attrs, op.operands)
    masks_rows = bool(op.attrs.get("causal")) or op.attrs.get("window") is not None
    queries = "s" if "causal" in op.attrs else ""
    factors = Factors()
    partial = {letter for place in range(len(dims.results)) for letter in dims.summed(place)}
    found: dict[str, Dim] = {" ": ()}
    for letters, shape in zip((*dims.operands, *dims.results), (*op.operands, *op.results), strict=True):
        for letter, size in zip(letters, shape, strict=True):
            if letter not in found:
                kept = "parallel" if letter in dims.shared else "replicated"
                in_blocks = letter == queries and size % BLOCK == 0
                if letter == queries and masks_rows and not in_blocks:
                    kept = "replicated"
                reduces = ("reduce", "add") if letter in partial and kept == "parallel" else (kept, None)
                found[letter] = factors.new(size // BLOCK if in_blocks else size, *reduces, even=True)
                found[letter] += factors.new(BLOCK, "replicated") if in_blocks else ()
    operands, results = (
        [[found[letter] for letter in letters] for letters in side] for side in (dims.operands, dims.results)
    )
    return factors.rule(operands, results)
