"""Fusion groups: the ops that XLA would run as one kernel, fixed before solving.

The solver decides a group as one: there is no reshard inside it, and only values at its boundary are materialised.
Groups end where a strategy may want another sharding (a contraction, a gather, a merge of dims, a gradient), at the
next micro-step, and before a sum of reductions: what they reduce are dims of their own, of which an axis splits one.

An op joins the group of its first user if no other user could come between the two, which keeps the graph of groups
acyclic: ids are in program order, and a user whose id is beyond the group's last op cannot lead back to it.

The operands of an `optimization_barrier` only share their time: each is a group of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from autoshard.graph.memo import per_graph
from autoshard.graph.ops import Graph, Op, Value

ELEMENTWISE = frozenset(
    """abs add and atan2 cbrt ceil clamp compare complex convert cosine divide exponential exponential_minus_one floor
    imag is_finite log log_plus_one logistic maximum minimum multiply negate not or popcnt power real remainder
    round_nearest_afz round_nearest_even rsqrt select shift_left shift_right_arithmetic shift_right_logical sign sine
    sqrt subtract tan tanh xor erf erf_inv acos asin atan cosh sinh acosh asinh atanh digamma lgamma reduce_precision
    bitcast_convert count_leading_zeros bessel_i1e conj erfc is_inf is_neg_inf is_pos_inf next_after polygamma square
    zeta""".split()  # noqa: SIM905
)
"""Elementwise kinds, chlo's among them."""

FUSABLE = ELEMENTWISE | {"broadcast_in_dim", "transpose", "reduce", "reverse"}
"""Kinds that fuse with their neighbours."""

BARRIER = "optimization_barrier"
_FREE_SOURCES = frozenset({"constant", "iota", "partition_id", "replica_id"})
_FREE_CARRIERS = ELEMENTWISE | {"broadcast_in_dim", "reshape", "transpose", "slice", "pad", "concatenate"}


@dataclass(frozen=True)
class Group:
    """Ops that run as one kernel.

    Attributes:
        id: its index in `Groups.groups`, which is in topological order.
        ops: op ids, in program order.
        inputs: values produced outside, arguments included, free values left out; in order of first use.
        outputs: values with users outside, and results of the program; in program order.
        operand_number: of a barrier, the one operand and result that the group is about.
    """

    id: int
    ops: tuple[int, ...]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    operand_number: int | None = None

    def operands(self, op: Op) -> tuple[Value, ...]:
        """The operands of one of its ops that belong to the group."""
        return op.operands if self.operand_number is None else (op.operands[self.operand_number],)

    def results(self, op: Op) -> tuple[Value, ...]:
        """The results of one of its ops that belong to the group."""
        made = range(len(op.results)) if self.operand_number is None else [self.operand_number]
        return tuple(Value(op.id, result) for result in made)

    def readers(self, graph: Graph, value: Value) -> list[Op]:
        """The users of a value inside it, in program order."""
        found: Sequence[Op] = graph.readers(value)
        if len(found) > len(self.ops):
            found = [graph.ops[number] for number in self.ops]
        return [op for op in found if op.id in self._members and value in self.operands(op)]

    @cached_property
    def _members(self) -> frozenset[int]:
        return frozenset(self.ops)

    def made(self, graph: Graph) -> list[Value]:
        """All values that it produces, in program order."""
        return [value for op in self.ops for value in self.results(graph.ops[op])]


@dataclass(frozen=True)
class Groups:
    """All groups of a graph.

    Attributes:
        groups: in topological order.
        of: op id -> group id; arguments, free ops and barriers have none.
        barrier_results: result of a barrier -> group id; one without users has none.
        free: ops that depend on constants and scalars only: every device computes the shard it needs.
    """

    groups: tuple[Group, ...]
    of: Mapping[int, int]
    barrier_results: Mapping[Value, int]
    free: frozenset[int]

    def maker(self, value: Value) -> int | None:
        """The group that produces a value; None of an argument, a free one, or a barrier's result without users."""
        return self.barrier_results.get(value, self.of.get(value.op))


@per_graph
def free_ops(graph: Graph) -> frozenset[int]:
    """Ops that depend on constants, iotas and scalar arguments only, and so cost nothing in any sharding."""
    free: set[int] = set()
    for op in graph.ops:
        scalar_argument = op.kind == "argument" and not op.results[0].shape
        carries = op.kind in _FREE_CARRIERS and all(value.op in free for value in op.operands)
        if op.kind in _FREE_SOURCES or scalar_argument or carries:
            free.add(op.id)
    return frozenset(free)


