"""Moves a model and its optimizer to the XLA devices, sharded as planned, in place.

Parameters stay the same objects (their contents are swapped), so that optimizers, schedulers and weight averages that
hold them keep working.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TypeVar

import torch
from torch.utils._pytree import KeyPath

from autoshard.errors import LoweringError
from autoshard.frontends.tracing.optimizer import put, state_leaves
from autoshard.lower.begin import begin_by_trial, create_state, dampened, is_torchs_own
from autoshard.lower.torch_xla import runtime
from autoshard.lower.torch_xla.annotator import format_tensor
from autoshard.mesh import Mesh
from autoshard.plans.value import Plan, PlanMismatchError, TensorPlan

_T = TypeVar("_T")


class Placed:
    """The model and optimizer that a plan was applied to; held weakly."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        """Weak references only."""
        self._model = weakref.ref(model)
        self._optimizer = weakref.ref(optimizer) if optimizer is not None else None

    @property
    def model(self) -> torch.nn.Module:
        """The model; LoweringError when it is gone."""
        return self._alive(self._model)

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer, if there is one; LoweringError when it is gone."""
        return None if self._optimizer is None else self._alive(self._optimizer)

    def arguments(self) -> dict[str, torch.Tensor]:
        """The tensors of parameters, buffers and optimizer state on the devices, by name, as they are now."""
        found: dict[str, torch.Tensor] = dict(self.model.named_parameters())
        found.update(self.model.named_buffers())
        found.update({name: each for name, _, _, each in states(self.model, self.optimizer)})
        return {name: runtime.plain(each) for name, each in found.items() if each.device.type == "xla"}

    def gradients(self) -> list[torch.Tensor]:
        """Gradients of parameters on the devices."""
        found = (parameter.grad for parameter in self.model.parameters())
        return [runtime.plain(each) for each in found if each is not None and each.device.type == "xla"]

    def snapshot(self) -> Callable[[Mapping[str, torch.Tensor]], None]:
        """Save gradients and step counters; the result restores them, and arguments to given values."""
        gradients = [(each, each.grad) for each in self.model.parameters()]
        states_now = [each for _, _, _, each in states(self.model, self.optimizer)]
        counters = [(each, each.clone()) for each in states_now if each.device.type == "cpu"]

        def restore(before: Mapping[str, torch.Tensor]) -> None:
            current = self.arguments()
            for name, value in before.items():
                runtime.replace_value(current[name], value)
            for parameter, gradient in gradients:
                parameter.grad = gradient
            with torch.no_grad():
                for counter, value in counters:
                    counter.copy_(value)

        return restore

    @staticmethod
    def _alive(reference: weakref.ref[_T]) -> _T:
        found = reference()
        if found is None:
            raise LoweringError("the model or optimizer that this plan was applied to is gone; apply the plan again")
        return found


def states(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer | None
) -> Iterator[tuple[str, torch.nn.Parameter, KeyPath, torch.Tensor]]:
    """(`<parameter>.<key>`, parameter, path, tensor) of every tensor of the optimizer's state, in the model's order."""
    if optimizer is None:
        return
    for name, parameter in model.named_parameters():
        for path, at, value in state_leaves(optimizer.state.get(parameter, {}), name):
            yield path, parameter, at, value


