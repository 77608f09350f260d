"""Sorts for a top-k, which XLA's GPU compiler turns into custom calls before it partitions.

`TopkRewriter` (xla/hlo/transforms/): a descending sort of values, perhaps with their indices, each result of which has
one user, a slice of the first k. Shardings do not propagate through the call; the partitioner runs it on each device's
rows if all devices split them.
"""

from __future__ import annotations

from autoshard.graph.ops import Graph, Op, Value


def top_k_sorts(graph: Graph) -> frozenset[int]:
    """The sorts that become top-k calls."""
    sorts = [op for op in graph.ops if op.kind == "sort" and op.attrs["descending"] and len(op.operands) <= 2]
    return frozenset(op.id for op in sorts if _counts(graph, op) and _is_cut(graph, op))


def _counts(graph: Graph, op: Op) -> bool:
    """Whether the second operand, if any, is an iota along the sorted dim."""
    if len(op.operands) == 1:
        return True
    made = graph.ops[op.operands[1].op]
    dim = op.attrs["dim"]
    if made.kind == "broadcast_in_dim" and tuple(made.attrs["dims"]) == (dim,):
        made, dim = graph.ops[made.operands[0].op], 0
    return made.kind == "iota" and made.attrs["dim"] == dim and made.results[0].dtype == "i32"


def _is_cut(graph: Graph, op: Op) -> bool:
    """Whether all results with users have one slice as user, all of the same first elements, and not of all."""
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
    return len(found) == 1 and found != {op.results[0].shape[op.attrs["dim"]]}
