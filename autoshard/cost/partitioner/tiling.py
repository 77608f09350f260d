"""Shardings as GSPMD computes with them: tiles, and how they merge, refine and pass through reshapes.

GSPMD knows no mesh axes, only how many tiles each dim has and which device holds which tile; a reshape can split a mesh
axis of 4 into 2 x 2. So each axis is factored into *subaxes* of prime size here, and a tiling lists, per dim, the
subaxes that split it, major to minor: `[tokens, features/m]` is `((), (0, 1))` for m = 4. This covers every sharding
that GSPMD derives from named axes but reversed ones and splits at other than prime factors.

The operations have the names of XLA's `hlo_sharding_util`, whose behaviour they reproduce.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TypeVar

from autoshard.mesh import Mesh, Spec

Part = TypeVar("Part", int, str)
Tiling = tuple[tuple[int, ...], ...]
"""Per dim the subaxes (numbers, see `Subaxes`) that split it, major to minor."""


class Subaxes:
    """The subaxes of a mesh: number -> axis and size, and tilings over them.

    Subaxes are numbered in mesh order, those of one axis major to minor.
    """

    def __init__(self, mesh: Mesh) -> None:
        """Factor the axes of `mesh` into subaxes."""
        self.mesh = mesh
        self.sizes: list[int] = []
        self.axis: list[str] = []
        self.of_axis: dict[str, tuple[int, ...]] = {}
        for name in mesh.axis_names:
            numbers = []
            for prime in _primes(mesh.axis_size(name)):
                numbers.append(len(self.sizes))
                self.sizes.append(prime)
                self.axis.append(name)
            self.of_axis[name] = tuple(numbers)
        self.devices = mesh.size
        self._ways: dict[tuple[int, ...], int] = {(): 1}
        self._tiles: dict[Tiling, int] = {}
        self._reshaped: dict[object, Tiling | None] = {}
        self._refines: dict[object, bool] = {}

    def tiling(self, spec: Spec) -> Tiling:
        """The tiling of a spec over named axes."""
        return tuple(tuple(number for axis in dim for number in self.of_axis[axis]) for dim in spec)

    def spec(self, tiling: Tiling) -> Spec:
        """The spec of a tiling, without subaxes that do not make up a whole axis in order."""
        return tuple(self._named(dim) for dim in tiling)

    def axes(self, subaxes: Iterable[int]) -> tuple[str, ...]:
        """The axes that these subaxes are part of, in mesh order."""
        return self.mesh.in_order({self.axis[number] for number in subaxes})

    def ways(self, dim: tuple[int, ...]) -> int:
        """Number of tiles into which these subaxes split a dim."""
        known = self._ways.get(dim)
        if known is None:
            known = self._ways[dim] = math.prod(self.sizes[number] for number in dim)
        return known

    def tiles(self, tiling: Tiling) -> int:
        """Number of distinct tiles."""
        known = self._tiles.get(tiling)
        if known is None:
            known = self._tiles[tiling] = math.prod(self.ways(dim) for dim in tiling)
        return known

    def shard(self, shape: Sequence[int], tiling: Tiling) -> tuple[int, ...]:
        """Shape of one device's tile of a value of global `shape`, uneven dims padded up."""
        return tuple(-(-size // self.ways(dim)) for size, dim in zip(shape, tiling, strict=True))

    def merge(self, one: Tiling, other: Tiling, minimum: int) -> Tiling | None:
        """The tiling that refines both (`MergeShardingIfCompatible`), if it has at least `minimum` tiles.

        It splits dims that only one splits as that one; dims that both split must agree.
        """
        if not any(one):
            return None
        if not any(other):
            return one
        if self.tiles(other) == self.devices:
            return None
        merged = []
        for a, b in zip(one, other, strict=True):
            if a and b and a != b:
                return None
            merged.append(a or b)
        used = [number for dim in merged for number in dim]
        if len(used) != len(set(used)):
            return None
        result = tuple(merged)
        return result if self.tiles(result) >= minimum else None

    def improve(
        self, shape: tuple[int, ...], old: Tiling | None, new: Tiling, combine: bool, aggressive: bool
    ) -> Tiling | None:
        """The sharding of an instruction with `old`, improved by `new` (`ReturnImprovedSharding`); None if it stays."""
        if old is None:
            return new
        if new == old:
            return None
        before, after = self.tiles(old), self.tiles(new)
        if combine and 1 < before < self.devices and 1 < after < self.devices:
            merged = self.merge(old, new, max(before, after) + 1)
            if merged is not None:
                return merged
        if after <= before:
            return None
        if not aggressive and before > 1 and not self.refines(shape, new, old):
            return None
        return new

    def refines(self, shape: tuple[int, ...], fine: Tiling, coarse: Tiling) -> bool:
        """Whether every device's tile in `fine` lies within its tile in `coarse` (`IsSubTilingOrEqualSharding`)."""
        key = (shape, fine, coarse)
        known = self._refines.get(key)
        if known is None:
            known = self._refines[key] = all(
                self._dim_refines(size, a, b) for size, a, b in zip(shape, fine, coarse, strict=True)
            )
        return known

    def _dim_refines(self, size: int, fine: tuple[int, ...], coarse: tuple[int, ...]) -> bool:
        if not coarse or fine == coarse:
            return True
        if fine[: len(coarse)] != coarse:
            return False
        many, few = self.ways(fine), self.ways(coarse)
        small, large = -(-size // many), -(-size // few)
        for tile in range(many):
            start, limit = tile * small, (tile * few // many) * large
            if start < limit or (start + small < size and start + small > limit + large):
                return False
        return True

    def reshape(self, source: tuple[int, ...], target: tuple[int, ...], tiling: Tiling) -> Tiling:
        """A tiling passed through a reshape (`PropagateShardingThroughReshape`)."""
        if not any(tiling):
            return ((),) * len(target)
        key = (source, target, tiling)
        known = self._reshaped.get(key)
        if known is None:
            known = self._reshaped[key] = self._reshape_by_intervals(source, target, tiling)
        return known

    def _reshape_by_intervals(self, source: tuple[int, ...], target: tuple[int, ...], tiling: Tiling) -> Tiling:
        result: Tiling = ((),) * len(target)
        start = 0
        while start < len(source):
            for end in range(len(source), start, -1):
                part = tuple(dim if start <= i < end else () for i, dim in enumerate(tiling))
                if not any(part):
                    continue
                moved = self._reshape_whole(source, target, part)
                merged = None if moved is None else self.merge(moved, result, self.tiles(result) + 1)
                if merged is not None:
                    result = merged
                    start = end
                    break
            else:
                start += 1
        return result

    def _reshape_whole(self, source: tuple[int, ...], target: tuple[int, ...], tiling: Tiling) -> Tiling | None:
        """`ReshapeSharding`: dims are split and merged major to minor; None where nothing carries over."""
        sizes, parts = list(reversed(source)), [self.ways(dim) for dim in reversed(tiling)]
        wanted = list(reversed(target))
        counts: list[int] = []
        dropped: set[int] = set()
        within = False
        index = -1

        def append(count: int) -> None:
            nonlocal within
            if within:
                counts[-1] *= count
            else:
                counts.append(count)
            within = False

        while sizes and wanted and math.prod(parts) != 1:
            plain = 1
            while parts and parts[-1] == 1:
                plain *= sizes.pop()
                parts.pop()
                index += 1
            while wanted and wanted[-1] > 1 and plain % wanted[-1] == 0:
                plain //= wanted.pop()
                append(1)
            if plain != 1:
                sizes.append(plain)
                parts.append(1)
                index -= 1
            if not sizes or not wanted:
                break
            size, part, want = sizes.pop(), parts.pop(), wanted.pop()
            index += 1
            if size == want:
                append(part)
            elif want == 1:
                append(1)
                sizes.append(size)
                parts.append(part)
                index -= 1
            elif size == 1:
                wanted.append(want)
                if part > 1:
                    dropped.add(index)
            elif part == 1:
                if sizes and parts[-1] == 1:
                    sizes[-1] *= size
                else:
                    break
            elif size % part:
                return None
            else:
                common = math.gcd(part, want)
                if common == 1:
                    break
                sizes.append(size // common)
                parts.append(part // common)
                index -= 1
                wanted.append(want // common)
                append(common)
                within = True
        if math.prod(counts) == 1:
            return None
        counts += [1] * (len(target) - len(counts))
        flat = [number for i, dim in enumerate(tiling) if i not in dropped for number in dim]
        return self._dealt(flat, counts[: len(target)])

    def _dealt(self, flat: list[int], counts: list[int]) -> Tiling | None:
        """Subaxes distributed in order, so that dim i gets `counts[i]` tiles; None where that would split a subaxis."""
        result = []
        place = 0
        for count in counts:
            dim = []
            while count > 1:
                if place == len(flat) or count % self.sizes[flat[place]]:
                    return None
                dim.append(flat[place])
                count //= self.sizes[flat[place]]
                place += 1
            result.append(tuple(dim))
        return tuple(result)

    def _named(self, dim: tuple[int, ...]) -> tuple[str, ...]:
        names = []
        place = 0
        while place < len(dim):
            axis = self.axis[dim[place]]
            numbers = self.of_axis[axis]
            if dim[place : place + len(numbers)] == numbers:
                names.append(axis)
                place += len(numbers)
            else:
                place += 1
        return tuple(names)


def carried(tiling: Tiling, pairs: Iterable[tuple[int, int]], rank: int) -> Tiling:
    """A tiling of `rank` dims: of each (from, to) in `pairs`, dim `to` is split as dim `from` of `tiling` is."""
    found: list[tuple[int, ...]] = [()] * rank
    for source, target in pairs:
        found[target] = tiling[source]
    return tuple(found)


def across_ones(
    split: Sequence[tuple[Part, ...]], shape: Sequence[int], other: Sequence[int]
) -> tuple[tuple[Part, ...], ...] | None:
    """How a split tensor of `shape` is split after a reshape that adds or drops dims of size 1; else None."""
    kept = [parts for parts, size in zip(split, shape, strict=True) if size > 1]
    if [size for size in shape if size > 1] != [size for size in other if size > 1]:
        return None
    left = iter(kept)
    return tuple(next(left) if size > 1 else () for size in other)


def _primes(size: int) -> list[int]:
    """Prime factors, largest last."""
    factors = []
    prime = 2
    while size > 1:
        while size % prime == 0:
            factors.append(prime)
            size //= prime
        prime += 1
    return factors
