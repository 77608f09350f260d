"""XLA's partitioner resharding one value, step by step, on any mesh.

This follows `PartitionedHlo::ReshardNoCache` (xla/service/spmd/spmd_partitioner.cc, the version in jaxlib 0.10 and
libtpu 0.0.51): the same attempts in the same order on the same device arrays, because which attempt succeeds depends
on the order of the devices as much as on the numbers of tiles. The attempts, first to last:

1. `_permute`: same tiles on other devices, by a collective permute.
2. `_exchange`: dims swap their numbers of tiles, by all-to-alls (one for several pairs of dims where all divide).
3. `_slice_replicated`: a dynamic-slice of a partially replicated value, then a permute.
4. `_gather_to_replicated`: a permute, then all-gathers along dims that the target does not split.
5. `_exchange_leading`: a special case of 3 and 4 with an all-to-all.
6. `_complex`: a dim's tiles split in two, to move only one factor; or a dim replicated first; or the replicas first
   used to split a dim. Then 1 to 6 again.
7. Group by dims with equally many tiles on both sides, and reshard the rest within each device group.
8. Gather everything, then slice: XLA warns of an *involuntary full rematerialization*.

Sizes are per device, padding of uneven dims included.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import numpy as np

from autoshard.cost.machine.collectives import CollectiveKind
from autoshard.cost.machine.targets import CAPABILITIES, Target
from autoshard.cost.partitioner.reshard.device_tiles import (
    Devices,
    Shape,
    Tiles,
    aligned,
    grouped,
    groups_along,
    merge_tiles,
    replicate_dim,
    split_tiles,
    tiles,
    ungrouped,
)
from autoshard.mesh import AxisGroup, AxisPart, part_of

Pairs = list[tuple[int, int]]


@dataclass(frozen=True, eq=False)
class Emitted:
    """One collective: the devices of each group, or (source, target) pairs of a permute.

    `elements` are those of the larger of operand and result on one device.
    """

    kind: CollectiveKind
    groups: Devices
    elements: int


@dataclass(frozen=True, eq=False)
class Cut:
    """The dynamic-slice that every device takes of its shard.

    Attributes:
        factors: into how many slices each dim of a shard is cut.
        places: (devices, dims): the index of each device's slice.
        shape: of the shard.
    """

    factors: Shape
    places: Devices
    shape: Shape

    def __eq__(self, other: object) -> bool:
        """Whether every device takes the same slice."""
        return isinstance(other, Cut) and self.factors == other.factors and bool((self.places == other.places).all())

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True, eq=False)
class Part:
    """A partitioned value: `PartitionedHlo`.

    Attributes:
        base: global shape, or the shape within one group of devices.
        shape: of one device's shard.
        sharding: within a group.
        world: devices, one row per group.
        emitted: what was emitted so far.
        whole: whether a full gather was the last resort.
        cut: the slice that it began with, before any communication.
    """

    base: Shape
    shape: Shape
    sharding: Tiles
    world: Devices
    emitted: tuple[Emitted, ...] = ()
    whole: bool = False
    cut: Callable[[], Cut] | None = None

    def sliced(self, after: Tiles) -> Part:
        """The value after every device took its slice."""
        cut = self.cut
        if cut is None and not self.emitted:
            cut = partial(_cut, self, after)
        return replace(self, sharding=after, shape=_local(self.base, after), cut=cut)

    def with_(self, kind: CollectiveKind, groups: Devices, elements: int) -> Part:
        """The value after one more collective, whose groups number the devices within each group."""
        inside = self.world[:, groups].reshape(-1, groups.shape[-1])
        return replace(self, emitted=(*self.emitted, Emitted(kind, inside, elements)))


class CrashError(ValueError):
    """A reshard on which XLA's partitioner crashes (measured: SIGFPE, jaxlib 0.10.2).

    It merges all-to-alls on disjoint pairs of dims. In a chain of three dims that pass on their tiles it takes the last
    step before the one that makes it possible, and gets a group of 2 / 4 = 0 devices.
    """


@dataclass(frozen=True)
class Resharding:
    """The result of a reshard.

    Attributes:
        steps: the collectives, in order.
        rematerialized: whether XLA would warn of an involuntary full rematerialization.
    """

    steps: tuple[Emitted, ...]
    rematerialized: bool


def reshard_tiles(shape: Shape, source: Tiles, target: Tiles, target_kind: Target) -> Resharding:
    """The collectives that `target_kind`'s partitioner emits to reshard a value of global `shape`.

    Raises:
        CrashError: XLA would crash.
    """
    devices = source.devices.size
    part = Part(shape, _local(shape, source), source, np.arange(devices, dtype=np.int64)[None, :])
    done = _Partitioner(target_kind).reshard(part, target)
    return Resharding(done.emitted, done.whole)


def first_cut(shape: Shape, source: Tiles, target: Tiles, target_kind: Target) -> Cut | None:
    """The slice that every device takes of its shard before any communication, on the way to `target`."""
    devices = source.devices.size
    part = Part(shape, _local(shape, source), source, np.arange(devices, dtype=np.int64)[None, :])
    cut = _Partitioner(target_kind).reshard(part, target).cut
    return None if cut is None else cut()


def _cut(part: Part, after: Tiles) -> Cut:
    factors = tuple(many // few for many, few in zip(after.data, part.sharding.data, strict=True))
    places = np.empty((part.world.size, len(factors)), dtype=np.int64)
    places[part.world] = _places(after) % np.array(factors)
    return Cut(factors, places, part.shape)


def _places(sharding: Tiles) -> Devices:
    """Per device the index of its tile along each dim."""
    found = np.empty((sharding.devices.size, sharding.rank), dtype=np.int64)
    found[sharding.devices.reshape(-1)] = np.indices(sharding.dims).reshape(len(sharding.dims), -1)[: sharding.rank].T
    return found


def _local(base: Shape, sharding: Tiles) -> Shape:
    return tuple(-(-size // ways) for size, ways in zip(base, sharding.data, strict=True))


def _up(size: int, ways: int) -> int:
    return -(-size // ways) * ways


class _Partitioner:
    def __init__(self, target: Target) -> None:
        self.merges = CAPABILITIES[target].gathers_dims_at_once

    def reshard(self, part: Part, target: Tiles, full: bool = True) -> Part:
        """`part` as `target`; unchanged where that needs a full gather and `full` forbids it."""
        source = part.sharding
        if source == target:
            return part
        if _permutable(source, target):
            return self._permute(part, target)
        swaps = _swaps(source, target)
        if swaps is not None:
            return self._exchange(part, target, swaps)
        attempts: list[Callable[[Part, Tiles], Part | None]] = []
        if not target.replicated and source.partial and not source.replicated:
            attempts += [self._slice_replicated, self._exchange_leading]
        if not source.replicated and target.partial and not target.replicated:
            attempts += [self._gather_to_replicated, self._exchange_leading]
        for attempt in attempts:
            done = attempt(part, target)
            if done is not None:
                return done
        if source.replicated:
            return part.sliced(target)
        if target.replicated:
            return self._replicate(part, target)
        done = self._complex(part, target)
        if done is not None:
            return done
        equal = [i for i, (a, b) in enumerate(zip(source.data, target.data, strict=True)) if a == b > 1]
        if equal:
            return self._within_groups(part, target, equal)
        if not full:
            return part
        nothing = Tiles((1,) * source.rank + (source.devices.size,), source.devices.reshape(-1), True)
        return replace(self.reshard(self._replicate(part, nothing), target), whole=True)

    # --- one step ---------------------------------------------------------------------------------------------

    def _permute(self, part: Part, target: Tiles) -> Part:
        pairs = np.stack([part.sharding.devices.reshape(-1), target.devices.reshape(-1)], axis=-1)
        moved = replace(part, sharding=target)
        return moved.with_("collective-permute", pairs, math.prod(part.shape))

    def _exchange(self, part: Part, target: Tiles, swaps: Pairs, several: bool = True) -> Part:
        """All-to-alls after which each (source dim, target dim) of `swaps` has swapped its numbers of tiles."""
        source = part.sharding
        if source == target:
            return part
        if not swaps:
            return self._permute(part, target)
        if several:
            taken, seen, rest = [], set[int](), []
            for i, j in sorted(swaps, key=lambda swap: swap[1]):
                even = part.base[i] % source.dims[i] == 0 and part.base[j] % target.dims[j] == 0
                if even and not {i, j} & seen:
                    taken.append((i, j))
                    seen |= {i, j}
                else:
                    rest.append((i, j))
            if len(taken) > 1:
                return self._exchange(self._exchange_at_once(part, taken), target, rest, several=False)
        return self._exchange(self._exchange_at_once(part, swaps[:1]), target, swaps[1:])

    def _exchange_at_once(self, part: Part, swaps: Pairs) -> Part:
        source = part.sharding
        devices = source.devices
        factors = []
        for i, j in swaps:
            many, few = devices.shape[i], devices.shape[j]
            if many < few:  # a swap of a chain, before its turn, as in XLA
                raise CrashError(f"XLA divides by zero where {few} tiles are to swap with {many}")
            factors.append(many // few)
            shape = list(devices.shape)
            shape[i : i + 1] = [few, many // few]
            place = j + (j > i)
            shape[place : place + 1] = [few, 1]
            minor = i + 1 + (j < i)
            order = list(range(len(shape)))
            order[minor], order[place + 1] = order[place + 1], order[minor]
            swapped = list(devices.shape)
            swapped[i], swapped[j] = few, many
            devices = devices.reshape(shape).transpose(order).reshape(swapped)
        after = tiles(devices, source.rank)
        groups = groups_along(after.devices, [j for _, j in swaps], factors)
        for _, j in swaps:
            part = self._shift(part, j, _up(part.base[j], after.dims[j]) // source.dims[j])
        part = part.with_("all-to-all", groups, math.prod(part.shape))
        exchanged = list(part.shape)
        for (i, j), factor in zip(swaps, factors, strict=True):
            exchanged[i], exchanged[j] = exchanged[i] * factor, exchanged[j] // factor
        part = replace(part, sharding=after, shape=tuple(exchanged))
        for i, _ in swaps:
            part = self._shift(part, i, _local(part.base, after)[i])
        return part

    def _shift(self, part: Part, dim: int, size: int) -> Part:
        """Shift the borders of `dim`'s shards, so that each holds `size` entries: a halo exchange."""
        part = self._halo(part, dim, abs(size - part.shape[dim]) * (part.sharding.dims[dim] - 1))
        return replace(part, shape=(*part.shape[:dim], size, *part.shape[dim + 1 :]))

    def _halo(self, part: Part, dim: int, most: int) -> Part:
        """Permute up to `most` entries of `dim` between shards, at most a whole shard from each neighbour."""
        ways, held = part.sharding.dims[dim], part.shape[dim]
        rest = math.prod(part.shape) // held
        devices = np.moveaxis(part.sharding.devices, dim, 0)
        for hop in range(1, min(ways, -(-most // held) + 1)):
            pairs = np.stack([devices[:-hop].reshape(-1), devices[hop:].reshape(-1)], axis=-1)
            part = part.with_("collective-permute", pairs, rest * min(held, most - (hop - 1) * held))
        return part

    def _slice_replicated(self, part: Part, target: Tiles) -> Part | None:
        compatible = _compatible(part.sharding, target)
        if compatible is None:
            return None
        for i, (few, many) in enumerate(zip(part.sharding.data, compatible.data, strict=True)):
            if many > few:  # a fine tile must lie within one coarse tile
                part = self._shift(part, i, max(part.shape[i], _up(part.base[i], many) // few))
        sliced = part.sliced(compatible)
        return self._permute(sliced, target) if _permutable(compatible, target) else sliced

    def _gather_to_replicated(self, part: Part, target: Tiles) -> Part | None:
        compatible = _compatible(target, part.sharding)
        if compatible is None:
            return None
        if _permutable(part.sharding, compatible):
            part = self._permute(part, compatible)
        factors = [many // few for many, few in zip(compatible.data, target.data, strict=True)]
        dims = [i for i, factor in enumerate(factors) if factor > 1]
        for i in dims:
            few = target.dims[i]
            surplus = part.shape[i] * factors[i] - _local(part.base, target)[i]
            if few > 1 and surplus > 0:
                part = self._halo(part, i, surplus * (few - 1))
        groups = grouped(compatible, dims, [factors[i] for i in dims])
        inside = replace(
            part, base=_local(part.base, target), sharding=groups.inside, world=_within(part.world, groups.groups)
        )
        gathered = self._gather(inside, dims)
        return replace(gathered, base=part.base, sharding=target, world=part.world)

    def _replicate(self, part: Part, target: Tiles) -> Part:
        return replace(self._gather(part, range(part.sharding.rank)), sharding=target)

    def _gather(self, part: Part, dims: Sequence[int]) -> Part:
        """`ReplicatePartial`: all-gather `dims`; all-reduce those with less than half as many entries as tiles."""
        sharding, shape = part.sharding, list(part.shape)
        same, summed, gathered = list[int](), list[int](), list[int]()
        for i in dims:
            ways, size = sharding.dims[i], part.base[i]
            if ways > 1:
                (same if size == shape[i] else summed if size <= ways // 2 else gathered).append(i)
        if same:
            part = part.with_("all-reduce", groups_along(sharding.devices, same), math.prod(shape))
        if self.merges and len(gathered) > 1:
            count = math.prod(shape) * math.prod(sharding.dims[i] for i in gathered)
            part = part.with_("all-gather", groups_along(sharding.devices, gathered), count)
        else:
            for i in reversed(gathered):
                shape[i] *= sharding.dims[i]
                part = part.with_("all-gather", groups_along(sharding.devices, [i]), math.prod(shape))
        for i in (*gathered, *summed, *same):
            shape[i] = part.base[i]
        for i in reversed(summed):
            part = part.with_("all-reduce", groups_along(sharding.devices, [i]), math.prod(shape))
        return replace(part, shape=tuple(shape))

    # --- several steps ----------------------------------------------------------------------------------------

    def _exchange_leading(self, part: Part, target: Tiles) -> Part | None:
        """`[1,a,b] replicated` to or from `[a,b]`, with the same devices in the same order."""
        slicing = part.sharding.partial
        partial, full = (part.sharding, target) if slicing else (target, part.sharding)
        if full.partial or full.replicated or len(full.dims) + 1 != len(partial.dims) or partial.dims[0] != 1:
            return None
        split = [i for i, ways in enumerate(full.dims) if ways > 1]
        if full.dims[split[-1]] != partial.copies or full.dims != partial.dims[1:]:
            return None
        if not (partial.devices.reshape(full.dims) == full.devices).all():
            return None
        shape = list(full.dims)
        shape[split[-1]] = 1
        between = tiles(full.devices.reshape([*shape, partial.copies]), full.rank)
        if slicing:
            swaps = _swaps(part.sharding, between)
            return None if swaps is None else self.reshard(self._exchange(part, between, swaps), target)
        first = self.reshard(part, between)
        swaps = _swaps(first.sharding, target)
        return None if swaps is None else self._exchange(first, target, swaps)

    def _complex(self, part: Part, target: Tiles) -> Part | None:
        source = part.sharding
        match = _split_dim(part.base, source, target)
        if match is not None:
            return self._by_parts_of_dim(part, target, *match)
        if target.partial:
            for i, ways in enumerate(source.data):
                if ways > 1 and ways * source.copies == target.copies:
                    first = self.reshard(part, replicate_dim(source, i))
                    return _arrived(self.reshard(first, target, full=False), target)
        if source.partial and not target.partial:
            for i, (before, after) in enumerate(zip(source.data, target.data, strict=True)):
                if before == 1 and after != before and after % source.copies == 0:
                    given = tiles(np.swapaxes(source.devices, i, -1), source.rank)
                    return _arrived(self.reshard(self.reshard(part, given), target, full=False), target)
        return None

    def _by_parts_of_dim(self, part: Part, target: Tiles, dim: int, major: int) -> Part | None:
        """Reshard with `dim` as two dims, the first of `major` tiles; then do the rest."""
        before, after = split_tiles(part.sharding, dim, major), split_tiles(target, dim, major)
        size = part.shape[dim]
        inner = size * before.dims[dim + 1]
        two = replace(
            part,
            base=(*part.base[:dim], part.base[dim] // inner, inner, *part.base[dim + 1 :]),
            shape=(*part.shape[:dim], 1, size, *part.shape[dim + 1 :]),
            sharding=before,
        )
        moved = self.reshard(two, after, full=False)
        if moved.sharding != after:
            return None
        one = replace(
            moved,
            base=(*moved.base[:dim], moved.base[dim] * moved.base[dim + 1], *moved.base[dim + 2 :]),
            shape=(*moved.shape[:dim], moved.shape[dim] * moved.shape[dim + 1], *moved.shape[dim + 2 :]),
            sharding=merge_tiles(moved.sharding, dim),
        )
        done = _arrived(self.reshard(one, target, full=False), target)
        return None if done is None else replace(done, base=part.base)

    def _within_groups(self, part: Part, target: Tiles, equal: Sequence[int]) -> Part:
        groups = grouped(part.sharding, equal)
        wanted = aligned(grouped(target, equal), groups)
        base = tuple(part.shape[i] if i in equal else size for i, size in enumerate(part.base))
        inside = replace(part, base=base, sharding=groups.inside, world=_within(part.world, groups.groups))
        moved = self.reshard(inside, wanted.inside)
        joined = ungrouped(wanted, [target.dims[i] for i in equal], equal, target.rank)
        return self.reshard(replace(moved, base=part.base, sharding=joined, world=part.world), target)


def _arrived(part: Part, target: Tiles) -> Part | None:
    return part if part.sharding == target else None


def _within(world: Devices, groups: Devices) -> Devices:
    return world[:, groups].reshape(-1, groups.shape[-1])


# --- which attempts apply ------------------------------------------------------------------------------------------


def _permutable(source: Tiles, target: Tiles) -> bool:
    return (
        not source.replicated
        and source.dims == target.dims
        and source.partial == target.partial
        and not (source.devices == target.devices).all()
    )


def _swaps(source: Tiles, target: Tiles) -> Pairs | None:
    """(source, target) dims that swap their numbers of tiles, in order (`GetReshardAllToAllSourceTargetDims`)."""
    if source.replicated or target.replicated or len(source.dims) != len(target.dims):
        return None
    if math.prod(source.data) != math.prod(target.data):
        return None
    have: dict[int, list[int]] = {}
    want: dict[int, list[int]] = {}
    for i, (before, after) in enumerate(zip(source.dims, target.dims, strict=True)):
        if before != after:
            have.setdefault(before, []).append(i)
            want.setdefault(after, []).append(i)
    if not have or {n: len(dims) for n, dims in have.items()} != {n: len(dims) for n, dims in want.items()}:
        return None
    found: Pairs = []

    def remove(size: int, dim: int, dims: dict[int, list[int]]) -> None:
        dims[size] = [each for each in dims[size] if each != dim]
        if not dims[size]:
            del dims[size]

    while have:
        few = min(have)
        i = have[few][-1]
        many = target.dims[i]
        if many == few:
            remove(few, i, have)
            remove(few, i, want)
            continue
        able = have[many]
        if few == 1:
            j = next((each for each in able if target.dims[each] != 1), able[-1])
        elif many % few == 0:
            j = next((each for each in able if target.dims[each] == few), able[-1])
        else:
            return None
        found.append((j, i))
        remove(many, i, want)
        have[few][-1] = j
        remove(many, j, have)
    return found


def _compatible(partial: Tiles, full: Tiles) -> Tiles | None:
    """`full`'s tiles on devices that hold their part of `partial`'s (`PartialReplicateReshardCompatibleSharding`)."""
    if not partial.partial or partial.devices.size != full.devices.size:
        return None
    factors = [many // few for many, few in zip(full.data, partial.data, strict=True)]
    if any(few * factor != many for few, many, factor in zip(partial.data, full.data, factors, strict=True)):
        return None
    shape, order, added = list[int](), list[int](), list[int]()
    for few, factor in zip(partial.data, factors, strict=True):
        order.append(len(shape))
        shape.append(few)
        if factor > 1:
            added.append(len(shape))
            shape.append(factor)
    major = [axis for axis in range(len(shape)) if axis not in added]
    regrouped = full.devices.reshape([*shape, full.copies]).transpose([*major, *added, len(shape)])
    if (np.sort(regrouped.reshape(partial.dims), axis=-1) == partial.devices).all():
        return full
    expanded = [factor for factor in factors if factor > 1]
    split = partial.devices.reshape([*partial.data, *expanded, full.copies])
    order, new = [], partial.rank
    for i, factor in enumerate(factors):
        order.append(i)
        if factor > 1:
            order.append(new)
            new += 1
    return tiles(split.transpose([*order, new]).reshape([*full.data, full.copies]), full.rank)


def _split_dim(base: Shape, source: Tiles, target: Tiles) -> tuple[int, int] | None:
    """(dim, major tiles) to split a dim's tiles at (`PatternMatchMergeOrSplitSharding`)."""
    if source.partial != target.partial or source.copies != target.copies:
        return None
    one, both = [], []
    for i, (a, b) in enumerate(zip(source.data, target.data, strict=True)):
        few, many = min(a, b), max(a, b)
        if few == many:
            continue
        if few == 1:
            one.append(i)
        elif many % few == 0 and _up(base[i], few) % many == 0:
            both.append(i)
    for i in both:
        for j in one:
            if source.dims[i] * source.dims[j] == target.dims[i] * target.dims[j]:
                return i, min(source.dims[i], target.dims[i])
    for i in both:
        if source.dims[i] > target.dims[i]:
            return i, target.dims[i]
    return None


# --- along which axes ----------------------------------------------------------------------------------------------


def along(emitted: Emitted, sizes: Shape) -> tuple[tuple[int, int], ...]:
    """(axis, devices along it) of a collective's groups, on a mesh of `sizes`.

    For a permute, the whole axes along which a device's target differs from it. Groups of other sizes than the product
    of these numbers are no subgrid of the mesh.
    """
    groups = emitted.groups
    if emitted.kind == "collective-permute":
        source, target = (np.unravel_index(groups[:, side], sizes) for side in (0, 1))
        return tuple((axis, size) for axis, size in enumerate(sizes) if bool((source[axis] != target[axis]).any()))
    return _along(np.ascontiguousarray(groups).tobytes(), groups.shape[1], sizes)


@lru_cache(maxsize=1 << 14)
def _along(groups: bytes, width: int, sizes: Shape) -> tuple[tuple[int, int], ...]:
    members = np.frombuffer(groups, dtype=np.int64).reshape(-1, width)
    found = []
    for axis, coordinate in enumerate(np.unravel_index(members, sizes)):
        ordered = np.sort(coordinate, axis=1)
        count = 1 + int((np.diff(ordered, axis=1) != 0).sum(axis=1).max())
        if count > 1:
            found.append((axis, count))
    return tuple(found)


def axis_group(emitted: Emitted, sizes: Shape, names: Sequence[str]) -> AxisGroup:
    """The mesh axes, or parts of axes, that a collective runs over."""
    found = along(emitted, sizes)
    width = emitted.groups.shape[1]
    if emitted.kind != "collective-permute" and math.prod(count for _, count in found) != width:
        return (AxisPart(tuple(names[axis] for axis, _ in found), width),)
    return tuple(part_of(names[axis], count, sizes[axis]) for axis, count in found)
