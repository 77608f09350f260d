"""Conversion between a plan and annotations on the graph of its program; the two directions are inverse."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import replace
from typing import Any, TypedDict, Unpack

from autoshard.attention.form import FUSED
from autoshard.experts.form import ONE_OP as EXPERTS
from autoshard.graph.annotations import Annotations
from autoshard.graph.ops import Graph, Value
from autoshard.mesh import Mesh, Spec, format_spec, replicated
from autoshard.plans.check import planned_for
from autoshard.plans.value import (
    ROLES,
    ActivationKey,
    ActivationPlan,
    Copy,
    MeshTried,
    Options,
    Plan,
    PlanError,
    Predicted,
    ProgramInfo,
    Refinement,
    ReplicatedOp,
    SolverInfo,
    TensorPlan,
    signature,
)
from autoshard.program import Program
from autoshard.version import version_of


class Recorded(TypedDict, total=False):
    """Fields of a `Plan` beside its shardings."""

    options: Options
    predicted: Predicted | None
    solver: SolverInfo | None
    replicated_ops: tuple[ReplicatedOp, ...]
    wrong_sums: tuple[str, ...]
    search: tuple[MeshTried, ...]
    refined: Refinement | None
    info: Mapping[str, Any]


def annotations_of(plan: Plan, graph: Graph) -> Annotations:
    """The annotations of a plan on the graph of its program.

    Raises:
        PlanMismatchError: the graph is of another program.
        PlanError: two entries pin one value differently, or an entry names a value that the graph lacks.
    """
    plan = planned_for(plan, graph.program)
    pins: dict[Value, Spec] = {}
    copies: dict[tuple[Value, int], Spec] = {}
    hops: dict[tuple[Value, Spec], tuple[Spec, ...]] = {}
    for op, argument in zip(graph.arguments, graph.program.arguments, strict=True):
        tensor = plan.argument(argument)
        if tensor is not None:
            pins[Value(op)] = tensor.spec
            copies.update({(Value(op), copy.consumer): copy.spec for copy in tensor.copies})
            hops.update(_hops(Value(op), tensor.copies, argument.name))
    for entry in plan.activations:
        value = graph.aten_outputs.get((entry.key.index, entry.key.output))
        if value is None:
            raise PlanError(f"{_name(entry.key)} is not a value of the compiled program: nothing can be pinned there")
        if entry.spec is not None and pins.setdefault(value, entry.spec) != entry.spec:
            raise PlanError(
                f"{_name(entry.key)} is pinned to {format_spec(entry.spec)}, but it is the same value as one that "
                f"is pinned to {format_spec(pins[value])}"
            )
        copies.update({(value, copy.consumer): copy.spec for copy in entry.copies})
        hops.update(_hops(value, entry.copies, _name(entry.key)))
    return Annotations(pins, copies, hops)


def _hops(value: Value, copies: Iterable[Copy], name: str) -> dict[tuple[Value, Spec], tuple[Spec, ...]]:
    found: dict[tuple[Value, Spec], tuple[Spec, ...]] = {}
    for copy in copies:
        if found.setdefault((value, copy.spec), copy.hops) != copy.hops:
            raise PlanError(f"copies of {name} to {format_spec(copy.spec)} take different hops: equal copies are one")
    return {key: hops for key, hops in found.items() if hops}


def _name(key: ActivationKey) -> str:
    return f"output {key.output} of op {key.index} ({key.name})"


def program_info(program: Program) -> ProgramInfo:
    """The record of a program in a plan."""
    return ProgramInfo(
        fingerprint=program.fingerprint,
        kind=program.kind,
        frontend=program.frontend,
        versions=dict(program.versions),
        switches=program.switches,
        ops=tuple(signature(op) for op in program.ops),
        reads=program.reads,
        micro_steps=None if program.micro_steps is None else replace(program.micro_steps, carried=()),
    )


def _regions(program: Program, mesh: Mesh) -> dict[str, Any]:
    """`Plan.info` of attentions and experts: how many are one op, by whose kernels, and why others are not."""
    found: dict[str, Any] = {}
    for said, name in (("attention", FUSED), ("experts", EXPERTS)):
        kept = sum(op.name == name for op in program.ops)
        others = [[module, why] for switch, module, why in program.written_out if switch == said]
        if kept or others:
            found[said] = {"fused": kept, "written_out": others}
        if kept:
            packages = ("jax", "libtpu" if mesh.device.startswith("tpu") else "jax_cuda12_plugin")
            versions = {package: at for package in packages if (at := version_of(package)) is not None}
            found[said]["versions"] = versions
    return found


def plan_of(
    graph: Graph,
    mesh: Mesh,
    annotations: Annotations,
    *,
    outputs: Mapping[Value, Spec] | None = None,
    **recorded: Unpack[Recorded],
) -> Plan:
    """The plan of these annotations: `annotations_of(plan_of(graph, mesh, a), graph)` is equivalent to `a`.

    Arguments without a pin are replicated. A value that is output of several aten ops (views that compute nothing) is
    annotated at the first of them.

    Args:
        graph: of the program.
        mesh: that the annotations are for.
        annotations: pins and copies on arguments and aten outputs.
        outputs: value -> propagated spec of the program's results; a result in neither this nor the pins is recorded as
            replicated.
        recorded: further fields of the plan, as they are.

    Raises:
        PlanError: an annotation on a value that lowering cannot reach.
    """
    program = graph.program
    copies: dict[Value, list[Copy]] = {}
    for (value, consumer), spec in sorted(annotations.copies.items()):
        copies.setdefault(value, []).append(Copy(consumer, spec, annotations.hops.get((value, spec), ())))
    arguments = {Value(op): argument for op, argument in zip(graph.arguments, program.arguments, strict=True)}
    sections: dict[str, dict[str, TensorPlan]] = {section: {} for section in ROLES.values()}
    for value, argument in arguments.items():
        if argument.role in ROLES:
            shape, dtype = argument.type.shape, argument.type.dtype
            spec = annotations.pins.get(value, replicated(len(shape)))
            sections[ROLES[argument.role]][argument.name] = TensorPlan(shape, dtype, spec, tuple(copies.get(value, ())))
    activations = _activations(graph, annotations, copies, arguments)
    known = {**(outputs or {}), **annotations.pins}
    results = {
        each.name: TensorPlan(each.type.shape, each.type.dtype, known.get(value, replicated(len(each.type.shape))))
        for each, value in zip(program.outputs, graph.outputs, strict=True)
        if each.updates is None
    }
    recorded["options"] = recorded.get("options") or Options()
    recorded["info"] = {**_regions(program, mesh), **recorded.get("info", {})}
    return Plan(
        program=program_info(program),
        mesh=mesh,
        parameters=sections["parameters"],
        buffers=sections["buffers"],
        inputs=sections["inputs"],
        optimizer_state=sections["optimizer_state"],
        outputs=results,
        activations=activations,
        captured=program,
        **recorded,
    )


def _activations(
    graph: Graph, annotations: Annotations, copies: Mapping[Value, list[Copy]], arguments: Container[Value]
) -> tuple[ActivationPlan, ...]:
    """The annotated values inside the program, each at the first aten op that outputs it."""
    program = graph.program
    found: dict[Value, ActivationPlan] = {}
    for (index, output), value in sorted(graph.aten_outputs.items()):
        if value in arguments or value in found or not (value in annotations.pins or value in copies):
            continue
        aten, type = program.ops[index], graph.type_of(value)
        found[value] = ActivationPlan(
            key=ActivationKey(program.frontend, index, aten.name, output),
            module=aten.module,
            shape=type.shape,
            dtype=type.dtype,
            spec=annotations.pins.get(value),
            copies=tuple(copies.get(value, ())),
        )
    annotated = sorted({*annotations.pins, *copies})
    lost = [value for value in annotated if value not in arguments and value not in found]
    if lost:
        kind = graph.ops[lost[0].op].kind
        raise PlanError(f"op {lost[0].op} ({kind}) is inside an aten op: lowering cannot annotate it")
    return tuple(found.values())
