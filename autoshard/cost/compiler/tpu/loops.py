"""Memory of dots that run as *windowed einsums* (collective matmuls) on TPU, see `ops/looped.py`.

From loops compiled for v5e and v5p, single products of 0.3 to 1.1 GB, each accurate to 0.1 %:

- A loop carries its operands, so they are materialised in bf16: f32 ones are copied, and it fuses no producers.
- Of a permuted operand four shards are live: two in multiplication, since it runs both ways, and two in flight.
- Beside the result, a second one if shards split the contraction, to accumulate; else two products of shards, which
  dynamic-update-slices write into it.
- Of permuted partial sums eight shards of the result are live.
- Over four devices there is one iteration and no loop: producers fuse, and two shards of the result are in flight (six
  products on v5e).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autoshard.cost.compiler.kernels import Kernel
from autoshard.cost.compiler.lowered import Array, Lowered, Step
from autoshard.cost.compiler.rewrite import Rewriter
from autoshard.cost.compiler.tpu.place import ALLOCATED, multiplies_matrices
from autoshard.cost.machine.compute import CONTRACTIONS
from autoshard.cost.machine.figures import whole
from autoshard.graph.contraction import dot_dims

RING = whole("ring_devices")

IN_FLIGHT, SUMMED = whole("ring_operands"), whole("ring_sums")

UNROLLED = whole("ring_unrolled")

ADDED_UP = 2
"""Shards that a loop of partial sums adds up at once, one in each direction, in buffers that are allocated before it.
"""


def goes_round(program: Lowered, number: int) -> bool:
    """Whether step `number` is the permutes of a windowed einsum."""
    return number >= 0 and program.steps[number].kind not in CONTRACTIONS and program.steps[number].parts >= RING


def as_loops(program: Lowered) -> Lowered:
    """Add to windowed einsums what their loops carry."""
    loops = [
        number for number, step in enumerate(program.steps) if step.kind == "dot_general" and _rounds(program, step)
    ]
    if not loops:
        return program
    carrying = {number for number in loops if _most_parts(program, program.steps[number]) > RING + 1}
    rewriter = Rewriter(program)
    copies: dict[int, int] = {}
    for number in loops:
        for turn in _rounds(program, program.steps[number]):
            moved = program.steps[turn]
            assert moved.collective is not None
            part = moved.collective.bytes
            summed = [array for array in moved.reads if program.arrays[array].maker == number]
            counts = (SUMMED - ADDED_UP, IN_FLIGHT) if number in carrying else (UNROLLED, UNROLLED)
            for array, count in [*((one, counts[0]) for one in summed), *((one, counts[1]) for one in moved.writes)]:
                rewriter.arrays[array].bytes, rewriter.arrays[array].shape = count * part, None
    for _, step in rewriter.changing(carrying):
        reads = list(step.reads)
        for place, array in enumerate(reads):
            if _copied(program, step, array):
                if array not in copies:
                    old = program.arrays[array]
                    copies[array] = rewriter.array(array, old.bytes // 2, old.shape)
                    rewriter.arrays[copies[array]].dtype = "bf16"
                    rewriter.emit(Step("convert", step.op, (array,), (copies[array],)))
                reads[place] = copies[array]
        beside = _beside(program, step)
        writes = (*step.writes, rewriter.array(step.writes[0], beside)) if beside else step.writes
        rewriter.emit(replace(step, reads=tuple(reads), writes=writes, parts=RING))
    return rewriter.result()


def turned_operands(program: Lowered) -> Lowered:
    """Copy what loops of partial sums slice, with the sliced dim major, where other kernels read it, too.

    Sums read the copy, too, so that only products and elementwise steps need what it was made of.
    """
    sliced = {number: array for number, step in enumerate(program.steps) if (array := _sliced(program, step)) >= 0}
    readers = {array: program.arrays[array].readers for array in sliced.values()}
    sums = {one for several in readers.values() for one in several if program.steps[one].kind == "reduce"}
    wanted = {array for array, several in readers.items() if any(one not in sums | sliced.keys() for one in several)}
    if not wanted:
        return program
    rewriter = Rewriter(program)
    copies: dict[int, int] = {}
    for number, step in rewriter.changing(sums | sliced.keys()):
        reads = list(step.reads)
        for place, array in enumerate(reads):
            if array in wanted and array == sliced.get(number, array):
                if array not in copies:
                    copies[array] = rewriter.copy(array, step.op)
                reads[place] = copies[array]
        rewriter.emit(replace(step, reads=tuple(reads)))
    return rewriter.result()


def _sliced(program: Lowered, step: Step) -> int:
    """The operand that a loop of partial sums slices; -1 for other loops and steps."""
    if step.kind != "dot_general" or step.parts < RING:
        return -1
    turn = next((reader for reader in program.arrays[step.writes[0]].readers if goes_round(program, reader)), None)
    if turn is None or len(step.reads) != 2:
        return -1
    lhs, rhs = step.shapes
    dims = dot_dims(len(lhs), len(rhs), program.graph.ops[step.op].attrs)
    made = {out: step.shapes[place][dim] for place, own in enumerate((dims.left, dims.right)) for dim, out in own}
    users = (program.steps[user] for array in program.steps[turn].writes for user in program.arrays[array].readers)
    shard = next((program.arrays[user.writes[0]].shape for user in users), None) or ()
    split = [dim for dim, size in enumerate(shard) if size < made.get(dim, 0)]
    if len(shard) != len(made) or len(split) != 1:
        return -1
    return step.reads[split[0] in {out for _, out in dims.right}]


def is_loop(program: Lowered, step: Step) -> bool:
    """Whether a step is the contraction of a windowed einsum."""
    return step.kind in CONTRACTIONS and bool(_rounds(program, step))


def _rounds(program: Lowered, step: Step) -> list[int]:
    """The permutes of a contraction's operands and of its partial sums."""
    makers = (program.arrays[array].maker for array in dict.fromkeys(step.reads))
    readers = (reader for array in step.writes for reader in program.arrays[array].readers)
    return [number for number in (*makers, *readers) if goes_round(program, number)]


