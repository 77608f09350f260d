"""Scalars that an optimizer computes on the host in each step, for programs that take them as arguments.

PyTorch's optimizers compute step sizes and bias corrections from step counters on the CPU. In a captured program each
is an argument, with the value of the captured step. For other steps a twin of the optimizer, on CPU parameters of one
element, takes them, and the scalars passed to its ops are recorded. Arguments are matched to scalars by their values in
the captured step.
"""

from __future__ import annotations

import contextlib
import copy
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from autoshard.errors import LoweringError
from autoshard.frontends.tracing.optimizer import (
    STEADY_STEP,
    changed,
    fill_state,
    optimizers_in,
    state_leaves,
    without_hooks,
)
from autoshard.lower.begin import LooksAreTrue, create_state
from autoshard.program import Program


class HostScalars:
    """The values of a program's scalar arguments, step after step.

    Args:
        program: a training step, with its scalars' values at capture.
        optimizer: over the model's parameters; its settings are read in every step (schedulers change them), and its
            state gives the number of steps taken. None for a program without optimizer.
        varying: names of the scalars that may differ from step to step: those that the optimizer's ops read.

    Raises:
        LoweringError: a scalar matches none that the twin computes in the captured step.
    """

    def __init__(self, program: Program, optimizer: torch.optim.Optimizer | None, varying: Sequence[str]) -> None:
        """Match arguments to the twin's scalars."""
        self._fixed = dict(program.values)
        self._optimizer = optimizer
        self._places: dict[str, list[int]] = {}
        self._stand_ins: dict[int, torch.nn.Parameter] = {}
        if optimizer is None or not varying:
            return
        states = [a for a in program.arguments if a.role == "optimizer_state"]
        self._on_device = frozenset(a.name.removeprefix(f"{a.of}.") for a in states)
        varying = [name for name in varying if not _unlimited(self._fixed[name])]
        with contextlib.suppress(AssertionError, IndexError):  # states follow from a shape: Adafactor's of matrices
            self._find(varying, whole=False)
        if len(self._places) < len(varying):
            # A scalar may depend on a shape: Muon's steps are longer for tall matrices.
            with contextlib.suppress(
                NotImplementedError, RuntimeError
            ):  # a step that reads data, which there is none of
                self._find(varying, whole=True)
        for name in varying:
            if name not in self._places:
                raise LoweringError(
                    f"{type(optimizer).__name__} computes {name} = {self._fixed[name].item():g} on the host in a way "
                    "that cannot be followed from step to step"
                )
        self._settings = [_apart(group) for group in optimizer.param_groups]
        self._steps = 0

    def _find(self, varying: Sequence[str], *, whole: bool) -> None:
        """Make the twin, and match the arguments to its scalars in the captured step."""
        assert self._optimizer is not None
        steady = small_twin(self._optimizer, fresh=True, whole=whole)
        ops_of_a_step(steady)
        for each in (*steady.state.values(), *steady.param_groups):
            if each in steady.param_groups or "step" not in self._on_device:
                counted(each, STEADY_STEP)
        ops, numbers = ops_of_a_step(steady, self._on_device)
        places = {}
        for name in varying:
            value = self._fixed[name]
            places[name] = [i for i, number in enumerate(numbers) if _same(number, value)] or [
                i for i, number in enumerate(numbers) if _same(number, value.float())
            ]
        if not whole:
            ops_of_a_step(small_twin(self._optimizer), self._on_device)
        stand_ins: dict[int, torch.nn.Parameter] = {}
        self._twin = small_twin(self._optimizer, whole=whole, stand_ins=stand_ins)
        for group, later in zip(self._twin.param_groups, steady.param_groups, strict=True):
            if "step" in later:
                group.setdefault("step", later["step"] * 0)
        self._ops, self._stand_ins = ops, stand_ins
        self._places = {name: found for name, found in places.items() if found}

    def next_step(self) -> dict[str, torch.Tensor]:
        """Every scalar's value in the next step.

        Raises:
            LoweringError: the optimizer runs other ops in this step than in the captured one (RAdam in its first), or
                two scalars that were equal at capture, and so one argument, now differ.
        """
        values = dict(self._fixed)
        if not self._places:
            return values
        assert self._optimizer is not None
        for group, seen, now in zip(self._twin.param_groups, self._settings, self._optimizer.param_groups, strict=True):
            group.update(_apart({key: value for key, value in now.items() if _differs(value, seen.get(key))}))
            seen.update(_apart(now))
        ops, numbers = ops_of_a_step(self._twin, self._on_device)
        self._steps += 1
        if ops != self._ops:
            raise LoweringError(
                f"step {self._steps} of {type(self._optimizer).__name__} is not the captured program: the optimizer "
                "runs other ops in it than in its later steps"
            )
        for name, places in self._places.items():
            found = {_rounded(numbers[i], values[name].dtype) for i in places}
            if len(found) > 1:
                given = " and ".join(f"{number:g}" for number in sorted(found))
                raise LoweringError(
                    f"{name} of the captured step stands for {given} now: two settings of "
                    f"{type(self._optimizer).__name__} were equal when the step was captured, and are not any more; "
                    "capture it with the settings of now"
                )
            values[name] = torch.tensor(found.pop(), dtype=values[name].dtype)
        return values

    def restore(self, optimizer: torch.optim.Optimizer) -> None:
        """Set the counters of an optimizer, in its state and its groups, to their present values."""
        if not self._places:
            return
        assert self._optimizer is not None
        ours = (self._twin.param_groups, self._settings, self._optimizer.param_groups)
        for twin, seen, followed, group in zip(*ours, optimizer.param_groups, strict=True):
            group.update(_apart(dict(changed(seen, twin))))
            if group is followed:
                seen.update(_apart(group))
            for parameter, into in zip(followed["params"], group["params"], strict=True):
                for key, value in self._twin.state.get(self._stand_ins.get(id(parameter)), {}).items():
                    if not isinstance(value, torch.Tensor) or not value.dim():
                        optimizer.state[into][key] = copy.deepcopy(value)


