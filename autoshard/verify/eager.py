"""Compares a captured program's steps with PyTorch's own, tensor by tensor.

PyTorch runs the steps in their own precision and, as the reference, in float64; then the captured or lowered program
runs them with the same batches. After each step, results and every parameter, buffer and optimizer state are compared.
The tolerance of a tensor is 1e-5 of its largest element plus `ROUNDING_SLACK` times PyTorch's own error so far; where
that is exceeded, also the errors of runs perturbed in their last bits (`rounding.LastBits`). A tensor is *untold* where
it has moved by less than three times its tolerance; what PyTorch leaves unchanged must stay unchanged to the bit.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten_with_path, tree_leaves, tree_map

from autoshard.frontends.switches.autocast import autocast_on
from autoshard.frontends.tracing.inputs import input_names, key_name, split_inputs
from autoshard.frontends.tracing.optimizer import make_optimizer
from autoshard.lower.arrays import to_torch
from autoshard.plans.value import Plan
from autoshard.program import Program
from autoshard.sources import Source
from autoshard.verify.captured import CapturedStep, held_tensors
from autoshard.verify.rounding import NEIGHBOURS, ROUNDING_SLACK, LastBits, apart, largest_of, wide
from autoshard.verify.run import TOLERANCE

TOLD = 3.0

TensorKey = tuple[str, str]
Numbers = Mapping[TensorKey, Tensor]
"""(`loss`, `output`, `gradient`, `parameter`, `buffer` or `optimizer_state`; which one) -> its value after a step."""


@dataclass(frozen=True)
class Off:
    """A tensor whose error exceeds 1e-5 of its largest element, in its worst step.

    Attributes:
        key: of the tensor.
        step: after which, counted from 1.
        off: error against float64.
        allowed: tolerance.
        largest: element of the exact tensor.
        scale: the largest element of all gradients, or states of its name, if it is one; else `largest`.
    """

    key: TensorKey
    step: int
    off: float
    allowed: float
    largest: float
    scale: float

    @property
    def share(self) -> float:
        """Error over tolerance."""
        return self.off / self.allowed if self.allowed else math.inf


@dataclass(frozen=True)
class Comparison:
    """Outcome of the comparison of a program with PyTorch.

    Attributes:
        tensors: compared, over all steps.
        worst: the largest error over tolerance; above 1 they differ.
        where: its tensor, step and error.
        untold: names of tensors that moved too little to distinguish an update from none.
        neighbours: number of perturbed runs.
        off: tensors with errors above 1e-5, tolerated or not.
        names: number of tensors.
    """

    tensors: int
    worst: float
    where: str
    untold: tuple[str, ...]
    neighbours: int = 0
    off: tuple[Off, ...] = ()
    names: int = 0

    @property
    def equal(self) -> bool:
        """Whether all errors are within tolerance."""
        return self.tensors > 0 and self.worst <= 1


@dataclass
class EagerSteps:
    """A program's steps in PyTorch.

    Attributes:
        source: the model, its loss and optimizer; without an optimizer its gradients are compared, and without
            training its outputs.
        batches: one a step.
        warm: steps in PyTorch before the comparison, after which the optimizer's step is the captured one (RAdam's
            first steps differ) and its state is not zero.
        model: with weights; by default that of the source.
        exact_from: the step at which the float64 run starts, from float32's state.
    """

    source: Source
    batches: list[Any] = field(repr=False)
    warm: int = 1
    model: torch.nn.Module | None = None
    exact_from: int = 0

    def made(self, steps: int = 0) -> tuple[torch.nn.Module, torch.optim.Optimizer | None]:
        """The model and its optimizer after that many steps."""
        model = copy.deepcopy(self.source.model if self.model is None else self.model)
        optimizer = self.source.optimizer
        if optimizer is not None:
            ours = zip(self.source.model.parameters(), model.parameters(), strict=True)
            optimizer = make_optimizer(optimizer, {id(old): new for old, new in ours})
        for batch in self.batches[:steps]:
            self._step(model, optimizer, batch)
        return model, optimizer

    @cached_property
    def eager(self) -> list[Numbers]:
        """PyTorch's tensors before the first step, and after each."""
        return list(self.taken(*self.made(), self.batches))

    @cached_property
    def exact(self) -> list[Numbers]:
        """The same in float64."""
        model, optimizer = self.made(self.exact_from)
        model.double()
        for state in optimizer.state.values() if optimizer is not None else ():
            state.update({key: value if key == "step" else wide(value) for key, value in state.items()})
        torch.set_default_dtype(torch.float64)  # for tensors that the model creates itself
        try:
            with _Wide():
                return self._from_there(model, optimizer, wide(self.batches))
        except RuntimeError:  # a model that mixes in float32 tensors of its own
            return self.eager
        finally:
            torch.set_default_dtype(torch.float32)

    def _from_there(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, batches: list[Any]
    ) -> list[Numbers]:
        taken = self.taken(model, optimizer, batches[self.exact_from :])
        return [*self.eager[: self.exact_from], *taken]

    def _step(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, batch: Any) -> Any:
        return eager_step(model, optimizer, batch, self.source.loss_fn, self.source.train)

    def taken(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, batches: list[Any]
    ) -> Iterator[Numbers]:
        """A model's tensors in PyTorch before the first of these steps, and after each."""
        yield held(model, optimizer)
        for batch in batches:
            result = self._step(model, optimizer, batch)
            made: dict[TensorKey, Tensor] = {}
            if not self.source.train:
                made = {("output", name): leaf.detach().clone() for name, leaf in named_leaves(result)}
            else:
                made["loss", ""] = result.detach().clone()
            if self.source.train and optimizer is None:
                graded = ((name, p.grad) for name, p in model.named_parameters())
                made |= {("gradient", name): each.detach().clone() for name, each in graded if each is not None}
            yield {**made, **held(model, optimizer)}

    def inputs(self, batch: Any, program: Program) -> dict[str, Tensor]:
        """The tensors of a batch that are arguments of the program, by the names that it has for them."""
        split = split_inputs(self.source.model, batch, self.source.loss_fn)
        given = input_names(self.source.model, split, self.source.loss_fn)
        leaves = [leaf for name, value in given for _, leaf in named_leaves(value, "")]
        arguments = {argument.name for argument in program.arguments}
        return {name: leaf for name, leaf in zip(program.inputs, leaves, strict=True) if name in arguments}

    def of_program(self, program: Program, plan: Plan | None = None) -> Comparison:
        """Run the captured module on one device; with a plan, what `autoshard lower` writes, on those of its mesh."""
        model, optimizer = self.made(self.warm)
        step = CapturedStep(program, optimizer, plan)
        state = step.begin(model, optimizer)
        found = []
        for batch in self.batches[self.warm :]:
            state, made = step(state, self.inputs(batch, program))
            found.append(numbers_of(program, model, optimizer, state, made))
        return self.compared(found, self.warm)

    def compared(self, found: Sequence[Numbers], first: int) -> Comparison:
        """Compare tensors after the steps from `first` on with PyTorch's."""
        runs: list[list[Numbers]] = []
        result = self._judged(found, first, runs)
        while not result.equal and math.isfinite(result.worst) and len(runs) < NEIGHBOURS:
            begun = self.made(self.exact_from)
            with LastBits(len(runs)):
                runs.append(self._from_there(*begun, self.batches))
            result = replace(self._judged(found, first, runs), neighbours=len(runs))
        return result

    def _judged(self, found: Sequence[Numbers], first: int, neighbours: list[list[Numbers]]) -> Comparison:
        count, worst, where = 0, -1.0, ""
        untold: dict[str, None] = {}
        own: dict[TensorKey, float] = defaultdict(float)
        off_in: dict[TensorKey, Off] = {}
        begun = self.eager[first]
        for step, ours in enumerate(found, first + 1):
            exact = self.exact[step]
            scales = _scales(exact)
            for key, theirs in self.eager[step].items():
                if key not in ours:
                    if theirs.dim() == 0 and key[0] == "optimizer_state":
                        continue  # counters are on the host
                    lost = Off(key, step, math.inf, 0.0, largest_of(theirs), scales[key])
                    return Comparison(count, math.inf, f"{named(key)} is not in the program", (), 0, (lost,), len(own))
                count += 1
                moved = apart(theirs, begun[key]) if key in begun else largest_of(theirs)
                alone = [apart(run[step][key], exact[key]) for run in (self.eager, *neighbours)]
                own[key] = max(own[key], *alone)
                largest = largest_of(exact[key])
                allowed = TOLERANCE * largest + ROUNDING_SLACK * own[key]
                here = Off(key, step, apart(ours[key], exact[key]), allowed, largest, scales[key])
                if not (theirs.is_floating_point() or theirs.is_complex()) or not moved:
                    here = replace(here, off=0.0 if torch.equal(ours[key], theirs) else math.inf, allowed=0.0)
                elif moved < TOLD * here.allowed:
                    untold[named(key)] = None
                part = here.share if here.off else 0.0
                if here.off > TOLERANCE * largest and (key not in off_in or part > off_in[key].share):
                    off_in[key] = here
                if part > worst:
                    worst = part
                    where = f"{named(key)} after step {step}: off by {here.off:.1e}, {here.allowed:.1e} is allowed"
        return Comparison(count, worst, where, tuple(untold), 0, tuple(off_in.values()), len(own))


