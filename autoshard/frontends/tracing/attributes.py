"""Saves and restores attributes of modules around a run on placeholders."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from copy import copy
from typing import Any

import torch

_CONTAINERS = (dict, OrderedDict, defaultdict, list, set, deque)
_LITERALS = (bool, int, float, complex, str, bytes)


class Attributes:
    """Snapshot of modules' attributes, with the contents of lists, dicts and sets among them.

    A forward pass may register hooks (as transformers does at first) or append results to a list; neither may survive a
    run on placeholders, nor may flags that say they exist.
    """

    def __init__(self) -> None:
        """An empty snapshot."""
        self.saved: list[tuple[torch.nn.Module, dict[str, Any], dict[str, Any]]] = []
        self.tensors: list[tuple[torch.nn.Module, str, torch.Tensor, int, torch.Tensor]] = []

    def save(self, module: torch.nn.Module) -> None:
        """Save a module's attributes."""
        held = {name: copy(value) for name, value in module.__dict__.items() if type(value) in _CONTAINERS}
        for name, value in module.__dict__.items():
            if isinstance(value, torch.Tensor) and value.device.type == "cpu" and not value.is_inference():
                self.tensors.append((module, name, value, value._version, value.detach().clone()))
        self.saved.append((module, dict(module.__dict__), held))

    def changes(self) -> Iterator[tuple[torch.nn.Module, str, Any, Any]]:
        """(module, name, before, after) of the changed attributes."""
        for module, attributes, held in self.saved:
            for name, value in module.__dict__.items():
                was = attributes.get(name, getattr(type(module), name, None))
                if value is not was and not (
                    type(value) is type(was) and isinstance(value, _LITERALS) and value == was
                ):
                    yield module, name, was, value
                elif name in held and not _same_items(held[name], value):
                    yield module, name, held[name], value
        for module, name, tensor, version, was in self.tensors:
            if module.__dict__.get(name) is tensor and tensor._version != version:
                yield module, name, was, tensor

    def lists(self) -> Iterator[tuple[torch.nn.Module, str, list[Any]]]:
        """(module, name, value) of the non-public lists among them."""
        for module, attributes, _ in self.saved:
            for name, value in attributes.items():
                if name[:1] == "_" and isinstance(value, list):
                    yield module, name, value

    def restore(self) -> None:
        """Restore them."""
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
        for _, _, tensor, version, was in self.tensors:
            if tensor._version != version:
                with torch.no_grad():
                    tensor.copy_(was)


def _same_items(was: Any, now: Any) -> bool:
    """Whether a list, dict or set equals a copy of it, by identity of elements."""
    if len(was) != len(now):
        return False
    if isinstance(now, dict):
        return all(name in was and was[name] is value for name, value in now.items())
    return now <= was if isinstance(now, set) else all(a is b for a, b in zip(was, now, strict=True))
