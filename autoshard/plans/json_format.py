"""Plans as JSON, version 1, and back; the format is `plan_schema.json` (JSON Schema, draft 2020-12).

Written so that a plan is small and can be read and compared by line: one line per tensor, value and op; fixed key
order; no time of day and no duration, so the same plan gives the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import lru_cache
from importlib import resources
from itertools import islice
from pathlib import Path
from typing import Any

from autoshard import files, json_text
from autoshard.errors import FileError
from autoshard.json_text import shortened
from autoshard.mesh import Mesh, Spec, as_spec
from autoshard.plans.value import (
    ActivationKey,
    ActivationPlan,
    CollectiveTotal,
    Copy,
    MeshTried,
    ModuleCost,
    OpSignature,
    Options,
    Plan,
    PlanError,
    Predicted,
    ProgramInfo,
    RefineCandidate,
    Refinement,
    ReplicatedOp,
    SolverInfo,
    TensorPlan,
)
from autoshard.program import ValueRead
from autoshard.version import __version__

FORMAT = "autoshard.plan"
VERSION = 1

Json = dict[str, Any]


# --- writing -----------------------------------------------------------------------------------------------------


def dumps(plan: Plan) -> str:
    """The plan as text, ending in a newline."""
    return "".join(_lines(to_dict(plan))) + "\n"


def save(plan: Plan, path: str | Path) -> None:
    """Write a plan to a file, whole or not at all; see `Plan.save`."""
    try:
        files.write(Path(path), dumps(plan))
    except FileError as error:
        raise PlanError(str(error)) from None


def to_dict(plan: Plan) -> Json:
    """The plan as plain JSON values, keys in the format's order."""
    program, options = plan.program, plan.options
    return {
        "format": FORMAT,
        "version": VERSION,
        "autoshard_version": __version__,
        "program": {
            "fingerprint": program.fingerprint,
            "kind": program.kind,
            "frontend": program.frontend,
            "versions": dict(sorted(program.versions.items())),
            "switches": list(program.switches),
            "ops": [_op_to(op) for op in program.ops],
            **({"reads": [_read_to(read) for read in program.reads]} if program.reads else {}),
        },
        "mesh": mesh_to(plan.mesh),
        "options": {
            "memory": options.memory,
            "hints": {name: _spec_to(spec) for name, spec in sorted(options.hints.items())},
            "keep": options.keep,
            "fold": options.fold,
            "seed": options.seed,
        },
        "parameters": _tensors_to(plan.parameters),
        "buffers": _tensors_to(plan.buffers),
        "inputs": _tensors_to(plan.inputs),
        "optimizer_state": _tensors_to(plan.optimizer_state),
        "outputs": _tensors_to(plan.outputs),
        "activations": [_activation_to(value) for value in plan.activations],
        "predicted": None if plan.predicted is None else predicted_to(plan.predicted),
        "solver": None if plan.solver is None else solver_to(plan.solver),
        "replicated_ops": [
            {"op": each.op, "module": each.module, "reason": each.reason, "cost_s": each.cost_s}
            for each in plan.replicated_ops
        ],
        **({"wrong_sums": list(plan.wrong_sums)} if plan.wrong_sums else {}),
        **({"search": [_tried_to(each) for each in plan.search]} if plan.search else {}),
        **({} if plan.refined is None else {"refined": refined_to(plan.refined)}),
    }


def refined_to(refined: Refinement) -> Json:
    """What was compiled to refine a choice, as plain JSON values."""
    return {
        "target": refined.target,
        "chosen": refined.chosen,
        "candidates": [
            {
                "name": each.name,
                "predicted_s": each.predicted_s,
                "predicted_overlapped_s": each.predicted_overlapped_s,
                "compiled_s": each.compiled_s,
                "compiled_overlapped_s": each.compiled_overlapped_s,
                "peak_memory_bytes": each.peak_memory_bytes,
                "note": each.note,
            }
            for each in refined.candidates
        ],
    }


