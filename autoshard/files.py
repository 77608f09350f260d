"""Atomic writes, temporary work folders, and the cache directory.

Temporary files and folders are locked while their process lives. Those of killed processes are unlocked, and the next
writer removes them: no package for atomic writes does that, and filelock locks separate files.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from platformdirs import user_cache_path

from autoshard.errors import FileError

try:
    import fcntl
except ImportError:  # no such locks on this platform: nothing is known to be left over
    fcntl = None  # type: ignore[assignment]


def cache_dir() -> Path:
    """`$AUTOSHARD_CACHE`, else `autoshard` in the user's cache directory.

    Raises:
        FileError: neither exists: the user has no home folder.
    """
    try:
        said = os.environ.get("AUTOSHARD_CACHE")
        return Path(said).expanduser() if said else user_cache_path("autoshard")
    except RuntimeError:
        raise FileError("there is no home folder to keep anything in; set AUTOSHARD_CACHE to a directory") from None


def name_user() -> None:
    """Set `USER` for a user without a name, as in a container: importing torch needs it."""
    try:
        getpass.getuser()
    except (KeyError, OSError, ImportError):
        os.environ["USER"] = f"uid{os.getuid()}"


def write(path: Path, content: str | bytes) -> None:
    """Write a file atomically, through a temporary one beside it; text as UTF-8.

    Raises:
        FileError: the path cannot be written; nothing is left behind.
    """
    data = content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content
    with _beside(path) as (temporary, target):
        temporary.write_bytes(data)
        if temporary != path:
            umask = os.umask(0)
            os.umask(umask)
            temporary.chmod((target.stat().st_mode & 0o777) if target.exists() else 0o666 & ~umask)
            os.replace(temporary, target)


def check_writable(path: Path) -> None:
    """Refuse a path that `write` could not write, before any work is done.

    Raises:
        FileError: as `write` would.
    """
    with _beside(path):
        pass


@contextlib.contextmanager
def work_folder(root: Path, prefix: str) -> Iterator[Path]:
    """A temporary folder in `root`; removes those with this prefix that killed processes left.

    Raises:
        OSError: it cannot be created.
    """
    for left in root.glob(f"{prefix}*"):
        _remove_if_left(left)
    while True:
        folder = Path(tempfile.mkdtemp(dir=root, prefix=prefix))
        try:
            descriptor = os.open(folder, os.O_RDONLY)
        except FileNotFoundError:  # another process took it for a left-over, and has removed it
            continue
        if _lock(descriptor):
            break
        os.close(descriptor)  # it is about to remove it
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


@contextlib.contextmanager
def _beside(path: Path) -> Iterator[tuple[Path, Path]]:
    """A temporary file in the directory of `path`, and the file that `path` resolves to.

    What is no regular file, such as `/dev/stdout`, is both: it must not be replaced.
    """
    temporary = descriptor = None
    try:
        target = path.resolve()  # a link stays a link: its target is replaced
        if target.is_dir():
            raise IsADirectoryError(None, "it is a directory")
        if target.exists() and not os.access(target, os.W_OK):
            raise PermissionError(None, "it is read-only")
        if target.exists() and not target.is_file():
            yield path, path
            return
        _remove_left_over(target)
        while True:
            descriptor, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=_PART, dir=target.parent)
            temporary = Path(name)
            if _lock(descriptor):
                break
            os.close(descriptor)
        yield temporary, target
    except (OSError, ValueError, RuntimeError) as error:  # invalid paths: a zero byte, circular links
        raise FileError(f"cannot write {path}: {getattr(error, 'strerror', None) or error}") from None
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
        if descriptor is not None:
            os.close(descriptor)


_PART = ".autoshard.part"


def _remove_left_over(target: Path) -> None:
    """Remove temporary files that killed processes left in the folder of `target`."""
    with contextlib.suppress(OSError):
        for each in os.scandir(target.parent):
            if each.name.startswith(".") and each.name.endswith(_PART):
                _remove_if_left(Path(each.path))


def _lock(descriptor: int) -> bool:
    """Lock a file that this process just created; False where another process has locked or removed it."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True  # a file system without locks: nothing is removed there either
    return os.fstat(descriptor).st_nlink > 0


def _remove_if_left(path: Path) -> None:
    """Remove a temporary file or folder whose process is gone."""
    if fcntl is None or path.is_symlink():
        return
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink()
        finally:
            os.close(descriptor)
