"""Annotations that keep XLA from wrong results or an abort.

GSPMD all-reduces the partial sums of a convolution with spatially split input and kernel, or of the gradient of a
depthwise kernel with spatially split images, over all devices, replicas included
(`PartitionConvolutionWithSpatialDimensionHaloExchangeOnLHS`; jaxlib 0.10.2 on CPU: results four times too large with an
idle axis of four). No strategy is like that, but propagation may split operands so.

libtpu aborts where it would pad a scatter's unsigned or 64-bit indices, because propagation splits them, or the dim of
the updates that enumerates them, unevenly (0.0.51; `verify/compile.py` knows the message). XLA's partitioner does so
where all devices split such indices unevenly (jaxlib 0.10.2 for CPU; assumed of GPUs). No strategy does.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import replace

from autoshard.cost.machine.device import load_device
from autoshard.cost.partitioner.partition import Partitioner
from autoshard.cost.partitioner.passes.simplify import simplified
from autoshard.cost.partitioner.propagate import propagate
from autoshard.cost.partitioner.tiling import across_ones
from autoshard.dtypes import is_whole
from autoshard.errors import AutoshardError
from autoshard.graph.annotations import Annotations
from autoshard.graph.ops import Graph, Op, Value
from autoshard.mesh import Mesh, Spec, format_spec

_GUARD_ROUNDS = 4


class WrongNumbersError(AutoshardError, ValueError):
    """XLA would compute wrong results under these annotations, and no copy can be written that avoids it."""


def overcounted(graph: Graph, annotations: Annotations, mesh: Mesh) -> dict[int, tuple[Spec, Spec]]:
    """Convolutions with wrong results: op id -> the specs of input and kernel as they find them."""
    if not any(op.kind == "convolution" for op in graph.ops):
        return {}
    graph = simplified(graph, load_device(mesh.device).target)  # drops zero-sized ones
    target = load_device(mesh.device).target
    shardings = propagate(graph, annotations, mesh, target)
    partitioner, spec = Partitioner(graph, shardings, "cpu"), shardings.subaxes.spec
    return {
        op.id: (spec(shardings.read(op.id, op.operands[0])), spec(shardings.read(op.id, op.operands[1])))
        for op in graph.ops
        if op.kind == "convolution" and partitioner.overcounts(op)
    }


def wrong_sums(graph: Graph, annotations: Annotations, mesh: Mesh) -> tuple[str, ...]:
    """For a person: the convolutions with wrong results, and the shardings of their input and kernel."""
    return tuple(
        f"convolution op {number} in {graph.ops[number].module or 'the program'}: input {format_spec(lhs)}, "
        f"kernel {format_spec(rhs)}"
        for number, (lhs, rhs) in sorted(overcounted(graph, annotations, mesh).items())
    )


class WrongSumsWarning(UserWarning):
    """A plan, not the solver's, under which XLA computes wrong results."""


def warn_of_wrong_sums(graph: Graph, annotations: Annotations, mesh: Mesh) -> None:
    """Warn of wrong results; programs without convolutions cost nothing."""
    warn_of(wrong_sums(graph, annotations, mesh), stacklevel=4)


def warn_of(found: Sequence[str], stacklevel: int = 3) -> None:
    """Warn of the convolutions in `found` (of `wrong_sums`), by default at the caller's caller."""
    if found:
        warnings.warn(
            f"XLA computes wrong numbers under this plan: it sums {found[0]}"
            f"{f' (and {len(found) - 1} more)' if len(found) > 1 else ''} over devices that hold the same part; split "
            "input or kernel by all mesh axes in space, or by none",
            WrongSumsWarning,
            stacklevel=stacklevel,
        )


class UncompilableError(AutoshardError, ValueError):
    """The compiler would abort under these annotations."""


