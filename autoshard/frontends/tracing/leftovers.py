"""Lazy tensors of torch_xla's that a capture must not leave behind: they have no data to be computed from."""

from __future__ import annotations

import contextlib
import gc
import traceback
import warnings
from collections.abc import Container, Iterator, Mapping

import torch

from autoshard.frontends.tracing.device import is_xla, tensor_id


@contextlib.contextmanager
def nothing_left() -> Iterator[list[Mapping[int, object]]]:
    """Free all lazy tensors of a capture, also when it fails; the list is for the ids of what it makes.

    torch_xla's next sync runs every live lazy tensor, and crashes on a placeholder, which has no data. Reference cycles
    could keep one, or the frames of a stored error (a notebook keeps the last one); so chained errors are reduced to
    their messages. What the program itself keeps, such as what a hook puts into a list, has no element afterwards.
    """
    made: list[Mapping[int, object]] = []
    enabled = gc.isenabled()
    gc.disable()
    gc.freeze()  # the collection below skips all that is older than the capture
    try:
        yield made
    except BaseException as error:
        failures: list[BaseException | None] = [error]
        seen: set[int] = set()
        while failures:
            failure = failures.pop()
            if failure is not None and id(failure) not in seen:
                seen.add(id(failure))
                traceback.clear_frames(failure.__traceback__)
                failures += [failure.__cause__, failure.__context__]
                if failure is not error:
                    failure.__traceback__ = None
        raise
    finally:
        gc.collect()
        if made:
            _empty(made[0])
        gc.unfreeze()
        if enabled:
            gc.enable()


def _empty(made: Container[int]) -> None:
    """Empty those of these lazy tensors that are new and that a program keeps: torch_xla's own are inside them."""
    with warnings.catch_warnings(action="ignore"):  # torch owns some, and frees them with those of the program
        kept = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor) and is_xla(each)]
        kept = [each for each in kept if torch._is_functional_tensor(each) and tensor_id(each) in made]
        while kept:
            _without_elements(kept.pop())  # views first


def _without_elements(tensor: torch.Tensor) -> None:
    """Leave a lazy tensor without elements, so that nothing is computed for it."""
    with contextlib.suppress(RuntimeError):  # torch has freed it with another one
        try:
            torch.utils.swap_tensors(tensor, tensor.new_empty(0))
        except RuntimeError:  # something else refers to it, such as a view
            tensor.detach_()
            torch._functionalize_replace(tensor, torch._from_functional_tensor(tensor.new_empty(0)))
            torch._functionalize_commit_update(tensor)
            torch._functionalize_sync(tensor)
