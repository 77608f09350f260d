"""Plans that split the batch over all devices: data parallel, FSDP in its forms, split embedding tables."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from autoshard.cost.machine.device import default_placement, load_device
from autoshard.errors import ManualPlanError
from autoshard.graph.annotations import Annotations
from autoshard.graph.ops import Graph, Value
from autoshard.manual.find import gradients, subtree_outputs, token_tables, wrapped_modules
from autoshard.manual.roles import Roles, composed
from autoshard.manual.write import arguments, split
from autoshard.mesh import Mesh, Spec, replicated

_EMBEDDING_SHARE = 0.5
"""Least fraction of all parameter bytes in embedding tables for embedding parallelism."""
_SMALL_TABLE = 10_000
"""Tables of fewer rows are replicated."""


def data_parallel(graph: Graph, mesh: Mesh) -> Annotations:
    """Data parallelism: inputs split over all axes on their first dim, all else replicated, no activation pinned."""
    return Annotations(arguments(graph, mesh, {}, mesh.axis_names))


def zero_1(graph: Graph, mesh: Mesh) -> Annotations:
    """ZeRO-1: data parallel, optimizer states split over all axes on their first dim that divides.

    Gradients are annotated whole, as parameters are; each device updates its part of the weights and gathers the rest
    (arXiv:1910.02054, section 5.1; on GSPMD, arXiv:2004.13336).

    Raises:
        ManualPlanError: no optimizer state can be split.
    """
    pins, _ = _split_states(graph, mesh)
    whole = {value: replicated(len(graph.type_of(value).shape)) for value in gradients(graph).values()}
    return Annotations(whole | pins)


def zero_2(graph: Graph, mesh: Mesh) -> Annotations:
    """ZeRO-2: as `zero_1`, and gradients are split as the states that they update, so that they are reduce-scattered.

    Raises:
        ManualPlanError: as `zero_1`.
    """
    pins, of = _split_states(graph, mesh)
    split_as = {value: of[name] for name, value in gradients(graph).items() if name in of}
    return Annotations(split_as | pins)


def _split_states(graph: Graph, mesh: Mesh) -> tuple[dict[Value, Spec], dict[str, Spec]]:
    """Pins of arguments with optimizer states split over all axes; the specs of states shaped as their parameters."""
    pins = arguments(graph, mesh, {}, mesh.axis_names)
    of: dict[str, Spec] = {}
    shapes = {each.name: each.type.shape for each in graph.program.arguments}
    for op, argument in zip(graph.arguments, graph.program.arguments, strict=True):
        shape = argument.type.shape
        if argument.role == "optimizer_state" and shape:
            pins[Value(op)] = _first_dim(shape, mesh, mesh.axis_names)
            if argument.of is not None and shapes[argument.of] == shape:
                of[argument.of] = pins[Value(op)]
    if not any(map(any, of.values())):
        raise ManualPlanError("the step has no optimizer states that the mesh divides")
    return pins, of


def fsdp(graph: Graph, mesh: Mesh) -> Annotations:
    """Fully sharded data parallelism, as people write it with `mark_sharding`.

    Every parameter is split over all axes on its first dim that divides, inputs on their first dim; the outputs of
    repeated blocks are annotated with the batch split.
    """
    return composed(graph, mesh, Roles(batch=mesh.axis_names, shard=mesh.axis_names))


def hsdp(graph: Graph, mesh: Mesh) -> Annotations:
    """Hybrid sharding: FSDP over the inner axes, data parallelism over all.

    torch's HYBRID_SHARD: gathers stay on the fastest links. Copies are over the axes that cross hosts or slices; where
    none does, or all do, over the first. Otherwise as `fsdp`.

    Raises:
        ManualPlanError: the mesh has one axis.
    """
    axes = list(mesh.split_axes)
    if len(axes) < 2:
        raise ManualPlanError(
            "hybrid sharding is for meshes of two axes: weights over one, their copies over the other"
        )
    device = load_device(mesh.device)
    links = dict(zip(mesh.axis_names, default_placement(mesh, device), strict=True))
    inside = tuple(axis for axis in axes if links[axis] == device.links[0].name)
    shard = inside if 0 < len(inside) < len(axes) else tuple(axes[1:])
    return composed(graph, mesh, Roles(batch=mesh.axis_names, shard=shard))


def context_parallel(graph: Graph, mesh: Mesh) -> Annotations:
    """Context parallelism: sequences of tokens over the last axis, the batch over the others, FSDP over all.

    Inputs, embeddings and outputs of repeated blocks are annotated so; queries stay split, and attention gathers keys
    and values (all-gather, as Llama 3 was trained, arXiv:2407.21783, section 3.3.2).

    Raises:
        ManualPlanError: no table of tokens is looked up, or the last axis does not divide their sequences.
    """
    *data, last = mesh.axis_names
    return composed(graph, mesh, Roles(batch=tuple(data), shard=mesh.axis_names, context=(last,)))


def _first_dim(shape: Sequence[int], mesh: Mesh, axes: Sequence[str]) -> Spec:
    dim = next((d for d, size in enumerate(shape) if size % mesh.ways(axes) == 0), None)
    return split(len(shape), {} if dim is None else {dim: axes})


def fsdp_v2(graph: Graph, mesh: Mesh) -> Annotations:
    """What torch_xla's FSDPv2 marks (`SpmdFullyShardedDataParallel`, torch_xla 2.9).

    All axes together are its axis `fsdp`. Every parameter is split on its largest dim (the first of several), evenly or
    not; the outputs of wrapped modules and the inputs on dim 0. Wrapped are the repeated blocks (what users pass as
    `auto_wrap_policy`) and the model itself, whose logits count as its output. Optimizer states follow. The wrapper
    itself needs tensors with data.
    """
    axes = mesh.axis_names
    specs: dict[str, Spec] = {}
    for argument in graph.program.arguments:
        shape = argument.type.shape
        if argument.role == "parameter" and shape:
            specs[argument.name] = split(len(shape), {shape.index(max(shape)): axes})
    pins = arguments(graph, mesh, specs, axes)
    outputs = subtree_outputs(graph)
    wrapped = [outputs[module] for module in wrapped_modules(graph) if module in outputs]
    whole = max(outputs.values(), default=None)
    for value in wrapped + ([] if whole is None else [whole]):
        shape = graph.type_of(value).shape
        if shape and shape[0] >= mesh.size:
            pins[value] = split(len(shape), {0: axes})
    return Annotations(pins)


def embedding_parallel(graph: Graph, mesh: Mesh) -> Annotations:
    """Rows of large embedding tables over all axes, everything else data parallel, as recommendation models are trained
    (row-wise sharding of TorchRec; DLRM, arXiv:1906.00091, section 4, splits between tables, which GSPMD cannot say).

    The looked-up vectors are annotated with the batch split.

    Raises:
        ManualPlanError: tables hold less than half of the parameters.
    """
    axes = mesh.axis_names
    shapes = {each.name: each.type.shape for each in graph.program.arguments if each.role == "parameter"}
    tables = token_tables(graph)
    if sum(prod(shapes[name]) for name in tables) < _EMBEDDING_SHARE * sum(prod(shape) for shape in shapes.values()):
        raise ManualPlanError("embedding tables hold less than half of the parameters")
    specs = {name: split(2, {0: axes}) for name in tables if shapes[name][0] >= _SMALL_TABLE}
    outputs = subtree_outputs(graph)
    pins = {}
    for name in specs:
        value = outputs.get(name.rpartition(".")[0])
        if value is not None and graph.type_of(value).shape[0] % mesh.size == 0:
            pins[value] = split(len(graph.type_of(value).shape), {0: axes})
    return Annotations(arguments(graph, mesh, specs, axes) | pins)