def _differs(value: Any, before: Any) -> bool:
    """Whether a setting of a group has changed; tensors may have been written."""
    if isinstance(value, torch.Tensor) and isinstance(before, torch.Tensor):
        return not torch.equal(value.cpu(), before.cpu())
    return value is not before and (isinstance(value, torch.Tensor) or value != before)


def _apart(group: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a group, with copies of tensors among them."""
    return {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in group.items()}


def _unlimited(value: torch.Tensor) -> bool:
    """Whether a number is what torch_xla gives a clamp without a limit: infinite, or the largest of its dtype."""
    largest = torch.finfo(value.dtype).max if value.is_floating_point() else torch.iinfo(value.dtype).max
    return not bool((value.abs() < largest).all())


def _rounded(number: float, dtype: torch.dtype) -> float:
    """A number rounded to an argument's dtype: 0.01 and 1 - 0.99 are equal in f32."""
    return float(torch.tensor(number, dtype=dtype))


def _same(number: float, value: torch.Tensor) -> bool:
    """Whether a number equals an argument's value, which may be of a narrower dtype."""
    return value.dim() == 0 and bool(torch.tensor(number, dtype=value.dtype) == value)


def small_twin(
    optimizer: torch.optim.Optimizer,
    *,
    fresh: bool = False,
    begun: bool = True,
    whole: bool = False,
    stand_ins: dict[int, torch.nn.Parameter] | None = None,
) -> torch.optim.Optimizer:
    """A twin of an optimizer over parameters of one element, one for each that it would treat differently.

    Its state is that of `optimizer`, initialised where missing; none with `fresh`. Without `begun`, parameters without
    gradients are left out. With `whole`, parameters have their full shapes, and no data. Fills `stand_ins`: id of each
    parameter -> its stand-in.
    """
    small = _shapes if whole else _small
    stand_ins = {} if stand_ins is None else stand_ins
    twin = without_hooks(optimizer)
    state: dict[torch.Tensor, Any] = {}
    groups = []
    for group in optimizer.param_groups:
        made: dict[Any, torch.nn.Parameter] = {}
        stepped = {parameter.dim() for parameter in group["params"] if optimizer.state.get(parameter)}
        for parameter in group["params"]:
            if not parameter.requires_grad or (not begun and parameter.grad is None):
                continue
            if parameter.dim() in stepped and not optimizer.state.get(parameter):
                continue  # the loss does not depend on it: steps skip it
            own = {} if fresh else optimizer.state.get(parameter, {})
            kind = (parameter.shape if whole else parameter.dim(), parameter.dtype, _counter(own))
            if kind not in made:
                scalar = torch.zeros((), dtype=parameter.dtype)
                made[kind] = torch.nn.Parameter(small(parameter.detach(), parameter) if parameter.dim() else scalar)
                made[kind].grad = torch.zeros_like(made[kind])
                if own:
                    state[made[kind]] = {key: small(value, parameter) for key, value in own.items()}
            stand_ins[id(parameter)] = made[kind]
        settings = {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
        groups.append({**settings, "params": list(made.values())})
    twin.param_groups = groups
    twin.state = defaultdict(dict, state)
    _share_with_parts(twin, optimizer)
    if fresh:
        fill_state(twin, optimizer, small, stand_ins)
    elif begun:
        create_state(twin, [each for group in groups for each in group["params"]])
    return twin


def _share_with_parts(twin: torch.optim.Optimizer, of: torch.optim.Optimizer) -> None:
    """Twins of the inner optimizers that share groups and state with the original, `of`, sharing the twin's."""
    group_of = dict(zip(map(id, of.param_groups), twin.param_groups, strict=True))

    def sharing(value: Any) -> Any:
        if not isinstance(value, torch.optim.Optimizer) or any(id(each) not in group_of for each in value.param_groups):
            return value
        part = without_hooks(value)
        part.param_groups = [group_of[id(group)] for group in value.param_groups]
        part.state = twin.state if value.state is of.state else defaultdict(dict)
        return part

    for name, value in twin.__dict__.items():
        if any(optimizers_in(value)):
            twin.__dict__[name] = tree_map(sharing, value)


def _counter(state: Mapping[str, Any]) -> float | None:
    step = state.get("step")
    return float(step) if step is not None else None


def _small(value: Any, parameter: torch.Tensor) -> Any:
    """One entry of a parameter's state, for a parameter of one element."""

    return _reduced(value, lambda leaf: torch.zeros([1] * leaf.dim(), dtype=leaf.dtype))


def _shapes(value: Any, parameter: torch.Tensor) -> Any:
    """The same in full shape without data."""
    return _reduced(value, lambda leaf: torch.empty(leaf.shape, dtype=leaf.dtype, device="meta"))


def _reduced(value: Any, of_tensor: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    def made(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.dim() > 0:
            return of_tensor(leaf)
        return leaf.detach().cpu().clone() if isinstance(leaf, torch.Tensor) else copy.deepcopy(leaf)

    return tree_map(made, value)


def counted(state: dict[str, Any], step: float) -> None:
    """Set a state's step counter."""
    counter = state.get("step")
    if isinstance(counter, torch.Tensor):
        counter.fill_(step)
    elif counter is not None:
        state["step"] = type(counter)(step)


def ops_of_a_step(optimizer: torch.optim.Optimizer, on_device: Collection[str] = ()) -> tuple[list[str], list[float]]:
    """Take a step and record the ops that it runs, with their host scalars.

    Parameters, gradients, states named in `on_device` and what is computed from them count as on the device. Global
    optimizer hooks are not called.
    """
    step = type(optimizer).step
    inner = getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step
    device = [p for group in optimizer.param_groups for p in group["params"]]
    device += [p.grad for p in device if p.grad is not None]
    for state in optimizer.state.values():
        device += [tensor for name, _, tensor in state_leaves(state, "") if tensor.dim() or name[1:] in on_device]
    with LooksAreTrue(), _Numbers(device) as seen, torch.no_grad():
        inner(optimizer)
    return seen.ops, seen.numbers


class _Numbers(TorchDispatchMode):  # type: ignore[misc]
    """Records ops with every number, and the value of every 0-dim host tensor, among their arguments."""

    def __init__(self, device: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.ops: list[str] = []
        self.numbers: list[float] = []
        self.device = {id(tensor): tensor for tensor in device}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(str(func))
        leaves = tree_leaves((args, kwargs or {}))
        for leaf in leaves:
            scalar = isinstance(leaf, torch.Tensor) and leaf.dim() == 0 and leaf.is_floating_point()
            if (scalar and id(leaf) not in self.device) or (
                isinstance(leaf, float | int) and not isinstance(leaf, bool)
            ):
                self.numbers.append(float(leaf))
        result = func(*args, **(kwargs or {}))
        if any(id(leaf) in self.device for leaf in leaves):
            made = (leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))
            self.device.update({id(leaf): leaf for leaf in made})
        return result
