"""Rewrites that TPU and GPU compilers do before sharding propagation, where no annotation stands in between.

PyTorch writes a linear layer on `[sequence, batch, features]` as a 2-D product: a reshape merges the leading dims
before it, another splits them after it. Where the batch is not the major-most of them (`nn.Transformer`,
`nn.MultiheadAttention`), its sharding does not pass through the merged dim. On GPU and TPU reductions run over the dims
that a reshape merged (`AlgebraicSimplifier`, `HandleReduce`). On TPU products also read operands untransposed
(`TransposeFolding`), so a weight is gathered once, and products without batch dims absorb reshapes (libtpu 0.0.51, 32
single products dumped after propagation):

- a reshape that splits dims of the result and is its only user, if an operand is a reshape too;
- two reshapes that merge equal dims into the contracted one, and merge nothing else.

Annotated values and products stay as they are. On TPU a comparison of a ReLU's result with zero reads the ReLU's
operand instead, so that the mask of the backward pass puts no sharding on the result.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from autoshard.cost.machine.targets import CAPABILITIES, Capabilities, Target
from autoshard.cost.partitioner.passes.simplify import fold
from autoshard.graph.annotations import Annotations
from autoshard.graph.groups import ELEMENTWISE
from autoshard.graph.ops import Graph, Op, Value
from autoshard.program import TensorType

Shape = tuple[int, ...]

_REORDERING = frozenset({"reshape", "transpose"})
_SPREADS = ELEMENTWISE | {"broadcast_in_dim", "reshape"}


def rewritten(graph: Graph, annotations: Annotations, target: Target) -> tuple[Graph, dict[Value, Value]]:
    """The rewritten graph, and each value no longer computed -> the value that it would be a reshape of.

    Op numbers stay: if an operand needs a new reshape, that takes the product's number, and the product that of the
    reshape after it.
    """
    compiler = CAPABILITIES[target]
    return _Rewriting(graph, annotations, compiler).run() if compiler.simplifies_first else (graph, {})


class _Rewriting:
    def __init__(self, graph: Graph, annotations: Annotations, compiler: Capabilities) -> None:
        self.graph, self.compiler = graph, compiler
        self.copied = annotations.copies
        self.pinned = {*annotations.pins, *(value for value, _ in annotations.copies)}
        self.uniform = _uniform(graph)
        self.numbers = fold(graph).splat
        self.ops = list(graph.ops)
        self.apart: dict[Value, Value] = {}
        self.moved: dict[Value, frozenset[Shape]] = {}

    def run(self) -> tuple[Graph, dict[Value, Value]]:
        for op in self.graph.ops:
            if op.kind == "reduce" and len(op.results) == 1:
                self._absorb_into_reduce(op)
            elif op.kind == "compare" and self.compiler.compares_unclipped:
                self._compare_unclipped(op)
            elif (
                op.kind == "dot_general"
                and self.compiler.folds_transposes
                and not op.attrs["lhs_batch"]
                and "outer" not in op.attrs
            ):
                op = self._fold_transposes(op)
                self._absorb_result_reshape(op) or self._absorb_operand_reshapes(op)
        if all(op is before for op, before in zip(self.ops, self.graph.ops, strict=True)):
            return self.graph, {}
        self._drop_unread()
        return replace(self.graph, ops=tuple(self.ops)), self.apart

    def _compare_unclipped(self, op: Op) -> None:
        """`max(x, c) > c` reads `x > c`.

        Without an annotation on x both are split alike, and kernels were read off programs with either.
        """
        largest, number = op.operands[0], self.numbers.get(op.operands[1])
        maker = self.graph.ops[largest.op]
        if op.attrs["direction"] != "GT" or maker.kind != "maximum" or number is None or largest in self.pinned:
            return
        array, least = maker.operands
        if self.numbers.get(least) == number and array in self.pinned and (array, maker.aten) not in self.copied:
            self.ops[op.id] = replace(op, operands=(array, op.operands[1]))

    def _fold_transposes(self, op: Op) -> Op:
        """Let a product read its 2-D operands untransposed (`TransposeFolding`)."""
        operands, attrs = list(op.operands), dict(op.attrs)
        for place, side in enumerate(("lhs", "rhs")):
            value = op.operands[place]
            maker = self.graph.ops[value.op]
            if maker.kind != "transpose" or len(maker.results[0].shape) != 2 or value in self.pinned:
                continue
            if not self._copied(maker.operands[0], maker, op):
                operands[place] = maker.operands[0]
                attrs[f"{side}_contract"] = tuple(maker.attrs["permutation"][dim] for dim in attrs[f"{side}_contract"])
        if tuple(operands) != op.operands:
            op = self.ops[op.id] = replace(op, operands=tuple(operands), attrs=attrs)
        return op

    def _absorb_result_reshape(self, op: Op) -> bool:
        """Give a product's result the dims of the reshape that is its only user."""
        made = Value(op.id)
        readers = self.graph.readers(made)
        if len(readers) != 1 or readers[0].kind != "reshape" or made in self.pinned or made in self.graph.returned:
            return False
        reshape = readers[0]
        parts = _parts(op.results[0].shape, reshape.results[0].shape)
        sources = [self._source(value, op) for value in op.operands]
        if parts is None or not any(sources):
            return False
        operands: list[Value] = []
        shapes: list[Shape] = []
        missing: list[int] = []  # operands that need a new reshape
        free = 0
        contracts = []
        for place, side in enumerate(("lhs", "rhs")):
            contract = op.attrs[f"{side}_contract"]
            shape, at = list[int](), dict[int, int]()
            for dim, size in enumerate(self._type(op.operands[place]).shape):
                at[dim] = len(shape)
                if dim in contract:
                    shape.append(size)
                else:
                    shape.extend(parts[free])
                    free += 1
            contracts.append(tuple(at[dim] for dim in contract))
            shapes.append(tuple(shape))
            source = sources[place]
            if tuple(shape) == self._type(op.operands[place]).shape:
                operands.append(op.operands[place])
            elif source is not None and self._type(source).shape == tuple(shape):
                operands.append(source)
            else:
                operands.append(op.operands[place] if source is None else source)
                missing.append(place)
        if len(missing) > 1 or (missing and any(self._copied(value, op, reshape) for value in op.operands)):
            return False
        attrs = {**op.attrs, "lhs_contract": contracts[0], "rhs_contract": contracts[1]}
        if missing:
            place = missing[0]
            kind = replace(self._type(op.operands[place]), shape=shapes[place])
            self.ops[op.id] = replace(reshape, id=op.id, operands=(operands[place],), results=(kind,), **_place(op))
            operands[place] = made
            self.ops[reshape.id] = replace(
                op, id=reshape.id, operands=tuple(operands), results=reshape.results, attrs=attrs, **_place(reshape)
            )
        else:
            self.ops[op.id] = replace(op, operands=tuple(operands), results=reshape.results, attrs=attrs)
        self.apart[made] = Value(reshape.id)
        return True

    def _absorb_operand_reshapes(self, op: Op) -> bool:
        """Contract over the dims that reshapes of both operands merge."""
        contracts: list[tuple[int, ...]] = []
        merged: list[Shape] = []
        sources: list[Value] = []
        for value, side in zip(op.operands, ("lhs", "rhs"), strict=True):
            source, contract = self._source(value, op), op.attrs[f"{side}_contract"]
            if source is None or len(contract) != 1:
                return False
            parts = _parts(self._type(value).shape, self._type(source).shape)
            if parts is None or any(len(sizes) > 1 for dim, sizes in enumerate(parts) if dim not in contract):
                return False
            first = sum(len(sizes) for sizes in parts[: contract[0]])
            merged.append(parts[contract[0]])
            contracts.append(tuple(range(first, first + len(merged[-1]))))
            sources.append(source)
        if merged[0] != merged[1] or len(merged[0]) < 2:
            return False
        attrs = {**op.attrs, "lhs_contract": contracts[0], "rhs_contract": contracts[1]}
        self.ops[op.id] = replace(op, operands=tuple(sources), attrs=attrs)
        return True

    def _absorb_into_reduce(self, op: Op) -> None:
        """Reduce over the dims that a reshape merges; reshapes that are the only users merge the others afterwards."""
        read, made, dims = op.operands[0], Value(op.id), op.attrs["dims"]
        source = self._source(read, op)
        parts = None if source is None else _parts(self._type(read).shape, self._type(source).shape)
        if source is None or parts is None:
            return
        kept = tuple(size for dim, sizes in enumerate(parts) if dim not in dims for size in sizes)
        readers = self.graph.readers(made)
        if kept != op.results[0].shape:
            held = made in self.pinned or made in self.graph.returned
            if held or any(reader.kind != "reshape" for reader in readers):
                return
            self.apart[made] = made
        first = [sum(map(len, parts[:dim])) for dim in range(len(parts))]
        over = tuple(at for dim in dims for at in range(first[dim], first[dim] + len(parts[dim])))
        kind = replace(op.results[0], shape=kept)
        operands = (source, *op.operands[1:])
        self.ops[op.id] = replace(op, operands=operands, results=(kind,), attrs={**op.attrs, "dims": over})

    def _copied(self, value: Value, *readers: Op) -> bool:
        """Whether one of these users reads an annotated copy of a value."""
        return any((value, reader.aten) in self.copied for reader in readers)

    def _source(self, value: Value, reader: Op) -> Value | None:
        """The operand of the reshape that makes a value, if no annotation stands between it and the user."""
        op = self.graph.ops[value.op]
        if op.kind != "reshape" or value in self.pinned or self._copied(op.operands[0], op, reader):
            return None
        source = op.operands[0]
        if self.ops[source.op].results[source.result] != self._type(source):
            return None  # rewritten itself
        return None if self._type(value).shape in self._moved(source) else source

    def _moved(self, value: Value) -> frozenset[Shape]:
        """The shapes that a chain of reshapes, transposes and elementwise ops of one array goes through to a value.

        Elementwise ops move before the others (`ReshapeMover`), which then cancel.
        """
        chain: list[tuple[Value, Shape | None]] = []  # values, and the shape that each reshapes or transposes
        while value not in self.moved:
            op = self.graph.ops[value.op]
            before: Value | None = None
            moves = op.kind in _REORDERING and Value(op.id) not in self.pinned
            if moves:
                before = op.operands[0]
            elif op.kind in ELEMENTWISE and Value(op.id) not in self.pinned:
                arrays = [read for read in op.operands if read not in self.uniform]
                before = arrays[0] if len(set(arrays)) == 1 else None
            if before is None:
                self.moved[value] = frozenset()
                break
            chain.append((value, self._type(before).shape if moves else None))
            value = before
        found = self.moved[value]
        for after, shape in reversed(chain):
            found = found if shape is None else found | {shape}
            self.moved[after] = found
        return found

    def _type(self, value: Value) -> TensorType:
        return self.graph.type_of(value)

    def _drop_unread(self) -> None:
        """Replace reshapes and transposes that have lost their users by unused constants."""
        left = Counter(value for op in self.ops for value in op.operands)
        for op in reversed(self.graph.ops):
            value = Value(op.id)
            if (
                op.kind in _REORDERING
                and self.ops[op.id] is op
                and self.graph.readers(value)
                and not left[value]
                and value not in self.graph.returned
            ):
                self.ops[op.id] = replace(op, kind="constant", operands=(), attrs={"value": 0})
                self.apart[value] = op.operands[0]
                left[op.operands[0]] -= 1


def _place(op: Op) -> dict[str, Any]:
    """The source op and module of an op."""
    return {"aten": op.aten, "module": op.module}


def _uniform(graph: Graph) -> set[Value]:
    """Values whose elements are all equal."""
    found: set[Value] = set()
    for op in graph.ops:
        follows = op.kind in _SPREADS and op.operands and found.issuperset(op.operands)
        if follows or (len(op.results) == 1 and not op.results[0].shape):
            found.add(Value(op.id))
    return found


def _parts(shape: Sequence[int], into: Sequence[int]) -> list[Shape] | None:
    """The dims of `into` that each dim of `shape` is split into; None where dims are merged."""
    found: list[Shape] = []
    place = 0
    for size in shape:
        start = place
        while place < len(into) and (math.prod(into[start:place]) < size or place == start):
            place += 1
        while place < len(into) and into[place] == 1 and len(found) + 1 == len(shape):
            place += 1
        if place == start or math.prod(into[start:place]) != size:
            return None
        found.append(tuple(into[start:place]))
    return found if place == len(into) else None
