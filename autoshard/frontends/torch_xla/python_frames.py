"""Keeps the lazy tensors of a capture from recording the Python stack with every node that they make.

Labels need the debug mode of torch's lazy tensors, and that also copies the whole Python stack, a file, a function and
a line per frame, into every node: a third of the time of a large capture, and of its memory. No switch leaves it out,
but torch keeps what collects the frames in one `std::function`, which its accessor hands out to be assigned to. Python
cannot assign one; but where it holds a plain function, that function's address is its first word.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch

_ACCESSOR = "_ZN5torch4lazy23GetPythonFramesFunctionEv"  # of libtorch_cpu: a std::function<std::vector<…>()>&
_COLLECTOR = "_ZN5torch4lazy15GetPythonFramesEv"  # of libtorch_python: a std::vector<…>()
_VECTOR_BYTES = 24  # of a std::vector: begin, end, end of storage; an empty one is zero


def _no_frames(result: int) -> int:
    """An empty vector, made where the caller wants it (System V: its address comes first, and is returned)."""
    ctypes.memset(result, 0, _VECTOR_BYTES)
    return result


_NO_FRAMES = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(_no_frames)


@contextlib.contextmanager
def no_python_frames() -> Iterator[None]:
    """Nodes that are made meanwhile know their scope and no Python stack; where that cannot be had, both."""
    collector = _collector()
    if collector is None or collector[0].value != collector[1]:
        yield
        return
    word, before = collector
    word.value = ctypes.cast(_NO_FRAMES, ctypes.c_void_p).value
    try:
        yield
    finally:
        word.value = before


@cache
def _collector() -> tuple[ctypes.c_void_p, int] | None:
    """The word of the process that holds the address of what collects frames, and that address.

    None where it cannot be told for sure: another processor, or libraries that are built otherwise.
    """
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return None
    libraries = Path(torch.__file__).parent / "lib"
    loaded = os.RTLD_NOLOAD | os.RTLD_LAZY
    try:
        accessor = ctypes.CDLL(str(libraries / "libtorch_cpu.so"), mode=loaded)[_ACCESSOR]
        collects = ctypes.CDLL(str(libraries / "libtorch_python.so"), mode=loaded)[_COLLECTOR]
    except (OSError, AttributeError):
        return None
    accessor.restype = ctypes.c_void_p
    address = ctypes.cast(collects, ctypes.c_void_p).value
    held = accessor()
    return None if not held or address is None else (ctypes.c_void_p.from_address(held), address)
