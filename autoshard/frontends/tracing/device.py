"""Which device programs are captured on: XLA's, or what stands for it without torch_xla.

`sequence.py`, `frontends/switches/table.py` and the rest of this room act on tensors of that device alone. While
a program is captured without torch_xla it is `meta`; at any other time it is `xla`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import cache
from operator import attrgetter
from typing import Any, Protocol

import torch


class Device(Protocol):
    """What the aten sequence has to know of a device's tensors."""

    @property
    def type(self) -> str:
        """The name that torch has for it."""

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is on it."""

    def tensor_id(self, tensor: torch.Tensor) -> int:
        """Tells the value that a tensor now holds from every other of the same step."""

    def reads_data(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor depends on any data on the device that is more than one number (an input, a parameter)."""

    def falls_back(self, op: str) -> bool:
        """Whether nothing lowers an op, by its name in the dispatcher (`aten::nonzero`)."""

    def random_state(self) -> Any:
        """What its next random numbers follow from, unless torch itself asks the device for that."""

    def set_random_state(self, state: Any) -> None:
        """Draw the numbers again that follow from a state."""


_TENSOR_TYPES = (torch.Tensor, torch.nn.Parameter)


class _Xla:
    type = "xla"
    holds = staticmethod(attrgetter("is_xla"))

    def tensor_id(self, tensor: torch.Tensor) -> int:
        if type(tensor) not in _TENSOR_TYPES:
            tensor = getattr(tensor, "global_tensor", tensor)
        return int(_tensor_id()(tensor))

    def reads_data(self, tensor: torch.Tensor) -> bool:
        import torch_xla

        _, leaves = torch_xla._XLAC._get_tensors_xla_device_data_node([tensor])
        return any(leaf.numel() > 1 for leaf in leaves)

    @cache  # noqa: B019 (there is one such device)
    def falls_back(self, op: str) -> bool:
        table = torch._C._dispatch_dump_table(op)
        return any(line.startswith("XLA:") and "[backend fallback]" in line for line in table.splitlines())

    def random_state(self) -> None:
        return None

    def set_random_state(self, state: Any) -> None:
        pass


@cache
def _tensor_id() -> Callable[[torch.Tensor], int]:
    import torch_xla

    found: Callable[[torch.Tensor], int] = torch_xla._XLAC._xla_get_tensor_id
    return found


_now: Device = _Xla()


def current() -> Device:
    """The device that programs are captured on now."""
    return _now


@contextlib.contextmanager
def captured_on(device: Device) -> Iterator[None]:
    """Capture on another device meanwhile."""
    global _now
    before, _now = _now, device
    try:
        yield
    finally:
        _now = before


def is_xla(tensor: torch.Tensor) -> bool:
    """Whether a tensor is on the device that programs are captured on."""
    return _now.holds(tensor)


def names_it(device: object) -> bool:
    """Whether `device`, as an op is given it, is the one that programs are captured on."""
    return device is not None and torch.device(device).type == _now.type


def tensor_id(tensor: torch.Tensor) -> int:
    """The device's id of the value that a tensor of its holds now."""
    return _now.tensor_id(tensor)
