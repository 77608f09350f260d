"""Softmaxes that a TPU's compiler runs inside the product that reads them: the weights of attention times the values.

libtpu's pass `flash_attention`, which comes behind the partitioner, makes one kernel of a softmax over the last dim and
of the product that sums over it. Where the logits are a product of queries and keys and nothing else (a mask of
constants that masks nothing is none), that is part of the kernel too, which then reads queries, keys and values
(`tpu_custom_call`); else it reads logits and values (`online-softmax`). It reads its operands in the program's dtype,
f32 is not rounded before, their last dim the innermost, and writes its result so: what lies otherwise is copied. The
kernel of three operands writes f32 always. What else reads logits or weights, the backward pass, has them made beside
it, the product of queries and keys once more; if nothing does they are never made.

Compiled to find out when (libtpu 0.0.51; single attentions, forward and with their gradients): f32 and bf16, not f16;
heads of 8 to 1,024; operands split over batch, heads or rows of queries, gathered before or not. Not where something is
multiplied on behind the softmax (dropout), where its largest element is not subtracted, where the product has the
values first, or reads them transposed, where a device takes a part of the sum over values, and not where a batch dim
of the product is cut down to 1 by the partitioner: reshapes then come in between. A batch dim that is 1 from the start
is dropped before that, and does not matter; nor do reshapes of the program's own, which merge batch dims for the
products and split them for the softmax.

- Of three operands, on all kinds of TPU: queries scaled or not, keys and values of other widths, the softmax in f32 of
  bf16 logits; up to two batch dims; rows and columns 128, 256, 384, 512 or a multiple of 512. Where logits are such a
  product of other sizes (640, 768, 896) there is neither kernel.
- Of two, on v5e, v5p and v6e, not on v4: with a mask or scale behind the product, or of three batch dims and more, or
  where the logits are summed over devices; 128 rows and columns or a multiple of each (640 of both, 128 of 16,384; not
  64, 96, 160, 192, 197, 320), on v6e of 256 (768, 1,280; not 384, 640, 896).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise

from autoshard.cost.machine.device import load_device
from autoshard.cost.machine.figures import of_kind, whole
from autoshard.cost.partitioner.context import Context
from autoshard.cost.partitioner.partitioned import Attention, Ring
from autoshard.cost.partitioner.passes.simplify import fold
from autoshard.graph.ops import Graph, Op, Value

BLOCK_MULTIPLE = of_kind("attention_unit", "")
"""Where the product of queries and keys is part of the kernel, on all kinds."""

BLOCK = whole("attention_block")

MOST_LOGITS, WIDEST = whole("attention_most_logits"), whole("attention_widest")

MOST_BATCH_DIMS = 2
"""Of a kernel with both products, those of 1 left out."""

KERNEL_DTYPES = frozenset({"f32", "bf16"})


def attentions(context: Context) -> Mapping[int, Attention]:
    """Products that become such kernels under these shardings -> what of."""
    graph, shardings = context.graph, context.shardings
    kind = load_device(shardings.subaxes.mesh.device).kind
    found: dict[int, Attention] = {}
    for op in graph.ops:
        chain = _softmax(graph, op.operands[0]) if op.kind == "dot_general" and op.id not in context.free else []
        if chain and _of_rows(graph, op) and op.operands[1].op not in context.free:
            made = _attention(context, op, chain, of_kind("attention_unit", kind) or None)
            if made is not None and _runs_alone(context, op, (0,)):
                found[op.id] = made
    return found


def unread(context: Context) -> frozenset[int]:
    """Ops of softmaxes, and of products before them, that nothing but these kernels has read."""
    graph, found = context.graph, context.attentions
    products = {each.product for each in found.values()}  # their operands are what the kernels read
    logits = {each.logits for each in found.values() if each.product is None}
    gone: set[int] = set()

    def reads(op: Op, value: Value) -> bool:
        attention = found.get(op.id)
        if attention is None:
            return op.id not in gone or op.id in products
        return value == op.operands[1] or (value == attention.logits and attention.product is None)

    def kept(value: Value) -> bool:
        if value in context.graph.returned or value in logits:
            return True
        return any(reads(op, value) for op in context.graph.readers(value))

    todo = [graph.ops[number].operands[0].op for number in found]
    while todo:
        op = graph.ops[todo.pop()]
        if op.kind == "argument" or op.id in gone or any(kept(Value(op.id, i)) for i in range(len(op.results))):
            continue
        gone.add(op.id)
        if op.id not in products:
            todo.extend(value.op for value in op.operands)
    return frozenset(gone)


def _attention(context: Context, op: Op, chain: Sequence[int], unit: int | None) -> Attention | None:
    """What a product of a softmax, whose ops are `chain`, and values becomes, if all else fits."""
    graph = context.graph
    logits = graph.ops[chain[-1]].operands[0]
    sizes = _sizes(context, op, chain)
    if logits.op in context.free or sizes is None:
        return None
    way = _way(graph, logits)
    queries = graph.ops[way[-1].op]
    dtypes = {graph.type_of(value).dtype for value in (*queries.operands, op.operands[1])}
    opaque = len(dtypes) > 1 and graph.type_of(way[-1]).dtype == graph.type_of(logits).dtype
    alone = _of_queries(context, queries) and _stays(context, way) and _runs_alone(context, queries)
    if opaque or not alone:
        if unit is None or any(size % unit for size in sizes):
            return None
        return Attention(logits, _turns(*sizes, _block_of_logits(*sizes)))
    if len(dtypes) > 1 or any(value.op in context.free for value in queries.operands):
        return None
    whole = all(size % BLOCK_MULTIPLE == 0 and size % min(size, BLOCK) == 0 for size in sizes)
    return Attention(logits, _turns(*sizes, (BLOCK, BLOCK)), queries.id) if whole else None


def _turns(rows: int, columns: int, block: tuple[int, int]) -> int:
    """How often a kernel reads keys and values that works on blocks of so many rows and columns."""
    return rows // block[0] if columns > block[1] else 1


def _block_of_logits(rows: int, columns: int) -> tuple[int, int]:
    """Rows and columns of logits that a kernel reads at once: as many as it may; of equal ones the wider."""

    def parts(size: int) -> list[int]:
        return [part for part in range(BLOCK_MULTIPLE, min(size, WIDEST - 1) + 1, BLOCK_MULTIPLE) if size % part == 0]

    blocks = ((high, wide) for high in parts(rows) for wide in parts(columns) if high * wide < MOST_LOGITS)
    return max(blocks, key=lambda block: (math.prod(block), block[1]), default=(BLOCK_MULTIPLE, BLOCK_MULTIPLE))


def _runs_alone(context: Context, op: Op, as_they_are: Collection[int] = ()) -> bool:
    """Whether a product is one on each device: not summed over devices, no loop, these operands not moved."""
    emission = context.emission(op, context.shardings.made[Value(op.id)])
    moved = any(place in as_they_are or isinstance(move[0], Ring) for place, move, _ in emission.moves)
    return not emission.own and not moved


def _softmax(graph: Graph, value: Value) -> list[int]:
    """The ops of a softmax over the last dim, from what divides to what takes the largest logit away; or none."""
    divide = graph.ops[_way(graph, value)[-1].op]
    if divide.kind != "divide" or not _repeats(graph, divide, "add"):
        return []
    exponential = graph.ops[_before(graph, divide.operands[0]).op]
    if exponential.kind != "exponential":
        return []
    shifted = graph.ops[_before(graph, exponential.operands[0]).op]
    if shifted.kind != "subtract" or not _repeats(graph, shifted, "max"):
        return []
    return [divide.id, exponential.id, shifted.id]


def _repeats(graph: Graph, op: Op, reducer: str) -> bool:
    """Whether an op's second operand repeats what its first one's elements along the last dim are reduced to."""
    value = _before(graph, op.operands[1], ("broadcast_in_dim", "reshape", "convert"))
    made = graph.ops[value.op]
    if made.kind != "reduce" or made.attrs.get("reducer") != reducer:
        return False
    last = len(graph.type_of(made.operands[0]).shape) - 1
    return tuple(made.attrs["dims"]) == (last,) and _before(graph, made.operands[0]) == _before(graph, op.operands[0])


def _before(graph: Graph, value: Value, kinds: Collection[str] = ("convert",)) -> Value:
    """The value before such ops, by default before its dtype was changed."""
    while graph.ops[value.op].kind in kinds:
        value = graph.ops[value.op].operands[0]
    return value


def _way(graph: Graph, value: Value) -> list[Value]:
    """A value, and what it was before: in another dtype, its batch dims merged or split, or just the same."""
    found = [value]
    while True:
        op = graph.ops[found[-1].op]
        if op.kind == "reshape":
            before, after = graph.type_of(op.operands[0]).shape, op.results[0].shape
            if min(len(before), len(after)) < 2 or before[-2:] != after[-2:]:
                return found
        source = op.operands[0] if op.kind in ("convert", "reshape") else _unchanged(graph, op)
        if source is None:
            return found
        found.append(source)


def _unchanged(graph: Graph, op: Op) -> Value | None:
    """The operand that an elementwise op's result is equal to: logits masked by constants that mask nothing."""
    same = fold(graph).same.get(Value(op.id))
    if same in op.operands:
        return same
    if op.kind in ("add", "subtract") and _number(graph, op.operands[1]) == 0:
        return op.operands[0]
    if op.kind == "add" and _number(graph, op.operands[0]) == 0:
        return op.operands[1]
    taken = _number(graph, op.operands[0]) if op.kind == "select" else None
    return None if taken is None else op.operands[1 if taken else 2]


