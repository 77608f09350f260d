"""Caches per graph, for results that depend on no mesh."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import wraps
from typing import TypeVar

from autoshard.graph.ops import Graph

Found = TypeVar("Found")


def per_graph(make: Callable[[Graph], Found]) -> Callable[[Graph], Found]:
    """`make`, with each result cached as long as its graph lives; results must not refer to the graph."""
    known: dict[int, tuple[weakref.ref[Graph], Found]] = {}

    @wraps(make)
    def found(graph: Graph) -> Found:
        entry = known.get(id(graph))
        if entry is None or entry[0]() is not graph:
            key = id(graph)
            entry = weakref.ref(graph, lambda _: known.pop(key, None)), make(graph)
            known[key] = entry
        return entry[1]

    return found


class Latest:
    """A cache of one result for one graph: several steps of one plan ask with the same arguments."""

    def __init__(self) -> None:
        """An empty cache."""
        self.graph: Callable[[], Graph | None] = lambda: None
        self.key: object = None
        self.result: object = None

    def of(self, graph: Graph, key: object, make: Callable[[], Found]) -> Found:
        """`make()`, or the cached result if the last call had the same graph and an equal `key`."""
        if self.graph() is not graph or self.key != key:
            self.result = make()
            self.graph, self.key = weakref.ref(graph, lambda _: self._forget()), key
        return self.result  # type: ignore[return-value]

    def _forget(self) -> None:
        if self.graph() is None:
            self.key = self.result = None
