"""Device kinds: figures from `devices.toml`, or from a user's file in the same format.

A *device* is what XLA counts as one. A device kind may carry its *topology*: `tpu-v5e:4x4:2slices` (chips per torus
dim, slices), `h100:2x8` (hosts x GPUs per host); `h100+slop30` has options for XLA (`scheduler_options`). A
*placement* assigns mesh axes to links (torus, a host's switch, the network between hosts): per axis the name of a link,
or `nvlink+ib` for an axis whose inner part is on one link and whose outer part is on the other; `layout.py` derives
coordinates.
"""

from __future__ import annotations

import difflib
import math
import os
import re
import reprlib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal, NoReturn, cast

from autoshard.cost.machine.targets import CAPABILITIES, Capabilities, Target
from autoshard.mesh import Mesh

Topology = Literal["torus", "switch", "shared"]

ENVIRONMENT = "AUTOSHARD_DEVICES"
"""Environment variable: path of a device file that is read before the built-in one."""


SLOP, FULL_SLOP = "+slop", 95
"""What ends the name of a GPU kind for which XLA's latency hiding scheduler fills this percentage of the memory that
arguments and results leave, and XLA's default. With less it hides less; with none it is off."""
HOPPER = 9.0
"""Compute capability from which on XLA hides latency (`SolLatencyEstimator::IsSupportedForModule`)."""


class DeviceError(ValueError):
    """An unknown device kind, or a malformed device file; the message names the field."""


@dataclass(frozen=True)
class Link:
    """One level of the interconnect.

    Attributes:
        name: `ici`, `nvlink`, `ib`, `dcn`…
        topology: `torus` (neighbour links), `switch` (any device to any), `shared` (one bus for all).
        bandwidth: bytes/s in one direction: of one torus link, of one device's port, or of the whole bus.
        latency: seconds per neighbour link (torus) or per message.
        island: how many devices it joins; 0 is any number.
        dims: torus dims; 0 unless a torus.
        wrap_multiple: a torus dim whose size is a multiple of this wraps around.
        wrap_whole: dims wrap around only if all of them are such multiples.
        shape: devices along each torus dim, if a topology was given.
        source: where the figures come from.
    """

    name: str
    topology: Topology
    bandwidth: float
    latency: float
    island: int
    dims: int = 0
    wrap_multiple: int = 0
    wrap_whole: bool = False
    shape: tuple[int, ...] = ()
    source: str = field(default="", repr=False, compare=False)

    def wraps(self, shape: tuple[int, ...]) -> tuple[bool, ...]:
        """Which dims of a torus of `shape` close to a ring; two devices share one link, so 2 never does."""
        able = [size > 2 and size % self.wrap_multiple == 0 for size in shape]
        return tuple(able) if not self.wrap_whole or all(able[: self.dims]) else (False,) * len(shape)


@dataclass(frozen=True)
class Device:
    """A device kind.

    Attributes:
        name: as in `tpu-v5e`.
        target: the family of its compiler.
        flops: peak FLOP/s of matrix products by operand dtype (StableHLO's words), at XLA's default precision.
        memory_bandwidth: bytes/s of device memory.
        memory_bytes: its capacity, as the datasheet counts it; None is no limit.
        kernel_overhead: seconds to launch one fusion.
        collective_overhead: seconds to launch one collective, beside the links' latencies.
        achievable_compute, achievable_memory: fractions of the peaks that kernels achieve.
        multiprocessors, compute_capability: of an NVIDIA GPU (132 and 9.0 for an H100), which XLA's GPU compiler
            needs for split-K; 0 elsewhere.
        links: from the fastest to the slowest.
        chip_devices: how many devices XLA counts per chip (place on a torus).
        topology: chips per torus dim of one slice, or (hosts, devices per host); empty if none was given.
        slices: slices of that topology.
        on_chip_bytes: memory that the compiler assigns values to beside device memory (a TPU's VMEM or CMEM).
        cores: cores that run one device's program; each has its own on-chip memory.
        clock: cycles per second of the cores, the unit of a TPU compiler's estimates; 0 if unknown.
        sparse_copy_bytes: size from which sparse cores copy tables to another layout; 0 without sparse cores.
        usable_bytes: what the runtime leaves of the memory to a step; None is all of `memory_bytes`.
        measured: entry of `measured.toml` whose models time its kernels and collectives; empty for the roofline.
        slop: percentage of memory that XLA's latency hiding scheduler for GPUs fills (`scheduler_options`).
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
    chip_devices: int = 1
    topology: tuple[int, ...] = ()
    slices: int = 1
    on_chip_bytes: int = 0
    cores: int = 1
    clock: float = 0.0
    sparse_copy_bytes: int = 0
    usable_bytes: int | None = None
    measured: str = ""
    slop: int = FULL_SLOP
    source: str = field(default="", repr=False, compare=False)

    @property
    def compiler(self) -> Capabilities:
        """Capabilities of its target family's compiler."""
        return CAPABILITIES[self.target]

    @property
    def kind(self) -> str:
        """The name without a topology, and without `+slop30`."""
        return self.name.partition(":")[0].partition(SLOP)[0]

    @property
    def overlaps(self) -> bool:
        """Whether its compiler issues collectives asynchronously; XLA's for GPUs does from Hopper on."""
        return self.target != "cpu" and self.slop > 0 and not 0.0 < self.compute_capability < HOPPER

    @property
    def memory_limit(self) -> int | None:
        """Bytes per device that a step can take, by default; None is no limit."""
        return self.memory_bytes if self.usable_bytes is None else self.usable_bytes

    @property
    def devices(self) -> int | None:
        """Number of devices of the topology; None if none was given."""
        return math.prod(self.topology) * self.chip_devices * self.slices if self.topology else None

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

    @property
    def reachable_bandwidth(self) -> float:
        """Bytes/s of device memory that kernels achieve."""
        return self.memory_bandwidth * self.achievable_memory

    def reachable_flops(self, dtype: str) -> float:
        """FLOP/s that kernels achieve on operands of `dtype`."""
        return self.peak_flops(dtype) * self.achievable_compute

    def peak_flops(self, dtype: str) -> float:
        """FLOP/s for operands of `dtype`; a dtype that the file does not list runs as f32 (f8 kinds as i8)."""
        if dtype in self.flops:
            return self.flops[dtype]
        if dtype.startswith(("f8", "ui8")) and "i8" in self.flops:
            return self.flops["i8"]
        return self.flops["f32"]


