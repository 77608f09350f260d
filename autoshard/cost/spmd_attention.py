"""Softmaxes that a TPU's compiler runs inside the product that reads them: the weights of attention times the values.

libtpu's pass `flash_attention`, which comes behind the partitioner, makes one kernel (`online-softmax`) of a softmax
over the last dim and of the product that sums over it. It reads logits and values in f32, rows innermost, and writes
its result so: values are copied to that layout first, the result is copied from it, and neither is rounded before.
The weights themselves are made beside it where the backward pass reads them.

Compiled to find out when (libtpu 0.0.51; single attentions, forward and with their gradients): on v5e, v5p and v6e, not
on v4; f32 and bf16, not f16; 128 rows and columns or a multiple of each (640 of both, 128 of 16,384; not 64, 96, 160,
192, 197, 320), on v6e of 256 (768, 1,280; not 384, 640, 896); heads of 8 to 1,024; with or without a mask or scale,
or a second batch dim. Not where something is multiplied on behind the softmax (dropout), where its largest element is
not subtracted, where the product has the values first, and not where a batch dim is cut down to 1 by the partitioner:
reshapes then come in between. A batch dim that is 1 from the start is dropped before that, and does not matter.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from autoshard.cost.device import load_device
from autoshard.graph.groups import free_ops
from autoshard.graph.ops import Graph, Op, Value
from autoshard.graph.propagate import Shardings

UNITS = {"tpu-v4": None, "tpu-v6e": 256}
"""What queries and keys are multiples of, by device kind: the side of its matrix unit. None: never taken."""

UNIT = 128
"""On all other kinds."""

DTYPES = frozenset({"f32", "bf16"})


def attentions(graph: Graph, shardings: Shardings) -> Mapping[int, Value]:
    """Products that become such kernels under these shardings -> the logits that they then read."""
    unit = UNITS.get(load_device(shardings.subaxes.mesh.device).kind, UNIT)
    if unit is None:
        return {}
    found: dict[int, Value] = {}
    free = free_ops(graph)
    for op in graph.ops:
        chain = _softmax(graph, op.operands[0]) if op.kind == "dot_general" and op.id not in free else []
        if chain and _of_rows(graph, op) and _fits(graph, shardings, op, chain, unit):
            logits = graph.ops[chain[-1]].operands[0]
            if free.isdisjoint((logits.op, op.operands[1].op)):
                found[op.id] = logits
    return found


def _softmax(graph: Graph, value: Value) -> list[int]:
    """The ops of a softmax over the last dim, from what makes `value` to what takes the largest logit away; or none."""
    divide = graph.ops[_before(graph, value).op]
    if divide.kind != "divide" or not _repeats(graph, divide, "add"):
        return []
    exponential = graph.ops[_before(graph, divide.operands[0]).op]
    if exponential.kind != "exponential":
        return []
    shifted = graph.ops[_before(graph, exponential.operands[0]).op]
    if shifted.kind != "subtract" or not _repeats(graph, shifted, "max"):
        return []
    return [value.op, divide.id, exponential.id, shifted.id]


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
    )


def _fits(graph: Graph, shardings: Shardings, op: Op, chain: Sequence[int], unit: int) -> bool:
    """Whether one device's part is of a size that is taken, and is the same from the logits to the product."""
    weights = op.operands[0]
    whole = graph.type_of(weights)
    split = shardings.read(op.id, weights)
    logits = graph.ops[chain[-1]].operands[0]
    links = [shardings.read(chain[-1], logits), *(shardings.made[Value(number)] for number in chain)]
    if whole.dtype not in DTYPES or split[-1] or any(link != split for link in links):
        return False
    *batch, rows, columns = shardings.subaxes.shard(whole.shape, split)
    cut_to_one = any(part == 1 < size for part, size in zip(batch, whole.shape, strict=False))
    return not cut_to_one and rows % unit == 0 and columns % unit == 0
