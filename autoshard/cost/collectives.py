"""Collectives: what the partitioner inserts, and what each takes.

Every collective takes alpha + beta * bytes seconds, with alpha and beta a function of its kind, its axes, and where
they lie. With n devices and B the larger of operand and result payload per device, each device has to receive
(n-1)/n * B for an all-gather, a reduce-scatter or an all-to-all, twice that for an all-reduce (Thakur, Rabenseifner,
Gropp, "Optimization of Collective Communication Operations in MPICH", 2005), B for a permute. What differs is the
bandwidth at which it can:

- switch: the device's port, in ceil(log2 n) rounds.
- torus: an axis lies on one or several torus dims, each a ring in both directions where it wraps around and a line
  where it does not; several dims are used at once, each with its share of the data (Chan et al., "Collective
  communication on architectures that support simultaneous communication over multiple links", PPoPP 2006). An
  all-to-all is bound by the links in the middle of a dim.
- shared: one bus carries what all devices of the mesh receive.
- several levels (within and between hosts): reduce-scatter inside, the outer level on 1/n of the bytes, all-gather
  inside; an all-to-all sends at all levels at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from autoshard.cost.device import Device, Link, default_placement, fits, island_size
from autoshard.mesh import Mesh

CollectiveKind = Literal["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"]


@dataclass(frozen=True)
class Collective:
    """One collective of a step.

    Attributes:
        kind: XLA's name for it.
        axes: the mesh axes it runs over, in mesh order; `model[2/4]` where groups hold 2 of the 4 along an axis.
        bytes: the larger of operand and result payload per device, for one execution.
        count: executions per step.
        op: graph op that it is attributed to.
    """

    kind: CollectiveKind
    axes: tuple[str, ...]
    bytes: int
    count: int = 1
    op: int | None = None


def seconds(kind: CollectiveKind, axes: Iterable[str], bytes: float, mesh: Mesh, device: Device) -> float:
    """Seconds for one collective over `axes` of `mesh`, `bytes` as `Collective.bytes` counts them; 0 for no bytes."""
    if bytes <= 0:
        return 0.0
    alpha, beta = coefficients(kind, axes if isinstance(axes, tuple) else tuple(axes), mesh, device)
    return alpha + beta * bytes


def total_seconds(collectives: Iterable[Collective], mesh: Mesh, device: Device) -> float:
    """Seconds for all of `collectives`, one after the other, each as often as it counts."""
    return sum(each.count * seconds(each.kind, each.axes, each.bytes, mesh, device) for each in collectives)


@lru_cache(maxsize=4096)
def coefficients(kind: CollectiveKind, axes: tuple[str, ...], mesh: Mesh, device: Device) -> tuple[float, float]:
    """(alpha in seconds, beta in seconds per byte) of a collective over `axes`; (0, 0) if they hold one device.

    Raises:
        KeyError: an axis that the mesh does not have.
        ValueError: an unknown kind.
    """
    if kind not in ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"):
        raise ValueError(f"no collective is called {kind!r}")
    parts = [_part(axis, mesh) for axis in axes]
    whole = math.prod(size for _, _, size in parts)
    if whole == 1:
        return 0.0, 0.0
    levels = [level for level in _levels(frozenset(name for name, _, _ in parts), mesh, device) if level.size > 1]
    alpha, beta, inside = 0.0, 0.0, 1
    for level in levels:
        if kind in ("all-to-all", "collective-permute"):
            alpha += level.latency
            beta = max(beta, level.exchange if kind == "all-to-all" else level.send)
        else:
            passes = 2 if kind == "all-reduce" else 1
            alpha += passes * level.latency
            beta += passes * (level.size - 1) / level.size * level.gather / inside
        inside *= level.size
    taken = math.prod(devices for _, devices, _ in parts)
    if taken < whole and kind != "collective-permute":
        beta *= (taken - 1) / taken * whole / (whole - 1)
    return device.collective_overhead + alpha, beta


def _part(axis: str, mesh: Mesh) -> tuple[str, int, int]:
    """(axis, devices of a group along it, its size) of `model` or `model[2/4]`; a part runs at its axis' bandwidth."""
    name, _, part = axis.partition("[")
    size = mesh.axis_size(name)
    return name, int(part.split("/")[0]) if part else size, size


@dataclass(frozen=True)
class _Level:
    """The part of a collective that runs on one link.

    size: devices; latency: seconds for one pass over all of them; gather: seconds per byte that each device receives;
    exchange: seconds per byte of an all-to-all's operand; send: seconds per byte of a permute.
    """

    size: int
    latency: float
    gather: float
    exchange: float
    send: float