@lru_cache(maxsize=64)
def _with_topology(device: Device, text: str) -> Device:
    """The device kind with a topology: how many devices its innermost link joins, and in which shape."""
    inner = device.links[0]
    if inner.topology == "torus":
        topology, slices = _torus_topology(device, text)
        shape = (*topology, device.chip_devices) if device.chip_devices > 1 else topology
        inner = replace(inner, island=math.prod(shape) if len(device.links) > 1 else 0, shape=shape)
    elif inner.topology == "switch" and len(device.links) > 1:
        topology, slices = _hosts(device, text), 1
        inner = replace(inner, island=topology[1])
    else:
        raise DeviceError(
            f"a device of kind {device.name} has no topology: write {device.name}, not {device.name}:{text}"
        )
    name = f"{device.name}:{'x'.join(map(str, topology))}" + (f":{slices}slices" if slices > 1 else "")
    return replace(device, name=name, links=(inner, *device.links[1:]), topology=topology, slices=slices)


TOPOLOGIES = "tpu-v5e:2x4, tpu-v5e:4x4:2slices (a topology per slice), h100:8, h100:2x8 (hosts x GPUs per host)"


def _malformed(device: Device, text: str, why: str) -> DeviceError:
    return DeviceError(f"malformed topology '{device.name}:{text}': {why}; write it like {TOPOLOGIES}")


def _torus_topology(device: Device, text: str) -> tuple[tuple[int, ...], int]:
    first, *rest = text.split(":")
    link, dims = device.links[0], device.links[0].dims
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)+" if dims > 1 else r"[1-9]\d*", first):
        example = "x".join(["2"] * (dims - 1) + ["4"])
        raise _malformed(device, text, f"{device.name} needs its topology, chips per torus dim such as {example}")
    slices = 1
    if rest:
        match = re.fullmatch(r"([1-9]\d*)slices?", rest[0])
        if not match or len(rest) > 1:
            raise _malformed(device, text, "after the topology comes nothing, or the number of slices such as 2slices")
        slices = int(match[1])
    topology = tuple(int(size) for size in first.split("x"))
    if len(topology) > dims:
        raise _malformed(device, text, f"{device.name} is a torus of {dims} dims")
    topology += (1,) * (dims - len(topology))
    devices = math.prod(topology) * device.chip_devices
    if link.island and devices > link.island:
        most = link.island // device.chip_devices
        raise _malformed(device, text, f"a slice of {device.name} has at most {most} chips, not {math.prod(topology)}")
    if slices > 1 and len(device.links) == 1:
        raise _malformed(device, text, f"{device.name} has no link between slices")
    return topology, slices


def _hosts(device: Device, text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)?", text):
        raise _malformed(
            device, text, "a GPU target needs its number of GPUs, such as 8, or hosts x GPUs per host, such as 2x8"
        )
    sizes = tuple(int(size) for size in text.split("x"))
    hosts, each = sizes if len(sizes) == 2 else (1, sizes[0])
    if each > device.links[0].island:
        most = device.links[0].island
        example = f"{-(-hosts * each // most)}x{most}"
        raise _malformed(
            device, text, f"{device.links[0].name} joins at most {most} of {device.name}, not {each}: such as {example}"
        )
    return hosts, each


