"""Passes of a compiler: functions that are applied one after the other."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar

Found = TypeVar("Found")


class Passes(tuple[Callable[..., Found], ...], Generic[Found]):
    """A pipeline; printed, it says what it does, in order."""

    __slots__ = ()

    def __call__(self, found: Found, *beside: object) -> Found:
        """What the last pass returns; each gets what the one before returned, and `beside`."""
        for each in self:
            found = each(found, *beside)
        return found

    def __repr__(self) -> str:
        """Such as `scatter_later -> sum_once`."""
        return " -> ".join(map(_name, self)) or "nothing"


def _name(function: Callable[..., Any]) -> str:
    return _name(function.func) if isinstance(function, partial) else function.__name__.lstrip("_")
