"""A twin of the user's optimizer over placeholders, in its steady state.

What state an optimizer keeps is found out, not known: a twin takes one step with one parameter of each shape, and what
it then holds is the state of every parameter of that shape.
"""

from __future__ import annotations

import contextlib
import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils._pytree import tree_flatten_with_path, tree_leaves, tree_map

from autoshard.capture.device import is_xla
from autoshard.capture.refusals import asks_for_data
from autoshard.errors import CaptureError

STEADY_STEP = 10.0
"""Step counters are set to this: past the first steps, in which RAdam, say, computes something else, and where
bias corrections are ordinary numbers (torch_xla makes 0 and 1 constants of the program, not arguments)."""

Placeholder = Callable[[torch.Tensor], torch.Tensor]


def make_optimizer(optimizer: Any, tensors: Mapping[int, torch.Tensor]) -> torch.optim.Optimizer:
    """The optimizer of the captured step, without state.

    Args:
        optimizer: a torch optimizer over the user's parameters (left as it is), or a callable from parameters to one.
        tensors: id of the user's parameter -> its placeholder, in the model's order.

    Raises:
        CaptureError: it is neither, or optimizes tensors that are not the model's; or the callable fails.
    """
    if isinstance(optimizer, torch.optim.Optimizer):
        _refuse_foreign(optimizer, set(tensors), "Build it from model.parameters().")
        return _twin(optimizer, tensors)
    if not callable(optimizer):
        raise CaptureError(
            f"optimizer is a torch.optim.Optimizer or a callable from parameters to one, not {type(optimizer).__name__}"
        )
    try:
        made = optimizer(list(tensors.values()))
    except Exception as error:
        first = next(iter(str(error).splitlines()), "")
        raise CaptureError(
            f"optimizer(parameters) failed with {type(error).__name__}: {first}. It was called with the list of the "
            f"model's {len(tensors)} parameters."
        ) from error
    if not isinstance(made, torch.optim.Optimizer):
        raise CaptureError(f"optimizer(parameters) returned {type(made).__name__}, not a torch.optim.Optimizer")
    ours = {id(tensor) for tensor in tensors.values()}
    _refuse_foreign(made, ours, "Build it from the parameters that the callable is given.")
    return made


def _refuse_foreign(optimizer: torch.optim.Optimizer, ours: set[int], instead: str) -> None:
    foreign = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in ours]
    if foreign:
        raise CaptureError(
            f"the optimizer updates a tensor of shape {tuple(foreign[0].shape)} that is no parameter of the model "
            f"(nor of a loss_fn that is a module); {len(foreign)} such in all. {instead}"
        )


def seed_state(
    optimizer: torch.optim.Optimizer,
    names: Mapping[int, str],
    placeholder: Placeholder,
    guard: AbstractContextManager[Any],
) -> dict[str, tuple[torch.Tensor, str]]:
    """Give `optimizer` the state that it has between steps, as placeholders; call it when gradients exist.

    Args:
        optimizer: as `make_optimizer` made it.
        names: id of each placeholder parameter -> its name.
        placeholder: makes one like a tensor.
        guard: entered around the trial step, to refuse what it must not do.

    Returns:
        Name of each state tensor on the device -> (the tensor, its parameter's name).
    """
    if any(group.get("fused") for group in optimizer.param_groups):
        raise CaptureError("the optimizer has fused=True, which XLA devices do not support; leave `fused` out")
    of_kind = _state_kinds(optimizer, placeholder, guard)
    seeded: dict[str, tuple[torch.Tensor, str]] = {}
    optimizer.state.clear()  # what it was constructed with
    for group_index, group in enumerate(optimizer.param_groups):
        for p in group["params"]:
            if p.grad is None:
                continue
            state = of_kind[group_index, tuple(p.shape), p.dtype]
            optimizer.state[p] = {key: _seed(key, value, placeholder) for key, value in state.items()}
            name = names[id(p)]
            seeded.update({path: (tensor, name) for path, tensor in state_tensors(optimizer.state[p], name)})
    return seeded


