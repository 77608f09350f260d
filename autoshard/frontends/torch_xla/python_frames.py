"""Stops lazy tensors from recording a Python stack per node during capture.

Labels need the debug mode of torch's lazy tensors, which also copies the Python stack into every node: a third of the
time and memory of a large capture. torch has no option for it, but an accessor returns the `std::function` that
collects the frames by reference. Where it holds a plain function, its first word is that function's address, which is
replaced here.
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
    """An empty vector, at the address given by the caller (System V: passed first, and returned)."""
    ctypes.memset(result, 0, _VECTOR_BYTES)
    return result


_NO_FRAMES = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(_no_frames)


@contextlib.contextmanager
def no_python_frames() -> Iterator[None]:
    """In this context nodes record their scope but no Python stack; both where that cannot be done."""
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
    """The word that holds the collector's address, and that address.

    None where it cannot be identified: other processors, or libraries built otherwise.
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
