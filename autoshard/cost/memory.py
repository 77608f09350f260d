"""Memory: what is live when, in bytes per device, over the program's order as the schedule.

Arguments live throughout. A result that replaces an argument (`Output.updates`) is written into the argument's buffer
and needs none of its own. Any other value that is kept in memory lives from the kernel that makes it to the last kernel
that reads it; values inside a fusion group are never in memory, reshapes share their operand's buffer, and constants
are made where they are read. A kernel runs at the position of its group's last op. Uneven shards are padded up.

What is not modelled: the temporaries inside a kernel (a convolution's workspace, a sort), the tiles a TPU pads to, and
the compiler's reordering and rematerialisation.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from autoshard.cost.compute import dtype_bytes
from autoshard.graph.groups import Groups, free_ops
from autoshard.graph.ops import Graph, Value
from autoshard.mesh import Mesh, Spec, replicated

ALIASES = frozenset({"reshape", "optimization_barrier"})
"""Kinds whose result is their operand's buffer under another type."""


@dataclass(frozen=True)
class MemoryProfile:
    """Bytes per device over the schedule.

    Attributes:
        peak_bytes: the most that is live at any op, temporaries included.
        at_op: the first op where it is.
        arguments_bytes: of all arguments, donated ones once.
        temporaries_bytes: of the temporaries at the peak.
        live: (value, bytes) at the peak, arguments included, largest first.
        timeline: bytes live at each op id, shape (ops,).
    """

    peak_bytes: int
    at_op: int
    arguments_bytes: int
    temporaries_bytes: int
    live: tuple[tuple[Value, int], ...] = field(repr=False)
    timeline: npt.NDArray[np.int64] = field(repr=False, compare=False)


def value_bytes(shape: Sequence[int], dtype: str, spec: Spec, mesh: Mesh) -> int:
    """Bytes of one device's part of a tensor, uneven dims padded up."""
    return math.prod(mesh.shard_shape(shape, spec)) * dtype_bytes(dtype)


def live_interval(
    graph: Graph, materialised: Set[Value] | None = None, groups: Groups | None = None
) -> dict[Value, tuple[int, int]]:
    """Value -> (start, end): it is in memory while `start <= op id < end`. Values that take no buffer are absent.

    Args:
        graph: the program; time is op ids.
        materialised: the values that are kept in memory, beside arguments; by default what crosses the boundary of
            some group, or every value where `groups` is None.
        groups: what runs as one kernel; None runs every op by itself.
    """
    count = len(graph.ops)
    runs_at = list(range(count))
    free = groups.free if groups is not None else free_ops(graph)
    alone = [True] * count
    if groups is not None:
        for group in groups.groups:
            single = all(graph.ops[member].kind in ALIASES for member in group.ops)
            for member in group.ops:
                runs_at[member] = group.ops[-1]
                alone[member] = single
        if materialised is None:
            materialised = {value for group in groups.groups for value in group.outputs}
    donated = {
        value
        for value, output in zip(graph.outputs, graph.program.outputs, strict=True)
        if output.updates is not None and graph.ops[value.op].kind != "argument"
    }

    # An alias stands for the value whose buffer it shares; None has no buffer.
    stands_for: dict[Value, Value | None] = {}

    def buffer(value: Value) -> Value | None:
        return stands_for.get(value, value)

    intervals: dict[Value, tuple[int, int]] = {}
    ends: dict[Value, int] = {}
    for op in graph.ops:
        if op.kind == "argument":
            intervals[Value(op.id)] = (0, count)
            continue
        if op.id in free:
            stands_for.update({Value(op.id, i): None for i in range(len(op.results))})
            continue
        at = runs_at[op.id]
        for operand in op.operands:
            held = buffer(operand)
            if held is not None:
                ends[held] = max(ends.get(held, 0), at + 1)
        if op.kind in ALIASES and alone[op.id] and len(op.operands) == 1:
            stands_for[Value(op.id)] = buffer(op.operands[0])
            continue
        for i in range(len(op.results)):
            value = Value(op.id, i)
            if value in donated or (materialised is not None and value not in materialised):
                stands_for[value] = None
            else:
                intervals[value] = (at, at + 1)
    for value in graph.outputs:
        held = buffer(value)
        if held is not None:
            ends[held] = count
    return {value: (start, max(end, ends.get(value, 0))) for value, (start, end) in intervals.items()}


def peak_memory(
    graph: Graph,
    specs: Mapping[Value, Spec],
    mesh: Mesh,
    *,
    temporaries: Iterable[tuple[int, float]] = (),
    groups: Groups | None = None,
    materialised: Set[Value] | None = None,
) -> MemoryProfile:
    """The memory profile of `graph` under `specs`.

    Args:
        graph: the program.
        specs: sharding per value; a value without one is whole on every device.
        mesh: the devices.
        temporaries: (op id, bytes per device) of what is needed at that op alone, such as a resharded copy.
        groups, materialised: as in `live_interval`.
    """
    intervals = live_interval(graph, materialised, groups)
    known: dict[tuple[object, Spec], int] = {}
    values = list(intervals)
    sizes = np.empty(len(values), dtype=np.int64)
    for i, value in enumerate(values):
        kind = graph.type_of(value)
        spec = specs.get(value)
        if spec is None:
            spec = replicated(len(kind.shape))
        key = (kind, spec)
        if key not in known:
            known[key] = value_bytes(kind.shape, kind.dtype, spec, mesh)
        sizes[i] = known[key]
    bounds = np.array([intervals[value] for value in values], dtype=np.int64).reshape(-1, 2)
    count = len(graph.ops)
    change = np.zeros(count + 1, dtype=np.int64)
    np.add.at(change, bounds[:, 0], sizes)
    np.add.at(change, bounds[:, 1], -sizes)
    extra = np.zeros(count, dtype=np.int64)
    for position, amount in temporaries:
        extra[position] += math.ceil(amount)
    timeline = np.cumsum(change[:-1]) + extra
    at = int(timeline.argmax()) if count else 0
    live = [
        (value, int(size))
        for value, size, (start, end) in zip(values, sizes, bounds, strict=True)
        if start <= at < end and size
    ]
    live.sort(key=lambda entry: (-entry[1], entry[0]))
    is_argument = np.array([graph.ops[value.op].kind == "argument" for value in values], dtype=bool)
    return MemoryProfile(
        peak_bytes=int(timeline[at]) if count else 0,
        at_op=at,
        arguments_bytes=int(sizes[is_argument].sum()) if count else 0,
        temporaries_bytes=int(extra[at]) if count else 0,
        live=tuple(live),
        timeline=timeline,
    )
