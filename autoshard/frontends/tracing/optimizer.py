"""A twin of the user's optimizer over placeholders, in its steady state.

State is discovered, not assumed: a twin takes one step with one parameter of each shape, and its resulting state is
that of every parameter of that shape.
"""

from __future__ import annotations

import copy
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import KeyPath, tree_flatten_with_path, tree_leaves, tree_map, tree_map_with_path

from autoshard.errors import CaptureError
from autoshard.frontends.tracing.device import is_xla
from autoshard.frontends.tracing.refusals import asks_for_data

STEADY_STEP = 10.0
"""Value of step counters: past first steps that compute otherwise (RAdam), and with bias corrections other than 0 and
1,
which torch_xla makes constants of the program, not arguments."""

Placeholder = Callable[[torch.Tensor], torch.Tensor]


def make_optimizer(optimizer: Any, tensors: Mapping[int, torch.Tensor]) -> torch.optim.Optimizer:
    """The optimizer of the captured step, without state.

    Args:
        optimizer: a torch optimizer over the user's parameters (not modified), or a callable from parameters to one.
        tensors: id of the user's parameter -> its placeholder, in the model's order.

    Raises:
        CaptureError: it is neither, or optimizes tensors that are not the model's; or the callable fails.
    """
    if isinstance(optimizer, torch.optim.Optimizer):
        _refuse_foreign(optimizer, set(tensors), tensors.values(), "Build it from model.parameters().")
        return twin_of(optimizer, tensors)
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
    _refuse_foreign(made, ours, tensors.values(), "Build it from the parameters that the callable is given.")
    return made


def _refuse_foreign(
    optimizer: torch.optim.Optimizer, ours: set[int], parameters: Iterable[torch.Tensor], instead: str
) -> None:
    """Refuse tensors beside `ours` (ids) in parameter groups, and of parameters' shapes in attributes."""
    shapes = {p.shape for p in parameters if p.numel() > 1}
    copies = 'Keep copies of parameters, such as f32 masters, in its state: state[p]["master"].'
    foreign = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in ours]
    if foreign:
        raise CaptureError(
            f"the optimizer updates a tensor of shape {tuple(foreign[0].shape)} that is no parameter of the model "
            f"(nor of a loss_fn that is a module); {len(foreign)} such in all. {instead}"
            + (f" {copies}" if foreign[0].shape in shapes else "")
        )
    for name, value in vars(optimizer).items():
        held = () if name in ("state", "param_groups") else tree_leaves(value)
        if any(isinstance(t, torch.Tensor) and t.shape in shapes and id(t) not in ours for t in held):
            raise CaptureError(
                f"{type(optimizer).__name__} keeps tensors as large as parameters in its attribute {name}, which is no "
                f"state of a step. {copies}"
            )


def seed_state(
    optimizer: torch.optim.Optimizer,
    names: Mapping[int, str],
    placeholder: Placeholder,
    guard: AbstractContextManager[Any],
) -> dict[str, tuple[torch.Tensor, str]]:
    """Give `optimizer` its steady state as placeholders; call it when gradients exist.

    Args:
        optimizer: as `make_optimizer` made it.
        names: id of each placeholder parameter -> its name.
        placeholder: makes one like a tensor.
        guard: context of the trial step, which refuses forbidden ops.

    Returns:
        Name of each state tensor on the device -> (the tensor, its parameter's name).
    """
    if any(group.get("fused") for group in optimizer.param_groups):
        raise CaptureError("the optimizer has fused=True, which XLA devices do not support; leave `fused` out")
    of_kind, groups = _after_a_step(optimizer, placeholder, guard)
    seeded: dict[str, tuple[torch.Tensor, str]] = {}
    optimizer.state.clear()  # initial state from the constructor
    for group_index, group in enumerate(optimizer.param_groups):
        group.update({key: _seed(key, value, placeholder) for key, value in changed(group, groups[group_index])})
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
    return ((name, tensor) for name, _, tensor in state_leaves(state, prefix) if is_xla(tensor))


def state_leaves(state: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, KeyPath, torch.Tensor]]:
    """(name, path, tensor) of each tensor of a parameter's state, in lists and dicts too."""
    for path, value in tree_flatten_with_path(dict(state))[0]:
        if isinstance(value, torch.Tensor):
            yield ".".join([prefix, *(str(getattr(k, "key", getattr(k, "idx", k))) for k in path)]), path, value


def put(state: dict[str, Any], path: KeyPath, value: torch.Tensor) -> None:
    """Set an entry of a parameter's state by its path."""
    key: Any = path[0]
    state[key.key] = tree_map_with_path(lambda at, leaf: value if at == path else leaf, dict(state))[key.key]


def twin_of(
    optimizer: torch.optim.Optimizer, tensors: Mapping[int, torch.Tensor], memo: dict[int, Any] | None = None
) -> torch.optim.Optimizer:
    """An optimizer of the same class and settings over other tensors, with no hooks and the state of a new one.

    Inner optimizers (one for each part of the model, say) become twins too, with the same sharing.
    """
    memo = {} if memo is None else memo
    if id(optimizer) in memo:
        made: torch.optim.Optimizer = memo[id(optimizer)]
        return made
    twin = memo[id(optimizer)] = without_hooks(optimizer)
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
        return twin_of(value, tensors, memo) if isinstance(value, torch.optim.Optimizer) else value

    for name, value in twin.__dict__.items():
        if name not in ("state", "param_groups") and any(optimizers_in(value)):
            twin.__dict__[name] = tree_map(inner, value)
    if optimizer.state and not twin.state:
        fill_state(twin, optimizer, _like, tensors)
    return twin


