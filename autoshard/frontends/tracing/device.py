"""The capture device: XLA's, or its counterpart without torch_xla.

`sequence.py`, `frontends/switches/table.py` and the rest of this package act on tensors of that device alone: `meta`
during a capture without torch_xla, else `xla`.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterator
from functools import cache
from operator import attrgetter
from typing import Any, Protocol

import torch

from autoshard.dtypes import torch_dtypes
from autoshard.program import TensorType


class Device(Protocol):
    """Interface of a device to the aten sequence."""

    @property
    def type(self) -> str:
        """torch's name of the device type."""

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is on it."""

    def tensor_id(self, tensor: torch.Tensor) -> int:
        """A unique id of a tensor's present value within the step."""

    def reads_data(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor depends on device data of more than one element (an input, a parameter)."""

    def falls_back(self, op: str) -> bool:
        """Whether an op, by its dispatcher name (`aten::nonzero`), has no lowering."""

    def random_state(self) -> Any:
        """State of its random number generator, unless torch itself asks the device for it."""

    def set_random_state(self, state: Any) -> None:
        """Set the state of its random number generator."""


_TENSOR_TYPES = (torch.Tensor, torch.nn.Parameter)
_DATA = re.compile(r"= \w+\[([\d,]*)\]\S* xla::device_data\(")
"""Data in the text of torch_xla's IR, with its shape."""


class _Xla:
    type = "xla"
    holds = staticmethod(attrgetter("is_xla"))

    def tensor_id(self, tensor: torch.Tensor) -> int:
        if type(tensor) not in _TENSOR_TYPES:
            tensor = getattr(tensor, "global_tensor", tensor)
        return int(_tensor_id()(tensor))

    def reads_data(self, tensor: torch.Tensor) -> bool:
        import torch_xla

        # the text of its IR, because torch_xla's list of its data crashes while a step that makes some is running
        text = torch_xla._XLAC._get_xla_tensors_text([tensor])
        return any(math.prod(map(int, filter(None, shape.split(",")))) > 1 for shape in _DATA.findall(text))

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
    """The present capture device."""
    return _now


@contextlib.contextmanager
def captured_on(device: Device) -> Iterator[None]:
    """Capture on another device in this context."""
    global _now
    before, _now = _now, device
    try:
        yield
    finally:
        _now = before


def is_xla(tensor: torch.Tensor) -> bool:
    """Whether a tensor is on the capture device."""
    return _now.holds(tensor)


def names_it(device: object) -> bool:
    """Whether `device`, an op's argument, is the capture device."""
    return device is not None and torch.device(device).type == _now.type


def tensor_id(tensor: torch.Tensor) -> int:
    """The device's id of a tensor's present value."""
    return _now.tensor_id(tensor)


def tensor_type(tensor: torch.Tensor) -> TensorType:
    """Shape and dtype as in `Program`."""
    return TensorType(tuple(tensor.shape), torch_dtypes().get(tensor.dtype, str(tensor.dtype).removeprefix("torch.")))
