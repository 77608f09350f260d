"""TPU multislice: libtpu compiles one program per slice and turns traffic across slices into host transfers.

The module is partitioned over the devices of one slice. An all-reduce across slices becomes a reduce-scatter within the
slice (a small one: an all-reduce and a slice), a transfer of type ALL_REDUCE between corresponding devices, and an
all-gather within the slice (the smallest: an all-reduce and a transfer); an all-gather becomes a transfer and an
all-gather. Transfers are `send`/`recv` pairs for `xla_megascale_runtime` with one rendezvous name. They are read here
as collectives over the axes that cross slices, and merged with their parts within the slice.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from autoshard.cost.machine.device import load_device
from autoshard.cost.machine.layout import device_order
from autoshard.mesh import AxisGroup, Mesh, part_of
from autoshard.verify.compiled_collective import CompiledCollective
from autoshard.verify.hlo_text import Computation, Instruction, Module, group_axes, pair_axes

DCN_COLLECTIVES = {
    "ALL_REDUCE": "all-reduce",
    "ALL_GATHER": "all-gather",
    "REDUCE_SCATTER": "reduce-scatter",
    "ALL_TO_ALL": "all-to-all",
    "ONE_TO_ONE": "collective-permute",
}
"""`_xla_megascale_transfer_type` -> kind."""

_DATA_MOVEMENT = frozenset(
    {"bitcast", "copy", "reshape", "transpose", "convert", "get-tuple-element", "copy-start", "copy-done"}
)
_DATA_MOVEMENT |= {"recv-done"}


def places(mesh: Mesh, num_partitions: int) -> list[list[int]]:
    """Per slice, the mesh positions of its partitions; one list where the module holds all devices.

    Raises:
        ValueError: the module is partitioned neither over the mesh nor over a slice of it.
    """
    if num_partitions == mesh.size:
        return [list(range(mesh.size))]
    device = load_device(mesh.device)
    if device.slices * num_partitions != mesh.size:
        raise ValueError(f"the module is compiled for {num_partitions} devices, the mesh has {mesh.size}")
    found: list[list[int]] = [[] for _ in range(device.slices)]
    for place, rank in enumerate(device_order(mesh, device)):
        found[rank // num_partitions].append(place)
    return found


def transfer(instruction: Instruction) -> str:
    """Transfer type of a `send` or `recv` between slices; empty for anything else."""
    if instruction.opcode not in ("send", "recv"):
        return ""
    match = re.search(r'_xla_megascale_transfer_type="(\w+)"', instruction.rest)
    return match[1] if match else ""


def rendezvous(instruction: Instruction) -> str:
    """Rendezvous name of a `send` and its `recv`."""
    match = re.search(r'_xla_host_transfer_rendezvous="([^"]*)"', instruction.rest)
    return match[1] if match else ""


def crossing(computation: Computation, send: Instruction) -> int:
    """Bytes per device of a transfer: the larger of sent and received."""
    sizes = [computation.instructions[send.operands[0]].bytes] if send.operands[0] in computation.instructions else []
    other = receiver(computation, send)
    if other is not None:
        sizes.append(other.shapes[0].bytes)
    return max(sizes, default=0)


def receiver(computation: Computation, send: Instruction) -> Instruction | None:
    """The `recv` of a `send`."""
    name = rendezvous(send)
    for other in computation.instructions.values():
        if other.opcode == "recv" and rendezvous(other) == name:
            return other
    return None


def crossing_axes(slices: Sequence[Sequence[int]], send: Instruction, mesh: Mesh) -> AxisGroup:
    """The mesh axes that a transfer runs over.

    Its target is `{1,2}x{0:3}`, equal devices of slices 1 and 2, or groups of devices (of a permute: pairs) by libtpu's
    numbers, `{{100000,200000},…}`: 100,000 for each slice, and within it x fastest.
    """
    match = re.search(r"_xla_megascale_target=\{((?:\{[\d,]+\},?)+)\}", send.rest)
    if match:
        number = _numbers(slices, mesh)
        groups = [[int(each) for each in group.split(",")] for group in re.findall(r"\{([\d,]+)\}", match[1])]
        known = [tuple(number[each] for each in group) for group in groups if all(each in number for each in group)]
        if known and transfer(send) == "ONE_TO_ONE":
            return pair_axes([(pair[0], pair[-1]) for pair in known], mesh)
        if known:
            return group_axes(known, mesh)
    match = re.search(r'_xla_megascale_target="\{(\d+(?:,\d+)*)\}', send.rest)
    count = min(len(slices), len(match[1].split(","))) if match else len(slices)
    return group_axes([tuple(own[0] for own in slices[:count])], mesh)


def _numbers(slices: Sequence[Sequence[int]], mesh: Mesh) -> dict[int, int]:
    """libtpu's number of a device -> its position in the mesh."""
    device = load_device(mesh.device)
    chips = itertools.product(*map(range, device.topology))
    places_in_order = [(chip, core) for chip in chips for core in range(device.chip_devices)]
    found = {}
    for number, own in enumerate(slices):
        for place, (chip, core) in zip(_by_rank(own, mesh), places_in_order, strict=True):
            within = 0
            for at, size in zip(reversed(chip), reversed(device.topology), strict=True):
                within = within * size + at
            found[100_000 * (number + 1) + within * device.chip_devices + core] = place
    return found


