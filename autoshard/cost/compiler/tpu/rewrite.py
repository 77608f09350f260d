"""Rewrites of a device's program by XLA's TPU compiler before fusion, most of them copies between layouts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from autoshard.attention.dims import BLOCK
from autoshard.attention.form import FORWARD, KINDS
from autoshard.cost.compiler.lowered import (
    COLLECTIVES,
    ROUNDING,
    SLICE,
    Array,
    Lowered,
    Step,
    updates_of,
)
from autoshard.cost.compiler.rewrite import Rewriter, writes_onto_constant
from autoshard.cost.compiler.tpu.layout import for_convolution, row_major, tiled
from autoshard.cost.compiler.tpu.strip_widths import SPLITS
from autoshard.cost.machine.figures import whole
from autoshard.cost.machine.tiles import LANES
from autoshard.graph.groups import ELEMENTWISE

Dims = tuple[int, int]


def _row_major(rewriter: Rewriter, like: int) -> int:
    """A new array like `like`, its last dim minor-most (row-major)."""
    shape = rewriter.arrays[like].shape or ()
    return rewriter.array(like, rewriter.arrays[like].bytes * row_major(shape) // max(1, math.prod(shape)))


def gathered_results(program: Lowered) -> Lowered:
    """No all-gather writes into a donated argument's buffer: copy its result there, and read a copy of the argument.

    Such as a replicated parameter with sharded optimizer state.
    """
    gathered = {
        result: argument
        for result, argument in program.updates.items()
        if program.steps[program.arrays[result].maker].kind == "all-gather"
    }
    if not gathered:
        return program
    rewriter = Rewriter(program)
    for argument in gathered.values():
        if program.arrays[argument].readers:
            op = program.steps[program.arrays[argument].readers[0]].op
            rewriter.instead[argument] = rewriter.copy(argument, op)
    return _with_results_copied(rewriter, gathered)


def _with_results_copied(rewriter: Rewriter, results: Iterable[int]) -> Lowered:
    """The rewriter's source with copies of some results at its end."""
    program = rewriter.source
    for step in program.steps:
        rewriter.emit(step)
    for result in results:
        rewriter.instead[result] = rewriter.copy(result, program.steps[program.arrays[result].maker].op)
    return rewriter.result()


def scattered_by_rows(program: Lowered) -> Lowered:
    """Scatter rows into a row-major array, then copy it to the layout with less padding.

    Rows of a narrow table take 128 lanes each while they are scattered. Scatters of few rows into tables where that
    wastes too much keep the table's layout.
    """
    narrow = {number for number, step in enumerate(program.steps) if _narrow(program, step)}
    if not narrow:
        return program
    fills = {program.arrays[program.steps[number].reads[0]].maker for number in narrow}
    fills = {fill for fill in fills if fill >= 0 and _fill(program, fill)}
    kept = [number for number in sorted(narrow) if program.arrays[program.steps[number].reads[0]].maker not in fills]
    updates = _row_major_updates(program, [number for number in kept if _pads_little(program, number)])
    rewriter = Rewriter(program)
    copies = {argument: _row_major(rewriter, argument) for argument in updates.arguments}
    for argument, copy in copies.items():
        rewriter.copy(argument, program.steps[program.arrays[argument].readers[0]].op, copy)
    for number, step in enumerate(program.steps):
        if number in updates.steps or number in updates.lookups:
            step = replace(step, reads=tuple(copies.get(array, array) for array in step.reads))
        if number in updates.steps and program.arrays[step.writes[0]].returned:
            made = copies[step.writes[0]] = _row_major(rewriter, step.writes[0])
            rewriter.emit(replace(step, writes=(made,)))
            rewriter.emit(Step("copy", step.op, (made,), step.writes))
        elif number in fills:
            rewriter.instead[step.writes[0]] = _row_major(rewriter, step.writes[0])
            rewriter.emit(replace(step, writes=(rewriter.instead[step.writes[0]],)))
        elif number in narrow:
            onto, made = step.reads[0], _row_major(rewriter, step.writes[0])
            if program.arrays[onto].maker not in fills:
                onto = rewriter.copy(step.reads[0], step.op, _row_major(rewriter, step.writes[0]))
            rewriter.emit(replace(step, reads=(onto, *step.reads[1:]), writes=(made,)))
            if number in updates.scatters:
                copies[step.writes[0]] = made
            else:
                rewriter.emit(Step("copy", step.op, (made,), step.writes))
        else:
            rewriter.emit(step)
    return rewriter.result()


