"""The op graph: what `graph/` makes of a captured program, and what every later stage reads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import networkx as nx

from autoshard.program import Program, TensorType


class Value(NamedTuple):
    """Result `result` of op `op`."""

    op: int
    result: int = 0


@dataclass(frozen=True)
class Op:
    """One StableHLO op of the main function (or an argument of it).

    Attributes:
        id: its node in the graph; ids grow in program order, arguments first.
        kind: StableHLO name without dialect (`dot_general`, `add`, `reduce`…), or `argument`.
            `dot` arrives as `dot_general`; `custom_call` as `custom_call` with `attrs["target"]`.
        operands: the values it reads.
        results: types of the values it makes.
        attrs: the attributes that its rule needs, as plain Python values (see `stablehlo/reader.py` for each kind's).
        aten: index of the aten op that it came from, or None.
        module: module path of that aten op, `""` where unknown.
    """

    id: int
    kind: str
    operands: tuple[Value, ...]
    results: tuple[TensorType, ...]
    attrs: Mapping[str, Any] = field(default_factory=dict, hash=False)
    aten: int | None = None
    module: str = ""


@dataclass(frozen=True)
class Graph:
    """The ops of a program.

    Attributes:
        nx: DiGraph over op ids; node attribute `op` is the Op, edge attribute `values` the results that flow along it.
        ops: op id -> Op, in program order (ids are 0..n-1).
        arguments: op ids of the arguments, in the program's order.
        outputs: the program's results, in its order.
        aten_outputs: (aten index, output index) -> the value that is that output: the points lowering can annotate.
    """

    program: Program
    nx: nx.DiGraph[int]
    ops: tuple[Op, ...]
    arguments: tuple[int, ...]
    outputs: tuple[Value, ...]
    aten_outputs: Mapping[tuple[int, int], Value]

    def type_of(self, value: Value) -> TensorType:
        """Shape and dtype of a value."""
        return self.ops[value.op].results[value.result]


def flow(ops: Iterable[Op]) -> nx.DiGraph[int]:
    """`Graph.nx` of ops."""
    found: nx.DiGraph[int] = nx.DiGraph()
    for op in ops:
        found.add_node(op.id, op=op)
        values: dict[int, list[Value]] = {}
        for value in dict.fromkeys(op.operands):
            values.setdefault(value.op, []).append(value)
        found.add_edges_from((before, op.id, {"values": tuple(read)}) for before, read in values.items())
    return found


FactorKind = Literal["parallel", "reduce", "replicated", "halo"]


@dataclass(frozen=True)
class Factor:
    """An index variable of an op's loop nest (as in an einsum).

    Attributes:
        size: its extent.
        kind: what splitting it does: `parallel` the result is split; `reduce` every result is a partial term;
            `replicated` it may not be split; `halo` it may, neighbours exchange edges.
        reducer: for `reduce`: `add`, `max`, `min`, `mul`, `and`, `or`; or `gather` when partials are gathered (argmax).
        even: only an even split computes the right numbers: compilers do not mask what pads an uneven one.
    """

    size: int
    kind: FactorKind = "parallel"
    reducer: str | None = None
    even: bool = False


DimFactors = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Rule:
    """How an op may be split: per dim of each operand and result, its factors, major to minor.

    A dim with factors `(f, g)` (a merged `B*S`) is split by the axes of f, then, once f is wholly split, by those of
    g. A dim with no factors is never split. A factor that a result does not mention is reduced over if its kind is
    `reduce`, else it makes no difference to that result.

    Attributes:
        reason: why nothing of an op may be split that could be: the plan names it, and what it costs.
    """

    factors: tuple[Factor, ...]
    operands: tuple[DimFactors, ...]
    results: tuple[DimFactors, ...]
    reason: str = ""
