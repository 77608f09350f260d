"""Files that are written whole or not at all, and where autoshard keeps what it need not work out twice."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from autoshard.errors import FileError


def cache_dir() -> Path:
    """`$AUTOSHARD_CACHE`, else `autoshard` in the user's cache directory (XDG)."""
    if "AUTOSHARD_CACHE" in os.environ:
        return Path(os.environ["AUTOSHARD_CACHE"]).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or (
        Path.home() / "Library" / "Caches" if sys.platform == "darwin" else Path.home() / ".cache"
    )
    return Path(base) / "autoshard"


def write(path: Path, content: str | bytes) -> None:
    """Write a file through a temporary one beside it, so that no reader ever sees half of it; text as UTF-8.

    Raises:
        FileError: the path cannot be written; nothing is left behind.
    """
    with _beside(path) as (temporary, target):
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)
        if temporary != path:
            umask = os.umask(0)
            os.umask(umask)
            temporary.chmod((target.stat().st_mode & 0o777) if target.exists() else 0o666 & ~umask)
            os.replace(temporary, target)


def check_writable(path: Path) -> None:
    """Refuse a path that `write` could not write, before anything has been done.

    Raises:
        FileError: as `write` would.
    """
    with _beside(path):
        pass


@contextlib.contextmanager
def _beside(path: Path) -> Iterator[tuple[Path, Path]]:
    """A temporary file in the directory of `path`, which is gone afterwards, and what `path` stands for.

    What is no file, such as `/dev/stdout`, is itself in both places: it must not be replaced.
    """
    temporary = None
    try:
        target = path.resolve()  # a link stays a link: what it points to is replaced
        if target.is_dir():
            raise IsADirectoryError(None, "it is a directory")
        if target.exists() and not os.access(target, os.W_OK):
            raise PermissionError(None, "it is read-only")
        if target.exists() and not target.is_file():
            yield path, path
            return
        descriptor, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".part", dir=target.parent)
        os.close(descriptor)
        temporary = Path(name)
        yield temporary, target
    except OSError as error:
        raise FileError(f"cannot write {path}: {error.strerror or error}") from None
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
