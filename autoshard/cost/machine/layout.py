"""The physical layout of a mesh: which part of each axis is on which torus dim, within and between hosts or slices.

The machine is a grid of physical dims, outermost first: slices or hosts, torus dims 0, 1, 2, and the devices of a chip
if there are several. An axis covers one of them, several (8 devices on a 2x4 torus), or shares one; its major part is
on the outermost of its dims. Pricing (`collectives.py`), compiling (`verify/worker.py`) and running
(`lower/torch_xla/runtime.py`) use this one layout.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import permutations, product

from autoshard.cost.machine.device import Device, DeviceError, Link, default_placement, fits, island_size, load_device
from autoshard.mesh import AxisGroup, Mesh

Part = tuple[str, int]
"""(axis, devices of it)."""


@dataclass(frozen=True)
class Dim:
    """One physical dim.

    Attributes:
        link: what joins the devices along it.
        parts: the axes, or parts of axes, on it, outermost first.
        wraps: whether it is a ring (torus only).
    """

    link: Link
    parts: tuple[Part, ...]
    wraps: bool = False

    @property
    def size(self) -> int:
        """Devices along it."""
        return math.prod(size for _, size in self.parts)


@lru_cache(maxsize=256)
def layout(mesh: Mesh, device: Device) -> tuple[Dim, ...]:
    """The physical dims of `mesh`, outermost first.

    An axis per torus dim where they fit; else axes are split, as few as possible, so that inner axes have the most
    bandwidth. Without a topology the machine is the squarest with as many devices.

    Raises:
        DeviceError: the mesh does not fit the machine; says why.
    """
    _check_size(mesh, device)
    dims: list[Dim] = []
    for link, parts in zip(reversed(device.links), reversed(_sizes(mesh, device)), strict=True):
        if link.topology == "torus":
            shape = link.shape or standard_shape(_extent(parts), link.dims, device.chip_devices)
            placed = _on_torus(parts, shape, link.wraps(shape))
            dims += [Dim(link, on, wraps) for on, wraps in zip(placed, link.wraps(shape), strict=True)]
        else:
            dims.append(Dim(link, parts))
    return tuple(dims)


@lru_cache(maxsize=64)
def device_order(mesh: Mesh, device: Device) -> tuple[int, ...]:
    """The device at each mesh coordinate, row-major.

    Devices are numbered row-major over the physical dims: by slice or host, then by coordinates, then within the chip.
    """
    dims = layout(mesh, device)
    minor: dict[str, int] = dict.fromkeys(mesh.axis_names, 1)
    digits: dict[tuple[int, int], int] = {}  # (dim, part) -> devices of the axis inside that part
    for d in reversed(range(len(dims))):
        for p in reversed(range(len(dims[d].parts))):
            axis, size = dims[d].parts[p]
            digits[d, p] = minor[axis]
            minor[axis] *= size
    order = []
    for place in product(*map(range, mesh.shape)):
        at = dict(zip(mesh.axis_names, place, strict=True))
        rank = 0
        for d, dim in enumerate(dims):
            for p, (axis, size) in enumerate(dim.parts):
                rank = rank * size + at[axis] // digits[d, p] % size
        order.append(rank)
    return tuple(order)


def check_layout(mesh: Mesh) -> None:
    """Raise DeviceError, saying why, unless the mesh fits the machine that it names."""
    device = load_device(mesh.device)
    _check_size(mesh, device)
    _sizes(mesh, device)


def machine(mesh: Mesh, device: Device) -> str:
    """The device kind with the topology that the mesh covers: `tpu-v5e:4x4:2slices`, `h100:2x8`, `cpu`."""
    if device.topology:
        return device.name
    inner = device.links[0]
    shape = [dim.size for dim in layout(mesh, device) if dim.link == inner]
    outside = mesh.size // math.prod(shape)
    if inner.topology == "torus":
        if device.chip_devices > 1 and len(shape) > inner.dims:
            shape = shape[: inner.dims]
        return f"{device.name}:{'x'.join(map(str, shape))}" + (f":{outside}slices" if outside > 1 else "")
    if inner.topology == "switch" and len(device.links) > 1:
        return f"{device.name}:{outside}x{shape[0]}" if outside > 1 else f"{device.name}:{shape[0]}"
    return device.name


def standard_shape(devices: int, dims: int, chip_devices: int = 1) -> tuple[int, ...]:
    """The squarest torus of so many devices, dims ascending, ones last where there are three; with the chip's dim."""
    chips, rest = divmod(devices, chip_devices)
    if rest:
        return (*standard_shape(devices, dims), 1) if chip_devices > 1 else (devices,)
    shape = squarest(chips, dims)
    if dims > 2:
        shape = sorted(shape, key=lambda size: size == 1)
    return (*shape, chip_devices) if chip_devices > 1 else tuple(shape)


