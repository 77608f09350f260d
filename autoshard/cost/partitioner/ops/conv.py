"""GSPMD's handler of convolutions.

A convolution is partitioned as a contraction (`dot.py`), with batch and features as free and contracted dims. Here is
the rest, after `PartitionConv` and `convolution_handler.cc` of XLA (xla/service/spmd/): split spatial dims with halo
exchanges, and feature or batch groups. Each is tried before the contraction, within every group of devices.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from typing import Any

from autoshard.cost.machine.compute import taps_on_input
from autoshard.cost.partitioner.ops.dot import DotPartitioner
from autoshard.cost.partitioner.ops.dot_plan import Create, Dim, Goal, Halo, Hides, Shape, Side
from autoshard.cost.partitioner.ops.halo import Exchange, Moved, Window, exchange, exchange_all, halos
from autoshard.cost.partitioner.tiling import Subaxes, Tiling, carried
from autoshard.graph.contraction import Dims

LocalResult = tuple[Shape | None]
"""A result's local shape in a tuple of one; (None,) where every device computes the whole result."""


class ConvolutionPartitioner(DotPartitioner):
    """Plans one convolution."""

    def __init__(
        self,
        dims: Dims,
        subaxes: Subaxes,
        attrs: Mapping[str, Any],
        out: Shape,
        hides: Hides | None = None,
        may_loop: tuple[bool, ...] = (False, False),
    ) -> None:
        """For a convolution with these attributes (see `stablehlo/attributes.py`) and the global result shape `out`."""
        super().__init__(dims, subaxes, hides, may_loop)
        self.whole = dims
        self.attrs = attrs
        self.out = out
        self.sliding = {o: out[o] for _, _, o, _ in dims.spatial}
        self.groups = max(attrs["feature_groups"], attrs["batch_groups"])

    def whole_macs(self, lhs: Shape, rhs: Shape, out: Shape) -> int:
        """Multiply-adds of the global convolution, each tap counted at each position."""
        contracted = math.prod(rhs[b] for _, b in self.dims.contract)
        return math.prod(out) * contracted * math.prod(rhs[b] for _, b, _, _ in self.dims.spatial)

    def _try(self, lhs: Side, rhs: Side, goal: Goal, strict: bool) -> Shape | None:
        found = self._convolve(lhs, rhs, goal, strict)
        if found is not None:
            return found[0]
        return super()._try(lhs, rhs, goal, strict)

    def _default(self, lhs: Side, rhs: Side, goal: Goal) -> Shape | None:
        """Every device computes everything and keeps its slice: seen where a kernel slides over the input, unless
        the dims of one side split the result over all devices.
        """
        d, count = self.dims, self.subaxes.ways(goal.devices)
        free = ((b[2] for b in d.batch), (m[1] for m in d.left), (n[1] for n in d.right))
        whole = any(self.ways(goal.out, dims) == count for dims in free)
        if self.groups == 1 and (whole or not d.spatial):
            return super()._default(lhs, rhs, goal)
        lhs, rhs = (self._moved(side, _whole(side.tiling), goal.outer) for side in (lhs, rhs))
        return self._reshard_result(goal, _whole(goal.out), self.make(lhs, rhs, goal.create))

    def _expected_other(self, other: Side, out: Tiling, side: Side, devices: Dim) -> Tiling:
        """An operand that matches no group is gathered whole; without spatial dims, as in any contraction."""
        if self.dims.spatial:
            return _whole(other.tiling)
        return super()._expected_other(other, out, side, devices)

    def _convolve(self, lhs: Side, rhs: Side, goal: Goal, strict: bool) -> LocalResult | None:
        """`PartitionConv`; None where the contraction handles it."""
        d = self.dims
        slides = any(lhs.tiling[a] or rhs.tiling[b] or goal.out[o] for a, b, o, _ in d.spatial)
        batched = any(lhs.tiling[a] or rhs.tiling[b] or goal.out[o] for a, b, o in d.batch)
        summed = any(lhs.tiling[a] for a, _ in d.contract) and any(rhs.tiling[b] for _, b in d.contract)
        if not (slides and not batched and not summed) and self.groups == 1:
            return None
        features = self.attrs["rhs"][1]
        if self.attrs["feature_groups"] > 1 and self.subaxes.shard(rhs.shape, rhs.tiling)[features] > 1:
            return (None,)  # groups of several input features
        made = self._grouped(lhs, rhs, goal) if self.groups > 1 else None
        if made is None and any(lhs.tiling) and any(rhs.tiling):
            made = self._both_split(lhs, rhs, goal)
        if made is None and any(goal.out):
            made = self._as_result(lhs, rhs, goal)
        if made is None and self.groups > 1:
            made = self._within_groups(lhs, rhs, goal, strict)
            if made is None and not strict:
                made = self._group_axes_only(lhs, rhs, goal)
            return (made,)
        return None if made is None else (made,)

    def computed(self, macs: int, lhs: Side, rhs: Side) -> int:
        """Multiply-adds whose taps read elements of the input: XLA's cost analysis skips padding and base dilation."""
        attrs = self.attrs
        for i, (a, b, o) in enumerate(zip(attrs["lhs"][2:], attrs["rhs"][2:], attrs["out"][2:], strict=True)):
            window = (attrs["stride"][i], attrs["padding"][i][0], attrs["lhs_dilation"][i], attrs["rhs_dilation"][i])
            pairs = rhs.shape[b] * self.out[o]
            macs = macs * taps_on_input(lhs.shape[a], rhs.shape[b], self.out[o], *window) // pairs if pairs else macs
        return macs

    # ---- spatial dims ------------------------------------------------------------------------------------------

    def _as_result(self, lhs: Side, rhs: Side, goal: Goal) -> Shape | None:
        """`PartitionConvolutionTiledOutput`: the input sharded like the result, with halos; the kernel replicated."""
        attrs = self.attrs
        if goal.out[attrs["out"][1]]:
            return None
        if attrs["feature_groups"] > 1 and (lhs.tiling[attrs["lhs"][1]] or rhs.tiling[attrs["rhs"][0]]):
            return None
        if attrs["batch_groups"] > 1 and (lhs.tiling[attrs["lhs"][0]] or rhs.tiling[attrs["rhs"][0]]):
            return None
        asked = carried(goal.out, zip(attrs["out"], attrs["lhs"], strict=True), len(lhs.tiling))
        found: list[tuple[int, Exchange | None]] = []
        windows = []
        for i, (a, b, o) in enumerate(zip(attrs["lhs"][2:], attrs["rhs"][2:], attrs["out"][2:], strict=True)):
            window = Window(
                lhs.shape[a],
                self.out[o],
                -attrs["padding"][i][0],
                attrs["stride"][i],
                rhs.shape[b],
                attrs["rhs_dilation"][i],
                attrs["lhs_dilation"][i],
            )
            if asked[a] and not window.trivial:
                windows.append((a, window))
                found.append((a, exchange(window, self.subaxes.ways(asked[a]))))
        lhs = self._moved(lhs, asked, goal.outer)
        rhs = self._moved(rhs, _whole(rhs.tiling), goal.outer)
        done = exchange_all(self.subaxes.shard(lhs.shape, asked), found)
        if done is None:
            # Gathered along those dims; every device then pads and slices its shard.
            slid = {a for a, _ in windows}
            self._moved(lhs, tuple(() if dim in slid else axes for dim, axes in enumerate(asked)), goal.outer)
        else:
            self._halos(lhs, done[1], ("window", goal.outer, asked, tuple(windows)))
        return self._make_local(lhs, rhs, goal.create, self.subaxes.shard(self.out, goal.out))

    def _both_split(self, lhs: Side, rhs: Side, goal: Goal) -> Shape | None:
        """`PartitionConvolutionWithSpatialDimensionHaloExchangeOnLHS`: partial sums of aligned shards, all-reduced.

        The weight gradient of spatially sharded images takes this form.
        """
        attrs = self.attrs
        pairs = list(zip(attrs["lhs"], (attrs["rhs"][0], attrs["rhs"][1], *attrs["rhs"][2:]), strict=True))
        pull = math.prod(lhs.shape) * lhs.width < math.prod(rhs.shape) * rhs.width
        follow, lead = (lhs, rhs) if pull else (rhs, lhs)
        asked = carried(lead.tiling, ((b, a) if pull else (a, b) for a, b in pairs), len(follow.tiling))
        lhs_tiling = asked if pull else lhs.tiling
        rhs_tiling = rhs.tiling if pull else asked
        if lhs_tiling[attrs["lhs"][0]] or rhs_tiling[attrs["rhs"][0]]:
            return None
        grouped = attrs["feature_groups"] > 1
        if grouped and (lhs_tiling[attrs["lhs"][1]] or rhs_tiling[attrs["rhs"][0]]):
            return None
        found = []
        for i, (a, b, o) in enumerate(zip(attrs["lhs"][2:], attrs["rhs"][2:], attrs["out"][2:], strict=True)):
            if attrs["lhs_dilation"][i] != 1:
                return None
            count = self.subaxes.ways(lhs_tiling[a])
            if count > 1:
                found.append((a, self._kernel_halos(i, lhs.shape[a], rhs.shape[b], self.out[o], count)))
        done = exchange_all(self.subaxes.shard(lhs.shape, lhs_tiling), found)
        if done is None:
            return None
        lhs = self._moved(lhs, lhs_tiling, goal.outer)
        rhs = self._moved(rhs, rhs_tiling, goal.outer)
        self._halos(lhs, done[1], ("kernel", goal.outer, lhs_tiling, rhs.shape, rhs_tiling))
        made = self._make_local(lhs, rhs, goal.create, self.out)
        # XLA sums over all goal.devices of the group, replicas included.
        self.result.overcounted |= self.subaxes.tiles(lhs_tiling) < self.subaxes.ways(goal.devices)
        self._sum((goal.devices,), made, goal.out, goal.outer)
        return self.subaxes.shard(goal.shape, goal.out)

    def _kernel_halos(self, i: int, size: int, taps: int, count: int, shards: int) -> Exchange | None:
        """Halos of the input where the shards split the taps and each computes every position of the result."""
        attrs = self.attrs
        dilation, low, stride = attrs["rhs_dilation"][i], attrs["padding"][i][0], attrs["stride"][i]
        shard, part = -(-size // shards), -(-taps // shards)
        step = shard - part * dilation
        left = [step * s + low for s in range(shards)]
        right = [-step * s - step + 1 - dilation + stride * (count - 1) - low for s in range(shards)]
        return halos(size, shard, stride * (count - 1) + (part - 1) * dilation + 1, left, right)

    def _halos(self, lhs: Side, moved: tuple[Moved, ...], key: Hashable) -> None:
        if moved:
            self.result.steps.append(Halo(0, lhs.tiling, moved, key))

    # ---- groups ------------------------------------------------------------------------------------------------

    def _group_dims(self) -> tuple[int, int, int]:
        """The dims of lhs, rhs and result that feature or batch groups split."""
        attrs = self.attrs
        return (attrs["lhs"][1 if attrs["feature_groups"] > 1 else 0], attrs["rhs"][0], attrs["out"][1])

    def _aligned_by_groups(self, place: int, tiling: Tiling, other: int) -> Tiling:
        """The tiling of operand or result `place` with its group dim mapped to that of `other` (both 0, 1 or 2)."""
        attrs = self.attrs
        feature = attrs["feature_groups"] > 1
        sides = (
            (attrs["lhs"][1], attrs["lhs"][0]) if feature else (attrs["lhs"][0], attrs["lhs"][1]),
            (attrs["rhs"][0], attrs["rhs"][1]),
            (attrs["out"][1], attrs["out"][0]),
        )
        mine = (*sides[place], *(attrs["lhs"], attrs["rhs"], attrs["out"])[place][2:])
        theirs = (*sides[other], *(attrs["lhs"], attrs["rhs"], attrs["out"])[other][2:])
        return carried(tiling, zip(mine, theirs, strict=True), len(tiling))

    def _grouped(self, lhs: Side, rhs: Side, goal: Goal) -> Shape | None:
        """Groups split over all devices: `PartitionConvolutionWithFeatureGroupCount` and `…BatchGroupCount`."""
        count = self.subaxes.ways(goal.devices)
        if self.groups % count:
            return None
        a, b, _ = self._group_dims()
        if self.attrs["batch_groups"] > 1 and not lhs.shape[a] == rhs.shape[b] == self.groups:
            return None
        if self.subaxes.ways(lhs.tiling[a]) == count:
            rhs = self._moved(rhs, self._aligned_by_groups(0, lhs.tiling, 1), goal.outer)
        elif self.subaxes.ways(rhs.tiling[b]) == count:
            lhs = self._moved(lhs, self._aligned_by_groups(1, rhs.tiling, 0), goal.outer)
        else:
            return None
        made_as = self._aligned_by_groups(0, lhs.tiling, 2)
        made = self._make_local(lhs, rhs, goal.create, self.subaxes.shard(self.out, made_as))
        return self._reshard_result(goal, made_as, made)

    def _within_groups(self, lhs: Side, rhs: Side, goal: Goal, strict: bool) -> Shape | None:
        """Groups split over some of the devices, like a batch dim; recurse within each device group."""
        a, b, o = self._group_dims()
        ways = self.subaxes.ways
        if ways(goal.out[o]) == 1 or ways(goal.out[o]) not in (ways(lhs.tiling[a]), ways(rhs.tiling[b])):
            return None
        if lhs.shape[a] != rhs.shape[b] and (not any(lhs.tiling) or self.groups % ways(lhs.tiling[a])):
            return None
        before = self.dims
        contract = before.contract if self.attrs["batch_groups"] > 1 else ()
        self.dims = Dims((*before.batch, (a, b, o)), contract, (), (), before.spatial)
        made = self._group_batch(lhs, rhs, goal, strict)
        self.dims = before
        return made

    def _group_axes_only(self, lhs: Side, rhs: Side, goal: Goal) -> Shape | None:
        """`PartitionConvOnBatchOrFeatureGroupedDims`: split along the groups only, all other dims gathered."""
        a, b, o = self._group_dims()
        ways = [self.subaxes.ways(tiling[dim]) for tiling, dim in ((lhs.tiling, a), (rhs.tiling, b), (goal.out, o))]
        if max(ways) == 1 or self.groups % max(ways):
            return None
        axes = (lhs.tiling[a], rhs.tiling[b], goal.out[o])[ways.index(max(ways))]
        lhs = self._moved(lhs, _only(lhs.tiling, a, axes), goal.outer)
        rhs = self._moved(rhs, _only(rhs.tiling, b, axes), goal.outer)
        made_as = _only(goal.out, o, axes)
        made = self._make_local(lhs, rhs, goal.create, self.subaxes.shard(self.out, made_as))
        return self._reshard_result(goal, made_as, made)

    # ---- leaves ------------------------------------------------------------------------------------------------

    def _make_local(self, lhs: Side, rhs: Side, create: Create, local: Shape) -> Shape:
        """The shape of the local convolution's result, with the spatial extents of `local`."""
        before = dict(self.sliding)
        self.sliding = {o: local[o] for o in before}
        made = self.make(lhs, rhs, create)
        self.sliding = before
        return made

    def leaf(self, left: Shape, right: Shape) -> Shape:
        """The shape of the local convolution's result; counts its multiply-adds."""
        d = self.whole
        out = self.kept(d, left, right, len(self.out))
        for o, extent in self.sliding.items():
            out[o] = extent
        if self.attrs["batch_groups"] > 1:
            batch, into = self.attrs["lhs"][0], self.attrs["out"][0]
            out[into] = max(1, left[batch] * self.out[into] // max(1, self.out[into] * self.attrs["batch_groups"]))
        taps = math.prod(right[b] for _, b, _, _ in d.spatial)
        self.result.macs += math.prod(out) * math.prod(right[b] for _, b in d.contract) * taps
        return tuple(out)


def _whole(tiling: Tiling) -> Tiling:
    return ((),) * len(tiling)


def _only(tiling: Tiling, dim: int, axes: Dim) -> Tiling:
    return tuple(axes if at == dim else () for at in range(len(tiling)))
