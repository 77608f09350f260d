"""Attributes of a model's modules, put back once its step has run on placeholders."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from copy import copy
from typing import Any

import torch

_CONTAINERS = (dict, OrderedDict, defaultdict, list, set, deque)


class Attributes:
    """What the attributes of modules were: their values, and what lists, dicts and sets among these held.

    A forward pass may register hooks (transformers does, in its first run), and keep results in a list; of a run on
    placeholders neither may stay, but what says that they are there does not stay either.
    """

    def __init__(self) -> None:
        """Of no module yet."""
        self.saved: list[tuple[torch.nn.Module, dict[str, Any], dict[str, Any]]] = []

    def save(self, module: torch.nn.Module) -> None:
        """Remember a module's attributes as they are."""
        held = {name: copy(value) for name, value in module.__dict__.items() if type(value) in _CONTAINERS}
        self.saved.append((module, dict(module.__dict__), held))

    def lists(self) -> Iterator[tuple[torch.nn.Module, str, list[Any]]]:
        """(module, name, value) of the lists among them that are not public."""
        for module, attributes, _ in self.saved:
            for name, value in attributes.items():
                if name[:1] == "_" and isinstance(value, list):
                    yield module, name, value

    def restore(self) -> None:
        """Put them back."""
        for module, attributes, held in self.saved:
            module.__dict__.clear()
            module.__dict__.update(attributes)
            for name, value in held.items():
                container = attributes[name]
                container.clear()
                if isinstance(value, list | deque):
                    container.extend(value)
                else:
                    container.update(value)
