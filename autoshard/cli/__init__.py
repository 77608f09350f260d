"""The `autoshard` command."""

from autoshard.cli.main import main

__all__ = ["main"]
