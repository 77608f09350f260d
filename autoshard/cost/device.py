"""What a device kind can do: read from `devices.toml`, or from a file of the user's in the same format.

A *device* is what XLA counts as one. Where the axes of a mesh lie (torus dims, a host's switch, the network between
hosts) is a *placement*: per axis the name of a link, or `nvlink+ib` for an axis whose inner part lies on one link and
whose outer part on the other.
"""

from __future__ import annotations

import math
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal, NoReturn, cast

from autoshard.mesh import Mesh

Target = Literal["cpu", "tpu", "gpu"]
Topology = Literal["torus", "switch", "shared"]

ENVIRONMENT = "AUTOSHARD_DEVICES"
"""Environment variable: path of a device file that is read before the built-in one."""


class DeviceError(ValueError):
    """A device kind that does not exist, or a device file that is malformed; the message names the field."""


@dataclass(frozen=True)
class Link:
    """One level of the interconnect.

    Attributes:
        name: `ici`, `nvlink`, `ib`, `dcn`…
        topology: `torus` (neighbour links), `switch` (any device to any), `shared` (one bus for all).
        bandwidth: bytes/s in one direction: of one torus link, of one device's port, or of the whole bus.
        latency: seconds per hop (torus) or per message.
        island: how many devices it joins; 0 is any number.
        dims: torus dims; 0 unless a torus.
        wrap_multiple: a torus dim whose size is a multiple of this wraps around.
        source: where the figures come from.
    """

    name: str
    topology: Topology
    bandwidth: float
    latency: float
    island: int
    dims: int = 0
    wrap_multiple: int = 0
    source: str = field(default="", repr=False, compare=False)

    def wraps(self, size: int) -> bool:
        """Whether a torus dim of `size` devices closes to a ring; two devices share one link, so 2 never does."""
        return self.topology == "torus" and size > 2 and size % self.wrap_multiple == 0


@dataclass(frozen=True)
class Device:
    """A device kind.

    Attributes:
        name: as in `tpu-v5e`.
        target: whose partitioner compiles for it.
        flops: peak FLOP/s of matrix products by operand dtype (StableHLO's words), at XLA's default precision.
        memory_bandwidth: bytes/s of device memory.
        memory_bytes: its capacity; None is no limit.
        kernel_overhead: seconds to launch one fusion.
        collective_overhead: seconds to launch one collective, beside the links' latencies.
        achievable_compute, achievable_memory: part of the peaks that kernels reach.
        multiprocessors, compute_capability: of an NVIDIA GPU (132 and 9.0 for an H100), by which XLA's GPU compiler
            splits products; 0 where they do not apply.
        links: from the fastest to the slowest.
        source: where the figures come from.
    """

    name: str
    target: Target
    flops: Mapping[str, float]
    memory_bandwidth: float
    memory_bytes: int | None
    kernel_overhead: float
    collective_overhead: float
    achievable_compute: float
    achievable_memory: float
    links: tuple[Link, ...]
    multiprocessors: int = 0
    compute_capability: float = 0.0
    source: str = field(default="", repr=False, compare=False)

    def __hash__(self) -> int:
        """By name: devices are keys of hot caches."""
        return hash(self.name)

    def link(self, name: str) -> Link:
        """The link called `name`; DeviceError if this kind has none."""
        for link in self.links:
            if link.name == name:
                return link
        raise DeviceError(
            f"device {self.name} has no link {name!r}; it has {', '.join(link.name for link in self.links)}"
        )

    def peak_flops(self, dtype: str) -> float:
        """FLOP/s for operands of `dtype`; a dtype the file does not list runs as f32 (f8 kinds as i8)."""
        if dtype in self.flops:
            return self.flops[dtype]
        if dtype.startswith(("f8", "ui8")) and "i8" in self.flops:
            return self.flops["i8"]
        return self.flops["f32"]


def target_of(device: Device) -> Target:
    """Whose partitioner's behaviour is modelled for this device kind."""
    return device.target


