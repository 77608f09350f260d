"""The partitioner's output: for one op, before and after earlier reshards are known, and for a program."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from autoshard.cost.machine.collectives import Collective
from autoshard.cost.partitioner.reshard.emitted import Step
from autoshard.cost.partitioner.tiling import Tiling
from autoshard.graph.ops import Value

Dim = tuple[int, ...]
Tilings = tuple[Tiling, ...]
"""One per operand, or per result."""
MoveKey = tuple[Any, Tiling | None, Tiling]
"""(axes that number the device groups, source tiling, tiling where communication ends): identifies a reshard."""


@dataclass(frozen=True)
class Ring:
    """Key of a windowed einsum's permutes in a ring of `parts` devices, within the groups `outer`."""

    outer: Dim
    parts: int


@dataclass(frozen=True)
class Emission:
    """The collectives of one op, before it is known which of its reshards were emitted earlier.

    Attributes:
        moves: per reshard (operand number, its key, collectives).
        own: the op's own collectives.
        share: one device's FLOP as a fraction of the whole op's.
        order: the subaxes of the last all-reduce in `own`, in the order of the devices in a replica group.
        inner: collectives in the bodies of a loop or branch.
        rounds: (index in `own`, count) of the permutes by which a windowed einsum moves partial sums, one step.
        of_result: per collective in `own` the result that it is of; empty if all are of the first.
    """

    moves: tuple[tuple[int, MoveKey, tuple[Step, ...]], ...]
    own: tuple[Step, ...]
    share: float
    reads: tuple[Tiling, ...]
    overcounted: bool = False
    order: Dim = ()
    inner: tuple[Collective, ...] = ()
    rounds: tuple[int, int] | None = None
    of_result: tuple[int, ...] = ()


@dataclass(frozen=True)
class Move:
    """A reshard of an operand, or of a value into an annotated copy.

    Attributes:
        place: operand number.
        key: identifies the resharded array; of moves with equal keys the first emits it and the others reuse it.
        tiling: of the resharded array.
        collectives: none where it is only sliced, or emitted before.
    """

    place: int
    key: Hashable
    tiling: Tiling
    collectives: tuple[Collective, ...]


@dataclass(frozen=True)
class OpRun:
    """The partitioned form of one op.

    Attributes:
        collectives: reshards of its operands, then all-reduces or reduce-scatters of partial sums.
        share: its FLOP on one device, as a fraction of the whole op's (1 where every device computes everything).
        reads: per operand its tiling once resharded.
        moves: the operand reshards; their collectives are the first of `collectives`, in order.
        inner: collectives inside the bodies of a loop or branch.
        of_result: per collective of its own the result that it is of; empty if all are of the first.
    """

    collectives: tuple[Collective, ...]
    share: float
    reads: tuple[Tiling, ...]
    moves: tuple[Move, ...] = ()
    inner: tuple[Collective, ...] = ()
    of_result: tuple[int, ...] = ()


@dataclass(frozen=True)
class Attention:
    """An attention kernel, in place of a contraction and the softmax before it.

    Attributes:
        logits: the softmax's operand.
        turns: how often it reads keys and values: once per block of rows, or just once.
        product: the product of queries and keys that the kernel covers, if it does; it then reads no logits.
    """

    logits: Value
    turns: int = 1
    product: int | None = None


@dataclass(frozen=True)
class Partitioned:
    """A partitioned program.

    Attributes:
        runs: one per op, in program order.
        copies: collectives of annotated copies (reshards from a value to its annotation).
        copied: copy number -> its reshard; absent where the value already has the sharding.
        joined: scatter -> the later one that it is merged into (`ops/chained.py`).
        uneven: results that are gathered because their sharding is uneven -> the collectives.
        unsummed: values that stay partial sums of full size until a later reduce-scatter; slices move behind it.
        attentions: contractions that become attention kernels -> the kernel (`ops/attention.py`).
        unread: ops whose results only these kernels would use: never computed.
    """

    runs: tuple[OpRun, ...] = field(repr=False)
    copies: tuple[Collective, ...] = field(repr=False)
    copied: Mapping[int, Move] = field(repr=False, default_factory=dict)
    joined: Mapping[int, int] = field(repr=False, default_factory=dict)
    uneven: Mapping[Value, Sequence[Collective]] = field(repr=False, default_factory=dict)
    unsummed: Set[Value] = field(repr=False, default_factory=frozenset)
    attentions: Mapping[int, Attention] = field(repr=False, default_factory=dict)
    unread: Set[int] = field(repr=False, default_factory=frozenset)

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """All of them, in program order."""
        return (*(one for run in self.runs for one in (*run.collectives, *run.inner)), *self.copies)
