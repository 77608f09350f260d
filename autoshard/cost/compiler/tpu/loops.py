"""What libtpu keeps in memory of products that it runs as loops of permutes, *windowed einsums* (`ops/looped.py`).

Read off loops compiled for v5e and v5p, products of 0.3 to 1.1 GB alone in a program, each as follows to 0.1 %:

- A loop carries its operands, so they are in memory, in bf16: f32 ones are copied, and nothing is made inside it.
- Of an operand that goes round, four parts: two are multiplied, as it goes both ways, and two on their way.
- Beside the result, another one where the parts lie along the contraction, as they are added up; else the products of
  two parts, which are written into it.
- Of partial sums that go round, eight parts of the result.
- Among four devices a loop has one round, and is none: operands are made in the kernels of the parts, and two parts of
  the result lie on the way (six products on v5e; in one of them a gradient of 32 MB is kept beside, not predicted).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from autoshard.cost.compiler.lowered import Lowered, Step
from autoshard.cost.compiler.rewrite import Rewriter
from autoshard.cost.compiler.tpu.conv_loops import adds_up
from autoshard.cost.compiler.tpu.layout import for_convolution
from autoshard.cost.compiler.tpu.place import multiplies_matrices
from autoshard.cost.machine.compute import CONTRACTIONS
from autoshard.cost.machine.device import Device

RING = 4
"""Fewest devices that a loop is made for."""

IN_FLIGHT, SUMMED = 4, 8
"""Parts of an operand, and of partial sums, that are in memory while a loop runs."""

UNROLLED = 2
"""Parts of either where four devices exchange them."""

SPILLED = 2.5
"""How often a part is moved beside where it is made, where parts do not fit on chip: cut, and written to the result. As
seen in the first convolutions of three nets on v5e: 514, 680 and 1,053 MB, here 514, 671 and 1,028.
"""


def goes_round(program: Lowered, number: int) -> bool:
    """Whether step `number` is the permutes of a loop."""
    return number >= 0 and program.steps[number].parts >= RING


def as_loops(program: Lowered) -> Lowered:
    """Products around which parts are permuted, with what their loops carry."""
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
            counts = (SUMMED, IN_FLIGHT) if number in carrying else (UNROLLED, UNROLLED)
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


def with_bodies(program: Lowered, device: Device) -> Lowered:
    """What loops run beside one product and move beside its operands and its result.

    Every round, two parts are multiplied, as parts go both ways: half as many rounds as there are devices. Where the
    parts are of the result, one kernel more cuts what is made and two write it into the result; where partial sums go
    round, one clears and one adds (libtpu 0.0.51, rings of 8 and 16, alike on v5e and v5p: 16 kernels in a ring of 8, 4
    where the results are added up, 12 of partial sums). Counted are those that multiply or reach device memory: on one
    core what is cut, written and added is on chip; on two what is written is.
    """
    steps = list(program.steps)
    for number, step in enumerate(steps):
        turns = _rounds(program, step) if step.kind in CONTRACTIONS else []
        if not turns:
            continue
        turn = steps[turns[0]]
        devices = turn.parts - 1
        summed = step.writes[0] in turn.reads
        added = not summed and (adds_up(program, step) if step.kind == "convolution" else _adds_up(program, step, turn))
        far = device.cores > 1
        kernels = devices // 2 * (2 + far if summed else 1 if added else 1 + far)
        moved = 0.0 if summed or step.kind != "convolution" else _moved(program, step, devices, added, device)
        steps[number] = replace(step, inner=(moved, float(kernels - 1)))
    return replace(program, steps=steps)


def _moved(program: Lowered, step: Step, devices: int, added: bool, device: Device) -> float:
    """Bytes of device memory that a looped convolution moves for what it makes in its rounds.

    A part of few features takes whole rows of 128. On one core two parts, what is cut from them and the images lie on
    chip if there is room. Two cores write what products make to device memory; what is added up is read there again.
    """
    attrs = program.graph.ops[step.op].attrs
    images, made = (program.arrays[array].shape for array in (step.reads[0], step.writes[0]))
    if images is None or made is None or len(images) != len(attrs["lhs"]) or len(made) != len(attrs["out"]):
        return 0.0
    read = 2 * for_convolution(images, _within(attrs["lhs"]))
    features, cut = attrs["out"][1], 0 if added else 4 * math.prod(made)
    if not added:
        made = tuple(-(-size // devices) if dim == features else size for dim, size in enumerate(made))
    part = 4 * for_convolution(made, _within(attrs["out"]))
    fits = (2 if added else 4) * part + read <= device.on_chip_bytes
    far = devices * part + (devices * read / 2 if added else cut) if device.cores > 1 else 0.0
    return far if fits else far + SPILLED * devices * part


def _within(dims: Sequence[int]) -> tuple[int, int]:
    return min(dims[:2]), max(dims[:2])


def _adds_up(program: Lowered, step: Step, turn: Step) -> bool:
    """Whether the parts that go round lie along the contraction of a product."""
    place = step.reads.index(turn.writes[0])
    op = program.graph.ops[step.op]
    part, whole = program.arrays[turn.reads[0]].shape, program.graph.type_of(op.operands[place]).shape
    dims = op.attrs[f"{('lhs', 'rhs')[place]}_contract"]
    return part is not None and len(part) == len(whole) and any(part[dim] < whole[dim] for dim in dims)


def is_loop(program: Lowered, step: Step) -> bool:
    """Whether parts go round while a step, a product, runs."""
    return step.kind in CONTRACTIONS and bool(_rounds(program, step))


def _rounds(program: Lowered, step: Step) -> list[int]:
    """The permutes in which an operand or the partial sums of a product go round."""
    makers = (program.arrays[array].maker for array in dict.fromkeys(step.reads))
    readers = (reader for array in step.writes for reader in program.arrays[array].readers)
    return [number for number in (*makers, *readers) if goes_round(program, number)]


def _most_parts(program: Lowered, step: Step) -> int:
    """Parts that go round while a product runs, a device's own twice."""
    return max(program.steps[number].parts for number in _rounds(program, step))


def _copied(program: Lowered, step: Step, array: int) -> bool:
    """Whether a loop carries a copy of what it reads: of f32 that something else reads too, or that is an argument."""
    found = program.arrays[array]
    if found.dtype != "f32" or found.shape is None or goes_round(program, found.maker):
        return False
    if not multiplies_matrices(program, step):
        return False
    return found.maker < 0 or any(program.steps[reader].kind != "dot_general" for reader in found.readers)


def _beside(program: Lowered, step: Step) -> int:
    """Bytes beside the result of a loop around which an operand goes; 0 where partial sums do."""
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
