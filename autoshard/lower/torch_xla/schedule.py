"""A plan indexed by aten op: what lowering does at each op of a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from autoshard.dtypes import FLOATS
from autoshard.mesh import Mesh, Spec
from autoshard.plans.value import ROLES, Copy, OpSignature, Plan, PlanError, Producer, TensorPlan
from autoshard.program import MicroSteps, ValueRead

Shared = tuple[Producer, tuple[Spec, ...]]
"""An annotated copy of a value, with the specs of its hops and its own last; all consumers of this copy read the same
one."""


@dataclass(frozen=True)
class Schedule:
    """A plan by aten op.

    Attributes:
        mesh: of the specs.
        ops: the aten sequence, as planned.
        arguments: name -> spec of parameters, buffers, inputs and optimizer state.
        inputs: names of the step's inputs.
        pins: (k, j) -> spec of output j of op k.
        reads: k -> {position among the tensors that op k reads -> the copy it reads there instead}.
        values: the values that the step read on the host during capture.
        last_read: copy, or hop -> the last op that reads it; it is made at its first reader and released at its last.
        micro_steps: of a step of several micro-batches.
    """

    mesh: Mesh
    ops: tuple[OpSignature, ...]
    arguments: Mapping[str, TensorPlan]
    inputs: frozenset[str]
    pins: Mapping[tuple[int, int], Spec]
    reads: Mapping[int, Mapping[int, Shared]]
    last_read: Mapping[Shared, int] = field(default_factory=dict)
    values: tuple[ValueRead, ...] = ()
    micro_steps: MicroSteps | None = None

    @cached_property
    def by_reads(self) -> Mapping[tuple[str, tuple[Producer, ...]], tuple[int, ...]]:
        """(name, producers read as in `same`, None for inputs) -> the ops that match, in order."""
        found: dict[tuple[str, tuple[Producer, ...]], list[int]] = {}
        for index, op in enumerate(self.ops):
            reads = tuple(None if self.is_input(p) else self.same(p) for p in op.inputs)
            found.setdefault((op.name, reads), []).append(index)
        return {key: tuple(indices) for key, indices in found.items()}

    @cached_property
    def _first(self) -> Sequence[int]:
        """Op -> the first that does the same on the same values."""
        known: dict[OpSignature, int] = {}
        first: list[int] = []
        for index, op in enumerate(self.ops):
            reads = tuple((first[p[0]], p[1]) if isinstance(p, tuple) and p[0] < index else p for p in op.inputs)
            first.append(known.setdefault(replace(op, inputs=reads), index))
        return first

    def same(self, producer: Producer) -> Producer:
        """The first producer of an equal value: which of two runs first may differ from process to process."""
        if isinstance(producer, tuple) and producer[0] >= 0:
            return self._first[producer[0]], producer[1]
        return producer

    def read(self, index: int, place: int) -> Spec:
        """The spec in which op `index` reads its tensor number `place`: of its copy, or of the value."""
        shared = self.reads.get(index, {}).get(place)
        if shared is not None:
            return shared[1][-1]
        producer = self.ops[index].inputs[place]
        while isinstance(producer, tuple) and producer not in self.pins:
            made = self.ops[producer[0]]
            if made.name.split(".")[1] not in UNCHANGED:
                raise PlanError(f"op {index} reads {describe(producer)}, which the plan does not annotate")
            producer = made.inputs[-1]
        if isinstance(producer, tuple):
            return self.pins[producer]
        return () if producer is None else self.arguments[producer].spec

    def is_input(self, producer: Producer) -> bool:
        """Whether a value is an input of the step, or a host value's stand-in for one."""
        return isinstance(producer, str) and (producer in self.inputs or producer not in self.arguments)

    @classmethod
    def of(cls, plan: Plan) -> Schedule:
        """The schedule of a plan.

        Raises:
            PlanError: an annotation for an op that the plan's program lacks, or for a consumer that does not read the
                value.
        """
        ops = plan.program.ops
        arguments = {name: each for section in ROLES.values() for name, each in getattr(plan, section).items()}
        pins: dict[tuple[int, int], Spec] = {}
        reads: dict[int, dict[int, Shared]] = {}
        last_read: dict[Shared, int] = {}
        for value in plan.activations:
            key = value.key
            if key.index >= len(ops) or ops[key.index].name != key.name:
                raise PlanError(f"the plan annotates op {key.index} ({key.name}), which is no op of its program")
            if value.spec is not None and value.dtype in FLOATS:
                pins[key.index, key.output] = value.spec
        types = {name: f"{each.dtype}[{','.join(map(str, each.shape))}]" for name, each in arguments.items()}
        for producer, dtype, copy in _copies(plan):
            if dtype not in FLOATS:
                continue
            positions = _positions(ops, types, producer, copy.consumer)
            if not positions:
                raise PlanError(f"op {copy.consumer} is to read a copy of {describe(producer)}, but does not read it")
            shared = (producer, (*copy.hops, copy.spec))
            for each in beginnings(shared):
                last_read[each] = max(copy.consumer, last_read.get(each, -1))
            reads.setdefault(copy.consumer, {}).update(dict.fromkeys(positions, shared))
        program = plan.program
        given = plan.mesh, ops, arguments, frozenset(plan.inputs), pins, reads, last_read
        return cls(*given, program.reads, program.micro_steps)


