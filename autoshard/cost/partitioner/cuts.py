"""The dynamic-slices that reshards begin with, and which all-reduces they turn into reduce-scatters."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from autoshard.cost.machine.targets import CAPABILITIES, Target
from autoshard.cost.partitioner.reshard.device_tiles import tiles_of
from autoshard.cost.partitioner.reshard.steps import Cut, first_cut
from autoshard.cost.partitioner.tiling import Subaxes, Tiling

Dim = tuple[int, ...]


class Cuts:
    """The dynamic-slices that reshards begin with, over one mesh."""

    def __init__(self, subaxes: Subaxes, target: Target) -> None:
        """For `target`'s partitioner."""
        self.subaxes = subaxes
        self.target = target
        self.compiler = CAPABILITIES[target]

    def cut(self, shape: Sequence[int], source: Tiling, target: Tiling, outer: Dim = ()) -> Cut | None:
        """The slice that every device takes of its shard before any collective; None where it takes none.

        `outer` are the subaxes that number the device groups: the reshard stays within each group.
        """
        if source == target:
            return None
        sizes = tuple(self.subaxes.sizes)
        return _cut(tuple(shape), source, target, sizes, outer, self.target)

    def scatters(self, axes: Iterable[int], cut: Cut | None, ordered: bool = False) -> bool:
        """Whether an all-reduce over `axes` of which each device keeps the slice `cut` becomes a reduce-scatter.

        `ordered`: replica groups list their devices in the order of `axes`, not in that of the mesh.
        """
        if cut is None:
            return False
        sizes = self.subaxes.sizes
        mine = tuple(axes) if ordered else tuple(sorted(axes))
        rest = [axis for axis in range(len(sizes)) if axis not in mine]
        ways = math.prod(sizes[axis] for axis in mine)
        grid = np.arange(math.prod(sizes)).reshape(sizes).transpose([*rest, *mine])
        parts = cut.places[grid.reshape(-1, ways)]
        if not self.compiler.scatters_sums:
            return all(len({tuple(part) for part in group}) == ways for group in parts.tolist())
        split = [dim for dim, factor in enumerate(cut.factors) if factor > 1]
        if not self.compiler.scatters_uneven_slices and any(cut.shape[dim] % cut.factors[dim] for dim in split):
            return False
        return (
            len(split) == 1 and cut.factors[split[0]] == ways and bool((parts[:, :, split[0]] == np.arange(ways)).all())
        )


@lru_cache(maxsize=1 << 14)
def _cut(
    shape: tuple[int, ...], source: Tiling, target: Tiling, sizes: tuple[int, ...], outer: Dim, kind: Target
) -> Cut | None:
    inner = [axis for axis in range(len(sizes)) if axis not in outer]
    number = {axis: place for place, axis in enumerate(inner)}
    within = [sizes[axis] for axis in inner]
    before, after = (
        tiles_of([[number[axis] for axis in dim] for dim in tiling], within) for tiling in (source, target)
    )
    found = first_cut(shape, before, after, kind)
    if found is None or not outer:
        return found
    # The same slice within every group.
    grid = np.arange(math.prod(sizes)).reshape(sizes).transpose([*outer, *inner]).reshape(-1, len(found.places))
    places = np.empty((math.prod(sizes), found.places.shape[1]), dtype=found.places.dtype)
    places[grid] = found.places
    return replace(found, places=places)
