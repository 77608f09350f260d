"""What follows from a graph alone is worked out once for it, however many meshes it is planned for."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import wraps
from typing import TypeVar

from autoshard.graph.ops import Graph

Found = TypeVar("Found")


def per_graph(make: Callable[[Graph], Found]) -> Callable[[Graph], Found]:
    """`make`, of whose results each is kept as long as its graph lives; they must not hold the graph themselves."""
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
    """The last result for one graph: what several steps of one plan ask for with the same arguments."""

    def __init__(self) -> None:
        """Nothing yet."""
        self.graph: Callable[[], Graph | None] = lambda: None
        self.key: object = None
        self.result: object = None

    def of(self, graph: Graph, key: object, make: Callable[[], Found]) -> Found:
        """`make()`, or what it returned when it was last asked for with the same graph and an equal `key`."""
        if self.graph() is not graph or self.key != key:
            self.result = make()
            self.graph, self.key = weakref.ref(graph, lambda _: self._forget()), key
        return self.result  # type: ignore[return-value]

    def _forget(self) -> None:
        if self.graph() is None:
            self.key = self.result = None