class _Wide(TorchFunctionMode):  # type: ignore[misc]
    """In this mode casts to narrower floats are casts to float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function."""
        if func in (Tensor.bfloat16, Tensor.half, Tensor.float):
            return args[0].double()

        def wider(leaf: Any) -> Any:
            return torch.float64 if isinstance(leaf, torch.dtype) and leaf.is_floating_point else leaf

        return func(*tree_map(wider, args), **tree_map(wider, kwargs or {}))


def eager_step(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    batch: Any,
    loss_fn: Callable[..., Any] | None,
    train: bool = True,
) -> Any:
    """An ordinary training step, returning the loss; or a forward pass, returning its output.

    Autocast, of whichever device, is that of the batch's.
    """
    on_xla = any(isinstance(leaf, Tensor) and leaf.is_xla for leaf in tree_leaves(batch))
    with autocast_on("xla" if on_xla else "cpu"):
        return _step(model, optimizer, batch, loss_fn, train)


def _step(model: Any, optimizer: Any, batch: Any, loss_fn: Any, train: bool) -> Any:
    inputs = split_inputs(model, batch, loss_fn)
    if optimizer is not None:
        optimizer.zero_grad()
    model.zero_grad()
    with torch.set_grad_enabled(train):
        output = model(*inputs.args, **inputs.kwargs)
        if not train:
            return output
        if loss_fn is not None:
            loss = loss_fn(output, *inputs.loss_args, **dict(inputs.loss_kwargs or {}))
        elif isinstance(output, Mapping) and output.get("loss") is not None:
            loss = output["loss"]
        else:
            loss = getattr(output, "loss", output)
    loss.backward()
    if optimizer is not None:
        optimizer.step()
    return loss


