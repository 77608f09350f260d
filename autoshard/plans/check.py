"""Whether a plan is for a program: names the first difference; the same ops in another order are the same program.

Models that loop over a set (transformers' over `set(config.layer_types)`) run their ops in another order in another
process.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, TypeVar

from autoshard.mesh import Mesh, describe_mesh
from autoshard.plans.value import (
    ROLES,
    Copy,
    OpSignature,
    Plan,
    PlanMismatchError,
    format_type,
    signature,
)
from autoshard.program import PYTORCH

if TYPE_CHECKING:
    from autoshard.program import Program


AnyPlan = TypeVar("AnyPlan", bound=Plan)


def planned_for(plan: AnyPlan, program: Program) -> AnyPlan:
    """The plan with its ops numbered as in `program`: itself, unless the same ops run in another order.

    Raises:
        PlanMismatchError: another program; names the first difference.
    """
    if program.fingerprint == plan.program.fingerprint or same_step(plan, program):
        return plan
    if next(_differences_beside_ops(plan, program), None) is None and (numbers := _reordered(plan, program)):
        return _renumbered(plan, program, numbers)
    raise PlanMismatchError(f"this plan is for another program: {first_difference(plan, program)}")


def _reordered(plan: Plan, program: Program) -> list[int] | None:
    """Op of the plan -> the op of `program` that does the same on the same values, for the same users; or None.

    Ops of a micro-step stay in it.
    """
    mine, steps = plan.program, plan.program.micro_steps
    if steps != (program.micro_steps and replace(program.micro_steps, carried=())):
        return None
    theirs = [signature(op) for op in program.ops]
    left: dict[int, list[int]] = {}
    for number, key in reversed(list(enumerate(_keys(theirs)))):
        left.setdefault(key, []).append(number)
    numbers = [found.pop() if (found := left.get(key)) else -1 for key in _keys(mine.ops)]
    if len(mine.ops) != len(theirs) or -1 in numbers:
        return None
    for index, op in enumerate(mine.ops):
        reads = tuple((numbers[each[0]], each[1]) if isinstance(each, tuple) else each for each in op.inputs)
        if replace(op, inputs=reads) != theirs[numbers[index]]:
            return None
    ends = () if steps is None else (steps.second, steps.update)
    return None if any(max(numbers[:end], default=0) >= end for end in ends) else numbers


def _keys(ops: Sequence[OpSignature]) -> list[int]:
    """Per op a hash of itself, of all that it depends on, and of all that depends on it."""
    above: list[int] = []
    users: list[list[tuple[int, int, int]]] = [[] for _ in ops]
    for index, op in enumerate(ops):
        reads = tuple((above[each[0]], each[1]) if isinstance(each, tuple) else each for each in op.inputs)
        above.append(hash(replace(op, inputs=reads)))
        for place, each in enumerate(op.inputs):
            if isinstance(each, tuple):
                users[each[0]].append((index, place, each[1]))
    keys = [0] * len(ops)
    for index in range(len(ops) - 1, -1, -1):
        keys[index] = hash((above[index], *sorted((keys[user], place, output) for user, place, output in users[index])))
    return keys


def _renumbered(plan: AnyPlan, program: Program, numbers: list[int]) -> AnyPlan:
    """The plan with op k called `numbers[k]`."""

    def copies(of: tuple[Copy, ...]) -> tuple[Copy, ...]:
        return tuple(replace(copy, consumer=numbers[copy.consumer]) for copy in of)

    changes: dict[str, Any] = {}
    for section in ROLES.values():
        tensors = getattr(plan, section).items()
        changes[section] = {name: replace(each, copies=copies(each.copies)) for name, each in tensors}
    activations = [
        replace(each, key=replace(each.key, index=numbers[each.key.index]), copies=copies(each.copies))
        for each in plan.activations
    ]
    ops = tuple(signature(op) for op in program.ops)
    found = replace(plan.program, fingerprint=program.fingerprint, ops=ops, reads=program.reads)
    activations.sort(key=lambda each: (each.key.index, each.key.output))
    return replace(plan, program=found, activations=tuple(activations), **changes)


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
    yield from _differences_beside_ops(plan, program)
    yield from _ops(plan, program)


def _differences_beside_ops(plan: Plan, program: Program) -> Iterator[str]:
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