def _tried_to(tried: MeshTried) -> Json:
    return {
        "shape": list(tried.shape),
        "outcome": tried.outcome,
        "step_time_s": tried.step_time_s,
        "objective": tried.objective,
        "bound": tried.bound,
        "peak_memory_bytes": tried.peak_memory_bytes,
        "note": tried.note,
    }


def _spec_to(spec: Spec) -> list[list[str]]:
    return [list(dim) for dim in spec]


def _copies_to(copies: Sequence[Copy]) -> list[Json]:
    return [
        {"consumer": copy.consumer, "spec": _spec_to(copy.spec)}
        | ({"hops": [_spec_to(hop) for hop in copy.hops]} if copy.hops else {})
        for copy in copies
    ]


def _tensors_to(tensors: Mapping[str, TensorPlan]) -> Json:
    return {
        name: {"shape": list(tensor.shape), "dtype": tensor.dtype, "spec": _spec_to(tensor.spec)}
        | ({"copies": _copies_to(tensor.copies)} if tensor.copies else {})
        for name, tensor in tensors.items()
    }


def _activation_to(value: ActivationPlan) -> Json:
    key = value.key
    return {
        "key": {"frontend": key.frontend, "index": key.index, "name": key.name, "output": key.output},
        "module": value.module,
        "shape": list(value.shape),
        "dtype": value.dtype,
        "spec": None if value.spec is None else _spec_to(value.spec),
        "copies": _copies_to(value.copies),
    }


def _op_to(op: OpSignature) -> Json:
    inputs = [list(source) if isinstance(source, tuple) else source for source in op.inputs]
    return {"name": op.name, "outputs": list(op.outputs), "inputs": inputs} | (
        {"options": op.options} if op.options else {}
    )


def _read_to(read: ValueRead) -> Json:
    return {**asdict(read), "follows_from": list(read.follows_from)}


def mesh_to(mesh: Mesh) -> Json:
    """A mesh as JSON values."""
    return {
        "shape": list(mesh.shape),
        "axis_names": list(mesh.axis_names),
        "device": mesh.device,
        "placement": list(mesh.placement),
    }


def solver_to(solver: SolverInfo) -> Json:
    """What the solver says of a plan, as JSON values."""
    return {
        "status": solver.status,
        "objective": solver.objective,
        "bound": solver.bound,
        "gap": solver.gap,
        "backend": solver.backend,
        **({} if solver.overruled is None else {"overruled": solver.overruled}),
    }


def predicted_to(predicted: Predicted, *, modules: bool = True) -> Json:
    """Predicted figures as plain JSON values, keys in the format's order; `modules`: also those of each module."""
    found = {
        "step_time_s": predicted.step_time_s,
        "compute_s": predicted.compute_s,
        "communication_s": predicted.communication_s,
        "overlapped_s": predicted.overlapped_s,
        "mfu": predicted.mfu,
        "collectives": _collectives_to(predicted.collectives),
        "peak_memory_bytes": predicted.peak_memory_bytes,
    }
    if modules and predicted.modules:
        found["modules"] = [
            {
                "module": each.module,
                "phase": each.phase,
                "compute_s": each.compute_s,
                "communication_s": each.communication_s,
                "collectives": _collectives_to(each.collectives),
            }
            for each in predicted.modules
        ]
    return found


def _collectives_to(totals: Sequence[CollectiveTotal]) -> list[Json]:
    return [{"kind": each.kind, "axes": list(each.axes), "count": each.count, "bytes": each.bytes} for each in totals]


_ONE_LINE_EACH = frozenset({"candidates", "collectives", "hints", "modules", "ops"})
"""Collections below the second level that get a line per entry; those at the top all do."""


def _lines(value: Json) -> Iterator[str]:
    yield "{"
    for i, (key, entry) in enumerate(value.items()):
        yield f"{',' if i else ''}\n  {json.dumps(key)}: "
        yield from _entry(entry, "  ", key not in ("mesh", "solver"))
    yield "\n}"


