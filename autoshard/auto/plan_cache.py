"""Disk cache of plans, keyed by program, mesh, options and versions.

An entry is `plans/<key>.json` in `files.cache_dir()` (see `kept`). It is written under a lock per key: of several
processes that start together one plans and the others wait for it. A corrupt entry, or one for another program or
mesh, is replaced, with a warning.
"""

from __future__ import annotations

import hashlib
import json
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock

from autoshard import files, kept
from autoshard.api import Plan, plan_program
from autoshard.errors import FileError
from autoshard.mesh import Mesh
from autoshard.plans import json_format as plan_json
from autoshard.plans.value import PlanError
from autoshard.program import Program
from autoshard.stablehlo.context import mlir_context
from autoshard.stablehlo.reader import parse_module
from autoshard.version import __version__, version_of

_SOLVERS = ("ortools", "pulp", "numpy", "networkx", "jaxlib", "libtpu")
"""Packages whose versions may affect a plan, beside autoshard and those that captured the program."""


def cached_plan(program: Program, mesh: Mesh | Sequence[Mesh], **options: Any) -> Plan:
    """`plan_program(program, mesh, **options)` through the cache.

    Raises:
        As `plan_program`; a cache that cannot be written is only warned of.
    """

    said = {name: value for name, value in options.items() if name not in ("progress", "dump_problem")}
    try:
        path = files.cache_dir() / "plans" / f"{key(program, mesh, said)}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path.with_suffix(".lock"))
        lock.acquire()
    except (OSError, FileError) as error:
        why = error if isinstance(error, FileError) else f"{error.filename} cannot be written ({error.strerror})"
        warnings.warn(f"plans are not kept: {why}", stacklevel=2)
        return plan_program(program, mesh, **options)
    try:
        found = _read(path, program, [mesh] if isinstance(mesh, Mesh) else mesh)
        if found is None:
            found = plan_program(program, mesh, **options)
            text = found.to_json()
            try:
                kept.write(path, text.encode())
            except FileError as error:
                warnings.warn(f"this plan is not kept: {error}", stacklevel=2)
        return found
    finally:
        lock.release()


def key(program: Program, mesh: Mesh | Sequence[Mesh], options: Mapping[str, Any]) -> str:
    """Cache key: everything that determines the plan."""
    meshes = [mesh] if isinstance(mesh, Mesh) else list(mesh)
    versions = {name: version_of(name) for name in _SOLVERS}
    digest = hashlib.sha256()
    for part in (
        __version__,
        _source_digest(),
        sorted(versions.items()),
        sorted(program.versions.items()),
        program.fingerprint,
        _module_digest(program.stablehlo),
        [(each.shape, each.axis_names, each.device, each.placement, _device_text(each.device)) for each in meshes],
        sorted((name, repr(value)) for name, value in options.items()),
    ):
        digest.update(repr(part).encode())
    return digest.hexdigest()


def _source_digest() -> str:
    """Digest of autoshard's sources by modification time, for development."""
    root = Path(__file__).parents[1]
    stamps = [(each.name, each.stat().st_mtime_ns) for each in sorted(root.rglob("*.py"))]
    return hashlib.sha256(repr(stamps).encode()).hexdigest()


def _module_digest(module: bytes) -> str:
    """Digest of a StableHLO module without locations and without the per-process counters in its names."""

    with mlir_context():
        text = parse_module(module).operation.get_asm(enable_debug_info=False)
    return hashlib.sha256(re.sub(r"(@[\w$-]+)\.\d+", r"\1", text).encode()).hexdigest()


def _device_text(device: str) -> str:
    """Text of a file that describes a device kind."""
    path = Path(device.partition(":")[0])
    return path.read_text() if path.suffix == ".toml" and path.is_file() else ""


def _read(path: Path, program: Program, meshes: Sequence[Mesh]) -> Plan | None:
    """The plan in an entry; None where there is none or, with a warning, where it is invalid."""
    try:
        content = kept.read(path)
        if content is None:
            return None
        found = Plan.of(plan_json.from_dict(json.loads(content)))
    except (kept.DamagedError, PlanError, ValueError, KeyError, TypeError) as error:
        _warn(path, str(error))
        return None
    if found.program.fingerprint != program.fingerprint or found.mesh not in meshes:
        _warn(path, "it is for another program or mesh")
        return None
    return found


def _warn(path: Path, why: str) -> None:
    warnings.warn(f"the plan kept in {path} cannot be used ({why}); planning anew", stacklevel=3)
