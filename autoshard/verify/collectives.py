"""Reads the collectives of a compiled program: kinds, groups as mesh axes, bytes, trip counts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from autoshard.mesh import AxisGroup, Mesh
from autoshard.verify import slices
from autoshard.verify.compiled_collective import CompiledCollective
from autoshard.verify.hlo_text import (
    Computation,
    Instruction,
    Module,
    aten_index,
    group_axes,
    pair_axes,
    parse_hlo,
    replica_groups,
    source_target_pairs,
)
from autoshard.verify.partition_index import is_scattered, readers, tuple_index
from autoshard.verify.targets import Family

OPCODES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "ragged-all-to-all",
    "collective-broadcast",
)

Neighbours = Callable[[Module, Computation, Instruction], list[tuple[Computation, Instruction]]]

_LABEL_SEARCH = 64
"""Most instructions searched for a label before a collective goes without."""


def compiled_collectives(hlo: str | Module, mesh: Mesh, family: Family) -> list[CompiledCollective]:
    """The collectives of an optimized HLO module, in program order.

    Args:
        hlo: the text, or the parsed module.
        mesh: the plan's mesh; partition i of the module is its device i, row-major. For one of several TPU slices its
            device kind needs that topology; see `slices.py`.
        family: of the compiler. On `cpu`, which has no reduce-scatter and no bf16, an all-reduce of which every device
            keeps a slice counts as a reduce-scatter, and a collective of f32 values converted from bf16 counts half.

    Raises:
        ValueError: when the module is partitioned over another number of devices than the mesh has.
    """
    module = parse_hlo(hlo) if isinstance(hlo, str) else hlo
    reader = Reader(module, mesh, family)
    found = [collective for collective in reader.visit(module.entry, 1, "", False, "") if collective.bytes]
    return slices.joined(found, module, mesh) if len(reader.places) > 1 else found


def normalise(collectives: Iterable[CompiledCollective]) -> dict[tuple[str, AxisGroup], int]:
    """Bytes per device and step for each (kind, axes), in a fixed order."""
    totals: dict[tuple[str, AxisGroup], int] = {}
    for collective in collectives:
        key = (collective.kind, collective.axes)
        totals[key] = totals.get(key, 0) + collective.total_bytes
    return dict(sorted(totals.items()))


def nearest_label(module: Module, computation: Computation, instruction: Instruction) -> str:
    """The `op_name` of the nearest instruction that it reads from, else of the nearest that reads it.

    Compilers drop names when they combine or move collectives. The search crosses fusion boundaries.
    """
    return _towards(_sources, module, [(computation, instruction)]) or _towards(
        _readers, module, [(computation, instruction)]
    )


def part_label(
    module: Module, computation: Computation, instruction: Instruction, operand: Instruction, position: int
) -> str:
    """The `op_name` of one operand of a collective that combines several.

    The collective carries the name of any one of them. On GPU the element of its result has the name of the original
    collective; else the operand's producer names it, or a reader of that element.
    """
    done = [user for user in computation.users.get(instruction.name, ()) if user.opcode.endswith("-done")]
    element = (done[0] if done else instruction).name
    taken = [user for user in computation.users.get(element, ()) if user.opcode == "get-tuple-element"]
    own = [user.op_name for user in taken if tuple_index(user) == position]
    named = [name for name in (*own, operand.op_name) if aten_index(name) is not None]
    made = named[0] if named else _towards(_sources, module, [(computation, operand)])
    if made:
        return made
    uses = [(where, user) for where, user, _ in readers(module, computation, element, position)]
    named = [user.op_name for _, user in uses if aten_index(user.op_name) is not None]
    return named[0] if named else _towards(_readers, module, uses)


def _towards(neighbours: Neighbours, module: Module, start: Sequence[tuple[Computation, Instruction]]) -> str:
    """The first label of an aten op in a breadth-first search from `start`."""
    todo = list(start)
    seen = {(computation.name, instruction.name) for computation, instruction in todo}
    for where, one in todo:
        for near, other in neighbours(module, where, one):
            if (near.name, other.name) in seen:
                continue
            seen.add((near.name, other.name))
            if aten_index(other.op_name) is not None:
                return other.op_name
            todo.append((near, other))
        if len(seen) > _LABEL_SEARCH:
            break
    return ""


def _callers(module: Module, computation: Computation) -> list[tuple[Computation, Instruction]]:
    """The fusions that call a computation, and the computations that they stand in."""
    found = module.callers.get(computation.name, ())
    return [(module.computations[name], caller) for name, caller in found if caller.opcode == "fusion"]


def _sources(module: Module, where: Computation, one: Instruction) -> list[tuple[Computation, Instruction]]:
    if one.opcode == "parameter":
        number = int(one.arguments)
        return [
            (outer, outer.instructions[caller.operands[number]])
            for outer, caller in _callers(module, where)
            if caller.operands[number] in outer.instructions
        ]
    return [(where, where.instructions[name]) for name in one.operands if name in where.instructions]


def _readers(module: Module, where: Computation, one: Instruction) -> list[tuple[Computation, Instruction]]:
    found = [(where, user) for user in where.users.get(one.name, ())]
    return found + (_callers(module, where) if one is where.root else [])


class Reader:
    """A walk over the computations that run; `compiled_collectives` starts at the entry."""

    def __init__(self, module: Module, mesh: Mesh, family: Family) -> None:
        """See `compiled_collectives`."""
        self.module = module
        self.mesh = mesh
        self.family = family
        self.places = slices.places(mesh, module.num_partitions)
        self.started: set[tuple[str, str, int | None]] = set()

    def visit(
        self, name: str, count: int, fused_in: str, scatter: bool, label: str, loops: tuple[str, ...] = ()
    ) -> Iterator[CompiledCollective]:
        """Collectives of a computation that runs `count` times.

        Args:
            fused_in: inside a fusion, the computation that contains the fusion.
            scatter: inside a reduce-scatter fusion.
            label: for instructions without metadata.
            loops: the computations that contain the enclosing loops: async ops started there may be in flight inside.
        """
        computation = self.module.computations.get(name)
        if computation is None:
            return
        for instruction in computation.instructions.values():
            yield from self.at(computation, instruction, count, fused_in, scatter, label, loops)

    def at(
        self,
        computation: Computation,
        instruction: Instruction,
        count: int = 1,
        fused_in: str = "",
        scatter: bool = False,
        label: str = "",
        loops: tuple[str, ...] = (),
    ) -> Iterator[CompiledCollective]:
        """Collectives of one instruction and of the computations that it calls; see `visit`."""
        opcode = instruction.opcode
        kind = opcode.removesuffix("-start")
        own_label = instruction.op_name or label
        if kind in OPCODES:
            if not scatter and any((outer, kind, instruction.channel) in self.started for outer in (fused_in, *loops)):
                return
            for collective in self.read(computation, instruction, kind, count, own_label):
                yield replace(collective, kind="reduce-scatter") if scatter else collective
        elif slices.transfer(instruction) in slices.DCN_COLLECTIVES and opcode == "send":
            yield CompiledCollective(
                kind=slices.DCN_COLLECTIVES[slices.transfer(instruction)],
                axes=slices.crossing_axes(self.places, instruction, self.mesh),
                bytes=slices.crossing(computation, instruction),
                count=count,
                name=instruction.name,
                label=own_label or nearest_label(self.module, computation, instruction),
            )
        elif opcode == "while":
            trips = self.module.trip_count(instruction)
            for body in instruction.called:
                times = count * (1 if trips is None else trips)
                yield from self.visit(body, times, "", scatter, own_label, (*loops, computation.name))
        elif opcode in ("fusion", "call", "conditional", "async-start", "custom-call"):
            # TPU fuses the parts of an async collective with other work: count it at its start.
            # Channels alone do not identify it: combined collectives share one.
            end = self.module.async_ends(instruction) if opcode == "fusion" else None
            if end is not None and end[0] == "done":
                return
            inside = fused_in or (computation.name if opcode == "fusion" else "")
            for called in instruction.called:
                in_scatter = scatter or called.startswith("all-reduce-scatter")
                for collective in self.visit(called, count, "" if end else inside, in_scatter, own_label, loops):
                    if end is not None:
                        self.started.add((inside, collective.kind, end[1]))
                    yield collective

    def read(
        self, computation: Computation, instruction: Instruction, kind: str, count: int, label: str
    ) -> Iterator[CompiledCollective]:
        """The collectives of one instruction; none where it moves nothing.

        A combined all-reduce of which only some operands are scattered is two collectives.
        """
        operands = [computation.instructions[name] for name in instruction.operands if name in computation.instructions]
        groups: list[tuple[int, ...]] = []
        if kind == "collective-permute":
            pairs = [(source, target) for source, target in source_target_pairs(instruction.rest) if source != target]
            if not pairs:
                return
            pairs = [(self.places[0][source], self.places[0][target]) for source, target in pairs]
            axes: AxisGroup = pair_axes(pairs, self.mesh)
            # An in-place permute also has its destination and offsets as operands.
            operands = operands[:1] if "slice_sizes=" in instruction.rest else operands
        else:
            groups = replica_groups(instruction.rest, self.module.num_partitions)
            if len(groups[0]) == 1:
                return
            groups = [tuple(self.places[0][device] for device in group) for group in groups]
            axes = group_axes(groups, self.mesh)
        label = label if aten_index(label) is not None else nearest_label(self.module, computation, instruction)
        joined = self.joined_parts(computation, operands)
        if kind == "all-reduce" and joined:
            yield CompiledCollective(
                kind=kind,
                axes=axes,
                bytes=operands[0].bytes,
                count=count,
                dtype=operands[0].shapes[0].dtype,
                aten=aten_index(label),
                name=instruction.name,
                label=label,
                parts=joined,
            )
            return
        payloads: dict[str, list[tuple[int | None, int]]] = {}
        for position, operand in enumerate(operands):
            element = position if len(operands) > 1 else None
            size = operand.bytes * (len(groups[0]) if kind == "all-gather" else 1)
            as_kind = kind
            if self.family == "cpu":
                if kind == "all-reduce" and is_scattered(self.module, computation, instruction.name, element, groups):
                    as_kind = "reduce-scatter"
                if self.was_bf16(computation, instruction, operand, element):
                    size //= 2
            own = (
                aten_index(part_label(self.module, computation, instruction, operand, position))
                if len(operands) > 1
                else None
            )
            payloads.setdefault(as_kind, []).append((aten_index(label) if own is None else own, size))
        for as_kind, parts in payloads.items():
            yield CompiledCollective(
                kind=as_kind,
                axes=axes,
                bytes=sum(size for _, size in parts),
                count=count,
                dtype="+".join(sorted({shape.dtype for operand in operands for shape in operand.shapes})),
                aten=parts[0][0] if len(parts) == 1 else aten_index(label),
                name=instruction.name,
                label=label,
                parts=tuple(parts) if len(parts) > 1 and kind != "all-to-all" else (),
            )

    def joined_parts(self, computation: Computation, operands: list[Instruction]) -> tuple[tuple[int | None, int], ...]:
        """(aten op, bytes) of the values concatenated into an operand (GPU: `AllReduceContiguous`), else nothing."""
        if len(operands) != 1 or len(operands[0].shapes) != 1 or len(operands[0].shapes[0].dims) != 1:
            return ()
        value = operands[0]
        if value.opcode == "fusion":
            computation = self.module.computations[value.called[0]]
            value = computation.root
        if value.opcode != "concatenate" or aten_index(value.op_name) is not None:
            return ()
        parts = [computation.instructions[name] for name in value.operands]
        labels = (part.op_name or _towards(_sources, self.module, [(computation, part)]) for part in parts)
        return tuple((aten_index(label), part.bytes) for label, part in zip(labels, parts, strict=True))

    def was_bf16(
        self, computation: Computation, instruction: Instruction, operand: Instruction, element: int | None
    ) -> bool:
        """Whether an f32 collective moves bf16 values: converted just before it, or by all its readers."""
        if {shape.dtype for shape in operand.shapes} != {"f32"}:
            return False
        return self.from_bf16(computation, operand) or self.to_bf16(computation, instruction, element)

    def from_bf16(self, computation: Computation, value: Instruction) -> bool:
        """Whether a value is a conversion from bf16, but for data movement and concatenation."""
        for _ in range(64):
            if value.opcode == "convert":
                source = computation.instructions[value.operands[0]]
                if source.shapes[0].dtype == "bf16":
                    return True
            if value.opcode == "fusion" and value.called and not value.shape_text.startswith("("):
                computation = self.module.computations[value.called[0]]
                value = computation.root
            elif value.opcode in (
                "copy",
                "bitcast",
                "reshape",
                "transpose",
                "convert",
                "pad",
                "slice",
                "dynamic-slice",
            ):
                value = computation.instructions[value.operands[0]]
            elif value.opcode == "parameter":
                callers = self.module.callers.get(computation.name, ())
                if len(callers) != 1 or callers[0][1].opcode != "fusion":
                    return False
                number = int(value.arguments)
                computation = self.module.computations[callers[0][0]]
                value = computation.instructions[callers[0][1].operands[number]]
            else:
                return False
        return False

    def to_bf16(self, computation: Computation, instruction: Instruction, element: int | None) -> bool:
        """Whether every reader of a collective's result rounds it to bf16 first."""
        uses = readers(self.module, computation, instruction.name, element, through_converts=False)
        return bool(uses) and all(user.opcode == "convert" and user.shapes[0].dtype == "bf16" for _, user, _ in uses)