def _entry(value: Any, indent: str, spread: bool) -> Iterator[str]:
    if not spread or not isinstance(value, dict | list) or not value:
        yield _compact(value)
        return
    inner = indent + "  "
    items = list(value.items()) if isinstance(value, dict) else [(None, each) for each in value]
    yield "{" if isinstance(value, dict) else "["
    for i, (key, each) in enumerate(items):
        yield f"{',' if i else ''}\n{inner}" if key is None else f"{',' if i else ''}\n{inner}{_compact(key)}: "
        if key in _ONE_LINE_EACH:
            yield from _entry(each, inner, True)
        else:
            yield _compact(each)
    yield f"\n{indent}" + ("}" if isinstance(value, dict) else "]")


_compact = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode


# --- reading -----------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def schema() -> Json:
    """The published JSON Schema."""
    found = json.loads(resources.files("autoshard.plans").joinpath("plan_schema.json").read_text(encoding="utf-8"))
    assert isinstance(found, dict)
    return found


def load(path: str | Path) -> Plan:
    """Read a plan that `save` wrote; see `Plan.load`."""
    try:
        text = Path(path).read_bytes()
    except OSError as error:
        raise PlanError(f"cannot read {path}: {error.strerror or error}") from None
    return loads(text, str(path))


def loads(text: str | bytes, source: str = "plan") -> Plan:
    """The plan that `dumps` wrote; see `Plan.from_json`.

    Raises:
        PlanError: with the path of the bad field.
    """
    try:
        value = json_text.parse(text)
    except ValueError as error:
        raise PlanError(f"{source} is not JSON: {error}") from None
    check(value, source)
    try:
        return from_dict(value)
    except ValueError as error:  # what a schema cannot say: specs that do not fit, clashing axis names
        raise PlanError(f"{source}: {error}") from None


def check(value: Any, source: str) -> None:
    """Refuse JSON that is no plan of this version.

    Raises:
        PlanError: with the path of the bad field.
    """
    if not isinstance(value, dict):
        raise PlanError(f"{source}: a plan is a JSON object, not {shortened(value)}")
    if value.get("format") != FORMAT:
        found = f"{shortened(value['format'])}" if "format" in value else "no format field"
        raise PlanError(f"{source}: format: expected {FORMAT!r}, found {found}; this is no plan of autoshard")
    if value.get("version") != VERSION or isinstance(value.get("version"), bool):
        raise PlanError(
            f"{source}: version: this autoshard ({__version__}) reads version {VERSION} of the format, "
            f"not {shortened(value.get('version'))}; the plan was written by autoshard {value.get('autoshard_version')}"
        )
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import best_match

    errors = islice(Draft202012Validator(schema()).iter_errors(value), _ERRORS)
    error = best_match(errors)
    if error is not None:
        raise PlanError(f"{source}: {_path(error.absolute_path)}: {_explain(error)}")


_ERRORS = 20
"""How many errors are looked at to name the one that matters: a large file may have one in every entry."""


def _path(parts: Sequence[str | int]) -> str:
    text = ""
    for part in parts:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text or "the top level"


def _explain(error: Any) -> str:
    """jsonschema's message, without a dump of the whole offending value."""
    value = error.instance
    if error.validator == "type":
        wanted = error.validator_value
        return f"expected {' or '.join(wanted) if isinstance(wanted, list) else wanted}, found {shortened(value)}"
    if error.validator == "enum":
        return f"expected one of {', '.join(map(json.dumps, error.validator_value))}, found {shortened(value)}"
    if error.validator == "pattern":
        return f"{shortened(value)} does not look like {error.schema.get('description', error.validator_value)}"
    if error.validator in ("minimum", "maximum"):
        how = "less than the minimum" if error.validator == "minimum" else "greater than the maximum"
        return f"{shortened(value)} is {how} of {error.validator_value}"
    message = str(error.message)
    return message if len(message) <= 200 else f"{shortened(value)} fails {error.validator!r}"


