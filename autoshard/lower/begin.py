"""Creates an optimizer's state as its own first step would.

torch's own optimizers have `_init_group`. For others a twin takes a step with zero gradients, and each entry of its
state is recorded when it is first set, before the step writes into it: zeros, a copy of the parameter, a counter of 0.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from autoshard.errors import LoweringError
from autoshard.frontends.tracing.optimizer import optimizers_in, step, twin_of


def create_state(optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter]) -> None:
    """Create the missing state of `parameters` as the optimizer's first step would.

    SGD's momentum buffer starts as its first gradient; zeros give the same first step, except with dampening.

    Raises:
        LoweringError: SGD with dampening; an optimizer of the user's own whose trial step failed.
    """
    if not is_torchs_own(optimizer):
        begin_by_trial(optimizer, parameters)
    elif isinstance(optimizer, torch.optim.SGD):
        _begin_momentum(optimizer, {id(each) for each in parameters})
    elif not all(optimizer.state.get(each) for each in parameters):
        _begin_groups(optimizer, {id(each) for each in parameters})


def is_torchs_own(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer is one of torch's own, with a known initial state."""
    own = isinstance(optimizer, torch.optim.SGD) or hasattr(optimizer, "_init_group")
    return own and type(optimizer).step.__module__.startswith("torch.optim.")


def dampened(group: Mapping[str, Any]) -> bool:
    """Whether SGD's first step uses another momentum than later ones."""
    return bool(group["momentum"] and group["dampening"])


def _begin_momentum(optimizer: torch.optim.SGD, wanted: Collection[int]) -> None:
    for group in optimizer.param_groups:
        several = [each for each in group["params"] if id(each) in wanted]
        if several and dampened(group):
            raise LoweringError(
                "SGD with dampening does not dampen its first step, so that its first step is another program than "
                "the planned one; use dampening=0"
            )
        for each in several if group["momentum"] else ():
            if optimizer.state[each].get("momentum_buffer") is None:
                optimizer.state[each]["momentum_buffer"] = torch.zeros_like(each).detach()


def _begin_groups(optimizer: Any, wanted: Collection[int]) -> None:
    begin = optimizer._init_group
    lists = len(inspect.signature(begin).parameters) - 1
    gradients = [(each, each.grad) for group in optimizer.param_groups for each in group["params"]]
    try:
        for each, _ in gradients:
            each.grad = torch.zeros_like(each) if id(each) in wanted else None
        for group in optimizer.param_groups:
            begin(group, *([] for _ in range(lists)))
    finally:
        for each, gradient in gradients:
            each.grad = gradient


class LooksAreTrue(TorchDispatchMode):  # type: ignore[misc]
    """Where an optimizer looks at tensors without data (Adafactor: is a parameter longer than a limit?), they are."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op."""
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta and args[0].dtype == torch.bool:
            return True
        return func(*args, **(kwargs or {}))


def begin_by_trial(
    optimizer: torch.optim.Optimizer,
    parameters: Collection[torch.nn.Parameter],
    copied: Callable[[torch.Tensor], torch.Tensor] = torch.clone,
) -> None:
    """Create the missing state by a trial step of a twin, whose parameters `copied` makes.

    Raises:
        LoweringError: that step failed, or a step from that state is another than the first.
    """
    if not parameters:
        return
    with torch.no_grad():
        copies = {id(p): torch.nn.Parameter(copied(p.detach())) for p in parameters}
    try:
        with LooksAreTrue():
            made = _first_state(optimizer, copies)
            same = _begins_so(optimizer, {id(p): p for p in parameters}, made, copied)
    except Exception as error:
        raise LoweringError(
            f"{type(optimizer).__name__} does not say how its state begins, and a trial step failed "
            f"({str(error).splitlines()[0] if str(error) else type(error).__name__}); run a step of it before applying "
            "the plan, or load its state"
        ) from error
    if not same:
        raise LoweringError(
            f"the first step of {type(optimizer).__name__} is another one than its later steps, which the plan is for: "
            "its state begins as a gradient, or as an updated parameter; run a step of it before applying the plan, or "
            "load its state"
        )
    for p in parameters:
        for key, value in made[id(p)].items():
            optimizer.state[p].setdefault(key, value)


