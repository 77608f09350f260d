"""The version of this package, which plans and caches record."""

__version__ = "0.1.0"