def from_dict(value: Json) -> Plan:
    """The plan that `to_dict` gave; `value` must have passed `check`.

    Raises:
        ValueError: specs that do not fit their tensors or the mesh, or a mesh that is none.
    """
    program, mesh, options, solver = value["program"], value["mesh"], value["options"], value["solver"]
    return Plan(
        program=ProgramInfo(
            fingerprint=program["fingerprint"],
            kind=program["kind"],
            frontend=program["frontend"],
            versions=program["versions"],
            switches=tuple(program["switches"]),
            ops=tuple(_op_from(op) for op in program["ops"]),
            reads=tuple(_read_from(read) for read in program.get("reads", ())),
        ),
        mesh=_mesh_from(mesh),
        options=Options(
            memory=options["memory"],
            hints={name: as_spec(spec) for name, spec in options["hints"].items()},
            keep=options["keep"],
            fold=options["fold"],
            seed=options["seed"],
        ),
        parameters=_tensors_from(value["parameters"]),
        buffers=_tensors_from(value["buffers"]),
        inputs=_tensors_from(value["inputs"]),
        optimizer_state=_tensors_from(value["optimizer_state"]),
        outputs=_tensors_from(value["outputs"]),
        activations=tuple(_activation_from(entry) for entry in value["activations"]),
        predicted=None if value["predicted"] is None else _predicted_from(value["predicted"]),
        solver=None if solver is None else SolverInfo(**solver),
        replicated_ops=tuple(ReplicatedOp(**each) for each in value["replicated_ops"]),
        wrong_sums=tuple(value.get("wrong_sums", ())),
        search=tuple(MeshTried(**(each | {"shape": tuple(each["shape"])})) for each in value.get("search", ())),
        refined=_refined_from(value["refined"]) if "refined" in value else None,
    )


def _refined_from(value: Json) -> Refinement:
    candidates = tuple(RefineCandidate(**each) for each in value["candidates"])
    return Refinement(value["target"], value["chosen"], candidates)


def _mesh_from(mesh: Json) -> Mesh:
    try:
        return Mesh(tuple(mesh["shape"]), tuple(mesh["axis_names"]), mesh["device"], tuple(mesh["placement"]))
    except ValueError as error:
        raise PlanError(f"mesh: {error}") from None


def _copies_from(copies: Sequence[Json]) -> tuple[Copy, ...]:
    return tuple(
        Copy(copy["consumer"], as_spec(copy["spec"]), tuple(map(as_spec, copy.get("hops", ())))) for copy in copies
    )


def _tensors_from(tensors: Json) -> dict[str, TensorPlan]:
    return {
        name: TensorPlan(
            tuple(tensor["shape"]), tensor["dtype"], as_spec(tensor["spec"]), _copies_from(tensor.get("copies", ()))
        )
        for name, tensor in tensors.items()
    }


def _activation_from(value: Json) -> ActivationPlan:
    return ActivationPlan(
        key=ActivationKey(**value["key"]),
        module=value["module"],
        shape=tuple(value["shape"]),
        dtype=value["dtype"],
        spec=None if value["spec"] is None else as_spec(value["spec"]),
        copies=_copies_from(value["copies"]),
    )


def _op_from(op: Json) -> OpSignature:
    inputs = tuple((source[0], source[1]) if isinstance(source, list) else source for source in op["inputs"])
    return OpSignature(op["name"], tuple(op["outputs"]), inputs, op.get("options", ""))


def _read_from(read: Json) -> ValueRead:
    return ValueRead(**{**read, "follows_from": tuple(read["follows_from"])})


def _predicted_from(value: Json) -> Predicted:
    modules = tuple(
        ModuleCost(**(each | {"collectives": _collectives_from(each["collectives"])}))
        for each in value.get("modules", ())
    )
    return Predicted(**(value | {"collectives": _collectives_from(value["collectives"]), "modules": modules}))


def _collectives_from(totals: Sequence[Json]) -> tuple[CollectiveTotal, ...]:
    return tuple(CollectiveTotal(**(each | {"axes": tuple(each["axes"])})) for each in totals)
