"""Figures read off one build of a target's compiler: `libtpu.toml`, each with its unit, source, kinds and error."""

from __future__ import annotations

import tomllib
import warnings
from collections.abc import Mapping
from functools import lru_cache
from importlib import metadata, resources
from typing import Any


@lru_cache
def _document() -> dict[str, Any]:
    return tomllib.loads(resources.files("autoshard.cost.machine").joinpath("libtpu.toml").read_text())


def figure(name: str) -> float:
    """The value of a figure that is one number."""
    return float(_document()[name]["value"])


def whole(name: str) -> int:
    """The value of a figure that is one whole number."""
    return int(_document()[name]["value"])


def table(name: str) -> Mapping[str, float]:
    """The values of a figure that is several numbers."""
    values: Mapping[str, float] = _document()[name]["value"]
    return values


def of_kind(name: str, kind: str) -> int:
    """The value of a figure for a device kind; for an unlisted kind, that of the others."""
    return int(table(name).get(kind, table(name)["other"]))


@lru_cache
def are_known(kind: str) -> bool:
    """Whether the figures cover this device kind and the installed libtpu, if any; warns if not."""
    known = _document()
    try:
        installed = metadata.version("libtpu")
    except metadata.PackageNotFoundError:
        installed = known["versions"][0]
    if kind in known["kinds"] and installed in known["versions"]:
        return True
    warnings.warn(
        f"{kind} under libtpu {installed} is predicted by the coarse model: the finer one is of libtpu "
        f"{', '.join(known['versions'])} and of {', '.join(known['kinds'])} (docs/trust.md)",
        stacklevel=2,
    )
    return False
