"""Finds ops on which torch_xla would crash the process, when recorded or lowered.

`safe_ops.json` names the overloads without crashes in `benchmarks/safe_ops.py`, for one version of torch and torch_xla;
autoshard's own are safe. Any other, and any with an empty operand, is tried in a fork of this process, with its own
operands and, lowered, with placeholders like them. The outcome is cached on disk.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import json
import os
import resource
import signal
import time
import warnings
from collections.abc import Callable, Mapping
from importlib.metadata import version
from importlib.resources import files as resources
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map

from autoshard import files
from autoshard.errors import FileError
from autoshard.frontends.tracing.device import is_xla
from autoshard.frontends.tracing.sequence import Call, draws, tensors_in

TIME_LIMIT_S = 60.0
TABLE = "safe_ops.json"


@functools.cache
def versions() -> str:
    """Key of the outcomes: `torch 2.9.0, torch_xla 2.9.0`."""
    return ", ".join(f"{name} {version(name)}" for name in ("torch", "torch_xla"))


@functools.cache
def safe_ops() -> frozenset[str]:
    """The overloads known to be safe; none if the table is of other versions."""
    table = json.loads((resources("autoshard.frontends.torch_xla") / TABLE).read_text())
    return frozenset(table["safe"]) if table["versions"] == versions() else frozenset()


def ends_process(call: Call, of_several: Callable[[torch.Tensor], bool], xla: Any) -> str:
    """The signal with which torch_xla would crash on an op (`SIGSEGV`); empty where it would not.

    Args:
        of_several: whether a tensor may be one of several results of its node, on which some ops crash.
        xla: `torch_xla._XLAC`.
    """
    if call.name.startswith("autoshard.") or (call.name in safe_ops() and not any(0 in t.shape for t in call.tensors)):
        return ""
    known, way = _answers(_kept()), way_of(call, of_several)
    if way not in known:
        answer = _forked(lambda: _tried(call, xla))
        if answer is None:
            return f"no answer within {TIME_LIMIT_S:.0f} s"
        _keep(way, answer)
    return known[way]


def way_of(call: Call, of_several: Callable[[torch.Tensor], bool]) -> str:
    """The cache key of a call: the op, dtypes, which sizes are 0 or 1, options."""

    def said(leaf: Any) -> str:
        if isinstance(leaf, torch.Tensor):
            sizes = ",".join(str(size) if size < 2 else "n" for size in leaf.shape)
            return f"{leaf.dtype}[{sizes}]{'*' if is_xla(leaf) and of_several(leaf) else ''}".removeprefix("torch.")
        return "float" if isinstance(leaf, float) else str(leaf)

    def words(tree: Any) -> str:
        if isinstance(tree, tuple | list):
            return f"({', '.join(map(words, tree))})"
        if isinstance(tree, Mapping):
            return ", ".join(f"{key}={words(value)}" for key, value in tree.items())
        return said(tree)

    return " ".join(filter(None, [call.name, words(call.args), words(call.kwargs)]))


# Answers.


def _kept() -> Path:
    return files.cache_dir() / "ops" / f"{versions().replace(', ', '-').replace(' ', '-')}.json"


@functools.cache
def _answers(path: Path) -> dict[str, str]:
    """Key -> outcome, from disk; an unreadable file is recomputed."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {way: answer for way, answer in found.items() if isinstance(answer, str)}


def _keep(way: str, answer: str) -> None:
    path = _kept()
    known = _answers(path)
    known[way] = answer
    with contextlib.suppress(FileError, OSError):  # a cache that cannot be written is skipped
        path.parent.mkdir(parents=True, exist_ok=True)
        others = _answers.__wrapped__(path)  # another process may have written it since
        files.write(path, json.dumps(others | known, indent=0, sort_keys=True))


# The trial.


def _tried(call: Call, xla: Any) -> None:
    """Run an op on placeholders like its operands, lower that, and run it as called."""
    import torch_xla.core.xla_builder as xla_builder

    def alone(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not is_xla(leaf):
            return leaf
        like = xla_builder.create_placeholder_tensor(tuple(leaf.shape), leaf.dtype)
        return torch.logical_not(like) if like.dtype == torch.bool else torch.add(like, 0)

    if not draws(call.func):
        args, kwargs = tree_map(alone, (call.args, dict(call.kwargs)))
        made = [t for t in tensors_in((call.func(*args, **kwargs),)) if is_xla(t)]
        if made:
            xla._get_xla_tensors_hlo_proto(made)
    call.func(*call.args, **call.kwargs)


def _forked(trial: Callable[[], None]) -> str | None:
    """Run `trial` in a fork: the name of the signal that ends it, or nothing; None if it hangs.

    A Python error counts as success: it will be raised again, and explained.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about other threads, which the fork lacks and does not need
        child = os.fork()
    if not child:
        try:
            faulthandler.disable()
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            nowhere = os.open(os.devnull, os.O_RDWR)
            for stream in (0, 1, 2):
                os.dup2(nowhere, stream)
            for caught in (signal.SIGINT, signal.SIGTERM):
                signal.signal(caught, signal.SIG_DFL)
            trial()
        finally:
            os._exit(0)
    ended, wait = False, 0.001
    until = time.monotonic() + TIME_LIMIT_S
    try:
        while time.monotonic() < until:
            ended, status = (pid := os.waitpid(child, os.WNOHANG))[0] == child, pid[1]
            if ended:
                code = os.waitstatus_to_exitcode(status)
                return signal.Signals(-code).name if code < 0 else ""
            time.sleep(wait)
            wait = min(2 * wait, 0.05)
        return None
    finally:
        if not ended:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
