"""What plans of contractions are made of: their steps, and how operands and result look within a group of devices."""

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
"""(multiply-adds of one device, elements communicated, axes) -> whether a loop of permutes is hidden beside them."""


@dataclass(frozen=True)
class Move:
    """A reshard: of operand `place` (0 or 1), or of the result (2), whose shape is `shape` within the group `outer`."""

    place: int
    shape: Shape
    source: Tiling
    target: Tiling
    outer: Dim = ()


@dataclass(frozen=True)
class Sum:
    """An all-reduce over `axes`, within each group `outer`.

    `axes` has one entry per all-reduce that XLA writes, in its order: it reduces along one dim at a time. `kept`: per
    dim of the result, the axes along which each device then goes on with a slice. `made`: the shape that is summed.
    """

    axes: tuple[Dim, ...]
    made: Shape
    kept: tuple[Dim, ...] = ()
    outer: Dim = ()


@dataclass(frozen=True)
class Halo:
    """A halo exchange of operand `place`, split by `tiling`.

    Attributes:
        moved: its permutes.
        key: names the exchange: the same one of one value is made once.
    """

    place: int
    tiling: Tiling
    moved: tuple[Moved, ...]
    key: Hashable


@dataclass(frozen=True)
class Loop:
    """A windowed einsum over `axes`: permutes of operand `place` or of the result (2).

    Attributes:
        parts: devices in the ring. There is one permute more, that of the device's own part, before the loop.
        part: elements of one part.
        source, outer: name the gather that they replace.
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
    """What one contraction turns into.

    Attributes:
        steps: reshards and sums, in order.
        macs: multiply-adds per device.
        overcounted: whether a sum runs over devices that hold the same terms, so that its numbers are wrong.
    """

    steps: list[DotStep] = field(default_factory=list)
    macs: int = 0
    overcounted: bool = False


@dataclass(frozen=True)
class Side:
    """An operand within a group: its shape there, how it is split there, bytes of an element."""

    place: int
    shape: Shape
    tiling: Tiling
    width: int


Create = Callable[[Shape, Shape], Shape]
"""Shapes of both operands' parts -> that of what one device makes of them."""


@dataclass(frozen=True)
class Goal:
    """What a contraction within a group of devices is to make.

    Attributes:
        shape, out: of its result there, and how that is to be split.
        devices, outer: the subaxes within the group, and those that tell the groups apart.
        create: what is done on one device.
    """

    shape: Shape
    out: Tiling
    devices: Dim
    outer: Dim
    create: Create


class Contraction:
    """One contraction over the mesh of `subaxes`, and the steps found for it so far."""

    def __init__(
        self, dims: Dims, subaxes: Subaxes, hides: Hides | None = None, alone: tuple[bool, ...] = (False, False)
    ) -> None:
        """For one contraction over the mesh of `subaxes`.

        Args:
            hides: when the compiler writes windowed einsums; None where it writes none.
            alone: whether each operand is gathered for nothing else.
        """
        self.dims = dims
        self.hides = hides
        self.alone = alone
        self.subaxes = subaxes
        self.result = DotPlan()

    def computed(self, macs: int, lhs: Side, rhs: Side) -> int:
        """Of multiply-adds, those that XLA's costs count."""
        return macs

    # ---- leaves ------------------------------------------------------------------------------------------------

    def make(self, lhs: Side, rhs: Side, create: Create) -> Shape:
        """The shape that `create` makes of the parts of one device."""
        return create(self.subaxes.shard(lhs.shape, lhs.tiling), self.subaxes.shard(rhs.shape, rhs.tiling))

    def leaf(self, left: Shape, right: Shape) -> Shape:
        """The local contraction; returns its result's shape."""
        d = self.dims
        out = self.kept(d, left, right, len(d.batch) + len(d.left) + len(d.right))
        self.result.macs += math.prod(min(left[a], right[b]) for a, b in d.contract) * math.prod(out)
        return tuple(out)

    @staticmethod
    def kept(dims: Dims, left: Shape, right: Shape, rank: int) -> list[int]:
        """Extents of a local result's batch and free dims; of others 1."""
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
        """An operand's batch and free dims as the result has them."""
        return carried(out, ((o, mine) for mine, o in self._kept_by(side)), len(side.tiling))

    def as_out(self, side: Side, rank: int) -> Tiling:
        """The result split as an operand is."""
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
        """Parts into which some dims are cut together."""
        return math.prod(self.subaxes.ways(tiling[dim]) for dim in dims)

    def _partial(self, tiling: Tiling, devices: Dim) -> bool:
        return 1 < self.subaxes.tiles(tiling) < self.subaxes.ways(devices)

    def _shard_bytes(self, side: Side) -> int:
        return math.prod(self.subaxes.shard(side.shape, side.tiling)) * side.width

    def _inside(self, goal: Goal, group: Dim, shape: Shape, out: Tiling) -> Goal:
        """The same within smaller groups, where the result is of `shape` and split by `out`."""
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

    def _matching_dims(self, tiling: Tiling, group: Dim) -> Dim | None:
        """Dims that the group's axes split, exactly (`FindMatchingPartitionedDimsForGrouping`)."""
        inside = set(group)
        dims = tuple(dim for dim, axes in enumerate(tiling) if axes and set(axes) <= inside)
        return dims if {axis for dim in dims for axis in tiling[dim]} == inside else None

    def _aligned(self, tiling: Tiling, dims: Dim, like: Tiling, like_dims: Dim, devices: Dim) -> Tiling:
        """`tiling` with `dims` split as `like` splits `like_dims` (`AlignGroupsWith`): a renaming of devices."""
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
        """`tiling` off the axes in `taken`: each gives way to a spare axis of its size, or is dropped."""
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
        """Whether a reshard is a permute or an all-to-all."""
        ways = self.subaxes.ways
        if all(ways(a) == ways(b) for a, b in zip(source, target, strict=True)):
            return True
        return any(source) and self.subaxes.tiles(source) == self.subaxes.tiles(target)


def flat(tiling: Tiling) -> Dim:
    """All axes of a tiling."""
    return tuple(axis for dim in tiling for axis in dim)


def without(axes: Dim, gone: Dim) -> Dim:
    """`axes` that are not in `gone`."""
    return tuple(axis for axis in axes if axis not in gone)


def dropped(tiling: Tiling, group: Dim) -> Tiling:
    """`tiling` within a group that these axes number."""
    inside = set(group)
    return tuple(tuple(axis for axis in axes if axis not in inside) for axes in tiling)


def nothing(side: Side) -> Tiling:
    """The tiling that splits no dim of an operand."""
    return ((),) * len(side.tiling)
