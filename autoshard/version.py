"""Versions: of this package, which plans and caches record, and of others."""

from __future__ import annotations

from importlib import metadata

__version__ = "0.1.0"


def version_of(package: str) -> str | None:
    """The version of an installed package, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