def squarest(size: int, parts: int) -> list[int]:
    """`parts` factors of `size`, ascending, the largest as small as it can be."""
    if parts == 1:
        return [size]
    ways = [[d, *squarest(size // d, parts - 1)] for d in range(1, size + 1) if size % d == 0]
    return sorted(min(ways, key=lambda way: (max(way), -min(way))))


@lru_cache(maxsize=1024)
def sums_whole(axes: tuple[str, ...], mesh: Mesh) -> bool:
    """Whether a TPU's compiler keeps an all-reduce over `axes` and a dynamic-slice of it apart.

    Else they become a reduce-scatter. From compiling (libtpu 0.0.51): apart for groups over several slices with several
    devices in each, and over all devices of a slice, one or each of several, that is a torus of three dims (the two
    devices of a v4 chip are one), or a square of at least 4x4 (which has an all-reduce along all dims at once). Never
    over a part of a slice, a 2x4 or a 4x8.
    """
    dims = layout(mesh, load_device(mesh.device))
    over = [dim for dim in dims if any(axis in axes and size > 1 for axis, size in dim.parts)]
    if any(dim.link.topology == "torus" for dim in over) and len({dim.link.name for dim in over}) > 1:
        return True
    shape = whole_torus(axes, mesh)
    return len(shape) > 2 or (len(shape) == 2 and shape[0] == shape[1] >= 4)


def whole_torus(axes: AxisGroup, mesh: Mesh) -> tuple[int, ...]:
    """The shape of a slice of TPUs of which a group over `axes` holds all devices and no others; else empty."""
    device = load_device(mesh.device)
    inner = device.links[0]
    dims = [dim for dim in layout(mesh, device) if dim.size > 1]
    shape = tuple(dim.size for dim in dims if dim.link == inner)
    outside = any(axis in axes and size > 1 for dim in dims if dim.link != inner for axis, size in dim.parts)
    whole = mesh.ways(axis for axis in mesh.axis_names if axis in axes) == math.prod(shape)
    return shape if inner.topology == "torus" and whole and not outside else ()


# --- links -------------------------------------------------------------------------------------------------------


def _sizes(mesh: Mesh, device: Device) -> tuple[tuple[Part, ...], ...]:
    """Per link of the device, innermost first: the axes on it with their devices there, outermost axis first."""
    room = {link.name: island_size(link) for link in device.links}
    parts: dict[str, list[Part]] = {link.name: [] for link in device.links}
    placed = zip(mesh.axis_names, mesh.shape, default_placement(mesh, device), strict=True)
    for axis, size, names in reversed(list(placed)):
        left = float(size)
        links = names.split("+")
        for i, name in enumerate(links):
            part = left if i == len(links) - 1 else fits(left, room[name])
            if part > room[name]:
                raise DeviceError(
                    f"mesh {_shape(mesh)} does not lie on {device.name} as placed ({_spoken(mesh, device)}): "
                    f"{name} joins {island_size(device.link(name)):.0f} devices"
                )
            parts[name].append((axis, int(part)))
            room[name] /= part
            left /= part
    if device.topology and room[device.links[0].name] > 1:
        inside = island_size(device.links[0]) / room[device.links[0].name]
        raise DeviceError(
            f"mesh {_shape(mesh)} does not lie on {device.name} ({_spoken(mesh, device)}): that puts "
            f"{inside:.0f} devices on {device.links[0].name}, which joins {island_size(device.links[0]):.0f} there"
        )
    return tuple(tuple(reversed(parts[link.name])) for link in device.links)


def _check_size(mesh: Mesh, device: Device) -> None:
    if device.devices is not None and device.devices != mesh.size:
        two = f" (XLA counts {device.chip_devices} per chip)" if device.chip_devices > 1 else ""
        raise DeviceError(f"mesh {_shape(mesh)} has {mesh.size} devices, {device.name} has {device.devices}{two}")


def _shape(mesh: Mesh) -> str:
    return "x".join(map(str, mesh.shape))


def _spoken(mesh: Mesh, device: Device) -> str:
    placed = zip(mesh.axis_names, mesh.shape, default_placement(mesh, device), strict=True)
    return ", ".join(f"{axis} of {size} on {link}" for axis, size, link in placed)


def _extent(parts: tuple[Part, ...]) -> int:
    return math.prod(size for _, size in parts)


# --- torus -------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def _on_torus(parts: tuple[Part, ...], shape: tuple[int, ...], wraps: tuple[bool, ...]) -> tuple[tuple[Part, ...], ...]:
    """The axes on each dim of a torus of `shape`, outermost first; their sizes multiply to the torus' size.

    Criteria in order: fewest splits of axes, bandwidth of the innermost axis, then of the next ones, order of the mesh.
    """
    axes = [axis for axis, size in parts if size > 1]
    sizes = [size for _, size in parts if size > 1]

    def bandwidths(placed: tuple[tuple[Part, ...], ...]) -> list[float]:
        return [-_bandwidth(axis, placed, wraps) for axis in reversed(axes)]

    return min(_assignments(axes, sizes, shape), key=bandwidths)


def _assignments(axes: list[str], sizes: list[int], shape: tuple[int, ...]) -> Iterator[tuple[tuple[Part, ...], ...]]:
    """Every assignment of axes to dims with fewest splits, the one that keeps the order of the mesh first."""
    found = list(_splits(sizes, shape))
    least = min(map(_number_of_parts, found))
    row_major = _row_major(sizes, shape)
    for chosen in sorted(found, key=lambda chosen: chosen != row_major):
        if _number_of_parts(chosen) == least:
            columns = [
                [(axis, split[d]) for axis, split in zip(axes, chosen, strict=True) if split[d] > 1]
                for d in range(len(shape))
            ]
            yield from product(*(permutations(on) for on in columns))


def _number_of_parts(chosen: tuple[tuple[int, ...], ...]) -> int:
    """Number of parts of axes."""
    return sum(size > 1 for split in chosen for size in split)


def _splits(sizes: list[int], shape: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Factors of each of `sizes`, one per dim, that multiply to `shape` in every dim."""
    if not sizes:
        if math.prod(shape) == 1:
            yield ()
        return
    for split in _factors(sizes[0], shape):
        rest = tuple(size // part for size, part in zip(shape, split, strict=True))
        for others in _splits(sizes[1:], rest):
            yield (split, *others)


def _factors(size: int, shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Factors of `size`, one per dim of `shape` and each dividing it."""
    if not shape:
        if size == 1:
            yield ()
        return
    for last in range(min(size, shape[-1]), 0, -1):
        if size % last == 0 and shape[-1] % last == 0:
            for others in _factors(size // last, shape[:-1]):
                yield (*others, last)


def _row_major(sizes: list[int], shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...] | None:
    """The split of axes over dims that keeps the devices in order; None if there is none (3 and 4 on 6 and 2)."""
    room = list(shape)
    splits = []
    for size in reversed(sizes):
        split = [1] * len(shape)
        for d in reversed(range(len(shape))):
            part = math.gcd(size, room[d])
            if part < min(size, room[d]):
                return None
            split[d], size, room[d] = part, size // part, room[d] // part
        splits.append(tuple(split))
    return tuple(reversed(splits))


def _bandwidth(axis: str, placed: tuple[tuple[Part, ...], ...], wraps: tuple[bool, ...]) -> float:
    """Links in one direction that a device has for an axis, shared ones counted as fractions."""
    on_each = zip(placed, wraps, strict=True)
    return sum(links_used(dict(on), on, ring, {axis})[0] for on, ring in on_each if axis in dict(on))


def links_used(
    taken: Mapping[str, int], parts: tuple[Part, ...], wraps: bool, axes: Collection[str]
) -> tuple[float, bool, int, int]:
    """A collective over `axes` on one torus dim.

    Args:
        taken: axis -> how many of its devices on this dim a group has, the innermost ones.
        parts: the axes on the dim.
        wraps: whether it is a ring.
        axes: of the collective.

    Returns:
        Links in one direction that a device has for it (a ring has two; interleaved groups share theirs), whether its
        groups are rings, devices of a group along the dim, and their stride.
    """
    devices, stride, inside = 1, 1, 1
    for axis, size in reversed(parts):
        if axis in axes and taken[axis] > 1:
            stride = inside if devices == 1 else stride
            devices *= taken[axis]
        inside *= size
    ring = wraps and devices > 1 and devices * stride == inside
    return (2 if ring else 1) / stride, ring, devices, stride
