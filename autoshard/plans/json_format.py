"""Plans as JSON, versions 1 and 2, and back; the format is `plan_schema.json` (JSON Schema, draft 2020-12).

The fields of the values, under their names, are the format. A plan diffs well: one line per tensor, value and op, fixed
key order, no timestamps or durations, so equal plans give equal bytes. jsonschema checks a file, cattrs makes the
values.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from functools import cache
from importlib import resources
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoshard import files, json_text
from autoshard.attention.form import FUSED
from autoshard.errors import FileError
from autoshard.experts.form import ONE_OP
from autoshard.json_text import shortened
from autoshard.mesh import AxisPart, Mesh, parse_axes
from autoshard.plans.figures import Predicted, SolverInfo
from autoshard.plans.value import Copy, OpSignature, Plan, PlanError, Producer, ProgramInfo, TensorPlan
from autoshard.program import MicroSteps
from autoshard.version import __version__

if TYPE_CHECKING:
    from cattrs import Converter

FORMAT = "autoshard.plan"
VERSIONS = (1, 2)
"""Version 2 is written of plans that a reader of version 1 would run as another program: with attention or experts as
one op, with `remat:`, or of several micro-batches."""

Json = dict[str, Any]


# --- writing -----------------------------------------------------------------------------------------------------


def dumps(plan: Plan) -> str:
    """The plan as text, ending in a newline."""
    start = {
        "format": FORMAT,
        "version": 2 if _of_version_2(plan) else 1,
        "autoshard_version": __version__,
    }
    return "".join(_lines(start | _said(plan))) + "\n"


def _of_version_2(plan: Plan) -> bool:
    several = plan.program.micro_steps is not None
    return several or plan.remat is not None or any(op.name in (FUSED, ONE_OP) for op in plan.program.ops)


def save(plan: Plan, path: str | Path) -> None:
    """Write a plan to a file, whole or not at all; see `Plan.save`."""
    try:
        files.write(Path(path), dumps(plan))
    except FileError as error:
        raise PlanError(str(error)) from None


def plain(value: Any) -> Any:
    """A mesh, or figures, as plain JSON values, keys in the format's order."""
    return json.loads(_compact(value))


_UNSAID: Mapping[type, Sequence[str]] = {
    Plan: ("wrong_sums", "search", "refined", "info"),
    ProgramInfo: ("reads", "micro_steps"),
    MicroSteps: ("carried",),
    OpSignature: ("options",),
    TensorPlan: ("copies",),
    Copy: ("hops",),
    Predicted: ("modules",),
    SolverInfo: ("overruled",),
}
"""Fields that are omitted where empty."""


@cache
def _keys(kind: Any) -> tuple[tuple[str, bool], ...]:
    """The fields of a value that are written, and whether each is written where empty."""
    left_out = next((_UNSAID[base] for base in kind.__mro__ if base in _UNSAID), ())
    return tuple((each.name, each.name not in left_out) for each in fields(kind) if each.compare)


def _said(value: Any) -> Any:
    """A value's fields by name; partial axes as text."""
    if isinstance(value, AxisPart):
        return str(value)
    said = {key: found for key, always in _keys(value.__class__) if (found := getattr(value, key)) or always}
    for key in said.keys() & {"versions", "hints"}:
        said[key] = dict(sorted(said[key].items()))
    return said


_ONE_LINE_EACH = frozenset({"candidates", "collectives", "hints", "modules", "ops"})
"""Collections below the second level that get a line per entry; those at the top level all do."""


def _lines(value: Json) -> Iterator[str]:
    yield "{"
    for i, (key, entry) in enumerate(value.items()):
        yield f"{',' if i else ''}\n  {json.dumps(key)}: "
        yield from _entry(entry, "  ", key not in ("mesh", "solver"))
    yield "\n}"


def _entry(value: Any, indent: str, spread: bool) -> Iterator[str]:
    if not spread or not value or isinstance(value, str | int):
        yield _compact(value)
        return
    if not isinstance(value, dict | tuple):
        value = _said(value)
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


_compact = json.JSONEncoder(ensure_ascii=False, allow_nan=False, default=_said).encode


# --- reading -----------------------------------------------------------------------------------------------------


@cache
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
    except ValueError as error:  # what a schema cannot express: specs that do not fit, clashing axis names
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
    if value.get("version") not in VERSIONS or isinstance(value.get("version"), bool):
        raise PlanError(
            f"{source}: version: this autoshard ({__version__}) reads versions 1 and 2 of the format, "
            f"not {shortened(value.get('version'))}; the plan was written by autoshard {value.get('autoshard_version')}"
        )
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import best_match

    errors = islice(Draft202012Validator(schema()).iter_errors(value), _ERRORS)
    error = best_match(errors)
    if error is not None:
        raise PlanError(f"{source}: {_path(error.absolute_path)}: {_explain(error)}")


_ERRORS = 20
"""Most validation errors examined for the relevant one: a large file may have one in every entry."""


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
    """The plan of JSON values that have passed `check`.

    Raises:
        ValueError: specs that do not fit their tensors or the mesh, or a mesh that is none.
    """
    return _converter().structure(value, Plan)


@cache
def _converter() -> Converter:
    from cattrs import Converter
    from cattrs.gen import make_dict_structure_fn, override

    made = Converter(detailed_validation=False)
    as_mesh = made.get_structure_hook(Mesh)

    def mesh(value: Json, kind: type) -> Any:
        try:
            return as_mesh(value, kind)
        except ValueError as error:
            raise PlanError(f"mesh: {error}") from None

    made.register_structure_hook(Mesh, mesh)
    made.register_structure_hook(str | AxisPart, lambda name, _: parse_axes([name])[0])
    made.register_structure_hook(Producer, lambda value, _: tuple(value) if isinstance(value, list) else value)
    made.register_structure_hook(Plan, make_dict_structure_fn(Plan, made, captured=override(omit=True)))
    return made
