"""Runs a plan on PyTorch's DTensor: on GPUs over NCCL, on CPUs over gloo.

    mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("data", "model"))
    lowered = plan.to_dtensor(mesh)
    lowered.apply(model, optimizer)        # or parallelize_module(model, mesh, lowered.parallelize_plan())
    loss = model(**batch).loss             # every process gives the whole batch; each keeps its shard
    loss.backward(); optimizer.step()

Parameters and buffers become DTensors in the planned placements. Hooks redistribute planned values that enter or leave
a module, and parameters that the forward pass reads under another sharding (FSDP's gathered weights) while the module
runs. DTensor reduces gradients into their parameter's placements. Its rules keep results equal to those of one process.

`inexpressible` lists what DTensor cannot express: values inside modules and in the backward pass follow DTensor's own
propagation, and a dim is split by mesh axes in the mesh's order only.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.utils._pytree import tree_map

from autoshard.errors import LoweringError
from autoshard.frontends.switches.remat import recompute
from autoshard.frontends.tracing.optimizer import put
from autoshard.lower.begin import create_state
from autoshard.lower.dtensor.errors import say_where
from autoshard.lower.dtensor.modules import Border, PlacementTuple, border_of, placed, placements, reduced
from autoshard.lower.dtensor.rules import register_missing
from autoshard.lower.module_values import ModuleValues, module_values, starred
from autoshard.lower.torch_xla import place
from autoshard.lower.tp_plan import to_tp_plan
from autoshard.mesh import Mesh, Spec, format_spec
from autoshard.plans.remat import remat_of
from autoshard.plans.value import Plan, TensorPlan
from autoshard.program import PYTORCH

_NORMS = (torch.nn.LayerNorm, torch.nn.GroupNorm, torch.nn.RMSNorm)
"""Modules whose backward passes need replicated weights under DTensor's rules (torch 2.9: `native_layer_norm_backward`
passes its kernel the shard that it is given)."""


def in_order(mesh: Mesh, spec: Spec) -> bool:
    """Whether every dim is split by its axes in the mesh's order, as DTensor does it."""
    return all(mesh.in_order(axes) == axes for axes in spec)


def to_dtensor(plan: Plan, device_mesh: DeviceMesh) -> DTensorPlan:
    """The plan as DTensor placements.

    Raises:
        LoweringError: the device mesh has another shape or other dim names than the plan's mesh.
    """
    names = device_mesh.mesh_dim_names
    if tuple(device_mesh.shape) != plan.mesh.shape or (names is not None and tuple(names) != plan.mesh.axis_names):
        wanted = ", ".join(f"{name}={size}" for name, size in zip(plan.mesh.axis_names, plan.mesh.shape, strict=True))
        found = ", ".join(
            f"{name}={size}" for name, size in zip(names or "?" * device_mesh.ndim, device_mesh.shape, strict=True)
        )
        raise LoweringError(
            f"the plan is for a mesh {wanted}, the device mesh has {found}: "
            f"init_device_mesh(device_type, {plan.mesh.shape}, mesh_dim_names={plan.mesh.axis_names})"
        )
    if plan.program.frontend not in PYTORCH:
        raise LoweringError("the plan is of a StableHLO file, and DTensor runs PyTorch models: use plan.to_jax()")

    def of(section: Mapping[str, TensorPlan]) -> dict[str, PlacementTuple]:
        return {name: placements(plan.mesh, tensor.spec) for name, tensor in section.items()}

    buffers = of(plan.buffers)
    running = [name for name in buffers if name.rpartition(".")[2] in _RUNNING and any(map(_is_split, buffers[name]))]
    buffers |= {name: (Replicate(),) * device_mesh.ndim for name in running}
    values = module_values(plan)
    whole = [f"{name} is kept whole: batch norms run whole on every process, and write it there" for name in running]
    whole += [f"{name} has no rule in DTensor: it runs whole on every process" for name in register_missing(plan)]
    whole += [
        f"{path or 'the model'} ({_WHOLE_WEIGHTS[own]}) runs with whole weights, split along the batch alone"
        for name in plan.parameters
        for path, _, own in [name.rpartition(".")]
        if own in _WHOLE_WEIGHTS
    ]
    return DTensorPlan(
        plan=plan,
        device_mesh=device_mesh,
        parameters=of(plan.parameters),
        buffers=buffers,
        inputs=of(plan.inputs),
        optimizer_state=of(plan.optimizer_state),
        outputs=of(plan.outputs),
        values=values,
        inexpressible=(*_inexpressible(plan, values), *whole),
    )