def _number(graph: Graph, value: Value) -> float | bool | None:
    """The constant that every element of a value is."""
    number = fold(graph).splat.get(value)
    op = graph.ops[value.op]
    if number is not None or op.kind not in ("not", "reshape", "broadcast_in_dim", "compare"):
        return number
    read = [_number(graph, operand) for operand in op.operands]
    if None in read or op.kind in ("reshape", "broadcast_in_dim"):
        return read[0]
    if op.kind == "not":
        return not read[0] if op.results[0].dtype == "i1" else None
    equal = {"EQ": read[0] == read[1], "NE": read[0] != read[1]}
    return equal.get(op.attrs["direction"])


def _stays(context: Context, way: Sequence[Value]) -> bool:
    """Whether each device goes this way with its part of the value."""
    for after, before in pairwise(way):
        op = context.graph.ops[after.op]
        emission = context.emission(op, context.shardings.made[after])
        if emission.own or any(op.operands[place] == before for place, _, _ in emission.moves):
            return False
    return True


def _of_rows(graph: Graph, op: Op) -> bool:
    """Whether a product is one of weights and values: one dim of rows, one of columns, outermost batch dims."""
    weights, values = (len(graph.type_of(value).shape) for value in op.operands)
    batch = tuple(range(weights - 2))
    sides = (tuple(op.attrs["lhs_batch"]), tuple(op.attrs["rhs_batch"]))
    return (
        weights == values
        and bool(batch)
        and sides == (batch, batch)
        and tuple(op.attrs["lhs_contract"]) == (weights - 1,)
        and tuple(op.attrs["rhs_contract"]) == (values - 2,)
        and not _turned(graph, op.operands[1])
    )


