"""State that the handlers of single ops share: the graph, its shardings, and what is emitted so far."""

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
    """One partitioner run over a graph, seen by the handlers in `ops/`; `partition.py` has the abstract methods.

    Attributes:
        readers: value -> its users, in program order.
        copies_of: value -> the numbers of its annotated copies.
        emissions: of the ops so far, in program order.
        order: op -> the subaxes of its final all-reduce, in the order of the devices in a replica group.
        joined, unsummed, attentions: as in `Partitioned`.
        read_unrounded: contractions whose operands attention kernels read too.
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
        """The emission of an op that reads its operands as they are and produces its one result under `made`."""

    @abstractmethod
    def may_loop(self, op: Op) -> tuple[bool, ...]:
        """Per operand of a contraction whether a windowed einsum may permute it instead of gathering it."""

    @abstractmethod
    def partition(self, graph: Graph, shardings: Shardings) -> Partitioned:
        """Partition the body of a loop or branch for the same target."""

    def collective(self, step: Step, op: int, count: int = 1) -> Collective:
        """A step as the collective that `op` needs `count` times."""
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
        """The emission that reshards operands from `reads` to `wanted`, then runs the op's `own` collectives."""
        moves = []
        for place, (source, target) in enumerate(zip(reads, wanted, strict=True)):
            if source != target:
                kind = self.graph.type_of(op.operands[place])
                steps = self.resharder.reshard(kind.shape, kind.dtype, source, target)
                end = self.resharder.destination(kind.shape, kind.dtype, source, target)
                moves.append((place, ((), source, end), steps))
        return Emission(tuple(moves), tuple(own), share, wanted)

    def share(self, op: Op, tiling: Tiling) -> float:
        """One device's fraction of an op's FLOP, padding included, if its result is produced under `tiling`."""
        shape = op.results[0].shape
        whole = math.prod(shape)
        return math.prod(self.subaxes.shard(shape, tiling)) / whole if whole else 1.0

    @staticmethod
    def nothing(shape: Shape) -> Tiling:
        """The tiling that splits no dim of `shape`."""
        return ((),) * len(shape)

    def permute_axes(self, dim: tuple[int, ...], pairs: Iterable[tuple[int, int]]) -> tuple[str, ...]:
        """The mesh axes along which the sources and targets of a collective permute along a dim differ."""
        moved: set[int] = set()
        for source, target in pairs:
            for axis in reversed(dim):
                size = self.subaxes.sizes[axis]
                if source % size != target % size:
                    moved.add(axis)
                source, target = source // size, target // size
        return self.subaxes.axes(moved)

    def permutes(self, moved: Iterable[Moved], tiling: Tiling, dtype: str) -> list[Step]:
        """The collective permutes of a halo exchange of an array that is split by `tiling`."""
        return [
            ("collective-permute", self.permute_axes(tiling[one.dim], one.pairs), one.elements * dtype_bytes(dtype))
            for one in moved
        ]

    def sums(self, axes: tuple[Dim, ...], size: int, cut: Cut | None, row_major: bool = False) -> list[Step]:
        """All-reduces of `size` bytes of partial sums per device; each device keeps the slice `cut`, if any.

        `axes` has the subaxes of every summed dim, the last dim first.
        TPU and GPU compilers fold all-reduces along several dims into one. `ops/scatter.py` says which become
        reduce-scatters; `row_major` as in `CollectiveRules.scattered`.
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
        """The subaxes of the last all-reduce over `axes`, in the order of the devices in a replica group.

        It follows the order of the dims (`axes` has the last one first) and of their tiles, folded ones that of the
        mesh.
        """
        if not self.compiler.sums_dims_at_once:
            return axes[-1] if axes else ()
        order = tuple(axis for dim in reversed(axes) for axis in dim)
        return tuple(sorted(order)) if self.compiler.folds_sums and len(axes) > 1 else order

    def scattered(
        self,
        axes: Sequence[int],
        size: int,
        cut: Cut | None,
        ordered: bool,
        row_major: bool = False,
        summed: bool = False,
    ) -> list[Step] | None:
        """The reduce-scatter that replaces an all-reduce of `size` bytes over `axes` whose devices keep slices `cut`.

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

    def scatters_along(self, shape: Shape, dim: int, axes: AxisGroup, item: int) -> bool:
        """Whether the target scatters a kernel's row-major result, of `item` bytes per element, if it is asked to."""
        packed, mesh = max(1, 4 // item), self.subaxes.mesh
        found = self.rules.scattered(shape, dim, axes, mesh, row_major=True, summed=True, packed=packed)
        return found is not None and self.scatters_over(axes)

    def scatters_over(self, axes: AxisGroup) -> bool:
        """Whether the target emits reduce-scatters over these axes at all."""
        return not self.rules.sums_whole(axes, self.subaxes.mesh)