_WHOLE_WEIGHTS = {
    "in_proj_weight": "MultiheadAttention", "q_proj_weight": "MultiheadAttention", "weight_ih_l0": "recurrent",
}  # fmt: skip
"""A parameter that identifies such a module."""

_RUNNING = frozenset({"running_mean", "running_var"})


def _is_split(placement: Placement) -> bool:
    return not placement.is_replicate()


def _inexpressible(plan: Plan, values: ModuleValues) -> Iterator[str]:
    for section in ("parameters", "buffers", "inputs", "optimizer_state"):
        for name, tensor in getattr(plan, section).items():
            if not in_order(plan.mesh, tensor.spec):
                yield f"{name} is planned {format_spec(tensor.spec)}: DTensor takes a dim's axes in the mesh's order"
    for side in (values.inputs, values.outputs):
        for module, several in side.items():
            for value in several:
                if not in_order(plan.mesh, value.spec):
                    yield f"a value of {module} is planned {format_spec(value.spec)}, its axes in another order"
    for what, counts in (("values", values.inside), ("copies read", values.copies_inside)):
        alike: dict[str, int] = {}
        for module, count in counts.items():
            alike[starred(module)] = alike.get(starred(module), 0) + count
        for module, count in alike.items():
            yield f"{count} {what} inside {module or 'the model itself'} follow DTensor's own propagation"
    if values.backward:
        yield f"{values.backward} values of the backward pass and the optimizer follow DTensor's own propagation"


@dataclass(frozen=True)
class DTensorPlan:
    """A plan as DTensor placements; see the module's docstring.

    Attributes:
        device_mesh: of all placements.
        parameters, buffers, inputs, optimizer_state, outputs: name -> one placement per mesh dim.
        values: what the hooks redistribute.
        inexpressible: what DTensor cannot express of the plan, a line each.
    """

    plan: Plan = field(repr=False)
    device_mesh: DeviceMesh
    parameters: Mapping[str, PlacementTuple] = field(repr=False)
    buffers: Mapping[str, PlacementTuple] = field(repr=False)
    inputs: Mapping[str, PlacementTuple] = field(repr=False)
    optimizer_state: Mapping[str, PlacementTuple] = field(repr=False)
    outputs: Mapping[str, PlacementTuple] = field(repr=False)
    values: ModuleValues = field(repr=False)
    inexpressible: tuple[str, ...] = field(repr=False)

    def placements(self, spec: Spec) -> PlacementTuple:
        """Placements of a spec of the plan."""
        return placements(self.plan.mesh, spec)

    def parallelize_plan(self) -> dict[str, ParallelStyle]:
        """Module path -> style, for `torch.distributed.tensor.parallel.parallelize_module`; inner modules first."""
        modules: dict[str, None] = {}
        for name in (*self.parameters, *self.buffers):
            modules[name.rpartition(".")[0]] = None
        modules |= dict.fromkeys((*self.values.inputs, *self.values.outputs))
        modules.pop("", None)
        ordered = sorted(modules, key=lambda path: -path.count("."))
        return {**{path: PlannedModule(self, path) for path in ordered}, "": PlannedModule(self, "")}

    def apply(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None) -> torch.nn.Module:
        """Distribute a model, and optimizer state placed otherwise than its parameter, in place.

        Every process must call it. Weights are those of the first process. The model is moved to the mesh's devices
        shard by shard. Gradients are dropped. Blocks that the plan recomputes are checkpointed; checkpoints that the
        model has of its own stay.

        Raises:
            PlanMismatchError: the model is not the planned one. LoweringError: it has no weights.
        """
        place.check_model(self.plan, model, optimizer)
        before = {id(parameter): name for name, parameter in model.named_parameters()}
        there = {path for path, _ in model.named_modules()}  # a loss that is a module is not in the model
        styles = {path: style for path, style in self.parallelize_plan().items() if path in there}
        parallelize_module(model, self.device_mesh, styles)
        if self.plan.remat is not None:
            recompute(model, remat_of(self.plan.remat))
        if optimizer is not None:
            self._follow(model, optimizer, before)
        return model

    def shard(self, **tensors: Any) -> dict[str, Any]:
        """Inputs of the step and the loss by name as DTensors; every process passes full tensors.

        The model also accepts full tensors and shards them itself.
        """
        unknown = next((name for name in tensors if name not in self.inputs), None)
        if unknown is not None:
            raise LoweringError(f"the program has no input {unknown}; it has {', '.join(self.inputs)}")
        return {name: _shard(tensor, self.device_mesh, self.inputs[name]) for name, tensor in tensors.items()}

    def _follow(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, before: Mapping[int, str]) -> None:
        """Make an optimizer hold the distributed parameters, and its state in the planned placements."""
        named = dict(model.named_parameters())
        for group in optimizer.param_groups:
            group["params"] = [named[before[id(each)]] if id(each) in before else each for each in group["params"]]
        for old in list(optimizer.state):
            if id(old) in before:
                optimizer.state[named[before[id(old)]]] = optimizer.state.pop(old)
        owners = {name: place.owner(name, named) for name in self.optimizer_state}
        otherwise = {of for name, of in owners.items() if self.optimizer_state[name] != self.parameters.get(of)}
        missing = {id(parameter) for parameter in place.without_state(self.plan, model, optimizer)}
        create_state(optimizer, [each for name, each in named.items() if name in otherwise and id(each) in missing])
        for name, parameter, path, value in list(place.states(model, optimizer)):
            if name in self.optimizer_state:
                wanted = self.optimizer_state[name]
                put(optimizer.state[parameter], path, _as_dtensor(value, self.device_mesh, wanted))

    def hf_tp_plan(self, model: torch.nn.Module, axis: str | None = None) -> tuple[dict[str, str], list[str]]:
        """The plan as transformers' `tp_plan`, and what that cannot express, a line each.

        Args:
            model: the planned model: `tp_plan` knows `nn.Linear` and `nn.Embedding`.
            axis: the mesh axis of tensor parallelism; default the last.
        """
        return to_tp_plan(self.plan, model, axis)


