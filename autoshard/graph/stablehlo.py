"""StableHLO bytecode -> `Graph`.

The importer reads the module once and keeps plain Python values; nothing of MLIR leaves this file.

What it removes: function calls and composites (inlined), tuples (their elements are results of the op that makes the
tuple), the markers `custom_call @Sharding` (see `Program.stablehlo`; they become `Graph.aten_outputs`), copies, and ops
that no output depends on.

`Op.attrs` by kind (a kind that is not named has none); every value is hashable, indices and extents are ints:

- argument: index
- dot_general: lhs_batch, rhs_batch, lhs_contract, rhs_contract
- reduce: dims, reducer (`add`, `max`, `min`, `mul`, `and`, `or`; `other` for anything else, argmax too)
- broadcast_in_dim: dims (the result dim of each operand dim)
- transpose: permutation; reverse: dims
- slice: start, limit, stride; pad: low, high, interior; dynamic_slice: sizes
- concatenate, iota, sort, all_gather: dim
- constant: value (int, float or bool of a splat, else None)
- compare: direction (`EQ`, `NE`, `LT`, …)
- gather: offset_dims, collapsed_dims, operand_batch_dims, indices_batch_dims, start_index_map, index_vector_dim,
  slice_sizes, sorted
- scatter: window_dims, inserted_dims, operand_batch_dims, indices_batch_dims, scatter_dims, index_vector_dim,
  reducer (also `assign`), sorted, unique
- convolution: lhs (batch, feature, *spatial dims), rhs (out feature, in feature, *spatial), out (batch, feature,
  *spatial), stride, padding (pairs), lhs_dilation, rhs_dilation, reversal, feature_groups, batch_groups
- reduce_window: window, stride, base_dilation, window_dilation, padding (pairs), reducer
- select_and_scatter: window, stride, padding (pairs), reducer
- batch_norm_training, batch_norm_inference, batch_norm_grad: feature_dim, epsilon
- rng_bit_generator: algorithm; rng: distribution
- custom_call: target, config (its backend_config as text)
- top_k: k; fft: type, length; triangular_solve: left, lower, transpose; cholesky: lower
- while: trip_count (where the loop counts up to a constant, else None), body ((op kind, count) of its body)
- case: branches (their number)
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

import networkx as nx

from autoshard.capture.program import Program, TensorType
from autoshard.graph.ops import Graph, Op, Value

NO_ATTRS: Mapping[str, Any] = MappingProxyType({})

# An SSA value is one tensor, or a tuple of such.
Bound: TypeAlias = "Value | tuple[Bound, ...]"

_MARKER = re.compile(r'(?:^loc\("|/)op(\d+)(?:\.out(\d+))?(?!\w)')
_ALIASES = frozenset({"stablehlo.tuple", "mhlo.tuple", "mhlo.copy", "mhlo.bitcast", "sdy.sharding_constraint"})
_CALLS = frozenset({"func.call", "stablehlo.composite"})
_KIND_NAMES = {"topk": "top_k", "if": "case"}
_REDUCERS = {
    "stablehlo.add": "add",
    "stablehlo.maximum": "max",
    "stablehlo.minimum": "min",
    "stablehlo.multiply": "mul",
    "stablehlo.and": "and",
    "stablehlo.or": "or",
}


def build_graph(program: Program, *, cse: bool = False) -> Graph:
    """The op graph of `program`'s main function.

    Args:
        program: what capture made.
        cse: merge equal splat constants, iotas, and equal broadcasts, reshapes and conversions of these. The merged
            op keeps the aten op of its first occurrence.

    Raises:
        ValueError: if the module cannot be parsed, has no main function, or has a tensor whose shape depends on data.
    """
    importer = _Importer(program, cse)
    outputs = importer.run()
    return _finish(program, importer, outputs)


def _finish(program: Program, importer: _Importer, outputs: tuple[Value, ...]) -> Graph:
    """Drop dead ops, number the rest in program order, and build the DiGraph."""
    ops = importer.ops
    argument_count = importer.argument_count
    live = bytearray(len(ops))
    for value in outputs:
        live[value.op] = 1
    for op in reversed(ops):
        if live[op.id]:
            for operand in op.operands:
                live[operand.op] = 1
    new_id = [-1] * len(ops)
    count = 0
    for op in ops:
        if live[op.id] or op.id < argument_count:
            new_id[op.id] = count
            count += 1

    def moved(value: Value) -> Value:
        return Value(new_id[value.op], value.result)

    kept = ops
    if count != len(ops):
        kept = [
            Op(new_id[op.id], op.kind, tuple(map(moved, op.operands)), op.results, op.attrs, op.aten, op.module)
            for op in ops
            if new_id[op.id] >= 0
        ]
    graph = nx.DiGraph()
    graph.add_nodes_from((op.id, {"op": op}) for op in kept)
    flows: dict[tuple[int, int], tuple[Value, ...]] = {}
    for op in kept:
        for operand in op.operands:
            edge = (operand.op, op.id)
            known = flows.get(edge, ())
            if operand not in known:
                flows[edge] = (*known, operand)
    graph.add_edges_from((source, target, {"values": values}) for (source, target), values in flows.items())
    marked = {key: moved(value) for key, value in importer.aten_outputs.items() if new_id[value.op] >= 0}
    return Graph(program, graph, tuple(kept), tuple(range(argument_count)), tuple(map(moved, outputs)), marked)


class _Importer:
    """Walks the main function; state of one `build_graph` call."""

    def __init__(self, program: Program, cse: bool) -> None:
        self.program = program
        self.cse = cse
        self.ops: list[Op] = []
        self.argument_count = 0
        self.aten_outputs: dict[tuple[int, int], Value] = {}
        self.modules = {op.index: op.module for op in program.ops}
        self.functions: dict[str, Any] = {}
        self.types: dict[Any, tuple[TensorType, ...]] = {}
        self.merged: dict[Any, int] = {}
        self.constant: set[int] = set()  # ops that CSE may merge: constants and what depends on nothing else

    def run(self) -> tuple[Value, ...]:
        """Import main; returns its results."""
        with mlir_context():
            module = parse_module(self.program.stablehlo)  # the ops are only valid while it lives
            self.functions = functions_of(module)
            if "main" not in self.functions:
                raise ValueError(f"the module has no function main, only {', '.join(self.functions) or 'none'}")
            block = entry_block(self.functions["main"])
            bound: list[Bound] = []
            for index, argument in enumerate(block.arguments):
                (kind,) = self.types_of(argument.type, f"argument {index}")
                self.ops.append(Op(index, "argument", (), (kind,), {"index": index}))
                bound.append(Value(index))
            self.argument_count = len(bound)
            results = self.block(block, bound, None)
        outputs: list[Value] = []
        for value in results:
            outputs.extend(_leaves(value))
        return tuple(outputs)

    def block(self, block: Any, arguments: Iterable[Bound], caller: int | None) -> list[Bound]:
        """Import a block whose arguments are `arguments`; returns what its terminator returns."""
        env: dict[Any, Bound] = dict(zip(block.arguments, arguments, strict=True))
        for view in block.operations:
            op = view.operation
            name = op.name
            operands = [env[value] for value in op.operands]
            if name == "func.return" or name == "stablehlo.return":
                return operands
            aten, output = aten_of(op, caller)
            if name in _CALLS:
                attribute = op.attributes["callee" if name == "func.call" else "decomposition"]
                called = self.functions[attribute.value]
                env.update(zip(op.results, self.block(entry_block(called), operands, aten), strict=True))
            elif name == "stablehlo.tuple":
                env[op.results[0]] = tuple(operands)
            elif name == "stablehlo.get_tuple_element":
                whole = operands[0]
                assert not isinstance(whole, Value)
                env[op.results[0]] = whole[op.attributes["index"].value]
            elif name in _ALIASES:
                env[op.results[0]] = operands[0]
            elif name == "stablehlo.custom_call" and op.attributes["call_target_name"].value == "Sharding":
                env[op.results[0]] = operands[0]
                if aten is not None and output is not None and isinstance(operands[0], Value):
                    self.aten_outputs[aten, output] = operands[0]
            else:
                self.op(op, name, operands, aten, env)
        raise ValueError("a block of the module ends without a return")

    def op(self, op: Any, name: str, operands: list[Bound], aten: int | None, env: dict[Any, Bound]) -> None:
        """Import one op and bind its results in `env`."""
        kind = name.partition(".")[2]
        kind = _KIND_NAMES.get(kind, kind)
        reads: tuple[Value, ...] = tuple(leaf for value in operands for leaf in _leaves(value))
        reader = _ATTRS.get(kind)
        attrs = reader(op) if reader else NO_ATTRS
        kinds = [self.types_of(result.type, name) for result in op.results]
        if kind == "dot":
            kind, attrs = "dot_general", _plain_dot(len(self.type_of(reads[0]).shape))
        flat = tuple(one for several in kinds for one in several)
        number = self.add(kind, reads, flat, attrs, aten)
        start = 0
        for result, several in zip(op.results, kinds, strict=True):
            leaves = tuple(Value(number, start + i) for i in range(len(several)))
            env[result] = leaves if _is_tuple(result.type) else leaves[0]
            start += len(several)

    def add(
        self,
        kind: str,
        reads: tuple[Value, ...],
        results: tuple[TensorType, ...],
        attrs: Mapping[str, Any],
        aten: int | None,
    ) -> int:
        """Append an op (or find the equal one, under CSE); returns its id."""
        key = None
        # Attributes do not carry what a non-splat constant holds, nor the regions of ops that have some.
        if self.cse and (
            (kind == "constant" and attrs["value"] is not None)
            or kind == "iota"
            or (kind in ("broadcast_in_dim", "convert", "reshape") and reads[0].op in self.constant)
        ):
            # The text tells -0.0 from 0.0, and NaN from nothing.
            key = (kind, reads, results, tuple(attrs.items()), repr(attrs.get("value")))
            if key in self.merged:
                return self.merged[key]
        number = len(self.ops)
        module = self.modules.get(aten, "") if aten is not None else ""
        self.ops.append(Op(number, kind, reads, results, attrs, aten, module))
        if key is not None:
            self.merged[key] = number
            self.constant.add(number)
        return number

    def type_of(self, value: Value) -> TensorType:
        return self.ops[value.op].results[value.result]

    def types_of(self, mlir_type: Any, what: str) -> tuple[TensorType, ...]:
        """The tensor types in an MLIR type: several for a tuple, else one."""
        known = self.types.get(mlir_type)
        if known is None:
            known = self.types[mlir_type] = _read_type(mlir_type, what)
        return known


def _leaves(value: Bound) -> tuple[Value, ...]:
    if isinstance(value, Value):
        return (value,)
    return tuple(leaf for part in value for leaf in _leaves(part))


def mlir_context() -> Any:
    """An MLIR context with the dialects that programs use; costs no import of jax itself."""
    from jaxlib.mlir import ir
    from jaxlib.mlir._mlir_libs import _jax_mlir_ext
    from jaxlib.mlir.dialects import chlo, mhlo, sdy, stablehlo

    registry = ir.DialectRegistry()
    _jax_mlir_ext.register_dialects(registry)
    context = ir.Context()
    context.append_dialect_registry(registry)
    context.load_all_available_dialects()
    mhlo.register_mhlo_dialect(context)
    for dialect in (stablehlo, chlo, sdy):
        dialect.register_dialect(context)
    return context


def parse_module(module: bytes) -> Any:
    """Parse a StableHLO module (bytecode or text) in the current context; ValueError when it is none."""
    from jaxlib.mlir import ir

    try:
        return ir.Module.parse(module)
    except ir.MLIRError as error:
        raise ValueError(f"the program's StableHLO module cannot be parsed: {error}") from error


def functions_of(module: Any) -> dict[str, Any]:
    """Name -> function of a module."""
    found = {}
    for view in module.body.operations:
        if view.operation.name == "func.func":
            found[view.operation.attributes["sym_name"].value] = view.operation
    return found


def entry_block(function: Any) -> Any:
    """The one block of a function."""
    return function.regions[0].blocks[0]


def aten_of(op: Any, caller: int | None) -> tuple[int | None, int | None]:
    """The aten op (and, for a marker, its output) that an op's location names."""
    found = _MARKER.search(str(op.location))
    if found is None:
        return caller, None
    return int(found[1]), None if found[2] is None else int(found[2])


