"""Plans that no solver would make: neighbours split differently, readers given copies; what lowering must survive."""

import random

from autoshard.api import Plan
from autoshard.graph.annotations import Annotations
from autoshard.graph.ops import Value
from autoshard.plans.annotated import plan_of
from autoshard.stablehlo.reader import build_graph


def alternating(program, mesh, seed=0, pins=0.5, copies=0.2, hops=0.5):
    """Every argument, a share `pins` of the values and a share `copies` of the reads are given random specs.

    A share `hops` of the copies take one or two hops.
    """
    graph, draw = build_graph(program), random.Random(seed)
    a, b = mesh.axis_names
    choices = [(a,), (b,), (a, b), (b, a), ()]

    def spec(shape):
        dims = [()] * len(shape)
        for dim in draw.sample(range(len(shape)), len(shape)):
            axes = draw.choice(choices)
            if not {*axes} & {axis for each in dims for axis in each}:
                dims[dim] = axes
        return tuple(dims)

    updated = {o.updates: v for o, v in zip(program.outputs, graph.outputs, strict=True) if o.updates is not None}
    states = {}
    pinned = {}
    for i, (op, argument) in enumerate(zip(graph.arguments, program.arguments, strict=True)):
        if argument.role == "scalar":
            continue
        pinned[Value(op)] = states.setdefault(argument.of or argument.name, spec(argument.type.shape))
        if i in updated:
            pinned[updated[i]] = pinned[Value(op)]
    readers = {}
    for op in graph.ops:
        for value in op.operands:
            readers.setdefault(value, set()).add(op.aten)
    copied = {}
    for (index, _), value in sorted(graph.aten_outputs.items()):
        if not graph.type_of(value).dtype.startswith(("f", "bf")):
            continue
        if draw.random() < pins:
            pinned.setdefault(value, spec(graph.type_of(value).shape))
        for reader in sorted(k for k in readers.get(value, ()) if k is not None and k != index):
            if draw.random() < copies:
                copied[value, reader] = spec(graph.type_of(value).shape)
    for op, argument in zip(graph.arguments, program.arguments, strict=True):
        if argument.role in ("parameter", "input") and argument.type.dtype == "f32":
            for reader in sorted(k for k in readers.get(Value(op), ()) if k is not None):
                if draw.random() < copies:
                    copied[Value(op), reader] = spec(argument.type.shape)
    draw = random.Random(seed + 1)
    hopped = {}
    for value, wanted in dict.fromkeys((value, wanted) for (value, _), wanted in copied.items()):
        if draw.random() < hops:
            shape = graph.type_of(value).shape
            hopped[value, wanted] = tuple(spec(shape) for _ in range(draw.choice((1, 2))))
    return Plan.of(plan_of(graph, mesh, Annotations(pinned, copied, hopped)))