def looked_up_by_rows(program: Lowered) -> Lowered:
    """Gather rows from a row-major copy of a table whose layout with least padding is another.

    One copy for all its gathers; rows of a narrow table take 128 lanes each (64 MB for 125,000 f32 rows of 64).
    """
    narrow = {number for number, step in enumerate(program.steps) if _looks_up_narrow(program, step)}
    if not narrow:
        return program
    rewriter = Rewriter(program)
    copies: dict[int, int] = {}
    for number, step in enumerate(program.steps):
        if number in narrow:
            table = step.reads[0]
            if table not in copies:
                copies[table] = rewriter.copy(table, step.op, _row_major(rewriter, table))
            step = replace(step, reads=(copies[table], *step.reads[1:]))
        rewriter.emit(step)
    return rewriter.result()


def _looks_up_narrow(program: Lowered, step: Step) -> bool:
    """Whether a gather takes whole rows of an array whose least padded layout is not row-major."""
    if step.kind != "gather" or not step.reads:
        return False
    shape = program.arrays[step.reads[0]].shape
    attrs = program.graph.ops[step.op].attrs
    if shape is None or len(shape) < 2 or len(shape) - 1 in (*attrs["start_index_map"], *attrs["operand_batch_dims"]):
        return False
    by_rows, least = row_major(shape), tiled(shape)
    item = program.arrays[step.reads[0]].bytes // max(1, math.prod(shape))
    if by_rows > MOST_PADDED * least and (by_rows - least) * item > MOST_WASTED:
        return False  # rows are read in the table's layout
    return bool(attrs["start_index_map"]) and by_rows > least


@dataclass(frozen=True)
class _Updates:
    """Elementwise updates of a table in a scatter's row-major layout.

    Attributes:
        scatters: numbers of the scatters.
        steps: of the elementwise steps that follow.
        arguments: their operands of the same shape: a table and its moments, copied to row-major too.
        lookups: gathers from these.
    """

    scatters: frozenset[int] = frozenset()
    steps: frozenset[int] = frozenset()
    arguments: tuple[int, ...] = ()
    lookups: frozenset[int] = frozenset()


def _row_major_updates(program: Lowered, scatters: Sequence[int]) -> _Updates:
    """Updates of tables whose rows are scattered into another gradient of theirs (tied weights).

    As seen with 96 columns per device under FSDP, and in small programs; in the latter also for scatters into zeros,
    which larger programs copy instead.
    """
    steps: dict[int, None] = {}
    arguments: dict[int, None] = {}
    found: list[int] = []
    for number in scatters:
        shape = program.arrays[program.steps[number].writes[0]].shape
        todo, mine = [program.steps[number].writes[0]], dict[int, None]()
        while todo:
            for reader in program.arrays[todo.pop()].readers:
                step = program.steps[reader]
                if step.kind in ELEMENTWISE and program.arrays[step.writes[0]].shape == shape and reader not in mine:
                    mine[reader] = None
                    todo.append(step.writes[0])
        read = {array for reader in mine for array in program.steps[reader].reads}
        todo = [array for array in read if program.arrays[array].shape == shape]
        while todo:  # other operands of the update: a moment and its decay
            maker = program.arrays[todo.pop()].maker
            step = program.steps[maker]
            if maker >= 0 and maker not in mine and maker != number and step.kind in ELEMENTWISE:
                mine[maker] = None
                todo += [array for array in step.reads if program.arrays[array].shape == shape]
                read.update(step.reads)
        own = [array for array in read if program.arrays[array].maker < 0 and program.arrays[array].shape == shape]
        if own:
            found.append(number)
            steps |= mine
            arguments |= dict.fromkeys(sorted(own))
    lookups = {
        reader
        for array in arguments
        for reader in program.arrays[array].readers
        if program.steps[reader].kind == "gather" and program.steps[reader].reads[0] == array
    }
    return _Updates(frozenset(found), frozenset(steps), tuple(arguments), frozenset(lookups))


def _pads_little(program: Lowered, number: int) -> bool:
    """Whether a row-major table takes less than twice as much: 96 columns of 128, not 64 or 8."""
    shape = program.arrays[program.steps[number].writes[0]].shape or ()
    return row_major(shape) < COPIED * tiled(shape)


