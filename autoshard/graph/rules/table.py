"""One sharding rule per op kind (see `Rule`), and `rule_for`, which finds an op's.

A rule says what the op computes when its operands are split; whether the partitioner does so, and at what cost, is for
`cost/`. A new op is one function under `@rule`, in the file of its family:

- here: elementwise, matrix products, reductions, normalisations, random numbers, linear algebra;
- `shape.py`: ops that only move elements (reshape, broadcast, slice, concatenate…);
- `index.py`: gather, scatter, sort;
- `window.py`: convolution and other sliding windows;
- `body.py`: loops and branches, from the ops inside;
- `regions.py`: attention, and a mixture's experts, kept as one op;
- `custom.py`: custom calls, by target; users add theirs with `autoshard.register_rule`.

The kinds follow GSPMD (Xu et al. 2021, arXiv:2105.04663, section 4) if it can run the op on shards.
"""

from __future__ import annotations

from autoshard.graph.ops import Rule
from autoshard.graph.rules import body as rules_body
from autoshard.graph.rules import custom as rules_custom
from autoshard.graph.rules import index as rules_index
from autoshard.graph.rules import regions as rules_regions
from autoshard.graph.rules import shape as rules_shape
from autoshard.graph.rules import window as rules_window
from autoshard.graph.rules.base import (
    Dim,
    Factors,
    Signature,
    gathered,
    has_rule,
    rule,
    rule_for,
)

__all__ = [
    "has_rule",
    "rule",
    "rule_for",
    "rules_body",
    "rules_custom",
    "rules_index",
    "rules_regions",
    "rules_shape",
    "rules_window",
]


# ---- elementwise ---------------------------------------------------------------------------------------------------


@rule(
    *("abs", "add", "and", "atan2", "bitcast_convert", "cbrt", "ceil", "clamp", "compare", "complex", "convert"),
    *("cosine", "count_leading_zeros", "divide", "exponential", "exponential_minus_one", "floor", "imag", "is_finite"),
    *("log", "log_plus_one", "logistic", "map", "maximum", "minimum", "multiply", "negate", "not", "or", "popcnt"),
    *("power", "real", "reduce_precision", "remainder", "round_nearest_afz", "round_nearest_even", "rsqrt", "select"),
    *("shift_left", "shift_right_arithmetic", "shift_right_logical", "sign", "sine", "sqrt", "subtract", "tan", "tanh"),
    *("xor", "uniform_quantize", "uniform_dequantize"),
    # chlo and mhlo
    *("acos", "acosh", "asin", "asinh", "atan", "atanh", "bessel_i1e", "conj", "constant_like", "cosh", "digamma"),
    *("erf", "erf_inv", "erfc", "is_inf", "is_neg_inf", "is_pos_inf", "lgamma", "next_after", "polygamma", "sinh"),
    *("square", "zeta", "copy"),
)
def elementwise(op: Signature) -> Rule | None:
    """One parallel factor per dim. Scalar operands (of clamp and select) have no dims to split."""
    (shape,) = op.results
    factors = Factors()
    dims = factors.dims(shape)
    if any(operand not in (shape, ()) for operand in op.operands):
        return None  # bitcast_convert between widths, chlo's implicit broadcasts
    return factors.rule([dims if operand else [] for operand in op.operands], [dims])


@rule("optimization_barrier")
def optimization_barrier(op: Signature) -> Rule:
    """Result i is operand i."""
    factors = Factors()
    dims = [factors.dims(shape) for shape in op.operands]
    return factors.rule(dims, dims)


@rule("argument", "constant", "iota", "partition_id", "replica_id", "create_token")
def source(op: Signature) -> Rule:
    """Free in every sharding: each device produces (or holds) its shard."""
    factors = Factors()
    return factors.rule([], [factors.dims(shape) for shape in op.results])


# ---- products and sums ---------------------------------------------------------------------------------------------


@rule("dot_general")
def dot_general(op: Signature) -> Rule:
    """Batch, m and n are parallel; k is reduced."""
    lhs_shape, rhs_shape = op.operands
    factors = Factors()
    lhs: dict[int, Dim] = {}
    rhs: dict[int, Dim] = {}
    result: list[Dim] = []
    for left, right in zip(op.attrs["lhs_batch"], op.attrs["rhs_batch"], strict=True):
        lhs[left] = rhs[right] = factors.new(lhs_shape[left])
        result.append(lhs[left])
    for left, right in zip(op.attrs["lhs_contract"], op.attrs["rhs_contract"], strict=True):
        lhs[left] = rhs[right] = factors.new(lhs_shape[left], "reduce", "add")
    for dims, shape in ((lhs, lhs_shape), (rhs, rhs_shape)):
        for dim, size in enumerate(shape):
            if dim not in dims:
                dims[dim] = factors.new(size)
                result.append(dims[dim])
    return factors.rule([_in_order(lhs), _in_order(rhs)], [result])


def _in_order(dims: dict[int, Dim]) -> list[Dim]:
    return [dims[i] for i in range(len(dims))]


@rule("reduce")
def reduce(op: Signature) -> Rule:
    """Reduced dims are reduced by the region's reducer.

    For other regions (argmax and variadic ones) each device's candidates are gathered (reducer `gather`).
    """
    count = len(op.operands) // 2
    reducer = op.attrs["reducer"]
    factors = Factors()
    dims = [
        factors.new(size, "reduce", "gather" if reducer == "other" else reducer)
        if dim in op.attrs["dims"]
        else factors.new(size)
        for dim, size in enumerate(op.operands[0])
    ]
    kept = [factor for dim, factor in enumerate(dims) if dim not in op.attrs["dims"]]
    scalars: list[list[Dim]] = [[] for _ in range(count)]
    return factors.rule([dims] * count + scalars, [kept] * count)


# ---- normalisation -------------------------------------------------------------------------------------------------


@rule("batch_norm_training", "batch_norm_inference", "batch_norm_grad")
def batch_norm(op: Signature) -> Rule:
    """Replicated: GSPMD cannot run these on shards, and gathers all operands (measured).

    The capture switch `norm` writes batch norms as means and `rsqrt` instead.
    """
    return gathered(op)


# ---- random numbers ------------------------------------------------------------------------------------------------


@rule("rng_bit_generator")
def rng_bit_generator(op: Signature) -> Rule:
    """Every device computes the whole and slices it for free (measured), so any result sharding will do."""
    (state,) = op.operands
    new_state, bits = op.results
    factors = Factors()
    dims = factors.dims(bits)
    return factors.rule([factors.dims(state, "replicated")], [factors.dims(new_state, "replicated"), dims])


@rule("rng")
def rng(op: Signature) -> Rule:
    """As `rng_bit_generator`; the operands are two scalars and a shape."""
    factors = Factors()
    dims = factors.dims(op.results[0])
    return factors.rule([factors.dims(shape, "replicated") for shape in op.operands], [dims])


# ---- linear algebra: gathered by every partitioner (measured) --------------------------------------------------------


@rule("cholesky", "triangular_solve", "fft")
def linear_algebra(op: Signature) -> Rule:
    """Replicated: no partitioner splits these, not even along batch dims."""
    return gathered(op)
