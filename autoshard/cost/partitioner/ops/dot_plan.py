"""Plans of contractions: their steps, and operands and result as seen within a group of devices."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field

from autoshard.cost.partitioner.ops.halo import Moved
from autoshard.cost.partitioner.tiling import Subaxes, Tiling, carried
from autoshard.graph.contraction import Dims

Shape = tuple[int, ...]
Dim = tuple[int, ...]
Hides = Callable[[int, int, Dim], bool]
"""(multiply-adds per device, elements communicated, axes) -> whether a windowed einsum hides its permutes."""


@dataclass(frozen=True)
class Move:
    """A reshard of operand `place` (0 or 1) or of the result (2), of `shape` within each of the groups `outer`."""

    place: int
    shape: Shape
    source: Tiling
    target: Tiling
    outer: Dim = ()


@dataclass(frozen=True)
class Sum:
    """All-reduces over `axes`, within each of the groups `outer`.

    `axes` has one entry per all-reduce, in XLA's order: it reduces along one dim at a time. `made`: local shape of the
    partial sums. `kept`: per dim of the result, the axes along which each device then takes a slice.
    """

    axes: tuple[Dim, ...]
    made: Shape
    kept: tuple[Dim, ...] = ()
    outer: Dim = ()


@dataclass(frozen=True)
class Halo:
    """A halo exchange of operand `place`, split by `tiling`.

    Attributes:
        moved: its collective permutes.
        key: identifies the exchange: equal ones of one value are emitted once.
    """

    place: int
    tiling: Tiling
    moved: tuple[Moved, ...]
    key: Hashable


@dataclass(frozen=True)
class Loop:
    """A windowed einsum over `axes` that permutes operand `place` or the result (2).

    Attributes:
        parts: devices in the ring. One more permute precedes the loop, that of the device's own shard.
        part: elements of one shard.
        source, outer: identify the all-gather that it replaces.
    """

    place: int
    axes: Dim
    parts: int
    part: int
    source: Tiling
    outer: Dim


DotStep = Move | Sum | Halo | Loop


@dataclass
class DotPlan:
    """The partitioned form of one contraction.

    Attributes:
        steps: reshards and sums, in order.
        macs: multiply-adds per device.
        overcounted: whether an all-reduce adds replicas of the same terms, so that XLA's result is wrong.
    """

    steps: list[DotStep] = field(default_factory=list)
    macs: int = 0
    overcounted: bool = False


@dataclass(frozen=True)
class Side:
    """An operand within a device group: its shape and tiling there, and `width` bytes per element."""

    place: int
    shape: Shape
    tiling: Tiling
    width: int


Create = Callable[[Shape, Shape], Shape]
"""Local shapes of both operands -> local shape of the result."""


@dataclass(frozen=True)
class Goal:
    """The result wanted of a contraction within a group of devices.

    Attributes:
        shape, out: its shape and tiling within the group.
        devices, outer: the subaxes within the group, and those that number the groups.
        create: emits the local op.
    """

    shape: Shape
    out: Tiling
    devices: Dim
    outer: Dim
    create: Create


class Contraction:
    """One contraction over the mesh of `subaxes`, and the steps planned so far."""

    def __init__(
        self, dims: Dims, subaxes: Subaxes, hides: Hides | None = None, may_loop: tuple[bool, ...] = (False, False)
    ) -> None:
        """For one contraction over the mesh of `subaxes`.

        Args:
            hides: when the compiler emits windowed einsums; None where it never does.
            may_loop: per operand whether a windowed einsum may permute it: no other op needs it gathered.
        """
        self.dims = dims
        self.hides = hides
        self.may_loop = may_loop
        self.subaxes = subaxes
        self.result = DotPlan()

    def computed(self, macs: int, lhs: Side, rhs: Side) -> int:
        """How many of these multiply-adds XLA's cost analysis counts."""
        return macs

    # ---- leaves ------------------------------------------------------------------------------------------------

    def make(self, lhs: Side, rhs: Side, create: Create) -> Shape:
        """The local shape that `create` returns for both operands' shards."""
        return create(self.subaxes.shard(lhs.shape, lhs.tiling), self.subaxes.shard(rhs.shape, rhs.tiling))

    def leaf(self, left: Shape, right: Shape) -> Shape:
        """The shape of the local contraction's result; counts its multiply-adds."""
        d = self.dims
        out = self.kept(d, left, right, len(d.batch) + len(d.left) + len(d.right))
        self.result.macs += math.prod(min(left[a], right[b]) for a, b in d.contract) * math.prod(out)
        return tuple(out)

    @staticmethod
    def kept(dims: Dims, left: Shape, right: Shape, rank: int) -> list[int]:
        """Extents of a local result's batch and free dims; 1 for other dims."""
        out = [1] * rank
        for a, b, o in dims.batch:
            out[o] = min(left[a], right[b])
        for a, o in dims.left:
            out[o] = left[a]
        for b, o in dims.right:
            out[o] = right[b]
        return out

    def _sum(self, axes: tuple[Dim, ...], made: Shape, kept: tuple[Dim, ...] = (), outer: Dim = ()) -> None:
        self.result.steps.append(Sum(axes, made, kept, outer))

    def _moved(self, side: Side, want: Tiling, outer: Dim) -> Side:
        if want != side.tiling:
            self.result.steps.append(Move(side.place, side.shape, side.tiling, want, outer))
        return Side(side.place, side.shape, want, side.width)

    def _reshard_result(self, goal: Goal, made_as: Tiling, made: Shape | None) -> Shape | None:
        if made is None:
            return None
        if made_as != goal.out:
            self.result.steps.append(Move(2, goal.shape, made_as, goal.out, goal.outer))
        return self.subaxes.shard(goal.shape, goal.out)

    # ---- shardings seen from another side ----------------------------------------------------------------------

    def _asked(self, side: Side, out: Tiling) -> Tiling:
        """An operand's batch and free dims split as the result's."""
        return carried(out, ((o, mine) for mine, o in self._kept_by(side)), len(side.tiling))

    def as_out(self, side: Side, rank: int) -> Tiling:
        """The result's dims split as the operand's."""
        return carried(side.tiling, self._kept_by(side), rank)

    def _kept_by(self, side: Side) -> list[tuple[int, int]]:
        """(dim, dim of the result) of an operand's batch and free dims."""
        free = self.dims.left if side.place == 0 else self.dims.right
        return [*((b[side.place], b[2]) for b in self.dims.batch), *free]

    def _as_other(self, side: Side, other: Side) -> Tiling:
        """`other` split as `side` is along the dims that they share."""
        pairs = (*(b[:2] for b in self.dims.batch), *self.dims.contract)
        shared = ((pair[side.place], pair[other.place]) for pair in pairs)
        return carried(side.tiling, shared, len(other.tiling))

    # ---- device groups -----------------------------------------------------------------------------------------

    def ways(self, tiling: Tiling, dims: Iterable[int]) -> int:
        """Number of tiles along these dims together."""
        return math.prod(self.subaxes.ways(tiling[dim]) for dim in dims)

    def _partial(self, tiling: Tiling, devices: Dim) -> bool:
        return 1 < self.subaxes.tiles(tiling) < self.subaxes.ways(devices)

    def _shard_bytes(self, side: Side) -> int:
        return math.prod(self.subaxes.shard(side.shape, side.tiling)) * side.width

    def _inside(self, goal: Goal, group: Dim, shape: Shape, out: Tiling) -> Goal:
        """The goal within smaller groups, where the result has `shape` and tiling `out`."""
        return Goal(shape, out, without(goal.devices, group), goal.outer + group, goal.create)

    def _within(self, side: Side, group: Dim) -> Side:
        inside = set(group)
        shape = tuple(
            -(-size // self.subaxes.ways(tuple(axis for axis in axes if axis in inside)))
            for size, axes in zip(side.shape, side.tiling, strict=True)
        )
        return Side(side.place, shape, dropped(side.tiling, group), side.width)

    def _cut(self, shape: Shape, tiling: Tiling, dims: Iterable[int]) -> Shape:
        cut = set(dims)
        return tuple(
            -(-size // self.subaxes.ways(tiling[dim])) if dim in cut else size for dim, size in enumerate(shape)
        )

    def _matching_dims(self, tiling: Tiling, group: Dim, devices: Dim) -> Dim | None:
        """Dims that the group's axes split, those left of which replicate (`FindMatchingPartitionedDimsForGrouping`).

        That counts the devices that hold copies as one more dim.
        """
        inside = set(group)
        dims = tuple(dim for dim, axes in enumerate(tiling) if axes and set(axes) <= inside)
        covered = {axis for dim in dims for axis in tiling[dim]}
        return dims if covered.union(without(devices, flat(tiling))) == inside else None

    def _aligned(self, tiling: Tiling, dims: Dim, like: Tiling, like_dims: Dim, devices: Dim) -> Tiling:
        """`tiling` with `dims` split as `like` splits `like_dims` (`AlignGroupsWith`): devices are permuted."""
        group = tuple(axis for dim in like_dims for axis in like[dim])
        result = list(self._renamed_rest(tiling, dims, group, devices))
        for dim, like_dim in zip(dims, like_dims, strict=True):
            result[dim] = like[like_dim]
        return tuple(result)

    def _renamed_rest(self, tiling: Tiling, dims: Dim, group: Dim, devices: Dim) -> Tiling:
        rest = tuple(() if dim in dims else axes for dim, axes in enumerate(tiling))
        freed = tuple(axis for dim in dims for axis in tiling[dim])
        return self._renamed(rest, group, (*freed, *without(devices, (*group, *freed))))

    def _with_group(self, out: Tiling, dims: Dim, group: Dim, devices: Dim) -> Tiling:
        """`out` with `dims` split by the group's axes instead of their own."""
        sizes = [self.subaxes.ways(out[dim]) for dim in dims]
        result = list(self._renamed_rest(out, dims, group, devices))
        left = list(group)
        for dim, size in zip(dims, sizes, strict=True):
            taken: list[int] = []
            while size > 1 and left:
                taken.append(left.pop(0))
                size //= self.subaxes.sizes[taken[-1]]
            result[dim] = tuple(taken)
        return tuple(result)

    def _renamed(self, tiling: Tiling, taken: Dim, spare: Dim) -> Tiling:
        """`tiling` without the axes in `taken`: a spare axis of equal size replaces each, or it is dropped."""
        used = set(flat(tiling))
        clash = [axis for axis in taken if axis in used]
        if not clash:
            return tiling
        free = [axis for axis in spare if axis not in used and axis not in taken]
        swap: dict[int, int | None] = {}
        for axis in clash:
            match = next((other for other in free if self.subaxes.sizes[other] == self.subaxes.sizes[axis]), None)
            if match is not None:
                free.remove(match)
            swap[axis] = match
        return tuple(
            tuple(axis for axis in (swap.get(old, old) for old in axes) if axis is not None) for axes in tiling
        )

    def _is_cheap(self, source: Tiling, target: Tiling) -> bool:
        """Whether a reshard is a collective permute or an all-to-all."""
        ways = self.subaxes.ways
        if all(ways(a) == ways(b) for a, b in zip(source, target, strict=True)):
            return True
        return any(source) and self.subaxes.tiles(source) == self.subaxes.tiles(target)


def flat(tiling: Tiling) -> Dim:
    """All axes of a tiling."""
    return tuple(axis for dim in tiling for axis in dim)


def without(axes: Dim, gone: Dim) -> Dim:
    """`axes` except those in `gone`."""
    return tuple(axis for axis in axes if axis not in gone)


def dropped(tiling: Tiling, group: Dim) -> Tiling:
    """`tiling` within one of the groups that these axes number."""
    inside = set(group)
    return tuple(tuple(axis for axis in axes if axis not in inside) for axes in tiling)


def nothing(side: Side) -> Tiling:
    """The tiling that splits no dim of an operand."""
    return ((),) * len(side.tiling)