def moved_by_rows(program: Lowered) -> Lowered:
    """Gather into, and scatter from, an array with one row per index: narrow rows take 128 lanes each.

    A copy after or before has the layout with less padding (8 columns: 8 MB become 134).
    """
    widened = {number: sizes for number, step in enumerate(program.steps) if (sizes := _rows_moved(program, step))}
    if not widened:
        return program
    cut = {number: _cut(program, number) for number in widened if program.steps[number].kind == "gather"}
    gone = {one for chain in cut.values() for one in chain}
    rewriter = Rewriter(program)
    for number, step in rewriter.changing({*widened, *gone}):
        if number in gone:
            continue
        place, size = widened[number]
        if step.kind == "gather":
            made = rewriter.array(step.writes[0], size)
            rewriter.emit(replace(step, writes=(made,)))
            last = step
            for one in cut[number]:
                last = program.steps[one]
                part = rewriter.array(last.writes[0], _row_bytes(program, last.writes[0], _window(program, step)))
                rewriter.emit(replace(last, reads=(made,), writes=(part,)))
                made = part
            rewriter.emit(Step("copy", step.op, (made,), last.writes))
        else:
            read = rewriter.copy(step.reads[place], step.op, rewriter.array(step.reads[place], size))
            rewriter.emit(replace(step, reads=(*step.reads[:place], read, *step.reads[place + 1 :])))
    return rewriter.result()


def _cut(program: Lowered, number: int) -> list[int]:
    """The chain of dynamic-slices that are a gather's only users: they keep its layout."""
    found: list[int] = []
    while True:
        made = program.arrays[program.steps[number].writes[0]]
        if made.returned or len(made.readers) != 1 or program.steps[made.readers[0]].kind != SLICE:
            return found
        number = made.readers[0]
        if program.arrays[program.steps[number].writes[0]].shape is None:
            return found
        found.append(number)


def _window(program: Lowered, step: Step) -> tuple[int, ...]:
    """The dims of a gather's result, or of a scatter's updates, that make up one row."""
    return tuple(program.graph.ops[step.op].attrs["offset_dims" if step.kind == "gather" else "window_dims"])


