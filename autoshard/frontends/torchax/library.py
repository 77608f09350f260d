"""Loads torchax's lowerings, also beside a newer torch."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import re
import sys
import types
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch

from autoshard.errors import CaptureError
from autoshard.version import version_of

MIN_TORCH = (2, 9)
JAX = "0.10.2"
INSTALL = "pip install 'autoshard[torchax]'"


@cache
def check_versions() -> None:
    """Refuse unsupported versions of packages for capture without torch_xla.

    Raises:
        CaptureError: torch is too old, torchax is missing, or jax does not match; says what to install.
    """
    found = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])
    if found < MIN_TORCH:
        raise CaptureError(
            f"capture without torch_xla needs torch {'.'.join(map(str, MIN_TORCH))} or later, this is "
            f"{torch.__version__}: {INSTALL}"
        )
    for package, wanted in (("torchax", ""), ("jax", JAX), ("jaxlib", JAX)):
        have = version_of(package)
        if have is None:
            raise CaptureError(f"capture without torch_xla needs {package}, which is not installed: {INSTALL}")
        if wanted and have != wanted:
            raise CaptureError(
                f"capture without torch_xla reads what {package} {wanted} writes, and {package} {have} is installed: "
                f"pip install jax=={JAX} jaxlib=={JAX}"
            )


@contextlib.contextmanager
def _only_its_ops() -> Iterator[None]:
    """Import torchax's modules without its package init, which renames a torch device and configures jax."""
    if "torchax" in sys.modules:
        yield
        return
    found = importlib.util.find_spec("torchax")
    if found is None:
        raise ImportError("no module torchax")
    package = types.ModuleType("torchax")
    package.__path__ = list(found.submodule_search_locations or ())
    sys.modules["torchax"] = package
    try:
        yield
    finally:
        del sys.modules["torchax"]


class _Absent:
    """Stand-in for an op or overload that this torch lacks, and for its attributes."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name

    def __getattr__(self, name: str) -> _Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent(f"{self.name}.{name}")


@contextlib.contextmanager
def _absent_ops() -> Iterator[None]:
    """In this context torchax finds stand-ins for aten ops and overloads that this torch lacks."""
    aten = torch.ops.aten
    with contextlib.ExitStack() as stack:
        for kind in (type(aten), type(aten.add)):
            stack.callback(setattr, kind, "__getattr__", kind.__getattr__)
            kind.__getattr__ = _or_absent(kind.__getattr__)
        yield


def _or_absent(has: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    def getattr_(self: Any, name: str) -> Any:
        try:
            return has(self, name)
        except AttributeError:
            if name.startswith("__") or not str(sys._getframe(1).f_globals.get("__name__")).startswith("torchax."):
                raise
            return _Absent(f"{self}.{name}")

    return getattr_


@cache
def _registry() -> dict[Any, Any]:
    """torchax's table of lowerings.

    Ops that newer torches dropped (overloads for named tensors, `aten.cholesky`) get stand-ins.
    """
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)  # it warns of double registrations
    try:
        with _only_its_ops(), _absent_ops():
            importlib.import_module("torchax.ops.jaten")
            ops_registry = importlib.import_module("torchax.ops.ops_registry")
    except Exception as error:
        raise CaptureError(
            f"torchax {version_of('torchax')} cannot be loaded beside torch {torch.__version__} "
            f"({type(error).__name__}: {error}): {INSTALL}"
        ) from error
    finally:
        logging.disable(before)
    table: dict[Any, Any] = ops_registry.all_aten_ops
    return table


@cache
def jax_function_of(func: Any) -> Callable[..., Any] | None:
    """torchax's lowering of an overload, with the signature of those in `aten.py`, or None."""
    table = _registry()
    found = table.get(func) or table.get(func.overloadpacket)
    if found is None or not found.is_jax_function or found.needs_env:
        return None
    return lambda out, *args, **kwargs: found.func(*args, **kwargs)