def without_hooks(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """An optimizer with the same attributes and no hooks."""
    twin: torch.optim.Optimizer = object.__new__(type(optimizer))
    twin.__dict__.update({k: v for k, v in optimizer.__dict__.items() if k != "step"})  # schedulers wrap `step`
    for name, value in twin.__dict__.items():
        if "hooks" in name and isinstance(value, dict):
            twin.__dict__[name] = type(value)()
    return twin


def optimizers_in(value: Any) -> list[torch.optim.Optimizer]:
    """The optimizers in a container."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.optim.Optimizer)]


def fill_state(
    optimizer: torch.optim.Optimizer,
    of: torch.optim.Optimizer,
    like: Callable[[Any, torch.Tensor], Any],
    stand_ins: Mapping[int, torch.Tensor],
) -> None:
    """Give a twin the state that its class creates at construction (as Adagrad does).

    Where the class needs more than parameters, copies the form of the state of the original, `of`, with a warning;
    `stand_ins`: id of an original parameter -> the twin's.
    """
    if not of.state:
        return  # its class creates none
    groups = [
        {key: list({id(p): p for p in value}.values()) if key == "params" else value for key, value in group.items()}
        for group in optimizer.param_groups
    ]
    try:
        optimizer.state.update(type(optimizer)(groups).state)
    except Exception as error:
        first = next(iter(str(error).splitlines()), "")
        warnings.warn(
            f"{type(of).__name__} cannot be made of parameters alone ({type(error).__name__}: {first}), so that the "
            "state it begins with is not known; it is taken to be like the state that it holds now. Give the other "
            "arguments of its constructor defaults to have it made",
            stacklevel=2,
        )
        for parameter, state in of.state.items():
            p = stand_ins.get(id(parameter))
            if p is not None:
                optimizer.state[p] = tree_map(partial(_beside, like, p), dict(state))


def _beside(like: Callable[[Any, torch.Tensor], Any], parameter: torch.Tensor, value: Any) -> Any:
    return like(value, parameter)


def _like(value: Any, parameter: torch.Tensor) -> Any:
    """A state entry for a parameter; numbers, and tensors of one, stay on the host."""
    if isinstance(value, torch.Tensor) and value.dim():
        return parameter.detach().new_zeros(value.shape, dtype=value.dtype)
    return copy.deepcopy(value)


def changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """(name, value) of the group settings that a step changed, such as step counts; a count that is a tensor always."""
    return [
        (key, value)
        for key, value in after.items()
        if key != "params"
        and (_counts(key, value) or not _tensors(value))
        and (key not in before or _tensors(before[key]) or before[key] != value)
    ]


def _counts(key: str, value: Any) -> bool:
    return key == "step" and isinstance(value, torch.Tensor) and not value.dim() and value.device.type == "cpu"


def _tensors(value: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(value))


def _after_a_step(
    optimizer: torch.optim.Optimizer, placeholder: Placeholder, guard: AbstractContextManager[Any]
) -> tuple[dict[tuple[int, tuple[int, ...], torch.dtype], dict[str, Any]], list[dict[str, Any]]]:
    """(group, shape, dtype) -> state of such a parameter after one step; and the groups after it."""
    stand_ins: dict[int, torch.Tensor] = {}
    kinds: dict[tuple[int, tuple[int, ...], torch.dtype], torch.Tensor] = {}
    for group_index, group in enumerate(optimizer.param_groups):
        for p in group["params"]:
            kind = (group_index, tuple(p.shape), p.dtype)
            if p.grad is not None and kind not in kinds:
                kinds[kind] = torch.nn.Parameter(placeholder(p))
                kinds[kind].grad = placeholder(p)
            stand_ins[id(p)] = kinds.get(kind, p)
    with guard:  # also while its class makes the state that it begins with
        trial = twin_of(optimizer, stand_ins)
        for group in trial.param_groups:
            group["params"] = list({id(p): p for p in group["params"] if any(p is s for s in kinds.values())}.values())
        step(trial)
    return {kind: dict(trial.state[p]) for kind, p in kinds.items()}, trial.param_groups


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
    trial = twin_of(optimizer, {id(p): p for group in optimizer.param_groups for p in group["params"]} | copies)
    trial.state.clear()
    for group in trial.param_groups:
        group["params"] = [p for p in group["params"] if any(p is c for c in copies.values())]
    for p in copies.values():
        p.grad = torch.zeros_like(p)
    step(trial)
    found: dict[str, torch.Tensor] = {}
    for key, name in names.items():
        found.update({path: value for path, _, value in state_leaves(trial.state[copies[key]], name)})
    return found


def step(optimizer: torch.optim.Optimizer) -> None:
    """Take a step; refuse an optimizer that needs a closure or values for it."""
    try:
        optimizer.step()
    except CaptureError:
        raise
    except Exception as error:
        if asks_for_data(str(error)):
            raise  # the caller knows which op it was
        raise CaptureError(
            f"the step of {type(optimizer).__name__} cannot be captured: {str(error).splitlines()[0]}. "
            "Optimizers are supported that step without a closure and keep tensors as their state."
        ) from error


def _seed(key: str, value: Any, placeholder: Placeholder) -> Any:
    """A new state entry for one parameter."""

    def seed(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and is_xla(leaf):
            return placeholder(leaf)
        if key == "step" and isinstance(leaf, torch.Tensor):
            return torch.full_like(leaf, STEADY_STEP)
        if key == "step" and isinstance(leaf, int | float):
            return type(leaf)(STEADY_STEP)
        return copy.deepcopy(leaf)

    return tree_map(seed, value)
