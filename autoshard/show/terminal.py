"""Text for a terminal: names come from files that anyone may have written, and it acts on control characters."""

from __future__ import annotations

import re
import sys

import click

from autoshard.errors import FileError

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""All but the line feed and the tab: also what turns the direction of writing, and other ends of lines."""


def printable(text: str) -> str:
    """The text with control characters written out, such as `\\x1b`."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def say(text: str, *, newline: bool = True, error: bool = False) -> None:
    """Write text to standard output (or standard error), whatever characters that takes.

    Raises:
        FileError: it cannot be written, for the disk is full. (A reader that went away is a BrokenPipeError.)
    """
    encoding = getattr(sys.stderr if error else sys.stdout, "encoding", None) or "utf-8"
    shown = printable(text).encode(encoding, "backslashreplace").decode(encoding)
    try:
        click.echo(shown, nl=newline, err=error)
    except BrokenPipeError:
        raise
    except OSError as failed:
        raise FileError(f"cannot write to standard {'error' if error else 'output'}: {failed.strerror}") from None
