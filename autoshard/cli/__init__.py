"""The `autoshard` command."""

from autoshard.cli.commands import main

__all__ = ["main"]
