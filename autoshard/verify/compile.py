"""Compiles an annotated program for devices that need not be present, in a process of its own, with a cache."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from autoshard import files, kept, workers
from autoshard.errors import AutoshardError, FileError
from autoshard.verify.targets import Target, parse_target

WORKER_VERSION = 2
"""Part of the cache key: raised whenever the worker compiles the same module differently."""

COMPILE_COMMAND = (sys.executable, "-P", "-m", "autoshard.verify.worker")
"""The command of the compile worker, without its last argument, the request file."""

COMPILE_TIMEOUT_S = 1200.0

_REMATERIALIZATION = "Involuntary full rematerialization"


_KNOWN_CRASHES = {
    "IsScalarWithElementType(value.shape(), primitive_type)": (
        "libtpu's partitioner cannot pad the indices of a scatter that are unsigned or of 64 bits: keep the dim "
        "along which they are read (such as the columns that an index_select took) whole, or split it evenly"
    ),
}
"""Text of a compiler's abort -> what about the program it cannot compile (libtpu 0.0.51)."""


class CompileError(AutoshardError, RuntimeError):
    """XLA could not compile the program: its message, or that it crashed or timed out."""


class OutOfMemoryError(CompileError):
    """XLA found that the program does not fit in a device's memory.

    Attributes:
        needed, available: bytes per device; None where the compiler does not say.
    """

    def __init__(self, message: str, needed: int | None = None, available: int | None = None) -> None:
        """The message, and the bytes."""
        super().__init__(message)
        self.needed, self.available = needed, available


_EXHAUSTED = re.compile(r"RESOURCE_EXHAUSTED|CompileTimeHbmOom")
_OTHER_MEMORY = re.compile(r"memory space (?!hbm)|CompileTime\w*[VS]mem")
"""A kernel that exceeds on-chip memory does so whatever the limit."""
_FIGURES = re.compile(r"(?:required for .*?\(|Used )([\d.]+[KMGT]?)\)? (?:exceeds available HBM \(|of )([\d.]+[KMGT]?)")
"""What libtpu says that a program takes, and of how much (0.0.51, and older versions)."""


@dataclass(frozen=True)
class Memory:
    """Bytes per device by the compiler's buffer assignment.

    `alias` bytes are counted in both `argument` and `output`: a donated argument and the result in its buffer.
    """

    argument: int
    output: int
    temp: int
    alias: int

    @property
    def peak(self) -> int:
        """Peak bytes per device, with the compiler's temporaries as one block."""
        return self.argument + self.output - self.alias + self.temp


@dataclass(frozen=True)
class Compiled:
    """A program as XLA partitioned and optimized it, for one device.

    Attributes:
        target, num_devices: what it was compiled for.
        path: gzipped HLO text; see `hlo_text`.
        memory: bytes per device.
        seconds: compile time, without the start of the process; of the original compilation where cached.
        rematerializations: the partitioner's warnings of `Involuntary full rematerialization`, one text per value:
            defects of the annotations.
        cached: whether the result is from the cache.
    """

    target: Target
    path: Path
    memory: Memory
    seconds: float
    rematerializations: tuple[str, ...]
    cached: bool

    @property
    def num_devices(self) -> int:
        """Devices of the target."""
        return self.target.num_devices

    @cached_property
    def hlo_text(self) -> str:
        """The optimized HLO module, as XLA prints it."""
        with gzip.open(self.path, "rt") as source:
            return source.read()


def compile_module(
    stablehlo: bytes,
    target: Target | str,
    *,
    donate: Mapping[int, int] | None = None,
    order: Sequence[int] | None = None,
    whole: bool = False,
    cache_dir: Path | str | None = None,
    timeout: float = COMPILE_TIMEOUT_S,
) -> Compiled:
    """Compile a StableHLO module with GSPMD annotations for `target`.

    Args:
        stablehlo: MLIR bytecode or text; sharding annotations are `mhlo.sharding` attributes on arguments, results
            and `custom_call @Sharding`. An argument without one is replicated.
        target: a Target or its text.
        donate: argument index -> index of the result that reuses its buffer.
        order: partition -> device, devices numbered by slice or host, then by coordinates, then within the chip (see
            `cost/machine/layout.py`); default partition i on device i.
        whole: also have a TPU's compiler generate code, most of its time, without which the text has no estimates of
            cycles. A GPU's never does, a CPU's always.
        cache_dir: cache of compiled programs; default `files.cache_dir()`.
        timeout: seconds after which the compiler is stopped.

    Raises:
        TargetError: the target is malformed or its compiler not installed.
        OutOfMemoryError: the program does not fit in a device's memory.
        CompileError: the compiler refused the program otherwise, crashed or took longer than `timeout`.
    """
    target = parse_target(target) if isinstance(target, str) else target
    versions = target.packages()
    how: dict[str, Any] = {"donate": sorted((donate or {}).items())}
    if order is not None and target.family != "cpu" and list(order) != sorted(order):
        how["order"] = list(order)
    if whole and target.family == "tpu":
        how["whole"] = True
    try:
        root = (Path(cache_dir) if cache_dir is not None else files.cache_dir()) / "compiled"
        entry = root / _key(stablehlo, target, how, versions)
        result = _kept(entry)
        cached = result is not None
        if result is None:
            root.mkdir(parents=True, exist_ok=True)
            with files.work_folder(root, "tmp-") as work:
                _run_worker(work, stablehlo, target, how, timeout)
                result = _publish(work, entry)
    except FileError as error:
        raise CompileError(f"cannot keep compiled programs: {error}") from None
    except OSError as error:
        raise CompileError(
            f"cannot keep compiled programs in {root}: {error.strerror or error}; set AUTOSHARD_CACHE to a directory"
        ) from error
    return Compiled(
        target=target,
        path=entry / _TEXT,
        memory=Memory(**result["memory"]),
        seconds=result["seconds"],
        rematerializations=tuple(result["rematerializations"]),
        cached=cached,
    )


