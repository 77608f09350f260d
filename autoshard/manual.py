"""The plans people write by hand, as annotations.

Each takes a graph and a mesh and annotates what its authors annotate: parameters (their optimizer states follow),
inputs and the activations named in its docstring; everything else is left to GSPMD's propagation. Generic over models:
linear layers are found by how their weight is contracted, and recognised as column- or row-parallel by the names that
model families use, or by their place in a chain.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from autoshard.errors import ManualPlanError
from autoshard.graph.annotations import Annotations
from autoshard.graph.ops import Graph, Value
from autoshard.mesh import Mesh, Spec, replicated

_FLOATS = ("f16", "bf16", "f32", "f64")
_COLUMN = re.compile(
    r"(^|\.)(c_attn|q_attn|c_fc|[qkv](_proj|_lin)?|gate(_up)?_proj|up_proj|query|key|value|fc1|wi(_\d)?|w1|w3"
    r"|query_key_value|dense_h_to_4h|intermediate\.dense|lin1)$"
)
_ROW = re.compile(r"(^|\.)(c_proj|o|o_proj|out_proj|out_lin|down_proj|fc2|wo|w2|dense_4h_to_h|output\.dense|lin2)$")
_EMBEDDING_SHARE = 0.5
"""Part of all parameter bytes that tables hold in the models that embedding parallelism is for."""
_SMALL_TABLE = 10_000
"""Tables of fewer rows are kept whole on every device."""
_HEADS = ("lm_head.weight", "wte.weight", "embed_tokens.weight", "word_embeddings.weight", "shared.weight")


@dataclass(frozen=True)
class Linear:
    """A weight that a dot contracts in the forward pass.

    Attributes:
        name: of the parameter.
        module: its module's path.
        weight: its value.
        contracted: the dim of the weight that is summed over; the other dims are the output's.
        output: the module's result, bias included: the last value it made, or the dot.
    """

    name: str
    module: str
    weight: Value
    contracted: int
    output: Value


def linears(graph: Graph) -> tuple[Linear, ...]:
    """Every linear layer, in forward order."""
    arguments = dict(zip(graph.arguments, graph.program.arguments, strict=True))
    results = module_outputs(graph)
    found: dict[str, Linear] = {}
    for op in graph.ops:
        if op.kind != "dot_general" or not _is_forward(graph, op.aten):
            continue
        for position, operand in enumerate(op.operands):
            source, dims = _through_views(graph, operand)
            argument = arguments.get(source.op)
            if argument is None or argument.role != "parameter" or len(argument.type.shape) != 2:
                continue
            contract = op.attrs["rhs_contract" if position else "lhs_contract"]
            if len(contract) != 1 or argument.name in found:
                continue
            output = results.get(op.module, Value(op.id))
            found[argument.name] = Linear(argument.name, op.module, source, dims[contract[0]], output)
    return tuple(found.values())


@dataclass(frozen=True)
class Experts:
    """A weight of all experts of a layer, stacked: three dims, of which the first counts experts.

    Attributes:
        name: of the parameter.
        weight: its value.
        contracted: the dim that the forward product sums over, 1 or 2.
        product: the product, where it has a dim of experts (a GShard layer's, not one that gathers weights).
        dims: of the product: the dim of experts, and that of the weight's output.
    """

    name: str
    weight: Value
    contracted: int
    product: Value | None
    dims: tuple[int, int]


def experts(graph: Graph) -> tuple[Experts, ...]:
    """Every stack of experts that a forward product reads, its batch dim (or a gather) on the first dim."""
    arguments = dict(zip(graph.arguments, graph.program.arguments, strict=True))
    annotatable = set(graph.aten_outputs.values())
    found: dict[str, Experts] = {}
    for op in graph.ops:
        if op.kind != "dot_general" or not _is_forward(graph, op.aten):
            continue
        for side, operand in zip(("lhs", "rhs"), op.operands, strict=True):
            value, dims = _through_views(graph, operand)
            gathered = graph.ops[value.op].kind == "gather"
            if gathered:
                value, dims = _through_views(graph, graph.ops[value.op].operands[0])
            argument = arguments.get(value.op)
            contract, batch = op.attrs[f"{side}_contract"], op.attrs[f"{side}_batch"]
            if argument is None or argument.role != "parameter" or len(argument.type.shape) != 3:
                continue
            if argument.name in found or len(contract) != 1 or len(batch) != 1 or dims[batch[0]] != 0:
                continue
            rank = len(op.results[0].shape)
            free = rank - 1 if side == "rhs" else 1
            product = None if gathered or Value(op.id) not in annotatable else Value(op.id)
            found[argument.name] = Experts(argument.name, value, dims[contract[0]], product, (0, free))
    return tuple(found.values())


def module_outputs(graph: Graph) -> dict[str, Value]:
    """Module path -> the last float value that its own forward code made (not its children's)."""
    found: dict[str, Value] = {}
    for module, value in _forward_values(graph):
        found[module] = value
    return found


def subtree_outputs(graph: Graph) -> dict[str, Value]:
    """Module path -> the last float value that it or a module inside it made in the forward pass."""
    found: dict[str, Value] = {}
    for module, value in _forward_values(graph):
        path = module
        while path:
            found[path] = value
            path = path.rpartition(".")[0]
    return found


def _forward_values(graph: Graph) -> Iterator[tuple[str, Value]]:
    for (aten, _), value in sorted(graph.aten_outputs.items()):
        op = graph.program.ops[aten]
        if op.phase == "forward" and graph.type_of(value).dtype in _FLOATS and graph.ops[value.op].kind != "argument":
            yield op.module, value


def _is_forward(graph: Graph, aten: int | None) -> bool:
    return aten is not None and graph.program.ops[aten].phase == "forward"


def _through_views(graph: Graph, value: Value) -> tuple[Value, list[int]]:
    """The value behind transposes and converts, and for each dim of `value` the dim of that source."""
    dims = list(range(len(graph.type_of(value).shape)))
    while (op := graph.ops[value.op]).kind in ("transpose", "convert"):
        if op.kind == "transpose":
            dims = [op.attrs["permutation"][dim] for dim in dims]
        value = op.operands[0]
    return value, dims


def _split(rank: int, dims: Mapping[int, Sequence[str]]) -> Spec:
    return tuple(tuple(dims.get(dim, ())) for dim in range(rank))


def _arguments(graph: Graph, mesh: Mesh, specs: Mapping[str, Spec], batch: Sequence[str]) -> dict[Value, Spec]:
    """Pins of all arguments: parameters as given (states follow), inputs split by `batch` on their first dim."""
    pins: dict[Value, Spec] = {}
    for op_id, argument in zip(graph.arguments, graph.program.arguments, strict=True):
        shape = argument.type.shape
        spec = replicated(len(shape))
        if argument.role == "input" and shape and shape[0] % mesh.ways(batch) == 0:
            spec = _split(len(shape), {0: batch})
        elif argument.role in ("parameter", "buffer"):
            spec = specs.get(argument.name, spec)
        elif argument.role == "optimizer_state" and argument.of is not None:
            follows = specs.get(argument.of, spec)
            spec = follows if len(follows) == len(shape) else spec
        if shape:
            pins[Value(op_id)] = spec
    return pins


def data_parallel(graph: Graph, mesh: Mesh) -> Annotations:
    """Inputs split over all axes on their first dim, everything else replicated; no activations are annotated."""
    return Annotations(_arguments(graph, mesh, {}, mesh.axis_names))


def fsdp(graph: Graph, mesh: Mesh) -> Annotations:
    """Fully sharded data parallelism, as torch_xla's FSDPv2 does it.

    Every parameter is split over all axes on its first dim that divides (FSDPv2 itself: its first dim), inputs on their
    first dim; the outputs of repeated blocks are annotated with the batch split.
    """
    axes = mesh.axis_names
    specs = {}
    for argument in graph.program.arguments:
        if argument.role == "parameter":
            shape = argument.type.shape
            dim = next((d for d, size in enumerate(shape) if size % mesh.size == 0), None)
            specs[argument.name] = _split(len(shape), {} if dim is None else {dim: axes})
    pins = _arguments(graph, mesh, specs, axes)
    pins.update(_batch_split(graph, mesh, axes, wrapped_modules(graph)))
    return Annotations(pins)


def wrapped_modules(graph: Graph) -> tuple[str, ...]:
    """Paths of the blocks of numbered containers (`h.0`, `layers.3`) that hold no numbered container themselves."""
    paths = {op.module for op in graph.program.ops if op.phase == "forward"}
    blocks: dict[str, None] = {}
    for path in sorted(paths):
        match = re.match(r"(.*?\.?\b\d+)(\.|$)", path)
        if match:
            blocks.setdefault(match.group(1))
    return tuple(blocks)


def _batch_split(graph: Graph, mesh: Mesh, axes: Sequence[str], modules: Sequence[str]) -> dict[Value, Spec]:
    outputs = subtree_outputs(graph)
    pins = {}
    for module in modules:
        value = outputs.get(module)
        if value is not None:
            shape = graph.type_of(value).shape
            if len(shape) > 1 and shape[0] % mesh.ways(axes) == 0:
                pins[value] = _split(len(shape), {0: axes})
    return pins


def megatron(graph: Graph, mesh: Mesh) -> Annotations:
    """Megatron's tensor parallelism over the last axis, data parallelism over the others.

    Column-parallel weights are split on their output dim, row-parallel ones on the contracted dim, the embedding and a
    tied or untied head on the vocabulary dim; column outputs are annotated as split on their last dim, row outputs and
    the embedding's as whole there, all with the batch split. Within a layer of experts every expert is split alike.

    Raises:
        ManualPlanError: the program has no pair of linear layers and no token embedding (a convolutional network).
    """
    *data, model = mesh.axis_names
    layers = linears(graph)
    style = _styles(layers)
    tables = _token_tables(graph)
    if not tables and not {"row", "head"} & set(style.values()):
        raise ManualPlanError(
            "Megatron splits pairs of linear layers and token embeddings, and this program has neither"
        )
    specs: dict[str, Spec] = {}
    pins: dict[Value, Spec] = {}
    for layer in layers:
        kind = style[layer.name]
        shape = graph.type_of(layer.weight).shape
        split = layer.contracted if kind == "row" else 1 - layer.contracted
        if kind != "whole" and (kind == "head" or shape[split] % mesh.axis_size(model) == 0):
            specs[layer.name] = _split(2, {split: (model,)})
            if kind in ("column", "row"):
                output = graph.type_of(layer.output).shape
                dims = {0: tuple(data)} if output[0] % mesh.ways(data) == 0 else {}
                if kind == "column":
                    dims[len(output) - 1] = (model,)
                pins[layer.output] = _split(len(output), dims)
    for stack in experts(graph):
        split = stack.contracted if _ROW.search(stack.name) else 3 - stack.contracted
        if graph.type_of(stack.weight).shape[split] % mesh.axis_size(model) == 0:
            specs[stack.name] = _split(3, {split: (model,)})
    specs.update({name: _split(2, {0: (model,)}) for name in tables})
    specs.update(_biases(graph, layers, style, specs, model))
    outputs = module_outputs(graph)
    for name in tables:
        module = name.rpartition(".")[0]
        if module in outputs and len(graph.type_of(outputs[module]).shape) == 3:
            pins.update(_batch_split(graph, mesh, data, [module]))
    return Annotations(_arguments(graph, mesh, specs, data) | pins)


def expert_parallel(graph: Graph, mesh: Mesh) -> Annotations:
    """Expert parallelism over the last axis, data parallelism over all axes, as GShard does it (arXiv:2006.16668).

    Stacks of experts are split by expert, everything else is replicated; products that have a dim of experts are
    annotated with it split by the last axis and the batch, their other leading dim, by the others.

    Raises:
        ManualPlanError: there are no stacked experts that divide.
    """
    *data, model = mesh.axis_names
    stacks = [each for each in experts(graph) if graph.type_of(each.weight).shape[0] % mesh.axis_size(model) == 0]
    if not stacks:
        raise ManualPlanError(f"no layer has experts stacked in one weight whose number {model} divides")
    specs = {each.name: _split(3, {0: (model,)}) for each in stacks}
    pins: dict[Value, Spec] = {}
    for each in stacks:
        if each.product is not None:
            shape = graph.type_of(each.product).shape
            dims: dict[int, Sequence[str]] = {each.dims[0]: (model,)}
            other = next(dim for dim in range(len(shape)) if dim not in each.dims)
            if shape[other] % mesh.ways(data) == 0:
                dims[other] = tuple(data)
            pins[each.product] = _split(len(shape), dims)
    return Annotations(_arguments(graph, mesh, specs, mesh.axis_names) | pins)


def embedding_parallel(graph: Graph, mesh: Mesh) -> Annotations:
    """Rows of large embedding tables over all axes, everything else data parallel, as recommendation models are trained
    (row-wise sharding of TorchRec; DLRM, arXiv:1906.00091, section 4, splits between tables, which GSPMD cannot say).

    What is looked up is annotated with the batch split.

    Raises:
        ManualPlanError: tables hold less than half of the parameters.
    """
    axes = mesh.axis_names
    shapes = {each.name: each.type.shape for each in graph.program.arguments if each.role == "parameter"}
    tables = _token_tables(graph)
    if sum(prod(shapes[name]) for name in tables) < _EMBEDDING_SHARE * sum(prod(shape) for shape in shapes.values()):
        raise ManualPlanError("embedding tables hold less than half of the parameters")
    specs = {name: _split(2, {0: axes}) for name in tables if shapes[name][0] >= _SMALL_TABLE}
    outputs = subtree_outputs(graph)
    pins = {}
    for name in specs:
        value = outputs.get(name.rpartition(".")[0])
        if value is not None and graph.type_of(value).shape[0] % mesh.size == 0:
            pins[value] = _split(len(graph.type_of(value).shape), {0: axes})
    return Annotations(_arguments(graph, mesh, specs, axes) | pins)


def _styles(layers: Sequence[Linear]) -> dict[str, str]:
    """Column, row, head or whole for every linear layer: by name, or, where no layer has a name, alternating."""
    style = {}
    named = any(_COLUMN.search(layer.module) or _ROW.search(layer.module) for layer in layers)
    column_next = True
    for layer in layers:
        if layer.name.endswith(_HEADS):
            style[layer.name] = "head"
        elif _COLUMN.search(layer.module):
            style[layer.name] = "column"
        elif _ROW.search(layer.module):
            style[layer.name] = "row"
        elif named:
            style[layer.name] = "whole"
        else:
            style[layer.name] = "column" if column_next else "row"
            column_next = not column_next
    if layers and not named:
        last = layers[-1].name  # a chain's odd last layer has no partner: keep it whole
        if style[last] == "column":
            style[last] = "whole"
    return style


def _token_tables(graph: Graph) -> list[str]:
    """Token embeddings, split by vocabulary: tables that a gather reads and that are not positions."""
    found: dict[str, None] = {}
    arguments = dict(zip(graph.arguments, graph.program.arguments, strict=True))
    for op in graph.ops:
        if op.kind == "gather" and _is_forward(graph, op.aten):
            source, _ = _through_views(graph, op.operands[0])
            argument = arguments.get(source.op)
            if argument is None or argument.role != "parameter" or len(argument.type.shape) != 2:
                continue
            if not re.search(r"wpe|position|token_type|relative", argument.name):
                found.setdefault(argument.name)
    return list(found)


def _biases(
    graph: Graph, layers: Sequence[Linear], style: Mapping[str, str], specs: Mapping[str, Spec], model: str
) -> dict[str, Spec]:
    """A column-parallel layer's bias is split as its output is."""
    column = {layer.module for layer in layers if style[layer.name] == "column" and layer.name in specs}
    return {
        argument.name: ((model,),)
        for argument in graph.program.arguments
        if argument.role == "parameter"
        and len(argument.type.shape) == 1
        and argument.name.endswith("bias")
        and argument.name.rpartition(".")[0] in column
    }


PLANS: Mapping[str, Callable[[Graph, Mesh], Annotations]] = {
    "dp": data_parallel,
    "fsdp": fsdp,
    "megatron": megatron,
    "expert": expert_parallel,
    "embedding": embedding_parallel,
}
"""Name on the command line -> plan; one may raise ManualPlanError."""


def plan_named(name: str) -> Callable[[Graph, Mesh], Annotations]:
    """The plan called `name`.

    Raises:
        ValueError: there is none.
    """
    if name not in PLANS:
        raise ValueError(f"no manual plan is called {name!r}; there are {', '.join(PLANS)}")
    return PLANS[name]
