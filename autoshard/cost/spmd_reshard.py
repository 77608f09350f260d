"""Reshards between tilings, through the measured table of `reshard.py`.

The table knows axes by their sizes alone, so a run of subaxes that moves as one stands for one axis there: parts of an
axis, and several axes that stay side by side, are looked up like any other.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache

from autoshard.cost.collectives import CollectiveKind
from autoshard.cost.device import Target
from autoshard.cost.reshard import Places, SymbolicStep, fit_of, looked_up, modelled, reshard_steps
from autoshard.graph.tiling import Subaxes, Tiling
from autoshard.graph.transfer import bytes_of
from autoshard.mesh import Mesh

Step = tuple[CollectiveKind, tuple[str, ...], int]
"""Kind, axis names as in `Collective.axes`, bytes."""

Group = tuple[int, ...]


class Resharder:
    """Collectives of reshards over one mesh, remembered by (shape, dtype, source, target)."""

    def __init__(self, subaxes: Subaxes, target: Target) -> None:
        """For tilings over `subaxes`, as `target`'s partitioner moves between them."""
        self.subaxes = subaxes
        self.target: Target = target
        self._known: dict[tuple[tuple[int, ...], str, Tiling, Tiling, Group], tuple[Step, ...]] = {}
        self._meshes: dict[Group, Mesh | None] = {}
        self._shares: dict[tuple[Tiling, Tiling], tuple[int, list[tuple[CollectiveKind, tuple[str, ...], float]]]] = {}
        self._names: dict[tuple[int, ...], tuple[str, ...]] = {}

    def names(self, subaxes: Sequence[int]) -> tuple[str, ...]:
        """Axis names of subaxes, in mesh order; a part of an axis reads `model[2/4]`, as compiled programs do."""
        key = tuple(subaxes)
        known = self._names.get(key)
        if known is None:
            parts = dict.fromkeys(self.subaxes.axes(key), 1)
            for number in set(key):
                parts[self.subaxes.axis[number]] *= self.subaxes.sizes[number]
            known = self._names[key] = tuple(self._name(axis, part) for axis, part in parts.items())
        return known

    def _name(self, axis: str, part: int) -> str:
        whole = self.subaxes.mesh.axis_size(axis)
        return axis if part == whole else f"{axis}[{part}/{whole}]"

    def reshard(
        self, shape: tuple[int, ...], dtype: str, source: Tiling, target: Tiling, outer: Group = ()
    ) -> tuple[Step, ...]:
        """What moving a value of `shape` from `source` to `target` takes; uneven dims count their padding.

        `outer` are the subaxes that group the devices: the move is within each group.
        """
        if source == target:
            return ()
        key = (shape, dtype, source, target, outer)
        known = self._known.get(key)
        if known is None:
            width = bytes_of(dtype)
            total = width * self._padded(shape, source, target)
            gathered = width * self._padded(shape, source)
            steps = self._named_steps(shape, source, target, outer)
            if steps is None:
                kept, parts = self._steps(source, target)
                steps = [(kind, axes, share / kept) for kind, axes, share in parts]
            # What gathers everything knows nothing yet of the dims that are split afterwards.
            known = self._known[key] = tuple(
                (kind, axes, math.ceil(share * (gathered if kind == "all-gather" and share == 1 else total)))
                for kind, axes, share in steps
            )
        return known

    def _padded(self, shape: tuple[int, ...], *tilings: Tiling) -> int:
        """Elements of an array of `shape`, padded so that each of `tilings` splits every dim evenly."""
        elements = 1
        for dim, size in enumerate(shape):
            ways = max(self.subaxes.ways(tiling[dim]) for tiling in tilings)
            elements *= -(-size // ways) * ways
        return elements

    def destination(
        self, shape: tuple[int, ...], dtype: str, source: Tiling, target: Tiling, outer: Group = ()
    ) -> Tiling:
        """Where the communication of a reshard ends: `target`, or nowhere split if it gathers all and then slices.

        Reshards of one value with one destination communicate once.
        """
        nothing: Tiling = ((),) * len(shape)
        steps = self.reshard(shape, dtype, source, target, outer)
        return nothing if steps and steps == self.reshard(shape, dtype, source, nothing, outer) else target

    def _named_steps(
        self, shape: tuple[int, ...], source: Tiling, target: Tiling, outer: Group
    ) -> list[tuple[CollectiveKind, tuple[str, ...], float]] | None:
        """Steps of a pair over whole axes, on the mesh of the axes that group no devices; None for parts of axes."""
        if not (self.subaxes.is_named(source) and self.subaxes.is_named(target)):
            return None
        mesh = self._mesh_within(outer)
        if mesh is None:
            return None
        steps = reshard_steps(
            self.subaxes.spec(source), self.subaxes.spec(target), mesh, self.target, fit_of(shape, mesh)
        )
        return [(step.kind, step.axes, step.share) for step in steps]

    def _mesh_within(self, outer: Group) -> Mesh | None:
        """The mesh of one group; None where the groups cut an axis."""
        if outer not in self._meshes:
            mesh = self.subaxes.mesh
            inside: Mesh | None = mesh
            if outer:
                cut = set(outer)
                whole = [name for name, numbers in self.subaxes.of_axis.items() if not cut & set(numbers)]
                parts = [name for name, numbers in self.subaxes.of_axis.items() if cut & set(numbers)]
                if any(not set(self.subaxes.of_axis[name]) <= cut for name in parts) or not whole:
                    inside = None
                else:
                    inside = Mesh(tuple(mesh.axis_size(name) for name in whole), tuple(whole), mesh.device)
            self._meshes[outer] = inside
        return self._meshes[outer]

    def _steps(self, source: Tiling, target: Tiling) -> tuple[int, list[tuple[CollectiveKind, tuple[str, ...], float]]]:
        """(parts that the axes in place divide the value into, steps with their share of one part)."""
        known = self._shares.get((source, target))
        if known is not None:
            return known
        kept = 1
        pairs: list[tuple[Group, Group]] = []
        for before, after in zip(source, target, strict=True):
            common = 0
            while common < min(len(before), len(after)) and before[common] == after[common]:
                kept *= self.subaxes.sizes[before[common]]
                common += 1
            if before[common:] or after[common:]:
                pairs.append((before[common:], after[common:]))
        groups = runs([before for before, _ in pairs], [after for _, after in pairs])
        place = {axis: i for i, group in enumerate(groups) for axis in group}
        sizes = tuple(self.subaxes.ways(group) for group in groups)
        src = tuple(_places(before, place) for before, _ in pairs)
        dst = tuple(_places(after, place) for _, after in pairs)
        steps = []
        for kind, axes, share in _symbolic(src, dst, sizes, self.target):
            names = self._step_names(groups, axes)
            if kind == "collective-permute":  # a permute has no groups: it is along whole axes
                names = tuple(name.partition("[")[0] for name in names)
            steps.append((kind, names, share))
        self._shares[source, target] = kept, steps
        return kept, steps

    def _step_names(self, groups: Sequence[Group], axes: Iterable[tuple[int, str]]) -> tuple[str, ...]:
        whole: list[int] = []
        for place, part in axes:
            group = groups[place]
            found = re.fullmatch(r"\[(\d+)/\d+\]", part)
            if found:
                devices = int(found[1])
                taken: list[int] = []
                for axis in group:
                    if self.subaxes.ways(tuple(taken)) >= devices:
                        break
                    taken.append(axis)
                group = tuple(taken)
            whole.extend(group)
        return self.names(sorted(whole))


def runs(sources: Sequence[Group], targets: Sequence[Group]) -> list[Group]:
    """The longest runs of subaxes that stand side by side wherever they occur; in mesh order."""
    follows: list[dict[int, int | None]] = []
    for side in (sources, targets):
        nexts: dict[int, int | None] = {}
        for dim in side:
            for axis, following in zip(dim, (*dim[1:], None), strict=False):
                nexts[axis] = following
        follows.append(nexts)
    axes = sorted({axis for nexts in follows for axis in nexts})
    joined: dict[int, int] = {}
    for axis in axes:
        after = {nexts[axis] for nexts in follows if axis in nexts}
        if len(after) != 1:
            continue
        (following,) = after
        if following is not None and all((axis in nexts) == (following in nexts) for nexts in follows):
            joined[axis] = following
    heads = [axis for axis in axes if axis not in joined.values()]
    found = []
    for head in heads:
        run = [head]
        while run[-1] in joined:
            run.append(joined[run[-1]])
        found.append(tuple(run))
    return sorted(found)


@lru_cache(maxsize=1 << 14)
def _symbolic(src: Places, dst: Places, sizes: tuple[int, ...], target: Target) -> tuple[SymbolicStep, ...]:
    found = looked_up(src, dst, sizes, target)
    return modelled(src, dst, sizes, target) if found is None else found


def _places(dim: Group, place: dict[int, int]) -> Group:
    return tuple(dict.fromkeys(place[axis] for axis in dim))