def beginnings(shared: Shared) -> list[Shared]:
    """The copies that a copy is made from: its hops, then itself."""
    producer, chain = shared
    return [(producer, chain[:end]) for end in range(1, len(chain) + 1)]


def describe(producer: Producer) -> str:
    """`output 0 of op 12`, `transformer.wte.weight`, or `a constant`."""
    if producer is None:
        return "a constant"
    return producer if isinstance(producer, str) else f"output {producer[1]} of op {producer[0]}"


def _copies(plan: Plan) -> Iterator[tuple[Producer, str, Copy]]:
    for section in ROLES.values():
        for name, tensor in getattr(plan, section).items():
            for copy in tensor.copies:
                yield name, tensor.dtype, copy
    for value in plan.activations:
        for copy in value.copies:
            yield (value.key.index, value.key.output), value.dtype, copy


def _positions(ops: tuple[OpSignature, ...], types: Mapping[str, str], producer: Producer, consumer: int) -> list[int]:
    """Positions among op `consumer`'s tensors that read the value, directly or through ops without an XLA op."""
    if consumer >= len(ops):
        return []
    inputs = ops[consumer].inputs

    def passed_on(read: Producer, by: frozenset[str] | None) -> bool:
        """Whether every op from the value to `read`, of those named or of any, may return its operand unchanged."""
        while read != producer:
            op = _of_one(ops, read)
            if op is None or (by is not None and op.name.split(".")[1] not in by):
                return False
            before = op.inputs[-1]
            given = types.get(before) if isinstance(before, str) else before and ops[before[0]].outputs[before[1]]
            if given not in (None, op.outputs[0]):
                return False
            read = before
        return True

    for meant in (lambda read: read == producer, lambda read: passed_on(read, UNCHANGED)):
        if found := [i for i, read in enumerate(inputs) if meant(read)]:
            return found
    # In the graph the op reads the value itself: ops between (a product by 1) are dropped and kept the type. Where only
    # one tensor can be meant, it is that.
    found = [i for i, read in enumerate(inputs) if passed_on(read, None)]
    return found if len({inputs[i] for i in found}) == 1 else []


UNCHANGED = frozenset(
    {"_reshape_alias_copy", "_to_copy", "_unsafe_view", "alias", "alias_copy", "clone", "contiguous", "copy", "detach"}
    | {"detach_copy", "expand", "expand_copy", "lift_fresh", "lift_fresh_copy", "reshape", "slice", "slice_copy"}
    | {"squeeze_copy", "view", "view_copy", "aot_mark_sharding", "dynamo_mark_sharding"}
)
"""Aten ops that return their operand if it has the type of their result."""


def _of_one(ops: tuple[OpSignature, ...], read: Producer) -> OpSignature | None:
    """The op that made `read`, if it reads one tensor and returns one, or copies one over another."""
    if not isinstance(read, tuple):
        return None
    op = ops[read[0]]
    one = op.name == "aten.copy.default" or (len(op.inputs) == 1 and len(op.outputs) == 1)
    return op if one else None
