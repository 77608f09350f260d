"""For how long a TPU's compiler keeps what it gathered, before it gathers it again for a later reader.

The partitioner for TPUs gathers a value for every reader. `ScheduleAwareCollectiveOpsCSE` (xla/service/spmd/) then
merges equal all-gathers, unless the readers are too far apart: the last reader of the one (that nearest to the
program's end) may be at most `KEPT_FOR` ops above the other, counted on the longest paths to the end.
"""

from __future__ import annotations

from collections.abc import Hashable

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


def heights(graph: Graph) -> list[int]:
    """Per op the number of ops behind it on the longest path to the program's end."""
    found = [0] * len(graph.ops)
    for op in reversed(graph.ops):
        for value in op.operands:
            found[value.op] = max(found[value.op], found[op.id] + 1)
    return found
