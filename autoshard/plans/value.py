"""What was decided: the sharding of every tensor that lowering annotates, and what it is predicted to cost.

A `Plan` is a value. `Plan.save` and `Plan.load` are inverse (`json_format.py`; the format is published as
`plan_schema.json`), `Plan.annotations` gives the pins and copies on a graph that prediction, verification and lowering
share, and `plan_of` is its inverse: the Plan that says what given annotations say.

Bytes are per device, times are seconds of one step. Floats keep nine significant digits, so that a plan is equal to
itself read back, and the same call gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from autoshard.errors import FileError
from autoshard.mesh import Mesh, Spec, format_spec, replicated
from autoshard.plans.figures import CollectiveTotal as CollectiveTotal
from autoshard.plans.figures import MeshTried as MeshTried
from autoshard.plans.figures import ModuleCost as ModuleCost
from autoshard.plans.figures import PlanError as PlanError
from autoshard.plans.figures import Predicted as Predicted
from autoshard.plans.figures import RefineCandidate as RefineCandidate
from autoshard.plans.figures import Refinement as Refinement
from autoshard.plans.figures import ReplicatedOp as ReplicatedOp
from autoshard.plans.figures import SolverInfo as SolverInfo

if TYPE_CHECKING:
    from autoshard.graph.annotations import Annotations
    from autoshard.graph.ops import Graph, Value
    from autoshard.lower.dtensor.distribute import DTensorPlan
    from autoshard.lower.to_jax import JaxShardings
    from autoshard.program import Argument, AtenOp, Program, TensorType, ValueRead
    from autoshard.show.explanation import Explanation

Producer = tuple[int, int] | str | None
"""What an op reads: `(k, j)` for output j of aten op k, the name of an argument, or None for a host constant."""

Keep = Literal["all", "io", "none"]

ROLES: Mapping[str, str] = {
    "parameter": "parameters",
    "buffer": "buffers",
    "input": "inputs",
    "optimizer_state": "optimizer_state",
}
"""Argument role -> the field of a Plan that holds its tensors. Scalars are never split, and in no plan."""


class NoPlanError(PlanError):
    """No plan exists: the memory limit or the hints exclude every one.

    Attributes:
        least: bytes per device of the least peak that a plan reaches; infinite where memory is not what excludes them.
    """

    def __init__(self, message: str, least: float = float("inf")) -> None:
        """The message, and the least peak."""
        super().__init__(message)
        self.least = least


class PlanMismatchError(PlanError):
    """A good plan, for another program or another mesh; the message says what differs first."""


@dataclass(frozen=True)
class Copy:
    """A second annotated copy of a value, read by one aten op in place of the value.

    Attributes:
        consumer: index of the aten op that reads it.
        spec: how the copy is split.
        hops: the specs that it passes through on the way from the value's, each annotated too; the same for all
            copies of a value with one spec.
    """

    consumer: int
    spec: Spec
    hops: tuple[Spec, ...] = ()


@dataclass(frozen=True)
class TensorPlan:
    """How one argument or result of the program is split.

    Attributes:
        shape, dtype: of the whole tensor; dtype in StableHLO's words.
        spec: one tuple of mesh axes per dim.
        copies: for arguments, the consumers that read it under another sharding.
    """

    shape: tuple[int, ...]
    dtype: str
    spec: Spec
    copies: tuple[Copy, ...] = ()


@dataclass(frozen=True)
class ActivationKey:
    """Which value of the program: output `output` of aten op number `index`, whose name is `name`."""

    frontend: str
    index: int
    name: str
    output: int


@dataclass(frozen=True)
class ActivationPlan:
    """How one value inside the program is split.

    Attributes:
        key: where it is made.
        module: path of the module it belongs to, `""` where unknown.
        shape, dtype: of the whole value.
        spec: what it is pinned to; None when it is not pinned and only has copies.
        copies: the consumers that read it under another sharding.
    """

    key: ActivationKey
    module: str
    shape: tuple[int, ...]
    dtype: str
    spec: Spec | None
    copies: tuple[Copy, ...] = ()


@dataclass(frozen=True)
class OpSignature:
    """What must be the same for an aten op to be the one that was planned.

    Attributes:
        name: such as `aten.addmm.default`.
        outputs: per tensor result its type, written `f32[8,512,768]`.
        inputs: who produced each tensor that it reads.
        options: `AtenOp.options`.
    """

    name: str
    outputs: tuple[str, ...]
    inputs: tuple[Producer, ...] = ()
    options: str = ""


@dataclass(frozen=True)
class ProgramInfo:
    """The program that a plan is for.

    Attributes:
        fingerprint: `Program.fingerprint`.
        kind: `forward` or `train`.
        frontend: `torch_xla`, `torchax`, or `stablehlo` for a file.
        versions: package -> version that captured it.
        switches: capture switches by name; the same must be on at lowering.
        ops: the aten sequence.
        reads: the values that the step took to the host when it was captured; `apply` looks at them again.
    """

    fingerprint: str
    kind: str
    frontend: str
    versions: Mapping[str, str]
    switches: tuple[str, ...]
    ops: tuple[OpSignature, ...] = field(repr=False)
    reads: tuple[ValueRead, ...] = ()


@dataclass(frozen=True)
class Options:
    """What the user asked for.

    Attributes:
        memory: limit in bytes per device, or None for no limit.
        hints: tensor name -> the spec that it must have.
        keep: which of the user's hints hold: `all`, `io` (none inside the program), `none`; `hints` are those that do.
        fold: whether repeated layers share their decision.
        seed: of the solver.
    """

    memory: int | None = None
    hints: Mapping[str, Spec] = field(default_factory=dict)
    keep: Keep = "all"
    fold: bool = True
    seed: int = 0


@dataclass(frozen=True)
class Plan:
    """How a program is split over a mesh; see the module's docstring.

    Attributes:
        program: what it is for.
        mesh: the devices it is for.
        options: what was asked.
        parameters, buffers, inputs, optimizer_state: arguments of the program by name, in its order.
        outputs: results that replace no argument (an updated parameter has its argument's sharding).
        activations: values inside the program that lowering annotates, in program order.
        predicted: what the cost model says; None for a plan that was written by hand and not evaluated.
        solver: None for a plan that no solver made.
        replicated_ops: what was replicated for want of a rule.
        search: every mesh shape that was tried, where the shape was left open.
        wrong_sums: of a plan that no solver made, the convolutions of which XLA would compute wrong numbers, in words.
        refined: what was compiled to refine the choice, where that was asked for; the plan is the best compiled one.
        captured: the program itself, where the plan was made in this process; not saved, and not compared.

    Raises:
        PlanError: a spec that does not fit its tensor or the mesh, naming the tensor.
    """

    program: ProgramInfo
    mesh: Mesh
    options: Options
    parameters: Mapping[str, TensorPlan]
    buffers: Mapping[str, TensorPlan]
    inputs: Mapping[str, TensorPlan]
    optimizer_state: Mapping[str, TensorPlan]
    outputs: Mapping[str, TensorPlan]
    activations: tuple[ActivationPlan, ...]
    predicted: Predicted | None = None
    solver: SolverInfo | None = None
    replicated_ops: tuple[ReplicatedOp, ...] = ()
    wrong_sums: tuple[str, ...] = ()
    search: tuple[MeshTried, ...] = ()
    refined: Refinement | None = None
    captured: Program | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Check every spec against its tensor and the mesh."""
        for where, shape, specs in self._specs():
            for spec in specs:
                try:
                    self.mesh.check(spec, shape, where)
                except ValueError as error:
                    raise PlanError(str(error)) from None

    def _specs(self) -> Iterator[tuple[str, tuple[int, ...], tuple[Spec, ...]]]:
        """(path in the JSON, shape, every spec) of all tensors."""
        for section in (*ROLES.values(), "outputs"):
            for name, tensor in getattr(self, section).items():
                yield f"{section}.{name}", tensor.shape, (tensor.spec, *_copied(tensor.copies))
        for i, value in enumerate(self.activations):
            specs = _copied(value.copies)
            yield f"activations[{i}]", value.shape, specs if value.spec is None else (value.spec, *specs)

    # Reading and writing.

    def to_json(self) -> str:
        """The plan as JSON, version 1; the same plan always gives the same text."""
        from autoshard.plans import json_format as plan_json

        return plan_json.dumps(self)

    @classmethod
    def from_json(cls, text: str | bytes, source: str = "plan") -> Plan:
        """The plan that `to_json` wrote; `source` is what to call the text in messages.

        Raises:
            PlanError: not JSON, another format, an unknown version, or malformed: with the path of the bad field.
        """
        from autoshard.plans import json_format as plan_json

        return plan_json.loads(text, source)

    def save(self, path: str | Path) -> None:
        """Write the plan to a file, whole or not at all.

        Raises:
            PlanError: the path cannot be written.
        """
        from autoshard import files

        try:
            files.write(Path(path), self.to_json())
        except FileError as error:
            raise PlanError(str(error)) from None

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan that `save` wrote.

        Raises:
            PlanError: the file cannot be read, or as `from_json`.
        """
        try:
            text = Path(path).read_bytes()
        except OSError as error:
            raise PlanError(f"cannot read {path}: {error.strerror or error}") from None
        return cls.from_json(text, str(path))

    def to_html(self, explanations: Sequence[Explanation] = ()) -> str:
        """The plan as one self-contained page, with what `autoshard.explain` said of some tensors."""
        from autoshard.show.page import page

        return page(self, explanations)

    # What it is for.

    def check_program(self, program: Program) -> None:
        """Refuse a program that is not the planned one.

        Raises:
            PlanMismatchError: with the first difference: kind, switches, argument, aten op.
        """
        from autoshard.plans.check import first_difference, same_step

        if program.fingerprint != self.program.fingerprint and not same_step(self, program):
            raise PlanMismatchError(f"this plan is for another program: {first_difference(self, program)}")

    def check_mesh(self, mesh: Mesh) -> None:
        """Refuse a mesh of another shape, with other axis names, or of another device kind.

        Raises:
            PlanMismatchError: with both meshes.
        """
        mine, other = self.mesh, mesh
        if (mine.shape, mine.axis_names, mine.device) != (other.shape, other.axis_names, other.device):
            raise PlanMismatchError(
                f"this plan is for the mesh {describe_mesh(mine)}, not {describe_mesh(other)}; plan again for that mesh"
            )

    # What it says.

    def argument(self, argument: Argument) -> TensorPlan | None:
        """What the plan says of an argument of its program; None for scalars."""
        section = ROLES.get(argument.role)
        return None if section is None else getattr(self, section).get(argument.name)

    def tensor(self, name: str) -> TensorPlan:
        """What the plan says of a parameter, buffer, input or optimizer state.

        Raises:
            KeyError: it has none of that name.
        """
        for section in ROLES.values():
            if name in getattr(self, section):
                found: TensorPlan = getattr(self, section)[name]
                return found
        raise KeyError(f"the plan has no parameter, buffer, input or optimizer state called {name!r}")

    def annotations(self, graph: Graph) -> Annotations:
        """The pins and copies that this plan writes on the graph of its program.

        Raises:
            PlanMismatchError: the graph is of another program.
            PlanError: two entries pin one value differently, or an entry names a value that the graph has not.
        """
        from autoshard.graph.annotations import Annotations
        from autoshard.graph.ops import Value

        self.check_program(graph.program)
        pins: dict[Value, Spec] = {}
        copies: dict[tuple[Value, int], Spec] = {}
        hops: dict[tuple[Value, Spec], tuple[Spec, ...]] = {}
        for op, argument in zip(graph.arguments, graph.program.arguments, strict=True):
            tensor = self.argument(argument)
            if tensor is not None:
                pins[Value(op)] = tensor.spec
                copies.update({(Value(op), copy.consumer): copy.spec for copy in tensor.copies})
                hops.update(_hops(Value(op), tensor.copies, argument.name))
        for entry in self.activations:
            value = graph.aten_outputs.get((entry.key.index, entry.key.output))
            if value is None:
                raise PlanError(
                    f"{_name(entry.key)} is not a value of the compiled program: nothing can be pinned there"
                )
            if entry.spec is not None and pins.setdefault(value, entry.spec) != entry.spec:
                raise PlanError(
                    f"{_name(entry.key)} is pinned to {format_spec(entry.spec)}, but it is the same value as one that "
                    f"is pinned to {format_spec(pins[value])}"
                )
            copies.update({(value, copy.consumer): copy.spec for copy in entry.copies})
            hops.update(_hops(value, entry.copies, _name(entry.key)))
        return Annotations(pins, copies, hops)

    def __str__(self) -> str:
        """A report for a person: what splits what per module, totals, what could not be split."""
        from autoshard.show.report import plan_report

        return plan_report(self)

    # Running it.

    def apply(self, model: Any, optimizer: Any = None) -> Any:
        """Move `model` to the XLA devices, sharded as planned, with its optimizer state; see `lower.mark_sharding`."""
        from autoshard.lower.torch_xla import mark_sharding

        return mark_sharding.apply(self, model, optimizer)

    def annotate(self) -> AbstractContextManager[Any]:
        """A context for one ordinary step, whose values are annotated as planned; see `lower.mark_sharding`."""
        from autoshard.lower.torch_xla import mark_sharding

        return mark_sharding.annotate(self)

    def to_jax(self, devices: Sequence[Any] | None = None) -> JaxShardings:
        """The plan in jax's words, on jax's devices: NamedShardings, and the step as a function; see `lower.to_jax`."""
        from autoshard.lower.to_jax import to_jax

        return to_jax(self, devices)

    def to_dtensor(self, device_mesh: Any) -> DTensorPlan:
        """The plan in DTensor's words, on a `torch.distributed` device mesh; see `lower.dtensor`."""
        from autoshard.lower.dtensor.distribute import to_dtensor

        return to_dtensor(self, device_mesh)

    def to_tp_plan(self, model: Any, axis: str | None = None) -> tuple[dict[str, str], list[str]]:
        """The plan in the words of transformers' `tp_plan`, and what it cannot say; see `lower.tp_plan`."""
        from autoshard.lower.tp_plan import to_tp_plan

        return to_tp_plan(self, model, axis)


def describe_mesh(mesh: Mesh) -> str:
    """`2x4 (data=2, model=4) of tpu-v5e`; where axes lie on several links, `(data=2 on ib, model=4 on nvlink)`."""
    links = _links(mesh)
    axes = ", ".join(f"{name}={size}{on}" for name, size, on in zip(mesh.axis_names, mesh.shape, links, strict=True))
    return f"{'x'.join(map(str, mesh.shape))} ({axes}) of {mesh.device}"


def _links(mesh: Mesh) -> list[str]:
    from autoshard.cost.machine.device import DeviceError, default_placement

    try:
        placement = default_placement(mesh)
    except DeviceError:  # a plan can be shown where its device file is not
        placement = mesh.placement
    several = len(set("+".join(placement).split("+"))) > 1
    return [f" on {link}" for link in placement] if several else [""] * len(mesh.shape)


def format_type(type: TensorType) -> str:
    """`f32[8,512,768]`."""
    return str(type)


def program_info(program: Program) -> ProgramInfo:
    """What a plan records of its program."""
    return ProgramInfo(
        fingerprint=program.fingerprint,
        kind=program.kind,
        frontend=program.frontend,
        versions=dict(program.versions),
        switches=program.switches,
        ops=tuple(signature(op) for op in program.ops),
        reads=program.reads,
    )


def signature(op: AtenOp) -> OpSignature:
    """The part of an aten op that a plan records."""
    return OpSignature(op.name, tuple(format_type(type) for type in op.outputs), op.inputs, op.options)


def plan_of(
    graph: Graph,
    mesh: Mesh,
    annotations: Annotations,
    *,
    options: Options | None = None,
    predicted: Predicted | None = None,
    solver: SolverInfo | None = None,
    replicated_ops: Iterable[ReplicatedOp] = (),
    wrong_sums: Iterable[str] = (),
    outputs: Mapping[Value, Spec] | None = None,
) -> Plan:
    """The plan that writes these annotations: `plan_of(graph, mesh, a).annotations(graph)` says what `a` does.

    Arguments without a pin are replicated. A value that is output of several aten ops (views that compute nothing) is
    annotated at the first of them.

    Args:
        graph: of the program.
        mesh: that the annotations are for.
        annotations: pins and copies on arguments and aten outputs.
        options, predicted, solver, replicated_ops, wrong_sums: recorded as they are.
        outputs: value -> spec of the program's results, as propagation has it; a result that is pinned or in neither
            is recorded as pinned or replicated.

    Raises:
        PlanError: an annotation on a value that lowering cannot reach.
    """
    program = graph.program
    copies: dict[Value, list[Copy]] = {}
    for (value, consumer), spec in sorted(annotations.copies.items()):
        copies.setdefault(value, []).append(Copy(consumer, spec, annotations.hops.get((value, spec), ())))
    sections: dict[str, dict[str, TensorPlan]] = {section: {} for section in ROLES.values()}
    reached: set[Value] = set()
    for op, argument in zip(graph.arguments, program.arguments, strict=True):
        value = _value(op)
        reached.add(value)
        if argument.role in ROLES:
            shape, dtype = argument.type.shape, argument.type.dtype
            spec = annotations.pins.get(value, replicated(len(shape)))
            sections[ROLES[argument.role]][argument.name] = TensorPlan(shape, dtype, spec, tuple(copies.get(value, ())))
    activations = []
    for (index, output), value in sorted(graph.aten_outputs.items()):
        if value in reached or not (value in annotations.pins or value in copies):
            continue
        reached.add(value)
        aten, type = program.ops[index], graph.type_of(value)
        activations.append(
            ActivationPlan(
                key=ActivationKey(program.frontend, index, aten.name, output),
                module=aten.module,
                shape=type.shape,
                dtype=type.dtype,
                spec=annotations.pins.get(value),
                copies=tuple(copies.get(value, ())),
            )
        )
    lost = sorted((set(annotations.pins) | set(copies)) - reached)
    if lost:
        kind = graph.ops[lost[0].op].kind
        raise PlanError(f"op {lost[0].op} ({kind}) is inside an aten op: lowering cannot annotate it")
    known = {**(outputs or {}), **annotations.pins}
    results = {
        each.name: TensorPlan(each.type.shape, each.type.dtype, known.get(value, replicated(len(each.type.shape))))
        for each, value in zip(program.outputs, graph.outputs, strict=True)
        if each.updates is None
    }
    return Plan(
        program=program_info(program),
        mesh=mesh,
        options=options or Options(),
        parameters=sections["parameters"],
        buffers=sections["buffers"],
        inputs=sections["inputs"],
        optimizer_state=sections["optimizer_state"],
        outputs=results,
        activations=tuple(activations),
        predicted=predicted,
        solver=solver,
        replicated_ops=tuple(replicated_ops),
        wrong_sums=tuple(wrong_sums),
        captured=program,
    )


def _copied(copies: Iterable[Copy]) -> tuple[Spec, ...]:
    return tuple(spec for copy in copies for spec in (*copy.hops, copy.spec))


def _hops(value: Value, copies: Iterable[Copy], name: str) -> dict[tuple[Value, Spec], tuple[Spec, ...]]:
    found: dict[tuple[Value, Spec], tuple[Spec, ...]] = {}
    for copy in copies:
        if found.setdefault((value, copy.spec), copy.hops) != copy.hops:
            raise PlanError(f"copies of {name} to {format_spec(copy.spec)} take different hops: equal copies are one")
    return {key: hops for key, hops in found.items() if hops}


def _value(op: int) -> Value:
    from autoshard.graph.ops import Value

    return Value(op)


def _name(key: ActivationKey) -> str:
    return f"output {key.output} of op {key.index} ({key.name})"