KIND_ALIASES = {"a100": "a100-80gb", "h100-80gb": "h100"}
"""Other names of kinds."""


def load_device(name_or_path: str | os.PathLike[str]) -> Device:
    """A device kind by name, or the one device of a TOML file (`file.toml`, or `file.toml#name` if it has several).

    A name is looked up in the file that the environment variable AUTOSHARD_DEVICES names, then in the built-in ones.
    A topology may follow: `tpu-v5e:4x4:2slices`, `h100:2x8`, `file.toml:2x8`; before it, of GPUs, `+slop30`.

    Raises:
        DeviceError: no such kind; a malformed file, naming file and field; or a topology that the kind cannot have.
    """
    named, topology = split_topology(os.fspath(name_or_path))
    kind, percent = split_slop(named)
    device = _load_kind(KIND_ALIASES.get(kind, kind))
    if percent is not None:
        device = _with_slop(device, percent)
    return device if topology is None else _with_topology(device, topology)


def _with_slop(device: Device, percent: int) -> Device:
    if device.target != "gpu":
        raise DeviceError(f"{device.name}{SLOP}{percent}: only XLA's GPU compiler has a scheduler with such a limit")
    if percent > 100:
        raise DeviceError(f"{device.name}{SLOP}{percent}: a percentage of memory is at most 100")
    return replace(device, name=f"{device.name}{SLOP}{percent}", slop=percent)


def split_slop(kind: str) -> tuple[str, int | None]:
    """`h100+slop30` as `h100` and 30; None where no percentage follows."""
    found = re.fullmatch(r"(.*)\+slop(\d{1,3})", kind, re.DOTALL)
    return (found[1], int(found[2])) if found else (kind, None)


def slop_of(name: str) -> int | None:
    """The percentage in the name of a kind, perhaps with a topology; None without one. The kind may be unknown."""
    return split_slop(split_topology(name)[0])[1]


def scheduler_options(name: str) -> dict[str, int | bool]:
    """XLA's options for the percentage in the name of a kind; none without one."""
    percent = slop_of(name)
    if percent == 0:  # the latency estimator turns the scheduler on again
        off = "xla_gpu_enable_latency_hiding_scheduler", "xla_gpu_enable_analytical_sol_latency_estimator"
        return dict.fromkeys(off, False)
    return {} if percent is None else {"xla_gpu_memory_limit_slop_factor": percent}


def with_slop(mesh: Mesh, percent: int | None) -> Mesh:
    """The mesh with a percentage of memory for the latency hiding scheduler, or none, in place of one that it has."""
    kind, topology = split_topology(mesh.device)
    ending = "" if percent is None else f"{SLOP}{percent}"
    return replace(mesh, device=split_slop(kind)[0] + ending + ("" if topology is None else f":{topology}"))


def builtin_kinds() -> frozenset[str]:
    """Names of the kinds in `devices.toml`."""
    return frozenset(_built_in())


def split_topology(text: str) -> tuple[str, str | None]:
    """`tpu-v5e:4x4:2slices` as `tpu-v5e` and `4x4:2slices`; None where no topology follows."""
    found = re.fullmatch(r"(.*\.toml(?:\+slop\d+|#[^:]*)?|[^:]*)(?::(.*))?", text, re.DOTALL)
    return (found[1], found[2]) if found else (text, None)


def _load_kind(text: str) -> Device:
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
        near = difflib.get_close_matches(text, [*known, *KIND_ALIASES], n=1)
        meant = f" (did you mean {near[0]}?)" if near else ""
        raise DeviceError(
            f"no device kind is called {text!r}{meant}; known are {', '.join(sorted(known))}. "
            f"Your own: pass the path of a .toml file, or name one in {ENVIRONMENT}"
        )
    return known[text]


