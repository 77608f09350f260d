"""Compile targets: which compiler, and for how many devices of what kind. None of them need be present."""

from __future__ import annotations

import importlib.util
import math
import re
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import metadata, resources
from typing import Any, Literal

from autoshard.errors import AutoshardError

Family = Literal["cpu", "tpu", "gpu"]

FORMS = "cpu, tpu-v5e:2x4, tpu-v5e:4x4:2slices (a topology per slice), h100:8, h100:2x8 (hosts x GPUs per host)"

# jax devices per chip: v4 counts two cores, the later ones one device a chip (measured with libtpu 0.0.51).
_TPU_DEVICES_PER_CHIP = {"v4": 2, "v5e": 1, "v5p": 1, "v6e": 1}
_TPU_TORUS_DIMS = {"v4": 3, "v5e": 2, "v5p": 3, "v6e": 2}
_GPU_ALIASES = {"a100": "a100-80gb", "h100-80gb": "h100"}


class TargetError(AutoshardError, ValueError):
    """A target that is unknown, malformed, of the wrong size, or whose compiler is not installed."""


@dataclass(frozen=True)
class Target:
    """A compiler and the devices to compile for.

    Attributes:
        text: what the user wrote, canonical: `tpu-v5e:2x4`.
        family: whose partitioner and backend.
        device: a device kind of `cost/devices.toml`, such as `tpu-v5e` or `h100`.
        num_devices: devices as XLA counts them, over all slices or hosts.
        topology: chips per torus dim of one slice (TPU), or (hosts, GPUs per host); empty for the CPU.
        slices: TPU slices joined by the data-centre network.
    """

    text: str
    family: Family
    device: str
    num_devices: int
    topology: tuple[int, ...] = ()
    slices: int = 1

    def __str__(self) -> str:
        """The canonical text."""
        return self.text

    def packages(self) -> dict[str, str]:
        """Installed package -> version of everything that decides what is compiled.

        Raises:
            TargetError: when the target's compiler is not installed, saying which extra brings it.
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
    if kind == "cpu":
        target = _cpu(text, rest, mesh_size)
    elif kind.startswith("tpu-"):
        target = _tpu(text, kind, rest)
    elif _GPU_ALIASES.get(kind, kind) in gpu_limits():
        target = _gpu(text, kind, rest)
    else:
        tpus = ", ".join(f"tpu-{generation}" for generation in _TPU_DEVICES_PER_CHIP)
        gpus = ", ".join(sorted({*gpu_limits(), *_GPU_ALIASES}))
        raise TargetError(f"unknown target {text!r}: known are cpu, {tpus}, {gpus}; write it like {FORMS}")
    if mesh_size is not None and target.num_devices != mesh_size:
        raise TargetError(
            f"target {target} has {target.num_devices} devices{_counted(target)}, but the plan's mesh has {mesh_size}: "
            "choose a target with as many"
        )
    return target


def _counted(target: Target) -> str:
    if target.family == "tpu" and _TPU_DEVICES_PER_CHIP[target.device.removeprefix("tpu-")] > 1:
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


def _tpu(text: str, kind: str, rest: list[str]) -> Target:
    generation = kind.removeprefix("tpu-")
    if generation not in _TPU_DEVICES_PER_CHIP:
        known = ", ".join(f"tpu-{name}" for name in _TPU_DEVICES_PER_CHIP)
        raise TargetError(f"unknown target {text!r}: TPU kinds are {known}")
    if not rest or not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){1,2}", rest[0]):
        raise _malformed(text, "a TPU needs its topology, chips per torus dim such as 2x4 or 2x2x2")
    slices = 1
    if len(rest) > 1:
        match = re.fullmatch(r"([1-9]\d*)slices?", rest[1])
        if not match or len(rest) > 2:
            raise _malformed(text, "after the topology comes nothing, or the number of slices such as 2slices")
        slices = int(match[1])
    topology = tuple(int(size) for size in rest[0].split("x"))
    dims = _TPU_TORUS_DIMS[generation]
    if len(topology) > dims:
        raise _malformed(text, f"{kind} is a torus of {dims} dims")
    topology += (1,) * (dims - len(topology))
    devices = math.prod(topology) * _TPU_DEVICES_PER_CHIP[generation] * slices
    name = f"{kind}:{'x'.join(map(str, topology))}" + (f":{slices}slices" if slices > 1 else "")
    return Target(name, "tpu", kind, devices, topology, slices)


def _gpu(text: str, kind: str, rest: list[str]) -> Target:
    if len(rest) != 1 or not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)?", rest[0]):
        raise _malformed(
            text, "a GPU target needs its number of GPUs, such as 8, or hosts x GPUs per host, such as 2x8"
        )
    sizes = [int(size) for size in rest[0].split("x")]
    hosts, gpus = sizes if len(sizes) == 2 else (1, sizes[0])
    name = f"{kind}:{rest[0]}"
    return Target(name, "gpu", _GPU_ALIASES.get(kind, kind), hosts * gpus, (hosts, gpus))