def _is_tuple(mlir_type: Any) -> bool:
    return str(mlir_type).startswith("tuple<")


def _read_type(mlir_type: Any, what: str) -> tuple[TensorType, ...]:
    from jaxlib.mlir import ir

    if isinstance(mlir_type, ir.TupleType):
        parts = (mlir_type.get_type(i) for i in range(mlir_type.num_types))
        return tuple(leaf for part in parts for leaf in _read_type(part, what))
    if not isinstance(mlir_type, ir.RankedTensorType):
        return (TensorType((), str(mlir_type).rpartition(".")[2]),)  # a token
    if not mlir_type.has_static_shape:
        raise ValueError(f"{what} has the type {mlir_type}: shapes that depend on data cannot be planned")
    return (TensorType(tuple(mlir_type.shape), str(mlir_type.element_type)),)


# ---- attributes ----------------------------------------------------------------------------------------------------


def _plain_dot(lhs_rank: int) -> dict[str, Any]:
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
    """Per result of a reducer region, what it does with its accumulator and its element.

    Conversions around the op are seen through (bf16 sums that accumulate in f32).
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
    attribute = op.attributes["value"]
    if not getattr(attribute, "is_splat", False):
        return {"value": None}
    return {"value": getattr(attribute.get_splat_value(), "value", None)}


def _name(op: Any, attribute: str) -> str:
    """The last word of an enum attribute such as `#stablehlo<comparison_direction EQ>`."""
    return str(op.attributes[attribute]).rstrip(">").split()[-1]


def _custom_call(op: Any) -> dict[str, Any]:
    config = str(op.attributes["backend_config"]) if "backend_config" in op.attributes else ""
    return {"target": op.attributes["call_target_name"].value, "config": config}


def _while(op: Any) -> dict[str, Any]:
    kinds = Counter(view.operation.name.partition(".")[2] for view in op.regions[1].blocks[0].operations)
    return {"trip_count": _trip_count(op), "body": tuple(sorted(kinds.items()))}


def _trip_count(op: Any) -> int | None:
    """Iterations of `while i < constant` with a constant start and step, else None."""
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
    end = _loop_constant(limit, op, condition)
    start = _scalar(op.operands[place])
    step = _loop_constant(steps[0], op, body) if len(steps) == 1 else None
    if end is None or start is None or not step:
        return None
    return max(0, -(-(end - start) // step))


def _loop_constant(value: Any, loop: Any, block: Any) -> int | None:
    """A constant inside a loop's block, or one that the loop carries unchanged."""
    place = {argument: i for i, argument in enumerate(block.arguments)}.get(value)
    if place is None:
        return _scalar(value)
    body = loop.regions[1].blocks[0]
    carried = list(body.operations)[-1].operation.operands[place]
    return _scalar(loop.operands[place]) if carried == body.arguments[place] else None


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
    "sort": _scalar_attrs(dim="dimension"),
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
    "while": _while,
    "case": lambda op: {"branches": len(op.regions)},
}
