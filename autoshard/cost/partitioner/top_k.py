"""Sorts for a top-k, which XLA's GPU and TPU compilers turn into custom calls before they partition.

`TopkRewriter` (xla/hlo/transforms/): a descending sort of values, perhaps with their indices, each result of which has
one user, a slice of the first k. Shardings do not propagate through the call; the partitioner runs it on each device's
part if all devices split the operand. Where they split the sorted dim, the first k of each part are gathered, and
sorted again.
"""

from __future__ import annotations

from collections.abc import Mapping

from autoshard.graph.memo import per_graph
from autoshard.graph.ops import Graph, Op, Value

SORTED_IN_PARTS = frozenset({"f32", "bf16", "i32", "ui32"})
"""Dtypes of values of which the first of each part are gathered."""


@per_graph
def top_k_sorts(graph: Graph) -> Mapping[int, int]:
    """The sorts for a top-k -> k."""
    sorts = [op for op in graph.ops if op.kind == "sort" and op.attrs["descending"] and len(op.operands) <= 2]
    found = {op.id: _cut_to(graph, op) for op in sorts if _counts(graph, op)}
    return {number: k for number, k in found.items() if k is not None}


def sorts_parts(op: Op, k: int, parts: int) -> bool:
    """Whether a sort for a top-k whose sorted dim is in so many parts is one of each: k are fewer than a part has."""
    kind = op.results[0]
    return k < -(-kind.shape[op.attrs["dim"]] // parts) and kind.dtype in SORTED_IN_PARTS


def _counts(graph: Graph, op: Op) -> bool:
    """Whether the second operand, if any, is an iota along the sorted dim."""
    if len(op.operands) == 1:
        return True
    made = graph.ops[op.operands[1].op]
    dim = op.attrs["dim"]
    if made.kind == "broadcast_in_dim" and tuple(made.attrs["dims"]) == (dim,):
        made, dim = graph.ops[made.operands[0].op], 0
    return made.kind == "iota" and made.attrs["dim"] == dim and made.results[0].dtype == "i32"


def _cut_to(graph: Graph, op: Op) -> int | None:
    """The first elements, not all, of which all users of results are slices, one of a result; None if they are not."""
    found = set()
    for place, kind in enumerate(op.results):
        value = Value(op.id, place)
        users = graph.readers(value)
        if value in graph.returned or len(users) > 1 or any(user.kind != "slice" for user in users):
            return None
        for user in users:
            whole = list(kind.shape)
            whole[op.attrs["dim"]] = user.attrs["limit"][op.attrs["dim"]]
            if any(user.attrs["start"]) or any(by != 1 for by in user.attrs["stride"]):
                return None
            if list(user.attrs["limit"]) != whole:
                return None
            found.add(whole[op.attrs["dim"]])
    return found.pop() if len(found) == 1 and found != {op.results[0].shape[op.attrs["dim"]]} else None
