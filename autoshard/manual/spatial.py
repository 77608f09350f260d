"""Spatial partitioning of convolutional networks: image rows split over devices, with halo exchanges."""

from __future__ import annotations

from autoshard.errors import ManualPlanError
from autoshard.graph.annotations import Annotations
from autoshard.graph.ops import Graph, Value
from autoshard.manual.find import is_forward, module_outputs, subtree_outputs, wrapped_modules
from autoshard.manual.write import arguments, split
from autoshard.mesh import Mesh, Spec

_HEIGHT = 2
"""The height dim of an image in torch's layout: batch, channels, height, width."""


def spatial(graph: Graph, mesh: Mesh) -> Annotations:
    """Images split by height over the last axis, by batch over the others; parameters replicated.

    Inputs of four or more dims, outputs of convolutions and of repeated blocks are annotated so where the axis divides
    the height; elsewhere (deep in the network) the batch is split over all axes instead.

    Raises:
        ManualPlanError: fewer than two convolutions have an output whose height divides; or the batch does not divide
            (with an idle axis XLA miscomputes a convolution's gradient, see `strategies/guard.py`).
    """
    *data, model = mesh.axis_names

    def spec(value: Value) -> Spec | None:
        shape = graph.type_of(value).shape
        if shape[0] % mesh.ways(data):
            raise ManualPlanError(f"the batch of {shape[0]} is not divided by {', '.join(data)}")
        if shape[_HEIGHT] % mesh.axis_size(model) == 0:
            return split(len(shape), {0: data, _HEIGHT: (model,)})
        if shape[0] % mesh.size == 0:
            return split(len(shape), {0: mesh.axis_names})
        return None

    convolving = {op.module for op in graph.ops if op.kind == "convolution" and is_forward(graph, op.aten)}
    outputs = module_outputs(graph)
    made = [outputs[module] for module in sorted(convolving) if module in outputs]
    made = [value for value in made if len(graph.type_of(value).shape) > 3]
    divided = [value for value in made if graph.type_of(value).shape[_HEIGHT] % mesh.axis_size(model) == 0]
    if len(divided) < 2:
        raise ManualPlanError(
            f"spatial partitioning is for networks of convolutions over images whose height {model} divides: "
            f"{len(divided)} of them here"
        )
    blocks = subtree_outputs(graph)
    made += [blocks[path] for path in wrapped_modules(graph) if path in blocks]
    pins = {
        value: found for value in made if len(graph.type_of(value).shape) > 3 and (found := spec(value)) is not None
    }
    given = arguments(graph, mesh, {}, mesh.axis_names)
    for op, argument in zip(graph.arguments, graph.program.arguments, strict=True):
        if argument.role == "input" and len(argument.type.shape) > 2 and argument.type.shape[0] % mesh.ways(data) == 0:
            shape = argument.type.shape
            height = _HEIGHT if len(shape) > 3 else 1  # a map of classes has no channels
            if shape[height] % mesh.axis_size(model) == 0:
                given[Value(op)] = split(len(shape), {0: data, height: (model,)})
    return Annotations(given | pins)
