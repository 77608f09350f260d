"""Tensor parallelism: Megatron's, its sequence-parallel form, with FSDP on other axes, and of the vocabulary alone."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from autoshard.errors import ManualPlanError
from autoshard.graph.annotations import Annotations
from autoshard.graph.ops import Graph, Value
from autoshard.manual.find import (
    Linear,
    experts,
    forward_values,
    linears,
    module_outputs,
    norms,
    product_readers,
    subtree_outputs,
    token_tables,
    wrapped_modules,
)
from autoshard.manual.write import arguments, batch_split, split
from autoshard.mesh import Mesh, Spec

_COLUMN = re.compile(
    r"(^|\.)(c_attn|q_attn|c_fc|[qkv](_proj|_lin)?|gate(_up)?_proj|up_proj|query|key|value|fc1|wi(_\d)?|w1|w3"
    r"|query_key_value|dense_h_to_4h|intermediate\.dense|lin1)$"
)
_ROW = re.compile(r"(^|\.)(c_proj|o|o_proj|out_proj|out_lin|down_proj|fc2|wo|w2|dense_4h_to_h|output\.dense|lin2)$")
_HEADS = ("lm_head.weight", "wte.weight", "embed_tokens.weight", "word_embeddings.weight", "shared.weight")


def megatron(graph: Graph, mesh: Mesh) -> Annotations:
    """Megatron's tensor parallelism over the last axis, data parallelism over the others.

    Column-parallel weights are split on their output dim, row-parallel ones on the contracted dim, the embedding and a
    tied or untied head on the vocabulary dim; column outputs are annotated as split on their last dim, row outputs and
    the embedding's as replicated there, all with the batch split. Every expert of a layer is split alike.

    Raises:
        ManualPlanError: the program has no pair of linear layers and no token embedding (a convolutional network).
    """
    specs, pins = _tensor_parallel(graph, mesh)
    return Annotations(arguments(graph, mesh, specs, mesh.axis_names[:-1]) | pins)


def sequence_parallel(graph: Graph, mesh: Mesh) -> Annotations:
    """Megatron's tensor parallelism with its sequence parallelism (arXiv:2205.05198).

    As `megatron`; outside the tensor-parallel regions (embeddings, row outputs, norms, blocks) activations are also
    split along the sequence by the last axis, so that partial results are reduce-scattered; annotated copies gather the
    inputs of column-parallel layers and the head, and the gradients of row outputs.

    Raises:
        ManualPlanError: as `megatron`; or no row-parallel layer has a sequence dim that the last axis divides.
    """
    *data, model = mesh.axis_names
    specs, pins = _tensor_parallel(graph, mesh)
    layers = linears(graph)
    style = styles(layers)

    def along(value: Value) -> Spec | None:
        shape = graph.type_of(value).shape
        if len(shape) != 3 or shape[0] % mesh.ways(data) or shape[1] % mesh.axis_size(model):
            return None
        return (tuple(data), (model,), ())

    whole: Spec = (tuple(data), (), ())
    rows = [each for each in layers if style[each.name] == "row" and each.name in specs]
    residual = {value: spec for each in rows if (spec := along(value := each.output)) is not None}
    if not residual:
        raise ManualPlanError(
            f"sequence parallelism splits what goes from one tensor-parallel block to the next along its sequence, and "
            f"no row-parallel layer here makes a (batch, sequence, features) tensor whose sequence {model} divides"
        )
    width = {graph.type_of(value).shape for value in residual}
    outputs = module_outputs(graph)
    tables = [outputs.get(name.rpartition(".")[0]) for name in token_tables(graph)]
    for made in [*tables, *norms(graph).values(), *_block_outputs(graph)]:
        if made is not None and graph.type_of(made).shape in width:
            residual[made] = (tuple(data), (model,), ())
    copies: dict[tuple[Value, int], Spec] = {}
    for each in layers:
        if each.name not in specs:
            continue
        row = style[each.name] == "row"
        gathered = each.gradient if row else each.input
        if gathered is None or graph.type_of(gathered).shape not in width:
            continue
        if row:
            residual[gathered] = (tuple(data), (model,), ())
        if gathered in residual:
            copies.update({(gathered, aten): whole for aten in product_readers(graph, gathered)})
    return Annotations(arguments(graph, mesh, specs, data) | pins | residual, copies)


def _block_outputs(graph: Graph) -> list[Value]:
    outputs = subtree_outputs(graph)
    return [outputs[module] for module in wrapped_modules(graph) if module in outputs]


def fsdp_tensor_parallel(graph: Graph, mesh: Mesh) -> Annotations:
    """Two-dimensional parallelism: Megatron's tensor parallelism over the last axis, FSDP over the others.

    As `megatron`, and every parameter is also split over the other axes, on its first dim that divides and that the
    last axis does not split; the outputs of repeated blocks that contain a row-parallel layer are annotated with the
    batch split.

    Raises:
        ManualPlanError: as `megatron`; or the mesh has one axis.
    """
    data = mesh.axis_names[:-1]
    if mesh.ways(data) == 1:
        raise ManualPlanError("FSDP with tensor parallelism is for meshes of two axes: one for each")
    specs, pins = _tensor_parallel(graph, mesh)
    both: dict[str, Spec] = {}
    for argument in graph.program.arguments:
        if argument.role == "parameter":
            shape = argument.type.shape
            spec = list(specs.get(argument.name, split(len(shape), {})))
            free = (dim for dim, size in enumerate(shape) if not spec[dim] and size % mesh.ways(data) == 0)
            if (dim := next(free, None)) is not None:
                spec[dim] = data
            both[argument.name] = tuple(spec)
    layers = linears(graph)
    style = styles(layers)
    rows = [f"{each.module}." for each in layers if style[each.name] == "row"]
    whole = [path for path in wrapped_modules(graph) if any(row.startswith(f"{path}.") for row in rows)]
    blocks = batch_split(graph, mesh, data, whole)
    return Annotations(arguments(graph, mesh, both, data) | blocks | pins)


def vocabulary_parallel(graph: Graph, mesh: Mesh) -> Annotations:
    """Embedding, head and loss split by vocabulary over the last axis, everything else data parallel over all axes.

    Megatron's vocabulary-parallel layers alone (arXiv:1909.08053, section 3). Token tables and the head are split on
    the vocabulary dim; looked-up vectors and the head's input are annotated with the batch split by the other axes,
    logits and what the loss computes from them also as split by vocabulary; outputs of repeated blocks with the batch
    split by all axes.

    Raises:
        ManualPlanError: no layer makes logits over the vocabulary of a token table.
    """
    *data, model = mesh.axis_names
    layers = linears(graph)
    style = styles(layers)
    shapes = {each.name: each.type.shape for each in graph.program.arguments if each.role == "parameter"}
    tables = token_tables(graph)
    heads = [each for each in layers if style[each.name] == "head"]
    heads = heads or [each for each in layers[-1:] if shapes[each.name][1 - each.contracted] in _rows(tables, shapes)]
    if not heads or not tables:
        raise ManualPlanError("no layer makes logits over the vocabulary of an embedding table")
    specs = {name: split(2, {0: (model,)}) for name in tables}
    pins: dict[Value, Spec] = {}
    copies: dict[tuple[Value, int], Spec] = {}
    pins.update(batch_split(graph, mesh, mesh.axis_names, wrapped_modules(graph)))
    pins.update(batch_split(graph, mesh, data, [name.rpartition(".")[0] for name in tables]))
    for head in heads:
        specs[head.name] = split(2, {1 - head.contracted: (model,)})
        if head.input is not None and graph.type_of(head.input).shape[0] % mesh.ways(data) == 0:
            spec = split(len(graph.type_of(head.input).shape), {0: data})
            copies.update({(head.input, aten): spec for aten in product_readers(graph, head.input)})
        pins.update(_logits(graph, mesh, head))
    return Annotations(arguments(graph, mesh, specs, mesh.axis_names) | pins, copies)


def _rows(tables: Sequence[str], shapes: Mapping[str, tuple[int, ...]]) -> set[int]:
    return {shapes[name][0] for name in tables}


def _logits(graph: Graph, mesh: Mesh, head: Linear) -> dict[Value, Spec]:
    """The head's output, and values of its shape in the loss: split by batch and vocabulary."""
    *data, model = mesh.axis_names
    shape = graph.type_of(head.output).shape
    dims: dict[int, Sequence[str]] = {len(shape) - 1: (model,)}
    if len(shape) > 1 and shape[0] % mesh.ways(data) == 0:
        dims[0] = data
    spec = split(len(shape), dims)
    return {
        value: spec
        for _, value in forward_values(graph)
        if value >= head.output and graph.type_of(value).shape == shape
    }


