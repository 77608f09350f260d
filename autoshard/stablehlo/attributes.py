"""Attributes of StableHLO ops as plain Python values.

`Op.attrs` by kind (a kind that is not named has none); every value is hashable, indices and extents are ints:

- argument: index
- dot_general: lhs_batch, rhs_batch, lhs_contract, rhs_contract
- reduce: dims, reducer (`add`, `max`, `min`, `mul`, `and`, `or`; `other` for anything else, argmax too)
- broadcast_in_dim: dims (the result dim of each operand dim)
- transpose: permutation; reverse: dims
- slice: start, limit, stride; pad: low, high, interior; dynamic_slice: sizes
- concatenate, iota, all_gather: dim
- sort: dim, descending (by the first operand alone; False for any other order)
- constant: value (int, float or bool of a splat, else None), counts (of the integers 0, 1, 2, ... alone: True)
- compare: direction (`EQ`, `NE`, `LT`, …)
- gather: offset_dims, collapsed_dims, operand_batch_dims, indices_batch_dims, start_index_map, index_vector_dim,
  slice_sizes, sorted, parallel ((operand dim, indices dim) pairs in which the indices count up: see `indexing.py`)
- scatter: window_dims, inserted_dims, operand_batch_dims, indices_batch_dims, scatter_dims, index_vector_dim,
  reducer (also `assign`), sorted, unique, parallel (as of gather)
- convolution: lhs (batch, feature, *spatial dims), rhs (out feature, in feature, *spatial), out (batch, feature,
  *spatial), stride, padding (pairs), lhs_dilation, rhs_dilation, reversal, feature_groups, batch_groups
- reduce_window: window, stride, base_dilation, window_dilation, padding (pairs), reducer
- select_and_scatter: window, stride, padding (pairs), reducer
- batch_norm_training, batch_norm_inference, batch_norm_grad: feature_dim, epsilon
- rng_bit_generator: algorithm; rng: distribution
- custom_call: target, config (its backend_config as text)
- top_k: k; fft: type, length; triangular_solve: left, lower, transpose; cholesky: lower
- while: trip_count (where the loop counts up to a constant, else None), bodies (condition and body: see `body.py`)
- case: bodies, branches (their number)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

NO_ATTRS: Mapping[str, Any] = {}  # shared by all ops that have none

_REDUCERS = {
    "stablehlo.add": "add",
    "stablehlo.maximum": "max",
    "stablehlo.minimum": "min",
    "stablehlo.multiply": "mul",
    "stablehlo.and": "and",
    "stablehlo.or": "or",
}


def read_attrs(kind: str, op: Any) -> Mapping[str, Any]:
    """`Op.attrs` of an MLIR operation of this kind."""
    reader = _ATTRS.get(kind)
    return reader(op) if reader else NO_ATTRS


def plain_dot(lhs_rank: int) -> dict[str, Any]:
    """`stablehlo.dot` (vector or matrix operands): the last dim of the left with the first of the right."""
    return {"lhs_batch": (), "rhs_batch": (), "lhs_contract": (lhs_rank - 1,), "rhs_contract": (0,)}


def _ints(op: Any, name: str, default: tuple[int, ...] = ()) -> tuple[int, ...]:
    return tuple(op.attributes[name]) if name in op.attributes else default


def _pairs(op: Any, name: str, rank: int) -> tuple[tuple[int, int], ...]:
    import numpy as np

    if name not in op.attributes:
        return ((0, 0),) * rank
    return tuple((int(low), int(high)) for low, high in np.asarray(op.attributes[name]).reshape(-1, 2))


def _reducers(region: Any) -> list[str]:
    """The reducer of each result of a reducer region.

    Conversions around the op are ignored (bf16 sums that accumulate in f32).
    """
    block = region.blocks[0]
    arguments = {argument: i for i, argument in enumerate(block.arguments)}
    half = len(arguments) // 2
    made: dict[Any, Any] = {}
    for view in block.operations:
        op = view.operation
        if op.name in ("stablehlo.return", "func.return"):
            return [_reducer(value, made, arguments, k, half) for k, value in enumerate(op.operands)]
        for result in op.results:
            made[result] = op
    return ["other"] * half


def _reducer(value: Any, made: dict[Any, Any], arguments: dict[Any, int], k: int, half: int) -> str:
    def through(v: Any) -> Any:
        while v in made and made[v].name == "stablehlo.convert":
            v = made[v].operands[0]
        return v

    value = through(value)
    if value in arguments:
        return "assign" if arguments[value] == half + k else "other"
    op = made.get(value)
    if op is None or op.name not in _REDUCERS:
        return "other"
    reads = {arguments.get(through(operand)) for operand in op.operands}
    return _REDUCERS[op.name] if reads == {k, half + k} else "other"


def _descends(comparator: Any) -> bool:
    """Whether the order is descending by the first operand alone."""
    block = comparator.blocks[0]
    operations = [view.operation for view in block.operations]
    compared, returned = operations[0], operations[-1]
    return (
        compared.name == "stablehlo.compare"
        and _name(compared, "comparison_direction") == "GT"
        and list(compared.operands) == [block.arguments[0], block.arguments[1]]
        and list(returned.operands) == list(compared.results)
    )


def _common_reducer(op: Any, region: int = 0) -> str:
    found = set(_reducers(op.regions[region]))
    return found.pop() if len(found) == 1 else "other"


def _dot_general(op: Any) -> dict[str, Any]:
    from jaxlib.mlir.dialects import stablehlo

    numbers = stablehlo.DotDimensionNumbers(op.attributes["dot_dimension_numbers"])
    return {
        "lhs_batch": tuple(numbers.lhs_batching_dimensions),
        "rhs_batch": tuple(numbers.rhs_batching_dimensions),
        "lhs_contract": tuple(numbers.lhs_contracting_dimensions),
        "rhs_contract": tuple(numbers.rhs_contracting_dimensions),
    }


def _gather(op: Any) -> dict[str, Any]:
    from jaxlib.mlir.dialects import stablehlo

    numbers = stablehlo.GatherDimensionNumbers(op.attributes["dimension_numbers"])
    return {
        "offset_dims": tuple(numbers.offset_dims),
        "collapsed_dims": tuple(numbers.collapsed_slice_dims),
        "operand_batch_dims": tuple(numbers.operand_batching_dims),
        "indices_batch_dims": tuple(numbers.start_indices_batching_dims),
        "start_index_map": tuple(numbers.start_index_map),
        "index_vector_dim": numbers.index_vector_dim,
        "slice_sizes": _ints(op, "slice_sizes"),
        "sorted": _flag(op, "indices_are_sorted"),
    }


def _scatter(op: Any) -> dict[str, Any]:
    from jaxlib.mlir.dialects import stablehlo

    numbers = stablehlo.ScatterDimensionNumbers(op.attributes["scatter_dimension_numbers"])
    return {
        "window_dims": tuple(numbers.update_window_dims),
        "inserted_dims": tuple(numbers.inserted_window_dims),
        "operand_batch_dims": tuple(numbers.input_batching_dims),
        "indices_batch_dims": tuple(numbers.scatter_indices_batching_dims),
        "scatter_dims": tuple(numbers.scattered_dims_to_operand_dims),
        "index_vector_dim": numbers.index_vector_dim,
        "reducer": _common_reducer(op),
        "sorted": _flag(op, "indices_are_sorted"),
        "unique": _flag(op, "unique_indices"),
    }


def _convolution(op: Any) -> dict[str, Any]:
    from jaxlib.mlir.dialects import stablehlo

    n = stablehlo.ConvDimensionNumbers(op.attributes["dimension_numbers"])
    rank = len(n.input_spatial_dimensions)
    ones = (1,) * rank
    return {
        "lhs": (n.input_batch_dimension, n.input_feature_dimension, *n.input_spatial_dimensions),
        "rhs": (n.kernel_output_feature_dimension, n.kernel_input_feature_dimension, *n.kernel_spatial_dimensions),
        "out": (n.output_batch_dimension, n.output_feature_dimension, *n.output_spatial_dimensions),
        "stride": _ints(op, "window_strides", ones),
        "padding": _pairs(op, "padding", rank),
        "lhs_dilation": _ints(op, "lhs_dilation", ones),
        "rhs_dilation": _ints(op, "rhs_dilation", ones),
        "reversal": _ints(op, "window_reversal", (0,) * rank),
        "feature_groups": op.attributes["feature_group_count"].value,
        "batch_groups": op.attributes["batch_group_count"].value,
    }


def _window(op: Any, region: int) -> dict[str, Any]:
    window = _ints(op, "window_dimensions")
    ones = (1,) * len(window)
    return {
        "window": window,
        "stride": _ints(op, "window_strides", ones),
        "padding": _pairs(op, "padding", len(window)),
        "reducer": _common_reducer(op, region),
    }


def _reduce_window(op: Any) -> dict[str, Any]:
    found = _window(op, 0)
    ones = (1,) * len(found["window"])
    return found | {
        "base_dilation": _ints(op, "base_dilations", ones),
        "window_dilation": _ints(op, "window_dilations", ones),
    }


def _batch_norm(op: Any) -> dict[str, Any]:
    return {"feature_dim": op.attributes["feature_index"].value, "epsilon": op.attributes["epsilon"].value}


def _flag(op: Any, name: str) -> bool:
    return bool(op.attributes[name].value) if name in op.attributes else False


def _constant(op: Any) -> dict[str, Any]:
    if "complex" in str(op.result.type):  # MLIR's Python has no attribute for complex numbers
        return {"value": None}
    attribute = op.attributes["value"]
    if not getattr(attribute, "is_splat", False):
        return {"value": None, "counts": True} if _counts(attribute) else {"value": None}
    return {"value": getattr(attribute.get_splat_value(), "value", None)}


def _counts(attribute: Any) -> bool:
    """Whether these are the integers 0, 1, 2, ... (`torch.arange`)."""
    if type(attribute).__name__ != "DenseIntElementsAttr":
        return False
    found = np.array(attribute)
    return found.ndim == 1 and found.dtype.kind in "iu" and bool((found == np.arange(len(found))).all())


def _name(op: Any, attribute: str) -> str:
    """The keyword of an enum attribute such as `#stablehlo<comparison_direction EQ>`."""
    return str(op.attributes[attribute]).rstrip(">").split()[-1]


_BY_HAND = frozenset({"SPMDFullToShardShape", "SPMDShardToFullShape"})
"""Custom calls between global and per-device (manual) values."""
SPLIT_BY_HAND = (
    "the program is split by hand in places (torch_xla's enable_manual_sharding, jax's shard_map): what is computed on "
    "the parts of one device cannot be planned; leave that out of the planned program, or make it a custom call with a "
    "rule (autoshard.register_rule)"
)


def _custom_call(op: Any) -> dict[str, Any]:
    if op.attributes["call_target_name"].value in _BY_HAND:
        raise ValueError(SPLIT_BY_HAND)
    config = op.attributes.get("backend_config", "")
    return {"target": op.attributes["call_target_name"].value, "config": getattr(config, "value", str(config))}


def trip_count(op: Any, starts: Sequence[int | None]) -> int | None:
    """Iterations of `while i < constant` with a constant start and step, else None.

    Args:
        op: the `stablehlo.while`.
        starts: known start value of each carried value.
    """
    condition, body = op.regions[0].blocks[0], op.regions[1].blocks[0]
    compared = [view.operation for view in condition.operations]
    if compared[-1].operands[0].owner != compared[-2] or compared[-2].name != "stablehlo.compare":
        return None
    if _name(compared[-2], "comparison_direction") != "LT":
        return None
    counter, limit = compared[-2].operands
    place = {argument: i for i, argument in enumerate(condition.arguments)}.get(counter)
    if place is None:
        return None
    stepped = _made_by(list(body.operations)[-1].operation.operands[place], "stablehlo.add")
    if stepped is None:
        return None
    steps = [operand for operand in stepped.operands if operand != body.arguments[place]]
    end = _loop_constant(limit, op, condition, starts)
    start = starts[place]
    step = _loop_constant(steps[0], op, body, starts) if len(steps) == 1 else None
    if end is None or start is None or not step:
        return None
    return max(0, -(-(end - start) // step))


def _loop_constant(value: Any, loop: Any, block: Any, starts: Sequence[int | None]) -> int | None:
    """A constant inside a loop's block, or one that the loop carries unchanged."""
    place = {argument: i for i, argument in enumerate(block.arguments)}.get(value)
    if place is None:
        return _scalar(value)
    body = loop.regions[1].blocks[0]
    carried = list(body.operations)[-1].operation.operands[place]
    return starts[place] if carried == body.arguments[place] else None