_TEXT, _RESULT = "hlo.txt.gz", "result.json"
"""Files of a cache entry, which is a folder."""


def _kept(entry: Path) -> dict[str, Any] | None:
    """The result in an entry; None where there is none, or a corrupt one, which is removed."""
    try:
        result = json.loads((entry / _RESULT).read_bytes())
        if result.pop("sha256") == _digest(entry, result, (entry / _TEXT).read_bytes()):
            return dict(result)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    if entry.exists():
        shutil.rmtree(entry, ignore_errors=True)
    return None


def _digest(entry: Path, result: Mapping[str, Any], text: bytes) -> str:
    return kept.digest(entry.name.encode(), json.dumps(result, sort_keys=True).encode(), text)


def _key(stablehlo: bytes, target: Target, how: Mapping[str, Any], versions: Mapping[str, str]) -> str:
    digest = hashlib.sha256(stablehlo)
    described = asdict(target) | {"text": None}  # `cpu` and `cpu:8` are one target
    flags = {name: os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")}
    facts = {"target": described, **how, "versions": dict(versions), "flags": flags, "worker": WORKER_VERSION}
    digest.update(json.dumps(facts, sort_keys=True).encode())
    return digest.hexdigest()[:32]


def _publish(work: Path, entry: Path) -> dict[str, Any]:
    """Rename the work folder to the cache entry, unless another process was first; returns the result."""
    result: dict[str, Any] = json.loads((work / _RESULT).read_text())
    digest = _digest(entry, result, (work / _TEXT).read_bytes())
    with files.work_folder(entry.parent, "new-") as keep:
        os.replace(work / _TEXT, keep / _TEXT)
        (keep / _RESULT).write_text(json.dumps(result | {"sha256": digest}))
        keep.chmod(0o755)
        try:
            os.rename(keep, entry)
        except OSError:
            other = _kept(entry)
            if other is None:
                raise
            return other
    return result


def _run_worker(work: Path, stablehlo: bytes, target: Target, how: Mapping[str, Any], timeout: float) -> None:
    (work / "module.mlir").write_bytes(stablehlo)
    request = {"module": "module.mlir", "target": asdict(target), **how}
    (work / "request.json").write_text(json.dumps(request))
    with open(work / "stderr.txt", "wb") as errors:
        variables = {"TF_CPP_MIN_LOG_LEVEL": "0", "PYTHONFAULTHANDLER": ""}
        with workers.started([*COMPILE_COMMAND, str(work / "request.json")], variables, stderr=errors) as process:
            try:
                status = process.wait(timeout)
            except subprocess.TimeoutExpired:
                raise CompileError(
                    f"compiling for {target} took longer than {timeout:.0f} s and was stopped; "
                    "a smaller model, or a longer timeout, may pass"
                ) from None
    said = (work / "stderr.txt").read_text(errors="replace")
    if status != 0 or not (work / "result.json").exists():
        raise failure(target, status, said)
    result = json.loads((work / "result.json").read_text())
    result["rematerializations"] = _rematerializations(said)
    (work / "result.json").write_text(json.dumps(result))


def _rematerializations(said: str) -> list[str]:
    """The partitioner's warnings of full rematerialization, without time and source location."""
    found = []
    for line in said.splitlines():
        if _REMATERIALIZATION in line:
            text = line[line.index(_REMATERIALIZATION) :]
            found.append(text.split("As a last resort", 1)[0].rstrip())
    return found


def failure(target: Target, status: int, said: str) -> CompileError:
    """The error, from a failed compiler's standard error."""
    if status < 0:
        name = signal.Signals(-status).name if -status in set(signal.Signals) else str(-status)
        how = f"the compiler for {target} crashed ({name})"
        fatal = [line for line in said.splitlines() if re.match(r"F\d{4} |.*\bCheck failed", line)]
        said = "\n".join(fatal) or said
    else:
        how = f"the compiler for {target} refused the program"
    lines = [line for line in said.strip().splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    last = (errors or lines or ["it said nothing"])[-1].strip()
    why = next((f" ({why})" for sign, why in _KNOWN_CRASHES.items() if sign in last), "")
    message = f"{how}: {last[:1500]}{why}"
    if _EXHAUSTED.search(last) and not _OTHER_MEMORY.search(last):
        figures = _FIGURES.search(last)
        return OutOfMemoryError(message, *map(_bytes, figures.groups() if figures else ()))
    return CompileError(message)


def _bytes(text: str) -> int:
    """XLA's `15.75G` as bytes."""
    unit = "KMGT".find(text[-1]) + 1
    return int(float(text[:-1] if unit else text) * 1024**unit)
