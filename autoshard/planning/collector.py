"""Python's cyclic garbage collector while a program is captured and planned."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Disable the cyclic garbage collector: a capture and a graph are many small objects that all stay alive.

    With torch loaded, repeated traversals of all objects double the time of building a graph.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