@per_graph
def fusion_groups(graph: Graph) -> Groups:
    """Partition the ops of `graph` that are neither arguments nor free."""
    free, sums = free_ops(graph), _sums(graph)
    updates = [_updates(op, graph) for op in graph.ops]
    root: dict[int, int] = {}  # op -> the last op of its group
    for op in reversed(graph.ops):
        if op.kind == "argument" or op.id in free:
            continue
        root[op.id] = op.id
        readers = list(graph.nx.adj[op.id])
        if not readers or not _fuses(op, graph):
            continue
        if op.kind == "reduce" and not op.results[0].shape:
            continue  # else the sum of two losses joins what may be split differently
        candidate = root[readers[0]]
        if updates[candidate] and not updates[op.id]:
            continue
        summed = op.id in sums and readers[0] in sums and graph.ops[readers[0]].kind == "add"
        if op.kind != "add" and (summed or graph.runs(candidate) != graph.runs(op.id)):
            continue
        if _fuses(graph.ops[candidate], graph) and all(
            root[reader] == candidate or reader > candidate for reader in readers
        ):
            root[op.id] = candidate
    members: dict[int, list[int]] = {}
    for op in graph.ops:
        if op.id in root:
            members.setdefault(root[op.id], []).append(op.id)
    of: dict[int, int] = {}
    barrier_results: dict[Value, int] = {}
    groups: list[Group] = []
    for last in sorted(members):
        index = len(groups)
        if graph.ops[last].kind == BARRIER:
            for number, operand in enumerate(graph.ops[last].operands):
                passed = Value(last, number)
                if graph.is_read(passed):
                    barrier_results[passed] = len(groups)
                    inputs = () if operand.op in free else (operand,)
                    groups.append(Group(len(groups), (last,), inputs, (passed,), number))
            continue
        mine = set(members[last])
        of.update(dict.fromkeys(mine, index))
        reads: dict[Value, None] = {}
        outputs = []
        for member in members[last]:
            op = graph.ops[member]
            reads.update((value, None) for value in op.operands if value.op not in free and value.op not in mine)
            outputs += [
                value
                for value in (Value(member, result) for result in range(len(op.results)))
                if value in graph.returned or any(reader.id not in mine for reader in graph.readers(value))
            ]
        groups.append(Group(index, tuple(members[last]), tuple(reads), tuple(outputs)))
    return Groups(tuple(groups), of, barrier_results, free)


INDEXED = frozenset({"gather", "dynamic_slice", "slice"})
"""Kinds that read of their first operand only as much as they return."""


def is_one(graph: Graph, value: Value) -> bool:
    """Whether every element of a value is the constant 1."""
    op = graph.ops[value.op]
    while op.kind in ("broadcast_in_dim", "reshape", "convert"):
        op = graph.ops[op.operands[0].op]
    return op.kind == "constant" and op.attrs.get("value") == 1


def unscaled(graph: Graph, value: Value) -> list[Value]:
    """`value`, and the values it equals: operands of products with 1 (`alpha` of torch's add), and so on.

    Compilers drop such products before they look for sums.
    """
    found = [value]
    while (op := graph.ops[found[-1].op]).kind == "multiply":
        others = [operand for operand in op.operands if not is_one(graph, operand)]
        if len(others) != 1:
            break
        found.append(others[0])
    return found


def _sums(graph: Graph) -> frozenset[int]:
    """Reductions, what has their elements, and sums of such."""
    found: set[int] = set()
    for op in graph.ops:
        carries = op.kind in ("reshape", "convert", "transpose", "add")
        if op.kind == "reduce" or (carries and all(each.op in found for each in op.operands)):
            found.add(op.id)
    return frozenset(found)


def _updates(op: Op, graph: Graph) -> bool:
    """Whether an op is the optimizer's: gradients may be reduce-scattered before it."""
    return op.aten is not None and op.aten < len(graph.program.ops) and graph.program.ops[op.aten].phase == "optimizer"


def _fuses(op: Op, graph: Graph) -> bool:
    if op.kind == "reshape":
        source = graph.type_of(op.operands[0]).shape
        return [size for size in source if size != 1] == [size for size in op.results[0].shape if size != 1]
    return op.kind in FUSABLE
