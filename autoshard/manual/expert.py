"""Expert parallelism."""

from __future__ import annotations

from collections.abc import Sequence

from autoshard.errors import ManualPlanError
from autoshard.graph.annotations import Annotations
from autoshard.graph.ops import Graph, Value
from autoshard.manual.find import experts
from autoshard.manual.write import arguments, split
from autoshard.mesh import Mesh, Spec


def expert_parallel(graph: Graph, mesh: Mesh) -> Annotations:
    """GShard's expert parallelism over the last axis, data parallelism over all axes (arXiv:2006.16668).

    Stacked experts are split by expert, everything else is replicated; products with an expert dim are annotated: that
    dim split over the last axis, the batch (their other leading dim) over the others.

    Raises:
        ManualPlanError: there are no stacked experts that divide.
    """
    *data, model = mesh.axis_names
    stacks = [each for each in experts(graph) if graph.type_of(each.weight).shape[0] % mesh.axis_size(model) == 0]
    if not stacks:
        raise ManualPlanError(f"no layer has experts stacked in one weight whose number {model} divides")
    specs = {each.name: split(3, {0: (model,)}) for each in stacks}
    pins: dict[Value, Spec] = {}
    for each in stacks:
        if each.product is not None:
            shape = graph.type_of(each.product).shape
            dims: dict[int, Sequence[str]] = {each.dims[0]: (model,)}
            other = next((dim for dim in range(len(shape)) if dim not in each.dims), None)
            if other is not None and shape[other] % mesh.ways(data) == 0:
                dims[other] = tuple(data)
            pins[each.product] = split(len(shape), dims)
    return Annotations(arguments(graph, mesh, specs, mesh.axis_names) | pins)
