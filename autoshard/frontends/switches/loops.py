"""Unrolls torch_xla's `scan` and `scan_layers`, so that each iteration has ops of its own.

In a loop GSPMD keeps each carried value in one sharding, no value of the body can be annotated, and the backward pass
of `scan` needs a jax that fits torch_xla. The unrolled program is the Python loop that `scan` documents as equal.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

_SCAN, _LAYERS = "torch_xla.experimental.scan", "torch_xla.experimental.scan_layers"


class _Unrolled:
    """Replaces the autograd function of `scan`: `fn` itself is differentiated."""

    @staticmethod
    def apply(fn: Callable[..., Any], _alias: Any, _backward: Any, init: Any, xs: Any) -> tuple[Any, Any]:
        """(the last carry, the stacked results)."""
        carry, made = init, []
        for i in range(len(tree_leaves(xs)[0])):
            carry, y = fn(carry, tree_map(lambda x, i=i: x[i], xs))
            made.append(y)
        return carry, tree_map(lambda *ys: None if ys[0] is None else torch.stack(ys), *made)


def _as_it_is(fn: Callable[..., Any], init: Any, xs: Any, partition_fn: Any = None, **_: Any) -> tuple[Any, Any, Any]:
    """Replaces `value_and_grad_partitioned`."""
    return _again(fn) if _rematerializes(partition_fn) else fn, None, None


def _rematerializes(partition_fn: Any) -> bool:
    return "rematerialization" in getattr(partition_fn, "__name__", "")


def _again(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Checkpoint `fn`."""

    def checkpointed(*args: Any) -> Any:
        from torch_xla.utils.checkpoint import checkpoint

        return checkpoint(fn, *args)

    return checkpointed


class _Layers:
    """Replaces what `scan_layers` calls: the layers run one by one, with their own parameters."""

    def __init__(self) -> None:
        self.layers: list[torch.nn.Module] = []

    def extract(self, layer: torch.nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
        """Replaces `_extract_weights_and_buffers`: nothing is stacked."""
        self.layers.append(layer)
        return {}, {}

    def template(self, first_layer: torch.nn.Module, *_: Any) -> Any:
        """Replaces `_create_or_get_cached_one_layer_fn`."""
        return first_layer

    def run(self, _: Any, carry: Any, __: Any, partition_fn: Any = None, **___: Any) -> tuple[Any, None]:
        """Replaces `scan`."""
        layers: Sequence[torch.nn.Module] = self.layers
        self.layers = []
        for layer in layers:
            carry = _again(layer)(carry) if _rematerializes(partition_fn) else layer(carry)
        return carry, None


@contextlib.contextmanager
def unrolled() -> Iterator[None]:
    """Unroll `scan` and `scan_layers`, under whatever name the model imported them."""
    layers = _Layers()
    replaced: dict[str, dict[str, Any]] = {
        _SCAN: {"value_and_grad_partitioned": _as_it_is, "Scan": _Unrolled},
        _LAYERS: {
            "_extract_weights_and_buffers": layers.extract,
            "_create_or_get_cached_one_layer_fn": layers.template,
            "scan": layers.run,
        },
    }
    _import()
    saved: list[tuple[Any, str, Any]] = []
    try:
        for name, functions in replaced.items():
            module = sys.modules.get(name)
            for attribute, function in functions.items() if module is not None else ():
                saved.append((module, attribute, getattr(module, attribute)))
                setattr(module, attribute, function)
        yield
    finally:
        for module, attribute, before in saved:
            setattr(module, attribute, before)


def _import() -> None:
    """Import both: torch_xla imports `scan` itself; a model may import `scan_layers` while it runs."""
    if _SCAN in sys.modules:
        with contextlib.suppress(ImportError):
            import torch_xla.experimental.scan_layers  # noqa: F401
