"""Worker processes for compilers and measurements, which may crash and must not outlive their parent."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

_LIFELINE = "AUTOSHARD_LIFELINE"
"""Environment variable of a worker: its standard input ends with its parent."""


@contextlib.contextmanager
def started(
    command: Sequence[str], variables: Mapping[str, str], *, stdout: Any = subprocess.DEVNULL, stderr: Any = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a session of its own, which is killed with its children on exit from the context.

    Args:
        variables: environment variables added to this process's.
    """
    # With -P, nothing in the current directory shadows a module; this package's own path is passed on.
    home = str(Path(__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, [home, os.environ.get("PYTHONPATH")]))
    process = subprocess.Popen(
        list(command),
        stdin=subprocess.PIPE,
        stdout=stdout,
        stderr=stderr,
        env={**os.environ, **variables, "PYTHONPATH": path, _LIFELINE: "1"},
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()


def end_with_parent() -> None:
    """In a worker: exit when the parent process is gone, even if killed."""
    if os.environ.pop(_LIFELINE, None):
        threading.Thread(target=_wait_for_end, daemon=True).start()


def _wait_for_end() -> None:
    while os.read(sys.stdin.fileno(), 1):
        pass
    os.killpg(os.getpgrp(), signal.SIGKILL) if os.getpgrp() == os.getpid() else os._exit(1)
