"""How long a TPU's compiler reuses an all-gather before a later user gathers again.

The TPU partitioner gathers a value for every user. `ScheduleAwareCollectiveOpsCSE` (xla/service/spmd/) then merges
equal all-gathers if their users are close: on the longest paths to the program's end, the one's last user (nearest
to the end) may be at most `KEPT_FOR` ops from the other. Manual regions read an operand through a `Sharding` call, and
equal ones are one instruction before the partitioner runs: one gather, however far apart these are.
"""

from __future__ import annotations

from collections.abc import Hashable

from autoshard.cost.partitioner.partitioned import MoveKey
from autoshard.cost.partitioner.tiling import Tiling
from autoshard.fused import KINDS
from autoshard.graph.ops import Graph

KEPT_FOR = 100
"""Ops: the default of libtpu's `xla_tpu_spmd_threshold_for_allgather_cse`.

Checked by compiling (libtpu 0.0.51) one weight read at both ends of a chain of elementwise ops: gathered once up to 100
of them, twice from 101; with the flag at 40, once up to 40 and twice from 41.
"""


class KeptGathers:
    """The all-gathers emitted so far, in program order."""

    def __init__(self, graph: Graph) -> None:
        """For the users in `graph`."""
        self.heights = heights(graph)
        self._in_regions = {op.id for op in graph.ops if op.kind in KINDS}
        self._for_regions: set[Hashable] = set()
        self._lowest: dict[Hashable, list[int]] = {}

    def knows(self, key: Hashable) -> bool:
        """Whether an all-gather with this key was emitted for any user."""
        return key in self._lowest

    def serves(self, key: Hashable, reader: int) -> bool:
        """Whether op `reader` can reuse an all-gather with this key; if not, it is emitted here."""
        if reader in self._in_regions:
            if key in self._for_regions:
                return True
            self._for_regions.add(key)
        height = self.heights[reader]
        kept = self._lowest.setdefault(key, [])
        for number, lowest in enumerate(kept):
            if lowest <= height + 1 + KEPT_FOR:
                kept[number] = min(lowest, height)
                return True
        kept.append(height)
        return False


def in_whole_mesh(key: MoveKey, tiling: Tiling) -> MoveKey:
    """The key of a move within device groups, as that of the same move over the whole mesh.

    So a weight is gathered once for a contraction within groups and one over the whole mesh.

    Args:
        key: of the move; that of a windowed einsum is returned as it is.
        tiling: of the global value that is moved.
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
    """Per op the number of ops on the longest path from it to the program's end."""
    found = [0] * len(graph.ops)
    for op in reversed(graph.ops):
        for value in op.operands:
            found[value.op] = max(found[value.op], found[op.id] + 1)
    return found
