"""GSPMD's handlers of while loops and conditionals.

A carried value has one sharding: on entry, in every iteration and on exit (`HandleWhile` reshards the operands to the
loop's sharding, conditionals do likewise). Bodies are partitioned as programs are, from their arguments' shardings.
"""

from __future__ import annotations

from dataclasses import replace

from autoshard.cost.machine.collectives import Collective
from autoshard.cost.machine.compute import op_flops
from autoshard.cost.partitioner.context import Context
from autoshard.cost.partitioner.partitioned import Emission, Tilings
from autoshard.cost.partitioner.propagate import propagate
from autoshard.graph.annotations import Annotations
from autoshard.graph.body import Body
from autoshard.graph.ops import Op, Value


def loop(context: Context, op: Op, reads: Tilings, results: Tilings) -> Emission:
    """Reshard carried values to the sharding of the loop's results; run the body's collectives in every iteration."""
    carried = (*results, *reads[len(results) :])
    trips = op.attrs["trip_count"]
    found = [partitioned(context, body, carried, op.id) for body in op.attrs["bodies"]]
    inner = tuple(
        replace(each, count=each.count * (1 if trips is None else trips)) for each in found[1][0] + found[0][0]
    )
    return replace(context.moved(op, reads, carried, found[1][1]), inner=tuple(each for each in inner if each.count))


def branches(context: Context, op: Op, reads: Tilings, results: Tilings) -> Emission:
    """Emit both branches' collectives, though only one branch runs; each returns the op's result shardings."""
    found = [partitioned(context, body, reads[1:], op.id, results) for body in op.attrs["bodies"]]
    wanted = (((),) * len(reads[0]), *reads[1:])
    share = max(each[1] for each in found)
    return replace(context.moved(op, reads, wanted, share), inner=tuple(one for each in found for one in each[0]))


def partitioned(
    context: Context, body: Body, given: Tilings, op: int, results: Tilings = ()
) -> tuple[tuple[Collective, ...], float]:
    """The collectives of one run of a body with argument tilings `given`, and one device's fraction of its FLOP."""
    graph, subaxes = body.graph, context.subaxes
    pins = {Value(argument): subaxes.spec(tiling) for argument, tiling in zip(graph.arguments, given, strict=True)}
    for value, tiling in zip(graph.outputs, results, strict=False):
        if graph.ops[value.op].kind != "argument":
            pins[value] = subaxes.spec(tiling)
    shardings = propagate(graph, Annotations(pins, {}), subaxes.mesh, context.target)
    made = context.partition(graph, shardings)
    flops = [op_flops(inner, graph) for inner in graph.ops]
    total = sum(flops)
    share = sum(each * run.share for each, run in zip(flops, made.runs, strict=True)) / total if total else 1.0
    return tuple(replace(each, op=op) for each in made.collectives), share
