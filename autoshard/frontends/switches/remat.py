"""Which blocks of a model are recomputed in the backward pass: the switch `remat:…`.

It replaces the checkpoints that the model has of its own. `remat:all=model.layers.0-19;products=model.layers.20-31`
recomputes twenty blocks, keeps products and attentions of twelve more, and everything of the rest; `remat:none` keeps
everything.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from autoshard.frontends.tracing.modules import running

ALL, PRODUCTS = "all", "products"
LEVELS = (PRODUCTS, ALL)
"""What is recomputed of a block: all but the results of products and attentions, or all."""
Remat = Mapping[str, str]
"""Path of a block -> its level; other blocks keep everything."""

_PRODUCTS = re.compile(
    r"(autoshard::(einsum|attention)|aten::(mm|bmm|addmm|baddbmm|convolution|_scaled_dot_product\w*))$"
)


@dataclass(frozen=True)
class Blocks:
    """Equal blocks of a model: children of one container, of one class, with parameters of the same shapes.

    Attributes:
        paths: of the blocks, in the container's order.
    """

    paths: tuple[str, ...]


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
            found.append(Blocks(paths))
        else:
            for name, where in zip(names, paths, strict=True):
                _find(module.get_submodule(name), where, found)


def switch_value(remat: Remat) -> str:
    """The part after the colon of the switch that recomputes as `remat` says."""
    parts = []
    for level in LEVELS:
        runs: list[tuple[str, int, int]] = []
        for path in (path for path, own in remat.items() if own == level):
            prefix, _, number = path.rpartition(".")
            if not number.isdecimal():
                runs.append((path, -1, -1))
            elif runs and runs[-1][0] == prefix and runs[-1][2] + 1 == int(number):
                runs[-1] = prefix, runs[-1][1], int(number)
            else:
                runs.append((prefix, int(number), int(number)))
        if runs:
            parts.append(f"{level}={','.join(map(_run, runs))}")
    return ";".join(parts) or "none"


def _run(run: tuple[str, int, int]) -> str:
    prefix, first, last = run
    dot = f"{prefix}." if prefix else ""
    return prefix if first < 0 else f"{dot}{first}" if first == last else f"{dot}{first}-{last}"


def remat_of(value: str) -> dict[str, str]:
    """The inverse of `switch_value`.

    Raises:
        ValueError: another text.
    """
    found: dict[str, str] = {}
    for part in value.split(";") if value != "none" else ():
        level, equals, runs = part.partition("=")
        if level not in LEVELS or not equals:
            raise ValueError(f"remat:{value}: {part!r} is not LEVEL=BLOCKS, where levels are {', '.join(LEVELS)}")
        for run in runs.split(","):
            several = re.fullmatch(r"((?:.*\.)?)(\d+)-(\d+)", run)
            names = [run] if several is None else [f"{several[1]}{i}" for i in range(int(several[2]), int(several[3]) + 1)]
            found.update(dict.fromkeys(names, level))
    return found


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
        keeps = {} if self.level == ALL else {"context_fn": lambda: create_selective_checkpoint_contexts(_policy)}
        return checkpoint(_Body(self.block, self.forward), *args, use_reentrant=False, **keeps, **kwargs)


class _Body:
    """What is run and recomputed; its second run names the block as the running module."""

    def __init__(self, block: torch.nn.Module, forward: Callable[..., Any]) -> None:
        self.block, self.forward, self.again = block, forward, False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        inside = running(self.block) if self.again else contextlib.nullcontext()
        self.again = True
        with inside:
            return self.forward(*args, **kwargs)


def _policy(_: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    from torch.utils.checkpoint import CheckpointPolicy

    kept = _PRODUCTS.match(getattr(op, "_schema", op).name)
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
