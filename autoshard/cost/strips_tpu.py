"""Convolutions of few images on a TPU: the compiler makes a larger batch of strips of space of them.

A tile has 8 rows, so fewer images than that are cut into strips (XLA's `SpaceToBatchConverter`: 4 images are 32). What
is elementwise around a convolution stays in strips; what the backward pass makes of it does not always, and what leaves
the device never. As seen in ResNet's compiled steps (libtpu 0.0.51, 4 images to a device):

- An activation that a collective moves is put together before it, or cut into strips after, by copies and reshapes that
  read and write it whole; on the other side of an all-to-all its parts are put in order. Around four all-to-alls there
  were 10, 5, 6 and 7 such kernels, and more where strips end for what is near. Three plans with four all-to-alls each
  (1.2 to 1.6 MB a part), compiled for v5p, had 74 to 130 kernels more than data parallelism, and took 0.10, 0.13 and
  0.16 ms more of compute though they update fewer weights: as 30 kernels for each would (`COPIES` and `PARTS`).
- What the forward pass leaves to the backward pass is copied to another layout. On one core that happens right before
  the reader, on chip, unless a gather is in flight since an earlier point of the step: then all copies that are ready
  run beside it, and wait in device memory next to what they are copies of (121 MB in the automatic plan on v5e, none
  under data parallelism, nor on the two cores of a v5p).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from autoshard.cost.device import Device
from autoshard.cost.kernels import Kernel
from autoshard.cost.lowered import COLLECTIVES, Array, Lowered, Step
from autoshard.cost.rewrite import Rewriter
from autoshard.cost.rewrite_tpu import KEEPS_DIMS
from autoshard.graph.ops import Graph, Value
from autoshard.mesh import Mesh, Spec

if TYPE_CHECKING:
    from autoshard.cost.backend import Compiled

Key = TypeVar("Key")

FEW = 8
"""Images on a device from which on they are not cut into strips: the rows of a tile."""

COPIES = 20
"""Kernels that put an activation together before it leaves a device, or cut it into strips when it arrives, and what is
near with it."""

PARTS = 10
"""Kernels that put the parts of an all-to-all in order, on the side that is not in strips."""

IN_FLIGHT = 2**16
"""Bytes that a gather makes at least that other kernels run beside."""

EARLY = "early copy"
"""The kind of copies that run beside a gather."""

MOVING = COLLECTIVES - {"all-reduce"}


def batch_dims(graph: Graph) -> dict[Value, int]:
    """Activations that convolutions read or make, and what is elementwise between them -> their batch dim."""
    if not any(op.kind == "convolution" for op in graph.ops):
        return {}
    ops = [
        _Node(op.kind, op.operands, tuple(Value(op.id, result) for result in range(len(op.results))), op.attrs)
        for op in graph.ops
        if op.kind != "argument"
    ]
    return _batch_dims(ops, lambda value: graph.type_of(value).shape)


def early_seconds(compiled: Compiled, device: Device) -> float:
    """Seconds of copies that run early, beside a gather: written and read once more in device memory."""
    arrays = compiled.program.arrays
    size = sum(arrays[array].bytes for kernel in compiled.kernels if kernel.kind == EARLY for array in kernel.writes)
    return 2 * size / (device.memory_bandwidth * device.achievable_memory)


def copied_seconds(
    shape: Sequence[int], item: int, dim: int, src: Spec, dst: Spec, mesh: Mesh, device: Device
) -> float:
    """Seconds of the kernels around a collective that moves an activation of which `dim` counts images."""
    seconds = 0.0
    for spec, other in ((src, dst), (dst, src)):
        strips = shape[dim] / mesh.ways(spec[dim]) < FEW
        count = COPIES if strips else PARTS if shape[dim] / mesh.ways(other[dim]) < FEW else 0
        moved = 2 * math.prod(mesh.shard_shape(shape, spec)) * item if device.cores > 1 else 0
        seconds += count * (device.kernel_overhead + moved / (device.memory_bandwidth * device.achievable_memory))
    return seconds


def few(program: Lowered) -> list[int]:
    """Activations of fewer images on a device than a tile has rows."""
    if not any(step.kind == "convolution" for step in program.steps):
        return []
    ops = [_Node(step.kind, step.reads, step.writes, program.graph.ops[step.op].attrs) for step in program.steps]
    arrays = program.arrays
    found = _batch_dims(ops, lambda array: arrays[array].shape)
    return [array for array, dim in found.items() if (arrays[array].shape or (FEW,))[dim] < FEW]


@dataclass(frozen=True)
class _Node(Generic[Key]):
    kind: str
    reads: tuple[Key, ...]
    writes: tuple[Key, ...]
    attrs: Mapping[str, Any] = field(repr=False)


def _batch_dims(ops: Sequence[_Node[Key]], shape_of: Callable[[Key], tuple[int, ...] | None]) -> dict[Key, int]:
    computed = _computed((op.kind, op.reads, op.writes) for op in ops)
    found: dict[Key, int] = {}
    for op in ops:
        if op.kind == "convolution" and len(op.reads) == 2 and op.reads[1] not in computed:
            for key, name in ((op.reads[0], "lhs"), (op.writes[0], "out")):
                if len(shape_of(key) or ()) == len(op.attrs[name]):
                    found.setdefault(key, op.attrs[name][0])
    for way in (ops, ops[::-1]):
        for op in way:
            if op.kind in KEEPS_DIMS and op.kind not in COLLECTIVES:
                around = (*op.reads, *op.writes)
                known = next((key for key in around if key in found), None)
                if known is not None:
                    rank, size = len(shape_of(known) or ()), (shape_of(known) or ())[found[known]]
                    alike = [key for key in around if len(shape_of(key) or ()) == rank]
                    found |= {
                        key: found[known]
                        for key in alike
                        if key not in found and (shape_of(key) or ())[found[known]] == size
                    }
    return found


def _computed(ops: Iterable[tuple[str, tuple[Key, ...], tuple[Key, ...]]]) -> set[Key]:
    """What follows from what a convolution makes; of each op its kind, what it reads and what it writes."""
    found: set[Key] = set()
    for kind, reads, writes in ops:
        if kind == "convolution" or not found.isdisjoint(reads):
            found.update(writes)
    return found


def cut_into_strips(program: Lowered) -> Lowered:
    """Activations in strips are marked; they are put together before a collective moves them, and cut again after."""
    strips = few(program)
    if any(step.kind in MOVING and _moves(step, strips) for step in program.steps):
        program = _put_together(program, strips)
    for array in strips:
        program.arrays[array].strips = True
    return program


def _put_together(program: Lowered, strips: Container[int]) -> Lowered:
    rewriter = Rewriter(program)
    for step in program.steps:
        if step.kind not in MOVING or not _moves(step, strips):
            rewriter.emit(step)
            continue
        parts = PARTS if step.kind == "all-to-all" else 0
        counts = [COPIES if array in strips else parts for array in (step.reads[0], step.writes[0])]
        read, made = step.reads[0], step.writes[0]
        for _ in range(counts[0]):
            read = _copied(rewriter, step, read)
        moved = rewriter.array(made) if counts[1] else made
        rewriter.emit(replace(step, reads=(read, *step.reads[1:]), writes=(moved,)))
        for left in reversed(range(counts[1])):
            moved = _copied(rewriter, step, moved, into=None if left else made)
    return rewriter.result()


def _moves(step: Step, strips: Container[int]) -> bool:
    return any(array in strips for array in (*step.reads, *step.writes))


def _copied(rewriter: Rewriter, step: Step, array: int, into: int | None = None) -> int:
    made = rewriter.array(array) if into is None else into
    rewriter.emit(Step("copy", step.op, (array,), (made,)))
    return made


def beside_gathers(
    kernels: list[Kernel], order: list[int], program: Lowered, early: bool
) -> tuple[list[Kernel], list[int]]:
    """Copies that the backward pass needs of activations in strips.

    Args:
        early: whether they run beside the first gather since they are ready; else right before their reader.
    """
    strips = {number for number, array in enumerate(program.arrays) if array.strips}
    if not strips:
        return kernels, order
    gathers = [position for position, number in enumerate(order) if early and _in_flight(kernels[number], program)]
    backward = _backward(kernels, order, program)
    if backward is None:
        return kernels, order
    made, uses = _uses(kernels, order)
    found, before = list(kernels), dict[int, list[int]]()
    for array in (array for array in made if array in strips and made[array] < backward):
        late = [position for position in uses.get(array, ()) if position >= backward]
        if not late:
            continue
        ready = max([made[array], *(position for position in uses[array] if position < backward)])
        beside = next((position for position in gathers if ready < position < late[0]), late[0])
        kind = program.arrays[array]
        program.arrays.append(Array(kind.shape, kind.dtype, kind.bytes, kind.maker, strips=True))
        copy = len(program.arrays) - 1
        before.setdefault(beside, []).append(len(found))
        how = "copy" if beside == late[0] else EARLY
        found.append(Kernel((), (array,), (copy,), how, kernels[order[beside]].place))
        reader = order[late[0]]
        found[reader] = replace(found[reader], reads=(*found[reader].reads, copy))
    changed = [each for position, number in enumerate(order) for each in (*before.get(position, ()), number)]
    return found, changed


def arguments_beside_gathers(kernels: Sequence[Kernel], order: Sequence[int], program: Lowered) -> list[int]:
    """Copies of arguments to another layout run beside the first gather, however late they are read."""
    copies = {
        number
        for number, kernel in enumerate(kernels)
        if kernel.kind == "copy" and all(program.arrays[array].maker < 0 for array in kernel.reads)
    }
    first = next((number for number in order if _in_flight(kernels[number], program)), None)
    if first is None or not copies:
        return list(order)
    changed: dict[int, None] = {}
    for number in order:
        if number == first:
            changed |= dict.fromkeys(one for one in order if one in copies)
        changed[number] = None
    return list(changed)


def _in_flight(kernel: Kernel, program: Lowered) -> bool:
    """Whether other kernels run beside this one: a gather of some size."""
    made = sum(program.arrays[array].bytes for array in kernel.writes)
    return kernel.kind == "all-gather" and made >= IN_FLIGHT


def _backward(kernels: Sequence[Kernel], order: Sequence[int], program: Lowered) -> int | None:
    """The position of the first gradient of a kernel: a convolution of which both operands are computed."""
    computed = _computed((step.kind, step.reads, step.writes) for step in program.steps)
    gradients = {
        number
        for number, step in enumerate(program.steps)
        if step.kind == "convolution" and len(step.reads) == 2 and step.reads[1] in computed
    }
    return next((at for at, number in enumerate(order) if not gradients.isdisjoint(kernels[number].steps)), None)


def _uses(kernels: Sequence[Kernel], order: Sequence[int]) -> tuple[dict[int, int], dict[int, list[int]]]:
    """Array -> the position at which it is made, and those at which it is read."""
    made: dict[int, int] = {}
    uses: dict[int, list[int]] = {}
    for position, number in enumerate(order):
        for array in kernels[number].writes:
            made[array] = position
        for array in kernels[number].reads:
            uses.setdefault(array, []).append(position)
    return made, uses
