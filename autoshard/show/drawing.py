"""A tensor's shards and their devices as a grid, for plots and for the HTML page."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from autoshard.mesh import Mesh, Spec


@dataclass(frozen=True)
class Tiles:
    """A tensor as a grid of shards.

    Attributes:
        dims: the dims along the grid's rows and columns; None where the grid has none.
        ways: number of parts of each of the two.
        devices: per row and column the devices that hold the shard, numbered row-major over the mesh.
    """

    dims: tuple[int | None, int | None]
    ways: tuple[int, int]
    devices: tuple[tuple[tuple[int, ...], ...], ...]


def tiles(spec: Spec, mesh: Mesh) -> Tiles:
    """The grid of a tensor under `spec`: its first two split dims, or its last two where fewer are split.

    Of further split dims (three axes on three dims) only the first part is drawn.
    """
    rows, columns, *rest = _drawn(spec)
    row_axes, column_axes = (() if dim is None else spec[dim] for dim in (rows, columns))
    fixed = [axis for dim in rest if dim is not None for axis in spec[dim]]
    grid: list[list[list[int]]] = [
        [[] for _ in range(mesh.ways(column_axes))] for _ in range(mesh.ways(row_axes))
    ]  # fmt: skip
    for number, place in enumerate(itertools.product(*(range(size) for size in mesh.shape))):
        at = dict(zip(mesh.axis_names, place, strict=True))
        if all(at[axis] == 0 for axis in fixed):
            grid[_part(row_axes, at, mesh)][_part(column_axes, at, mesh)].append(number)
    devices = tuple(tuple(tuple(cell) for cell in row) for row in grid)
    return Tiles((rows, columns), (len(grid), len(grid[0])), devices)


def _drawn(spec: Spec) -> list[int | None]:
    """Dims for rows and columns, then other split ones."""
    split = [dim for dim, axes in enumerate(spec) if axes]
    if len(split) > 2:
        return list(split)
    others = [dim for dim in reversed(range(len(spec))) if dim not in split]
    shown = sorted([*split, *others[: 2 - len(split)]])
    return [None, None] if not shown else [None, shown[0]] if len(shown) == 1 else list(shown)


def _part(axes: Sequence[str], at: dict[str, int], mesh: Mesh) -> int:
    """Index of a device's part along a dim split by `axes`, major to minor."""
    part = 0
    for axis in axes:
        part = part * mesh.axis_size(axis) + at[axis]
    return part


def holders(devices: Sequence[int], total: int) -> str:
    """The devices that hold a shard as text: `0 4`, `0-3`, `0 4 … (16)`, or `all`."""
    if len(devices) == total:
        return "all"
    if len(devices) > 2 and list(devices) == list(range(devices[0], devices[-1] + 1)):
        return f"{devices[0]}–{devices[-1]}"
    if len(devices) > 4:
        return f"{devices[0]} {devices[1]} … ({len(devices)})"
    return " ".join(map(str, devices))
