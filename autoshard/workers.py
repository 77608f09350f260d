"""Worker processes: compilers and measurements that can crash, and that must not outlive who started them."""

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
"""Environment variable of a worker: standard input ends when whoever started it does."""


@contextlib.contextmanager
def started(
    command: Sequence[str], variables: Mapping[str, str], *, stdout: Any = subprocess.DEVNULL, stderr: Any = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a session of its own; on leaving, whatever the reason, it and what it started are ended.

    Args:
        variables: environment variables that it gets beside this process's.
    """
    # Started with -P, nothing in the current directory shadows a module; this package is found where it was found here.
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
    """In a worker: end when the process that started it is gone, even one that was killed."""
    if os.environ.pop(_LIFELINE, None):
        threading.Thread(target=_wait_for_end, daemon=True).start()


def _wait_for_end() -> None:
    while os.read(sys.stdin.fileno(), 1):
        pass
    os.killpg(os.getpgrp(), signal.SIGKILL) if os.getpgrp() == os.getpid() else os._exit(1)
