"""Reads StableHLO into a `Graph` of plain Python values; MLIR stays within this module and `attributes.py`.

Removed on the way: calls and composites (inlined), tuples (their elements become results of the op that makes the
tuple), the markers `custom_call @Sharding` (see `Program.stablehlo`; they become `Graph.aten_outputs`), copies, no-ops
inside an aten op, and dead ops.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, TypeAlias

from autoshard.errors import CaptureError
from autoshard.fused import TARGETS, form_class
from autoshard.graph.body import Body
from autoshard.graph.indexing import parallel_dims
from autoshard.graph.ops import Graph, Op, Value
from autoshard.graph.orders import post_order
from autoshard.program import Argument, Output, Program, TensorType
from autoshard.stablehlo.attributes import plain_dot, read_attrs, trip_count
from autoshard.stablehlo.context import entry_block, functions_of, mlir_context, ops_inside

# An SSA value is one tensor, or a tuple of such.
Bound: TypeAlias = "Value | tuple[Bound, ...]"

SHARDING_ATTRIBUTES = ("mhlo.sharding", "sdy.sharding")
"""Of arguments and results, in GSPMD's and in Shardy's form; where a module has both, XLA falls back to GSPMD."""

_MARKER = re.compile(r"(?:^|/)op(\d+)(?:\.out(\d+))?(?!\w)")
_RENAMING_OPS = frozenset({"stablehlo.tuple", "mhlo.tuple", "mhlo.copy", "mhlo.bitcast", "sdy.sharding_constraint"})
_MAYBE_NOTHING = frozenset(
    f"stablehlo.{kind}" for kind in ("broadcast_in_dim", "concatenate", "convert", "reshape", "transpose")
)
_RETURNS = frozenset({"func.return", "stablehlo.return"})
_DIRECT_READERS = _RETURNS | {"stablehlo.custom_call"}
"""Readers of an aten op's own result, or the program's."""
_CALLS = frozenset({"func.call", "stablehlo.composite"})
_KIND_NAMES = {"topk": "top_k", "if": "case"}


def build_graph(program: Program, *, cse: bool = False) -> Graph:
    """The op graph of `program`'s main function.

    Args:
        program: a captured program.
        cse: merge equal splat constants, iotas, and equal broadcasts, reshapes and conversions of these. The merged
            op keeps the aten op of its first occurrence.

    Raises:
        ValueError: the module cannot be parsed, has no main function, or has a data-dependent shape.
    """
    importer = _Importer(program, cse)
    outputs = importer.run()
    return _finish(program, importer, outputs)


def _finish(program: Program, importer: _Importer, outputs: tuple[Value, ...]) -> Graph:
    """Drop dead ops, and number the rest in XLA's post-order.

    Dead ops disturb that order: torch_xla writes the gradient of a convolution's input even where it is unused.
    """
    ops = importer.ops
    argument_count = importer.argument_count
    new_id = [*range(argument_count), *[-1] * (len(ops) - argument_count)]

    def makers(values: Sequence[Value]) -> list[int]:
        return [value.op for value in values if value.op >= argument_count]

    order = post_order(makers(outputs), lambda number: makers(ops[number].operands))
    for number, i in enumerate(order, argument_count):
        new_id[i] = number

    def moved(value: Value) -> Value:
        return Value(new_id[value.op], value.result)

    kept = ops[:argument_count]
    for i in order:
        op = ops[i]
        reads = tuple(map(moved, op.operands))
        kept.append(Op(new_id[i], op.kind, reads, op.results, op.attrs, op.aten, op.module))
    marked = {key: moved(value) for key, value in importer.aten_outputs.items() if new_id[value.op] >= 0}
    return Graph(program, tuple(kept), tuple(range(argument_count)), tuple(map(moved, outputs)), marked)


class _Importer:
    """Walks the main function; state of one `build_graph` call."""

    def __init__(self, program: Program, cse: bool) -> None:
        self.program = program
        self.cse = cse
        self.ops: list[Op] = []
        self.argument_count = 0
        self.aten_outputs: dict[tuple[int, int], Value] = {}
        self.modules = {op.index: op.module for op in program.ops}
        self.unmarked = program.unmarked
        self.functions: dict[str, Any] = {}
        self.types: dict[Any, tuple[TensorType, ...]] = {}
        self.tensors: set[Any] = set()  # MLIR types other than tuples
        self.merged: dict[Any, int] = {}
        self.constant: set[int] = set()  # ops that CSE may merge: constants and ops that depend on nothing else

    def run(self) -> tuple[Value, ...]:
        """Import main; return its results."""
        with mlir_context():
            module = parse_module(self.program.stablehlo)  # keeps the ops valid
            self.functions = functions_of(module)
            if "main" not in self.functions:
                raise ValueError(f"the module has no function main, only {', '.join(self.functions) or 'none'}")
            block = entry_block(self.functions["main"])
            bound: list[Bound] = []
            for index, argument in enumerate(block.arguments):
                kinds = self.types_of(argument.type, f"argument {index}")
                if argument.type not in self.tensors:
                    raise ValueError(f"argument {index} of the module is a tuple: capture must pass tensors one by one")
                self.ops.append(Op(index, "argument", (), kinds, {"index": index}))
                bound.append(Value(index))
            self.argument_count = len(bound)
            results = self.block(block, bound, None)
        outputs: list[Value] = []
        for value in results:
            outputs.extend(_leaves(value))
        return tuple(outputs)

    def regions(
        self,
        op: Any,
        kind: str,
        reads: tuple[Value, ...],
        outer: tuple[Value, ...],
        captured: Mapping[Any, Bound],
        aten: int | None,
    ) -> dict[str, Any]:
        """Attributes of a loop or branch: its regions as bodies, which also read `outer`.

        Args:
            captured: free values of the regions -> their bindings.
        """
        carried = [self.type_of(value) for value in reads] if kind == "while" else []
        bodies = tuple(self.body(region.blocks[0], carried, outer, captured, aten) for region in op.regions)
        if kind == "case":
            return {"bodies": bodies, "branches": len(bodies)}
        return {"bodies": bodies, "trip_count": trip_count(op, [self.number(value) for value in reads])}

    def body(
        self,
        block: Any,
        carried: list[TensorType],
        outer: tuple[Value, ...],
        captured: Mapping[Any, Bound],
        aten: int | None,
    ) -> Body:
        """A region as a graph of its own."""
        inner = _Importer(self.program, self.cse)
        inner.modules, inner.functions = self.modules, self.functions
        inner.types, inner.tensors = self.types, self.tensors
        kinds = [*carried, *(self.type_of(value) for value in outer)]
        inner.ops = [Op(i, "argument", (), (kind,), {"index": i}) for i, kind in enumerate(kinds)]
        inner.argument_count = len(kinds)
        place = {value: Value(len(carried) + i) for i, value in enumerate(outer)}
        bound = {value: _rebound(was, place) for value, was in captured.items()}
        results = inner.block(block, _bind(block.arguments, range(len(carried))), aten, bound)
        outputs = tuple(leaf for value in results for leaf in _leaves(value))
        ties = len(outputs) == len(carried)
        made = [inner.type_of(value) for value in outputs]
        program = replace(
            self.program,
            arguments=tuple(Argument(f"value{i}", "input", kind) for i, kind in enumerate(kinds)),
            outputs=tuple(Output(f"value{i}", "output", kind, i if ties else None) for i, kind in enumerate(made)),
        )
        return Body(_finish(program, inner, outputs))

    def number(self, value: Value) -> int | None:
        """The known value of an integer scalar."""
        op = self.ops[value.op]
        while op.kind in ("broadcast_in_dim", "reshape", "convert"):
            op = self.ops[op.operands[0].op]
        found = op.attrs["value"] if op.kind == "constant" else None
        return int(found) if isinstance(found, int) else None

    def block(
        self, block: Any, arguments: Iterable[Bound], caller: int | None, outer: Mapping[Any, Bound] | None = None
    ) -> list[Bound]:
        """Import a block with these arguments; return its terminator's operands.

        Args:
            outer: bindings of values from enclosing blocks.
        """
        env: dict[Any, Bound] = dict(outer or {}) | dict(zip(block.arguments, arguments, strict=True))
        for view in block.operations:
            op = view.operation
            name = op.name
            operands = [env[value] for value in op.operands]
            if name in _RETURNS:
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
            elif name in _RENAMING_OPS:
                env[op.results[0]] = operands[0]
            elif name == "stablehlo.custom_call" and op.attributes["call_target_name"].value == "Sharding":
                env[op.results[0]] = operands[0]
                if aten is not None and output is not None and isinstance(operands[0], Value):
                    self.aten_outputs[aten, output] = operands[0]
            else:
                place = self.unchanged(op, name, operands, aten)
                if place is None:
                    self.op(op, name, operands, aten, env)
                else:
                    env[op.results[0]] = operands[place]
                if aten is not None and aten in self.unmarked and name != "stablehlo.constant":
                    made = env[op.results[0]]
                    assert isinstance(made, Value)
                    self.aten_outputs.pop((aten, 0), None)  # the last one, also in order
                    self.aten_outputs[aten, 0] = made
        raise ValueError("a block of the module ends without a return")

    def unchanged(self, op: Any, name: str, operands: list[Bound], aten: int | None) -> int | None:
        """The operand that a no-op inside an aten op returns; torch_xla and torchax write many of these.

        Kept, they would separate a value from its readers, or be a kernel; XLA drops them. An op that makes an aten
        output stays if its operand belongs to another aten op or has other readers: that output is annotated there.
        """
        place = 0
        if name in _MAYBE_NOTHING:
            if not _changes_nothing(op):
                return None
        elif name == "stablehlo.multiply":
            ones = [i for i, value in enumerate(operands) if isinstance(value, Value) and self.is_one(value)]
            if not ones:
                return None
            place = 1 - ones[-1]
        else:
            return None
        users = [use.owner.operation for use in op.results[0].uses]
        if aten in self.unmarked:  # a marker would be its only reader
            whole, only = (all(aten_of(user, None)[0] != aten for user in users),) * 2
        else:
            names = [user.name for user in users]
            whole, only = not _DIRECT_READERS.isdisjoint(names), names == ["stablehlo.custom_call"]
        if not whole:
            return place
        value = operands[place]
        assert isinstance(value, Value)
        made = self.ops[value.op]
        own = aten is not None and made.kind != "argument" and made.aten == aten
        return place if own and only and len(list(op.operands[place].uses)) == 1 else None

    def is_one(self, value: Value) -> bool:
        """Whether every element is known to be 1."""
        op = self.ops[value.op]
        while op.kind in ("broadcast_in_dim", "reshape", "convert"):
            op = self.ops[op.operands[0].op]
        return op.kind == "constant" and op.attrs["value"] == 1

    def op(self, op: Any, name: str, operands: list[Bound], aten: int | None, env: dict[Any, Bound]) -> None:
        """Import one op and bind its results in `env`."""
        kind = kind_of(name)
        reads: tuple[Value, ...] = tuple(leaf for value in operands for leaf in _leaves(value))
        attrs = read_attrs(kind, op)
        if kind in ("gather", "scatter"):
            attrs = {**attrs, "parallel": parallel_dims(self.ops, kind, attrs, reads)}
        if kind in ("while", "case"):
            captured = {value: env[value] for value in dict.fromkeys(_captured(op, env))}
            outer = tuple(dict.fromkeys(leaf for bound in captured.values() for leaf in _leaves(bound)))
            attrs = self.regions(op, kind, reads, outer, captured, aten)
            reads += outer
        kinds = [self.types_of(result.type, name) for result in op.results]
        if kind == "custom_call" and attrs["target"] in TARGETS:
            kind = TARGETS[attrs["target"]]
            attrs = asdict(form_class(kind).parse(attrs["config"]))
        if kind == "dot":
            kind, attrs = "dot_general", plain_dot(len(self.type_of(reads[0]).shape))
        flat = tuple(one for several in kinds for one in several)
        number = self.add(kind, reads, flat, attrs, aten)
        start = 0
        for result, several in zip(op.results, kinds, strict=True):
            leaves = tuple(Value(number, start + i) for i in range(len(several)))
            env[result] = leaves[0] if result.type in self.tensors else leaves
            start += len(several)

    def add(
        self,
        kind: str,
        reads: tuple[Value, ...],
        results: tuple[TensorType, ...],
        attrs: Mapping[str, Any],
        aten: int | None,
    ) -> int:
        """Append an op (or find an equal one, under CSE); return its id."""
        key = None
        # Attributes lack the elements of non-splat constants and the regions of ops.
        if self.cse and (
            (kind == "constant" and attrs["value"] is not None)
            or kind == "iota"
            or (kind in ("broadcast_in_dim", "convert", "reshape") and reads[0].op in self.constant)
        ):
            # The text distinguishes -0.0 from 0.0, and NaN from nothing.
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
            if not str(mlir_type).startswith("tuple<"):
                self.tensors.add(mlir_type)
        return known


def kind_of(name: str) -> str:
    """`Op.kind` of an MLIR operation with this name."""
    kind = name.partition(".")[2]
    return _KIND_NAMES.get(kind, kind)


def _changes_nothing(op: Any) -> bool:
    """Whether a moving or converting op returns its one operand unchanged."""
    if len(op.operands) != 1 or op.operands[0].type != op.results[0].type:
        return False
    return all(
        list(op.attributes[attribute]) == list(range(len(op.attributes[attribute])))
        for attribute in ("permutation", "broadcast_dimensions")
        if attribute in op.attributes
    )


def _captured(op: Any, env: dict[Any, Bound]) -> Iterator[Any]:
    """Free values of the regions of `op` that are bound in `env`."""
    return (operand for inner in ops_inside(op) for operand in inner.operands if operand in env)


def _rebound(bound: Bound, place: Mapping[Value, Value]) -> Bound:
    return place[bound] if isinstance(bound, Value) else tuple(_rebound(part, place) for part in bound)


def _bind(arguments: Any, places: Iterable[int]) -> list[Bound]:
    """Bind block arguments, none of them a tuple, to the first values of a body."""
    return [Value(place) for _, place in zip(arguments, places, strict=True)]


def _leaves(value: Bound) -> tuple[Value, ...]:
    if isinstance(value, Value):
        return (value,)
    return tuple(leaf for part in value for leaf in _leaves(part))


def parse_module(module: bytes) -> Any:
    """Parse a StableHLO module (bytecode or text) in the current context; CaptureError if it is none."""
    from jaxlib.mlir import ir

    try:
        return ir.Module.parse(module)
    except ir.MLIRError as error:
        said = next((line.strip() for line in str(error).splitlines() if "error:" in line), str(error).strip())
        raise CaptureError(f"the program's StableHLO module cannot be parsed: {' '.join(said.split())}") from error


def aten_of(op: Any, caller: int | None) -> tuple[int | None, int | None]:
    """The aten op (and, for a marker, its output) that an op's location names."""
    # Printing a named location with its Python stack is slow; other locations name nothing.
    found = _MARKER.search(getattr(op.location, "name_str", ""))
    if found is None:
        return caller, None
    return int(found[1]), None if found[2] is None else int(found[2])


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
