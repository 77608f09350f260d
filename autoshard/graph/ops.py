"""The op graph that `graph/` builds from a captured program and that all later stages read."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple

from networkx import DiGraph, edge_bfs

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
        results: types of its results.
        attrs: the attributes that its rule needs, as plain Python values (see `stablehlo/reader.py` for each kind's).
        aten: index of the aten op that it came from, or None.
        module: module path of that aten op, `""` where unknown.
        scattered: of an addition that became a scatter (`simplify.py`), the aten op that scatters.
    """

    id: int
    kind: str
    operands: tuple[Value, ...]
    results: tuple[TensorType, ...]
    attrs: Mapping[str, Any] = field(default_factory=dict, hash=False)
    aten: int | None = None
    module: str = ""
    scattered: int | None = None

    def reader(self, value: Value) -> int | None:
        """The aten op that reads an operand, which a copy of it for this op names."""
        return self.aten if self.scattered is None or value == self.operands[0] else self.scattered


@dataclass(frozen=True)
class Graph:
    """The ops of a program, and the values between them.

    Attributes:
        ops: op id -> Op, in program order (ids are 0..n-1).
        arguments: op ids of the arguments, in the program's order.
        outputs: the program's results, in its order.
        aten_outputs: (aten index, output index) -> its value: the points that lowering can annotate.
    """

    program: Program
    ops: tuple[Op, ...]
    arguments: tuple[int, ...]
    outputs: tuple[Value, ...]
    aten_outputs: Mapping[tuple[int, int], Value]

    def type_of(self, value: Value) -> TensorType:
        """Shape and dtype of a value."""
        return self.ops[value.op].results[value.result]

    def runs(self, op: int | None) -> int:
        """How often an op runs in a step: those of a second micro-step stand for all after the first."""
        return 1 if op is None else self.program.runs(self.ops[op].aten)

    def phase(self, op: int) -> str:
        """`forward`, `backward` or `optimizer`; empty for an op that is no aten op's."""
        aten = self.ops[op].aten
        return "" if aten is None or aten >= len(self.program.ops) else self.program.ops[aten].phase

    @cached_property
    def nx(self) -> DiGraph[int]:
        """Over op ids: node attribute `op` is the Op, edge attribute `values` the values along it."""
        found: DiGraph[int] = DiGraph()
        found.add_nodes_from((op.id, {"op": op}) for op in self.ops)
        for op in self.ops:
            values: dict[int, list[Value]] = {}
            for value in dict.fromkeys(op.operands):
                values.setdefault(value.op, []).append(value)
            found.add_edges_from((before, op.id, {"values": tuple(read)}) for before, read in values.items())
        return found

    @cached_property
    def _readers(self) -> Mapping[Value, tuple[Op, ...]]:
        found: dict[Value, list[Op]] = {}
        for op in self.ops:
            for value in dict.fromkeys(op.operands):
                found.setdefault(value, []).append(op)
        return {value: tuple(ops) for value, ops in found.items()}

    @cached_property
    def returned(self) -> frozenset[Value]:
        """The values that are results of the program."""
        return frozenset(self.outputs)

    def readers(self, value: Value) -> tuple[Op, ...]:
        """The users of a value, each once, in program order."""
        return self._readers.get(value, ())

    def uses(self, value: Value) -> int:
        """Number of operands, over all ops, that are this value."""
        return sum(op.operands.count(value) for op in self.readers(value))

    def is_read(self, value: Value) -> bool:
        """Whether a value has users, or is a result of the program."""
        return value in self._readers or value in self.returned

    def leading_to(self, ops: Collection[int]) -> set[int]:
        """These ops and their ancestors."""
        return {*ops, *(before for before, _, _ in edge_bfs(self.nx, ops, orientation="reverse"))}


FactorKind = Literal["parallel", "reduce", "replicated", "halo"]


@dataclass(frozen=True)
class Factor:
    """An index variable of an op's loop nest (as in an einsum).

    Attributes:
        size: its extent.
        kind: the effect of a split: `parallel` the result is split; `reduce` every result is a partial sum (or other
            reduction); `replicated` no split is possible; `halo` neighbours exchange halos.
        reducer: for `reduce`: `add`, `max`, `min`, `mul`, `and`, `or`; or `gather` if partials are gathered (argmax).
        even: whether only an even split computes correct results: compilers do not mask the padding of an uneven one.
    """

    size: int
    kind: FactorKind = "parallel"
    reducer: str | None = None
    even: bool = False


DimFactors = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Rule:
    """The sharding rule of an op: per dim of each operand and result, its factors, major to minor.

    A dim with factors `(f, g)` (a merged `B*S`) is split by the axes of f, then, once f is completely split, by those
    of g. A dim with no factors is never split. A factor that a result does not mention is reduced over if its kind is
    `reduce`, else it does not affect that result.

    Attributes:
        reason: why dims that could be independent cannot be split: the plan shows it, and its cost.
    """

    factors: tuple[Factor, ...]
    operands: tuple[DimFactors, ...]
    results: tuple[DimFactors, ...]
    reason: str = ""
