"""What the partitioner emits: for one op, before and after it is known what was made earlier, and for a program."""

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
"""Names what a move makes of a value; the last part is how that is split."""


@dataclass(frozen=True)
class Ring:
    """Names what goes round a ring of `parts` devices within the groups `outer`, beside what is gathered there."""

    outer: Dim
    parts: int


@dataclass(frozen=True)
class Emission:
    """The collectives of one op, before it is known which of its reshards were made earlier.

    Attributes:
        moves: of each reshard (operand, (axes that group the devices, source, where communication ends), collectives).
        own: the op's own collectives.
        order: the subaxes of the last sum among them, in the order of its devices.
        inner: of the bodies of a loop or branch.
        rounds: (place among `own`, number) of the permutes in which a loop sums partial results, which are one step.
    """

    moves: tuple[tuple[int, MoveKey, tuple[Step, ...]], ...]
    own: tuple[Step, ...]
    share: float
    reads: tuple[Tiling, ...]
    overcounted: bool = False
    order: Dim = ()
    inner: tuple[Collective, ...] = ()
    rounds: tuple[int, int] | None = None


@dataclass(frozen=True)
class Move:
    """A reshard of what an op reads, or of a value into an annotated copy.

    Attributes:
        place: which operand.
        key: names the array that comes out; moves with equal keys give one array, made by the first of them.
        tiling: how that array is split.
        collectives: what the reshard takes; none where it is a slice, or where it was made before.
    """

    place: int
    key: Hashable
    tiling: Tiling
    collectives: tuple[Collective, ...]


@dataclass(frozen=True)
class OpRun:
    """How one op runs.

    Attributes:
        collectives: what is emitted for it: reshards of its operands, sums of partial results.
        share: its FLOPs on one device, as a part of the whole op's (1 where every device computes everything).
        reads: per operand the tiling that it reads once resharded.
        moves: the operands that are resharded first; their collectives are the first of `collectives`, in order.
        overcounted: whether XLA sums over devices that hold the same terms: its numbers are wrong.
        inner: what is emitted inside the bodies of a loop or branch.
    """

    collectives: tuple[Collective, ...]
    share: float
    reads: tuple[Tiling, ...]
    moves: tuple[Move, ...] = ()
    overcounted: bool = False
    inner: tuple[Collective, ...] = ()


@dataclass(frozen=True)
class Attention:
    """What a product with a softmax before it becomes.

    Attributes:
        logits: what the softmax is of.
        turns: how often keys and values are read: once, or for each block of rows if they are several blocks.
        product: the op that makes them of queries and keys, if that is part of the kernel; then they are not read.
    """

    logits: Value
    turns: int = 1
    product: int | None = None


@dataclass(frozen=True)
class Partitioned:
    """A partitioned program.

    Attributes:
        runs: one per op, in program order.
        copies: collectives of annotated copies (a reshard from the value to its annotation).
        copied: copy number -> how the copy is made; absent where it is the value itself.
        joined: op -> the later one that it is part of (`ops/chained.py`).
        uneven: results that are gathered whole because their parts are not even, and by what.
        unsummed: values that stay whole terms of a sum until that is scattered: a slice of one comes after that.
        attentions: products that become one kernel with the softmax before them -> what of (`ops/attention.py`).
        unread: ops that nothing is left to read for these kernels.
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
