"""Tensor parallelism: Megatron's, its sequence-parallel form, with FSDP on other axes, and of the vocabulary alone."""

from __future__ import annotations

from autoshard.errors import ManualPlanError
from autoshard.graph.annotations import Annotations
from autoshard.graph.ops import Graph, Value
from autoshard.manual.find import linears, product_readers, token_tables, wrapped_modules
from autoshard.manual.roles import Layout, Roles, composed, split_logits, styles
from autoshard.manual.write import arguments, batch_split, split
from autoshard.mesh import Mesh, Spec


def megatron(graph: Graph, mesh: Mesh) -> Annotations:
    """Megatron's tensor parallelism over the last axis, data parallelism over the others.

    Column-parallel weights are split on their output dim, row-parallel ones on the contracted dim, the embedding and a
    tied or untied head on the vocabulary dim; column outputs are annotated as split on their last dim, row outputs and
    the embedding's as replicated there, all with the batch split. Every expert of a layer is split alike.

    Raises:
        ManualPlanError: the program has no pair of linear layers and no token embedding (a convolutional network).
    """
    return composed(graph, mesh, Roles(batch=mesh.axis_names[:-1], tensor=mesh.axis_names[-1:]))


def sequence_parallel(graph: Graph, mesh: Mesh) -> Annotations:
    """Megatron's tensor parallelism with its sequence parallelism (arXiv:2205.05198).

    As `megatron`; outside the tensor-parallel regions (embeddings, row outputs, norms, blocks) activations are also
    split along the sequence by the last axis, so that partial results are reduce-scattered; annotated copies gather the
    inputs of column-parallel layers and the head, and the gradients of row outputs.

    Raises:
        ManualPlanError: as `megatron`; or no row-parallel layer has a sequence dim that the last axis divides.
    """
    return composed(graph, mesh, Roles(batch=mesh.axis_names[:-1], tensor=mesh.axis_names[-1:], sequence=True))


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
    return composed(graph, mesh, Roles(batch=data, shard=data, tensor=mesh.axis_names[-1:]))


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
    tables, style = token_tables(graph), styles(graph)
    heads = [each for each in linears(graph) if style[each.name] == "head"]
    if not heads or not tables:
        raise ManualPlanError("no layer makes logits over the vocabulary of an embedding table")
    layout = Layout(graph, mesh, Roles(batch=tuple(data), tensor=(model,)))
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
        pins.update(split_logits(layout, head))
    return Annotations(arguments(graph, mesh, specs, mesh.axis_names) | pins, copies)
