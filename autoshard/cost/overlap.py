"""Step time when collectives of weights run beside kernels.

Gathers of what is made of parameters alone run ahead, one after the other in the order of their use; a kernel waits for
those that it reads. Sums of gradients follow the kernels that make them, one after the other; the optimizer waits for
the last. Both together take no less than their sum. Permutes of a windowed einsum run beside its product (Wang et al.,
"Overlap Communication with Dependent Computation via Decomposition", ASPLOS 2023); every other collective, alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from autoshard.cost.machine.collectives import Collective
from autoshard.cost.machine.compute import MATRIX_WORK
from autoshard.graph.groups import Groups
from autoshard.graph.ops import Graph, Op

_SUMS = ("all-reduce", "reduce-scatter")


def overlapped(
    graph: Graph,
    groups: Groups,
    compute: Sequence[float],
    collectives: Sequence[Collective],
    times: Sequence[float],
) -> float:
    """Seconds of a step; never more than all of `compute` (by group) and `times` (by collective) in sequence."""
    weights, gradients = _weights(graph), _gradients(graph)
    at: dict[int, list[int]] = {}
    for number, each in enumerate(collectives):
        if each.op is not None:
            at.setdefault(each.op, []).append(number)
    now = sum(time for each, time in zip(collectives, times, strict=True) if each.op is None)
    gathered = reduced = first = now
    beside = 0.0
    started = False
    for group, own in zip(groups.groups, compute, strict=True):
        if not started and _phase(graph, graph.ops[group.ops[-1]]) == "optimizer":
            started = True
            now = max(now, reduced, first + beside)
        left = own  # of the group's kernels, that no permute runs beside
        read = [value.op for value in group.inputs if graph.ops[value.op].kind == "argument"]
        for op in (*dict.fromkeys(read), *group.ops):
            for number in at.pop(op, ()):
                each = collectives[number]
                if op in gradients and each.kind in _SUMS:
                    reduced = max(reduced, now + own) + times[number]
                    beside += times[number]
                elif op in weights and each.kind == "all-gather":
                    gathered += times[number]
                    beside += times[number]
                    now = max(now, gathered)
                elif each.kind == "collective-permute" and graph.ops[op].kind == "dot_general":
                    now += max(0.0, times[number] - left)
                    left = max(0.0, left - times[number])
                else:
                    now += times[number]
        now += own
    rest = sum(times[number] for numbers in at.values() for number in numbers)
    return max(now, reduced, first + beside) + rest


def _weights(graph: Graph) -> set[int]:
    """Ops whose results are made of parameters alone."""
    roles = zip(graph.arguments, graph.program.arguments, strict=True)
    found = {op for op, argument in roles if argument.role == "parameter"}
    for op in graph.ops:
        made = op.kind != "argument" and op.operands and op.kind not in MATRIX_WORK
        if made and all(value.op in found for value in op.operands):
            found.add(op.id)
    return found


def _gradients(graph: Graph) -> set[int]:
    """Ops of the backward pass whose results only the optimizer reads, cast or moved at most."""
    found: set[int] = set()
    for op in reversed(graph.ops):
        readers = [graph.ops[reader] for reader in graph.nx.adj[op.id]]
        only = all(
            _phase(graph, reader) == "optimizer" or (reader.id in found and reader.kind not in MATRIX_WORK)
            for reader in readers
        )
        if readers and only and _phase(graph, op) == "backward":
            found.add(op.id)
    return found


def _phase(graph: Graph, op: Op) -> str:
    if op.aten is None or op.aten >= len(graph.program.ops):
        return ""
    return graph.program.ops[op.aten].phase