def load_device(name_or_path: str | os.PathLike[str]) -> Device:
    """A device kind by name, or the one device of a TOML file (`file.toml`, or `file.toml#name` if it has several).

    A name is looked up in the file that the environment variable AUTOSHARD_DEVICES names, then in the built-in ones.

    Raises:
        DeviceError: no such kind; or a malformed file, naming file and field.
    """
    text = os.fspath(name_or_path)
    path, _, wanted = text.partition("#")
    if path.endswith(".toml"):
        devices = _read(path, _stamp(path))
        if wanted in devices:
            return devices[wanted]
        if not wanted and len(devices) == 1:
            return next(iter(devices.values()))
        raise DeviceError(f"{path} describes {', '.join(devices)}: say which, as in {path}#{next(iter(devices))}")
    known: dict[str, Device] = dict(_built_in())
    if extra := os.environ.get(ENVIRONMENT):
        known.update(_read(extra, _stamp(extra)))
    if text not in known:
        raise DeviceError(
            f"no device kind is called {text!r}; known are {', '.join(sorted(known))}. "
            f"Your own: pass the path of a .toml file, or name one in {ENVIRONMENT}"
        )
    return known[text]


def default_placement(mesh: Mesh, device: Device | None = None) -> tuple[str, ...]:
    """Per axis of `mesh` the link it lies on: `mesh.placement`, or, where that is empty, inner axes on the fast link.

    Innermost axes fill the fastest link's island; an axis that fills its rest and goes on is `fast+slow`. An axis that
    does not divide the rest of the island lies wholly on the slower link.
    """
    kind = device or load_device(mesh.device)
    if mesh.placement:
        for name in mesh.placement:
            for part in name.split("+"):
                kind.link(part)
        return mesh.placement
    level, room = 0, island_size(kind.links[0])
    placement: list[str] = []
    for size in reversed(mesh.shape):
        names: list[str] = []
        left = float(size)
        while left > 1 or not names:
            last = level == len(kind.links) - 1
            filled = left if last else fits(left, room)
            if filled > 1 or left == 1 or last:
                names.append(kind.links[level].name)
            left /= filled
            room /= filled
            if left > 1 and not last:
                level, room = level + 1, island_size(kind.links[level + 1])
        placement.append("+".join(dict.fromkeys(names)))
    return tuple(reversed(placement))


def island_size(link: Link) -> float:
    """How many devices `link` joins; infinity for the outermost link."""
    return link.island or math.inf


def fits(size: float, room: float) -> float:
    """The part of an axis of `size` devices that lies in the `room` (devices, may be infinite) left on a link."""
    if room == math.inf or size <= room:
        return size
    return float(math.gcd(int(size), int(room)))


# --- reading -----------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _built_in() -> Mapping[str, Device]:
    text = resources.files("autoshard.cost").joinpath("devices.toml").read_text(encoding="utf-8")
    return _parse(text, "devices.toml")


def _stamp(path: str) -> tuple[int, int]:
    try:
        status = os.stat(path)
    except OSError as error:
        raise DeviceError(f"cannot read the device file {path}: {error.strerror}") from None
    return status.st_mtime_ns, status.st_size


@lru_cache(maxsize=32)
def _read(path: str, _stamp: tuple[int, int]) -> Mapping[str, Device]:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DeviceError(f"cannot read the device file {path}: {error}") from None
    return _parse(text, path)


def _parse(text: str, where: str) -> Mapping[str, Device]:
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise DeviceError(f"{where} is not TOML: {error}") from None
    if not document:
        raise DeviceError(f"{where} describes no device: a device is a table such as [my-device]")
    return {name: _device(_Table(value, where, name), name) for name, value in document.items()}