class PlannedModule(ParallelStyle):  # type: ignore[misc]
    """One module of the plan: its own parameters and buffers, its inputs and outputs."""

    def __init__(self, lowered: DTensorPlan, path: str) -> None:
        """Of the module at `path`; `""` is the whole model."""
        super().__init__()
        self.lowered, self.path = lowered, path

    def __repr__(self) -> str:
        """Its placements."""
        own = {name: _short(each) for name, each in self._own().items()}
        return f"PlannedModule({self.path!r}, {own})"

    def _own(self) -> dict[str, PlacementTuple]:
        whole = {**self.lowered.parameters, **self.lowered.buffers}
        prefix = f"{self.path}." if self.path else ""
        names = (name for name in whole if name.startswith(prefix) and "." not in name.removeprefix(prefix))
        return {name.removeprefix(prefix): whole[name] for name in names}

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        if self.path == "":
            self._distribute_all(module, device_mesh)
        reads = self._reads()
        special = border_of(module) is not Border
        if isinstance(module, _NORMS) or special:
            own = dict(module.named_parameters()) if special else self._own()
            reads = dict.fromkeys(own, (Replicate(),) * device_mesh.ndim)
        inputs = self.lowered.values.inputs.get(self.path, ())
        outputs = self.lowered.values.outputs.get(self.path, ())
        if reads or inputs or outputs or special or isinstance(module, torch.nn.Embedding):
            border_of(module)(self.lowered.plan.mesh, device_mesh, inputs, outputs, reads).install(module)
        if self.path == "":
            _Root(self.lowered).install(module)
        return module

    def _reads(self) -> dict[str, PlacementTuple]:
        prefix = f"{self.path}." if self.path else ""
        return {
            name.removeprefix(prefix): self.lowered.placements(spec)
            for name, spec in self.lowered.values.reads.items()
            if name.rpartition(".")[0] == self.path
        }

    def _distribute_all(self, model: torch.nn.Module, device_mesh: DeviceMesh) -> None:
        """Distribute parameters and buffers of the whole model, so that tied ones stay tied."""
        known = {**self.lowered.parameters, **self.lowered.buffers}
        names = {id(tensor): name for name, tensor in (*model.named_parameters(), *model.named_buffers())}
        whole = (Replicate(),) * device_mesh.ndim
        made: dict[int, Any] = {}
        for module in model.modules():
            for table in (module._parameters, module._buffers):
                for key, tensor in table.items():
                    if tensor is None or isinstance(tensor, DTensor):
                        continue
                    if id(tensor) not in made:
                        wanted = known.get(names[id(tensor)], whole)
                        new = distribute_tensor(tensor.detach(), device_mesh, wanted)
                        if isinstance(tensor, torch.nn.Parameter):
                            new = torch.nn.Parameter(new, requires_grad=tensor.requires_grad)
                            if new.requires_grad:
                                new.register_hook(_Like(wanted))
                        made[id(tensor)] = new, tensor
                    table[key] = made[id(tensor)][0]


