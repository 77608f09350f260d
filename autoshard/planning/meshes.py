"""Which meshes there are to plan for, and the search over all shapes of a number of devices.

Every shape is planned in turn, those of few axes first, since they are cheap and give the others something to beat. A
shape is given up as soon as the solver's bound proves that no plan on it is better than the best one so far, and not
begun where it is the same as one before up to the names of its axes. What came of each is kept in the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from autoshard.mesh import MAX_DEVICES, Mesh
from autoshard.plans.value import MeshTried, NoPlanError, Plan, PlanError

if TYPE_CHECKING:
    from autoshard.solver.problem import Problem

Watch = Callable[[str, float, float], None]
"""What the solver tells of itself: (stage, best objective so far, bound so far)."""
PlanOn = Callable[[Mesh, float, Watch | None], "tuple[Plan, Problem]"]
"""Plans on a mesh, within so many seconds of solving, watched."""

WORTH = 1e-3
"""A shape is given up when no plan on it can be better than the best so far by more than this part."""
FIRST_SHARE = 0.25
"""Part of the time limit that the solver has for each shape; the best is solved again with all of it."""


class _PrunedError(Exception):
    """Raised through a solve whose bound shows that it is in vain."""

    def __init__(self, bound: float) -> None:
        self.bound = bound


def plan_best(meshes: Sequence[Mesh], plan_on: PlanOn, time_limit: float) -> tuple[Plan, Problem]:
    """The plan on the mesh with the shortest predicted step, with what came of every mesh, and its problem.

    Raises:
        NoPlanError: no mesh has a plan; that of the mesh that needs least memory.
    """
    if len(meshes) == 1:
        return plan_on(meshes[0], time_limit, None)
    best: tuple[Plan, Problem] | None = None
    tried: dict[Mesh, MeshTried] = {}
    refused: list[tuple[float, Mesh]] = []
    for mesh in sorted(meshes, key=lambda mesh: len(mesh.shape)):
        twin = next((other for other in tried if _same(mesh, other)), None)
        if twin is not None:
            tried[mesh] = MeshTried(mesh.shape, "same", note=f"as {_text(twin.shape)}: its axes lie on one network")
            continue
        target = None if best is None else best[0].solver
        goal = float("inf") if target is None else (1 - WORTH) * target.objective

        def watch(stage: str, objective: float, bound: float, goal: float = goal) -> None:
            if bound >= goal:
                raise _PrunedError(bound)

        try:
            found = plan_on(mesh, FIRST_SHARE * time_limit, watch)
        except _PrunedError as pruned:
            assert best is not None
            note = f"no plan is better than that on {_text(best[0].mesh.shape)} by more than {100 * WORTH:g} %"
            tried[mesh] = MeshTried(mesh.shape, "pruned", bound=pruned.bound, note=note)
        except NoPlanError as error:
            refused.append((error.least, mesh))
            tried[mesh] = MeshTried(mesh.shape, "no plan", note=str(error))
        else:
            tried[mesh] = _tried(found[0])
            if best is None or _time(found[0]) < _time(best[0]):
                best = found
    if best is None:
        if not refused:
            raise PlanError("no mesh to plan for")
        _, mesh = min(refused, key=lambda each: each[0])
        best = plan_on(mesh, time_limit, None)  # it may have been for want of time
        tried[mesh] = _tried(best[0])
    elif best[0].solver is not None and best[0].solver.status == "time_limit":
        again = plan_on(best[0].mesh, time_limit, None)
        if _time(again[0]) < _time(best[0]):
            best = again
            tried[best[0].mesh] = _tried(best[0])
    return replace(best[0], search=tuple(tried.values())), best[1]


def _tried(plan: Plan) -> MeshTried:
    assert plan.predicted is not None
    assert plan.solver is not None
    return MeshTried(
        plan.mesh.shape,
        "planned",
        plan.predicted.step_time_s,
        plan.solver.objective,
        plan.solver.bound,
        plan.predicted.peak_memory_bytes,
        "" if plan.solver.status == "optimal" else plan.solver.status.replace("_", " "),
    )


def _time(plan: Plan) -> float:
    assert plan.predicted is not None
    return plan.predicted.step_time_s


def _text(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


def _same(mesh: Mesh, other: Mesh) -> bool:
    """Whether two meshes differ in the order of their axes alone, and every axis lies on one and the same network.

    On a torus, and across hosts or slices, the order says where an axis lies.
    """
    from autoshard.cost.machine.device import load_device
    from autoshard.cost.machine.layout import layout

    if sorted(mesh.shape) != sorted(other.shape) or mesh.device != other.device or mesh.placement or other.placement:
        return False
    device = load_device(mesh.device)
    used = [dim for each in (mesh, other) for dim in layout(each, device) if dim.size > 1]
    return all(dim.link.topology != "torus" for dim in used) and len({dim.link.name for dim in used}) == 1


def candidate_meshes(mesh: Mesh | Sequence[int] | str | None, devices: int | None, device: str | None) -> list[Mesh]:
    """The meshes to plan for: the one given, or every shape of `devices` with up to three axes.

    A device kind with a topology (`h100:2x8`) says itself how many there are; shapes that do not lie on it are out.
    """
    from autoshard.cost.machine.device import DeviceError, load_device
    from autoshard.cost.machine.layout import check_layout

    if mesh is not None:
        if devices is not None:
            raise ValueError("give a mesh or a number of devices, not both")
        given = _given_mesh(mesh, device)
        check_layout(given)
        return [given]
    kind = device or "cpu"
    if devices is None and ":" in kind:
        devices = load_device(kind).devices
    if devices is None:
        raise ValueError("no devices are attached to plan for: pass a mesh such as mesh='2x4', or devices=8")
    if not isinstance(devices, int):
        raise ValueError(f"devices={devices!r}: a whole number of devices is needed")
    if not 1 <= devices <= MAX_DEVICES:
        raise ValueError(f"devices={devices}: at least one is needed" + f", at most {MAX_DEVICES:,}" * (devices > 1))
    meshes, problems = [], []
    for shape in factorisations(devices):
        candidate = Mesh(shape, (), kind)
        try:
            check_layout(candidate)
        except DeviceError as error:
            problems.append(error)
        else:
            meshes.append(candidate)
    if not meshes:
        raise problems[0]
    return meshes


def _given_mesh(mesh: Mesh | Sequence[int] | str, device: str | None) -> Mesh:
    if isinstance(mesh, Mesh):
        if device is not None and device != mesh.device:
            raise ValueError(f"the mesh is of {mesh.device}, but device={device!r}; give the mesh that device kind")
        return mesh
    if isinstance(mesh, str):
        return Mesh.parse(mesh, device=device or "cpu")
    if not hasattr(mesh, "__iter__"):
        raise ValueError(
            f"a mesh is a shape such as (2, 4) or '2x4', or a Mesh, not {mesh!r}; "
            "to have every shape of 8 devices tried, pass devices=8"
        )
    return Mesh(tuple(mesh), (), device or "cpu")


def factorisations(devices: int, axes: int = 3) -> list[tuple[int, ...]]:
    """Mesh shapes of up to `axes` axes with `devices` devices, none of one device: (8,), (2, 4), (4, 2), (2, 2, 2)."""
    found: list[tuple[int, ...]] = [(devices,)]
    if axes > 1:
        for first in range(2, devices // 2 + 1):
            if devices % first == 0:
                found.extend((first, *rest) for rest in factorisations(devices // first, axes - 1))
    return found
