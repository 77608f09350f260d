"""Compile targets: a compiler, and the number and kind of devices, which need not be present."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import metadata, resources
from typing import Any, Literal

from autoshard.cost.machine.device import (
    KIND_ALIASES,
    TOPOLOGIES,
    DeviceError,
    builtin_kinds,
    load_device,
    scheduler_options,
    split_slop,
    split_topology,
)
from autoshard.cost.machine.layout import check_layout, machine
from autoshard.errors import AutoshardError
from autoshard.mesh import Mesh

Family = Literal["cpu", "tpu", "gpu"]

FORMS = f"cpu, {TOPOLOGIES}"

TPUS = ("tpu-v4", "tpu-v5e", "tpu-v5p", "tpu-v6e")
"""Kinds that libtpu compiles for without them."""


class TargetError(AutoshardError, ValueError):
    """A target that is unknown, malformed, of the wrong size, or whose compiler is not installed."""


@dataclass(frozen=True)
class Target:
    """A compiler and the devices to compile for.

    Attributes:
        text: canonical form of the user's text: `tpu-v5e:2x4`.
        family: of the partitioner and backend.
        device: a device kind of `cost/machine/devices.toml`, such as `tpu-v5e` or `h100`.
        num_devices: XLA devices over all slices or hosts.
        topology: chips per torus dim of one slice (TPU), or (hosts, GPUs per host); empty for the CPU.
        slices: TPU slices joined by the data-centre network.
        options: of XLA, for a kind such as `h100+slop30`.
    """

    text: str
    family: Family
    device: str
    num_devices: int
    topology: tuple[int, ...] = ()
    slices: int = 1
    options: Mapping[str, int | bool] = field(default_factory=dict)

    def __str__(self) -> str:
        """The canonical text."""
        return self.text

    def packages(self) -> dict[str, str]:
        """Package -> version of everything that determines the compiled program.

        Raises:
            TargetError: the target's compiler is not installed; names the extra that installs it.
        """
        wanted = {"cpu": [], "tpu": ["libtpu"], "gpu": ["jax-cuda12-plugin", "jax-cuda12-pjrt"]}[self.family]
        found = {}
        for name in ["jax", "jaxlib", *wanted]:
            try:
                found[name] = metadata.version(name)
            except metadata.PackageNotFoundError:
                raise TargetError(_not_installed(self, name)) from None
        if self.family == "gpu" and importlib.util.find_spec("jax_plugins.xla_cuda12") is None:
            raise TargetError(_not_installed(self, "jax-cuda12-plugin"))
        return found


def _not_installed(target: Target, package: str) -> str:
    extra = {"libtpu": "tpu"}.get(package, "gpu" if package.startswith("jax-cuda") else "xla")
    return f"target {target}: {package} is not installed; pip install 'autoshard[{extra}]' brings it"


@cache
def gpu_limits() -> dict[str, dict[str, Any]]:
    """GPU kind -> the limits in `gpus.toml`."""
    return tomllib.loads(resources.files("autoshard.verify").joinpath("gpus.toml").read_text())


def parse_target(text: str, mesh_size: int | None = None) -> Target:
    """Read a target such as `cpu`, `tpu-v5e:2x4`, `tpu-v5e:4x4:2slices`, `h100:8` or `h100:2x8`.

    `mesh_size` is the number of devices of the plan's mesh: `cpu` takes it, the others must equal it.

    Raises:
        TargetError: on an unknown kind or form, or another number of devices than the mesh has.
    """
    kind, *rest = text.strip().lower().split(":")
    gpu, _ = split_slop(kind)
    if kind == "cpu":
        target = _cpu(text, rest, mesh_size)
    elif kind in TPUS:
        target = _placed(text.strip().lower(), "tpu")
    elif KIND_ALIASES.get(gpu, gpu) in gpu_limits():
        target = _placed(text.strip().lower(), "gpu")
    elif kind.startswith("tpu-"):
        raise TargetError(f"unknown target {text!r}: TPU kinds are {', '.join(TPUS)}")
    else:
        gpus = ", ".join(sorted({*gpu_limits(), *KIND_ALIASES}))
        raise TargetError(f"unknown target {text!r}: known are cpu, {', '.join(TPUS)}, {gpus}; write it like {FORMS}")
    if mesh_size is not None and target.num_devices != mesh_size:
        raise TargetError(
            f"target {target} has {target.num_devices} devices{_counted(target)}, but the plan's mesh has {mesh_size}: "
            "choose a target with as many"
        )
    return target


def default_target(mesh: Mesh) -> str:
    """The target of a mesh: its device kind with its topology, declared or implied.

    Raises:
        TargetError: the kind is the user's own, and names a family but no target.
    """
    device = load_device(mesh.device)
    if device.compiler.compiles_for_all_kinds:
        return device.target
    if device.kind not in builtin_kinds():
        raise TargetError(
            f"{device.kind} is a device kind of your own: what it compiles for is not known; verify takes it, such as "
            "--target h100:8"
        )
    return machine(mesh, device)


def on_target(mesh: Mesh, target: Target) -> Mesh:
    """The mesh with the target's topology; where both are of one device kind, with its own placement.

    The user's own device kind keeps its figures on a target of the same family.

    Raises:
        TargetError: the mesh does not match the target; says why.
    """
    kind = load_device(mesh.device)
    own = kind.target == target.family and kind.kind not in builtin_kinds()
    if target.family == "cpu":
        return mesh if own else replace(mesh, device=target.device, placement=())
    placement = mesh.placement if own or kind.kind == target.device else ()
    device = str(target)
    if own:  # the user's own kind, in the target's topology
        device = f"{split_topology(mesh.device)[0]}:{device.partition(':')[2]}"
    placed = replace(mesh, device=device, placement=placement)
    try:
        check_layout(placed)
    except DeviceError as error:
        raise TargetError(str(error)) from None
    return placed


def _counted(target: Target) -> str:
    if target.family == "tpu" and load_device(target.device).chip_devices > 1:
        return f" (XLA counts two per {target.device} chip)"
    return ""


def _malformed(text: str, why: str) -> TargetError:
    return TargetError(f"malformed target {text!r}: {why}; write it like {FORMS}")


def _cpu(text: str, rest: list[str], mesh_size: int | None) -> Target:
    if rest:
        if len(rest) > 1 or not re.fullmatch(r"[1-9]\d*", rest[0]):
            raise _malformed(text, "after cpu: comes a number of devices, or nothing for as many as the mesh has")
        return Target(f"cpu:{rest[0]}", "cpu", "cpu", int(rest[0]))
    if mesh_size is None:
        raise TargetError("target cpu has as many devices as the plan's mesh, and no mesh was given: write cpu:8")
    return Target("cpu", "cpu", "cpu", mesh_size)


def _placed(text: str, family: Family) -> Target:
    """A TPU or GPU target; its topology is read as that of a device kind."""
    kind, topology = split_topology(text)
    try:
        if topology is None:
            load_device(f"{kind}:")  # raises: names what is missing
        device = load_device(text)
    except DeviceError as error:
        raise TargetError(str(error)) from None
    assert device.devices is not None
    suffix = device.name.partition(":")[2]
    if family == "gpu":
        suffix = topology or ""
    found = Target(f"{kind}:{suffix}", family, device.kind, device.devices, device.topology, device.slices)
    return replace(found, options=scheduler_options(text))