def spread_indices(graph: Graph, annotations: Annotations, mesh: Mesh) -> dict[int, Spec]:
    """Scatters that XLA's partitioner aborts on: op id -> the spec of their indices.

    Measured for CPU on random shardings of 2x2x2: all with indices that all devices split unevenly, and no others. A
    TPU's aborts on any that are split unevenly.
    """
    suspects = [op for op in graph.ops if op.kind == "scatter" and _may_pad(graph, op, mesh)]
    if not suspects:
        return {}
    device = load_device(mesh.device)
    shardings = propagate(graph, annotations, mesh, device.target)
    found: dict[int, Spec] = {}
    for op in suspects:
        indices = op.operands[len(op.results)]
        spec = shardings.subaxes.spec(shardings.read(op.id, indices))
        ways = [mesh.ways(axes) for axes in spec]
        uneven = any(size % way for size, way in zip(graph.type_of(indices).shape, ways, strict=True))
        if uneven and (device.compiler.aborts_on_padded_scatters or math.prod(ways) == mesh.size):
            found[op.id] = spec
    return found


def check_compiles(graph: Graph, annotations: Annotations, mesh: Mesh) -> None:
    """Refuse annotations that the compiler aborts on.

    Raises:
        UncompilableError: it would.
    """
    found = padded_indices(graph, annotations, mesh) | spread_indices(graph, annotations, mesh)
    if found:
        op = graph.ops[min(found)]
        indices = graph.type_of(op.operands[len(op.results)])
        raise UncompilableError(
            f"the compiler would abort on scatter op {op.id} in {op.module or 'the program'}: its indices, "
            f"{indices.dtype}{list(indices.shape)}, would be split unevenly ({format_spec(found[op.id])}), "
            "and it cannot pad what is unsigned or of 64 bits; keep the tensors that they come from whole"
        )


def padded_indices(graph: Graph, annotations: Annotations, mesh: Mesh) -> dict[int, Spec]:
    """Scatters that libtpu aborts on: op id -> the spec of their updates."""
    suspects = [op for op in graph.ops if op.kind == "scatter" and _may_pad(graph, op, mesh)]
    device = load_device(mesh.device)
    if not suspects or not device.compiler.aborts_on_padded_scatters:
        return {}
    shardings = propagate(graph, annotations, mesh, device.target)
    found: dict[int, Spec] = {}
    for op in suspects:
        updates = op.operands[-1]
        spec = shardings.subaxes.spec(shardings.read(op.id, updates))
        shape = graph.type_of(updates).shape
        if any(shape[dim] % mesh.ways(spec[dim]) for dim in _along_indices(graph, op)):
            found[op.id] = spec
    return found


def _may_pad(graph: Graph, op: Op, mesh: Mesh) -> bool:
    dtype, shape = graph.type_of(op.operands[len(op.results)]).dtype, graph.type_of(op.operands[-1]).shape
    unpaddable = dtype.startswith("u") or dtype.endswith("64")
    return unpaddable and any(shape[dim] % mesh.size for dim in _along_indices(graph, op))


def _along_indices(graph: Graph, scatter: Op) -> list[int]:
    """Dims of a scatter's updates that enumerate its indices."""
    rank = len(graph.type_of(scatter.operands[-1]).shape)
    return [dim for dim in range(rank) if dim not in scatter.attrs["window_dims"]]


def guarded(graph: Graph, annotations: Annotations, mesh: Mesh) -> Annotations:
    """`annotations`, with replicated values where XLA's results would be wrong or its compiler would abort.

    Raises:
        WrongNumbersError: results would still be wrong: their operands take no annotation.
        UncompilableError: the compiler would still abort.
    """
    annotatable = {*graph.aten_outputs.values(), *map(Value, graph.arguments)}
    copies = dict(annotations.copies)
    for number, spec in padded_indices(graph, annotations, mesh).items():
        op = graph.ops[number]
        along, updates = _along_indices(graph, op), op.operands[-1]
        if (reader := op.reader(updates)) is not None and updates in annotatable:
            copies[updates, reader] = tuple(() if dim in along else axes for dim, axes in enumerate(spec))
    annotations = _indices_whole(graph, replace(annotations, copies=copies), mesh)
    return _summed_once(graph, annotations, mesh)


