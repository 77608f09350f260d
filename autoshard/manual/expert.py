"""Expert parallelism."""

from __future__ import annotations

from autoshard.errors import ManualPlanError
from autoshard.graph.annotations import Annotations
from autoshard.graph.ops import Graph
from autoshard.manual.roles import Roles, composed
from autoshard.manual.stacks import experts
from autoshard.mesh import Mesh


def expert_parallel(graph: Graph, mesh: Mesh) -> Annotations:
    """GShard's expert parallelism over the last axis, data parallelism over all axes (arXiv:2006.16668).

    Stacked experts are split by expert, everything else is replicated; products with an expert dim are annotated: that
    dim split over the last axis, the batch (their other leading dim) over the others.

    Raises:
        ManualPlanError: there are no stacked experts that divide.
    """
    model = mesh.axis_names[-1]
    if all(graph.type_of(each.weight).shape[0] % mesh.axis_size(model) for each in experts(graph)):
        raise ManualPlanError(f"no layer has experts stacked in one weight whose number {model} divides")
    return composed(graph, mesh, Roles(batch=mesh.axis_names, expert=(model,)))
