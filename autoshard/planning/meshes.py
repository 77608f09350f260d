"""Mesh shapes to plan for."""

from __future__ import annotations

from collections.abc import Sequence

from autoshard.cost.machine.device import DeviceError, load_device
from autoshard.cost.machine.layout import check_layout
from autoshard.mesh import MAX_DEVICES, Mesh
from autoshard.planning.options import Confirm
from autoshard.verify.targets import Target, default_target, on_target, parse_target


def meshes_for(
    mesh: Mesh | Sequence[int] | str | None,
    devices: int | None,
    device: str | None,
    refine: str | None = None,
    confirm: Confirm = "never",
) -> list[Mesh]:
    """The meshes to plan for; without a device kind, that of the `refine` target.

    Raises:
        ValueError: there is none, or it does not match the target's topology.
        TargetError: the compiler to refine with, or to `confirm` always, is not installed.
    """
    if refine is None:
        meshes = candidate_meshes(mesh, devices, device)
    else:
        meshes = candidate_meshes(mesh, devices, device if isinstance(mesh, Mesh) else device_for(device, refine))
        check_refine(refine, meshes[0])
    if confirm == "always":
        confirming_target(meshes[0], refine).packages()
    return meshes


def confirming_target(mesh: Mesh, refine: str | None) -> Target:
    """The target whose compiler confirms a plan's memory: that of `refine`, else the mesh's own.

    Raises:
        TargetError: the device kind is the user's own.
    """
    return parse_target(refine or default_target(mesh), mesh.size)


def check_refine(text: str, mesh: Mesh) -> Target:
    """Parse the target to refine for; the mesh must match its topology.

    Raises:
        TargetError: there is no such target, its compiler is not installed, or the mesh does not match it.
    """
    target = parse_target(text, mesh.size)
    target.packages()
    on_target(mesh, target)
    return target


def device_for(device: str | None, refine: str | None) -> str | None:
    """The device kind to plan for: as given, else that of the `refine` target."""
    return refine if device is None and refine is not None and not refine.startswith("cpu") else device


def candidate_meshes(mesh: Mesh | Sequence[int] | str | None, devices: int | None, device: str | None) -> list[Mesh]:
    """The meshes to plan for: the one given, or every shape of `devices` with up to three axes.

    A device kind with a topology (`h100:2x8`) implies their number; shapes that do not match it are left out.
    """
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
