"""Parses XLA's printed HLO: instructions, computations, replica groups, trip counts. One pass, line by line.

The text is what `HloModule.to_string()` prints after optimization, on CPU, TPU and GPU: operands are names, collectives
carry `replica_groups` as `{{0,4},…}`, as iota `[2,4]<=[8]`, or over a named mesh; pairs of async ops are `-start` and
`-done`, or wrapped computations.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import numpy as np

from autoshard.dtypes import DTYPES
from autoshard.mesh import AxisGroup, AxisPart, Mesh

DTYPE_BITS = {dtype.hlo: dtype.bits for dtype in DTYPES.values()}
"""Bits of one element as XLA prints its type; `token` and `opaque` hold nothing."""

_ARRAY = re.compile(r"\b(" + "|".join(sorted(DTYPE_BITS, key=len, reverse=True)) + r")\[([\d,<=\s]*)\](\{[^{}]*\})?")
_OPERAND = re.compile(r"%([\w.\-]+)")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+)[ (].*\{\s*$")
_CALLED = re.compile(r"\b(?:calls|to_apply|body|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"\b(?:branch_computations|called_computations)=\{([^}]*)\}")
_ROWS = re.compile(r"T\((\d+),\d+\)")
_TILE = re.compile(r"T\(([\d,]+)\)")
_ATEN = re.compile(r"(?:^|[/;\s(])op(\d+)(?=$|[./;:\s)])")


@dataclass(frozen=True)
class ArrayShape:
    """An array shape with its layout.

    Attributes:
        dtype, dims: of the per-device shape.
        on_chip: whether it is in memory space 1 (VMEM).
        padding: elements added by tiling.
        rows: of a tile of two dims; fewer than 8 of an array with few of what lies along them.
    """

    dtype: str
    dims: tuple[int, ...]
    on_chip: bool = False
    padding: int = 0
    rows: int = 8

    @property
    def elements(self) -> int:
        """Number of elements."""
        count = 1
        for dim in self.dims:
            count *= dim
        return count

    @property
    def bytes(self) -> int:
        """Bytes without padding."""
        return (self.elements * DTYPE_BITS[self.dtype] + 7) // 8

    @property
    def stored_bytes(self) -> int:
        """Bytes with padding."""
        return ((self.elements + self.padding) * DTYPE_BITS[self.dtype] + 7) // 8


@lru_cache(maxsize=1 << 14)
def _padding(dims: tuple[int, ...], layout: str) -> int:
    """Padding elements of a layout such as `1,0:T(8,128)(2,1)`, by its first tiling."""
    tile = _TILE.search(layout)
    if tile is None or not dims:
        return 0
    order = [int(dim) for dim in layout.strip("{}").partition(":")[0].split(",")]
    sides = [int(side) for side in tile[1].split(",")][::-1]
    if len(sides) > len(order):
        return 0
    sizes = list(dims)
    for dim, side in zip(order, sides, strict=False):
        sizes[dim] = -(-sizes[dim] // side) * side
    return math.prod(sizes) - math.prod(dims)


def _rows(layout: str) -> int:
    found = _ROWS.search(layout)
    return int(found[1]) if found else 8


def parse_shapes(text: str) -> tuple[ArrayShape, ...]:
    """The arrays of a printed shape; a tuple's in order, nested tuples flattened."""
    found = []
    for dtype, dims, layout in _ARRAY.findall(text):
        sizes = tuple(int(dim.strip().removeprefix("<=")) for dim in dims.split(",") if dim.strip())
        on_chip = "S(1)" in layout or "S(3)" in layout  # vector memory; on v4, common memory
        found.append(ArrayShape(dtype, sizes, on_chip, _padding(sizes, layout), _rows(layout)))
    return tuple(found)