def state_tensors(state: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of each tensor of a parameter's state that lives on an XLA device."""
    for path, value in tree_flatten_with_path(dict(state))[0]:
        if isinstance(value, torch.Tensor) and is_xla(value):
            yield ".".join([prefix, *(str(getattr(k, "key", getattr(k, "idx", k))) for k in path)]), value


def _twin(
    optimizer: torch.optim.Optimizer, tensors: Mapping[int, torch.Tensor], memo: dict[int, Any] | None = None
) -> torch.optim.Optimizer:
    """An optimizer of the same class and settings over other tensors, with no hooks and the state of a new one.

    Optimizers that it holds (one for each part of the model, say) are twins too, with it share what they share with it.
    """
    memo = {} if memo is None else memo
    if id(optimizer) in memo:
        made: torch.optim.Optimizer = memo[id(optimizer)]
        return made
    twin: torch.optim.Optimizer = object.__new__(type(optimizer))
    memo[id(optimizer)] = twin
    twin.__dict__.update({k: v for k, v in optimizer.__dict__.items() if k != "step"})  # schedulers wrap `step`
    for name, value in twin.__dict__.items():
        if "hooks" in name and isinstance(value, dict):
            twin.__dict__[name] = type(value)()
    twin.state = memo.setdefault(id(optimizer.state), defaultdict(dict))
    twin.param_groups = [
        memo.setdefault(
            id(group),
            {
                key: [tensors[id(p)] for p in value] if key == "params" else copy.deepcopy(value)
                for key, value in group.items()
            },
        )
        for group in optimizer.param_groups
    ]

    def inner(value: Any) -> Any:
        return _twin(value, tensors, memo) if isinstance(value, torch.optim.Optimizer) else value

    for name, value in twin.__dict__.items():
        if name not in ("state", "param_groups") and any(optimizers_in(value)):
            twin.__dict__[name] = tree_map(inner, value)
    if optimizer.state and not twin.state:
        fill_state(twin)
    return twin


def optimizers_in(value: Any) -> list[torch.optim.Optimizer]:
    """The optimizers in a container."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.optim.Optimizer)]


def fill_state(optimizer: torch.optim.Optimizer) -> None:
    """Give an optimizer the state that its class makes at construction (Adagrad does; most make it in a step)."""
    groups = [
        {key: list({id(p): p for p in value}.values()) if key == "params" else value for key, value in group.items()}
        for group in optimizer.param_groups
    ]
    with contextlib.suppress(Exception):  # a constructor that wants more than parameters says nothing of its state
        optimizer.state.update(type(optimizer)(groups).state)


def _state_kinds(
    optimizer: torch.optim.Optimizer, placeholder: Placeholder, guard: AbstractContextManager[Any]
) -> dict[tuple[int, tuple[int, ...], torch.dtype], dict[str, Any]]:
    """(group, shape, dtype) -> the state of such a parameter after one step."""
    stand_ins: dict[int, torch.Tensor] = {}
    kinds: dict[tuple[int, tuple[int, ...], torch.dtype], torch.Tensor] = {}
    for group_index, group in enumerate(optimizer.param_groups):
        for p in group["params"]:
            kind = (group_index, tuple(p.shape), p.dtype)
            if p.grad is not None and kind not in kinds:
                kinds[kind] = torch.nn.Parameter(placeholder(p))
                kinds[kind].grad = placeholder(p)
            stand_ins[id(p)] = kinds.get(kind, p)
    trial = _twin(optimizer, stand_ins)
    for group in trial.param_groups:
        group["params"] = list({id(p): p for p in group["params"] if any(p is s for s in kinds.values())}.values())
    with guard:
        step(trial)
    return {kind: dict(trial.state[p]) for kind, p in kinds.items()}


def first_state(optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter]) -> dict[int, dict[str, Any]]:
    """id of each parameter -> the state, on the CPU, with which an optimizer begins that does not say it otherwise.

    That is what a twin holds after a step with gradients of zero that moves nothing, before any step is counted.
    """
    copies = {id(p): torch.nn.Parameter(p.detach().cpu().clone()) for p in parameters}
    others = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    trial = _twin(optimizer, others | copies)
    trial.state.clear()
    for group in trial.param_groups:
        group["params"] = [p for p in group["params"] if any(p is c for c in copies.values())]
        for key in ("lr", "weight_decay"):
            if key in group:
                group[key] = type(group[key])(0) if isinstance(group[key], int | float) else group[key] * 0
    for p in copies.values():
        p.grad = torch.zeros_like(p)
    step(trial)
    states = {key: dict(trial.state[p]) for key, p in copies.items()}
    for state in states.values():
        if "step" in state:
            state["step"] = state["step"] - 1
    return states


def state_values(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str], like: Callable[[str], torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Name of each state tensor -> its value after one step with gradients of zero, on the CPU.

    Args:
        optimizer: as `make_optimizer` made it.
        names: id of each parameter that has a gradient -> its name.
        like: gives a CPU tensor that stands for a parameter of a name.
    """
    copies = {key: torch.nn.Parameter(like(name).clone()) for key, name in names.items()}
    trial = _twin(optimizer, {id(p): p for group in optimizer.param_groups for p in group["params"]} | copies)
    trial.state.clear()
    for group in trial.param_groups:
        group["params"] = [p for p in group["params"] if any(p is c for c in copies.values())]
    for p in copies.values():
        p.grad = torch.zeros_like(p)
    step(trial)
    found: dict[str, torch.Tensor] = {}
    for key, name in names.items():
        for path, value in tree_flatten_with_path(dict(trial.state[copies[key]]))[0]:
            if isinstance(value, torch.Tensor):
                found[".".join([name, *(str(getattr(k, "key", getattr(k, "idx", k))) for k in path)])] = value
    return found


def step(optimizer: torch.optim.Optimizer) -> None:
    """One step; an optimizer that cannot take it without a closure or values is refused."""
    try:
        optimizer.step()
    except CaptureError:
        raise
    except Exception as error:
        if asks_for_data(str(error)):
            raise  # whoever captures knows which op it was
        raise CaptureError(
            f"the step of {type(optimizer).__name__} cannot be captured: {str(error).splitlines()[0]}. "
            "Optimizers are supported that step without a closure and keep tensors as their state."
        ) from error


def _seed(key: str, value: Any, placeholder: Placeholder) -> Any:
    """One entry of a parameter's state, made new for one parameter."""

    def seed(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and is_xla(leaf):
            return placeholder(leaf)
        if key == "step" and isinstance(leaf, torch.Tensor):
            return torch.full_like(leaf, STEADY_STEP)
        if key == "step" and isinstance(leaf, int | float):
            return type(leaf)(STEADY_STEP)
        return copy.deepcopy(leaf)

    return tree_map(seed, value)