def _first_state(
    optimizer: torch.optim.Optimizer, copies: Mapping[int, torch.nn.Parameter]
) -> dict[int, Mapping[str, Any]]:
    """id of each parameter -> the initial state that a step of a twin over `copies` sets."""
    others = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    trial = twin_of(optimizer, {**others, **copies})
    for group in trial.param_groups:
        group["params"] = [p for p in group["params"] if any(p is c for c in copies.values())]
    begun = _PerParameter()
    for p in copies.values():
        if p in trial.state:  # an optimizer may ask whether it is
            begun[p] = trial.state[p]
        p.grad = torch.zeros_like(p)
    _share_state(trial, trial.state, begun)
    step(trial)
    return {key: begun.first.get(id(p), {}) for key, p in copies.items()}


def _begins_so(
    optimizer: torch.optim.Optimizer,
    wanted: Mapping[int, torch.nn.Parameter],
    made: Mapping[int, Mapping[str, Any]],
    copied: Callable[[torch.Tensor], torch.Tensor],
) -> bool:
    """Whether a step from the state `made` is the first step, of the least parameters of each group and rank."""
    others = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    least: dict[tuple[int, int], int] = {}
    for number, group in enumerate(optimizer.param_groups):
        for key in sorted((id(p) for p in group["params"] if id(p) in wanted), key=lambda key: wanted[key].numel()):
            least.setdefault((number, wanted[key].dim()), key)
    if any(wanted[key].is_meta or hasattr(wanted[key], "full_tensor") for key in least.values()):
        return True  # nothing to compare
    ends: list[list[Any]] = []
    for begun in (False, True):
        chosen = {key: torch.nn.Parameter(copied(wanted[key].detach())) for key in least.values()}
        trial = twin_of(optimizer, {**others, **chosen})
        for group in trial.param_groups:
            group["params"] = [p for p in group["params"] if any(p is each for each in chosen.values())]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            for key, p in chosen.items():
                p.grad = torch.rand_like(p) - 0.4
                if begun and made[key]:
                    trial.state[p] = tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, {**made[key]})
            step(trial)
        ends.append([leaf for p in chosen.values() for leaf in (p, *tree_leaves(trial.state.get(p, {})))])
    return len(ends[0]) == len(ends[1]) and all(map(_close, *ends))


def _close(one: Any, two: Any) -> bool:
    if not isinstance(one, torch.Tensor) or not isinstance(two, torch.Tensor) or one.shape != two.shape:
        return type(one) is type(two) and not isinstance(one, torch.Tensor)
    one, two = one.to(torch.complex128), two.to(torch.complex128)
    return bool(torch.allclose(one, two, rtol=1e-3, atol=1e-6, equal_nan=True))


def _share_state(optimizer: torch.optim.Optimizer, shared: Any, begun: _PerParameter) -> None:
    """Replace a state by `begun`, in an optimizer and in the inner optimizers that share it."""
    if optimizer.state is shared:
        optimizer.state = begun
        for part in optimizers_in(list(optimizer.__dict__.values())):
            _share_state(part, shared, begun)


class _PerParameter(dict[Any, Any]):
    """An optimizer's state that records the initial state of each parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first: dict[int, dict[str, Any]] = {}

    def __missing__(self, parameter: torch.Tensor) -> Any:
        self[parameter] = {}
        return self[parameter]

    def __setitem__(self, parameter: torch.Tensor, state: Any) -> None:
        super().__setitem__(parameter, _State(state, self.first.setdefault(id(parameter), {})))

    def setdefault(self, parameter: torch.Tensor, state: Any = None) -> Any:
        """Through `__setitem__`."""
        if parameter not in self:
            self[parameter] = state
        return self[parameter]


class _State(dict[Any, Any]):
    """The state of one parameter, with copies of its entries' initial values."""

    def __init__(self, state: Mapping[str, Any] | None, first: dict[str, Any]) -> None:
        super().__init__()
        self.first = first
        self.update(state or {})

    def __setitem__(self, key: str, value: Any) -> None:
        if key not in self.first:
            self.first[key] = tree_map(lambda x: x.detach().clone() if isinstance(x, torch.Tensor) else x, value)
        super().__setitem__(key, value)

    def setdefault(self, key: str, value: Any = None) -> Any:
        """Through `__setitem__`."""
        if key not in self:
            self[key] = value
        return self[key]

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Through `__setitem__`."""
        for key, value in dict(*args, **kwargs).items():
            self[key] = value

    def __ior__(self, other: Any) -> Any:  # type: ignore[misc]
        """Through `__setitem__`."""
        self.update(other)
        return self
