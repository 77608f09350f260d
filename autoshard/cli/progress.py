"""Progress of a command on a terminal, and time per stage."""

from __future__ import annotations

import resource
import sys
import time
from typing import Any


class Stages:
    """Shows the running stage on standard error if that is a terminal, and times all stages.

    A context manager; `begin` ends the previous stage. Times of a repeated stage (a mesh search) add up.
    """

    def __init__(self) -> None:
        """Not started."""
        self._seconds: dict[str, float] = {}
        self._cpu: dict[str, float] = {}
        self._running: tuple[str, float, float] | None = None
        self._status: Any = None

    def __enter__(self) -> Stages:
        """Start the display, where there is a terminal."""
        if sys.stderr.isatty():
            from rich.console import Console

            self._status = Console(stderr=True).status("starting")
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End the last stage and remove the display."""
        self._end()
        if self._status is not None:
            self._status.stop()

    def begin(self, stage: str) -> None:
        """End the running stage and begin `stage`."""
        self._end()
        self._running = stage, time.perf_counter(), _cpu_seconds()
        if self._status is not None:
            self._status.update(stage)

    def say(self, text: str) -> None:
        """Show progress within the running stage, where there is a terminal."""
        if self._status is not None:
            self._status.update(text)

    def _end(self) -> None:
        if self._running is not None:
            stage, started, cpu = self._running
            self._seconds[stage] = self._seconds.get(stage, 0.0) + time.perf_counter() - started
            self._cpu[stage] = self._cpu.get(stage, 0.0) + _cpu_seconds() - cpu
            self._running = None

    def spent(self) -> dict[str, Any]:
        """Wall seconds, CPU seconds and peak memory of the process, and both times per stage."""
        return {
            "seconds": round(sum(self._seconds.values()), 3),
            "cpu_seconds": round(_cpu_seconds(), 3),
            "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RSS_UNIT,
            "stages": {
                name: {"seconds": round(seconds, 3), "cpu_seconds": round(self._cpu[name], 3)}
                for name, seconds in self._seconds.items()
            },
        }


_RSS_UNIT = 1 if sys.platform == "darwin" else 1024
"""Linux counts ru_maxrss in kB, macOS in bytes."""


def _cpu_seconds() -> float:
    """User and system seconds of this process and its ended children."""
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime
