"""Branch and bound over mesh shapes.

Shapes are planned in turn, those of few axes first: they are cheap and give an incumbent. A shape is pruned once the
solver's bound proves that no plan on it beats the incumbent, and skipped where it equals an earlier shape up to the
names of its axes. The plan records the outcome of each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from autoshard.cost.machine.device import load_device
from autoshard.cost.machine.layout import layout
from autoshard.mesh import Mesh
from autoshard.planning.candidate import Candidate
from autoshard.planning.options import PlanningOptions
from autoshard.plans.value import MeshTried, NoPlanError, PlanError
from autoshard.solver.solve import GoalOutOfReachError
from autoshard.strategies.carry import Carried

MIN_MESH_GAIN = 1e-3
"""A shape is pruned when no plan on it can beat the incumbent by more than this fraction."""
FIRST_SHARE = 0.25
"""Fraction of the time limit for the solve on each shape; the best shape is solved again with all of it."""


class Find(Protocol):
    """Finds the candidate on one mesh, as `candidate_on` does for a graph."""

    def __call__(
        self, mesh: Mesh, options: PlanningOptions, seconds: float, goal: float, others: Sequence[Carried], /
    ) -> Candidate:
        """The candidate; see `candidate_on`."""


def best_mesh(find: Find, meshes: Sequence[Mesh], options: PlanningOptions) -> tuple[Candidate, tuple[MeshTried, ...]]:
    """The candidate on the mesh with the shortest predicted step, and the outcome of every mesh.

    Raises:
        NoPlanError: no mesh has a plan; that of the mesh that needs least memory.
    """
    if len(meshes) == 1:
        return find(meshes[0], options, options.time_limit, math.inf, ()), ()
    best: Candidate | None = None
    at = meshes[0]  # where the best one was asked for; it may be for the same devices without latency hiding
    tried: dict[Mesh, MeshTried] = {}
    refused: list[tuple[float, Mesh]] = []
    others: list[Carried] = []
    for mesh in sorted(meshes, key=lambda mesh: len(mesh.shape)):
        twin = next((other for other in tried if _same(mesh, other)), None)
        if twin is not None:
            tried[mesh] = MeshTried(mesh.shape, "same", note=f"as {_text(twin.shape)}: its axes lie on one network")
            continue
        goal = math.inf
        if best is not None and best.solver is not None:  # what is predicted of it can be more than its objective
            goal = (1 - MIN_MESH_GAIN) * max(best.solver.objective, best.time)
        try:
            found = find(mesh, options, FIRST_SHARE * options.time_limit, goal, others)
        except GoalOutOfReachError as pruned:
            assert best is not None
            note = f"no plan is better than that on {_text(best.mesh.shape)} by more than {100 * MIN_MESH_GAIN:g} %"
            tried[mesh] = MeshTried(mesh.shape, "pruned", bound=pruned.bound, note=note)
            continue
        except NoPlanError as error:
            refused.append((error.least, mesh))
            tried[mesh] = MeshTried(mesh.shape, "no plan", note=str(error))
            continue
        if found.decision is not None and found.decision.carried is not None:
            others.append(found.decision.carried)
        tried[mesh] = _tried(found)
        if best is None or found.time < best.time:
            best, at = found, mesh
    if best is None:
        if not refused:
            raise PlanError("no mesh to plan for")
        _, mesh = min(refused, key=lambda each: each[0])
        # It may have run out of time.
        best = find(mesh, options, options.time_limit, math.inf, others)
        tried[mesh] = _tried(best)
    elif best.solver is not None and best.solver.status == "time_limit":
        again = find(best.mesh, options, options.time_limit, math.inf, others)
        if again.time < best.time:
            best = again
            tried[at] = _tried(best)
    return best, tuple(tried.values())


def _tried(found: Candidate) -> MeshTried:
    assert found.solver is not None
    return MeshTried(
        found.mesh.shape,
        "planned",
        found.time,
        found.solver.objective,
        found.solver.bound,
        found.prediction.peak_memory_bytes,
        "" if found.solver.status == "optimal" else found.solver.status.replace("_", " "),
    )


def _text(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


def _same(mesh: Mesh, other: Mesh) -> bool:
    """Whether two meshes differ in the order of their axes alone, all of which lie on one network.

    On a torus, and across hosts or slices, the order decides where an axis lies.
    """
    if sorted(mesh.shape) != sorted(other.shape) or mesh.device != other.device or mesh.placement or other.placement:
        return False
    device = load_device(mesh.device)
    used = [dim for each in (mesh, other) for dim in layout(each, device) if dim.size > 1]
    return all(dim.link.topology != "torus" for dim in used) and len({dim.link.name for dim in used}) == 1
