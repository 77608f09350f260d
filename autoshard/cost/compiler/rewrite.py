"""Rewrites of a device's program before fusion: each returns a new program.

They copy the steps; arrays that lose producer and users stay in the list.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import replace

from autoshard.cost.compiler.lowered import SLICE, Array, Lowered, Step
from autoshard.graph.ops import Op, Value

PARTS = "parts"
"""Slices of an array, or a concatenation, as a kernel of its own."""


class Rewriter:
    """Copies a program step by step, with changes."""

    def __init__(self, program: Lowered) -> None:
        """For `program`, which stays unchanged."""
        self.source = program
        self.arrays = [
            Array(array.shape, array.dtype, array.bytes, array.maker, [], array.returned, array.donated)
            for array in program.arrays
        ]
        self.steps: list[Step] = []
        self.instead: dict[int, int] = {}  # array -> its replacement
        self.transposes: dict[tuple[int, tuple[int, ...]], int] = {}  # array and permutation -> its transposed copy
        self.positions: dict[tuple[tuple[int, ...], int], int] = {}  # shape and dim -> its iota along the dim

    def array(self, like: int, bytes: int | None = None, shape: tuple[int, ...] | None = None) -> int:
        """A new array of the dtype of array `like`, and of its shape unless `bytes` differ."""
        old = self.arrays[like]
        size = old.bytes if bytes is None else bytes
        if size == old.bytes and shape is None:
            shape = old.shape
        self.arrays.append(Array(shape, old.dtype, size, -1))
        return len(self.arrays) - 1

    def emit(self, step: Step) -> None:
        """Append a step, with operands replaced by `instead`."""
        reads = tuple(self.instead.get(array, array) for array in step.reads)
        number = len(self.steps)
        for array in dict.fromkeys(reads):
            self.arrays[array].readers.append(number)
        for array in step.writes:
            self.arrays[array].maker = number
        self.steps.append(step if reads == step.reads else replace(step, reads=reads))

    def changing(self, chosen: Container[int]) -> Iterator[tuple[int, Step]]:
        """(number, step) of the chosen ones, in order; emits the others unchanged."""
        for number, step in enumerate(self.source.steps):
            if number in chosen:
                yield number, step
            else:
                self.emit(step)

    def copy(self, array: int, op: int, into: int | None = None) -> int:
        """A copy of an array, as a step of `op`; a new array of its dtype and shape, or `into`."""
        made = self.array(array) if into is None else into
        self.emit(Step("copy", op, (array,), (made,)))
        return made

    def result(self) -> Lowered:
        """The new program."""
        for old, new in self.instead.items():  # a replaced result
            if self.arrays[old].returned:
                self.arrays[new].returned = True
                self.arrays[new].donated = self.arrays[old].donated
                self.arrays[old].returned = False
        results = [self.instead.get(array, array) for array in self.source.results]
        return replace(self.source, arrays=self.arrays, steps=self.steps, results=results)


def without_reduce_scatter(rewriter: Rewriter, step: Step) -> None:
    """Replace a reduce-scatter by an all-reduce and a dynamic-slice."""
    whole = rewriter.array(step.reads[0])
    rewriter.emit(replace(step, kind="all-reduce", writes=(whole,)))
    rewriter.emit(Step(SLICE, step.op, (whole,), step.writes))


def gather_majormost(rewriter: Rewriter, step: Step) -> None:
    """Run an all-gather along a dim that is not major-most on a transposed copy, and transpose back."""
    first = rewriter.array(step.reads[0])
    rewriter.emit(Step("transpose", step.op, step.reads, (first,)))
    moved = rewriter.array(step.writes[0])
    rewriter.emit(replace(step, reads=(first,), writes=(moved,)))
    rewriter.emit(Step("transpose", step.op, (moved,), step.writes))


def by_parts(rewriter: Rewriter, step: Step) -> None:
    """Run an all-to-all on separate slices, and concatenate them after."""
    first = rewriter.array(step.reads[0])
    rewriter.emit(Step(PARTS, step.op, step.reads, (first,)))
    moved = rewriter.array(step.writes[0])
    rewriter.emit(replace(step, reads=(first,), writes=(moved,)))
    rewriter.emit(Step(PARTS, step.op, (moved,), step.writes))


def transposed(rewriter: Rewriter, step: Step, place: int, dims: tuple[int, ...]) -> int:
    """Operand `place` with its dims permuted; emitted once."""
    source = rewriter.instead.get(step.reads[place], step.reads[place])
    key = (source, dims)
    if key not in rewriter.transposes:
        shape = rewriter.arrays[source].shape
        permuted = None if shape is None or len(shape) != len(dims) else tuple(shape[dim] for dim in dims)
        rewriter.transposes[key] = rewriter.array(source, shape=permuted)
        values = step.values[place : place + 1]
        rewriter.emit(Step("transpose", step.op, (source,), (rewriter.transposes[key],), values=values))
    return rewriter.transposes[key]


def canonical_dot(rewriter: Rewriter, step: Step, op: Op) -> None:
    """`DotDecomposer`: (batch, rows, contracted) x (batch, contracted, columns).

    Operands with several contracted or free dims in another order are copied; a matrix is read transposed.
    """
    reads = list(step.reads)
    ranks = [len(rewriter.source.graph.type_of(value).shape) for value in op.operands]
    batch = [tuple(op.attrs["lhs_batch"]), tuple(op.attrs["rhs_batch"])]
    contracted = [tuple(op.attrs["lhs_contract"]), tuple(op.attrs["rhs_contract"])]
    kept = [
        tuple(dim for dim in range(rank) if dim not in batch[side] and dim not in contracted[side])
        for side, rank in enumerate(ranks)
    ]
    plain = all(
        batch[side] == tuple(range(len(batch[side]))) and len(contracted[side]) == 1 and len(kept[side]) <= 1
        for side in (0, 1)
    )
    if not plain and len(reads) == 2:
        orders = [(*batch[0], *kept[0], *contracted[0]), (*batch[1], *contracted[1], *kept[1])]
        for place, dims in enumerate(orders):
            moving = tuple(dim for dim in dims if step.shapes[place][dim] > 1)
            if len(moving) > 1 and ranks[place] > 2 and list(moving) != sorted(moving):
                reads[place] = transposed(rewriter, step, place, dims)
    rewriter.emit(replace(step, reads=tuple(reads)))


def folded_transposes(program: Lowered) -> Lowered:
    """`TransposeFolding`: a dot reads the operand of a transpose of rows and columns; batch dims stay major-most."""
    program = _turned_back(program)
    folds: dict[tuple[int, int], int] = {}  # dot and operand number -> the transpose's operand
    kept: set[int] = set()  # transposes with other users
    for number, step in enumerate(program.steps):
        if step.kind != "transpose" or len(step.reads) != 1:
            continue
        array = step.writes[0]
        places = [
            (reader, place)
            for reader in program.arrays[array].readers
            for place, read in enumerate(program.steps[reader].reads)
            if read == array
        ]
        foldable = {one for one in places if _swaps_matrix(program, step, *one)}
        folds |= dict.fromkeys(foldable, step.reads[0])
        if program.arrays[array].returned or len(foldable) < len(places):
            kept.add(number)
    if not folds:
        return program
    gone = {program.arrays[program.steps[reader].reads[place]].maker for reader, place in folds} - kept
    rewriter = Rewriter(program)
    for number, step in enumerate(program.steps):
        if number not in gone:
            reads = tuple(folds.get((number, place), array) for place, array in enumerate(step.reads))
            rewriter.emit(replace(step, reads=reads))
    return rewriter.result()


def _turned_back(program: Lowered) -> Lowered:
    """What is transposed back is what was transposed (`AlgebraicSimplifier`)."""
    arrays, ops = program.arrays, program.graph.ops
    turns = {number for number, step in enumerate(program.steps) if step.kind == ops[step.op].kind == "transpose"}
    back: dict[int, int] = {}  # transpose -> the array that it equals
    for number in turns:
        step = program.steps[number]
        before = arrays[step.reads[0]].maker
        if before not in turns or arrays[step.writes[0]].returned:
            continue
        first = program.steps[before]
        if ops[step.op].operands[0].op != first.op:  # a reshape stands between
            continue
        one, two = (ops[each.op].attrs["permutation"] for each in (first, step))
        if all(one[dim] == place for place, dim in enumerate(two)):
            back[number] = first.reads[0]
    if not back:
        return program
    rewriter = Rewriter(program)
    for number, step in enumerate(program.steps):
        made = arrays[step.writes[0]] if number in turns else None
        if number in back:
            rewriter.instead[step.writes[0]] = back[number]
        elif made is None or made.returned or not back.keys() >= set(made.readers):
            rewriter.emit(step)
    return rewriter.result()


def _swaps_matrix(program: Lowered, transpose: Step, reader: int, place: int) -> bool:
    """Whether a step is a dot of matrices, and the transpose swaps rows and columns of its operand."""
    step = program.steps[reader]
    swap, product = program.graph.ops[transpose.op], program.graph.ops[step.op]
    if step.kind != "dot_general" or product.kind != "dot_general" or swap.kind != "transpose":
        return False
    if len(step.reads) != len(product.operands) or product.operands[place].op != swap.id:
        return False
    order = swap.attrs["permutation"]
    side = "lhs" if place == 0 else "rhs"
    leading = tuple(range(len(order) - 2))
    return (
        tuple(product.attrs[f"{side}_batch"]) == leading == tuple(order[:-2])
        and len(product.attrs[f"{side}_contract"]) == 1
        and order[-2] > order[-1]
    )


def writes_onto_constant(program: Lowered, scatter: Step) -> bool:
    """Whether a scatter is the only user of its operand, a splat constant."""
    array = program.arrays[scatter.reads[0]]
    return array.maker >= 0 and not program.steps[array.maker].reads and len(array.readers) == 1


def _summed_later(program: Lowered, step: Step) -> bool:
    """Whether all of several adds are partial sums that one collective sums."""
    while step.kind == "add" and len(readers := program.arrays[step.writes[0]].readers) == 1:
        step = program.steps[readers[0]]
    return step.kind in ("all-reduce", "reduce-scatter")


def scattered_onto(program: Lowered, *, again: bool = False) -> Lowered:
    """`x + scatter(zeros, …)` becomes `scatter(x, …)`, also if an all-reduce of partial sums stands in between.

    Then one device of each replica group scatters into x, the others into zeros: a select before it. XLA's
    `AlgebraicSimplifier`: before partitioning where nothing is annotated, else behind it, where a sum still stands.

    Args:
        again: whether it also runs once sums are merged.
    """
    at: dict[int, tuple[int, list[Step]]] = {}  # add -> (x, the steps that replace it)
    gone: set[int] = set()
    for number, step in enumerate(program.steps):
        if step.kind != "scatter" or len(step.writes) != 1 or len(step.reads) < 3:
            continue
        if not writes_onto_constant(program, step):
            continue
        chain, end = [number], step.writes[0]
        readers = program.arrays[end].readers
        if len(readers) == 1 and program.steps[readers[0]].kind == "all-reduce":
            chain.append(readers[0])
            end = program.steps[readers[0]].writes[0]
            readers = program.arrays[end].readers
        if len(readers) != 1 or any(program.arrays[program.steps[one].writes[0]].returned for one in chain):
            continue
        total = program.steps[readers[0]]
        others = [array for array in total.reads if array != end]
        if total.kind != "add" or len(others) != 1 or readers[0] in at:
            continue
        if not again and Value(step.op) in program.pinned and (len(chain) > 1 or _summed_later(program, total)):
            continue
        steps = [program.steps[one] for one in chain]
        steps[0] = replace(steps[0], reads=(others[0], *steps[0].reads[1:]))
        steps[-1] = replace(steps[-1], writes=total.writes)
        at[readers[0]] = others[0], steps
        gone.update((*chain, program.arrays[step.reads[0]].maker))
    if not at:
        return program
    rewriter = Rewriter(program)
    for number, step in enumerate(program.steps):
        if number in at:
            onto, steps = at[number]
            if len(steps) > 1:
                selected = rewriter.array(onto)
                rewriter.emit(Step("select", steps[0].op, (onto,), (selected,)))
                steps[0] = replace(steps[0], reads=(selected, *steps[0].reads[1:]))
            for one in steps:
                rewriter.emit(one)
        elif number not in gone:
            rewriter.emit(step)
    return rewriter.result()