def held(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[TensorKey, Tensor]:
    """Copies of parameters, buffers and optimizer states."""
    return {key: tensor.clone() for key, tensor in held_tensors(model, optimizer).items()}


def numbers_of(
    program: Program,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    state: Mapping[str, Any],
    made: Mapping[str, Any],
) -> dict[TensorKey, Tensor]:
    """The tensors of a program's step; what is no argument of it keeps the model's value."""
    roles: dict[str, str] = {argument.name: argument.role for argument in program.arguments}
    kept = {key: each for key, each in held(model, optimizer).items() if key[0] != "optimizer_state"}
    given = {(roles[name], name): to_torch(np.asarray(array)) for name, array in state.items()}
    kinds = {output.name: output.role for output in program.outputs if output.updates is None}
    results: dict[TensorKey, Tensor] = {}
    for name, array in made.items():
        of_kind = kinds[name]
        key = ("loss", "") if of_kind == "loss" else (str(of_kind), name)
        if of_kind == "output" and program.kind == "train":
            key = ("gradient", name.removesuffix(".grad"))
        results[key] = to_torch(np.asarray(array))
    return {**kept, **given, **results}


def named_leaves(tree: Any, alone: str = "output") -> Iterator[tuple[str, Tensor]]:
    """(Path, tensor) of each tensor in a container, named as in capture; `alone` names a bare tensor."""
    for path, leaf in tree_flatten_with_path(tree)[0]:
        if isinstance(leaf, Tensor):
            yield ".".join(key_name(key) for key in path) or alone, leaf


def named(key: TensorKey) -> str:
    """The name in messages."""
    return " ".join(filter(None, key))


def _scales(exact: Numbers) -> dict[TensorKey, float]:
    largest = {key: largest_of(tensor) for key, tensor in exact.items()}
    of_sort: dict[str, float] = {}

    def sort(key: TensorKey) -> str:
        return {"gradient": "gradient", "optimizer_state": key[1].rpartition(".")[2]}.get(key[0], named(key))

    for key, each in largest.items():
        of_sort[sort(key)] = max(each, of_sort.get(sort(key), 0.0))
    return {key: of_sort[sort(key)] for key in largest}
