"""Names the first difference between two programs, where a plan is applied to the wrong one."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest
from typing import TYPE_CHECKING

from autoshard.mesh import Mesh, describe_mesh
from autoshard.plans.value import ROLES, OpSignature, Plan, PlanMismatchError, format_type, signature
from autoshard.program import PYTORCH

if TYPE_CHECKING:
    from autoshard.program import Program


def check_program(plan: Plan, program: Program) -> None:
    """Refuse a program that is not the planned one; see `Plan.check_program`."""
    if program.fingerprint != plan.program.fingerprint and not same_step(plan, program):
        raise PlanMismatchError(f"this plan is for another program: {first_difference(plan, program)}")


def check_mesh(plan: Plan, mesh: Mesh) -> None:
    """Refuse a mesh that is not the planned one; see `Plan.check_mesh`."""
    mine, other = plan.mesh, mesh
    if (mine.shape, mine.axis_names, mine.device) != (other.shape, other.axis_names, other.device):
        raise PlanMismatchError(
            f"this plan is for the mesh {describe_mesh(mine)}, not {describe_mesh(other)}; plan again for that mesh"
        )


def same_step(plan: Plan, program: Program) -> bool:
    """Whether a program captured by another front end is the planned one; its scalars may differ."""
    frontends = {plan.program.frontend, program.frontend}
    return frontends == PYTORCH and next(_differences(plan, program), None) is None


def first_difference(plan: Plan, program: Program) -> str:
    """The first difference between the planned program and `program`; never empty."""
    return next(
        _differences(plan, program), "it has other arguments or results, in an order that a plan does not record"
    )


def _differences(plan: Plan, program: Program) -> Iterator[str]:
    mine = plan.program
    if mine.kind != program.kind:
        yield f"the plan is for a {_kind(mine.kind)}, this is a {_kind(program.kind)}"
    if mine.frontend != program.frontend and {mine.frontend, program.frontend} != PYTORCH:
        yield f"the plan was captured through {mine.frontend}, this program through {program.frontend}"
    if mine.switches != program.switches:
        yield (
            f"the plan was captured with the switches {', '.join(mine.switches) or 'none'}, "
            f"this program with {', '.join(program.switches) or 'none'}"
            + (
                "; capture it for the plan's device: capture(..., device=plan.mesh.device)"
                * any(":" in name for name in set(mine.switches) ^ set(program.switches))
            )
        )
    yield from _arguments(plan, program)
    yield from _ops(plan, program)


def _kind(kind: str) -> str:
    return "training step" if kind == "train" else "forward pass"


def _arguments(plan: Plan, program: Program) -> Iterator[str]:
    for role, section in ROLES.items():
        planned = {name: f"{t.dtype}[{','.join(map(str, t.shape))}]" for name, t in getattr(plan, section).items()}
        found = {each.name: format_type(each.type) for each in program.arguments if each.role == role}
        what = role.replace("_", " ")
        for name, type in found.items():
            if name not in planned:
                yield f"{what} {name} ({type}) is not in the plan"
            elif planned[name] != type:
                yield f"{what} {name} is {type}, the plan has {planned[name]}"
        for name, type in planned.items():
            if name not in found:
                yield f"{what} {name} ({type}) of the plan is missing"


def _ops(plan: Plan, program: Program) -> Iterator[str]:
    for index, (planned, op) in enumerate(zip_longest(plan.program.ops, program.ops)):
        if op is None:
            yield f"it ends after {index} ops; the plan goes on with op {index}, {describe(planned)}"
        elif planned is None:
            yield f"it goes on after the plan's {index} ops with {describe(signature(op))}{_in(op.module)}"
        elif (difference := op_difference(planned, signature(op))) is not None:
            yield f"op {index}{_in(op.module)} {difference}"


def _in(module: str) -> str:
    return f" in {module}" if module else ""


def op_difference(planned: OpSignature, found: OpSignature) -> str | None:
    """How `found` differs from the planned op, to continue a sentence that named it; None if it does not."""
    if planned.name != found.name:
        return f"is {describe(found)}, the plan has {describe(planned)}"
    if planned.outputs != found.outputs:
        return f"({found.name}) makes {_types(found)}, the plan has {_types(planned)}"
    if planned.inputs != found.inputs:
        return f"({found.name}) reads {_sources(found)}, the plan has {_sources(planned)}"
    if planned.options != found.options:
        return (
            f"({found.name}) is called with {found.options or 'defaults'}, the plan has {planned.options or 'defaults'}"
        )
    return None


def describe(op: OpSignature) -> str:
    """`aten.addmm.default -> f32[8,512]`."""
    return f"{op.name} -> {_types(op)}"


def _types(op: OpSignature) -> str:
    return ", ".join(op.outputs) or "nothing"


def _sources(op: OpSignature) -> str:
    names = [
        "a constant" if each is None else each if isinstance(each, str) else f"output {each[1]} of op {each[0]}"
        for each in op.inputs
    ]
    return "(" + ", ".join(names) + ")"