@dataclass
class Instruction:
    """One printed instruction.

    Attributes:
        shape_text, rest: the printed result shape; everything after the operands (attributes).
        arguments: the text between the parentheses: operand names, a literal, or a parameter's number.
    """

    name: str
    opcode: str
    shape_text: str
    arguments: str
    rest: str
    root: bool = False

    @cached_property
    def shapes(self) -> tuple[ArrayShape, ...]:
        """The result's arrays."""
        return parse_shapes(self.shape_text)

    @cached_property
    def operands(self) -> tuple[str, ...]:
        """Names of the operands."""
        if self.opcode in ("constant", "parameter"):
            return ()
        return tuple(_OPERAND.findall(self.arguments))

    @property
    def bytes(self) -> int:
        """Bytes of the result, a tuple's summed."""
        return sum(shape.bytes for shape in self.shapes)

    @property
    def called(self) -> tuple[str, ...]:
        """Called computations: of a fusion, call, while or conditional."""
        names = _CALLED.findall(self.rest)
        for branches in _BRANCHES.findall(self.rest):
            names += [name.strip().lstrip("%") for name in branches.split(",")]
        return tuple(names)

    @property
    def op_name(self) -> str:
        """`op_name` of its metadata, or the empty string."""
        match = re.search(r'op_name="([^"]*)"', self.rest)
        return match[1] if match else ""

    @property
    def target(self) -> str:
        """`custom_call_target`."""
        match = re.search(r'custom_call_target="([^"]*)"', self.rest)
        return match[1] if match else ""

    @property
    def channel(self) -> int | None:
        """Channel id of a collective."""
        match = re.search(r"\bchannel_id=(\d+)", self.rest)
        return int(match[1]) if match else None


@dataclass
class Computation:
    """A named computation: its instructions by name, in printed order."""

    name: str
    instructions: dict[str, Instruction] = field(default_factory=dict)

    @cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """Name of a value -> its users in this computation."""
        found: dict[str, list[Instruction]] = {}
        for instruction in self.instructions.values():
            for name in dict.fromkeys(instruction.operands):
                found.setdefault(name, []).append(instruction)
        return found

    @cached_property
    def root(self) -> Instruction:
        """The root instruction."""
        for instruction in reversed(self.instructions.values()):
            if instruction.root:
                return instruction
        return next(reversed(self.instructions.values()))

    @cached_property
    def parameters(self) -> dict[int, Instruction]:
        """Parameter number -> instruction."""
        return {int(i.arguments): i for i in self.instructions.values() if i.opcode == "parameter"}

    def operand_shapes(self, instruction: Instruction) -> tuple[ArrayShape, ...]:
        """The arrays of all operands, in order."""
        found: list[ArrayShape] = []
        for name in instruction.operands:
            operand = self.instructions.get(name)
            found.extend(operand.shapes if operand else ())
        return tuple(found)


