"""Sharding propagation: from annotations to a sharding of every value.

This follows `ShardingPropagation` of XLA (xla/service/sharding_propagation.cc, described in the GSPMD paper,
arXiv:2105.04663, section 3.5): shardings flow from operands and from users until nothing improves, first only through
elementwise ops and the like, then also through contractions and reductions, then out of broadcasts, then into them. A
sharding replaces another only where it refines it; partial shardings merge.

A pinned value is a `custom_call @Sharding`: its annotation cannot change, and the op before it runs under the same
sharding (XLA copies the annotation to an operand that has none). Arguments keep theirs. A result that updates an
argument takes that argument's; on GPU so does the op that produces it unless annotated itself (the compiler simplifies
first, and removes the reshape that carries jax's annotation of results). Everything else is replicated.

The graph has one op per HLO instruction of the CPU compiler; TPU and GPU compilers simplify first. Of the TPU's passes
`simplified` follows two: equal ops become one (`HloCSE`), so all parameter updates of one shape share the broadcast of
a learning rate, and every user gets its own copy of an expression of constants and iotas (`HloConstantSplitter` with
split expressions).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from autoshard.cost.machine.targets import CAPABILITIES, Target
from autoshard.cost.partitioner.passes.merge import COMMUTES, EXPRESSIONS, MERGED
from autoshard.cost.partitioner.passes.simplify import fold, simplified
from autoshard.cost.partitioner.tiling import Subaxes, Tiling
from autoshard.cost.partitioner.top_k import sorts_parts, top_k_sorts
from autoshard.cost.partitioner.transfer import FORWARD_LEVEL, PASS_THROUGH, Transfers
from autoshard.graph.annotations import Annotations
from autoshard.graph.groups import ELEMENTWISE
from autoshard.graph.memo import Latest
from autoshard.graph.ops import Graph, Op, Value
from autoshard.graph.orders import post_order
from autoshard.mesh import Mesh, Spec
from autoshard.program import TensorType

_FROM_FIRST = frozenset({"power", "reverse", "slice", "pad", "shift_left", "shift_right_arithmetic"})
"""Kinds whose sharding follows only their first operand at the first level (`PickRepresentativeOperand`)."""

_LEVELS = (0, 1, 2, 3, 3)
"""Aggressiveness of each round; XLA runs the last one twice."""


@dataclass(frozen=True)
class Copy:
    """An annotated copy of a value: a pin (`source` is the value), or a consumer's own copy.

    Attributes:
        value: what it copies.
        spec: its annotation.
        source: the copy it is made from, or None for the value itself.
        result: whether it is a result of the program; only on GPU does its annotation reach the producer.
    """

    value: Value
    spec: Spec
    source: int | None = None
    result: bool = False


@dataclass(frozen=True)
class Shardings:
    """A sharding per value.

    Attributes:
        subaxes: what the numbers in `made` and `copied` stand for.
        made: value -> the tiling under which its op produces it.
        copies: the annotated copies, in order.
        copied: their tilings.
        reads: (consumer op, value) -> the copy it reads; other consumers read the value as produced.
        own: (consumer op, value) -> the tiling of this consumer's copy of a constant expression.
    """

    subaxes: Subaxes = field(repr=False)
    made: dict[Value, Tiling] = field(repr=False)
    copies: tuple[Copy, ...] = field(repr=False)
    copied: tuple[Tiling, ...] = field(repr=False)
    reads: dict[tuple[int, Value], int] = field(repr=False)
    pins: dict[Value, int] = field(repr=False)
    own: dict[tuple[int, Value], Tiling] = field(default_factory=dict, repr=False)

    def copy_read(self, consumer: int | None, value: Value) -> int | None:
        """The number of the copy of `value` that an op reads (`None` as consumer: the program's result)."""
        if consumer is not None:
            copy = self.reads.get((consumer, value))
            if copy is not None:
                return copy
        return self.pins.get(value)

    def read(self, consumer: int | None, value: Value) -> Tiling:
        """The tiling in which an op finds `value`, before the partitioner reshards it."""
        copy = self.copy_read(consumer, value)
        if copy is not None:
            return self.copied[copy]
        own = None if consumer is None else self.own.get((consumer, value))
        return self.made[value] if own is None else own

    @cached_property
    def specs(self) -> dict[Value, Spec]:
        """Per value the spec that its users find: the pinned one, else that of its producer."""
        return {value: self.subaxes.spec(self.read(None, value)) for value in self.made}


def propagate(graph: Graph, annotations: Annotations, mesh: Mesh, target: Target = "cpu") -> Shardings:
    """The sharding of every value of `graph` under `annotations` (see the module's docstring).

    Args:
        target: family of the compiler. TPU's simplifies the program first; GPU's turns sorts for a top-k into custom
            calls that it cannot propagate through.
    """
    return _propagation(graph, annotations, mesh, target).shardings


_LATEST = Latest()


def _propagation(graph: Graph, annotations: Annotations, mesh: Mesh, target: Target) -> _Propagation:
    """Cached: one plan asks for equal values, for wrong results and for the cost in turn."""
    graph = simplified(graph, target)
    key = annotations, mesh, target
    return _LATEST.of(graph, key, lambda: _Propagation(graph, annotations, mesh, target))


def equal_values(graph: Graph, annotations: Annotations, mesh: Mesh) -> dict[Value, Value]:
    """Value -> the earlier equal value into which a TPU's compiler merges it.

    Constant expressions are left out: each user has its own copy.
    """
    run = _propagation(graph, annotations, mesh, "tpu")
    return {value: first for value, first in run.merged.items() if run.first[first.op] not in run.expressions}


class _Propagation:
    """Nodes are the results of ops (numbered op by op), then annotated copies, then one user's constant expressions."""

    def __init__(self, graph: Graph, annotations: Annotations, mesh: Mesh, target: Target = "cpu") -> None:
        self.folded = fold(graph)
        compiler = CAPABILITIES[target]
        self.opaque = top_k_sorts(graph) if compiler.calls_top_k else {}
        self.graph: Graph = weakref.proxy(graph)  # a cache entry must not keep its graph alive
        self.merges = compiler.merges_equal_ops
        self.results_first = compiler.shards_results_first
        self.subaxes = Subaxes(mesh)
        self.transfers = Transfers(self.graph, self.subaxes)
        self.first = [0] * (len(graph.ops) + 1)  # op -> its first node
        for op in graph.ops:
            self.first[op.id + 1] = self.first[op.id] + len(op.results)
        self.value_count = self.first[-1]
        self.copies: list[Copy] = []
        self.reads: dict[tuple[int, Value], int] = {}
        self.pins: dict[Value, int] = {}
        self._add_copies(annotations)
        self.constants: dict[tuple[str, TensorType], int] = {}
        self.constant: set[int] = set()
        self.op_of: list[Op | None] = [op for op in graph.ops for _ in op.results]
        self.op_of += [None] * len(self.copies)
        self.shape: list[tuple[int, ...]] = [result.shape for op in graph.ops for result in op.results]
        self.shape += [graph.type_of(copy.value).shape for copy in self.copies]
        self.operands: list[tuple[int, ...]] = []
        self.merged: dict[Value, Value] = {}
        self.expressions: set[int] = set()  # expressions of constants and iotas only
        self.own: dict[tuple[int, Value], int] = {}
        self.first_own: dict[int, int] = {}
        self._wire()
        total = len(self.operands)
        self.order = self._post_order()
        self.users: list[list[int]] = [[] for _ in range(total)]
        for node in sorted(self.order):
            for operand in dict.fromkeys(self.operands[node]):
                self.users[operand].append(node)
        self.single = [self._single_user(node) for node in range(total)]
        self.tiling: list[Tiling | None] = [None] * total
        self.fixed = bytearray(total)
        self._seed(annotations)

    # ---- the program as XLA has it -----------------------------------------------------------------------------

    def _add_copies(self, annotations: Annotations) -> None:
        argument = set(self.graph.arguments)
        for value, spec in annotations.pins.items():
            if value.op not in argument:
                self.pins[value] = len(self.copies)
                self.copies.append(Copy(value, spec))
        known: dict[tuple[Value, tuple[Spec, ...]], int] = {}
        for (value, aten), spec in annotations.copies.items():
            readers = [op.id for op in self.graph.readers(value) if op.reader(value) == aten]
            if not readers:
                continue
            chain = annotations.chain(value, spec)
            source = self.pins.get(value)
            for end in range(1, len(chain) + 1):
                if (value, chain[:end]) not in known:
                    known[value, chain[:end]] = len(self.copies)
                    self.copies.append(Copy(value, chain[end - 1], source))
                source = known[value, chain[:end]]
            for reader in readers:
                self.reads[reader, value] = known[value, chain]
        for value, output in zip(self.graph.outputs, self.graph.program.outputs, strict=True):
            if output.updates is not None:
                updated = Value(self.graph.arguments[output.updates])
                whole = ((),) * len(self.graph.type_of(updated).shape)
                spec = annotations.pins.get(updated, whole)
                self.copies.append(Copy(value, spec, self.pins.get(value), result=True))

    def _wire(self) -> None:
        equal: dict[Hashable, int] = {}
        for op in self.graph.ops:
            nodes = [self._read(op.id, value) for value in op.operands]
            if len(op.results) == 1 and Value(op.id) in self.folded.splat:
                nodes = []
            self.operands.extend([tuple(nodes)] * len(op.results))
            if self.merges:
                self._merge(op, equal)
        for made in self.copies:
            source = self._node(made.value) if made.source is None else self.value_count + made.source
            self.operands.append((source,))
        if self.merges:
            self._split_expressions()

    def _merge(self, op: Op, equal: dict[Hashable, int]) -> None:
        """Note the earlier op that is equal to this one, and whether it is a constant expression."""
        first = self.first[op.id]
        nodes = self.operands[first]
        if op.kind in ("constant", "iota") or (Value(op.id) in self.folded.splat and len(op.results) == 1):
            self.expressions.add(self._node(Value(op.id)))
        elif op.kind in EXPRESSIONS and nodes and self.expressions.issuperset(nodes):
            self.expressions.add(first)
        if op.kind not in MERGED or self._node(Value(op.id)) != first or op.attrs.get("reducer") == "other":
            return
        key = (op.kind, op.results, tuple(op.attrs.items()), tuple(sorted(nodes)) if op.kind in COMMUTES else nodes)
        known = equal.setdefault(key, op.id)
        if known != op.id:
            self.merged[Value(op.id)] = Value(known)

    def _split_expressions(self) -> None:
        """Give every user outside of constant expressions its own copy of one."""
        for op in self.graph.ops:
            first = self.first[op.id]
            if first in self.expressions or self.expressions.isdisjoint(self.operands[first]):
                continue
            made: dict[int, int] = {}
            nodes = tuple(self._clone(node, made) for node in self.operands[first])
            for value, node, before in zip(op.operands, nodes, self.operands[first], strict=True):
                if node != before:
                    self.own[op.id, value] = node
                    self.first_own.setdefault(before, node)
            self.operands[first : self.first[op.id + 1]] = [nodes] * len(op.results)
        for copy in range(self.value_count, self.value_count + len(self.copies)):
            (source,) = self.operands[copy]
            self.operands[copy] = (self._clone(source, {}),)
            self.first_own.setdefault(source, self.operands[copy][0])

    def _clone(self, node: int, made: dict[int, int]) -> int:
        """Copy a constant expression with its operands; other nodes stay. `made`: the copies so far."""
        if node not in self.expressions or not self.shape[node]:
            return node
        if node not in made:
            nodes = tuple(self._clone(operand, made) for operand in self.operands[node])
            made[node] = len(self.operands)
            self.operands.append(nodes)
            self.op_of.append(self.op_of[node])
            self.shape.append(self.shape[node])
            if node in self.constant:
                self.constant.add(made[node])
        return made[node]

    def _read(self, op: int, value: Value) -> int:
        """The node that an op reads `value` from: its own copy, the pin, or the value (or an equal one)."""
        copy = self.reads.get((op, value), self.pins.get(value))
        if copy is not None:
            return self.value_count + copy
        if value in self.folded.same:
            return self._read(value.op, self.folded.same[value])
        return self._node(value)

    def _node(self, value: Value) -> int:
        """The node of a value as its op produces it; equal constants share one."""
        if value in self.folded.same:
            return self._read(value.op, self.folded.same[value])
        value = self.merged.get(value, value)
        node = self.first[value.op] + value.result
        number = self.folded.splat.get(value)
        if number is not None:
            node = self.constants.setdefault((repr(number), self.graph.type_of(value)), node)
            self.constant.add(node)
        return node

    def _single_user(self, node: int) -> bool:
        users = self.users[node]
        if len(users) < 2:
            return len(users) == 1
        if self.op_of[node] is None:
            return False
        owners = {(owner.id if (owner := self.op_of[user]) is not None else -user) for user in users}
        return len(owners) == 1

    def _results(self) -> list[int]:
        nodes = []
        updates = (self.value_count + i for i, copy in enumerate(self.copies) if copy.result)
        for value, output in zip(self.graph.outputs, self.graph.program.outputs, strict=True):
            if output.updates is not None:
                nodes.append(next(updates))
                continue
            pin = self.pins.get(value)
            nodes.append(self._node(value) if pin is None else self.value_count + pin)
        return nodes

    def _of_one_op(self, node: int) -> Sequence[int]:
        """The node, and the other results of its op."""
        op = self.op_of[node]
        if op is None or node >= self.value_count:
            return (node,)
        return range(self.first[op.id], self.first[op.id + 1])

    def _post_order(self) -> list[int]:
        """Operands before users, depth first from the results, as `MakeInstructionPostOrder`.

        All results of an op come together, used or not: in XLA they are one tuple.
        """
        order = post_order(self._results(), self.operands.__getitem__)
        return list(dict.fromkeys(each for node in order for each in self._of_one_op(node)))

    def _seed(self, annotations: Annotations) -> None:
        for argument in self.graph.arguments:
            for result in range(len(self.graph.ops[argument].results)):
                spec = annotations.pins.get(Value(argument, result))
                node = self.first[argument] + result
                self.tiling[node] = None if spec is None else self.subaxes.tiling(spec)
                self.fixed[node] = 1
        for number, copy in enumerate(self.copies):
            node = self.value_count + number
            self.tiling[node] = self.subaxes.tiling(copy.spec)
            self.fixed[node] = 1
        results: list[int] = []
        pins: list[int] = []
        for node in reversed(self.order):
            if self.op_of[node] is None:
                (results if self.copies[node - self.value_count].result else pins).append(node)
        for node in [*results, *pins] if self.results_first else pins:
            (source,) = self.operands[node]
            if self.tiling[source] is None and not self.fixed[source]:
                self.tiling[source] = self.tiling[node]
                self.fixed[source] = 1

    # ---- the fixpoint ------------------------------------------------------------------------------------------

    @cached_property
    def shardings(self) -> Shardings:
        """Propagate the annotations until nothing improves."""
        for level in _LEVELS:
            self._run_level(level)
        self._split_calls()
        made = {}
        for op in self.graph.ops:
            for result, kind in enumerate(op.results):
                node = self._node(Value(op.id, result))
                tiling = self.tiling[self.first_own.get(node, node)]
                if tiling is None:
                    tiling = self._unread(op, result)
                made[Value(op.id, result)] = ((),) * len(kind.shape) if tiling is None else tiling
        end = self.value_count + len(self.copies)
        copied = tuple(tiling for tiling in self.tiling[self.value_count : end] if tiling is not None)
        own = {key: tiling for key, node in self.own.items() if (tiling := self.tiling[node]) is not None}
        return Shardings(self.subaxes, made, tuple(self.copies), copied, self.reads, self.pins, own)

    def _split_calls(self) -> None:
        """Let top-k calls run on each device's part, if all devices split the operand.

        `HandleCustomCallTopK`: it reshards the results afterwards. What has replicas is gathered before.
        """
        for number, k in self.opaque.items():
            first, op = self.first[number], self.graph.ops[number]
            part = self.tiling[self.operands[first][0]]
            if part is None or self.subaxes.tiles(part) != self.subaxes.devices:
                continue
            parts = self.subaxes.ways(part[op.attrs["dim"]])
            for node in range(first, self.first[number + 1]):
                if not self.fixed[node] and (parts == 1 or sorts_parts(op, k, parts)):
                    self.tiling[node] = part

    def _unread(self, op: Op, result: int) -> Tiling | None:
        """The sharding of a result without users: that of its op, which costs nothing."""
        first = self.first[op.id]
        if self.users[first + result]:
            return None
        if op.kind == "while":
            return self.tiling[self.operands[first][result]]
        others = range(first, self.first[op.id + 1])
        return next((t for n in others if self.shape[n] == self.shape[first + result] and (t := self.tiling[n])), None)

    def _run_level(self, level: int) -> None:
        fixed = self.fixed
        operands, users = self.operands, self.users
        done_forward, done_backward = bytearray(fixed), bytearray(fixed)
        results = self._results()

        def sweep(nodes: Iterable[int], done: bytearray, infer: Callable[[int, int], bool]) -> bool:
            changed = False
            for node in nodes:
                if not done[node]:
                    done[node] = 1
                    if infer(node, level):
                        changed = True
                        for operand in operands[node]:
                            done_backward[operand] = fixed[operand]
                        for user in users[node]:
                            done_forward[user] = fixed[user]
            return changed

        changed = True
        while changed:
            changed = sweep(self.order, done_forward, self._from_operands)
            if level == 0:
                self._replicate_results(results)
            changed |= sweep(reversed(self.order), done_backward, self._from_users)

    def _replicate_results(self, results: Iterable[int]) -> None:
        """The tuple of results takes part in propagation; an element without a sharding becomes replicated."""
        for node in results:
            if self.tiling[node] is None:
                self.tiling[node] = ((),) * len(self.shape[node])

    def _improve(self, node: int, new: Tiling, level: int, aggressive: bool = False) -> bool:
        better = self.subaxes.improve(self.shape[node], self.tiling[node], new, level > 0, aggressive)
        if better is None:
            return False
        self.tiling[node] = better
        return True

    def _from_operands(self, node: int, level: int) -> bool:
        op = self.op_of[node]
        assert op is not None  # copies are fixed
        if node in self.constant or op.id in self.opaque:
            return False
        if level < _forward_level(op):
            return False
        if op.kind == "dot_general" and "outer" not in op.attrs:
            return self._dot_from_operands(node, op, level)
        if op.kind == "convolution":
            return self._convolution_from_operands(node, op, level)
        if op.kind in ("while", "optimization_barrier"):
            begun = self.tiling[self.operands[node][node - self.first[op.id]]]
            aggressive = op.kind != "while" and self.single[node]
            return begun is not None and self._improve(node, begun, level, aggressive)
        changed = False
        operands = self.operands[node]
        elementwise = op.kind in ELEMENTWISE
        if (elementwise and len(operands) > 1) or op.kind in ("concatenate", "sort"):
            if op.kind in _FROM_FIRST and level == 0:
                operands = operands[:1]
            if level == 0 or not elementwise:
                best = self._most_specific(operands, self.shape[node], op)
                if best is None or (op.kind == "concatenate" and level == 0 and not self._concatenates_early(node, op)):
                    return False
                return self._improve(node, best, level, self.single[node])
            for operand in operands:
                tiling = self.tiling[operand]
                if tiling is not None and len(tiling) == len(self.shape[node]):
                    changed |= self._improve(node, tiling, level)
            return changed
        aggressive = self.single[node] and op.kind not in ("gather", "scatter")
        places = range(len(operands))
        for place in reversed(places) if op.kind == "gather" else places:  # a gather asks its indices first
            tiling = self.tiling[operands[place]]
            if tiling is None:
                continue
            moved = self.transfers.forward(op, place, tiling, node - self.first[op.id])
            if moved is not None:
                changed |= self._improve(node, moved, level, aggressive)
        return changed

    def _most_specific(self, operands: Iterable[int], shape: tuple[int, ...], op: Op) -> Tiling | None:
        best: Tiling | None = None
        for operand in operands:
            tiling = self.tiling[operand]
            if tiling is None or len(tiling) != len(shape):
                continue
            if best is None or self.subaxes.tiles(tiling) > self.subaxes.tiles(best):
                best = tiling
        return best

    def _concatenates_early(self, node: int, op: Op) -> bool:
        """Whether a concatenation passes shardings at the first level: only of stacked parameters."""
        dim = op.attrs["dim"]
        for operand, value in zip(self.operands[node], op.operands, strict=True):
            tiling = self.tiling[operand]
            made_by = self.graph.ops[value.op]
            if made_by.kind != "reshape" or self.graph.ops[made_by.operands[0].op].kind != "argument":
                return False
            if tiling is None or not any(tiling) or tiling[dim]:
                return False
        return True

    def _convolution_from_operands(self, node: int, op: Op, level: int) -> bool:
        tilings = [self.tiling[operand] for operand in self.operands[node]]
        if not self.transfers.slides_over_parts(op, tilings):
            return self._dot_from_operands(node, op, level)
        moved = None if tilings[0] is None else self.transfers.slid_forward(op, tilings[0])
        return moved is not None and self._improve(node, moved, level)

    def _dot_from_operands(self, node: int, op: Op, level: int) -> bool:
        found: list[Tiling | None] = []
        for place in (0, 1):
            tiling = self.tiling[self.operands[node][place]]
            moved = None if tiling is None else self.transfers.forward(op, place, tiling)
            old = self.tiling[node]
            found.append(
                None if moved is None else self.subaxes.improve(self.shape[node], old, moved, level > 0, False)
            )
        one, other = found
        if one is None or other is None:
            better = other if one is None else one
            if better is None:
                return False
            self.tiling[node] = better
            return True
        if not self._first_goes_first(node, op, one, other):
            one, other = other, one
        self.tiling[node] = one
        self._improve(node, other, level)
        return True

    def _first_goes_first(self, node: int, op: Op, one: Tiling, other: Tiling) -> bool:
        """Whether a contraction prefers its left operand's sharding: that its user needs, else the larger one's."""
        ahead = self._lookahead(node)
        if ahead is not None:
            fits_one = self.subaxes.refines(self.shape[node], ahead, one)
            fits_other = self.subaxes.refines(self.shape[node], ahead, other)
            if fits_one != fits_other:
                return fits_one
        return self.transfers.operand_bytes(op, 0) >= self.transfers.operand_bytes(op, 1)

    def _lookahead(self, node: int) -> Tiling | None:
        """The sharding that a chain of single users asks of a value (`LookaheadUserSharding`)."""
        chain = [node]
        while True:
            users = self.users[chain[-1]]
            if len(users) != 1:
                return None
            chain.append(users[0])
            if self.tiling[users[0]] is not None:
                break
        tiling = self.tiling[chain[-1]]
        for user, current in zip(reversed(chain[1:]), reversed(chain[:-1]), strict=True):
            assert tiling is not None
            tiling = self._from_user(current, user, tiling, 4)
            if tiling is None:
                return None
        return tiling

    def _from_user(self, node: int, user: int, tiling: Tiling, level: int) -> Tiling | None:
        """The sharding that `user`, sharded by `tiling`, asks of its operand `node`."""
        op = self.op_of[user]
        if op is None:
            return tiling
        operands = self.operands[user]
        if op.kind in ("while", "sort", "optimization_barrier"):  # result k is operand k, iterated, sorted or as it is
            place = user - self.first[op.id]
            return tiling if operands[place] == node else None
        place, result = operands.index(node), user - self.first[op.id] if user < self.value_count else 0
        tilings = [self.tiling[operand] for operand in operands]
        return self.transfers.backward(op, place, tiling, tilings, level, result)

    def _from_users(self, node: int, level: int) -> bool:
        op = self.op_of[node]
        if (
            op is not None
            and level < 2
            and (op.kind == "broadcast_in_dim" or (node in self.constant and op.results[0].shape))
        ):
            return False
        if op is not None and op.kind not in PASS_THROUGH and op.kind not in ELEMENTWISE:
            return False
        if op is not None and op.id in self.opaque:
            return False
        changed = False
        for user in self.users[node]:
            tiling = self.tiling[user]
            if tiling is None:
                continue
            used_by = self.op_of[user]
            if used_by is not None and level < min(2, _forward_level(used_by)):
                continue
            asked = self._from_user(node, user, tiling, level)
            if asked is not None:
                changed |= self._improve(node, asked, level)
        return changed


def _forward_level(op: Op) -> int:
    """The level of aggressiveness from which a result takes its operands' shardings."""
    return FORWARD_LEVEL.get("broadcast_in_dim" if "outer" in op.attrs else op.kind, 1)
