"""What the parts of the partitioner share: one program under its shardings, and what it is known to take so far."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence

from autoshard.cost.machine.collectives import Collective
from autoshard.cost.machine.targets import CAPABILITIES, Target
from autoshard.cost.partitioner.cuts import Cuts
from autoshard.cost.partitioner.ops.halo import Moved
from autoshard.cost.partitioner.partitioned import Attention, Dim, Emission, Partitioned, Tilings
from autoshard.cost.partitioner.propagate import Shardings
from autoshard.cost.partitioner.reshard.emitted import Resharder, Step
from autoshard.cost.partitioner.reshard.steps import Cut
from autoshard.cost.partitioner.targets import COLLECTIVE_RULES
from autoshard.cost.partitioner.tiling import Subaxes, Tiling
from autoshard.cost.partitioner.transfer import Transfers
from autoshard.dtypes import dtype_bytes
from autoshard.graph.groups import free_ops
from autoshard.graph.ops import Graph, Op, Value
from autoshard.mesh import AxisGroup

Shape = tuple[int, ...]


class Context(ABC):
    """One run over a graph, as the functions in `ops/` see it.

    `partition.py` stands above them; what they ask of it in turn are the abstract methods.

    Attributes:
        readers: value -> the ops that read it, in program order.
        copies_of: value -> the numbers of its annotated copies.
        emissions: of the ops so far, in program order.
        order: op -> the subaxes of the sum that it ends with, in the order of its devices.
        joined, unsummed, attentions: as in `Partitioned`.
        read_unrounded: products whose operands kernels of attention read too.
    """

    def __init__(self, graph: Graph, shardings: Shardings, target: Target) -> None:
        """For `graph` as `target`'s compiler partitions it."""
        self.graph = graph
        self.shardings = shardings
        self.subaxes: Subaxes = shardings.subaxes
        self.target: Target = target
        self.compiler = CAPABILITIES[target]
        self.rules = COLLECTIVE_RULES[target]
        self.transfers = Transfers(graph, self.subaxes)
        self.resharder = Resharder(self.subaxes, target)
        self.cuts = Cuts(self.subaxes, target)
        self.free = free_ops(graph)
        self.copies_of: dict[Value, list[int]] = {}
        for number, copy in enumerate(shardings.copies):
            self.copies_of.setdefault(copy.value, []).append(number)
        self.emissions: list[Emission] = []
        self.order: dict[int, Dim] = {}
        self.joined: dict[int, int] = {}
        self.unsummed: set[Value] = set()
        self.attentions: Mapping[int, Attention] = {}
        self.read_unrounded: frozenset[int] = frozenset()

    @abstractmethod
    def emission(self, op: Op, made: Tiling) -> Emission:
        """What an op takes that makes its one result under `made`, and reads its operands as they are."""

    @abstractmethod
    def may_loop(self, op: Op) -> tuple[bool, ...]:
        """Per operand of a contraction whether it may go round a ring while it is multiplied."""

    @abstractmethod
    def partition(self, graph: Graph, shardings: Shardings) -> Partitioned:
        """Another program for the same target: the body of a loop or branch."""

    def collective(self, step: Step, op: int, count: int = 1) -> Collective:
        """A step that an op needs, so many times."""
        kind, axes, size = step
        return Collective(kind, axes, size, count, op)

    def moved(
        self,
        op: Op,
        reads: Tilings,
        wanted: Tilings,
        share: float,
        own: Sequence[Step] = (),
    ) -> Emission:
        """An emission that reshards the operands from `reads` to `wanted`, beside the op's own collectives."""
        moves = []
        for place, (source, target) in enumerate(zip(reads, wanted, strict=True)):
            if source != target:
                kind = self.graph.type_of(op.operands[place])
                steps = self.resharder.reshard(kind.shape, kind.dtype, source, target)
                end = self.resharder.destination(kind.shape, kind.dtype, source, target)
                moves.append((place, ((), source, end), steps))
        return Emission(tuple(moves), tuple(own), share, wanted)

    def share(self, op: Op, tiling: Tiling) -> float:
        """One device's part of an op whose result is made under `tiling`, padding included."""
        shape = op.results[0].shape
        whole = math.prod(shape)
        return math.prod(self.subaxes.shard(shape, tiling)) / whole if whole else 1.0

    @staticmethod
    def nothing(shape: Shape) -> Tiling:
        """The tiling that splits no dim of `shape`."""
        return ((),) * len(shape)

    def permute_axes(self, dim: tuple[int, ...], pairs: Iterable[tuple[int, int]]) -> tuple[str, ...]:
        """The mesh axes along which shards of a dim differ from those they are sent to."""
        moved: set[int] = set()
        for source, target in pairs:
            for axis in reversed(dim):
                size = self.subaxes.sizes[axis]
                if source % size != target % size:
                    moved.add(axis)
                source, target = source // size, target // size
        return self.subaxes.axes(moved)

    def permutes(self, moved: Iterable[Moved], tiling: Tiling, dtype: str) -> list[Step]:
        """The collectives of a halo exchange of an array that is split by `tiling`."""
        return [
            ("collective-permute", self.permute_axes(tiling[one.dim], one.pairs), one.elements * dtype_bytes(dtype))
            for one in moved
        ]

    def sums(self, axes: tuple[Dim, ...], size: int, cut: Cut | None, row_major: bool = False) -> list[Step]:
        """All-reduces of `size` bytes of partial results, each device going on with its part of `cut`.

        TPU and GPU fold those along several dims into one. Which are reduce-scatters says `ops/scatter.py`; `row_major`
        as in `CollectiveRules.scattered`.
        """
        if not axes:
            return []
        order = self.order_of(axes)
        if self.compiler.sums_dims_at_once:
            axes = (order,)
        *first, _ = axes
        steps: list[Step] = [("all-reduce", self.resharder.names(dim), size) for dim in first]
        whole: Step = ("all-reduce", self.resharder.names(order), size)
        return [*steps, *(self.scattered(order, size, cut, True, row_major) or (whole,))]

    def order_of(self, axes: tuple[Dim, ...]) -> Dim:
        """The subaxes of the last all-reduce that sums over `axes`, in the order of its devices.

        That along one dim has them in the order of the dim's tiles, folded ones in that of the mesh.
        """
        if not axes:
            return ()
        last = tuple(axis for dim in axes for axis in dim) if self.compiler.sums_dims_at_once else axes[-1]
        return last if len(axes) == 1 else tuple(sorted(last))

    def scattered(
        self,
        axes: Sequence[int],
        size: int,
        cut: Cut | None,
        ordered: bool,
        row_major: bool = False,
        summed: bool = False,
    ) -> list[Step] | None:
        """The reduce-scatter that a sum of `size` bytes over `axes` is, of which devices go on with parts of `cut`.

        None where it stays an all-reduce. `row_major` and `summed` as in `CollectiveRules.scattered`.
        """
        names = self.resharder.names(axes)
        if cut is None or not self.cuts.scatters(axes, cut, ordered) or not self.scatters_over(names):
            return None
        dim = next(dim for dim, factor in enumerate(cut.factors) if factor > 1)
        packed, mesh = max(1, 4 * math.prod(cut.shape) // max(1, size)), self.subaxes.mesh
        found = self.rules.scattered(cut.shape, dim, names, mesh, row_major=row_major, summed=summed, packed=packed)
        if found is None:
            return None
        steps: list[Step] = [("reduce-scatter", names, round(size * found.padded))]
        return [*steps, ("collective-permute", names, round(size * found.moved))] if found.moved else steps

    def scatters_over(self, axes: AxisGroup) -> bool:
        """Whether the target makes reduce-scatters over these axes at all."""
        return not self.rules.sums_whole(axes, self.subaxes.mesh)