def _most_parts(program: Lowered, step: Step) -> int:
    """Permutes of a contraction, the one of a device's own shard included."""
    return max(program.steps[number].parts for number in _rounds(program, step))


def _copied(program: Lowered, step: Step, array: int) -> bool:
    """Whether a loop carries a bf16 copy of an f32 operand: an argument, or one with users other than dots."""
    found = program.arrays[array]
    if found.dtype != "f32" or found.shape is None or goes_round(program, found.maker):
        return False
    if not multiplies_matrices(program, step):
        return False
    return found.maker < 0 or any(program.steps[reader].kind != "dot_general" for reader in found.readers)


def _beside(program: Lowered, step: Step) -> int:
    """Bytes beside the result of a loop that permutes an operand; 0 for one that permutes partial sums."""
    made = program.arrays[step.writes[0]].bytes
    attrs = program.graph.ops[step.op].attrs
    turns = [
        program.arrays[array].maker if goes_round(program, program.arrays[array].maker) else -1 for array in step.reads
    ]
    for turn in turns:
        if turn >= 0:
            shapes = [
                program.arrays[program.steps[number].reads[0] if number >= 0 else array].shape
                for array, number in zip(step.reads, turns, strict=True)
            ]
            summed = [
                [shape[dim] for dim in attrs[f"{side}_contract"]]
                if shape is not None and len(shape) == len(own)
                else None
                for shape, side, own in zip(shapes, ("lhs", "rhs"), step.shapes, strict=False)
            ]
            return made if summed[0] != summed[-1] else 2 * made // (program.steps[turn].parts - 1)
    return 0


def with_buffers(kernels: Sequence[Kernel], program: Lowered) -> list[Kernel]:
    """Kernels with the allocations of what loops add up in, which are instructions of their own (`AllocateBuffer`)."""
    found: list[Kernel] = []
    for kernel in kernels:
        steps = [program.steps[number] for number in kernel.steps]
        made = next((step.writes[0] for step in steps if _adds_up(program, step)), -1)
        shard = next((bytes for step in steps if (bytes := _summed_bytes(program, step))), 0)
        if made in kernel.writes or shard:
            kind = program.arrays[made if made in kernel.writes else kernel.writes[0]]
            if shard:
                kind = Array(None, kind.dtype, ADDED_UP * shard, -1)
            program.arrays.append(Array(kind.shape, kind.dtype, kind.bytes, kind.maker, tiles=kind.tiles))
            buffer = len(program.arrays) - 1
            found.append(Kernel((), (), (buffer,), ALLOCATED, kernel.place))
            displaced = frozenset(kernel.displaced | set(kernel.reads))
            kernel = replace(kernel, reads=(*kernel.reads, buffer), shares=not shard, displaced=displaced)
        found.append(kernel)
    return found


def _summed_bytes(program: Lowered, step: Step) -> int:
    """Bytes of a shard of the partial sums that a loop permutes; 0 for others."""
    if step.kind != "dot_general" or step.parts < RING:
        return 0
    readers = (reader for array in step.writes for reader in program.arrays[array].readers)
    moved = next((program.steps[reader].collective for reader in readers if goes_round(program, reader)), None)
    return moved.bytes if moved is not None else 0


def _adds_up(program: Lowered, step: Step) -> bool:
    """Whether a step is a loop that adds up its result."""
    made = [program.arrays[array].bytes for array in step.writes]
    return step.kind == "dot_general" and step.parts >= RING and len(made) > 1 and made[1] == made[0]
