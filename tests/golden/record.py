"""What a golden file holds of a plan, and how one is held against another.

Decisions, which is everything but floats, are held exactly, and floats to `TOLERANCE`.
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from autoshard.api import Plan
from autoshard.mesh import as_spec, format_spec

FOLDER = Path(__file__).parent
LOCK = FOLDER.parents[1] / "requirements" / "xla.txt"
TOLERANCE = 1e-6
"""Relative, of floats."""
LEFT_OUT = (("autoshard_version",), ("program", "versions"), ("solver", "gap"), ("info", "bars"))
"""What made the plan, or how sure its figures are, not what it is; the gap, rounding alone, is held to be none."""
GAP = 1e-9
"""What a solve proves, as a part of the objective: rounding of float64 sums."""

Json = dict[str, Any]


def path(name: str) -> Path:
    """The file of a golden plan."""
    return FOLDER / f"{name}.json.gz"


def record(plan: Plan) -> Json:
    """What is kept of a plan.

    Raises:
        AssertionError: it is not proved optimal, so it may differ from run to run, or not kept before an optimum.
    """
    assert plan.solver is not None
    assert plan.solver.gap is not None, plan.solver
    proved = plan.solver.status == "optimal" and plan.solver.gap <= GAP
    assert proved or (plan.solver.status == "feasible" and "prices" in plan.info), plan.solver
    kept = json.loads(plan.to_json())
    for *parents, last in LEFT_OUT:
        inside = kept
        for parent in parents:
            inside = inside[parent]
        del inside[last]
    if not kept["info"]:
        del kept["info"]
    return kept


def read(name: str) -> Json:
    """The record of a golden plan."""
    found: Json = json.loads(gzip.decompress(path(name).read_bytes()))
    return found


def write(name: str, kept: Json) -> None:
    """Equal records give equal bytes."""
    path(name).write_bytes(gzip.compress(json.dumps(kept, indent=1).encode(), mtime=0))


def outside_the_lock() -> str | None:
    """The first package that is not installed as locked, in words; golden plans are those of the locked packages."""
    for line in LOCK.read_text().splitlines():
        wanted = Requirement(line)
        if wanted.marker is not None and not wanted.marker.evaluate():
            continue
        try:
            found = version(wanted.name)
        except PackageNotFoundError:
            continue
        if not wanted.specifier.contains(found):
            return f"{wanted} is locked, {found} is installed"
    return None


def differences(old: Json, new: Json) -> list[str]:
    """Where two records differ, a line each: `activations op12.0 aten.mm.default (h.0): [data],[] → [],[model]`."""
    return list(_differences(_named(old), _named(new), ()))


def _differences(old: Any, new: Any, where: tuple[str, ...]) -> Iterator[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(key for key in new if key not in old)]:
            yield from _differences(old.get(key, _ABSENT), new.get(key, _ABSENT), (*where, key))
        if list(old) != list(new) and old.keys() == new.keys():
            yield f"{' '.join(where)}: {', '.join(old)} → {', '.join(new)}"
        return
    floats = isinstance(old, float) and isinstance(new, float)
    same = math.isclose(old, new, rel_tol=TOLERANCE) if floats else (type(old), old) == (type(new), new)
    if not same:
        yield f"{' '.join(where)}: {_text(old)} → {_text(new)}"


_ABSENT = "absent"


def _text(value: Any) -> str:
    """A leaf, or all that came or went, on one line."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {_text(each)}" for key, each in value.items())
    return str(value)


def _named(value: Any, key: str = "") -> Any:
    """The same as nested dicts, entries of lists by what they are of, and specs as text."""
    if isinstance(value, dict):
        return {name: _named(each, "spec" if key == "hints" else name) for name, each in value.items()}
    if not isinstance(value, list):
        return value
    if key == "spec":
        return format_spec(as_spec(value))
    if value and not isinstance(value[0], dict):
        return ", ".join(map(str, value))
    named: Json = {}
    for number, each in enumerate(value):
        name = _name(each, number, key)
        named[name if name not in named else f"{name} #{number}"] = _named(each)
    return named


def _name(entry: Json, number: int, section: str) -> str:
    """What an entry of a list is of."""
    match section:
        case "ops":
            return f"op{number}"
        case "activations":
            at = entry["key"]
            return f"op{at['index']}.{at['output']} {at['name']} ({entry['module']})"
        case "copies":
            return f"copy for op{entry['consumer']}"
        case "collectives":
            return f"{entry['kind']} over {','.join(entry['axes'])}"
        case "modules":
            return f"{entry['module']} {entry['phase']}"
        case "search":
            return "x".join(map(str, entry["shape"]))
        case _:
            return str(number)


def figures(kept: Json) -> str:
    """Step time, memory and bytes that are sent, as predicted."""
    predicted = kept["predicted"]
    sent = sum(each["bytes"] for each in predicted["collectives"])
    return (
        f"{predicted['step_time_s'] * 1e6:,.1f} us, peak {predicted['peak_memory_bytes']:,} bytes, "
        f"collectives {sent:,} bytes"
    )