def _tensor_parallel(graph: Graph, mesh: Mesh) -> tuple[dict[str, Spec], dict[Value, Spec]]:
    """Megatron's specs of parameters by name, and pins of activations.

    Raises:
        ManualPlanError: as `megatron`.
    """
    *data, model = mesh.axis_names
    layers = linears(graph)
    style = styles(layers)
    tables = token_tables(graph)
    if not tables and not {"row", "head"} & set(style.values()):
        raise ManualPlanError(
            "Megatron splits pairs of linear layers and token embeddings, and this program has neither"
        )
    specs: dict[str, Spec] = {}
    pins: dict[Value, Spec] = {}
    for layer in layers:
        kind = style[layer.name]
        shape = graph.type_of(layer.weight).shape
        dim = layer.contracted if kind == "row" else 1 - layer.contracted
        if kind != "whole" and (kind == "head" or shape[dim] % mesh.axis_size(model) == 0):
            specs[layer.name] = split(2, {dim: (model,)})
            if kind in ("column", "row"):
                output = graph.type_of(layer.output).shape
                dims = {0: tuple(data)} if output and output[0] % mesh.ways(data) == 0 else {}
                if kind == "column" and output:
                    dims[len(output) - 1] = (model,)
                pins[layer.output] = split(len(output), dims)
            else:
                pins.update(_logits(graph, mesh, layer))
    for stack in experts(graph):
        dim = stack.contracted if _ROW.search(stack.name) else 3 - stack.contracted
        if graph.type_of(stack.weight).shape[dim] % mesh.axis_size(model) == 0:
            specs[stack.name] = split(3, {dim: (model,)})
    specs.update({name: split(2, {0: (model,)}) for name in tables})
    specs.update(_biases(graph, layers, style, specs, model))
    outputs = module_outputs(graph)
    for name in tables:
        module = name.rpartition(".")[0]
        if module in outputs and len(graph.type_of(outputs[module]).shape) == 3:
            pins.update(batch_split(graph, mesh, data, [module]))
    return specs, pins


def styles(layers: Sequence[Linear]) -> dict[str, str]:
    """Classify every linear layer as column, row, head or whole (replicated): by name, else alternating."""
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
        last = layers[-1].name  # a chain's odd last layer has no partner: replicate it
        if style[last] == "column":
            style[last] = "whole"
    return style


def _biases(
    graph: Graph, layers: Sequence[Linear], style: Mapping[str, str], specs: Mapping[str, Spec], model: str
) -> dict[str, Spec]:
    """Split a column-parallel layer's bias as its output."""
    column = {layer.module for layer in layers if style[layer.name] == "column" and layer.name in specs}
    return {
        argument.name: ((model,),)
        for argument in graph.program.arguments
        if argument.role == "parameter"
        and len(argument.type.shape) == 1
        and argument.name.endswith("bias")
        and argument.name.rpartition(".")[0] in column
    }
