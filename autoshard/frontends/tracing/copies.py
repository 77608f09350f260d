"""Copies that PyTorch makes and torch_xla does not: `contiguous`, `reshape`, `flatten` of non-contiguous tensors.

On torch_xla's device every tensor counts as contiguous, so these return the tensor itself or a view, where PyTorch
copies by strides. It matters where one of the two is written in place and the other is read later: the captured program
would differ from PyTorch, and is refused. Strides come from meta tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from autoshard.errors import CaptureError
from autoshard.frontends.tracing.device import is_xla
from autoshard.frontends.tracing.refusals import source
from autoshard.frontends.tracing.sequence import tensors_in

LIKE_ANOTHER = frozenset({"expand_as", "view_as", "reshape_as"})
"""Views that take the shape of a second tensor."""


@dataclass
class _Family:
    """Tensors that share memory on the device; tensors of one group share it in PyTorch too.

    Attributes:
        made: per group, the op that copied it in PyTorch.
        stale: per group that is outdated by a write to another, the message.
    """

    made: list[str] = field(default_factory=lambda: [""])
    stale: dict[int, CaptureError] = field(default_factory=dict)


@dataclass(frozen=True)
class _Place:
    """A tensor's memory in PyTorch: its family and group, its strides, and whether the device's overlap."""

    family: _Family
    group: int
    strides: tuple[int, ...]
    overlaps: bool = False


class Copies(TorchFunctionMode):  # type: ignore[misc]
    """Refuses reads of a tensor that PyTorch would have copied, once original or copy was written.

    Args:
        where: names the running module.
    """

    def __init__(self, where: Callable[[], str]) -> None:
        """Nothing has run."""
        super().__init__()
        self._where = where
        self._places: Any = WeakTensorKeyDictionary()
        self._stale = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function; track its reads, writes and results."""
        kwargs = kwargs or {}
        read = [t for t in (tensors_in((args, kwargs)) if kwargs else tensors_in(args)) if is_xla(t)]
        places = [(t, self._places[t], t._version) for t in read if t in self._places]
        result = func(*args, **kwargs)
        for tensor, place, version in places:
            if tensor._version != version:
                self._written(place)
                break
        if read and result is not None:
            made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor) and is_xla(leaf)]
            if made:
                self.check(t for t, _, _ in places)
                self._follow(func, read[0], args, kwargs, made)
        return result

    def check(self, tensors: Iterable[torch.Tensor]) -> None:
        """Refuse reads of tensors changed on the device but not in PyTorch.

        Raises:
            CaptureError: one of them is stale.
        """
        for tensor in tensors if self._stale else ():
            place = self._places.get(tensor)
            if place is not None and place.group in place.family.stale:
                raise place.family.stale[place.group]

    def _written(self, place: _Place) -> None:
        family = place.family
        if place.overlaps:
            raise self._refusal(family.made[place.group])
        for group, made in enumerate(family.made):
            if group != place.group:
                family.stale.setdefault(group, self._refusal(made or family.made[place.group]))
                self._stale = True

    def _follow(self, func: Any, read: torch.Tensor, args: Any, kwargs: Any, made: list[torch.Tensor]) -> None:
        """Track results that share memory with the first tensor read."""
        name = getattr(func, "__name__", "")
        in_place = name.endswith("_") and not name.endswith("__")
        if in_place or (name not in LIKE_ANOTHER and len(tensors_in((args, kwargs))) > 1):
            return  # written in place, or computed
        memory = _memory(read)
        if memory is None or all(_memory(each) != memory for each in made):
            return
        place = self._places.get(read) or _Place(_Family(), 0, _contiguous(read))
        itself = all(each is read for each in made) and place.strides == _contiguous(read)
        if itself and not any(isinstance(leaf, torch.memory_format) for leaf in tree_leaves((args, kwargs))):
            return
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction(), torch.no_grad():
            shadow = torch.empty_strided(read.shape, place.strides, dtype=read.dtype, device="meta")
            like = tree_map(lambda leaf: shadow if leaf is read else _without_data(leaf), (args, kwargs))
            try:
                shadows = [leaf for leaf in tree_leaves(func(*like[0], **like[1])) if isinstance(leaf, torch.Tensor)]
            except RuntimeError:  # `to(device)` of a present tensor: meta tensors cannot be moved
                return
        if len(shadows) != len(made):
            return
        self._places.setdefault(read, place)
        for each, its in zip(made, shadows, strict=True):
            if _memory(each) != memory or each.shape != its.shape:
                continue
            if _memory(its) == _memory(shadow):
                if each is not read:
                    self._places[each] = _Place(place.family, place.group, its.stride(), place.overlaps)
            else:
                place.family.made.append(getattr(func, "__name__", str(func)))
                overlaps = place.overlaps or _overlaps(shadow)
                self._places[each] = _Place(place.family, len(place.family.made) - 1, its.stride(), overlaps)

    def _refusal(self, made: str) -> CaptureError:
        return CaptureError(
            f"{self._where()} writes in place{source()} into what {made}() gave, or what it was called on, and the "
            f"other one is read afterwards. PyTorch copies there and torch_xla does not: write .clone() in front of "
            f".{made}()"
        )


def _without_data(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor) and is_xla(leaf):
        return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")
    return leaf


def _memory(tensor: torch.Tensor) -> int | None:
    """A key of a tensor's memory; None where it has none."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return None


def _contiguous(tensor: torch.Tensor) -> tuple[int, ...]:
    strides: list[int] = []
    step = 1
    for size in reversed(tensor.shape):
        strides.insert(0, step)
        step *= max(1, size)
    return tuple(strides)


def _overlaps(tensor: torch.Tensor) -> bool:
    """Whether elements of a strided tensor may overlap."""
    reach = 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride < reach:
                return True
            reach += stride * (size - 1)
    return False