class _Table:
    """A TOML table that hands out checked fields and knows its path."""

    def __init__(self, value: Any, where: str, path: str) -> None:
        self.where, self.path = where, path
        if not isinstance(value, dict):
            self.fail("", f"must be a table, not {value!r}")
        self.value: dict[str, Any] = value

    def fail(self, key: str, problem: str) -> NoReturn:
        raise DeviceError(f"{self.where}: {self.path}{'.' if key else ''}{key} {problem}")

    def only(self, *known: str) -> None:
        for key in self.value:
            if key not in known:
                self.fail(key, f"is not a field; the fields are {', '.join(known)}")

    def get(self, key: str) -> Any:
        if key not in self.value:
            self.fail(key, "is missing")
        return self.value[key]

    def text(self, key: str) -> str:
        value = self.get(key)
        if not isinstance(value, str) or not value:
            self.fail(key, f"must be a non-empty string, not {value!r}")
        return str(value)

    def choice(self, key: str, choices: tuple[str, ...]) -> str:
        value = self.text(key)
        if value not in choices:
            self.fail(key, f"must be one of {', '.join(choices)}, not {value!r}")
        return value

    def number(self, key: str, *, zero: bool = False, most: float = math.inf) -> float:
        value = self.get(key)
        good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not good or value < 0 or (value == 0 and not zero) or value > most:
            bound = "at least 0" if zero else "greater than 0"
            self.fail(
                key, f"must be a number {bound}{f' and at most {most:g}' if most < math.inf else ''}, not {value!r}"
            )
        return float(value)

    def whole(self, key: str, *, zero: bool = False) -> int:
        value = self.number(key, zero=zero)
        if value != int(value):
            self.fail(key, f"must be a whole number, not {value!r}")
        return int(value)

    def table(self, key: str) -> _Table:
        return _Table(self.get(key), self.where, f"{self.path}.{key}")


def _device(table: _Table, name: str) -> Device:
    table.only(
        "target", "flops", "memory_bandwidth", "memory_bytes", "kernel_overhead", "collective_overhead", "achievable",
        "multiprocessors", "compute_capability", "links", "source",
    )  # fmt: skip
    flops_table = table.table("flops")
    flops = {dtype: flops_table.number(dtype) for dtype in flops_table.value}
    if "f32" not in flops:
        flops_table.fail("f32", "is missing: it stands in for dtypes that are not listed")
    achievable = table.table("achievable")
    achievable.only("compute", "memory")
    entries = table.get("links")
    if not isinstance(entries, list) or not entries:
        table.fail("links", f"must be one or more [[{name}.links]] tables")
    links = tuple(_link(_Table(entry, table.where, f"{name}.links[{i}]")) for i, entry in enumerate(entries))
    names = [link.name for link in links]
    for i, link in enumerate(links):
        if link.name in names[:i]:
            table.fail(f"links[{i}].name", f"{link.name!r} is used twice")
        if (link.island == 0) != (i == len(links) - 1):
            table.fail(f"links[{i}].island", "must be 0 (any number of devices) for the last link and only there")
    capacity = table.value.get("memory_bytes")
    return Device(
        name=name,
        target=cast(Target, table.choice("target", ("cpu", "tpu", "gpu"))),
        flops=flops,
        memory_bandwidth=table.number("memory_bandwidth"),
        memory_bytes=None if capacity is None else table.whole("memory_bytes"),
        kernel_overhead=table.number("kernel_overhead", zero=True),
        collective_overhead=table.number("collective_overhead", zero=True),
        achievable_compute=achievable.number("compute", most=1),
        achievable_memory=achievable.number("memory", most=1),
        links=links,
        multiprocessors=table.whole("multiprocessors") if "multiprocessors" in table.value else 0,
        compute_capability=table.number("compute_capability") if "compute_capability" in table.value else 0.0,
        source=table.text("source"),
    )


def _link(table: _Table) -> Link:
    topology = cast(Topology, table.choice("topology", ("torus", "switch", "shared")))
    torus = topology == "torus"
    table.only(
        "name", "topology", "bandwidth", "latency", "island", "source", *(("dims", "wrap_multiple") if torus else ())
    )
    name = table.text("name")
    if "+" in name:
        table.fail("name", f"must not contain '+', which joins links in a placement: {name!r}")
    return Link(
        name=name,
        topology=topology,
        bandwidth=table.number("bandwidth"),
        latency=table.number("latency", zero=True),
        island=table.whole("island", zero=True),
        dims=table.whole("dims") if torus else 0,
        wrap_multiple=table.whole("wrap_multiple") if torus else 0,
        source=table.text("source"),
    )
