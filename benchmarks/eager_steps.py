"""A captured training step beside the same steps in eager PyTorch, tensor by tensor; used by `eager.py` and by tests.

A *pair* is a model and an optimizer. PyTorch trains it as it is and, as the yardstick, all in float64; then what
capture and lowering make of it takes the same steps with the same batches. After each step the loss and every
parameter, buffer and optimizer state are compared. A tensor may be off from the exact one by 1e-5 of its largest
element and `NOISE` times what PyTorch is off by itself until then; where that is not enough, also in runs whose every
result is off in its last bits (`rounding.LastBits`). So that such an allowance excuses nothing, a tensor is *untold*
where it has not moved by three times as much; what PyTorch left as it was, to the bit, has to be left so.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten_with_path, tree_map

import autoshard
from autoshard.capture.inputs import input_names, split_inputs
from autoshard.capture.program import Program
from autoshard.capture.sources import Source
from autoshard.lower.arrays import to_torch
from autoshard.mesh import Mesh
from autoshard.plan import Plan
from autoshard.verify.captured import CapturedStep, held_tensors
from autoshard.verify.rounding import NEIGHBOURS, NOISE, LastBits, apart, wide
from autoshard.verify.run import TOLERANCE
from autoshard.verify.run_worker import eager_step, random_batch

STEPS = 3
TOLD = 3.0
DEVICE = Path(__file__).resolve().parent / "zoo_device.toml"

Key = tuple[str, str]
Numbers = Mapping[Key, Tensor]


@dataclass(frozen=True)
class Comparison:
    """What came of one pair and output.

    Attributes:
        tensors: compared, over all steps.
        worst: the largest difference, as a part of what is allowed; above 1 they differ.
        where: the tensor and step that has it, and by how much.
        untold: names of tensors that moved too little to tell an update from none.
        neighbours: runs off in their last bits that were looked at.
    """

    tensors: int
    worst: float
    where: str
    untold: tuple[str, ...]
    neighbours: int = 0

    @property
    def equal(self) -> bool:
        """Whether all is as in PyTorch."""
        return self.tensors > 0 and self.worst <= 1


@dataclass
class Pair:
    """A model and an optimizer, trained by PyTorch.

    Attributes:
        source: the model with weights; `optimizer` a callable from parameters to one.
        warm: steps that PyTorch takes before the captured program does, with which an optimizer reaches the steps that
            are captured (RAdam's are others at first) and has a state that is not zero.
    """

    source: Source
    warm: int = 1
    seed: int = 0
    batches: list[Any] = field(init=False)

    def __post_init__(self) -> None:
        """Draw the batches."""
        self.batches = [random_batch(self.source, self.source.model, number) for number in range(self.warm + STEPS)]

    def made(self, steps: int = 0) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        """The model and its optimizer after so many steps."""
        model = copy.deepcopy(self.source.model)
        optimizer = self.source.optimizer(list(model.parameters()))
        for batch in self.batches[:steps]:
            eager_step(model, optimizer, batch, self.source.loss_fn)
        return model, optimizer

    @cached_property
    def eager(self) -> list[Numbers]:
        """PyTorch's numbers before the first step, and after each."""
        return self._trained(*self.made(), self.batches)

    @cached_property
    def exact(self) -> list[Numbers]:
        """The same in float64."""
        model, optimizer = self.made()
        model.double()
        for state in optimizer.state.values():
            state.update({key: value if key == "step" else wide(value) for key, value in state.items()})
        torch.set_default_dtype(torch.float64)  # for what the model makes itself
        try:
            with _Wide():
                return self._trained(model, optimizer, wide(self.batches))
        except RuntimeError:  # a model that mixes in float32 tensors of its own
            return self.eager
        finally:
            torch.set_default_dtype(torch.float32)

    def _trained(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, batches: list[Any]) -> list[Numbers]:
        numbers = [_numbers(model, optimizer)]
        for batch in batches:
            loss = eager_step(model, optimizer, batch, self.source.loss_fn)
            numbers.append({("loss", ""): loss.detach().clone(), **_numbers(model, optimizer)})
        return numbers

    def captured(self, frontend: str) -> Program:
        """The program of its step."""
        model, optimizer = self.made()
        return autoshard.capture(
            model, self.batches[0], loss_fn=self.source.loss_fn, optimizer=optimizer, train=True, frontend=frontend
        )

    def inputs(self, batch: Any, program: Program) -> dict[str, Tensor]:
        """Those tensors of a batch that are arguments of the program, by name."""
        split = split_inputs(self.source.model, batch, self.source.loss_fn)
        found = {}
        for name, value in input_names(self.source.model, split, self.source.loss_fn):
            for path, leaf in tree_flatten_with_path(value)[0]:
                words = (str(getattr(key, "key", getattr(key, "idx", key))) for key in path)
                found[".".join((name, *words))] = leaf
        return {name: found[name] for name in program.inputs if any(a.name == name for a in program.arguments)}

    def compared(self, found: list[Numbers], first: int) -> Comparison:
        """Numbers after the steps from `first` on, beside PyTorch's."""
        runs: list[list[Numbers]] = []
        result = self._judged(found, first, runs)
        while not result.equal and math.isfinite(result.worst) and len(runs) < NEIGHBOURS:
            with LastBits(len(runs)):
                runs.append(self._trained(*self.made(), self.batches))
            result = replace(self._judged(found, first, runs), neighbours=len(runs))
        return result

    def _judged(self, found: list[Numbers], first: int, neighbours: list[list[Numbers]]) -> Comparison:
        count, worst, where = 0, -1.0, ""
        untold: dict[str, None] = {}
        own: dict[Key, float] = defaultdict(float)
        begun = self.eager[first]
        for step, ours in enumerate(found, first + 1):
            exact = self.exact[step]
            for key, theirs in self.eager[step].items():
                name = " ".join(filter(None, key))
                if key not in ours:
                    if theirs.dim() == 0:
                        continue  # counters are the host's
                    return Comparison(count, math.inf, f"{name} is not in the program", ())
                count += 1
                moved = apart(theirs, begun[key]) if key in begun else _largest(theirs)
                off = apart(ours[key], exact[key])
                alone = [apart(run[step][key], exact[key]) for run in (self.eager, *neighbours)]
                own[key] = max(own[key], *alone)
                allowed = TOLERANCE * _largest(exact[key]) + NOISE * own[key]
                if not theirs.is_floating_point() or not moved:
                    off, allowed = float(not torch.equal(ours[key], theirs)), 0.0
                elif moved < TOLD * allowed:
                    untold[name] = None
                part = off / allowed if allowed else math.inf if off else 0.0
                if part > worst:
                    worst = part
                    where = f"{name} after step {step}: off by {off:.1e}, {allowed:.1e} is allowed"
        return Comparison(count, worst, where, tuple(untold))


class _Wide(TorchFunctionMode):
    """In this mode casts to less than float64 are casts to that."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function."""
        if func in (Tensor.bfloat16, Tensor.half, Tensor.float):
            return args[0].double()

        def wider(leaf: Any) -> Any:
            return torch.float64 if isinstance(leaf, torch.dtype) and leaf.is_floating_point else leaf

        return func(*tree_map(wider, args), **tree_map(wider, kwargs or {}))


def _largest(tensor: Tensor) -> float:
    return float(tensor.double().abs().max()) if tensor.numel() else 0.0


def _numbers(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[Key, Tensor]:
    return {key: tensor.clone() for key, tensor in held_tensors(model, optimizer).items()}


# What is compared.


def of_program(pair: Pair, program: Program, plan: Plan | None = None) -> Comparison:
    """The captured module on one device; under a plan, what `autoshard lower` writes on as many as the mesh has."""
    model, optimizer = pair.made(pair.warm)
    step = CapturedStep(program, optimizer, plan)
    state = step.begin(model, optimizer)
    found = []
    for batch in pair.batches[pair.warm :]:
        state, made = step(state, pair.inputs(batch, program))
        found.append(_found(program, model, optimizer, state, made))
    return pair.compared(found, pair.warm)


def of_lower(pair: Pair, program: Program) -> Comparison:
    """The module that `autoshard lower` writes, on the devices of its mesh."""
    return of_program(pair, program, planned(program))


def of_to_jax(pair: Pair, program: Program) -> Comparison:
    """`plan.to_jax()`, from the first step on where it is captured; PyTorch takes the last one with what that gives."""
    first = 0 if pair.warm == 1 else pair.warm
    model, optimizer = pair.made(first)
    step = planned(program).to_jax().step(program, optimizer, precision="highest")
    state = step.place(model, optimizer)
    found = []
    for batch in pair.batches[first : pair.warm + STEPS - 1]:
        state, made = step(state, pair.inputs(batch, program))
        found.append(_found(program, model, optimizer, step.fetch(state), made))
    step.restore(state, model, optimizer)
    loss = eager_step(model, optimizer, pair.batches[-1], pair.source.loss_fn)
    return pair.compared([*found, {("loss", ""): loss.detach(), **_numbers(model, optimizer)}], first)


def _found(
    program: Program,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    state: Mapping[str, Any],
    made: Mapping[str, Any],
) -> dict[Key, Tensor]:
    """The numbers of a step: what is no argument of the program stays as the model has it."""
    roles: dict[str, str] = {argument.name: argument.role for argument in program.arguments}
    kept = {
        (kind, name): each for (kind, name), each in _numbers(model, optimizer).items() if kind != "optimizer_state"
    }
    given = {(roles[name], name): to_torch(np.asarray(array)) for name, array in state.items()}
    return {**kept, **given, ("loss", ""): to_torch(np.asarray(made["loss"]))}


OUTPUTS: dict[str, Callable[[Pair, Program], Comparison]] = {
    "program": of_program,
    "lower": of_lower,
    "to_jax": of_to_jax,
}


def planned(program: Program) -> Plan:
    """A plan on 2x4 that splits much of a small program."""
    mesh = Mesh.parse("2x4", device=str(DEVICE))
    return autoshard.plan_program(program, mesh, rivals=False, time_limit=60)
