"""Pattern matching for plans by hand: linear layers, embedding tables, norms, blocks.

By how weights are read and their shapes; by module paths only where a model family's naming is meant.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from autoshard.dtypes import FLOATS
from autoshard.graph.memo import per_graph
from autoshard.graph.ops import Graph, Value


@dataclass(frozen=True)
class Linear:
    """A weight that a dot contracts in the forward pass.

    Attributes:
        name: of the parameter.
        module: its module's path.
        weight: its value.
        contracted: the contracting dim of the weight; the other dims are the output's.
        input: the other operand of the dot, where it can be annotated.
        output: the module's result, bias included: the last value it made, or the dot.
        gradient: the gradient of the output: the other operand in the backward pass, likewise.
    """

    name: str
    module: str
    weight: Value
    contracted: int
    input: Value | None
    output: Value
    gradient: Value | None = None


@per_graph
def linears(graph: Graph) -> tuple[Linear, ...]:
    """Every linear layer, in forward order."""
    arguments = dict(zip(graph.arguments, graph.program.arguments, strict=True))
    results = module_outputs(graph)
    annotatable = set(graph.aten_outputs.values())
    found: dict[str, Linear] = {}
    gradients: dict[str, Value] = {}
    for op in graph.ops:
        if op.kind != "dot_general" or op.aten is None:
            continue
        for position, operand in enumerate(op.operands):
            source, dims = through_views(graph, operand)
            argument = arguments.get(source.op)
            if argument is None or argument.role != "parameter" or len(argument.type.shape) != 2:
                continue
            contract = op.attrs["rhs_contract" if position else "lhs_contract"]
            other = annotated(graph, op.operands[1 - position], annotatable)
            if not is_forward(graph, op.aten):
                if len(contract) == 1 and other is not None:
                    gradients.setdefault(argument.name, other)
                continue
            if len(contract) != 1 or argument.name in found:
                continue
            output = results.get(op.module, Value(op.id))
            if graph.type_of(output).shape[-1:] != (argument.type.shape[1 - dims[contract[0]]],):
                output = graph.aten_outputs.get((op.aten, 0), Value(op.id))  # one of many layers in one module
            found[argument.name] = Linear(argument.name, op.module, source, dims[contract[0]], other, output)
    return tuple(
        Linear(each.name, each.module, each.weight, each.contracted, each.input, each.output, gradients.get(each.name))
        for each in found.values()
    )


def annotated(graph: Graph, value: Value, annotatable: set[Value]) -> Value | None:
    """The nearest value that can be annotated: itself, or one behind views of the same aten op."""
    while value not in annotatable:
        op = graph.ops[value.op]
        if op.kind not in ("transpose", "convert", "reshape", "broadcast_in_dim"):
            return None
        value = op.operands[0]
    return value


@per_graph
def _products(graph: Graph) -> frozenset[int]:
    """The aten ops that contain a dot."""
    return frozenset(op.aten for op in graph.ops if op.kind == "dot_general" and op.aten is not None)


def product_readers(graph: Graph, value: Value) -> list[int]:
    """The aten ops with a dot that reads the value, by index."""
    return list(dict.fromkeys(op.aten for op in graph.readers(value) if op.aten in _products(graph)))


@per_graph
def module_outputs(graph: Graph) -> Mapping[str, Value]:
    """Module path -> the last float value of its own forward code (not its children's)."""
    found: dict[str, Value] = {}
    for module, value in forward_values(graph):
        found[module] = value
    return found


@per_graph
def subtree_outputs(graph: Graph) -> Mapping[str, Value]:
    """Module path -> the last float value that it or a submodule makes in the forward pass."""
    found: dict[str, Value] = {}
    for module, value in forward_values(graph):
        path = module
        while path:
            found[path] = value
            path = path.rpartition(".")[0]
    return found


@per_graph
def forward_values(graph: Graph) -> tuple[tuple[str, Value], ...]:
    """(module path, value) of every float output of an aten op in the forward pass, in order."""
    return tuple(
        (graph.program.ops[aten].module, value)
        for (aten, _), value in sorted(graph.aten_outputs.items())
        if graph.program.ops[aten].phase == "forward"
        and graph.type_of(value).dtype in FLOATS
        and graph.ops[value.op].kind != "argument"
    )


def is_forward(graph: Graph, aten: int | None) -> bool:
    """Whether an aten op, by index, is of the forward pass."""
    return aten is not None and graph.program.ops[aten].phase == "forward"


def through_views(graph: Graph, value: Value) -> tuple[Value, list[int]]:
    """Trace a value back through transposes and converts: the source, and for each dim of `value` the source's dim."""
    dims = list(range(len(graph.type_of(value).shape)))
    while (op := graph.ops[value.op]).kind in ("transpose", "convert"):
        if op.kind == "transpose":
            dims = [op.attrs["permutation"][dim] for dim in dims]
        value = op.operands[0]
    return value, dims


@per_graph
def token_tables(graph: Graph) -> tuple[str, ...]:
    """Token embeddings: tables that a gather reads by vocabulary and that are no position embeddings."""
    found: dict[str, None] = {}
    arguments = dict(zip(graph.arguments, graph.program.arguments, strict=True))
    for op in graph.ops:
        if op.kind == "gather" and is_forward(graph, op.aten):
            source, _ = through_views(graph, op.operands[0])
            argument = arguments.get(source.op)
            if argument is None or argument.role != "parameter" or len(argument.type.shape) != 2:
                continue
            if not re.search(r"wpe|position|token_type|relative", argument.name):
                found.setdefault(argument.name)
    return tuple(found)


@per_graph
def wrapped_modules(graph: Graph) -> tuple[str, ...]:
    """Paths of the repeated blocks: elements of numbered containers (`h.0`, `layers.3`) without one of their own."""
    paths = {op.module for op in graph.program.ops if op.phase == "forward"}
    blocks: dict[str, None] = {}
    for path in sorted(paths):
        match = re.match(r"(.*?\.?\b\d+)(\.|$)", path)
        if match:
            blocks.setdefault(match.group(1))
    return tuple(blocks)


@per_graph
def norms(graph: Graph) -> Mapping[str, Value]:
    """Module path -> output of every norm: a module that divides by the root of a mean square or variance."""
    roots = {op.module for op in graph.ops if op.kind == "rsqrt" and op.module and is_forward(graph, op.aten)}
    return {module: value for module, value in module_outputs(graph).items() if module in roots}


@per_graph
def gradients(graph: Graph) -> Mapping[str, Value]:
    """Parameter -> its gradient, as the optimizer reads it, where it can be annotated."""
    arguments = graph.program.arguments
    annotatable = set(graph.aten_outputs.values())
    found: dict[str, Value] = {}
    for value, output in zip(graph.outputs, graph.program.outputs, strict=True):
        if output.role != "parameter" or output.updates is None:
            continue
        left, seen = [value], {value}
        while left:
            value = left.pop()
            op = graph.ops[value.op]
            if op.aten is not None and graph.program.ops[op.aten].phase == "optimizer":
                left += (new := set(op.operands) - seen)
                seen |= new
            elif value in annotatable and graph.type_of(value).shape == output.type.shape:
                found[arguments[output.updates].name] = value
    return found
