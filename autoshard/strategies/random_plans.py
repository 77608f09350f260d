"""Random plans: a model of the partitioner must predict them as well as good ones."""

from __future__ import annotations

import numpy as np

from autoshard.cost.machine.device import load_device
from autoshard.graph.annotations import Annotations
from autoshard.graph.ops import Graph
from autoshard.mesh import Mesh
from autoshard.solver.problem import Array
from autoshard.strategies.formulate import formulate
from autoshard.strategies.guard import guarded


def random_annotations(graph: Graph, mesh: Mesh, seed: int) -> Annotations:
    """A random strategy for every group and sharding for every argument, with ties kept."""
    draw = np.random.default_rng(seed)
    formulation = formulate(graph, mesh, load_device(mesh.device))
    problem = formulation.problem
    choice = [int(draw.integers(len(costs))) for costs in problem.node_costs]
    ties: dict[int, list[tuple[int, Array]]] = {}
    for (tail, head), costs in zip(problem.edges, problem.edge_costs, strict=True):
        ties.setdefault(tail, []).append((head, costs))
        ties.setdefault(head, []).append((tail, costs.T))
    for node in range(len(choice)):  # arguments first: their updates follow them
        allowed = np.isfinite(problem.node_costs[node])
        for other, costs in ties.get(node, ()):
            if other < node:
                allowed = allowed & np.isfinite(costs[:, choice[other]])
        if not allowed[choice[node]] and allowed.any():
            choice[node] = int(draw.choice(np.flatnonzero(allowed)))
    return guarded(graph, formulation.annotations(choice), mesh)
