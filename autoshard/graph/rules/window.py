"""Rules of sliding windows: convolution, pooling and its gradient.

Along a windowed dim a device needs its neighbours' halos: a `halo` factor. A window that covers most of the dim (a
cumulative sum, the weight gradient of a convolution) needs all of it: `replicated`. The solver splits neither;
`strategies/guard.py` has a reason.
"""

from __future__ import annotations

from autoshard.graph.ops import FactorKind, Rule
from autoshard.graph.rules.base import Dim, Factors, Shape, Signature, gathered, rule


def window_kind(extent: int, window: int, dilation: int, plain: bool) -> FactorKind:
    """The effect of a split of a dim of `extent` under a window of `window` elements, `dilation` apart.

    Args:
        extent: of the operand's dim.
        window: elements of the window.
        dilation: distance between them.
        plain: whether no stride, padding or base dilation moves elements.
    """
    reach = (window - 1) * dilation + 1
    if reach == 1 and plain:
        return "parallel"
    return "halo" if 2 * reach <= extent else "replicated"


def _windowed(factors: Factors, operand: int, result: int, kind: FactorKind) -> tuple[Dim, Dim]:
    """The dim on both sides: one factor (of the operand's extent), or a replicated one for each."""
    if kind == "replicated" or 1 in (operand, result):
        return factors.new(operand, "replicated"), factors.new(result, "replicated")
    shared = factors.new(operand, kind)
    return shared, shared


@rule("reduce_window")
def reduce_window(op: Signature) -> Rule:
    """Dims with a window of one are parallel."""
    count = len(op.operands) // 2
    factors = Factors()
    before: list[Dim] = []
    after: list[Dim] = []
    for dim, (extent, window) in enumerate(zip(op.operands[0], op.attrs["window"], strict=True)):
        plain = extent == op.results[0][dim] and not any(op.attrs["padding"][dim])
        kind = window_kind(extent, window, op.attrs["window_dilation"][dim], plain)
        source, result = _windowed(factors, extent, op.results[0][dim], kind)
        before.append(source)
        after.append(result)
    scalars: list[list[Dim]] = [[] for _ in range(count)]
    return factors.rule([before] * count + scalars, [after] * count)


@rule("select_and_scatter")
def select_and_scatter(op: Signature) -> Rule:
    """The gradient of max pooling: operand and result have one shape, the source that of the pooled tensor."""
    operand, source, _ = op.operands
    factors = Factors()
    whole: list[Dim] = []
    pooled: list[Dim] = []
    for dim, (extent, window) in enumerate(zip(operand, op.attrs["window"], strict=True)):
        plain = extent == source[dim] and not any(op.attrs["padding"][dim])
        big, small = _windowed(factors, extent, source[dim], window_kind(extent, window, 1, plain))
        whole.append(big)
        pooled.append(small)
    return factors.rule([whole, pooled, []], [whole])


@rule("convolution")
def convolution(op: Signature) -> Rule:
    """Batch and out features are parallel, in features reduce, feature (or batch) groups are parallel, spatial dims
    exchange halos; the kernel is replicated along its spatial dims.

    With feature groups of several features each, GSPMD gathers everything (measured), so nothing may be split.
    """
    lhs_shape, rhs_shape = op.operands
    (out_shape,) = op.results
    attrs = op.attrs
    groups, batch_groups = attrs["feature_groups"], attrs["batch_groups"]
    lhs_batch, lhs_feature, *lhs_spatial = attrs["lhs"]
    rhs_out, rhs_in, *rhs_spatial = attrs["rhs"]
    out_batch, out_feature, *out_spatial = attrs["out"]
    factors = Factors()
    if groups > 1 and rhs_shape[rhs_in] > 1:
        return gathered(op)
    lhs: dict[int, Dim] = {}
    rhs: dict[int, Dim] = {}
    out: dict[int, Dim] = {}

    # Dims merged with a group index are (group, rest), the group major. One of the two counts is 1.
    group = factors.new(groups)
    batch_group = factors.new(batch_groups)
    batch = factors.new(out_shape[out_batch])
    lhs[lhs_batch], out[out_batch] = batch_group + batch, batch
    contracted = factors.new(rhs_shape[rhs_in], "reduce", "add")
    lhs[lhs_feature], rhs[rhs_in] = group + contracted, contracted
    rest = factors.new(rhs_shape[rhs_out] // (groups * batch_groups))
    rhs[rhs_out] = out[out_feature] = group + batch_group + rest

    for i, (source, kernel, result) in enumerate(zip(lhs_spatial, rhs_spatial, out_spatial, strict=True)):
        extent, produced, taps = lhs_shape[source], out_shape[result], rhs_shape[kernel]
        plain = extent == produced and not any(attrs["padding"][i])
        kind = window_kind(extent * attrs["lhs_dilation"][i], taps, attrs["rhs_dilation"][i], plain)
        lhs[source], out[result] = _windowed(factors, extent, produced, kind)
        rhs[kernel] = factors.new(taps, "replicated")
    return factors.rule([_in_order(lhs, lhs_shape), _in_order(rhs, rhs_shape)], [_in_order(out, out_shape)])


def _in_order(dims: dict[int, Dim], shape: Shape) -> list[Dim]:
    return [dims[i] for i in range(len(shape))]
