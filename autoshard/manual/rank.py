"""Ranks plans by hand by a rough estimate of each, to select those worth a prediction.

A prediction follows the compiler through the whole program; the estimate reads annotations of arguments alone. It
counts gathers and reductions of every parameter (none for looked-up tables), the optimizer's memory traffic, the
products of linear layers, and an all-reduce of activations for each layer split over an axis that does not split the
batch. Costs that all plans share are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import prod

from autoshard.cost.machine.collectives import CollectiveKind, seconds
from autoshard.cost.machine.device import Device
from autoshard.dtypes import dtype_bytes
from autoshard.errors import ManualPlanError
from autoshard.graph.annotations import Annotations
from autoshard.graph.ops import Graph, Value
from autoshard.manual.find import Linear, linears, token_tables
from autoshard.mesh import Mesh, Spec, spec_axes


def ranked(
    graph: Graph, mesh: Mesh, device: Device, plans: Mapping[str, Callable[[Graph, Mesh], Annotations]]
) -> Iterator[tuple[str, Annotations]]:
    """The plans that apply to a program, best estimate first, without duplicates."""
    layers = linears(graph)
    found: list[tuple[float, str, Annotations]] = []
    for name, annotate in plans.items():
        try:
            annotations = annotate(graph, mesh)
        except ManualPlanError:
            continue
        if all(annotations != other for _, _, other in found):
            found.append((estimate(graph, annotations, mesh, device, layers), name, annotations))
    for _, name, annotations in sorted(found, key=lambda each: each[0]):
        yield name, annotations


def estimate(
    graph: Graph, annotations: Annotations, mesh: Mesh, device: Device, layers: tuple[Linear, ...] | None = None
) -> float:
    """Rough seconds of a step that depend on the specs of parameters and inputs; see the module's docstring.

    Args:
        layers: `linears(graph)`, if the caller has it.
    """
    layers = linears(graph) if layers is None else layers
    arguments = {Value(op): each for op, each in zip(graph.arguments, graph.program.arguments, strict=True)}
    training = any(each.role == "optimizer_state" for each in arguments.values())
    pins = annotations.pins

    def spec_of(value: Value) -> Spec:
        return pins.get(value, ((),) * len(graph.type_of(value).shape))

    def move(kind: CollectiveKind, axes: frozenset[str], size: float) -> float:
        return seconds(kind, mesh.in_order(axes), size, mesh, device) if axes else 0.0

    batch = frozenset(
        axis for value, each in arguments.items() if each.role == "input" for axis in spec_axes(spec_of(value))
    )
    tables = token_tables(graph)
    total = 0.0
    for value, each in arguments.items():
        size = prod(each.type.shape) * dtype_bytes(each.type.dtype)
        axes = spec_axes(spec_of(value))
        held = size / mesh.ways(mesh.in_order(axes))
        if training and each.role in ("parameter", "optimizer_state"):
            total += 2 * held / device.memory_bandwidth  # read and written by the optimizer
        if each.role == "parameter":
            spread = size / mesh.ways(mesh.in_order(axes - batch))
            looked_up = each.name in tables and axes & batch
            if not looked_up:
                total += move("all-gather", axes & batch, spread)
            if training:
                if not looked_up:
                    total += move("reduce-scatter", axes & batch, spread)
                total += move("all-reduce", batch - axes, held)
    for layer in layers:
        spec = spec_of(layer.weight)
        rows = prod(graph.type_of(layer.output).shape[:-1])
        flops = 2 * prod(graph.type_of(layer.weight).shape) * rows * (3 if training else 1)
        ways = mesh.ways(mesh.in_order(batch | spec_axes(spec)))
        total += flops / ways / device.peak_flops(graph.type_of(layer.weight).dtype)
        summed = frozenset(spec[layer.contracted])
        for axes, activation in (
            (summed, layer.output),
            (spec_axes(spec) - summed if training else frozenset(), layer.input),
        ):
            if activation is not None and axes - batch:
                kept = graph.type_of(activation)
                moved = prod(kept.shape) * dtype_bytes(kept.dtype) / mesh.ways(mesh.in_order(batch))
                total += move("all-reduce", frozenset(axes - batch), moved)
    return total
