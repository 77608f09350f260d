"""GSPMD's handler of contractions.

This follows `PartitionDot` of XLA (xla/service/spmd/dot_handler.cc; GSPMD paper, arXiv:2105.04663, section 4.2): it
groups the devices by dims that operands and result split alike (batch dims, then free dims of one operand, then
contracted dims) and recurses within each group, until all devices of the group split a dim or none does. Of
`[tokens, features/m] x [features/m, hidden]` each device sums over its features, and an all-reduce over m adds the
partial sums. The first attempt reshards no operand, the second may.

On TPU an all-gather or reduce-scatter around a long enough contraction becomes a *windowed einsum*: a loop of
collective permutes that overlap its pieces (`looped.py`). XLA's GPU defaults ask for hundreds of megabytes.
"""

from __future__ import annotations

import math
from dataclasses import replace

from autoshard.cost.partitioner.ops.dot_plan import (
    Contraction,
    Dim,
    DotPlan,
    Goal,
    Shape,
    Side,
    dropped,
    flat,
    nothing,
    without,
)
from autoshard.cost.partitioner.ops.looped import looped
from autoshard.cost.partitioner.tiling import Tiling


class DotPartitioner(Contraction):
    """Plans one contraction; `plan` is the entry."""

    def plan(
        self, lhs: tuple[Shape, Tiling, int], rhs: tuple[Shape, Tiling, int], out: tuple[Shape, Tiling]
    ) -> DotPlan:
        """The steps for operands (global shape, tiling, bytes per element) and a result (global shape, tiling)."""
        everything = tuple(range(len(self.subaxes.sizes)))
        made = self._dot(Side(0, *lhs), Side(1, *rhs), Goal(*out, everything, (), self.leaf))
        if made is None:
            raise AssertionError("PartitionDot always finds a way")
        return self.result

    def whole_macs(self, lhs: Shape, rhs: Shape, out: Shape) -> int:
        """Multiply-adds of the global contraction, counted as in `DotPlan`."""
        return math.prod(out) * math.prod(lhs[dim] for dim, _ in self.dims.contract)

    # ---- recursion ---------------------------------------------------------------------------------------------

    def _dot(self, lhs: Side, rhs: Side, goal: Goal) -> Shape | None:
        for strict in (True, False):
            steps, macs = len(self.result.steps), self.result.macs
            found = self._try(lhs, rhs, goal, strict)
            if found is not None:
                return found
            del self.result.steps[steps:]
            self.result.macs = macs
        return self._default(lhs, rhs, goal)

    def _default(self, lhs: Side, rhs: Side, goal: Goal) -> Shape | None:
        return self._as_asked(lhs, rhs, goal)

    def _as_asked(self, lhs: Side, rhs: Side, goal: Goal) -> Shape:
        """Reshard both operands to the shardings that match the result."""
        lhs = self._moved(lhs, self._asked(lhs, goal.out), goal.outer)
        rhs = self._moved(rhs, self._asked(rhs, goal.out), goal.outer)
        return self.make(lhs, rhs, goal.create)

    def _try(self, lhs: Side, rhs: Side, goal: Goal, strict: bool) -> Shape | None:
        found = self._base(lhs, rhs, goal, move=False)
        if found is None:
            found = self._group_batch(lhs, rhs, goal, strict)
        if found is None:
            found = self._group_free(lhs, rhs, goal, strict)
        if found is None:
            found = self._group_contract(lhs, rhs, goal, strict)
        if found is None and not any(lhs.tiling) and not any(rhs.tiling) and self._partial(goal.out, goal.devices):
            used = flat(goal.out)
            inner = Goal(goal.shape, goal.out, used, goal.outer + without(goal.devices, used), goal.create)
            found = self._dot(lhs, rhs, inner)
        if found is None:
            found = self._base(lhs, rhs, goal, move=True)
        return found

    def _base(self, lhs: Side, rhs: Side, goal: Goal, move: bool) -> Shape | None:
        """`PartitionBaseCase`: every sharding uses all devices of the group, or none."""
        if any(self._partial(tiling, goal.devices) for tiling in (lhs.tiling, rhs.tiling, goal.out)):
            return None
        d = self.dims
        count = self.subaxes.ways(goal.devices)
        ways = self.ways
        lhs_batch, rhs_batch = ways(lhs.tiling, (b[0] for b in d.batch)), ways(rhs.tiling, (b[1] for b in d.batch))
        out_batch = ways(goal.out, (b[2] for b in d.batch))
        lhs_k, rhs_k = ways(lhs.tiling, (k[0] for k in d.contract)), ways(rhs.tiling, (k[1] for k in d.contract))
        lhs_free, rhs_free = ways(lhs.tiling, (m[0] for m in d.left)), ways(rhs.tiling, (n[0] for n in d.right))
        out_left, out_right = ways(goal.out, (m[1] for m in d.left)), ways(goal.out, (n[1] for n in d.right))
        if lhs_batch == rhs_batch == count and self._as_other(lhs, rhs) == rhs.tiling:
            made = self.make(lhs, rhs, goal.create)
            return self._reshard_result(goal, self.as_out(lhs, len(goal.out)), made)
        for may_reduce in (False, True):
            for side, other, batch in ((lhs, rhs, lhs_batch), (rhs, lhs, rhs_batch)):
                if not (batch == out_batch == count and self.as_out(side, len(goal.out)) == goal.out):
                    continue
                want = self._as_other(side, other)
                if may_reduce or self._is_cheap(other.tiling, want):
                    other = self._moved(other, want, goal.outer)
                    return self.make(*((side, other) if side is lhs else (other, side)), goal.create)
        loop = looped(self, lhs, rhs, goal) if goal.create == self.leaf else None
        if loop is not None:
            return loop
        if lhs_k == rhs_k == count and not any(goal.out):
            if math.prod(lhs.shape) * lhs.width < math.prod(rhs.shape) * rhs.width:
                lhs = self._moved(lhs, self._as_other(rhs, lhs), goal.outer)
            else:
                rhs = self._moved(rhs, self._as_other(lhs, rhs), goal.outer)
            made = self.make(lhs, rhs, goal.create)
            axes = tuple(lhs.tiling[k[0]] for k in reversed(d.contract) if lhs.tiling[k[0]])
            self._sum(axes, made, goal.out, goal.outer)
            return self.subaxes.shard(goal.shape, goal.out)
        if lhs_free == out_left == count and self.as_out(lhs, len(goal.out)) == goal.out:
            return self.make(lhs, self._moved(rhs, nothing(rhs), goal.outer), goal.create)
        if rhs_free == out_right == count and self.as_out(rhs, len(goal.out)) == goal.out:
            return self.make(self._moved(lhs, nothing(lhs), goal.outer), rhs, goal.create)
        if move and count in (out_batch, out_left, out_right):
            return self._as_asked(lhs, rhs, goal)
        if any(goal.out):
            return None
        out_size = math.prod(goal.shape)
        if rhs_k == count and not any(lhs.tiling) and math.prod(rhs.shape) > out_size:
            lhs = self._moved(lhs, self._as_other(rhs, lhs), goal.outer)
        elif lhs_k == count and not any(rhs.tiling) and math.prod(lhs.shape) > out_size:
            rhs = self._moved(rhs, self._as_other(lhs, rhs), goal.outer)
        else:
            return None
        made = self.make(lhs, rhs, goal.create)
        self._sum(tuple(lhs.tiling[k[0]] for k in reversed(d.contract) if lhs.tiling[k[0]]), made)
        return made

    def _group_batch(self, lhs: Side, rhs: Side, goal: Goal, strict: bool) -> Shape | None:
        d = self.dims
        lhs_dims, rhs_dims = tuple(b[0] for b in d.batch), tuple(b[1] for b in d.batch)
        out_dims = tuple(b[2] for b in d.batch)
        out_batch = self.ways(goal.out, out_dims)
        if out_batch == 1 or out_batch not in (self.ways(lhs.tiling, lhs_dims), self.ways(rhs.tiling, rhs_dims)):
            return None
        ways = self.subaxes.ways
        same = all(ways(lhs.tiling[a]) == ways(rhs.tiling[b]) for a, b, _ in d.batch)
        if strict and same:
            same = all(lhs.tiling[a] == rhs.tiling[b] for a, b, _ in d.batch)
        if same:
            if self._shard_bytes(lhs) > self._shard_bytes(rhs):
                rhs = self._moved(
                    rhs, self._aligned(rhs.tiling, rhs_dims, lhs.tiling, lhs_dims, goal.devices), goal.outer
                )
            else:
                lhs = self._moved(
                    lhs, self._aligned(lhs.tiling, lhs_dims, rhs.tiling, rhs_dims, goal.devices), goal.outer
                )
            made_as = self._aligned(goal.out, out_dims, lhs.tiling, lhs_dims, goal.devices)
        else:
            moved = []
            for side, dims, other in ((lhs, lhs_dims, rhs), (rhs, rhs_dims, lhs)):
                want = self._to_output_batch(side, dims, goal.out, out_dims, other, goal.devices)
                if want is None or (strict and any(side.tiling) and want != side.tiling):
                    return None
                moved.append(self._moved(side, want, goal.outer))
            lhs, rhs = moved
            made_as = goal.out
        group = tuple(axis for dim in lhs_dims for axis in lhs.tiling[dim])
        inner = self._inside(goal, group, self._cut(goal.shape, made_as, out_dims), dropped(made_as, group))
        made = self._dot(self._within(lhs, group), self._within(rhs, group), inner)
        return self._reshard_result(goal, made_as, made)

    def _to_output_batch(
        self, side: Side, dims: Dim, out: Tiling, out_dims: Dim, other: Side, devices: Dim
    ) -> Tiling | None:
        """The operand with the result's batch sharding; other dims are gathered where no devices are left for them."""
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
        idle = ways(without(devices, flat(side.tiling)))
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
        freed = self._renamed(rest, batch_axes, without(devices, batch_axes))
        return tuple(wanted[dim] if dim in dims else freed[dim] for dim in range(len(wanted)))

    def _group_free(self, lhs: Side, rhs: Side, goal: Goal, strict: bool) -> Shape | None:
        """Group by free dims that one operand and the result split alike; each group replicates the other operand."""
        d = self.dims
        ways = self.subaxes.ways
        lhs_ways, out_left = self.ways(lhs.tiling, (m[0] for m in d.left)), self.ways(goal.out, (m[1] for m in d.left))
        rhs_ways, out_right = (
            self.ways(rhs.tiling, (n[0] for n in d.right)),
            self.ways(goal.out, (n[1] for n in d.right)),
        )
        may_left, may_right = lhs_ways == out_left > 1, rhs_ways == out_right > 1
        if may_left or may_right:
            left = may_left and (not may_right or lhs_ways * self._shard_bytes(rhs) < rhs_ways * self._shard_bytes(lhs))
            pairs = list(d.left if left else d.right)
        elif lhs_ways > 1 and out_left > 1:
            left = True
            pairs = [m for m in d.left if lhs.tiling[m[0]] and ways(lhs.tiling[m[0]]) == ways(goal.out[m[1]])]
        elif rhs_ways > 1 and out_right > 1:
            left = False
            pairs = [n for n in d.right if rhs.tiling[n[0]] and ways(rhs.tiling[n[0]]) == ways(goal.out[n[1]])]
        else:
            return None
        if not pairs:
            return None
        side, other = (lhs, rhs) if left else (rhs, lhs)
        dims, out_dims = tuple(p[0] for p in pairs), tuple(p[1] for p in pairs)
        want = self._aligned(side.tiling, dims, goal.out, out_dims, goal.devices)
        if strict and want != side.tiling:
            return None
        group = tuple(axis for dim in out_dims for axis in goal.out[dim])
        if any(other.tiling):
            free_out = out_right if left else out_left
            target = self._other_within(side, other, goal, group, free_out)
            if target is None:
                asked = self._expected_other(other, goal.out, side, goal.devices)
                moved = self._moved(other, asked, goal.outer) if asked != other.tiling else other
                target = self._other_within(side, moved, goal, group, free_out)
                if target is not None:
                    other = moved
            other = self._moved(other, nothing(other) if target is None else target, goal.outer)
        side = self._moved(side, want, goal.outer)
        lhs, rhs = (self._within(one, group) for one in ((side, other) if left else (other, side)))
        return self._dot(
            lhs, rhs, self._inside(goal, group, self._cut(goal.shape, goal.out, out_dims), dropped(goal.out, group))
        )

    def _other_within(self, side: Side, other: Side, goal: Goal, group: Dim, free_out: int) -> Tiling | None:
        """The other operand off the group's axes, which must replicate it. None if no cheap reshard does that."""
        d = self.dims
        ways = self.subaxes.ways
        count = ways(group)
        if not any(other.tiling):
            return other.tiling
        idle = without(goal.devices, flat(other.tiling))
        if ways(idle) % count == 0 and ways(idle) > 1:
            if not set(group) & set(flat(other.tiling)):
                return other.tiling
            for dim in reversed(range(len(other.tiling))):
                # The dim along the group trades axes with the idle goal.devices.
                if set(other.tiling[dim]) == set(group):
                    swapped = list(other.tiling)
                    swapped[dim] = idle
                    if other.shape[dim] >= ways(idle):
                        return tuple(swapped)
            return self._renamed(other.tiling, group, idle)
        matched = self._matching_dims(other.tiling, group, goal.devices)
        if matched is not None:
            return tuple(() if dim in matched else axes for dim, axes in enumerate(other.tiling))
        mine, left = other.place, side.place == 0
        contract = tuple(k[mine] for k in d.contract)
        free = tuple(n[0] for n in (d.right if left else d.left))
        contract_ways, free_ways = self.ways(other.tiling, contract), self.ways(other.tiling, free)
        side_contract = self.ways(side.tiling, (k[1 - mine] for k in d.contract))
        may_contract = contract_ways == count and free_ways == free_out
        may_free = free_ways == count and side_contract == contract_ways
        out_bytes = math.prod(self.subaxes.shard(goal.shape, goal.out)) * side.width
        if may_contract and (not may_free or self._shard_bytes(other) <= out_bytes):
            dims = contract
        elif may_free:
            dims = free
        else:
            return None
        rest = tuple(() if dim in dims else axes for dim, axes in enumerate(other.tiling))
        return self._renamed(rest, group, without(goal.devices, group))

    def _expected_other(self, other: Side, out: Tiling, side: Side, devices: Dim) -> Tiling:
        """The other operand's sharding that matches both the result and this operand."""
        found = self._asked(other, out)
        offered = self._as_other(side, other)
        merged = self.subaxes.merge(found, offered, 1)
        if merged is not None:
            return merged
        return offered if self.subaxes.tiles(offered) > self.subaxes.tiles(found) else found

    def _group_contract(self, lhs: Side, rhs: Side, goal: Goal, strict: bool) -> Shape | None:
        d = self.dims
        ways = self.subaxes.ways
        lhs_ways = self.ways(lhs.tiling, (k[0] for k in d.contract))
        rhs_ways = self.ways(rhs.tiling, (k[1] for k in d.contract))
        if lhs_ways == rhs_ways > 1:
            found = self._contract_on(d.contract, lhs, rhs, goal, strict)
            if found is not None:
                return found
        if lhs_ways > 1 and rhs_ways > 1:
            pairs = tuple(
                k for k in d.contract if lhs.tiling[k[0]] and ways(lhs.tiling[k[0]]) == ways(rhs.tiling[k[1]])
            )
            if pairs:
                return self._contract_on(pairs, lhs, rhs, goal, strict)
        return None

    def _contract_on(
        self, pairs: tuple[tuple[int, int], ...], lhs: Side, rhs: Side, goal: Goal, strict: bool
    ) -> Shape | None:
        """`PartitionDotGroupOnContractingImpl`: partial sums per group, all-reduced at the end."""
        lhs_dims, rhs_dims = tuple(k[0] for k in pairs), tuple(k[1] for k in pairs)
        if self._shard_bytes(lhs) > self._shard_bytes(rhs):
            want = self._aligned(rhs.tiling, rhs_dims, lhs.tiling, lhs_dims, goal.devices)
            if strict and want != rhs.tiling:
                return None
            rhs = self._moved(rhs, want, goal.outer)
        else:
            want = self._aligned(lhs.tiling, lhs_dims, rhs.tiling, rhs_dims, goal.devices)
            if strict and want != lhs.tiling:
                return None
            lhs = self._moved(lhs, want, goal.outer)
        per_dim = tuple(lhs.tiling[dim] for dim in lhs_dims if lhs.tiling[dim])
        group = tuple(axis for dim in per_dim for axis in dim)
        made_as, inner_out, slices, rest = self._contract_output(lhs, rhs, goal.shape, goal.out, group, goal.devices)
        inner_shape = self._cut(goal.shape, made_as, slices) if slices else goal.shape

        def reduced(left: Shape, right: Shape) -> Shape:
            made = goal.create(left, right)
            if not slices:
                self._sum(tuple(reversed(per_dim)), made)
                return made
            kept = tuple(axes if dim in slices else () for dim, axes in enumerate(made_as))
            self._sum(tuple(made_as[dim] for dim in reversed(slices)), made, kept, goal.outer)
            made = tuple(
                -(-size // self.subaxes.ways(made_as[dim])) if dim in slices else size for dim, size in enumerate(made)
            )
            if rest:
                self._sum((rest,), made)
            return made

        inner = replace(self._inside(goal, group, inner_shape, inner_out), create=reduced)
        made = self._dot(self._within(lhs, group), self._within(rhs, group), inner)
        return self._reshard_result(goal, made_as, made)

    def _contract_output(
        self, lhs: Side, rhs: Side, shape: Shape, out: Tiling, group: Dim, devices: Dim
    ) -> tuple[Tiling, Tiling, Dim, Dim]:
        """(produced tiling, the one within a group, axes reduce-scattered per dim, axes all-reduced after that)."""
        subaxes = self.subaxes
        count = subaxes.ways(group)
        idle = without(devices, flat(out))
        if any(out) and (not idle or subaxes.ways(idle) % count):
            lhs_rest, rhs_rest = dropped(lhs.tiling, group), dropped(rhs.tiling, group)
            side = lhs if any(lhs_rest) and not any(rhs_rest) else rhs if any(rhs_rest) and not any(lhs_rest) else None
            if side is not None:
                carried = self.as_out(side, len(out))
                if any(carried) and subaxes.refines(shape, out, carried):
                    out = carried
                    idle = without(devices, flat(out))
        if any(out) and idle and subaxes.ways(idle) % count == 0:
            made_as = self._renamed(out, group, idle)
            return made_as, made_as, (), ()
        matched = tuple(dim for dim, axes in enumerate(out) if axes and set(axes) <= set(group))
        covered = {axis for dim in matched for axis in out[dim]}
        rest = idle if idle and any(out) and set(idle) <= set(group) else ()
        if matched and covered | set(rest) == set(group):
            return out, dropped(out, group), matched, rest
        for dims in (
            tuple(m[1] for m in self.dims.left),
            tuple(n[1] for n in self.dims.right),
            tuple(b[2] for b in self.dims.batch),
        ):
            if self.ways(out, dims) == count:
                made_as = self._with_group(out, dims, group, devices)
                return made_as, dropped(made_as, group), tuple(dim for dim in dims if made_as[dim]), ()
        nothing: Tiling = ((),) * len(out)
        return nothing, nothing, (), ()
