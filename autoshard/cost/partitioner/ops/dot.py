"""What GSPMD emits for a contraction, given the shardings of its operands and its result.

This follows `PartitionDot` of XLA (xla/service/spmd/dot_handler.cc; GSPMD paper, arXiv:2105.04663, section 4.2): the
devices are grouped by dims that operands and result split alike (batch dims, then dims of one operand, then contracted
dims), and the contraction within a group is partitioned in the same way, until every dim is split by all devices of
the group or by none. First without moving any operand, then with.

On TPU a gather or a reduce-scatter around a contraction that takes long enough becomes a loop of permutes beside parts
of it (*windowed einsum*, `looped.py`); XLA's defaults for GPU keep that for operands of hundreds of megabytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field

from autoshard.cost.partitioner.ops.halo import Moved
from autoshard.cost.partitioner.ops.looped import Hides, Loop, looped
from autoshard.cost.partitioner.tiling import Subaxes, Tiling
from autoshard.graph.contraction import Dims

Shape = tuple[int, ...]
Dim = tuple[int, ...]


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


Step = Move | Sum | Halo | Loop


@dataclass
class DotPlan:
    """What one contraction turns into.

    Attributes:
        steps: reshards and sums, in order.
        macs: multiply-adds per device.
        overcounted: whether a sum runs over devices that hold the same terms, so that its numbers are wrong.
    """

    steps: list[Step] = field(default_factory=list)
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


class DotPartitioner:
    """Plans one contraction; `plan` is the entry."""

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

    def plan(
        self, lhs: tuple[Shape, Tiling, int], rhs: tuple[Shape, Tiling, int], out: tuple[Shape, Tiling]
    ) -> DotPlan:
        """The steps for operands given as (shape, tiling, bytes of an element), and a result (shape, tiling)."""
        everything = tuple(range(len(self.subaxes.sizes)))
        made = self._dot(Side(0, *lhs), Side(1, *rhs), out[0], out[1], everything, (), self.leaf)
        if made is None:
            raise AssertionError("PartitionDot always finds a way")
        return self.result

    def whole_macs(self, lhs: Shape, rhs: Shape, out: Shape) -> int:
        """Multiply-adds of the whole contraction, counted as in `DotPlan`."""
        return math.prod(out) * math.prod(lhs[dim] for dim, _ in self.dims.contract)

    def computed(self, macs: int, lhs: Side, rhs: Side) -> int:
        """Of multiply-adds, those that XLA's costs count."""
        return macs

    # ---- recursion ---------------------------------------------------------------------------------------------

    def _dot(
        self, lhs: Side, rhs: Side, shape: Shape, out: Tiling, devices: Dim, outer: Dim, create: Create
    ) -> Shape | None:
        for strict in (True, False):
            steps, macs = len(self.result.steps), self.result.macs
            found = self._try(lhs, rhs, shape, out, devices, outer, create, strict)
            if found is not None:
                return found
            del self.result.steps[steps:]
            self.result.macs = macs
        return self._default(lhs, rhs, shape, out, devices, outer, create)

    def _default(
        self, lhs: Side, rhs: Side, shape: Shape, out: Tiling, devices: Dim, outer: Dim, create: Create
    ) -> Shape | None:
        """Reshard both operands to what the result asks of them."""
        lhs = self._moved(lhs, self._asked(0, lhs, out), outer)
        rhs = self._moved(rhs, self._asked(1, rhs, out), outer)
        return self.make(lhs, rhs, create)

    def _try(
        self, lhs: Side, rhs: Side, shape: Shape, out: Tiling, devices: Dim, outer: Dim, create: Create, strict: bool
    ) -> Shape | None:
        found = self._base(lhs, rhs, shape, out, devices, outer, create, move=False)
        if found is None:
            found = self._group_batch(lhs, rhs, shape, out, devices, outer, create, strict)
        if found is None:
            found = self._group_free(lhs, rhs, shape, out, devices, outer, create, strict)
        if found is None:
            found = self._group_contract(lhs, rhs, shape, out, devices, outer, create, strict)
        if found is None and not any(lhs.tiling) and not any(rhs.tiling) and self._partial(out, devices):
            used = _flat(out)
            found = self._dot(lhs, rhs, shape, out, used, outer + _without(devices, used), create)
        if found is None:
            found = self._base(lhs, rhs, shape, out, devices, outer, create, move=True)
        return found

    def _base(
        self, lhs: Side, rhs: Side, shape: Shape, out: Tiling, devices: Dim, outer: Dim, create: Create, move: bool
    ) -> Shape | None:
        """`PartitionBaseCase`: every sharding uses all devices of the group, or none."""
        if any(self._partial(tiling, devices) for tiling in (lhs.tiling, rhs.tiling, out)):
            return None
        d = self.dims
        count = self.subaxes.ways(devices)
        ways = self.ways
        lhs_batch, rhs_batch = ways(lhs.tiling, (b[0] for b in d.batch)), ways(rhs.tiling, (b[1] for b in d.batch))
        out_batch = ways(out, (b[2] for b in d.batch))
        lhs_k, rhs_k = ways(lhs.tiling, (k[0] for k in d.contract)), ways(rhs.tiling, (k[1] for k in d.contract))
        lhs_free, rhs_free = ways(lhs.tiling, (m[0] for m in d.left)), ways(rhs.tiling, (n[0] for n in d.right))
        out_left, out_right = ways(out, (m[1] for m in d.left)), ways(out, (n[1] for n in d.right))
        if lhs_batch == rhs_batch == count and self._lhs_as_rhs(lhs, rhs) == rhs.tiling:
            made = self.make(lhs, rhs, create)
            return self._reshard_result(shape, self.operand_as_out(0, lhs, len(out)), out, outer, made)
        for may_reduce in (False, True):
            for side, other, batch in ((lhs, rhs, lhs_batch), (rhs, lhs, rhs_batch)):
                if not (batch == out_batch == count and self.operand_as_out(side.place, side, len(out)) == out):
                    continue
                want = self._lhs_as_rhs(lhs, rhs) if side is lhs else self._rhs_as_lhs(lhs, rhs)
                if may_reduce or self._is_cheap(other.tiling, want):
                    other = self._moved(other, want, outer)
                    return self.make(*((side, other) if side is lhs else (other, side)), create)
        loop = looped(self, lhs, rhs, shape, out, devices, outer) if create == self.leaf else None
        if loop is not None:
            return loop
        if lhs_k == rhs_k == count and not any(out):
            if math.prod(lhs.shape) * lhs.width < math.prod(rhs.shape) * rhs.width:
                lhs = self._moved(lhs, self._rhs_as_lhs(lhs, rhs), outer)
            else:
                rhs = self._moved(rhs, self._lhs_as_rhs(lhs, rhs), outer)
            made = self.make(lhs, rhs, create)
            axes = tuple(lhs.tiling[k[0]] for k in reversed(d.contract) if lhs.tiling[k[0]])
            self._sum(axes, made, out, outer)
            return self._sliced(shape, out)
        if lhs_free == out_left == count and self.operand_as_out(0, lhs, len(out)) == out:
            return self.make(lhs, self._moved(rhs, _nothing(rhs), outer), create)
        if rhs_free == out_right == count and self.operand_as_out(1, rhs, len(out)) == out:
            return self.make(self._moved(lhs, _nothing(lhs), outer), rhs, create)
        if move and count in (out_batch, out_left, out_right):
            lhs = self._moved(lhs, self._asked(0, lhs, out), outer)
            rhs = self._moved(rhs, self._asked(1, rhs, out), outer)
            return self.make(lhs, rhs, create)
        if any(out):
            return None
        out_size = math.prod(shape)
        if rhs_k == count and not any(lhs.tiling) and math.prod(rhs.shape) > out_size:
            lhs = self._moved(lhs, self._rhs_as_lhs(lhs, rhs), outer)
        elif lhs_k == count and not any(rhs.tiling) and math.prod(lhs.shape) > out_size:
            rhs = self._moved(rhs, self._lhs_as_rhs(lhs, rhs), outer)
        else:
            return None
        made = self.make(lhs, rhs, create)
        self._sum(tuple(lhs.tiling[k[0]] for k in reversed(d.contract) if lhs.tiling[k[0]]), made)
        return made

    def _group_batch(
        self, lhs: Side, rhs: Side, shape: Shape, out: Tiling, devices: Dim, outer: Dim, create: Create, strict: bool
    ) -> Shape | None:
        d = self.dims
        lhs_dims, rhs_dims = tuple(b[0] for b in d.batch), tuple(b[1] for b in d.batch)
        out_dims = tuple(b[2] for b in d.batch)
        out_batch = self.ways(out, out_dims)
        if out_batch == 1 or out_batch not in (self.ways(lhs.tiling, lhs_dims), self.ways(rhs.tiling, rhs_dims)):
            return None
        ways = self.subaxes.ways
        same = all(ways(lhs.tiling[a]) == ways(rhs.tiling[b]) for a, b, _ in d.batch)
        if strict and same:
            same = all(lhs.tiling[a] == rhs.tiling[b] for a, b, _ in d.batch)
        if same:
            if self._shard_bytes(lhs) > self._shard_bytes(rhs):
                rhs = self._moved(rhs, self._aligned(rhs.tiling, rhs_dims, lhs.tiling, lhs_dims, devices), outer)
            else:
                lhs = self._moved(lhs, self._aligned(lhs.tiling, lhs_dims, rhs.tiling, rhs_dims, devices), outer)
            made_as = self._aligned(out, out_dims, lhs.tiling, lhs_dims, devices)
        else:
            moved = []
            for side, dims, other in ((lhs, lhs_dims, rhs), (rhs, rhs_dims, lhs)):
                want = self._to_output_batch(side, dims, out, out_dims, other, devices)
                if want is None or (strict and any(side.tiling) and want != side.tiling):
                    return None
                moved.append(self._moved(side, want, outer))
            lhs, rhs = moved
            made_as = out
        group = tuple(axis for dim in lhs_dims for axis in lhs.tiling[dim])
        inner = _without(devices, group)
        made = self._dot(
            self._within(lhs, group),
            self._within(rhs, group),
            self._cut(shape, made_as, out_dims),
            _dropped(made_as, group),
            inner,
            outer + group,
            create,
        )
        return self._reshard_result(shape, made_as, out, outer, made)

    def _to_output_batch(
        self, side: Side, dims: Dim, out: Tiling, out_dims: Dim, other: Side, devices: Dim
    ) -> Tiling | None:
        """The operand with the result's batch sharding; other dims are gathered where devices run out."""
        wanted = list(side.tiling)
        for dim, out_dim in zip(dims, out_dims, strict=True):
            wanted[dim] = out[out_dim]
        if not any(side.tiling):
            return tuple(wanted)
        d = self.dims
        ways = self.subaxes.ways
        mine = 0 if side.place == 0 else 1
        free = tuple(m[0] for m in (d.left if mine == 0 else d.right))
        contract = tuple(k[mine] for k in d.contract)
        idle = ways(_without(devices, _flat(side.tiling)))
        total = math.prod(ways(dim) for dim in wanted) * idle
        have = ways(devices)
        if total > have:
            if total % have:
                return None
            ratio = total // have
            free_ways, contract_ways = self.ways(side.tiling, free), self.ways(side.tiling, contract)
            other_contract = self.ways(other.tiling, (k[1 - mine] for k in d.contract))
            if idle > 1 and idle % ratio == 0:
                pass
            elif ratio == free_ways and (ratio != contract_ways or contract_ways == other_contract):
                for dim in free:
                    wanted[dim] = ()
            elif ratio == contract_ways:
                for dim in contract:
                    wanted[dim] = ()
            else:
                return None
        elif total < have:
            return None
        batch_axes = tuple(axis for dim in dims for axis in wanted[dim])
        rest = tuple(() if dim in dims else axes for dim, axes in enumerate(wanted))
        freed = self._renamed(rest, batch_axes, _without(devices, batch_axes))
        return tuple(wanted[dim] if dim in dims else freed[dim] for dim in range(len(wanted)))

    def _group_free(
        self, lhs: Side, rhs: Side, shape: Shape, out: Tiling, devices: Dim, outer: Dim, create: Create, strict: bool
    ) -> Shape | None:
        """Group by dims that one operand and the result split alike; the other operand is whole in each group."""
        d = self.dims
        ways = self.subaxes.ways
        lhs_ways, out_left = self.ways(lhs.tiling, (m[0] for m in d.left)), self.ways(out, (m[1] for m in d.left))
        rhs_ways, out_right = self.ways(rhs.tiling, (n[0] for n in d.right)), self.ways(out, (n[1] for n in d.right))
        may_left, may_right = lhs_ways == out_left > 1, rhs_ways == out_right > 1
        if may_left or may_right:
            left = may_left and (not may_right or lhs_ways * self._shard_bytes(rhs) < rhs_ways * self._shard_bytes(lhs))
            pairs = list(d.left if left else d.right)
        elif lhs_ways > 1 and out_left > 1:
            left = True
            pairs = [m for m in d.left if lhs.tiling[m[0]] and ways(lhs.tiling[m[0]]) == ways(out[m[1]])]
        elif rhs_ways > 1 and out_right > 1:
            left = False
            pairs = [n for n in d.right if rhs.tiling[n[0]] and ways(rhs.tiling[n[0]]) == ways(out[n[1]])]
        else:
            return None
        if not pairs:
            return None
        side, other = (lhs, rhs) if left else (rhs, lhs)
        dims, out_dims = tuple(p[0] for p in pairs), tuple(p[1] for p in pairs)
        want = self._aligned(side.tiling, dims, out, out_dims, devices)
        if strict and want != side.tiling:
            return None
        group = tuple(axis for dim in out_dims for axis in out[dim])
        if any(other.tiling):
            target = self._other_within(side, other, shape, out, out_right if left else out_left, group, devices, left)
            if target is None:
                asked = self._expected_other(other.place, other, out, side, devices)
                moved = self._moved(other, asked, outer) if asked != other.tiling else other
                target = self._other_within(
                    side, moved, shape, out, out_right if left else out_left, group, devices, left
                )
                if target is not None:
                    other = moved
            other = self._moved(other, _nothing(other) if target is None else target, outer)
        side = self._moved(side, want, outer)
        inner = (self._within(side, group), self._within(other, group))
        return self._dot(
            *(inner if left else inner[::-1]),
            self._cut(shape, out, out_dims),
            _dropped(out, group),
            _without(devices, group),
            outer + group,
            create,
        )

    def _other_within(
        self,
        side: Side,
        other: Side,
        shape: Shape,
        out: Tiling,
        out_other: int,
        group: Dim,
        devices: Dim,
        left: bool,
    ) -> Tiling | None:
        """The other operand without the group's axes: it must be whole along them. None if there is no good way."""
        d = self.dims
        ways = self.subaxes.ways
        count = ways(group)
        if not any(other.tiling):
            return other.tiling
        idle = _without(devices, _flat(other.tiling))
        if ways(idle) % count == 0 and ways(idle) > 1:
            if not set(group) & set(_flat(other.tiling)):
                return other.tiling
            for dim in reversed(range(len(other.tiling))):
                # The dim along the group swaps places with the idle devices.
                if set(other.tiling[dim]) == set(group):
                    swapped = list(other.tiling)
                    swapped[dim] = idle
                    if other.shape[dim] >= ways(idle):
                        return tuple(swapped)
            return self._renamed(other.tiling, group, idle)
        matched = self._matching_dims(other.tiling, group)
        if matched is not None:
            return tuple(() if dim in matched else axes for dim, axes in enumerate(other.tiling))
        mine = 1 if left else 0
        contract = tuple(k[mine] for k in d.contract)
        free = tuple(n[0] for n in (d.right if left else d.left))
        contract_ways, free_ways = self.ways(other.tiling, contract), self.ways(other.tiling, free)
        side_contract = self.ways(side.tiling, (k[1 - mine] for k in d.contract))
        may_contract = contract_ways == count and free_ways == out_other
        may_free = free_ways == count and side_contract == contract_ways
        out_bytes = math.prod(self.subaxes.shard(shape, out)) * side.width
        if may_contract and (not may_free or self._shard_bytes(other) <= out_bytes):
            dims = contract
        elif may_free:
            dims = free
        else:
            return None
        rest = tuple(() if dim in dims else axes for dim, axes in enumerate(other.tiling))
        return self._renamed(rest, group, _without(devices, group))

    def _expected_other(self, place: int, other: Side, out: Tiling, side: Side, devices: Dim) -> Tiling:
        """What the result and the matching operand together ask of the other operand."""
        found = self._asked(place, other, out)
        offered: list[Dim] = [()] * len(other.tiling)
        for pair in (*(b[:2] for b in self.dims.batch), *self.dims.contract):
            offered[pair[place]] = side.tiling[pair[1 - place]]
        merged = self.subaxes.merge(found, tuple(offered), 1)
        if merged is not None:
            return merged
        return tuple(offered) if self.subaxes.tiles(tuple(offered)) > self.subaxes.tiles(found) else found

    def _group_contract(
        self, lhs: Side, rhs: Side, shape: Shape, out: Tiling, devices: Dim, outer: Dim, create: Create, strict: bool
    ) -> Shape | None:
        d = self.dims
        ways = self.subaxes.ways
        lhs_ways = self.ways(lhs.tiling, (k[0] for k in d.contract))
        rhs_ways = self.ways(rhs.tiling, (k[1] for k in d.contract))
        if lhs_ways == rhs_ways > 1:
            found = self._contract_on(d.contract, lhs, rhs, shape, out, devices, outer, create, strict)
            if found is not None:
                return found
        if lhs_ways > 1 and rhs_ways > 1:
            pairs = tuple(
                k for k in d.contract if lhs.tiling[k[0]] and ways(lhs.tiling[k[0]]) == ways(rhs.tiling[k[1]])
            )
            if pairs:
                return self._contract_on(pairs, lhs, rhs, shape, out, devices, outer, create, strict)
        return None

    def _contract_on(
        self,
        pairs: tuple[tuple[int, int], ...],
        lhs: Side,
        rhs: Side,
        shape: Shape,
        out: Tiling,
        devices: Dim,
        outer: Dim,
        create: Create,
        strict: bool,
    ) -> Shape | None:
        """`PartitionDotGroupOnContractingImpl`: partial results per group, summed at the end."""
        lhs_dims, rhs_dims = tuple(k[0] for k in pairs), tuple(k[1] for k in pairs)
        if self._shard_bytes(lhs) > self._shard_bytes(rhs):
            want = self._aligned(rhs.tiling, rhs_dims, lhs.tiling, lhs_dims, devices)
            if strict and want != rhs.tiling:
                return None
            rhs = self._moved(rhs, want, outer)
        else:
            want = self._aligned(lhs.tiling, lhs_dims, rhs.tiling, rhs_dims, devices)
            if strict and want != lhs.tiling:
                return None
            lhs = self._moved(lhs, want, outer)
        per_dim = tuple(lhs.tiling[dim] for dim in lhs_dims if lhs.tiling[dim])
        group = tuple(axis for dim in per_dim for axis in dim)
        made_as, inner_out, slices, rest = self._contract_output(lhs, rhs, shape, out, group, devices)
        inner_shape = self._cut(shape, made_as, slices) if slices else shape

        def reduced(left: Shape, right: Shape) -> Shape:
            made = create(left, right)
            if not slices:
                self._sum(tuple(reversed(per_dim)), made)
                return made
            kept = tuple(axes if dim in slices else () for dim, axes in enumerate(made_as))
            self._sum(tuple(made_as[dim] for dim in reversed(slices)), made, kept, outer)
            made = tuple(
                -(-size // self.subaxes.ways(made_as[dim])) if dim in slices else size for dim, size in enumerate(made)
            )
            if rest:
                self._sum((rest,), made)
            return made

        made = self._dot(
            self._within(lhs, group),
            self._within(rhs, group),
            inner_shape,
            inner_out,
            _without(devices, group),
            outer + group,
            reduced,
        )
        return self._reshard_result(shape, made_as, out, outer, made)

    def _contract_output(
        self, lhs: Side, rhs: Side, shape: Shape, out: Tiling, group: Dim, devices: Dim
    ) -> tuple[Tiling, Tiling, Dim, Dim]:
        """(the sharding the result is made under, the one within a group, dims scattered, axes summed after that)."""
        subaxes = self.subaxes
        count = subaxes.ways(group)
        idle = _without(devices, _flat(out))
        if any(out) and (not idle or subaxes.ways(idle) % count):
            lhs_rest, rhs_rest = _dropped(lhs.tiling, group), _dropped(rhs.tiling, group)
            side = lhs if any(lhs_rest) and not any(rhs_rest) else rhs if any(rhs_rest) and not any(lhs_rest) else None
            if side is not None:
                carried = self.operand_as_out(side.place, side, len(out))
                if any(carried) and subaxes.refines(shape, out, carried):
                    out = carried
                    idle = _without(devices, _flat(out))
        if any(out) and idle and subaxes.ways(idle) % count == 0:
            made_as = self._renamed(out, group, idle)
            return made_as, made_as, (), ()
        matched = tuple(dim for dim, axes in enumerate(out) if axes and set(axes) <= set(group))
        covered = {axis for dim in matched for axis in out[dim]}
        rest = idle if idle and any(out) and set(idle) <= set(group) else ()
        if matched and covered | set(rest) == set(group):
            return out, _dropped(out, group), matched, rest
        for dims in (
            tuple(m[1] for m in self.dims.left),
            tuple(n[1] for n in self.dims.right),
            tuple(b[2] for b in self.dims.batch),
        ):
            if self.ways(out, dims) == count:
                made_as = self._with_group(out, dims, group, devices)
                return made_as, _dropped(made_as, group), tuple(dim for dim in dims if made_as[dim]), ()
        nothing: Tiling = ((),) * len(out)
        return nothing, nothing, (), ()

    # ---- leaves ------------------------------------------------------------------------------------------------

    def make(self, lhs: Side, rhs: Side, create: Create) -> Shape:
        """The shape that `create` makes of the parts of one device."""
        return create(self.subaxes.shard(lhs.shape, lhs.tiling), self.subaxes.shard(rhs.shape, rhs.tiling))

    def leaf(self, left: Shape, right: Shape) -> Shape:
        """The local contraction; returns its result's shape."""
        d = self.dims
        out = [0] * (len(d.batch) + len(d.left) + len(d.right))
        macs = 1
        for a, b, o in d.batch:
            out[o] = min(left[a], right[b])
        for a, o in d.left:
            out[o] = left[a]
        for b, o in d.right:
            out[o] = right[b]
        for a, b in d.contract:
            macs *= min(left[a], right[b])
        self.result.macs += macs * math.prod(out)
        return tuple(out)

    def _sum(self, axes: tuple[Dim, ...], made: Shape, kept: tuple[Dim, ...] = (), outer: Dim = ()) -> None:
        self.result.steps.append(Sum(axes, made, kept, outer))

    def _moved(self, side: Side, want: Tiling, outer: Dim) -> Side:
        if want != side.tiling:
            self.result.steps.append(Move(side.place, side.shape, side.tiling, want, outer))
        return Side(side.place, side.shape, want, side.width)

    def _reshard_result(
        self, shape: Shape, made_as: Tiling, out: Tiling, outer: Dim, made: Shape | None
    ) -> Shape | None:
        if made is None:
            return None
        if made_as != out:
            self.result.steps.append(Move(2, shape, made_as, out, outer))
        return self._sliced(shape, out)

    def _sliced(self, shape: Shape, out: Tiling) -> Shape:
        return self.subaxes.shard(shape, out)

    # ---- shardings seen from another side ----------------------------------------------------------------------

    def _asked(self, place: int, side: Side, out: Tiling) -> Tiling:
        """An operand's batch and free dims as the result has them."""
        asked: list[Dim] = [()] * len(side.tiling)
        for b in self.dims.batch:
            asked[b[place]] = out[b[2]]
        for mine, o in self.dims.left if place == 0 else self.dims.right:
            asked[mine] = out[o]
        return tuple(asked)

    def operand_as_out(self, place: int, side: Side, rank: int) -> Tiling:
        """The result split as an operand is."""
        found: list[Dim] = [()] * rank
        for b in self.dims.batch:
            found[b[2]] = side.tiling[b[place]]
        for mine, o in self.dims.left if place == 0 else self.dims.right:
            found[o] = side.tiling[mine]
        return tuple(found)

    def _lhs_as_rhs(self, lhs: Side, rhs: Side) -> Tiling:
        found: list[Dim] = [()] * len(rhs.tiling)
        for pair in (*(b[:2] for b in self.dims.batch), *self.dims.contract):
            found[pair[1]] = lhs.tiling[pair[0]]
        return tuple(found)

    def _rhs_as_lhs(self, lhs: Side, rhs: Side) -> Tiling:
        found: list[Dim] = [()] * len(lhs.tiling)
        for pair in (*(b[:2] for b in self.dims.batch), *self.dims.contract):
            found[pair[0]] = rhs.tiling[pair[1]]
        return tuple(found)

    # ---- device groups -----------------------------------------------------------------------------------------

    def ways(self, tiling: Tiling, dims: Iterable[int]) -> int:
        """Parts into which some dims are cut together."""
        return math.prod(self.subaxes.ways(tiling[dim]) for dim in dims)

    def _partial(self, tiling: Tiling, devices: Dim) -> bool:
        return 1 < self.subaxes.tiles(tiling) < self.subaxes.ways(devices)

    def _shard_bytes(self, side: Side) -> int:
        return math.prod(self.subaxes.shard(side.shape, side.tiling)) * side.width

    def _within(self, side: Side, group: Dim) -> Side:
        inside = set(group)
        shape = tuple(
            -(-size // self.subaxes.ways(tuple(axis for axis in axes if axis in inside)))
            for size, axes in zip(side.shape, side.tiling, strict=True)
        )
        return Side(side.place, shape, _dropped(side.tiling, group), side.width)

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
        return self._renamed(rest, group, (*freed, *_without(devices, (*group, *freed))))

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
        used = set(_flat(tiling))
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


def _flat(tiling: Tiling) -> Dim:
    return tuple(axis for dim in tiling for axis in dim)


def _without(axes: Dim, gone: Dim) -> Dim:
    return tuple(axis for axis in axes if axis not in gone)


def _dropped(tiling: Tiling, group: Dim) -> Tiling:
    inside = set(group)
    return tuple(tuple(axis for axis in axes if axis not in inside) for axes in tiling)


def _nothing(side: Side) -> Tiling:
    return ((),) * len(side.tiling)
