"""Assigns sample inputs to the model and the loss, and names each tensor."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from autoshard.errors import CaptureError


@dataclass(frozen=True)
class Inputs:
    """Arguments of the model's forward, and those of the loss function after the model's output."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    loss_args: tuple[Any, ...] = ()
    loss_kwargs: Mapping[str, Any] | None = None

    def describe(self) -> str:
        """Names, shapes and dtypes, for an error message."""
        return ", ".join(f"{name}: {_describe(value)}" for name, value in self.named())

    def named(self) -> list[tuple[str, Any]]:
        """Every argument with a name."""
        named = [(f"input{i}", value) for i, value in enumerate(self.args)] + list(self.kwargs.items())
        named += [(f"target{i}", value) for i, value in enumerate(self.loss_args)]
        return named + list((self.loss_kwargs or {}).items())


def split_inputs(model: torch.nn.Module, sample_inputs: Any, loss_fn: Callable[..., Any] | None) -> Inputs:
    """Divide sample inputs between the model and the loss.

    A tensor is the only positional argument; a tuple or list holds several: those beyond the model's parameters go to
    `loss_fn`, after the model's output; so do the last ones that it requires, where forward requires none of them. A
    mapping holds keyword arguments: those that only `loss_fn` names go there.

    Raises:
        CaptureError: there are none, or they do not fit; names forward's parameters.
    """
    _check_model(model)
    wants = f"{type(model).__name__}.forward{_signature(model.forward)}"
    if sample_inputs is None or (isinstance(sample_inputs, tuple | list | Mapping) and not len(sample_inputs)):
        raise CaptureError(f"no sample inputs were given; {wants} needs them to be captured")
    if isinstance(sample_inputs, torch.Tensor):
        sample_inputs = (sample_inputs,)
    if isinstance(sample_inputs, tuple | list):
        taken = len(sample_inputs) if loss_fn is None else _taken(model.forward, loss_fn, len(sample_inputs))
        inputs = Inputs(tuple(sample_inputs[:taken]), {}, tuple(sample_inputs[taken:]))
    elif isinstance(sample_inputs, Mapping) or hasattr(sample_inputs, "items"):
        to_loss = _names(loss_fn)[1:] if loss_fn is not None else []
        forward = _names(model.forward)
        mine = {k: v for k, v in sample_inputs.items() if k in forward or k not in to_loss}
        inputs = Inputs((), mine, (), {k: v for k, v in sample_inputs.items() if k not in mine})
    else:
        raise CaptureError(
            f"sample inputs are a tensor, a tuple of positional arguments or a dict of named ones, "
            f"not {type(sample_inputs).__name__}; {wants}"
        )
    if not any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves((inputs.args, dict(inputs.kwargs)))):
        raise CaptureError(f"the sample inputs hold no tensor ({inputs.describe()}); the model wants {wants}")
    try:
        inspect.signature(model.forward).bind(*inputs.args, **inputs.kwargs)
    except TypeError as error:
        raise CaptureError(
            f"the sample inputs ({inputs.describe()}) do not fit the model: {error}; it wants {wants}"
        ) from None
    except ValueError:
        pass  # a forward without a signature, such as a compiled one
    return inputs


def _check_model(model: Any) -> None:
    if not isinstance(model, torch.nn.Module):
        found = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
        raise CaptureError(f"the model is a torch.nn.Module, not {found}")
    if isinstance(model, torch.jit.ScriptModule):
        raise CaptureError("a scripted or traced model cannot be captured; pass the torch.nn.Module it was made from")
    lazy = next((n for n, t in (*model.named_parameters(), *model.named_buffers()) if is_lazy(t)), None)
    if lazy is not None:
        raise CaptureError(f"{lazy} has no shape yet (a lazy module); call the model once on a sample before planning")


def input_names(model: torch.nn.Module, inputs: Inputs, loss_fn: Callable[..., Any] | None) -> list[tuple[str, Any]]:
    """Name each argument after its parameter in forward or the loss function."""
    return (
        _bound(model.forward, inputs.args)
        + list(inputs.kwargs.items())
        + (_bound(loss_fn, (None, *inputs.loss_args))[1:] if inputs.loss_args and loss_fn is not None else [])
        + list((inputs.loss_kwargs or {}).items())
    )


def _bound(function: Callable[..., Any], args: tuple[Any, ...]) -> list[tuple[str, Any]]:
    names = [p.name for p in _parameters(function) if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return [(names[i] if i < len(names) else f"input{i}", value) for i, value in enumerate(args)]


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    target = function.forward if isinstance(function, torch.nn.Module) else function
    try:
        return list(inspect.signature(target).parameters.values())
    except (TypeError, ValueError):
        return []


def _names(function: Callable[..., Any]) -> list[str]:
    return [p.name for p in _parameters(function) if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def _places(function: Callable[..., Any]) -> int | None:
    """Number of positional parameters of a function; None for any number."""
    parameters = _parameters(function)
    if not parameters or any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return None
    return sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)


def _taken(forward: Callable[..., Any], loss_fn: Callable[..., Any], given: int) -> int:
    """How many of `given` positional inputs are the model's."""
    places = _places(forward)
    left = given - max(0, _required(loss_fn) - 1)  # the model's output is the first
    return min(given if places is None else places, max(1, _required(forward), left))


def _required(function: Callable[..., Any]) -> int:
    """Number of positional parameters without a default."""
    positional = [p for p in _parameters(function) if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return sum(p.default is p.empty for p in positional)


def _signature(function: Callable[..., Any]) -> str:
    parameters = _parameters(function)
    shown = [str(p.replace(annotation=p.empty)) for p in parameters]
    return f"({', '.join(shown if len(shown) < 12 else [*shown[:11], '…'])})"


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}[{', '.join(map(str, value.shape))}]"
    return type(value).__name__


def key_name(key: Any) -> str:
    """One step of a path in a container, as in names of inputs and results."""
    found = next((getattr(key, kind) for kind in ("key", "idx", "name") if hasattr(key, kind)), key)
    return str(found)
