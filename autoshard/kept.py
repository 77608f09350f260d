"""What is kept on disk and found again: each entry with a digest, so that one that was damaged is made anew.

An entry is a file: a line with the sha256 of its name and of the rest, then the rest. It is written whole or not at
all. An entry under another's name, cut short or changed is none.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from autoshard import files
from autoshard.errors import FileError


class DamagedError(ValueError):
    """An entry that is not as it was written: why."""


def write(path: Path, content: bytes) -> None:
    """Keep an entry.

    Raises:
        FileError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(f"cannot write {path.parent}: {error.strerror}") from None
    files.write(path, digest(path.name.encode(), content).encode() + b"\n" + content)


def read(path: Path) -> bytes | None:
    """What an entry keeps; None where there is none.

    Raises:
        DamagedError: it cannot be read, or is not as it was written.
    """
    try:
        found = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DamagedError(str(error.strerror)) from None
    said, _, content = found.partition(b"\n")
    if said != digest(path.name.encode(), content).encode():
        raise DamagedError("it is not as it was written")
    return content


def digest(*parts: bytes) -> str:
    """The sha256 of byte strings, one after the other with their lengths."""
    made = hashlib.sha256()
    for part in parts:
        made.update(len(part).to_bytes(8, "little"))
        made.update(part)
    return made.hexdigest()
