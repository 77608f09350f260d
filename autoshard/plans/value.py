"""A plan: the sharding of every annotated tensor, and its predicted cost.

`Plan` is a bare value; `api.Plan` adds methods. `json_format.py` reads and writes it (`plan_schema.json` is the
format); `annotations_of` gives the annotations on a graph that prediction, verification and lowering share, and
`plan_of` is its inverse.

Bytes are per device, times are seconds of one step. Floats are rounded to nine significant digits, so that a plan
survives a round trip and equal calls give equal bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

from autoshard.mesh import Mesh, Spec
from autoshard.plans.figures import CollectiveTotal as CollectiveTotal
from autoshard.plans.figures import Confirmation as Confirmation
from autoshard.plans.figures import MeshTried as MeshTried
from autoshard.plans.figures import ModuleCost as ModuleCost
from autoshard.plans.figures import PlanError as PlanError
from autoshard.plans.figures import Predicted as Predicted
from autoshard.plans.figures import RefineCandidate as RefineCandidate
from autoshard.plans.figures import Refinement as Refinement
from autoshard.plans.figures import RematSearch as RematSearch
from autoshard.plans.figures import RematTried as RematTried
from autoshard.plans.figures import ReplicatedOp as ReplicatedOp
from autoshard.plans.figures import SolverInfo as SolverInfo
from autoshard.program import MicroSteps, Program, ValueRead

if TYPE_CHECKING:
    from autoshard.program import Argument, AtenOp, TensorType

Producer = tuple[int, int] | str | None
"""What an op reads: `(k, j)` for output j of aten op k, the name of an argument, or None for a host constant."""

Keep = Literal["all", "io", "none"]

ROLES: Mapping[str, str] = {
    "parameter": "parameters",
    "buffer": "buffers",
    "input": "inputs",
    "optimizer_state": "optimizer_state",
}
"""Argument role -> the field of a Plan that holds its tensors. Scalars are never split, and not in a plan."""


class NoPlanError(PlanError):
    """Infeasible: the memory limit or the hints exclude every plan.

    Attributes:
        least: least peak of any plan, in bytes per device; infinite where memory is not the reason.
    """

    def __init__(self, message: str, least: float = float("inf")) -> None:
        """The message, and the least peak."""
        super().__init__(message)
        self.least = least


class PlanMismatchError(PlanError):
    """The plan is for another program or another mesh; the message names the first difference."""


@dataclass(frozen=True)
class Copy:
    """A second annotation of a value, which one aten op reads in place of the value.

    Attributes:
        consumer: index of the aten op that reads it.
        spec: sharding of the copy.
        hops: the intermediate specs between the value's and this one, each annotated too; the same for all copies of a
            value with one spec.
    """

    consumer: int
    spec: Spec
    hops: tuple[Spec, ...] = ()


@dataclass(frozen=True)
class TensorPlan:
    """Sharding of one argument or result of the program.

    Attributes:
        shape, dtype: of the full tensor; dtype in StableHLO's spelling.
        spec: one tuple of mesh axes per dim.
        copies: for arguments, the consumers that read it under another sharding.
    """

    shape: tuple[int, ...]
    dtype: str
    spec: Spec
    copies: tuple[Copy, ...] = ()


@dataclass(frozen=True)
class ActivationKey:
    """A value of the program: output `output` of aten op number `index`, whose name is `name`."""

    frontend: str
    index: int
    name: str
    output: int


@dataclass(frozen=True)
class ActivationPlan:
    """Sharding of one value inside the program.

    Attributes:
        key: the aten output that makes it.
        module: path of its module, `""` where unknown.
        shape, dtype: of the full value.
        spec: its pin; None where it only has copies.
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
    """Signature by which an aten op is recognised as the planned one.

    Attributes:
        name: such as `aten.addmm.default`.
        outputs: type of each tensor result, written `f32[8,512,768]`.
        inputs: the producer of each tensor that it reads.
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
        reads: the values that the step read on the host during capture; `apply` checks them again.
        micro_steps: of a step of several micro-batches, without what they carry.
    """

    fingerprint: str
    kind: str
    frontend: str
    versions: Mapping[str, str]
    switches: tuple[str, ...]
    ops: tuple[OpSignature, ...] = field(repr=False)
    reads: tuple[ValueRead, ...] = ()
    micro_steps: MicroSteps | None = None