@dataclass(frozen=True)
class _Like:
    """Redistributes a gradient to its parameter's placements, by a reduction where partial."""

    placements: PlacementTuple

    def __call__(self, gradient: Any) -> Any:
        return placed(gradient, self.placements) if isinstance(gradient, DTensor) else gradient


@cache
def _plain_tensors_are_replicated() -> ExitStack:
    """Enter DTensor's mode for good: backward passes read values of forward passes, and models come and go."""
    always = ExitStack()
    always.enter_context(implicit_replication())
    return always


class _Root:
    """Hooks of the whole model: its inputs become DTensors; plain tensors count as replicated."""

    def __init__(self, lowered: DTensorPlan) -> None:
        self.lowered = lowered

    def install(self, module: torch.nn.Module) -> None:
        _plain_tensors_are_replicated()
        if any(isinstance(each, torch.nn.MultiheadAttention) for each in module.modules()):
            torch.backends.mha.set_fastpath_enabled(False)  # one fused op, for which DTensor has no rule
        say_where(module)
        module.register_forward_pre_hook(self.before, with_kwargs=True, prepend=True)
        module.register_forward_hook(self.after)

    def before(self, module: torch.nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        try:
            names = list(inspect.signature(module.forward).parameters)
        except (TypeError, ValueError):
            names = []
        placed = [self.placed(names[i] if i < len(names) else f"input{i}", value) for i, value in enumerate(args)]
        return tuple(placed), {name: self.placed(name, value) for name, value in kwargs.items()}

    def after(self, module: torch.nn.Module, args: Any, output: Any) -> Any:
        return tree_map(reduced, output)

    def placed(self, name: str, value: Any) -> Any:
        def one(path: str, leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            whole = (Replicate(),) * self.lowered.device_mesh.ndim
            return _shard(leaf, self.lowered.device_mesh, self.lowered.inputs.get(path, whole))

        if isinstance(value, Mapping):
            return type(value)({key: one(f"{name}.{key}", leaf) for key, leaf in value.items()})  # type: ignore[call-arg]
        if isinstance(value, list | tuple):
            return type(value)(one(f"{name}.{i}", leaf) for i, leaf in enumerate(value))
        return one(name, value)


def _shard(tensor: Any, mesh: DeviceMesh, wanted: PlacementTuple) -> Any:
    """Shard a tensor that every process has in full into a DTensor; no communication."""
    if isinstance(tensor, DTensor):
        return placed(tensor, wanted)
    here = tensor.to(mesh.device_type)
    return DTensor.from_local(here, mesh, [Replicate()] * mesh.ndim, run_check=False).redistribute(placements=wanted)


def _as_dtensor(value: Any, mesh: DeviceMesh, wanted: PlacementTuple) -> Any:
    if isinstance(value, DTensor):
        return value.redistribute(placements=wanted)
    return distribute_tensor(value, mesh, wanted)


def _short(several: PlacementTuple) -> str:
    return "[" + ", ".join(f"S({p.dim})" if isinstance(p, Shard) else "R" for p in several) + "]"