def _levels(axes: frozenset[str], mesh: Mesh, device: Device) -> list[_Level]:
    """From the inside to the outside, what `axes` mean on each link of the device."""
    levels = []
    for link in device.links:
        sizes = _sizes_on(mesh, device)[link.name]
        count = math.prod(size for axis, size in sizes if axis in axes)
        if link.topology == "torus":
            levels.append(_torus_level(axes, sizes, count, link))
        else:
            busy = mesh.size if link.topology == "shared" else 1
            each = busy / link.bandwidth
            rounds = math.ceil(math.log2(count)) if count > 1 else 0
            levels.append(_Level(count, rounds * link.latency, each, (count - 1) / count * each, each))
    return levels


@lru_cache(maxsize=256)
def _sizes_on(mesh: Mesh, device: Device) -> dict[str, tuple[tuple[str, int], ...]]:
    """Link name -> (axis, devices of that axis on this link), outermost axis first."""
    room = {link.name: island_size(link) for link in device.links}
    parts: dict[str, list[tuple[str, int]]] = {link.name: [] for link in device.links}
    placed = zip(mesh.axis_names, mesh.shape, default_placement(mesh, device), strict=True)
    for axis, size, names in reversed(list(placed)):
        links = names.split("+")
        left = float(size)
        for i, name in enumerate(links):
            part = left if i == len(links) - 1 else fits(left, room[name])
            parts[name].append((axis, int(part)))
            room[name] /= part
            left /= part
    return {name: tuple(reversed(sizes)) for name, sizes in parts.items()}


# --- torus -------------------------------------------------------------------------------------------------------

_TorusDim = tuple[tuple[str, int], ...]
"""What lies on one torus dim: (axis, devices), outermost first."""


@lru_cache(maxsize=256)
def torus_dims(sizes: tuple[tuple[str, int], ...], dims: int) -> tuple[_TorusDim, ...]:
    """How mesh axes lie on a torus of `dims` dims: an axis per dim.

    Spare dims go to the longest axes, split as squarely as they divide (8 devices of one axis on a 2D torus: 2x4);
    where there are more axes than dims, the neighbouring two with the smallest product share one.
    """
    split = {axis: [size] for axis, size in sizes if size > 1}
    while split and sum(map(len, split.values())) < dims:
        finer = {axis: _cube(math.prod(parts), len(parts) + 1) for axis, parts in split.items()}
        able = [axis for axis, parts in finer.items() if min(parts) > 1]
        if not able:
            break
        longest = max(able, key=lambda axis: max(split[axis]))
        split[longest] = finer[longest]
    lying: list[_TorusDim] = [((axis, part),) for axis, parts in split.items() for part in parts]
    while len(lying) > dims:
        joint = min(range(len(lying) - 1), key=lambda i: _extent(lying[i]) * _extent(lying[i + 1]))
        lying[joint : joint + 2] = [lying[joint] + lying[joint + 1]]
    return tuple(lying)


def _cube(size: int, parts: int) -> list[int]:
    """`parts` factors of `size`, ascending, the largest as small as it can be."""
    if parts == 1:
        return [size]
    ways = [[d, *_cube(size // d, parts - 1)] for d in range(1, size + 1) if size % d == 0]
    return sorted(min(ways, key=lambda way: (max(way), -min(way))))


def _extent(dim: _TorusDim) -> int:
    return math.prod(size for _, size in dim)


def _torus_level(axes: frozenset[str], sizes: tuple[tuple[str, int], ...], count: int, link: Link) -> _Level:
    latency, bandwidth, exchange, send = 0.0, 0.0, 0.0, 0.0
    for dim in torus_dims(sizes, link.dims):
        n = math.prod(size for axis, size in dim if axis in axes)
        if n == 1:
            continue
        # Devices of one group sit `stride` apart where a minor axis of the same dim is not in the collective: as many
        # groups share each link.
        innermost = max(i for i, (axis, _) in enumerate(dim) if axis in axes)
        stride = math.prod(size for _, size in dim[innermost + 1 :])
        way = link.bandwidth / stride
        if n == _extent(dim) and link.wraps(n):
            latency += link.latency * (n // 2)
            bandwidth += 2 * way
            hops = sum(min(k, n - k) for k in range(n))
            exchange = max(exchange, hops / n / (2 * way))
        else:
            latency += link.latency * (n - 1) * stride
            bandwidth += way
            exchange = max(exchange, (n // 2) * ((n + 1) // 2) / n / way)
        send = max(send, 1 / way)
    return _Level(count, latency, 1 / bandwidth if bandwidth else 0.0, exchange, send)
