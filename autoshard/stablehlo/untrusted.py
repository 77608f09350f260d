"""Checks untrusted StableHLO modules for input on which MLIR's readers crash.

Text must be UTF-8, also where escaped, and not nested so deeply that a reader overflows its stack. Bytecode is first
read by a process of its own (`python -m autoshard.stablehlo.untrusted`), with limits on time and memory; MLIR's text of
it is then checked in the same way.
"""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path

from autoshard.stablehlo.context import mlir_context

BYTECODE = b"ML\xefR"
PORTABLE = BYTECODE + b"\rStableHLO_v"
"""Prefix of the bytecode of a portable artifact (VHLO)."""

DEEPEST_REGION, DEEPEST = 64, 400
"""Deepest nesting of braces, and of brackets of all kinds."""
_LONGEST_TYPE = 1_000_000
"""Most characters of a type or attribute with its aliases expanded."""

_BRACKET = re.compile(rb'"(?:[^"\\\n]|\\.)*"|//[^\n]*|->|>=|<=|[<>(){}\[\]]')
_ESCAPED = re.compile(rb"\\([0-9A-Fa-f]{2})")
_ALIAS = re.compile(rb"^\s*([#!][\w$.-]+)\s*=(.*)$", re.MULTILINE)
_NAME = re.compile(rb"[#!][\w$.-]+")
_OPEN, _CLOSE = frozenset(b"<({["), frozenset(b">)}]")


def refuse(content: bytes) -> None:
    """Refuse a module, text or bytecode, that cannot be read safely.

    Raises:
        ValueError: why.
    """
    if content.startswith(BYTECODE):
        _read_apart(content)
    else:
        _look_at(content)


def _look_at(text: bytes) -> None:
    plain = text
    if b"\\" in text:
        plain = _ESCAPED.sub(lambda found: bytes([int(found[1], 16)]), text)
    try:
        plain.decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"it is not UTF-8: {error.reason} in {plain[max(0, error.start - 20) : error.end]!r}"
        ) from None
    _refuse_depth(text)


def _refuse_depth(text: bytes) -> None:
    braces = depth = 0
    aliases, chains = _aliases(text)
    if text.count(b"{") > DEEPEST_REGION or sum(map(text.count, (b"(", b"[", b"<"))) > DEEPEST:
        for match in _BRACKET.finditer(text):
            found = match[0]
            if len(found) > 1:
                continue
            step = 1 if found[0] in _OPEN else -1
            depth = max(0, depth + step)
            if found in (b"{", b"}"):
                braces = max(0, braces + step)
            if braces > DEEPEST_REGION or depth + aliases > DEEPEST:
                line = text.count(b"\n", 0, match.start()) + 1
                raise ValueError(f"line {line} is nested more deeply than {DEEPEST_REGION} regions")
    if aliases > DEEPEST or chains > _LONGEST_TYPE:
        raise ValueError("its types, attributes or locations refer to one another more deeply than can be read")


def _aliases(text: bytes) -> tuple[int, int]:
    """Depth of nested aliases, and the length of the longest expanded one that is no location."""
    depth: dict[bytes, int] = {}
    length: dict[bytes, int] = {}
    for name, said in _ALIAS.findall(text):
        reads = [found for found in _NAME.findall(said) if found in depth]
        depth[name] = 1 + max((depth[found] for found in reads), default=0)
        if not name.startswith(b"#loc"):
            length[name] = len(said) + sum(length.get(found, 0) for found in reads)
    return max(depth.values(), default=0), max(length.values(), default=0)


def _read_apart(content: bytes) -> None:
    """Read bytecode in another process."""
    home = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [home, os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-P", "-m", "autoshard.stablehlo.untrusted"]
    done = subprocess.run(command, capture_output=True, input=content, env=os.environ | {"PYTHONPATH": path})
    if done.returncode == 0:
        return
    if done.returncode < 0:
        name = signal.Signals(-done.returncode).name
        raise ValueError(f"it is damaged bytecode: MLIR's reader ends on it ({name})")
    said = [line.strip() for line in done.stderr.decode(errors="replace").splitlines() if line.strip()]
    raise ValueError(re.sub(r'^loc\("[^"]*":\d+:\d+\): ', "", said[0]) if said else "it cannot be read")


def _main() -> None:
    content = sys.stdin.buffer.read()
    seconds = 10 + len(content) // 1_000_000
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (most := (8 << 30) + 100 * len(content), most))
    from jaxlib._jax import mlir
    from jaxlib.mlir import ir

    with mlir_context():
        try:
            portable = content.startswith(PORTABLE)
            module = mlir.deserialize_portable_artifact(content) if portable else ir.Module.parse(content)
            module = module if isinstance(module, ir.Module) else ir.Module.parse(module)
        except Exception as error:
            sys.exit(next((line for line in str(error).splitlines() if "error" in line), str(error)))
        try:
            _look_at(module.operation.get_asm(binary=True, enable_debug_info=True, large_elements_limit=16))
        except ValueError as error:
            sys.exit(str(error))


if __name__ == "__main__":
    _main()
