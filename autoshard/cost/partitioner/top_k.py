"""Sorts of which only the greatest elements are taken: XLA's GPU compiler makes each a call, before it partitions.

`TopkRewriter` (xla/hlo/transforms/): the values, alone or with their places, are sorted in descending order, and each
result is read by one slice of the first k. Propagation passes no sharding through the call; the partitioner splits it
like rows that are split over all devices.
"""

from __future__ import annotations

from autoshard.graph.ops import Graph, Op, Value


def top_k_sorts(graph: Graph) -> frozenset[int]:
    """The sorts that become such calls."""
    sorts = [op for op in graph.ops if op.kind == "sort" and op.attrs["descending"] and len(op.operands) <= 2]
    return frozenset(op.id for op in sorts if _counts(graph, op) and _is_cut(graph, op))


def _counts(graph: Graph, op: Op) -> bool:
    """Whether the second operand, if there is one, counts the places of the sorted dim."""
    if len(op.operands) == 1:
        return True
    made = graph.ops[op.operands[1].op]
    dim = op.attrs["dim"]
    if made.kind == "broadcast_in_dim" and tuple(made.attrs["dims"]) == (dim,):
        made, dim = graph.ops[made.operands[0].op], 0
    return made.kind == "iota" and made.attrs["dim"] == dim and made.results[0].dtype == "i32"


def _is_cut(graph: Graph, op: Op) -> bool:
    """Whether one slice reads each result that is read, all of them the same first elements."""
    found = set()
    for place, kind in enumerate(op.results):
        value = Value(op.id, place)
        users = graph.readers(value)
        if value in graph.returned or len(users) > 1 or any(user.kind != "slice" for user in users):
            return False
        for user in users:
            whole = list(kind.shape)
            whole[op.attrs["dim"]] = user.attrs["limit"][op.attrs["dim"]]
            if any(user.attrs["start"]) or any(by != 1 for by in user.attrs["stride"]):
                return False
            if list(user.attrs["limit"]) != whole:
                return False
            found.add(whole[op.attrs["dim"]])
    return len(found) == 1
