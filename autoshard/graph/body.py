"""Bodies of loops and branches: subgraphs, held by the op that runs them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cached_property

from autoshard.graph.ops import Graph


@dataclass(frozen=True, eq=False)
class Body:
    """A region as a graph: its arguments are the op's operands, its outputs the op's results.

    Output k of a loop's body is its argument k of the next iteration (`Output.updates`), in the same sharding. Bodies
    are equal when their ops are.
    """

    graph: Graph = field(repr=False)

    @cached_property
    def key(self) -> tuple[object, ...]:
        """The parts of the body that a rule or a cost depends on."""
        ops = tuple((op.kind, op.operands, op.results, tuple(op.attrs.items())) for op in self.graph.ops)
        ties = tuple(output.updates for output in self.graph.program.outputs)
        return (ops, self.graph.outputs, ties)

    @cached_property
    def _hash(self) -> int:
        return hash(self.key)

    def __hash__(self) -> int:
        """By the key, cached."""
        return self._hash

    def __eq__(self, other: object) -> bool:
        """Whether their ops are equal."""
        return isinstance(other, Body) and (self is other or (hash(self) == hash(other) and self.key == other.key))

    @cached_property
    def _digest(self) -> str:
        return hashlib.sha256(repr(self.key).encode()).hexdigest()[:16]

    def __repr__(self) -> str:
        """Number of ops, and a digest."""
        return f"<body of {len(self.graph.ops)} ops, {self._digest}>"
