"""One-line errors for ops that DTensor cannot run, with op and module."""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from autoshard.errors import LoweringError

_KEPT = 20_000


class RefusedOpError(LoweringError, NotImplementedError):
    """An op without placements in DTensor; its dispatcher re-raises only `NotImplementedError` unchanged."""


class Whereabouts:
    """The module of the running op, in forward and backward pass.

    Autograd numbers nodes as the forward pass makes them; the numbers at which modules begin and end are recorded.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        """Start recording a model."""
        self.inside: list[str] = []
        self.numbers: list[int] = []
        self.paths: list[str] = []
        for path, module in model.named_modules():
            module.register_forward_pre_hook(_Enter(self, path), prepend=True)
            module.register_forward_hook(self.leave, always_call=True)

    def enter(self, path: str) -> None:
        """A module begins."""
        if path == "":
            self.inside.clear()
        self.inside.append(path)
        self.mark(path)

    def leave(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        """A module ends; after an error the modules that were left stay open until the model begins again."""
        if sys.exc_info()[0] is None and self.inside:
            self.inside.pop()
            self.mark(self.inside[-1] if self.inside else None)

    def mark(self, path: str | None) -> None:
        """Attribute the nodes made from here on to `path`."""
        self.numbers.append(torch._C._autograd._get_sequence_nr())
        self.paths.append("after the model" if path is None else path or "the model itself")
        del self.numbers[:-_KEPT], self.paths[:-_KEPT]

    def here(self) -> str:
        """The module of the running op."""
        node = torch._C._current_autograd_node()
        if node is None:
            return self.paths[-1] if self.paths else "before the model"
        found = bisect_right(self.numbers, node._sequence_nr()) - 1
        made = self.paths[found] if found >= 0 else "the model"
        return f"the backward pass of {made} ({node.name().removesuffix('0')})"


class _Enter:
    def __init__(self, places: Whereabouts, path: str) -> None:
        self.places, self.path = places, path

    def __call__(self, module: torch.nn.Module, args: Any) -> None:
        self.places.enter(self.path)


class _Refusing:
    """DTensor's propagation with one-line errors."""

    def __init__(self, propagate: Callable[[Any], Any], places: Whereabouts) -> None:
        self.propagate, self.places = propagate, places

    def __getattr__(self, name: str) -> Any:
        return getattr(self.propagate, name)

    def __call__(self, schema: Any) -> Any:
        try:
            return self.propagate(schema)
        except RefusedOpError:
            raise
        except Exception as error:
            if isinstance(error, NotImplementedError) and schema.op._can_decompose():
                raise  # the dispatcher inspects it
            raise RefusedOpError(f"{self.places.here()}: DTensor cannot run {_said(schema)}: {_line(error)}") from error


class _Writing:
    """Writes into views reach the base, or are refused.

    DTensor redistributes a tensor for a view that its shards lack (`x[1:3]` of split rows), and writes into that are
    lost.
    """

    def __init__(self, places: Whereabouts) -> None:
        self.places = places

    def __call__(self, op: Any, args: Any, kwargs: Any) -> Any:
        if (base := _lost_to(args[0])) is not None:
            raise RefusedOpError(
                f"{self.places.here()}: DTensor cannot run {op} on a view of {list(base.shape)} placed "
                f"{list(base.placements)}: the view is a copy, and what is written into it would be lost. Use an op "
                "that makes a new tensor: torch.where, index_copy, torch.cat"
            )
        handlers = DTensor._op_dispatcher._custom_op_handlers
        del handlers[op]
        try:
            return op(*args, **kwargs)
        finally:
            handlers[op] = self


def _lost_to(written: Any) -> DTensor | None:
    """The base that a written tensor is no longer a view of."""
    if not isinstance(written, DTensor) or not written._is_view() or not isinstance(base := written._base, DTensor):
        return None
    places = {each._local_tensor.untyped_storage().data_ptr() for each in (written, base)}
    return base if len(places) > 1 else None


def _writing_ops() -> Iterator[Any]:
    """aten's ops that write their first argument."""
    for schema in torch._C._jit_get_all_schemas():
        first = schema.arguments[0].alias_info if schema.arguments else None
        if schema.name.startswith("aten::") and schema.name.endswith("_") and first is not None and first.is_write:
            packet = getattr(torch.ops.aten, schema.name.removeprefix("aten::"), None)
            op = getattr(packet, schema.overload_name or "default", None)
            if op is not None:
                yield op


def say_where(model: torch.nn.Module) -> None:
    """Name the module of a model in DTensor's errors from now on."""
    propagator = DTensor._op_dispatcher.sharding_propagator
    places = Whereabouts(model)
    for name in ("propagate_op_sharding", "propagate_op_sharding_non_cached"):
        found = getattr(propagator, name)
        setattr(propagator, name, _Refusing(found.propagate if isinstance(found, _Refusing) else found, places))
    handlers = DTensor._op_dispatcher._custom_op_handlers
    handlers.update((op, _Writing(places)) for op in _writing_ops() if isinstance(handlers.get(op), _Writing | None))


def _said(schema: Any) -> str:
    read = ", ".join(f"{list(spec.shape)} placed {list(spec.placements)}" for spec in schema.args_spec)
    return f"{schema.op} of {read}"


def _line(error: Exception) -> str:
    """The first line of an error's message."""
    lines = str(error).strip().splitlines()
    return lines[0].strip() if lines else type(error).__name__
