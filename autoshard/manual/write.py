"""Writes the annotations of plans by hand: specs of arguments, and the batch split of activations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autoshard.graph.ops import Graph, Value
from autoshard.manual.find import subtree_outputs
from autoshard.mesh import Mesh, Spec, replicated


def split(rank: int, dims: Mapping[int, Sequence[str]]) -> Spec:
    """The spec of a tensor of `rank` dims that splits only `dims`."""
    return tuple(tuple(dims.get(dim, ())) for dim in range(rank))


def arguments(
    graph: Graph,
    mesh: Mesh,
    specs: Mapping[str, Spec],
    batch: Sequence[str],
    sequence: tuple[int, Sequence[str]] = (0, ()),
) -> dict[Value, Spec]:
    """Pins of all arguments: parameters as given (states follow), inputs split by `batch` on their first dim.

    Args:
        sequence: a length and the axes that split the second dim of inputs where it is as long.
    """
    pins: dict[Value, Spec] = {}
    for op_id, argument in zip(graph.arguments, graph.program.arguments, strict=True):
        shape = argument.type.shape
        spec = replicated(len(shape))
        if argument.role == "input" and shape and shape[0] % mesh.ways(batch) == 0:
            along = sequence[1] if len(shape) > 1 and shape[1] == sequence[0] else ()
            spec = split(len(shape), {0: batch, 1: along})
        elif argument.role in ("parameter", "buffer"):
            spec = specs.get(argument.name, spec)
        elif argument.role == "optimizer_state" and argument.of is not None:
            follows = specs.get(argument.of, spec)
            spec = follows if len(follows) == len(shape) else spec
        if shape:
            pins[Value(op_id)] = spec
    return pins


def batch_split(graph: Graph, mesh: Mesh, axes: Sequence[str], modules: Sequence[str]) -> dict[Value, Spec]:
    """Pins of modules' outputs: the first dim split by `axes` where they divide it."""
    outputs = subtree_outputs(graph)
    pins = {}
    for module in modules:
        value = outputs.get(module)
        if value is not None:
            shape = graph.type_of(value).shape
            if len(shape) > 1 and shape[0] % mesh.ways(axes) == 0:
                pins[value] = split(len(shape), {0: axes})
    return pins
