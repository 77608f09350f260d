"""Reshards between tilings: `steps.py` on the device array of a mesh's subaxes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from autoshard.cost.machine.collectives import CollectiveKind
from autoshard.cost.machine.targets import Target
from autoshard.cost.partitioner.reshard.device_tiles import Tiles, tiles, tiles_of
from autoshard.cost.partitioner.reshard.steps import CrashError, Emitted, axis_group, reshard_tiles
from autoshard.cost.partitioner.targets import COLLECTIVE_RULES
from autoshard.cost.partitioner.tiling import Subaxes, Tiling
from autoshard.dtypes import dtype_bytes
from autoshard.mesh import AxisGroup, part_of

Step = tuple[CollectiveKind, AxisGroup, int]
"""(kind, axes, bytes per device)."""

Shape = tuple[int, ...]
Group = tuple[int, ...]


class Resharder:
    """Collectives of reshards over one mesh, cached by (shape, dtype, source, target)."""

    def __init__(self, subaxes: Subaxes, target: Target) -> None:
        """For tilings over `subaxes`, resharded as `target`'s partitioner does."""
        self.subaxes = subaxes
        self.target: Target = target
        self.rules = COLLECTIVE_RULES[target]
        self._known: dict[tuple[Shape, Tiling, Tiling, Group], tuple[Step, ...]] = {}
        self._shares: dict[tuple[Shape, Tiling, Tiling, Group], tuple[Step, ...]] = {}
        self._names: dict[tuple[int, ...], AxisGroup] = {}

    def names(self, subaxes: Sequence[int]) -> AxisGroup:
        """The mesh axes, or parts of axes, that these subaxes make up."""
        key = tuple(subaxes)
        known = self._names.get(key)
        if known is None:
            parts = dict.fromkeys(self.subaxes.axes(key), 1)
            for number in set(key):
                parts[self.subaxes.axis[number]] *= self.subaxes.sizes[number]
            mesh = self.subaxes.mesh
            known = tuple(part_of(axis, size, mesh.axis_size(axis)) for axis, size in parts.items())
            self._names[key] = known
        return known

    def reshard(self, shape: Shape, dtype: str, source: Tiling, target: Tiling, outer: Group = ()) -> tuple[Step, ...]:
        """The steps that reshard a value of global `shape` from `source` to `target`; uneven dims count their padding.

        `outer` are the subaxes that number the device groups: the reshard stays within each group.
        """
        if source == target or 0 in shape:
            return ()
        key = (shape, source, target, outer)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._steps(shape, source, target, outer)
        item = dtype_bytes(dtype)
        return tuple(
            (self._becomes(kind, shape, item, axes, elements), axes, elements * item) for kind, axes, elements in known
        )

    def _becomes(self, kind: CollectiveKind, shape: Shape, item: int, axes: AxisGroup, elements: int) -> CollectiveKind:
        """The kind into which a target's compiler turns a collective of `elements` elements of `item` bytes."""
        if kind != "all-gather":
            return kind
        mesh = self.subaxes.mesh
        part = elements // mesh.group_size(axes)
        return "all-reduce" if self.rules.gathers_as_sum(shape, part, elements * item, axes, mesh) else kind

    def destination(
        self, shape: tuple[int, ...], dtype: str, source: Tiling, target: Tiling, outer: Group = ()
    ) -> Tiling:
        """Where the communication of a reshard ends: `target`, or replicated if it gathers everything and then slices.

        Reshards of one value with one destination communicate once.
        """
        nothing: Tiling = ((),) * len(shape)
        steps = self.reshard(shape, dtype, source, target, outer)
        return nothing if steps and steps == self.reshard(shape, dtype, source, nothing, outer) else target

    def _steps(self, shape: Shape, source: Tiling, target: Tiling, outer: Group) -> tuple[Step, ...]:
        """The steps with elements in place of bytes."""
        size = self.subaxes.devices
        split = [i for i, (before, after) in enumerate(zip(source, target, strict=True)) if before or after]
        even = all(shape[i] % size == 0 for i in split)
        common = tuple(size if even else shape[i] for i in split)  # evenly split dims of all sizes share an entry
        key = (common, tuple(source[i] for i in split), tuple(target[i] for i in split), outer)
        known = self._shares.get(key)
        if known is None:
            known = self._shares[key] = self._emitted(*key)
        whole, part = math.prod(shape), math.prod(common)
        return tuple((kind, axes, -(-elements * whole // part)) for kind, axes, elements in known)

    def _emitted(self, shape: Shape, source: Tiling, target: Tiling, outer: Group) -> tuple[Step, ...]:
        sizes = self.subaxes.sizes
        inside = [axis for axis in range(len(sizes)) if axis not in outer]
        place = {axis: i for i, axis in enumerate(inside)}
        grid = [sizes[axis] for axis in inside]
        before, after = (
            tiles_of([[place[axis] for axis in dim] for dim in tiling], grid) for tiling in (source, target)
        )
        # The devices of one group, by their numbers in the whole mesh.
        strides = [math.prod(sizes[axis + 1 :]) for axis in inside]
        devices = np.zeros(math.prod(grid), dtype=np.int64)
        for coordinate, stride in zip(np.unravel_index(np.arange(devices.size), grid or [1]), strides, strict=False):
            devices += coordinate * stride
        mesh = self.subaxes.mesh
        steps: list[Step] = []
        for each in self._survived(shape, before, after):
            named = Emitted(each.kind, devices[each.groups], each.elements)
            steps.append((each.kind, axis_group(named, mesh.shape, mesh.axis_names), each.elements))
        return tuple(steps)

    def _survived(self, shape: Shape, before: Tiles, after: Tiles) -> tuple[Emitted, ...]:
        """Where XLA crashes, count a full gather in place of the reshard: plans avoid it, but a user's may not."""
        try:
            return reshard_tiles(shape, before, after, self.target).steps
        except CrashError:
            whole = tiles(np.arange(before.devices.size).reshape((1,) * before.rank + (-1,)), before.rank)
            return reshard_tiles(shape, before, whole, self.target).steps
