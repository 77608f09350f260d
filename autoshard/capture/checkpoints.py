"""`torch.utils.checkpoint` on XLA devices, for which torch's own has no module and puts up no barrier.

Without a barrier XLA would see that what is computed again is what was computed before, and keep it. torch_xla has a
checkpoint of its own that does both; models and libraries call torch's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map


@contextlib.contextmanager
def recomputed() -> Iterator[None]:
    """torch's checkpoints work on XLA tensors meanwhile, those of both kinds."""
    import torch.utils.checkpoint as library

    reentrant, generator = library.CheckpointFunction, library._checkpoint_without_reentrant_generator
    had = getattr(torch, "xla", None)
    try:
        library.CheckpointFunction = _Either(reentrant)
        library._checkpoint_without_reentrant_generator = lambda function, *given, **named: generator(
            _behind_a_barrier(function) if _any_on_xla((given, named)) else function, *given, **named
        )
        if had is None:
            torch.xla = _Device()
        yield
    finally:
        library.CheckpointFunction = reentrant
        library._checkpoint_without_reentrant_generator = generator
        if had is None:
            del torch.xla


def _on_xla(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.device.type == "xla"


def _any_on_xla(tree: Any) -> bool:
    return any(_on_xla(leaf) for leaf in tree_leaves(tree))


class _Either:
    """torch's reentrant checkpoint, and torch_xla's for tensors that are there."""

    def __init__(self, native: Any) -> None:
        self.native = native

    def apply(self, function: Any, preserve: bool, *args: Any) -> Any:
        if not _any_on_xla(args):
            return self.native.apply(function, preserve, *args)
        from torch_xla.utils.checkpoint import CheckpointFunction

        return CheckpointFunction.apply(function, preserve, *args)


def _behind_a_barrier(function: Any) -> Any:
    """The function; when it runs again, on inputs of which XLA does not know that they are those of before."""
    ran = False

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal ran
        if ran:
            args, kwargs = tree_map(_hidden, (args, kwargs))
        ran = True
        return function(*args, **kwargs)

    return run


def _hidden(leaf: Any) -> Any:
    if not _on_xla(leaf) or not leaf.is_floating_point():
        return leaf
    import torch_xla.core.xla_model as xla_model

    hidden = leaf.detach().clone()
    xla_model.optimization_barrier_([hidden])
    return hidden.requires_grad_(leaf.requires_grad)


class _Device:
    """What torch asks of `torch.<device>` to draw the same random numbers again."""

    _initialized = True

    @staticmethod
    def device(_: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    @staticmethod
    def device_count() -> int:
        return 1

    @staticmethod
    def get_rng_state(_: Any = None) -> Any:
        import torch_xla.core.xla_model as xla_model

        return xla_model.get_rng_state()

    @staticmethod
    def set_rng_state(state: Any, _: Any = None) -> None:
        import torch_xla.core.xla_model as xla_model

        xla_model.set_rng_state(state)
