"""Products of one operand become one product (XLA's `DotMerger`), of the others beside each other.

Of two that merge, one moves few bytes, neither depends on the other, and their other operands have the same number of
dims: queries, keys and values of narrow layers, gates, the gradients of their weights.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace

from autoshard.cost.compiler.lowered import Lowered, Step
from autoshard.cost.compiler.rewrite import Rewriter
from autoshard.graph.ops import Op

THRESHOLD = 32 << 20
"""Bytes of operands and result of the smaller of two that merge (`xla_gpu_dot_merger_threshold_mb`)."""


def merged_products(program: Lowered) -> Lowered:
    """The program with such products as one step each, of several results; not one that is no device's (`work.py`)."""
    found = list(_groups(program)) if program.mesh is not None else []
    if not found:
        return program
    of = {number: members for members in found for number in members}
    rewriter = Rewriter(program)
    emitted: set[int] = set()
    waiting: set[int] = set()  # steps whose operands are on the stack
    for number in range(len(program.steps)):
        stack = [number]
        while stack:
            members = of.get(stack[-1], (stack[-1],))
            if members[0] in emitted:
                stack.pop()
                continue
            makers = [program.arrays[array].maker for each in members for array in program.steps[each].reads]
            needed = [maker for maker in makers if maker >= 0 and of.get(maker, (maker,))[0] not in emitted]
            if not needed:
                emitted.add(members[0])
                steps = [program.steps[each] for each in members]
                rewriter.emit(_together(steps, program) if len(steps) > 1 else steps[0])
            elif members[0] in waiting:  # two merged products would need each other
                return program
            waiting.add(members[0])
            stack += needed
    return rewriter.result()


def _groups(program: Lowered) -> Iterator[tuple[int, ...]]:
    """The numbers of the steps that become one, in order."""
    sharing: dict[Hashable, list[int]] = {}
    for number, step in enumerate(program.steps):
        if step.kind == "dot_general" and len(step.reads) == len(step.shapes) == 2 and step.flops:
            dims = repr(program.graph.ops[step.op].attrs)
            dtypes = [program.arrays[array].dtype for array in (*step.reads, *step.writes)]
            for place, (array, shape) in enumerate(zip(step.reads, step.shapes, strict=True)):
                rank = len(step.shapes[1 - place])
                sharing.setdefault((array, place, shape, rank, dims, *dtypes), []).append(number)
    taken: set[int] = set()
    for dots in sharing.values():
        left = [number for number in dots if number not in taken]
        while left:
            members, rest, size = [left[0]], list[int](), _moved(program, left[0])
            after = set[int]()  # steps that need one of the members
            _needing(program, left[0], left[-1], after)
            for number in left[1:]:
                small = min(size, _moved(program, number)) <= THRESHOLD
                if small and number not in after:
                    members.append(number)
                    size += _moved(program, number)
                    _needing(program, number, left[-1], after)
                else:
                    rest.append(number)
            if len(members) > 1:
                taken.update(members)
                yield tuple(members)
            left = rest


def _moved(program: Lowered, number: int) -> int:
    """Bytes of a step's operands and results."""
    step = program.steps[number]
    return sum(program.arrays[array].bytes for array in (*step.reads, *step.writes))


def _needing(program: Lowered, first: int, last: int, found: set[int]) -> None:
    """Add the steps up to `last` that need what step `first` makes."""
    stack = [first]
    while stack:
        for array in program.steps[stack.pop()].writes:
            for reader in program.arrays[array].readers:
                if reader <= last and reader not in found:
                    found.add(reader)
                    stack.append(reader)


def _together(steps: Sequence[Step], program: Lowered) -> Step:
    """One product of several that share an operand, as the op of the first."""
    first = steps[0]
    other = 1 if all(step.reads[0] == first.reads[0] for step in steps) else 0
    free = _free_dims(program.graph.ops[first.op], other, len(first.shapes[other]))
    width = sum(math.prod(step.shapes[other][dim] for dim in free) for step in steps)
    shape = list(first.shapes[other])
    for dim in free:
        shape[dim] = width if dim == free[0] else 1
    reads = [step.reads[other] for step in steps]
    return replace(
        first,
        reads=(first.reads[0], *reads) if other else (reads[0], first.reads[1], *reads[1:]),
        writes=tuple(array for step in steps for array in step.writes),
        flops=sum(step.flops for step in steps),
        values=(),
        shapes=(first.shapes[0], tuple(shape)) if other else (tuple(shape), first.shapes[1]),
    )


def _free_dims(op: Op, place: int, rank: int) -> list[int]:
    """The dims of a product's operand that are neither batch nor contracted."""
    side = "rhs" if place else "lhs"
    used = {*op.attrs[f"{side}_batch"], *op.attrs[f"{side}_contract"]}
    return [dim for dim in range(rank) if dim not in used]