def _row_bytes(program: Lowered, number: int, window: tuple[int, ...]) -> int:
    """Bytes of an array laid out as one row per index, the dims of `window` in the row."""
    array = program.arrays[number]
    shape = array.shape or ()
    columns = math.prod(shape[dim] for dim in window)
    return array.bytes * row_major((math.prod(shape) // columns, columns)) // math.prod(shape)


def _rows_moved(program: Lowered, step: Step) -> tuple[int, int] | None:
    """(operand number, bytes with one row per index) of a gather or scatter of narrow rows; else None."""
    if step.kind not in ("gather", "scatter") or len(step.writes) != 1:
        return None
    place = len(step.reads) - 1
    array = program.arrays[step.writes[0] if step.kind == "gather" else step.reads[place]]
    window = _window(program, step)
    if array.shape is None or not window or max(window) >= len(array.shape) or not all(array.shape):
        return None
    columns = math.prod(array.shape[dim] for dim in window)
    if columns == 1 or row_major((math.prod(array.shape) // columns, columns)) < COPIED * tiled(array.shape):
        return None
    return place, _row_bytes(program, step.writes[0] if step.kind == "gather" else step.reads[place], window)


def _narrow(program: Lowered, step: Step) -> bool:
    if step.kind != "scatter" or len(step.writes) != 1:
        return False
    shape = program.arrays[step.writes[0]].shape
    if shape is None or row_major(shape) <= tiled(shape):
        return False
    table, updates = program.arrays[step.writes[0]], updates_of(program, step)
    wasted = (row_major(shape) - tiled(shape)) * table.bytes // max(1, math.prod(shape))
    rows = updates.bytes * shape[0] // max(1, table.bytes)
    return wasted <= max(MOST_WASTED, rows * WASTED_A_ROW) or row_major(shape) < MOST_PADDED * tiled(shape)


def _fill(program: Lowered, number: int) -> bool:
    """Whether a step makes a splat constant that only one scatter uses."""
    array = program.arrays[program.steps[number].writes[0]]
    return len(array.readers) == 1 and writes_onto_constant(program, program.steps[array.readers[0]])


def kernels_by_rows(program: Lowered) -> Lowered:
    """Row-major copies around the kernels of attentions kept as one op, of whole blocks of queries and of keys.

    A log-sum-exp fills all lanes of its kernel.
    """
    kernels = {number for number, step in enumerate(program.steps) if step.kind in KINDS}
    if not kernels:
        return program
    rewriter = Rewriter(program)
    copies: dict[int, int] = {}

    def in_blocks(array: int, sums: bool) -> int:
        """A kernel's copy of an array of (…, rows, features), or of the (…, rows) of sums; or the array itself."""
        shape = program.arrays[array].shape or ()
        if sums or len(shape) < 4:
            return array if _is_row_major(program, array) else _row_major(rewriter, array)
        padded = (*shape[:-2], _in_whole(shape[-2]), shape[-1])
        if padded == shape and _is_row_major(program, array):
            return array
        return rewriter.array(array, rewriter.arrays[array].bytes * row_major(padded) // max(1, math.prod(shape)))

    for _, step in rewriter.changing(kernels):
        backward = step.kind != FORWARD
        for place, source in enumerate(step.reads):
            if source not in copies:
                rows = in_blocks(source, sums=backward and place == len(step.reads) - 2)
                if rows != source:
                    copies[source] = rewriter.copy(source, step.op, rows)
        written = []
        for place, made in enumerate(step.writes):
            rows = (program.arrays[made].shape or (1,))[-1]
            lanes = LANES * rewriter.arrays[made].bytes * _in_whole(rows) // max(1, rows)
            sums = not backward and place == 1
            written.append(rewriter.array(made, lanes) if sums else in_blocks(made, sums=False))
        reads = tuple(copies.get(source, source) for source in step.reads)
        rewriter.emit(replace(step, reads=reads, writes=tuple(written)))
        for rows, made in zip(written, step.writes, strict=True):
            if rows != made:
                rewriter.emit(Step("copy", step.op, (rows,), (made,)))
    return rewriter.result()


def _in_whole(rows: int) -> int:
    return -(-rows // BLOCK) * BLOCK


def _is_row_major(program: Lowered, array: int) -> bool:
    """Whether an array's least padded layout is row-major."""
    shape = program.arrays[array].shape
    return shape is not None and row_major(shape) <= tiled(shape)


MOST_PADDED, MOST_WASTED = whole("table_padding"), whole("table_waste")

WASTED_A_ROW = whole("table_waste_a_row")

COPIED = 2.0
"""An argument that takes so many times more in a convolution's layout is copied."""

KEEPS_DIMS = ELEMENTWISE | {"reduce_window", "select_and_scatter", "pad", "reverse", SLICE, *COLLECTIVES}
"""Kinds whose operands and results of one rank have one layout."""


def laid_out_for_convolutions(program: Lowered, widths: Mapping[int, int]) -> Lowered:
    """Lay out convolutions' operands and results, and elementwise values around, with batch and features in tiles.

    An argument with few of both, such as images of three channels, is mostly padding then and copied. The copy is in
    bf16, as convolutions read it, and live from the forward pass to the kernel's gradient, which reads it too; if the
    forward pass works on strips, the gradient has its own copy.

    Args:
        widths: arrays in strips -> positions in each.
    """
    if not any(step.kind == "convolution" for step in program.steps):
        return program
    rewriter = Rewriter(program)
    copies: dict[tuple[int, Dims, int], int] = {}
    for step in program.steps:
        reads = list(step.reads)
        width = widths.get(step.writes[0], 0)
        for array, dims in _tile_dims(program, step):
            found = program.arrays[array]
            if array not in reads or found.shape is None or _made(program, found):
                continue
            size = for_convolution(found.shape, dims)
            if size < COPIED * tiled(found.shape):
                continue
            cut = width if array == step.reads[0] else 0
            if (array, dims, cut) not in copies:
                narrow = found.dtype == "f32"
                item = 2 if narrow else found.bytes // math.prod(found.shape)
                shape = (SPLITS * found.shape[0], *found.shape[1:-1], cut) if cut else found.shape
                copy = copies[array, dims, cut] = rewriter.array(array, for_convolution(shape, dims) * item)
                rewriter.arrays[copy].dtype = "bf16" if narrow else found.dtype
                rewriter.emit(Step("copy", step.op, (array,), (copy,)))
            reads[reads.index(array)] = copies[array, dims, cut]
        rewriter.emit(step if tuple(reads) == step.reads else replace(step, reads=tuple(reads)))
    return rewriter.result()


def _made(program: Lowered, array: Array) -> bool:
    """Whether an array is more than a shard of an argument, its dims in another order, or a collective of one."""
    while array.maker >= 0:
        step = program.steps[array.maker]
        if step.kind not in (SLICE, ROUNDING, "transpose") and step.kind not in COLLECTIVES:
            return True
        array = program.arrays[step.reads[0]]
    return False


def convolved(program: Lowered, *, arguments: bool = False) -> dict[int, Dims]:
    """Arrays in a convolution's layout -> their two dims in tiles; `arguments`: also those, of which copies have it."""
    found: dict[int, Dims] = {}
    for step in program.steps:
        if step.kind == "convolution":
            for array, dims in _tile_dims(program, step):
                found.setdefault(array, dims)
    _spread(program, found)
    return {array: dims for array, dims in found.items() if arguments or program.arrays[array].maker >= 0}


def in_batches(program: Lowered) -> dict[int, Dims]:
    """Arrays in the layout of a product with batch dims -> the two other dims, which are in tiles."""
    found: dict[int, Dims] = {}
    for step in program.steps:
        if step.kind == "dot_general" and len(step.reads) == 2 and step.writes:
            for array, dims in _product_dims(program, step):
                found.setdefault(array, dims)
    _spread(program, found)
    return {array: dims for array, dims in found.items() if program.arrays[array].maker >= 0}


def _turn(program: Lowered, step: Step, found: dict[int, Dims]) -> None:
    """Spread a layout through a transpose, which is none then."""
    order = program.graph.ops[step.op].attrs.get("permutation", ())
    read, made = step.reads[0], step.writes[0]
    before, after = program.arrays[read].shape or (), program.arrays[made].shape or ()
    if len(before) != len(order) or tuple(before[dim] for dim in order) != after:
        return
    if read in found and made not in found:
        first, second = sorted(order.index(dim) for dim in found[read])
        found[made] = first, second
    elif made in found and read not in found:
        first, second = sorted(order[dim] for dim in found[made])
        found[read] = first, second


def laid_out_for_products(program: Lowered) -> Lowered:
    """Let tiles of what products with batch dims read and make be of their two other dims."""
    for array, dims in in_batches(program).items():
        program.arrays[array].tile_dims = dims
    return program


def _product_dims(program: Lowered, step: Step) -> list[tuple[int, Dims]]:
    """A product's operands and result, where it has batch dims, and their two other dims."""
    attrs = program.graph.ops[step.op].attrs
    if not attrs.get("lhs_batch"):
        return []
    ranks = [len(program.arrays[array].shape or ()) for array in (*step.reads, step.writes[0])]
    batches = (*(attrs[f"{side}_batch"] for side in ("lhs", "rhs")), range(len(attrs["lhs_batch"])))
    found = []
    for array, rank, batch in zip((*step.reads, step.writes[0]), ranks, batches, strict=True):
        rest = [dim for dim in range(rank) if dim not in batch]
        if len(rest) == 2:
            found.append((array, (rest[0], rest[1])))
    return found


def _spread(program: Lowered, found: dict[int, Dims]) -> None:
    """Add arrays from which, or to which, steps that keep the layout lead."""
    for steps in (program.steps, reversed(program.steps)) if found else ():
        for step in steps:
            if step.kind == "transpose":
                _turn(program, step, found)
            if step.kind not in KEEPS_DIMS:
                continue
            around = [array for array in (*step.reads, *step.writes) if program.arrays[array].shape is not None]
            known = next((array for array in around if array in found), None)
            if known is not None:
                rank = len(program.arrays[known].shape or ())
                same = [array for array in around if len(program.arrays[array].shape or ()) == rank]
                found |= {array: found[known] for array in same if array not in found}


def _tile_dims(program: Lowered, step: Step) -> list[tuple[int, Dims]]:
    """A convolution's operands and result, and their batch and feature dims."""
    if step.kind != "convolution" or len(step.reads) < 2:
        return []
    found = []
    for array, name in zip((*step.reads[:2], *step.writes), ("lhs", "rhs", "out"), strict=True):
        dims = tuple(program.graph.ops[step.op].attrs[name])
        shape = program.arrays[array].shape
        if shape is not None and len(shape) == len(dims) and all(shape):
            found.append((array, (min(dims[:2]), max(dims[:2]))))
    return found
