"""Safe terminal output: names come from untrusted files, and terminals act on control characters."""

from __future__ import annotations

import re
import sys

import click

from autoshard.errors import FileError

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""Control characters but line feed and tab, bidirectional controls, and other line ends."""


def printable(text: str) -> str:
    """The text with control characters escaped, such as `\\x1b`."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def say(text: str, *, newline: bool = True, error: bool = False) -> None:
    """Write text to standard output (or standard error), in whatever encoding that has.

    Raises:
        FileError: it cannot be written, as on a full disk. (A closed pipe is a BrokenPipeError.)
    """
    encoding = getattr(sys.stderr if error else sys.stdout, "encoding", None) or "utf-8"
    shown = printable(text).encode(encoding, "backslashreplace").decode(encoding)
    try:
        click.echo(shown, nl=newline, err=error)
    except BrokenPipeError:
        raise
    except OSError as failed:
        raise FileError(f"cannot write to standard {'error' if error else 'output'}: {failed.strerror}") from None