def _made_by(value: Any, name: str) -> Any | None:
    owner = getattr(value.owner, "operation", value.owner)
    return owner if getattr(owner, "name", None) == name else None


def _scalar(value: Any) -> int | None:
    constant = _made_by(value, "stablehlo.constant")
    found = _constant(constant)["value"] if constant is not None else None
    return found if isinstance(found, int) else None


def _dims(attribute: str, name: str = "dims") -> Callable[[Any], dict[str, Any]]:
    return lambda op: {name: _ints(op, attribute)}


def _scalar_attrs(**names: str) -> Callable[[Any], dict[str, Any]]:
    return lambda op: {name: op.attributes[attribute].value for name, attribute in names.items()}


_ATTRS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "dot_general": _dot_general,
    "reduce": lambda op: {"dims": _ints(op, "dimensions"), "reducer": _common_reducer(op)},
    "broadcast_in_dim": _dims("broadcast_dimensions"),
    "transpose": _dims("permutation", "permutation"),
    "reverse": _dims("dimensions"),
    "slice": lambda op: {
        "start": _ints(op, "start_indices"),
        "limit": _ints(op, "limit_indices"),
        "stride": _ints(op, "strides"),
    },
    "pad": lambda op: {
        "low": _ints(op, "edge_padding_low"),
        "high": _ints(op, "edge_padding_high"),
        "interior": _ints(op, "interior_padding"),
    },
    "concatenate": _scalar_attrs(dim="dimension"),
    "sort": lambda op: {"dim": op.attributes["dimension"].value, "descending": _descends(op.regions[0])},
    "all_gather": _scalar_attrs(dim="all_gather_dim"),
    "iota": _scalar_attrs(dim="iota_dimension"),
    "constant": _constant,
    "compare": lambda op: {"direction": _name(op, "comparison_direction")},
    "gather": _gather,
    "scatter": _scatter,
    "dynamic_slice": _dims("slice_sizes", "sizes"),
    "convolution": _convolution,
    "reduce_window": _reduce_window,
    "select_and_scatter": lambda op: _window(op, 1),
    "batch_norm_training": _batch_norm,
    "batch_norm_inference": _batch_norm,
    "batch_norm_grad": _batch_norm,
    "rng_bit_generator": lambda op: {"algorithm": _name(op, "rng_algorithm")},
    "rng": lambda op: {"distribution": _name(op, "rng_distribution")},
    "custom_call": _custom_call,
    "top_k": _scalar_attrs(k="k"),
    "fft": lambda op: {"type": _name(op, "fft_type"), "length": _ints(op, "fft_length")},
    "triangular_solve": lambda op: {
        "left": _flag(op, "left_side"),
        "lower": _flag(op, "lower"),
        "transpose": _name(op, "transpose_a"),
    },
    "cholesky": lambda op: {"lower": _flag(op, "lower")},
}
