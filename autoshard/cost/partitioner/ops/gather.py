"""For how long a TPU's compiler keeps what it gathered, before it gathers it again for a later reader.

The partitioner for TPUs gathers a value for every reader. `ScheduleAwareCollectiveOpsCSE` (xla/service/spmd/) then
merges equal all-gathers, unless the readers are too far apart: the last reader of the one (that nearest to the
program's end) may be at most `KEPT_FOR` ops above the other, counted on the longest paths to the end.
"""

from __future__ import annotations

from collections.abc import Hashable

from autoshard.cost.partitioner.partitioned import MoveKey
from autoshard.cost.partitioner.tiling import Tiling
from autoshard.graph.ops import Graph

KEPT_FOR = 100
"""Ops: the default of libtpu's `xla_tpu_spmd_threshold_for_allgather_cse`.

Found by compiling (libtpu 0.0.51) one weight read at both ends of a chain of elementwise ops: gathered once up to 100
of them, twice from 101; with the flag at 40, once up to 40 and twice from 41.
"""


class KeptGathers:
    """The gathers made so far, in program order."""

    def __init__(self, graph: Graph) -> None:
        """For the readers in `graph`."""
        self.heights = heights(graph)
        self._lowest: dict[Hashable, list[int]] = {}

    def knows(self, key: Hashable) -> bool:
        """Whether a gather named `key` was made for some reader."""
        return key in self._lowest

    def serves(self, key: Hashable, reader: int) -> bool:
        """Whether a gather named `key` is still kept for op `reader`; if not, it is made now."""
        height = self.heights[reader]
        kept = self._lowest.setdefault(key, [])
        for number, lowest in enumerate(kept):
            if lowest <= height + 1 + KEPT_FOR:
                kept[number] = min(lowest, height)
                return True
        kept.append(height)
        return False


def in_whole_mesh(key: MoveKey, tiling: Tiling) -> MoveKey:
    """A move within groups of devices, named as the same move over all of the mesh.

    So a weight is gathered once for a product that groups of devices do apart and one that they do together.

    Args:
        key: of the move; that of a ring stays.
        tiling: of the whole value that is moved.
    """
    outer, source, end = key
    if not outer or not isinstance(outer, tuple):
        return key
    grouped = set(outer)
    mixed = any(0 < len(grouped.intersection(axes)) < len(axes) for axes in tiling)
    if mixed or source != tuple(() if grouped.issuperset(axes) else axes for axes in tiling):
        return key
    of_groups = [bool(axes) and grouped.issuperset(axes) for axes in tiling]
    if any(kept and after for kept, after in zip(of_groups, end, strict=True)):
        return key
    return (), tiling, tuple(tiling[dim] if kept else end[dim] for dim, kept in enumerate(of_groups))


def heights(graph: Graph) -> list[int]:
    """Per op the number of ops behind it on the longest path to the program's end."""
    found = [0] * len(graph.ops)
    for op in reversed(graph.ops):
        for value in op.operands:
            found[value.op] = max(found[value.op], found[op.id] + 1)
    return found
