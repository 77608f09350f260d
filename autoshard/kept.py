"""On-disk cache entries with a digest, so that damaged ones are detected.

An entry is a file: a line with the sha256 of its name and content, then the content, written atomically. A renamed,
truncated or changed entry is invalid.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from autoshard import files
from autoshard.errors import FileError


class DamagedError(ValueError):
    """A damaged entry: why."""


def write(path: Path, content: bytes) -> None:
    """Write an entry.

    Raises:
        FileError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(f"cannot write {path.parent}: {error.strerror}") from None
    files.write(path, digest(path.name.encode(), content).encode() + b"\n" + content)


def read(path: Path) -> bytes | None:
    """The content of an entry; None where there is none.

    Raises:
        DamagedError: it cannot be read, or its digest does not match.
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
    """The sha256 of byte strings with their lengths."""
    made = hashlib.sha256()
    for part in parts:
        made.update(len(part).to_bytes(8, "little"))
        made.update(part)
    return made.hexdigest()
