"""Plans that XLA would run with wrong numbers are annotated so that it does not.

GSPMD sums the partial results of a convolution whose input and kernel are both split in space over all devices, also
where some of them hold the same part (`PartitionConvolutionWithSpatialDimensionHaloExchangeOnLHS`; measured with jaxlib
0.10.2 on CPU: results four times too large with an idle axis of four).
"""

from __future__ import annotations

from dataclasses import replace

from autoshard.cost.device import load_device
from autoshard.cost.spmd import partition
from autoshard.errors import AutoshardError
from autoshard.graph.annotations import Annotations
from autoshard.graph.ops import Graph, Op, Value
from autoshard.graph.propagate import propagate
from autoshard.mesh import Mesh, Spec

_ROUNDS = 4


class WrongNumbersError(AutoshardError, ValueError):
    """XLA would compute wrong numbers under these annotations, and no copy can be written that avoids it."""


def overcounted(graph: Graph, annotations: Annotations, mesh: Mesh) -> dict[int, tuple[Spec, Spec]]:
    """Convolutions whose numbers would be wrong: op id -> the specs of input and kernel as they are found."""
    if not any(op.kind == "convolution" for op in graph.ops):
        return {}
    shardings = propagate(graph, annotations, mesh, simplified=load_device(mesh.device).target == "tpu")
    runs = partition(graph, shardings, "cpu").runs
    spec = shardings.subaxes.spec
    return {
        op.id: (spec(shardings.read(op.id, op.operands[0])), spec(shardings.read(op.id, op.operands[1])))
        for op, run in zip(graph.ops, runs, strict=True)
        if run.overcounted
    }


def guarded(graph: Graph, annotations: Annotations, mesh: Mesh) -> Annotations:
    """`annotations`, with copies whole in space for the convolutions whose numbers would be wrong.

    Raises:
        WrongNumbersError: some would still be: their operands take no annotation.
    """
    annotatable = {*graph.aten_outputs.values(), *map(Value, graph.arguments)}
    for _ in range(_ROUNDS):
        found = overcounted(graph, annotations, mesh)
        copies = dict(annotations.copies)
        for number, specs in found.items():
            op = graph.ops[number]
            for place, spec in enumerate(specs):
                if op.aten is not None and op.operands[place] in annotatable:
                    copies[op.operands[place], op.aten] = _whole_in_space(op, place, spec)
        if not found:
            return annotations
        annotations = replace(annotations, copies=copies)
    if found := overcounted(graph, annotations, mesh):
        op = graph.ops[min(found)]
        where = f" in {op.module}" if op.module else ""
        raise WrongNumbersError(
            f"XLA would sum convolution op {op.id}{where} over devices that hold the same part, and get wrong numbers: "
            "its input and kernel are both split in space and cannot be annotated; give hints that split neither there"
        )
    return annotations


def _whole_in_space(op: Op, place: int, spec: Spec) -> Spec:
    spatial = op.attrs["rhs" if place else "lhs"][2:]
    return tuple(() if dim in spatial else axes for dim, axes in enumerate(spec))
