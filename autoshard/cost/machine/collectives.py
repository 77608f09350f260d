"""Collectives and their times.

Within a host of a kind that was measured (`measured.toml`), a collective takes what its fitted curve says. Every other
takes alpha + beta * bytes seconds; alpha and beta depend on its kind, its axes, and their physical placement. With n
devices and B the larger of operand and result payload per device, each device receives (n-1)/n * B bytes in an
all-gather, a reduce-scatter or an all-to-all, twice that in an all-reduce (Thakur, Rabenseifner, Gropp, "Optimization
of Collective Communication Operations in MPICH", 2005), B in a permute, at the bandwidth of:

- switch: the device's port, in ceil(log2 n) rounds.
- torus: an axis covers one or several torus dims, each a bidirectional ring if it wraps around, else a line; several
  dims work at once, each on its share of the data (Chan et al., "Collective communication on architectures that support
  simultaneous communication over multiple links", PPoPP 2006). Links at the bisection of a dim bound an all-to-all.
- shared: one bus carries what all devices of the mesh receive.
- several levels (within and between hosts or slices): reduce-scatter inside, the outer level on 1/n of the bytes,
  all-gather inside. From a torus to the network between slices in sequence; from switch to switch pipelined, so that
  the slowest counts ('How to Scale Your Model', GPUs, cross-node collectives: a ring at each depth, mostly
  overlapped). An all-to-all sends at all levels at once.

`layout.py` places the axes. Interleaved groups on a torus dim share its links.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from autoshard.cost.machine.device import Device, Link
from autoshard.cost.machine.layout import Dim, layout, links_used
from autoshard.cost.machine.measured import Curve, curve
from autoshard.mesh import AxisGroup, AxisPart, Mesh

CollectiveKind = Literal["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"]


@dataclass(frozen=True)
class Collective:
    """One collective of a step.

    Attributes:
        kind: XLA's name for it.
        axes: the mesh axes, or parts of axes, it runs over.
        bytes: the larger of operand and result payload per device, for one execution.
        count: executions per step; of a windowed einsum, the permutes of one shard each.
        op: graph op that it is attributed to.
        once: whether it reduces what all micro-steps add up, once however many there are.
    """

    kind: CollectiveKind
    axes: AxisGroup
    bytes: int
    count: int = 1
    op: int | None = None
    once: bool = False

    @property
    def total_bytes(self) -> int:
        """Bytes per device and step."""
        return self.bytes * self.count


def seconds(
    kind: CollectiveKind, axes: Iterable[str | AxisPart], bytes: float, mesh: Mesh, device: Device, together: int = 1
) -> float:
    """Seconds of one collective over `axes` of `mesh`, `bytes` as `Collective.bytes` counts them; 0 for no bytes.

    Args:
        together: how many collectives are combined into one and share its alpha.
    """
    if bytes <= 0:
        return 0.0
    axes = axes if isinstance(axes, tuple) else tuple(axes)
    if (known := measured_curve(kind, axes, mesh, device)) is not None:
        return known.seconds(bytes * together) / together
    alpha, beta = coefficients(kind, axes, mesh, device)
    return alpha / together + beta * bytes


def saved_seconds(
    kind: CollectiveKind, axes: AxisGroup, bytes: float, mesh: Mesh, device: Device, part: float
) -> float:
    """Seconds that a collective saves by being combined into one of which it is `part`."""
    if (known := measured_curve(kind, axes, mesh, device)) is not None:
        return known.seconds(bytes) - part * known.seconds(bytes / part)
    return coefficients(kind, axes, mesh, device)[0] * (1 - part)


@lru_cache(maxsize=4096)
def measured_curve(kind: CollectiveKind, axes: AxisGroup, mesh: Mesh, device: Device) -> Curve | None:
    """What was measured of a collective within one host; None for others."""
    taken = _taken(axes, mesh)
    total = math.prod(taken.values())
    inner = _levels(taken, mesh, device)[0].size if device.measured and total > 1 else 0
    return curve(kind, total, device) if inner == total else None


@lru_cache(maxsize=4096)
def coefficients(kind: CollectiveKind, axes: AxisGroup, mesh: Mesh, device: Device) -> tuple[float, float]:
    """(alpha in seconds, beta in seconds per byte) of a collective over `axes`; (0, 0) if they hold one device.

    Of a measured one, those that it approaches at both ends.

    Raises:
        KeyError: an axis that the mesh does not have.
        ValueError: an unknown kind.
        DeviceError: the mesh does not fit the device's topology.
    """
    if kind not in ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"):
        raise ValueError(f"no collective is called {kind!r}")
    taken = _taken(axes, mesh)
    if math.prod(taken.values()) == 1:
        return 0.0, 0.0
    if (known := measured_curve(kind, axes, mesh, device)) is not None:
        return known.start, known.slopes[-1]
    levels = [level for level in _levels(taken, mesh, device) if level.size > 1]
    alpha, beta, inside = 0.0, 0.0, 1
    for i, level in enumerate(levels):
        if kind in ("all-to-all", "collective-permute"):
            alpha += level.latency
            beta = max(beta, level.exchange if kind == "all-to-all" else level.send)
        else:
            passes = 2 if kind == "all-reduce" else 1
            alpha += passes * level.latency
            own = passes * (level.size - 1) / level.size * level.gather / inside
            piped = i > 0 and level.piped and levels[i - 1].piped
            beta = max(beta, own) if piped else beta + own
        inside *= level.size
    return device.collective_overhead + alpha, beta


def group_sizes(axes: AxisGroup, mesh: Mesh, device: Device) -> tuple[int, int]:
    """Devices of a group of `axes`, on one of the device's innermost links (a host's switch, a slice) and in all."""
    taken = _taken(axes, mesh)
    return _levels(taken, mesh, device)[0].size, math.prod(taken.values())


def _taken(axes: AxisGroup, mesh: Mesh) -> dict[str, int]:
    """Devices of a group along each axis."""
    return dict(part for axis in axes for part in _parts(axis, mesh))


def _parts(axis: str | AxisPart, mesh: Mesh) -> list[tuple[str, int]]:
    """(axis, devices of a group along it); for groups that are no subgrid, outer axes leave the rest to inner ones."""
    names, left = ((axis,), mesh.axis_size(axis)) if isinstance(axis, str) else (axis.axes, axis.size)
    taken = []
    for each in names[:-1]:
        taken.append((each, math.gcd(left, mesh.axis_size(each))))
        left //= taken[-1][1]
    return [*taken, (names[-1], left)]


@dataclass(frozen=True)
class _Level:
    """The part of a collective that runs on one link.

    size: devices; latency: seconds for one pass over all of them; gather: seconds per byte that each device receives;
    exchange: seconds per byte of an all-to-all's operand; send: seconds per byte of a permute; piped: whether it
    overlaps a neighbouring piped level.
    """

    size: int
    latency: float
    gather: float
    exchange: float
    send: float
    piped: bool = False


def _levels(taken: Mapping[str, int], mesh: Mesh, device: Device) -> list[_Level]:
    """The levels of a collective over `taken` on each link of the device, innermost first.

    `taken`: axis -> devices of a group along it; of a part of an axis, the nearest ones.
    """
    left = dict(taken)
    levels = []
    dims = layout(mesh, device)
    for link in device.links:
        here: list[tuple[Dim, dict[str, int]]] = []
        for dim in reversed([dim for dim in dims if dim.link == link]):
            part = {axis: math.gcd(left.get(axis, 1), size) for axis, size in dim.parts}
            for axis in part:
                left[axis] = left.get(axis, 1) // part[axis]
            here.append((dim, part))
        count = math.prod(size for _, part in here for size in part.values())
        if link.topology == "torus":
            levels.append(_torus_level(here, count, link, taken))
        else:
            busy = mesh.size if link.topology == "shared" else 1
            each = busy / link.bandwidth
            rounds = math.ceil(math.log2(count)) if count > 1 else 0
            exchange = (count - 1) / count * each
            levels.append(_Level(count, rounds * link.latency, each, exchange, each, link.topology == "switch"))
    return levels


def _torus_level(dims: list[tuple[Dim, dict[str, int]]], count: int, link: Link, axes: Collection[str]) -> _Level:
    latency, bandwidth, exchange, send = 0.0, 0.0, 0.0, 0.0
    for dim, part in dims:
        links, ring, n, stride = links_used(part, dim.parts, dim.wraps, axes)
        if n == 1:
            continue
        latency += link.latency * (n // 2 if ring else n - 1) * stride
        bandwidth += links * link.bandwidth
        # Bytes on the busiest link per byte of each device's operand.
        crossing = sum(min(k, n - k) for k in range(n)) if ring else (n // 2) * ((n + 1) // 2)
        exchange = max(exchange, crossing / n / (links * link.bandwidth))
        send = max(send, stride / link.bandwidth)
    return _Level(count, latency, 1 / bandwidth if bandwidth else 0.0, exchange, send)
