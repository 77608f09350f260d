"""Which blocks of a model are recomputed in the backward pass: the switch `remat:…`.

It replaces the checkpoints that the model has of its own; `plans/remat.py` has its form.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Hashable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch.nn.modules.batchnorm import _NormBase

from autoshard.frontends.tracing.modules import running
from autoshard.plans.remat import ALL, ATTENTION, PRODUCTS, Blocks, Remat, remat_of

_ATTENTION = r"autoshard::attention|aten::_scaled_dot_product\w*"
_KEEPS = {
    PRODUCTS: re.compile(rf"(autoshard::(einsum|experts)|aten::(mm|bmm|addmm|baddbmm|convolution)|{_ATTENTION})$"),
    ATTENTION: re.compile(rf"({_ATTENTION})$"),
}
"""Level -> the ops whose results are kept."""


def blocks_of(model: torch.nn.Module) -> tuple[Blocks, ...]:
    """The outermost classes of two or more equal blocks with parameters."""
    found: list[Blocks] = []
    _find(model, "", found)
    return tuple(found)


def _find(module: torch.nn.Module, path: str, found: list[Blocks]) -> None:
    alike: dict[Hashable, list[str]] = {}
    several = isinstance(module, torch.nn.ModuleList | torch.nn.Sequential | torch.nn.ModuleDict)
    for name, child in module.named_children():
        shapes = tuple((key, tuple(p.shape), p.dtype) for key, p in child.named_parameters())
        alike.setdefault((type(child), shapes) if several and shapes else name, []).append(name)
    for names in alike.values():
        paths = tuple(f"{path}.{name}" if path else name for name in names)
        if len(paths) > 1 and any(True for _ in module.get_submodule(names[0]).children()):
            found.append(paths)
        else:
            for name, where in zip(names, paths, strict=True):
                _find(module.get_submodule(name), where, found)


def recompute(model: torch.nn.Module, remat: Remat) -> None:
    """Recompute blocks of `model` from now on."""
    for path, level in remat.items():
        block = model.get_submodule(path)
        block.__dict__["forward"] = _Checkpointed(block, block.forward, level)


@contextlib.contextmanager
def recomputing(model: torch.nn.Module | None, value: str) -> Iterator[None]:
    """Recompute blocks of `model` as the switch's value says, and nothing else.

    Raises:
        ValueError: the value names a block that the model lacks.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(_no_other_checkpoints())
        for path, level in remat_of(value).items():
            if model is None:
                raise ValueError(f"remat:{value} is a switch of a running model, and there is none")
            try:
                block = model.get_submodule(path)
            except AttributeError:
                raise ValueError(f"remat:{value}: the model has no module {path}") from None
            stack.enter_context(_recomputed_block(block, level))
        yield


@contextlib.contextmanager
def _recomputed_block(block: torch.nn.Module, level: str) -> Iterator[None]:
    own = block.__dict__.get("forward")
    block.__dict__["forward"] = _Checkpointed(block, block.forward, level)
    try:
        yield
    finally:
        if own is None:
            del block.__dict__["forward"]
        else:
            block.__dict__["forward"] = own


class _Checkpointed:
    """A block's forward, recomputed in the backward pass where it is differentiated."""

    def __init__(self, block: torch.nn.Module, forward: Callable[..., Any], level: str) -> None:
        self.block, self.forward, self.level = block, forward, level
        functools.update_wrapper(self, forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        keeps: dict[str, Any] = {}
        if self.level != ALL:
            keeps["context_fn"] = lambda: create_selective_checkpoint_contexts(partial(_policy, _KEEPS[self.level]))
        return checkpoint(_Body(self.block, self.forward), *args, use_reentrant=False, **keeps, **kwargs)


class _Body:
    """What is run and recomputed; its second run names the block as the running module.

    The second run finds buffers as the first did, and leaves them as they are: statistics are updated once.
    """

    def __init__(self, block: torch.nn.Module, forward: Callable[..., Any]) -> None:
        self.block, self.forward = block, forward
        self.before: list[tuple[torch.nn.Module, str, torch.Tensor]] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.before is not None:
            with running(self.block), _buffers(self.before):
                return self.forward(*args, **kwargs)
        held = [
            (module, name, buffer, buffer._version, buffer.detach().clone())
            for module in self.block.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        self.before = []
        try:
            return self.forward(*args, **kwargs)
        finally:
            for module, name, buffer, version, clone in held:
                replaced = module._buffers.get(name) is not buffer
                if replaced or buffer._version != version or isinstance(module, _NormBase):  # which writes unseen
                    self.before.append((module, name, clone))


@contextlib.contextmanager
def _buffers(before: Iterable[tuple[torch.nn.Module, str, torch.Tensor]]) -> Iterator[None]:
    """Run modules with these buffers, and put theirs back."""
    after = [(module, name, module._buffers.get(name)) for module, name, _ in before]
    try:
        for module, name, buffer in before:
            module._buffers[name] = buffer.clone()
        yield
    finally:
        for module, name, present in after:
            module._buffers[name] = present


def _policy(keeps: re.Pattern[str], _: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    from torch.utils.checkpoint import CheckpointPolicy

    kept = keeps.match(getattr(op, "_schema", op).name)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


@contextlib.contextmanager
def _no_other_checkpoints() -> Iterator[None]:
    """Make checkpoints of torch and torch_xla plain calls, but for those of `_Checkpointed`."""
    import sys

    import torch.utils.checkpoint as library

    theirs: Any = library._checkpoint_without_reentrant_generator

    def generator(function: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
        if isinstance(function, _Body):
            yield from theirs(function, *args, **kwargs)
        else:
            yield

    class Plain:
        @staticmethod
        def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
            return function(*args)

    libraries: Iterable[Any] = filter(None, (library, sys.modules.get("torch_xla.utils.checkpoint")))
    saved = [(each, name, getattr(each, name)) for each in libraries for name in ("CheckpointFunction",)]
    saved.append((library, "_checkpoint_without_reentrant_generator", theirs))
    try:
        for each, name, _ in saved:
            setattr(each, name, Plain if name == "CheckpointFunction" else generator)
        yield
    finally:
        for each, name, own in saved:
            setattr(each, name, own)