def _turned(graph: Graph, value: Value) -> bool:
    """Whether a value's rows and columns are another's columns and rows: products read that one."""
    op = graph.ops[_before(graph, value).op]
    rank = len(graph.type_of(value).shape)
    return op.kind == "transpose" and tuple(op.attrs["permutation"]) == (*range(rank - 2), rank - 1, rank - 2)


def _of_queries(context: Context, op: Op) -> bool:
    """Whether a product is one of queries and keys: a dim of rows each, one that is summed over, few batch dims."""
    if op.kind != "dot_general" or op.id in context.free:
        return False
    shapes = [context.graph.type_of(value).shape for value in op.operands]
    batch = tuple(range(len(shapes[0]) - 2))
    return (
        len(shapes[0]) == len(shapes[1])
        and 1 <= sum(shapes[0][dim] > 1 for dim in batch) <= MOST_BATCH_DIMS
        and (tuple(op.attrs["lhs_batch"]), tuple(op.attrs["rhs_batch"])) == (batch, batch)
        and len(op.attrs["lhs_contract"]) == 1
    )


def _sizes(context: Context, op: Op, chain: Sequence[int]) -> tuple[int, int] | None:
    """Rows and columns of one device's part, where it is the same from the logits to the product; else None."""
    graph, shardings = context.graph, context.shardings
    weights = op.operands[0]
    whole = graph.type_of(weights)
    split = shardings.read(op.id, weights)
    links = {shardings.read(chain[-1], graph.ops[chain[-1]].operands[0])}
    links.update(shardings.made[Value(number)] for number in chain)
    if whole.dtype not in KERNEL_DTYPES or split[-1] or split != shardings.made[weights] or len(links) > 1:
        return None
    if not _stays(context, _way(graph, weights)):
        return None
    *batch, rows, columns = shardings.subaxes.shard(whole.shape, split)
    cut_to_one = any(part == 1 < size for part, size in zip(batch, whole.shape, strict=False))
    return None if cut_to_one else (rows, columns)
