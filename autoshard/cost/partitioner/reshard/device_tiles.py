"""Which device holds which tile, as arrays: XLA's `HloSharding`, and how it is grouped, split and merged.

The names of XLA's functions (xla/hlo/utils/hlo_sharding_util.cc) stand in the docstrings.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Devices = npt.NDArray[np.int64]
Shape = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Tiles:
    """An `HloSharding`: which device holds which tile.

    Attributes:
        dims: tiles per dim of the tensor; if `partial`, followed by the number of replicas of each tile.
        devices: device numbers of shape `dims`. Replicas of a tile are in ascending order.
        partial: whether tiles have replicas (`replicate_on_last_tile_dim`).
        data: tiles per dim of the tensor.
        replicated: whether no dim is split.
    """

    dims: Shape
    devices: Devices
    partial: bool
    data: Shape = field(init=False)
    replicated: bool = field(init=False)

    def __post_init__(self) -> None:
        """Compute `data` and `replicated`."""
        data = self.dims[:-1] if self.partial else self.dims
        object.__setattr__(self, "data", data)
        object.__setattr__(self, "replicated", max(data, default=1) == 1)

    def __eq__(self, other: object) -> bool:
        """Whether both give every device the same tile."""
        return (
            isinstance(other, Tiles)
            and self.dims == other.dims
            and self.partial == other.partial
            and bool((self.devices == other.devices).all())
        )

    __hash__ = None  # type: ignore[assignment]

    @property
    def rank(self) -> int:
        """The tensor's rank."""
        return len(self.dims) - self.partial

    @property
    def copies(self) -> int:
        """Number of replicas of each tile."""
        return self.dims[-1] if self.partial else 1


def tiles(devices: Devices, rank: int) -> Tiles:
    """The sharding of a tensor of `rank` dims; a further last dim of `devices` numbers the replicas."""
    if devices.ndim == rank:
        return Tiles(devices.shape, devices, False)
    if devices.shape[-1] == 1:
        return Tiles(devices.shape[:-1], devices[..., 0], False)
    return Tiles(devices.shape, np.sort(devices, axis=-1), True)


def tiles_of(places: Sequence[Sequence[int]], sizes: Sequence[int]) -> Tiles:
    """The sharding that splits dim i along the mesh axes `places[i]`, major to minor; axes are numbered."""
    order = [axis for dim in places for axis in dim]
    rest = [axis for axis in range(len(sizes)) if axis not in order]
    grid = np.arange(math.prod(sizes), dtype=np.int64).reshape(tuple(sizes)).transpose(order + rest)
    shape = [math.prod(sizes[axis] for axis in dim) for dim in places]
    return tiles(grid.reshape([*shape, -1]), len(places))


@dataclass(frozen=True, eq=False)
class Grouped:
    """Devices of each group, in the order of their tiles, and the sharding within a group."""

    groups: Devices
    inside: Tiles


def groups_along(devices: Devices, dims: Sequence[int], factors: Sequence[int] | None = None) -> Devices:
    """Groups of the devices that differ only in `dims`, by the minor `factors` of these dims."""
    shape, moving = [], []
    for i, size in enumerate(devices.shape):
        if i in dims:
            factor = size if factors is None else factors[list(dims).index(i)]
            shape += [size // factor, factor]
            moving.append(len(shape) - 1)
        else:
            shape.append(size)
    still = [axis for axis in range(len(shape)) if axis not in moving]
    split = devices.reshape(shape).transpose(still + moving)
    return split.reshape(-1, math.prod(shape[axis] for axis in moving))


def grouped(sharding: Tiles, dims: Sequence[int], inner: Sequence[int] | None = None) -> Grouped:
    """Groups by the major tiles of `dims`, with `inner` tiles (default 1) within a group (`GroupShardingOnDims`)."""
    shape, outside, kept = list[int](), list[int](), list[int]()
    for i, size in enumerate(sharding.dims):
        if i in dims:
            within = 1 if inner is None else inner[list(dims).index(i)]
            outside.append(len(shape))
            shape += [size // within, within]
            kept.append(within)
        else:
            shape.append(size)
            kept.append(size)
    rest = [axis for axis in range(len(shape)) if axis not in outside]
    members = math.prod(kept)
    groups = sharding.devices.reshape(shape).transpose(outside + rest).reshape(-1, members)
    return Grouped(groups, tiles(np.arange(members, dtype=np.int64).reshape(kept), sharding.rank))


def aligned(these: Grouped, reference: Grouped) -> Grouped:
    """The same sharding within the groups of `reference` (`AlignGroupsWith`)."""
    inside = these.inside
    same = (np.sort(these.groups, axis=1) == np.sort(reference.groups, axis=1)).all()
    if same and not inside.replicated:
        place = {device: i for i, device in enumerate(reference.groups[0].tolist())}
        order = np.array([place[device] for device in these.groups[0].tolist()], dtype=np.int64)
        inside = tiles(order[inside.devices], inside.rank)
    return Grouped(reference.groups, inside)


def ungrouped(these: Grouped, counts: Sequence[int], dims: Sequence[int], rank: int) -> Tiles:
    """The sharding of all groups together: `counts` groups along `dims` (`UngroupSharding`)."""
    inside = these.inside.devices.reshape([*these.inside.data, these.inside.copies])
    devices = these.groups[:, inside.reshape(-1)].reshape([*counts, *inside.shape])
    order: list[int] = []
    for i in range(inside.ndim):
        if i in dims:
            order.append(list(dims).index(i))
        order.append(len(counts) + i)
    shape = [size * (counts[list(dims).index(i)] if i in dims else 1) for i, size in enumerate(inside.shape)]
    return tiles(devices.transpose(order).reshape(shape), rank)


def replicate_dim(sharding: Tiles, dim: int) -> Tiles:
    """Without the split of `dim` (`PartiallyReplicateTiledShardingOnDims`)."""
    devices = sharding.devices.reshape([*sharding.data, sharding.copies])
    moved = np.moveaxis(devices, dim, -2)
    shape = list(devices.shape)
    shape[dim] = 1
    shape[-1] *= sharding.dims[dim]
    return tiles(moved.reshape(shape), sharding.rank)


def split_tiles(sharding: Tiles, dim: int, major: int) -> Tiles:
    """`dim` as two dims, the first of `major` tiles (`SplitShardingDimension`)."""
    shape = list(sharding.dims)
    shape[dim : dim + 1] = [major, shape[dim] // major]
    return Tiles(tuple(shape), sharding.devices.reshape(shape), sharding.partial)


def merge_tiles(sharding: Tiles, dim: int) -> Tiles:
    """`dim` and the next as one dim (`MergeShardingDimension`)."""
    shape = list(sharding.dims)
    shape[dim : dim + 2] = [shape[dim] * shape[dim + 1]]
    return Tiles(tuple(shape), sharding.devices.reshape(shape), sharding.partial)
