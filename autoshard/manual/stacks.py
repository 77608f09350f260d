"""Stacks of experts: weights of all experts of a layer in one parameter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autoshard.graph.memo import per_graph
from autoshard.graph.ops import Graph, Op, Value
from autoshard.manual.find import annotated, is_forward, through_views
from autoshard.manual.pairs import pairs
from autoshard.manual.write import split
from autoshard.mesh import Mesh, Spec


@dataclass(frozen=True)
class Experts:
    """The stacked weights of a layer's experts: three dims, of which the first is the expert dim.

    Attributes:
        name: of the parameter.
        weight: its value.
        contracted: the contracting dim of the forward product, 1 or 2.
        product: the forward product, where it has an expert dim (as in GShard; not where weights are gathered).
        dims: of the product: the expert dim, and the weight's output dim.
        input: the other operand of the product, where it can be annotated.
        gradient: the gradient of the product: the other operand in the backward pass.
    """

    name: str
    weight: Value
    contracted: int
    product: Value | None
    dims: tuple[int, int]
    input: Value | None
    gradient: Value | None = None


@per_graph
def experts(graph: Graph) -> tuple[Experts, ...]:
    """Every stack of experts: a product (or a gather) goes by its first dim, or pairs it with one that does."""
    arguments = dict(zip(graph.arguments, graph.program.arguments, strict=True))
    annotatable = set(graph.aten_outputs.values())
    found: dict[str, Experts] = {}
    for op in graph.ops:
        if op.kind != "dot_general" or op.aten is None:
            continue
        for side, operand in enumerate(op.operands):
            value, dims = through_views(graph, operand)
            name = arguments[value.op].name if value.op in arguments else ""
            if not is_forward(graph, op.aten):
                if name in found and found[name].gradient is None:
                    found[name] = replace(found[name], gradient=op.operands[1 - side])
                continue
            gathered = graph.ops[value.op].kind == "gather"
            if gathered:
                value, dims = through_views(graph, graph.ops[value.op].operands[0])
            argument = arguments.get(value.op)
            contract, batch = (op.attrs[f"{'rhs' if side else 'lhs'}_{kind}"] for kind in ("contract", "batch"))
            if argument is None or argument.role != "parameter" or len(argument.type.shape) != 3:
                continue
            by_first = [dims[dim] for dim in batch] == [0] or (not batch and argument.name in pairs(graph))
            if argument.name in found or len(contract) != 1 or dims[contract[0]] == 0 or not by_first:
                continue
            contracted = dims[contract[0]]
            places = _result_dims(op, side, len(dims))
            product, moved = _made(graph, op, annotatable)
            where = [moved.index(places[dims.index(dim)]) for dim in (0, 3 - contracted)]
            found[argument.name] = Experts(
                argument.name,
                value,
                contracted,
                None if gathered else product,
                (where[0], where[1]),
                annotated(graph, op.operands[1 - side], annotatable),
            )
    return tuple(found.values())


def _result_dims(op: Op, side: int, rank: int) -> dict[int, int]:
    """Of a product: dim of operand `side`, which has `rank` of them, -> dim of the result."""
    batch, contract = (op.attrs[f"{'rhs' if side else 'lhs'}_{kind}"] for kind in ("batch", "contract"))
    free = [dim for dim in range(rank) if dim not in batch and dim not in contract]
    first = len(op.results[0].shape) - len(free) if side else len(batch)
    return {dim: place for place, dim in enumerate(batch)} | {dim: first + i for i, dim in enumerate(free)}


def _made(graph: Graph, op: Op, annotatable: set[Value]) -> tuple[Value | None, Sequence[int]]:
    """A product's value, or its transpose by the same aten op, where it can be annotated; its dims as the product's."""
    readers = graph.readers(Value(op.id))
    if Value(op.id) not in annotatable and len(readers) == 1 and readers[0].kind == "transpose":
        op, order = readers[0], readers[0].attrs["permutation"]
    else:
        order = range(len(op.results[0].shape))
    return Value(op.id) if Value(op.id) in annotatable else None, order


def product_pins(
    graph: Graph,
    mesh: Mesh,
    stack: Experts,
    batch: Sequence[str],
    *,
    expert: Sequence[str] = (),
    made: Sequence[str] = (),
    sequence: tuple[int, Sequence[str]] = (0, ()),
) -> dict[Value, Spec]:
    """The pin of a stack's product: experts split by `expert`, what it makes by `made`, the next dim by `batch`.

    Args:
        sequence: a length, and the axes that split a further dim of it.
    """
    if stack.product is None:
        return {}
    shape = graph.type_of(stack.product).shape
    dims = dict(zip(stack.dims, (expert, made), strict=True))
    others = [dim for dim in range(len(shape)) if dim not in stack.dims]
    dims |= {dim: batch for dim in others[:1] if shape[dim] % mesh.ways(batch) == 0}
    dims |= {dim: sequence[1] for dim in others[1:] if shape[dim] == sequence[0]}
    return {stack.product: split(len(shape), dims)}