def default_placement(mesh: Mesh, device: Device | None = None) -> tuple[str, ...]:
    """Per axis of `mesh` the link it is on: `mesh.placement`, or, if that is empty, inner axes on the fast link.

    Innermost axes fill the fastest link's island; an axis larger than the rest of it is `fast+slow`, but an axis that
    does not divide the rest is wholly on the slower link.
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
    """The factor of an axis of `size` devices that fits the `room` (devices, may be infinite) left on a link."""
    if room == math.inf or size <= room:
        return size
    return float(math.gcd(int(size), int(room)))


# --- reading -----------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _built_in() -> Mapping[str, Device]:
    text = resources.files("autoshard.cost.machine").joinpath("devices.toml").read_text(encoding="utf-8")
    return _parse(text, "devices.toml")


@lru_cache(maxsize=1)
def measured_document() -> Mapping[str, Any]:
    """What `measured.toml` holds, by kind (`measured.py`)."""
    return tomllib.loads(resources.files("autoshard.cost.machine").joinpath("measured.toml").read_text())


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
    except RecursionError:
        raise DeviceError(f"{where} describes no device: it is nested too deeply") from None
    except ValueError as error:  # the parser lets errors of numbers and dates through
        raise DeviceError(f"{where} is not TOML: {error}") from None
    if not document:
        raise DeviceError(f"{where} describes no device: a device is a table such as [my-device]")
    return {name: _device(_Table(value, where, name), name) for name, value in document.items()}


LEAST, MOST = 1e-30, 1e30
"""Bounds of all device figures, so that results stay finite."""


def _short(value: Any) -> str:
    text = reprlib.repr(value)
    return text if len(text) <= 200 else f"{text[:197]}..."


class _Table:
    """A TOML table that hands out checked fields and knows its path."""

    def __init__(self, value: Any, where: str, path: str) -> None:
        self.where, self.path = where, path
        if not isinstance(value, dict):
            self.fail("", f"must be a table, not {_short(value)}")
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
            self.fail(key, f"must be a non-empty string, not {_short(value)}")
        return str(value)

    def choice(self, key: str, choices: tuple[str, ...]) -> str:
        value = self.text(key)
        if value not in choices:
            self.fail(key, f"must be one of {', '.join(choices)}, not {_short(value)}")
        return value

    def number(self, key: str, *, zero: bool = False, most: float = MOST) -> float:
        value = self.get(key)
        good = isinstance(value, int | float) and not isinstance(value, bool)
        if not good or not (value > 0 or (zero and value == 0)):
            self.fail(key, f"must be a number {'at least 0' if zero else 'greater than 0'}, not {_short(value)}")
        if value and not LEAST <= value <= most:
            self.fail(key, f"must be a number of at least {LEAST:g} and at most {most:g}, not {_short(value)}")
        return float(value)

    def whole(self, key: str, *, zero: bool = False) -> int:
        value = self.number(key, zero=zero)
        if value != int(value):
            self.fail(key, f"must be a whole number, not {_short(value)}")
        return int(value)

    def flag(self, key: str) -> bool:
        value = self.value.get(key, False)
        if not isinstance(value, bool):
            self.fail(key, f"must be true or false, not {_short(value)}")
        return value

    def table(self, key: str) -> _Table:
        return _Table(self.get(key), self.where, f"{self.path}.{key}")


def _device(table: _Table, name: str) -> Device:
    table.only(
        "target", "flops", "memory_bandwidth", "memory_bytes", "kernel_overhead", "collective_overhead", "achievable",
        "multiprocessors", "compute_capability", "links", "source", "chip_devices", "on_chip_bytes",
        "cores", "clock", "sparse_copy_bytes", "usable_bytes", "measured",
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
    return Device(
        name=name,
        target=cast(Target, table.choice("target", tuple(CAPABILITIES))),
        flops=flops,
        memory_bandwidth=table.number("memory_bandwidth"),
        memory_bytes=table.whole("memory_bytes") if "memory_bytes" in table.value else None,
        usable_bytes=table.whole("usable_bytes") if "usable_bytes" in table.value else None,
        kernel_overhead=table.number("kernel_overhead", zero=True),
        collective_overhead=table.number("collective_overhead", zero=True),
        achievable_compute=achievable.number("compute", most=1),
        achievable_memory=achievable.number("memory", most=1),
        links=links,
        measured=_measured(table) if "measured" in table.value else "",
        multiprocessors=table.whole("multiprocessors") if "multiprocessors" in table.value else 0,
        compute_capability=table.number("compute_capability") if "compute_capability" in table.value else 0.0,
        chip_devices=table.whole("chip_devices") if "chip_devices" in table.value else 1,
        on_chip_bytes=table.whole("on_chip_bytes", zero=True) if "on_chip_bytes" in table.value else 0,
        cores=table.whole("cores") if "cores" in table.value else 1,
        clock=table.number("clock") if "clock" in table.value else 0.0,
        sparse_copy_bytes=table.whole("sparse_copy_bytes", zero=True) if "sparse_copy_bytes" in table.value else 0,
        source=table.text("source"),
    )


def _measured(table: _Table) -> str:
    if "multiprocessors" not in table.value:
        table.fail("multiprocessors", "is missing: models of measured kernels need it")
    return table.choice("measured", tuple(measured_document()))


def _link(table: _Table) -> Link:
    topology = cast(Topology, table.choice("topology", ("torus", "switch", "shared")))
    torus = topology == "torus"
    table.only(
        "name", "topology", "bandwidth", "latency", "island", "source",
        *(("dims", "wrap_multiple", "wrap_whole") if torus else ()),
    )  # fmt: skip
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
        wrap_whole=table.flag("wrap_whole"),
        source=table.text("source"),
    )
