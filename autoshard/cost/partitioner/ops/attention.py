"""Attention kernels on TPU: a softmax fused with the product of weights and values that reads it.

libtpu's pass `flash_attention`, which runs after the partitioner, fuses a softmax over the last dim with the product
that contracts this dim. Where the logits are just a product of queries and keys (under no mask, or a constant one that
masks nothing), the kernel covers that too: it reads queries, keys and values (`tpu_custom_call`). Else it reads logits
and values (`online-softmax`). Operands keep the program's dtype and need their last dim minor-most, as does the
result; other layouts cost a copy. The kernel of three operands writes f32. If other ops read logits or weights, as the
backward pass does, these are computed beside the kernel; else they are never materialised.

Conditions (compiled with libtpu 0.0.51; single attentions, forward and with gradients): f32 or bf16; heads of 8 to
1,024; operands sharded over batch, heads or query rows, gathered before or not. No kernel where an op follows the
softmax (dropout), where the maximum is not subtracted, where the product reads values first or transposed, where the
sum over values is split over devices, or where sharding reduces a batch dim of the product to 1, since reshapes then
come in between. A batch dim of 1 in the program is dropped earlier and does not matter, nor do the program's own
reshapes, which merge batch dims for the products and split them for the softmax.

- Three operands, on all TPU: queries scaled or not; keys and values may differ in width; f32 softmax of bf16 logits; up
  to two batch dims; rows and columns 128, 256, 384, 512 or a multiple of 512. Such a product of other sizes (640, 768,
  896) prevents both kernels.
- Two operands, on v5e, v5p and v6e, not on v4: a mask or scale after the product, three or more batch dims, or logits
  that an all-reduce sums; 128 rows and columns or a multiple of each, on v6e of 256.
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
"""Where the kernel covers the product of queries and keys, on all kinds."""

BLOCK = whole("attention_block")

MOST_LOGITS, WIDEST = whole("attention_most_logits"), whole("attention_widest")

MOST_BATCH_DIMS = 2
"""Most batch dims of a kernel of three operands, those of size 1 not counted."""

KERNEL_DTYPES = frozenset({"f32", "bf16"})


def attentions(context: Context) -> Mapping[int, Attention]:
    """Contractions that become attention kernels under these shardings -> the kernel."""
    graph, shardings = context.graph, context.shardings
    kind = load_device(shardings.subaxes.mesh.device).kind
    found: dict[int, Attention] = {}
    for op in graph.ops:
        chain = _softmax(graph, op.operands[0]) if op.kind == "dot_general" and op.id not in context.free else []
        if chain and _is_weights_times_values(graph, op) and op.operands[1].op not in context.free:
            made = _attention(context, op, chain, of_kind("attention_unit", kind) or None)
            if made is not None and _is_local(context, op, (0,)):
                found[op.id] = made
    return found


def unread(context: Context) -> frozenset[int]:
    """Ops of softmaxes, and of contractions before them, whose results only these kernels use: never computed."""
    graph, found = context.graph, context.attentions
    products = {each.product for each in found.values()}  # the kernels read their operands
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
    """The kernel that a product of values and a softmax of ops `chain` becomes; None if any condition fails."""
    graph = context.graph
    logits = graph.ops[chain[-1]].operands[0]
    sizes = _sizes(context, op, chain)
    if logits.op in context.free or sizes is None:
        return None
    path = _chain(graph, logits)
    queries = graph.ops[path[-1].op]
    dtypes = {graph.type_of(value).dtype for value in (*queries.operands, op.operands[1])}
    opaque = len(dtypes) > 1 and graph.type_of(path[-1]).dtype == graph.type_of(logits).dtype
    local = _is_queries_times_keys(context, queries) and _not_resharded(context, path) and _is_local(context, queries)
    if opaque or not local:
        if unit is None or any(size % unit for size in sizes):
            return None
        return Attention(logits, _times_read(*sizes, _block_of_logits(*sizes)))
    if len(dtypes) > 1 or any(value.op in context.free for value in queries.operands):
        return None
    whole = all(size % BLOCK_MULTIPLE == 0 and size % min(size, BLOCK) == 0 for size in sizes)
    return Attention(logits, _times_read(*sizes, (BLOCK, BLOCK)), queries.id) if whole else None


def _times_read(rows: int, columns: int, block: tuple[int, int]) -> int:
    """How often a kernel reads keys and values that works on blocks of `block` (rows, columns) of the logits."""
    return rows // block[0] if columns > block[1] else 1


def _block_of_logits(rows: int, columns: int) -> tuple[int, int]:
    """(rows, columns) of the largest block of logits that a kernel reads at once; of equal ones the widest."""

    def parts(size: int) -> list[int]:
        return [part for part in range(BLOCK_MULTIPLE, min(size, WIDEST - 1) + 1, BLOCK_MULTIPLE) if size % part == 0]

    blocks = ((high, wide) for high in parts(rows) for wide in parts(columns) if high * wide < MOST_LOGITS)
    return max(blocks, key=lambda block: (math.prod(block), block[1]), default=(BLOCK_MULTIPLE, BLOCK_MULTIPLE))


def _is_local(context: Context, op: Op, as_they_are: Collection[int] = ()) -> bool:
    """Whether a product is local: no all-reduce, no windowed einsum, operands `as_they_are` not resharded."""
    emission = context.emission(op, context.shardings.made[Value(op.id)])
    moved = any(place in as_they_are or isinstance(move[0], Ring) for place, move, _ in emission.moves)
    return not emission.own and not moved


def _softmax(graph: Graph, value: Value) -> list[int]:
    """The ops of a softmax over the last dim, from the division back to the subtraction of the maximum; or none."""
    divide = graph.ops[_chain(graph, value)[-1].op]
    if divide.kind != "divide" or not _broadcasts_reduction(graph, divide, "add"):
        return []
    exponential = graph.ops[_source(graph, divide.operands[0]).op]
    if exponential.kind != "exponential":
        return []
    shifted = graph.ops[_source(graph, exponential.operands[0]).op]
    if shifted.kind != "subtract" or not _broadcasts_reduction(graph, shifted, "max"):
        return []
    return [divide.id, exponential.id, shifted.id]


def _broadcasts_reduction(graph: Graph, op: Op, reducer: str) -> bool:
    """Whether an op's second operand broadcasts a reduction of its first operand along the last dim."""
    value = _source(graph, op.operands[1], ("broadcast_in_dim", "reshape", "convert"))
    made = graph.ops[value.op]
    if made.kind != "reduce" or made.attrs.get("reducer") != reducer:
        return False
    last = len(graph.type_of(made.operands[0]).shape) - 1
    return tuple(made.attrs["dims"]) == (last,) and _source(graph, made.operands[0]) == _source(graph, op.operands[0])