@dataclass(frozen=True)
class Options:
    """The user's request.

    Attributes:
        memory: limit in bytes per device, or None for no limit.
        hints: tensor name -> the spec that it must have.
        keep: which of the user's hints constrain the plan: `all`, `io` (none inside the program), `none`; `hints` are
            those.
        fold: required by version 1 of the format; without effect.
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
        program: the program that it is for.
        mesh: the mesh that it is for.
        options: the user's request.
        parameters, buffers, inputs, optimizer_state: arguments of the program by name, in its order.
        outputs: results that replace no argument (an updated parameter has its argument's sharding).
        activations: values inside the program that lowering annotates, in program order.
        predicted: prediction of the cost model; None for a plan by hand without one.
        solver: None for a plan that no solver made.
        replicated_ops: what was replicated for want of a rule.
        search: every mesh shape that was tried, where the shape was left open.
        wrong_sums: of a plan that no solver made, the convolutions of which XLA would compute wrong numbers, in words.
        refined: what was compiled to refine the choice, where that was asked for; the plan is the best compiled one.
        info: what changes nothing that is executed: `source`, what the command line was asked for; `confirmed`;
            `remat`, how it was chosen what is recomputed; `prices`, how the solver's were corrected; `hidden`,
            the share of collectives of weights that is free in its objective; `bars`, how far off the prediction
            may be (`cost/machine/bars.py`).
        captured: the program itself, where the plan was made in this process; not saved, and not compared.
        applied: what `lower/torch_xla` keeps of a plan that was applied in this process; likewise.

    Raises:
        PlanError: a spec does not fit its tensor or the mesh; names the tensor.
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
    info: Mapping[str, Any] = field(default_factory=dict)
    captured: Program | None = field(default=None, repr=False, compare=False)
    applied: Any = field(default=None, init=False, repr=False, compare=False)

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

    # Queries.

    def argument(self, argument: Argument) -> TensorPlan | None:
        """The entry of an argument of the program; None for scalars."""
        section = ROLES.get(argument.role)
        return None if section is None else getattr(self, section).get(argument.name)

    @property
    def confirmed(self) -> Confirmation | None:
        """What the target's compiler said of the plan's memory; None where nobody asked it."""
        said = self.info.get("confirmed")
        known = {each.name for each in fields(Confirmation)}
        return None if said is None else Confirmation(**{key: said[key] for key in said.keys() & known})

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step."""
        return 1 if self.program.micro_steps is None else self.program.micro_steps.count

    @property
    def clip_grad_norm(self) -> float | None:
        """The norm that the step clips gradients to; None where it does not."""
        prefix = "clip_grad_norm:"
        said = next((name.removeprefix(prefix) for name in self.program.switches if name.startswith(prefix)), None)
        return None if said is None else float(said)

    @property
    def remat(self) -> str | None:
        """What is recomputed in place of the program's own checkpoints (`plans/remat.py`); None if these hold."""
        prefix = "remat:"
        return next((name.removeprefix(prefix) for name in self.program.switches if name.startswith(prefix)), None)

    @property
    def remat_search(self) -> RematSearch | None:
        """How it was chosen what is recomputed; None where it was given."""
        said = self.info.get("remat")
        if said is None:
            return None
        return RematSearch(**{**said, "tried": tuple(RematTried(**each) for each in said["tried"])})

    def tensor(self, name: str) -> TensorPlan:
        """The entry of a parameter, buffer, input or optimizer state.

        Raises:
            KeyError: there is none of that name.
        """
        for section in ROLES.values():
            if name in getattr(self, section):
                found: TensorPlan = getattr(self, section)[name]
                return found
        raise KeyError(f"the plan has no parameter, buffer, input or optimizer state called {name!r}")


def format_type(type: TensorType) -> str:
    """`f32[8,512,768]`."""
    return str(type)


def signature(op: AtenOp) -> OpSignature:
    """The part of an aten op that a plan records."""
    return OpSignature(op.name, tuple(format_type(type) for type in op.outputs), op.inputs, op.options)


def _copied(copies: Iterable[Copy]) -> tuple[Spec, ...]:
    return tuple(spec for copy in copies for spec in (*copy.hops, copy.spec))
