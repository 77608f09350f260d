"""Small programs, their graphs and plans, made by hand: what tests of plans, reports and the command line share."""

from autoshard.api import Plan
from autoshard.graph.annotations import Annotations
from autoshard.graph.ops import Graph, Op, Value
from autoshard.mesh import Mesh
from autoshard.plans.annotated import plan_of
from autoshard.plans.value import CollectiveTotal, Options, Predicted, ReplicatedOp, SolverInfo
from autoshard.program import Argument, AtenOp, Output, Program, TensorType

MESH = Mesh((2, 4), ("data", "model"), "tpu-v5e")


def f32(*shape):
    return TensorType(shape, "f32")


def program(layers=2, width=16, activation="tanh", kind="train", switches=("linear",)):
    """`layers` linear layers (weights `h.0.weight`…), each followed by an activation, under SGD with momentum."""
    arguments, ops, previous = [], [], "x"
    for i in range(layers):
        arguments.append(Argument(f"h.{i}.weight", "parameter", f32(width, width)))
    arguments.append(Argument("scale", "buffer", f32(width)))
    arguments.append(Argument("x", "input", f32(8, width)))
    for i in range(layers):
        name = f"h.{i}.weight"
        arguments.append(Argument(f"{name}.momentum_buffer", "optimizer_state", f32(width, width), of=name))
    arguments.append(Argument("scalar0", "scalar", f32()))
    for i in range(layers):
        ops.append(
            AtenOp(len(ops), "aten.mm.default", f"h.{i}", "forward", (f32(8, width),), (previous, f"h.{i}.weight"))
        )
        ops.append(
            AtenOp(
                len(ops), f"aten.{activation}.default", f"h.{i}", "forward", (f32(8, width),), ((len(ops) - 1, 0), None)
            )
        )
        previous = (len(ops) - 1, 0)
    outputs = [Output("loss", "loss", f32())]
    outputs += [Output(f"h.{i}.weight", "parameter", f32(width, width), updates=i) for i in range(layers)]
    return Program(
        kind, "torch_xla", {"torch": "2.9.0"}, tuple(switches), b"", tuple(arguments), tuple(outputs), tuple(ops)
    )


def graph(of):
    """One graph op per argument and aten op, one for the loss, and one that is inside an aten op."""
    ops = [Op(i, "argument", (), (argument.type,)) for i, argument in enumerate(of.arguments)]
    places = {argument.name: Value(i) for i, argument in enumerate(of.arguments)}
    aten = {}
    for each in of.ops:
        reads = tuple(
            aten[source] if isinstance(source, tuple) else places[source]
            for source in each.inputs
            if source is not None
        )
        aten[each.index, 0] = Value(len(ops))
        kind = "dot_general" if "mm" in each.name else each.name.split(".")[1]
        ops.append(Op(len(ops), kind, reads, each.outputs, aten=each.index, module=each.module))
    inside = Value(len(ops))
    ops.append(Op(inside.op, "multiply", (aten[len(of.ops) - 1, 0],) * 2, of.ops[-1].outputs, aten=len(of.ops) - 1))
    loss = Value(len(ops))
    ops.append(Op(loss.op, "reduce", (inside,), (f32(),)))
    updated = tuple(Value(output.updates) for output in of.outputs if output.updates is not None)
    return Graph(of, tuple(ops), tuple(range(len(of.arguments))), (loss, *updated), aten)


PREDICTED = Predicted(
    step_time_s=0.0123,
    compute_s=0.01,
    communication_s=0.0023,
    overlapped_s=0.011,
    mfu=0.34,
    collectives=(CollectiveTotal("all-reduce", ("data",), 3, 12_345_678),),
    peak_memory_bytes=3_200_000_000,
)
SOLVER = SolverInfo("optimal", 0.0123, 0.0123, 0.0, "highs")


def plan(of=None, mesh=MESH, options=None, predicted=PREDICTED, solver=SOLVER, replicated=()):
    """Weights split by column, then by row; states as their weights; the batch split; a gathered copy of a weight."""
    of = of or program()
    on = graph(of)
    model, data = mesh.axis_names[-1], mesh.axis_names[0]
    pins, copies = {}, {}
    for op, argument in zip(on.arguments, of.arguments, strict=True):
        if argument.role in ("parameter", "optimizer_state"):
            layer = int(argument.name.split(".")[1])
            pins[Value(op)] = ((), (model,)) if layer % 2 == 0 else ((model,), ())
        elif argument.role == "input":
            pins[Value(op)] = ((data,), ())
    for (index, _), value in on.aten_outputs.items():
        if index % 2 == 0:
            pins[value] = ((data,), (model,) if index % 4 == 0 else ())
        else:
            copies[value, index + 1] = ((data,), ())
    copies[Value(0), 0] = ((), ())
    return Plan.of(
        plan_of(
            on, mesh, Annotations(pins, copies), options=options, predicted=predicted, solver=solver,
            replicated_ops=replicated,
        )
    )  # fmt: skip


REPLICATED = (
    ReplicatedOp("fft", "filter", "no rule", 2e-6),
    *(ReplicatedOp("sort", f"h.{i}", "no rule", 1e-6) for i in range(6)),
)


def saved(path, **changes) -> Plan:
    """A plan, written to `path`."""
    made = plan(**changes)
    made.save(path)
    return made


__all__ = ["MESH", "PREDICTED", "REPLICATED", "SOLVER", "Options", "f32", "graph", "plan", "program", "saved"]
