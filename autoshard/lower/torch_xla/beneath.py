"""Contexts held open from one hook to another, while the loop enters and leaves its own.

Torch's modes form a stack, and leaving one pops whichever is on top. So the modes of a held context go to the bottom of
the stack (above `set_default_device`'s, which must be lowest), and are removed from there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch
from torch.overrides import _pop_mode as _pop_function_mode
from torch.overrides import _push_mode as _push_function_mode
from torch.utils._python_dispatch import _pop_mode, _push_mode

_T = TypeVar("_T")


class Beneath:
    """Contexts held open, the last one innermost."""

    def __init__(self) -> None:
        """None yet."""
        self._held: list[tuple[AbstractContextManager[Any], list[Any]]] = []

    def __bool__(self) -> bool:
        """Whether any is open."""
        return bool(self._held)

    def enter(self, context: AbstractContextManager[_T]) -> _T:
        """Enter a context, and hold it open."""
        with _lifted([mode for _, modes in self._held for mode in modes]):
            before = _modes()
            entered = context.__enter__()
            self._held.append((context, [mode for mode in _modes() if not _among(mode, before)]))
        return entered

    def close(self) -> None:
        """Leave them all."""
        while self._held:
            context, modes = self._held.pop()
            with _lifted(modes):
                context.__exit__(None, None, None)


def _modes() -> list[Any]:
    functions = range(torch._C._len_torch_function_stack())
    dispatches = range(torch._C._len_torch_dispatch_stack())
    return [torch._C._get_function_stack_at(i) for i in functions] + [
        torch._C._get_dispatch_stack_at(i) for i in dispatches
    ]


def _among(mode: Any, modes: list[Any]) -> bool:
    return any(mode is each for each in modes)


@contextmanager
def _lifted(ours: list[Any]) -> Iterator[None]:
    """Pop the modes above `ours`, or all, for the duration of the context."""
    functions: list[Any] = []
    dispatches: list[Any] = []
    while (size := torch._C._len_torch_function_stack()) and not _stays(
        torch._C._get_function_stack_at(size - 1), ours
    ):
        functions.append(_pop_function_mode())
    while (size := torch._C._len_torch_dispatch_stack()) and not _stays(
        torch._C._get_dispatch_stack_at(size - 1), ours
    ):
        dispatches.append(_pop_mode())
    try:
        yield
    finally:
        for mode in reversed(functions):
            _push_function_mode(mode)
        for mode in reversed(dispatches):
            _push_mode(mode)


def _stays(mode: Any, ours: list[Any]) -> bool:
    default = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return mode is default or _among(mode, ours)