def _by_rank(own: Sequence[int], mesh: Mesh) -> list[int]:
    """Mesh positions of a slice in the order of their devices."""
    order = device_order(mesh, load_device(mesh.device))
    return sorted(own, key=lambda place: order[place])


def joined(found: Iterable[CompiledCollective], module: Module, mesh: Mesh) -> list[CompiledCollective]:
    """Merge the parts of collectives across slices into one over all of their axes."""
    listed = list(found)
    by_name = {each.name: each for each in listed}
    gone: set[str] = set()
    whole: dict[str, CompiledCollective] = {}
    for computation in module.computations.values():
        for send in computation.instructions.values():
            if not transfer(send) or send.name not in by_name:
                continue
            between = by_name[send.name]
            source, cut = _source(module, computation, send.operands[0])
            before = by_name.get(source)
            other = receiver(computation, send)
            after = by_name.get(_sink(module, computation, other.name)) if other is not None else None
            parts = _parts(between, before, after, cut)
            if parts:
                axes = _spanned(mesh, (between, parts[0]))
                first = parts[0]
                whole[send.name] = replace(first, kind=between.kind, axes=axes, count=between.count)
                gone |= {part.name for part in parts}
    return [whole.get(each.name, each) for each in listed if each.name not in gone or each.name in whole]


def _spanned(mesh: Mesh, parts: Iterable[CompiledCollective]) -> AxisGroup:
    """The axes of collectives within and across slices together; an axis may lie on both sides."""
    ways: dict[str, int] = {}
    for axis in (axis for part in parts for axis in part.axes):
        for name in (axis,) if isinstance(axis, str) else axis.axes:
            ways[name] = ways.get(name, 1) * (mesh.axis_size(name) if isinstance(axis, str) else axis.size)
    return tuple(
        part_of(name, min(ways[name], mesh.axis_size(name)), mesh.axis_size(name)) for name in mesh.in_order(ways)
    )


def _parts(
    between: CompiledCollective, before: CompiledCollective | None, after: CompiledCollective | None, cut: bool
) -> list[CompiledCollective]:
    """The parts of one collective across slices, the one with its full bytes first.

    Args:
        cut: whether only a part of the result of `before` is transferred.
    """
    if between.kind == "all-reduce" and before is not None:
        if before.kind == ("all-reduce" if cut else "reduce-scatter") and after is not None:
            return [before, after] if after.kind == "all-gather" else []
        if before.kind == "all-reduce" and not cut:
            return [before]
    if between.kind == "reduce-scatter" and before is not None and before.kind == "reduce-scatter" and not cut:
        return [before]
    if between.kind == "all-gather" and after is not None and after.kind == "all-gather":
        return [after]
    return []


def _source(module: Module, computation: Computation, name: str) -> tuple[str, bool]:
    """The collective that a value comes from, through data movement alone, and whether it is a slice of its result."""
    cut = False
    for _ in range(16):
        value = computation.instructions.get(name)
        if value is None:
            return "", cut
        if _takes_part(module, value):
            cut = True
        elif value.opcode not in _DATA_MOVEMENT and value.target != "ZeroCrop":  # the tile's rest, not cleared
            return _collective(module, value), cut
        name = value.operands[0]
    return "", cut


def _takes_part(module: Module, value: Instruction) -> bool:
    """Whether an instruction only slices its first operand."""
    if value.opcode != "fusion":
        return value.opcode == "dynamic-slice"
    inside = [other for called in value.called for other in module.computations[called].instructions.values()]
    cuts = [other for other in inside if other.opcode == "dynamic-slice"]
    rest = {other.opcode for other in inside} - _DATA_MOVEMENT - {"dynamic-slice", "parameter", "constant"}
    return len(cuts) == 1 and not rest


def _sink(module: Module, computation: Computation, name: str) -> str:
    """The collective that a value goes to, through data movement alone and without other readers."""
    for _ in range(16):
        readers = [user for user in computation.users.get(name, ()) if user.opcode != "send-done"]
        if len(readers) != 1:
            return ""
        if readers[0].opcode not in _DATA_MOVEMENT:
            return _collective(module, readers[0])
        name = readers[0].name
    return ""


def _collective(module: Module, value: Instruction) -> str:
    """The name of the collective that an instruction is, or that a fusion holds as its only one."""
    if value.opcode != "fusion":
        return value.name
    inside = [
        other.name
        for called in value.called
        for other in module.computations[called].instructions.values()
        if re.match(r"(all-reduce|all-gather|reduce-scatter)(-start)?$", other.opcode)
    ]
    return inside[0] if len(inside) == 1 else ""