def _indices_whole(graph: Graph, annotations: Annotations, mesh: Mesh) -> Annotations:
    """Replicate updates along uneven indices, then the integer arguments that the indices come from.

    Raises:
        UncompilableError: indices would still be uneven.
    """
    for of_updates in (True, False):
        if not (found := spread_indices(graph, annotations, mesh)):
            return annotations
        pins, copies = dict(annotations.pins), dict(annotations.copies)
        for op in (graph.ops[number] for number in found):
            updates, reader = op.operands[-1], op.reader(op.operands[-1])
            if of_updates and reader is not None and updates in {*graph.aten_outputs.values(), *pins}:
                along = _along_indices(graph, op)
                spec = copies.get((updates, reader), pins.get(updates, ((),) * len(graph.type_of(updates).shape)))
                copies[updates, reader] = tuple(() if dim in along else axes for dim, axes in enumerate(spec))
            elif not of_updates:
                for value in _whole_numbers_behind(graph, op.operands[len(op.results)]) & pins.keys():
                    pins[value] = ((),) * len(graph.type_of(value).shape)
        annotations = replace(annotations, pins=pins, copies=copies)
    return _whole_around(graph, annotations, mesh)


def _whole_around(graph: Graph, annotations: Annotations, mesh: Mesh) -> Annotations:
    """Replicate values around scatters with uneven indices, one op further from them in every round.

    The gradient of a sort scatters by positions that take no annotation, and are split as the sorted values.

    Raises:
        UncompilableError: indices would be uneven with everything replicated.
    """
    near: set[Value] = set()
    while found := spread_indices(graph, annotations, mesh):
        before, near = len(near), near | {Value(number) for number in found}
        around = ({*op.operands, *(Value(op.id, n) for n in range(len(op.results)))} for op in graph.ops)
        near = near.union(*[values for values in around if not near.isdisjoint(values)])
        if len(near) == before:
            break
        pins = {value: ((),) * len(spec) if value in near else spec for value, spec in annotations.pins.items()}
        copies = {key: spec for key, spec in annotations.copies.items() if key[0] not in near}
        annotations = replace(annotations, pins=pins, copies=copies)
    check_compiles(graph, annotations, mesh)
    return annotations


def _whole_numbers_behind(graph: Graph, value: Value) -> set[Value]:
    """The integer arguments that a value depends on through integer values."""
    arguments, seen, todo = set(map(Value, graph.arguments)), {value}, [value]
    while todo:
        for operand in graph.ops[todo.pop().op].operands:
            if operand not in seen and is_whole(graph.type_of(operand).dtype):
                seen.add(operand)
                todo.append(operand)
    return seen & arguments


def _summed_once(graph: Graph, annotations: Annotations, mesh: Mesh) -> Annotations:
    """Where results would be wrong, annotate copies without spatial, or if there are none, feature splits.

    Raises:
        WrongNumbersError: some would still be wrong: their operands take no annotation.
    """
    annotatable = {*graph.aten_outputs.values(), *map(Value, graph.arguments)}
    for _ in range(_GUARD_ROUNDS):
        found = overcounted(graph, annotations, mesh)
        copies = dict(annotations.copies)
        for number, specs in found.items():
            op = graph.ops[number]
            for place, spec in enumerate(specs):
                read, whole = _read_by_aten(graph, op, op.operands[place], _whole_where_summed(op, place, spec))
                if (reader := op.reader(op.operands[place])) is not None and read in annotatable:
                    copies[read, reader] = whole
        if not found:
            return annotations
        annotations = replace(annotations, copies=copies)
    if found := overcounted(graph, annotations, mesh):
        op = graph.ops[min(found)]
        where = f" in {op.module}" if op.module else ""
        raise WrongNumbersError(
            f"XLA would sum convolution op {op.id}{where} over devices that hold the same part, and get wrong numbers: "
            "its input and kernel are both split there and cannot be annotated; give hints that split neither"
        )
    return annotations


def _read_by_aten(graph: Graph, op: Op, value: Value, spec: Spec) -> tuple[Value, Spec]:
    """The aten op's operand that is `value` before a reshape adds dims of size 1 (a 1-d convolution is a 2-d one)."""
    while (made := graph.ops[value.op]).kind == "reshape" and made.aten == op.aten:
        source = made.operands[0]
        before = across_ones(spec, graph.type_of(value).shape, graph.type_of(source).shape)
        if before is None:
            break
        value, spec = source, before
    return value, spec


def _whole_where_summed(op: Op, place: int, spec: Spec) -> Spec:
    """In a grouped kernel's gradient the images' batch is the feature dim of its input: a split of it is contracted."""
    _, features, *spatial = op.attrs["rhs" if place else "lhs"]
    summed = spatial if any(spec[dim] for dim in spatial) else [features]
    return tuple(() if dim in summed else axes for dim, axes in enumerate(spec))