@dataclass
class Module:
    """A parsed HLO module.

    Attributes:
        computations: name -> computation.
        entry: name of the entry computation.
        num_partitions: devices that the module is partitioned over.
    """

    computations: dict[str, Computation]
    entry: str
    num_partitions: int

    @cached_property
    def callers(self) -> dict[str, list[tuple[str, Instruction]]]:
        """Computation -> (calling computation, calling instruction)."""
        found: dict[str, list[tuple[str, Instruction]]] = {}
        for computation in self.computations.values():
            for instruction in computation.instructions.values():
                for name in instruction.called if "=" in instruction.rest else ():
                    found.setdefault(name, []).append((computation.name, instruction))
        return found

    def async_ends(self, fusion: Instruction) -> tuple[str, int | None] | None:
        """For a TPU fusion that starts or ends an async collective: `start` or `done`, and the collective's channel."""
        for name in fusion.called:
            inner = self.computations[name].instructions.values()
            for instruction in inner:
                if instruction.opcode == "custom-call" and instruction.target.startswith("AsyncCollective"):
                    channels = [other.channel for other in inner if other.channel is not None]
                    end = "done" if instruction.target.endswith("Done") else "start"
                    return end, channels[0] if channels else None
        return None

    def trip_count(self, loop: Instruction) -> int | None:
        """Trip count of a while: `known_trip_count`, or by its condition `i < constant`; None if unknown."""
        match = re.search(r'known_trip_count"?:\s*\{"?n"?:\s*"?(\d+)', loop.rest)
        if match:
            return int(match[1])
        match = re.search(r"\bcondition=%?([\w.\-]+)", loop.rest)
        condition = self.computations.get(match[1]) if match else None
        root = condition.root if condition else None
        if condition is None or root is None:
            return None
        if root.opcode == "fusion" and root.called:
            bound = [i for i in map(condition.instructions.get, root.operands) if i and i.opcode == "constant"]
            inner = self.computations[root.called[0]]
            bound += [i for i in inner.instructions.values() if i.opcode == "constant"]
            root = inner.root
        else:
            bound = [i for i in map(condition.instructions.get, root.operands) if i and i.opcode == "constant"]
        if root.opcode != "compare" or "direction=LT" not in root.rest or len(bound) != 1:
            return None
        if not re.fullmatch(r"\d+", bound[0].arguments):
            return None
        read = [i for i in map(condition.instructions.get, condition.root.operands) if i is not None]
        counters = [int(match[1]) for i in read if (match := re.search(r"\bindex=(\d+)", i.rest))]
        if len(counters) != 1:
            return int(bound[0].arguments)
        turns = int(bound[0].arguments) - self._start(loop, counters[0])
        return max(0, -(-turns // self._increment(loop, counters[0])))

    def _start(self, loop: Instruction, counter: int) -> int:
        """Initial value of a while's counter; 0 where it is no constant."""
        callers = self.callers.get(loop.called[0], ()) if loop.called else ()
        for outer in (self.computations[name].instructions for name, caller in callers if caller is loop):
            carried = outer.get(loop.operands[0])
            first = outer.get(carried.operands[counter]) if carried is not None and carried.opcode == "tuple" else None
            while first is not None and first.opcode == "copy":
                first = outer.get(first.operands[0])
            if first is not None and first.opcode == "constant" and first.arguments.isdigit():
                return int(first.arguments)
        return 0

    def _increment(self, loop: Instruction, counter: int) -> int:
        """Step of a while's counter: above 1 in an unrolled loop; 1 where it is no constant."""
        body = self.computations.get(loop.called[0]) if loop.called else None
        if body is None or counter >= len(body.root.operands):
            return 1
        last = body.instructions.get(body.root.operands[counter])
        if last is None or last.opcode != "add":
            return 1
        terms = [body.instructions.get(name) for name in last.operands]
        added = [int(i.arguments) for i in terms if i and i.opcode == "constant" and i.arguments.isdigit()]
        return max(1, added[0]) if len(added) == 1 else 1


_COPIED_PARTS = frozenset({"slice", "dynamic-slice", "dynamic-update-slice"})


def parse_hlo(text: str) -> Module:
    """Read a printed HLO module.

    Raises:
        ValueError: the text has no entry computation (it is not an HLO module).
    """
    computations: dict[str, Computation] = {}
    current: Computation | None = None
    entry = None
    partitions = 1
    for line in text.splitlines():
        if not line.startswith(" "):
            if line.startswith("HloModule"):
                match = re.search(r"\bnum_partitions=(\d+)", line)
                partitions = int(match[1]) if match else 1
            elif match := _HEADER.match(line):
                current = computations.setdefault(match[2], Computation(match[2]))
                entry = match[2] if match[1] else entry
            continue
        if current is not None:
            instruction = _parse_instruction(line)
            if instruction is not None:
                current.instructions[instruction.name] = instruction
    if entry is None:
        raise ValueError("not an HLO module: the text has no ENTRY computation")
    for computation in computations.values():
        for instruction in computation.instructions.values():
            if instruction.opcode == "async-start":
                _unwrap(instruction, computations)
    return Module(computations, entry, partitions)


def _unwrap(start: Instruction, computations: dict[str, Computation]) -> None:
    """Write an async op that wraps a computation in the short form (`slice-start`).

    Compiled programs are printed in the short form, dumps in the long one.
    """
    (name,) = start.called or ("",)
    if name in computations:
        inner = computations[name].root
        if inner.opcode in _COPIED_PARTS:
            start.opcode, start.rest = f"{inner.opcode}-start", inner.rest


def _parse_instruction(line: str) -> Instruction | None:
    text = line.strip()
    root = text.startswith("ROOT ")
    name, separator, rest = text[5 if root else 0 :].partition(" = ")
    if not separator:
        return None
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.find(" ")
    if end <= 0:
        return None
    shape, rest = rest[:end], rest[end:].lstrip()
    opening = rest.find("(")
    if opening <= 0:
        return None
    closing = rest.find(")", opening)
    if rest.find("(", opening + 1, closing) >= 0:
        closing = _closing(rest, opening)
    if closing < 0:
        return None
    arguments = rest[opening + 1 : closing]
    return Instruction(name.lstrip("%"), rest[:opening], shape, arguments, rest[closing + 1 :], root)


def _closing(text: str, opening: int) -> int:
    """Index of the parenthesis that closes the one at `opening`."""
    depth = 0
    for match in re.compile(r"[()]").finditer(text, opening):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.start()
    return -1


def aten_index(op_name: str) -> int | None:
    """The aten op k in an `op_name` such as `op52.53/aten__split`; the first where XLA merged several."""
    match = _ATEN.search(op_name)
    return int(match[1]) if match else None


def replica_groups(rest: str, num_devices: int) -> list[tuple[int, ...]]:
    """Replica groups of a collective; one group of all devices where none are printed.

    Raises:
        ValueError: an unknown form of `replica_groups`.
    """
    start = rest.find("replica_groups=")
    if start < 0:
        return [tuple(range(num_devices))]
    text = rest[start + len("replica_groups=") :]
    if match := re.match(r"\{((?:\{[\d,]*\},?)*)\}", text):
        groups = [tuple(map(int, group.split(","))) for group in re.findall(r"\{([\d,]+)\}", match[1])]
        return groups or [tuple(range(num_devices))]
    if match := re.match(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        shape = _ints(match[1])
        ids = _iota(match[2], match[3]).reshape(shape)
        return [tuple(map(int, row)) for row in ids.reshape(shape[0], -1)]
    if match := re.match(r"(?:@?\w*)mesh\[([^\]]*)\](?:,?\s*device_ids=\(([^)]*\)?[^)]*)\))?\s*\{([^}]*)\}", text):
        return _mesh_groups(match[1], match[2], match[3])
    raise ValueError(f"unknown form of replica groups: {text[:120]}")


def _mesh_groups(axes: str, device_ids: str | None, used: str) -> list[tuple[int, ...]]:
    """Replica groups over named axes: `mesh['x'=2,'y'=4] {'y'}`; a partial axis is `'y':(1)2` (pre-size, size)."""
    named = [(name, int(size)) for name, size in re.findall(r"['\"]?(\w+)['\"]?=(\d+)", axes)]
    sizes = [size for _, size in named]
    ids = np.arange(int(np.prod(sizes)))
    if device_ids:
        iota = re.match(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", device_ids)
        ids = _iota(iota[1], iota[2]) if iota else np.array(_ints(device_ids))
    # Split each partly used axis into (before, used, after) dims, so that every used part is a dim of its own.
    parts: dict[str, tuple[int, int]] = {}
    order = []
    for name, before, size in re.findall(r"['\"]?(\w+)['\"]?(?::\((\d+)\)(\d+))?", used):
        full = dict(named)[name]
        parts[name] = (int(before), int(size)) if before else (1, full)
        order.append(name)
    dims: list[int] = []
    where: dict[str, int] = {}
    for name, full in named:
        before, size = parts.get(name, (full, 1))
        where[name] = len(dims) + 1
        dims += [before, size, full // (before * size)]
    grid = ids.reshape(dims)
    moved = [where[name] for name in order]
    rest = [dim for dim in range(len(dims)) if dim not in moved]
    width = int(np.prod([dims[dim] for dim in moved])) if moved else 1
    return [tuple(map(int, row)) for row in grid.transpose(rest + moved).reshape(-1, width)]


def _ints(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number.strip()]


def _iota(shape: str, permutation: str | None) -> np.ndarray:
    ids = np.arange(int(np.prod(_ints(shape)))).reshape(_ints(shape))
    return ids.transpose(_ints(permutation)).reshape(-1) if permutation else ids.reshape(-1)


def source_target_pairs(rest: str) -> list[tuple[int, int]]:
    """`source_target_pairs` of a collective-permute."""
    match = re.search(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}", rest)
    return [(int(a), int(b)) for a, b in re.findall(r"\{(\d+),(\d+)\}", match[1])] if match else []


def group_axes(groups: list[tuple[int, ...]], mesh: Mesh) -> AxisGroup:
    """The mesh axes that device groups span."""
    sizes = set(map(len, groups))
    coordinates = [np.array([np.unravel_index(device, mesh.shape) for device in group]) for group in groups]
    found: list[str | AxisPart] = []
    spans = []
    for dim, axis in enumerate(mesh.axis_names):
        counts = {len(set(group[:, dim].tolist())) for group in coordinates}
        if counts == {1}:
            continue
        spans.append(max(counts))
        found.append(axis if counts == {mesh.shape[dim]} else AxisPart((axis,), max(counts), mesh.shape[dim]))
    size = max(sizes)
    if len(sizes) > 1 or int(np.prod(spans)) != size:
        return (AxisPart(mesh.spanned(tuple(found)), size),)
    return tuple(found)


def pair_axes(pairs: list[tuple[int, int]], mesh: Mesh) -> tuple[str, ...]:
    """The mesh axes along which a permute's targets differ from their sources, in mesh order."""
    moved = set()
    for source, target in pairs:
        for axis, a, b in zip(
            mesh.axis_names, np.unravel_index(source, mesh.shape), np.unravel_index(target, mesh.shape), strict=True
        ):
            if a != b:
                moved.add(axis)
    return mesh.in_order(moved)