def _source(graph: Graph, value: Value, kinds: Collection[str] = ("convert",)) -> Value:
    """The value behind a chain of ops of these kinds, by default conversions."""
    while graph.ops[value.op].kind in kinds:
        value = graph.ops[value.op].operands[0]
    return value


def _chain(graph: Graph, value: Value) -> list[Value]:
    """A value and its sources through conversions, no-ops, and reshapes that merge or split batch dims."""
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
    """The operand that an elementwise op returns unchanged: logits under a constant mask that masks nothing."""
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
    """The number of a splat constant, or of a broadcast of one; None for other values."""
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


def _not_resharded(context: Context, chain: Sequence[Value]) -> bool:
    """Whether no value of this chain is resharded."""
    for after, before in pairwise(chain):
        op = context.graph.ops[after.op]
        emission = context.emission(op, context.shardings.made[after])
        if emission.own or any(op.operands[place] == before for place, _, _ in emission.moves):
            return False
    return True


def _is_weights_times_values(graph: Graph, op: Op) -> bool:
    """Whether a product is one of weights and values: one row dim, one column dim, batch dims major-most."""
    weights, values = (len(graph.type_of(value).shape) for value in op.operands)
    batch = tuple(range(weights - 2))
    sides = (tuple(op.attrs["lhs_batch"]), tuple(op.attrs["rhs_batch"]))
    return (
        weights == values
        and bool(batch)
        and sides == (batch, batch)
        and tuple(op.attrs["lhs_contract"]) == (weights - 1,)
        and tuple(op.attrs["rhs_contract"]) == (values - 2,)
        and not _transposes_matrix(graph, op.operands[1])
    )


def _transposes_matrix(graph: Graph, value: Value) -> bool:
    """Whether a value transposes the rows and columns of another, which products then read instead."""
    op = graph.ops[_source(graph, value).op]
    rank = len(graph.type_of(value).shape)
    return op.kind == "transpose" and tuple(op.attrs["permutation"]) == (*range(rank - 2), rank - 1, rank - 2)


def _is_queries_times_keys(context: Context, op: Op) -> bool:
    """Whether a product is one of queries and keys: one row dim each, one contracted dim, few batch dims."""
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
    """Rows and columns of one device's logits, if they are the same up to the product with values; else None."""
    graph, shardings = context.graph, context.shardings
    weights = op.operands[0]
    whole = graph.type_of(weights)
    split = shardings.read(op.id, weights)
    links = {shardings.read(chain[-1], graph.ops[chain[-1]].operands[0])}
    links.update(shardings.made[Value(number)] for number in chain)
    if whole.dtype not in KERNEL_DTYPES or split[-1] or split != shardings.made[weights] or len(links) > 1:
        return None
    if not _not_resharded(context, _chain(graph, weights)):
        return None
    *batch, rows, columns = shardings.subaxes.shard(whole.shape, split)
    cut_to_one = any(part == 1 < size for part, size in zip(batch, whole.shape, strict=False))
    return None if cut_to_one else (rows, columns)