def without_state(plan: Plan, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    """The parameters whose planned state is incomplete in the optimizer."""
    known = {name for name, _, _, _ in states(model, optimizer)}
    named = dict(model.named_parameters())
    owners = {owner(name, named) for name in plan.optimizer_state if name not in known}
    return [p for name, p in named.items() if name in owners and p.requires_grad]


def owner(state: str, parameters: Mapping[str, object]) -> str:
    """The parameter that a state belongs to: the longest name that its own begins with."""
    name = state
    while name and name not in parameters:
        name = name.rpartition(".")[0]
    return name


def check_model(plan: Plan, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Refuse a model or optimizer other than the planned one.

    Raises:
        LoweringError: a model without weights, or an optimizer missing.
        PlanMismatchError: names the first parameter or buffer that differs.
    """
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    for kind, have, want in (("parameter", parameters, plan.parameters), ("buffer", buffers, plan.buffers)):
        for name, tensor in want.items():
            if name not in have:
                raise PlanMismatchError(f"the plan is for another model: this one has no {kind} {name}")
            _check_type(f"{kind} {name}", have[name], tensor)
    meta = next((name for name, each in (*parameters.items(), *buffers.items()) if each.is_meta), None)
    if meta is not None:
        raise LoweringError(
            f"{meta} is on the meta device: applying a plan needs the weights; load them, or call "
            "model.to_empty(device='cpu') and initialize them, then apply"
        )
    if plan.optimizer_state and optimizer is None:
        raise LoweringError("the plan is for a training step with optimizer state: apply(model, optimizer)")
    if optimizer is not None:
        known = {id(each) for each in parameters.values()}
        if any(id(each) not in known for group in optimizer.param_groups for each in group["params"]):
            raise PlanMismatchError("the optimizer holds parameters that are not the model's")


def place_model(plan: Plan, model: torch.nn.Module, mesh: Mesh) -> None:
    """Move parameters and buffers to the XLA device and shard them; gradients are dropped."""
    with free_of_weak_references(model):
        _place_tensors(plan, model, mesh)


@contextlib.contextmanager
def free_of_weak_references(model: torch.nn.Module) -> Iterator[None]:
    """Drop recurrent modules' weak references to their weights for a while: these forbid swapping contents."""
    recurrent = [module for module in model.modules() if isinstance(module, torch.nn.RNNBase)]
    for module in recurrent:
        module._flat_weight_refs = []
    try:
        yield
    finally:
        for module in recurrent:
            module._init_flat_weights()


def _place_tensors(plan: Plan, model: torch.nn.Module, mesh: Mesh) -> None:
    for name, parameter in model.named_parameters():
        _place(f"parameter {name}", parameter, mesh, plan.parameters.get(name))
    for name, buffer in model.named_buffers():
        _place(f"buffer {name}", buffer, mesh, plan.buffers.get(name))


def place_optimizer(plan: Plan, model: torch.nn.Module, optimizer: torch.optim.Optimizer, mesh: Mesh) -> None:
    """Create the optimizer's state as its first step would, sharded; existing state is moved.

    New state is never materialised in full: one small program writes each device's shards.

    Raises:
        LoweringError: the state cannot be created before the first step.
        PlanMismatchError: names the first state that differs from the plan's.
    """
    import torch_xla

    late = _made_in_the_first_step(optimizer)
    if not is_torchs_own(optimizer):
        begin_by_trial(optimizer, without_state(plan, model, optimizer), lambda p: p.cpu().clone())
    old = {name for name, _, _, _ in states(model, optimizer)}
    create_state(optimizer, [p for p in without_state(plan, model, optimizer) if id(p) not in late])
    made = []
    found = set()
    for name, parameter, path, value in list(states(model, optimizer)):
        want = plan.optimizer_state.get(name)
        if want is None:
            if value.dim() > 0:
                raise PlanMismatchError(f"the plan is for another optimizer: it has no state {name}")
            continue  # a step counter: its device is up to the optimizer
        found.add(name)
        _check_type(f"optimizer state {name}", value, want)
        if name in old:
            moved = value if value.device.type == "xla" else value.detach().to(_device())
            runtime.shard_data(moved, mesh, want.spec, f"optimizer state {name}")
            put(optimizer.state[parameter], path, moved)
        else:
            runtime.pin(value, mesh, want.spec)
            made.append(runtime.plain(value))
    found |= {f"{name}.momentum_buffer" for name, p in model.named_parameters() if id(p) in late}
    missing = next((name for name in plan.optimizer_state if name not in found), None)
    if missing is not None:
        raise PlanMismatchError(f"the plan is for another optimizer: this one has no state {missing}")
    if made:
        torch_xla._XLAC._xla_sync_multi(made, [], True, True)


def _made_in_the_first_step(optimizer: torch.optim.Optimizer) -> set[int]:
    """Ids of parameters whose state cannot be initialised by zeros: their first step is another program."""
    if not isinstance(optimizer, torch.optim.SGD) or not is_torchs_own(optimizer):
        return set()
    return {id(p) for group in optimizer.param_groups if dampened(group) for p in group["params"]}


def place_late_state(
    plan: Plan, model: torch.nn.Module, optimizer: torch.optim.Optimizer, known: Collection[str]
) -> None:
    """Shard state that the step has made (none of `known`) as planned."""
    for name, _, _, value in states(model, optimizer):
        want = plan.optimizer_state.get(name)
        if want is not None and name not in known:
            runtime.pin(value, plan.mesh, want.spec)


def _place(what: str, tensor: torch.Tensor, mesh: Mesh, plan: TensorPlan | None) -> None:
    tensor.grad = None
    if tensor.device.type != "xla":
        moved = tensor.detach().to(_device())
        moved = torch.nn.Parameter(moved, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else moved
        if plan is not None:
            runtime.shard_data(moved, mesh, plan.spec, what)
        swap(what, tensor, moved)
    elif plan is not None:
        runtime.shard_data(tensor, mesh, plan.spec, what)


def swap(what: str, tensor: torch.Tensor, moved: torch.Tensor) -> None:
    """Give a tensor the contents of another, in place.

    Raises:
        LoweringError: something else holds a reference to it, such as the graph of an earlier forward pass.
    """
    for collected in (False, True):
        try:
            torch.utils.swap_tensors(tensor, moved)
            return
        except RuntimeError as error:
            if collected:
                raise LoweringError(
                    f"{what} cannot be moved to the devices in place, something still refers to it "
                    f"({str(error).splitlines()[0]}): delete the losses and outputs of earlier forward passes first "
                    "(`del loss, output`), or call model.to('xla') and build the optimizer after it"
                ) from None
            gc.collect()  # the graph of an earlier pass may be garbage already


def _check_type(what: str, tensor: torch.Tensor, plan: TensorPlan) -> None:
    wanted = f"{plan.dtype}[{','.join(map(str, plan.shape))}]"
    if format_tensor(tensor) != wanted:
        raise PlanMismatchError(f"the plan is for another model: {what} is {format_tensor(tensor)}, planned {wanted}")


def _device() -> torch.device:
    import torch_xla

    return torch_xla.device()
