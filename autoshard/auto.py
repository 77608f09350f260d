"""One line: a training loop on torch_xla planned and annotated without a change.

    autoshard.use_spmd(auto=True, spmd_config={"auto_sharding": {"mesh": "2x4"}})    # for xr.use_spmd(auto=True)
    model = model.to("xla")

or, with the policy that PyTorch's API has a place for,

    model = distribute_module(model, DeviceMesh("xla", ids), autoshard.auto_policy)

and then the loop as it is: forward, loss, `backward()`, `optimizer.step()`, sync. **The first step** runs with
parameters split evenly over all devices (what follows is XLA's propagation), and is watched: the model and its inputs,
the torch functions between its output and `backward()`, the optimizer. At its end the program is captured on
placeholders and planned (from the cache, where it was planned before), and the tensors are placed as planned. **From
the second step on** what runs between the model's forward and the optimizer's step is annotated. An evaluation, or a
batch of another shape, runs as it is, under propagation.

Options, in `spmd_config["auto_sharding"]` or as `AUTOSHARD_MESH`, `AUTOSHARD_AXES`, `AUTOSHARD_DEVICE`,
`AUTOSHARD_MEMORY`, `AUTOSHARD_TIME_LIMIT` in the environment (arguments win): those of `autoshard.plan`.
"""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Any

from autoshard.errors import AutoshardError
from autoshard.mesh import Mesh

if TYPE_CHECKING:
    import torch

    from autoshard.plan import Plan
    from autoshard.recorded_loss import LossRecorder

_OPTIONS = ("mesh", "axes", "device", "memory", "hints", "time_limit", "fold", "seed", "annotations", "cache")
_ENVIRONMENT = {
    "mesh": "AUTOSHARD_MESH", "axes": "AUTOSHARD_AXES", "device": "AUTOSHARD_DEVICE", "memory": "AUTOSHARD_MEMORY",
    "time_limit": "AUTOSHARD_TIME_LIMIT",
}  # fmt: skip


class AutoShardingError(AutoshardError, RuntimeError):
    """A training loop that cannot be planned while it runs: what it does, and what to do."""


def use_spmd(auto: bool = False, spmd_config: Mapping[str, Any] | None = None) -> None:
    """`torch_xla.runtime.use_spmd`, with an automatic mode that shards; call it before the model is on the device.

    Args:
        auto: plan the first training step that runs, and annotate the steps after it (see the module's docstring).
        spmd_config: `{"auto_sharding": {...}}` with options of `autoshard.plan`, and `cache` (default True).

    Raises:
        ValueError: an option that there is not.
    """
    import torch_xla.runtime as xr

    options = _options(spmd_config)
    if not xr.is_spmd():
        xr.use_spmd()
    global _GLOBAL
    if _GLOBAL is not None:
        _GLOBAL.remove()
        _GLOBAL = None
    if auto:
        _GLOBAL = _Watch(options)
        _GLOBAL.everywhere()


def auto_policy(name: str, module: Any, device_mesh: Any) -> None:
    """The `partition_fn` of `distribute_module(model, device_mesh, autoshard.auto_policy)` on an XLA device mesh.

    Parameters are placed at once, evenly split; what is planned follows at the first step.
    """
    if name:
        return  # called for every submodule; the whole model comes first, with no name
    if getattr(device_mesh, "device_type", "xla") != "xla":
        raise AutoShardingError(
            f"auto_policy is for device meshes of torch_xla, not {device_mesh.device_type}: "
            "for DTensor plan first, and use plan.to_dtensor(device_mesh)"
        )
    import torch_xla.runtime as xr

    if not xr.is_spmd():
        xr.use_spmd()
    options = _options(None)
    names = device_mesh.mesh_dim_names
    options["mesh"] = Mesh(
        tuple(device_mesh.shape), tuple(names) if names else (), options.pop("device", None) or _kind()
    )
    options.pop("axes", None)
    watch = _Watch(options)
    watch.on(module)


auto_policy.__name__ = (
    "autoshard_auto_policy"  # torch_xla takes a function *named* auto_policy for its own, and never calls it
)

_GLOBAL: _Watch | None = None


_LAST: Plan | None = None


def current_plan() -> Plan | None:
    """The plan that the automatic mode made last, or None before the first step has ended."""
    return _LAST


def _options(spmd_config: Mapping[str, Any] | None) -> dict[str, Any]:
    given = dict((spmd_config or {}).get("auto_sharding") or {})
    unknown = [name for name in (spmd_config or {}) if name != "auto_sharding"] or [
        n for n in given if n not in _OPTIONS
    ]
    if unknown:
        raise ValueError(f"spmd_config has {unknown[0]!r}; auto_sharding takes {', '.join(_OPTIONS)}")
    for name, variable in _ENVIRONMENT.items():
        if os.environ.get(variable):
            given.setdefault(name, os.environ[variable])
    if isinstance(given.get("memory"), str):
        from autoshard.cli_options import parse_bytes

        given["memory"] = None if given["memory"].lower() == "none" else parse_bytes(given["memory"])
    if "time_limit" in given:
        given["time_limit"] = float(given["time_limit"])
    return given


def _kind() -> str:
    """The kind of the attached devices, where torch_xla's runtime says it."""
    import torch_xla.runtime as xr

    if xr.device_type() == "CPU":
        return "cpu"
    raise AutoShardingError(
        f"say which {xr.device_type()} this is, for its costs: AUTOSHARD_DEVICE=tpu-v5e, or device= in auto_sharding"
    )


class _Watch:
    """Watches one model's training loop: the first step as it is, the others annotated."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.options = dict(options)
        self.handles: list[Any] = []
        self.restore: Callable[[], None] = lambda: None
        self.model: torch.nn.Module | None = None
        self.inputs: dict[str, Any] = {}
        self.stack = ExitStack()
        self.recorder: LossRecorder | None = None
        self.loss: torch.Tensor | None = None
        self.autocast: Any = None
        self.plan: Plan | None = None
        self.optimizer: Any = None
        self.shapes: Any = None
        self.step: AbstractContextManager[Any] | None = None
        self.given_up = False
        self.planning = False

    # Hooks.

    def everywhere(self) -> None:
        """Watch whatever model on the device trains first: the outermost module that is called."""
        import torch

        original = torch.nn.Module.__call__

        def call(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            trains = torch.is_grad_enabled() and module.training
            if trains and any(p.requires_grad and p.device.type == "xla" for p in module.parameters()):
                self.restore()
                self.on(module)
            return original(module, *args, **kwargs)

        def restore() -> None:
            torch.nn.Module.__call__ = original
            self.restore = lambda: None

        torch.nn.Module.__call__ = call
        self.restore = restore

    def on(self, model: torch.nn.Module) -> None:
        """Watch this model; its parameters are placed at once.

        Raises:
            AutoShardingError: the mesh that was asked for is not of the devices that there are.
        """
        _check_size(self.options)
        _split_evenly(model)
        self.handles = [
            model.register_forward_pre_hook(self.called, with_kwargs=True),
            model.register_forward_hook(self.leaves),
        ]
        self._optimizers()

    def _optimizers(self) -> None:
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        self.handles += [
            register_optimizer_step_pre_hook(self.steps),
            register_optimizer_step_post_hook(self.stepped),
        ]

    def remove(self) -> None:
        """Take every hook away."""
        self.restore()
        for handle in self.handles:
            handle.remove()
        self.handles = []

    def called(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        """The model begins a pass."""
        import torch

        from autoshard.capture import switches

        if self.given_up or self.planning or not torch.is_grad_enabled() or not module.training:
            return
        if self.plan is not None:
            self._begin_step(module, args, kwargs)
            return
        if self.recorder is not None:
            self._give_up("the model is called more than once before the optimizer's step (gradient accumulation?)")
            return
        # Computed as the planned steps will be: torch_xla's own batch norm, say, keeps another running variance.
        self.stack.enter_context(switches.active(switches.DEFAULT, module))
        self.model = module
        self.inputs = _bound(module, args, kwargs)
        self.shapes = _shapes(args, kwargs)
        self.autocast = torch.get_autocast_dtype("xla") if torch.is_autocast_enabled("xla") else None

    def leaves(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        """The model has ended its pass: what follows is the loss."""
        if module is not self.model or self.recorder is not None or self.plan is not None or self.model is None:
            return
        if self.given_up or self.planning or not self.inputs:
            return
        from autoshard.recorded_loss import LossRecorder

        self.recorder = LossRecorder(output, dict(self.model.named_parameters()), self._backward)
        self.stack.enter_context(self.recorder)

    def _backward(self, loss: torch.Tensor) -> None:
        self.loss = loss

    def steps(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """An optimizer begins its step."""
        if not self.planning:
            self.stack.close()

    def stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """An optimizer has stepped: plan, or end the annotated step."""
        if self.planning:
            return
        if self.step is not None:
            step, self.step = self.step, None
            step.__exit__(None, None, None)
            return
        if self.plan is not None or self.given_up or self.model is None or self.recorder is None:
            return
        mine = {id(parameter) for parameter in self.model.parameters()}
        theirs = [p for group in optimizer.param_groups for p in group["params"]]
        if not any(id(p) in mine for p in theirs):
            if self.loss is not None and all(p.grad is None for p in theirs):
                self._give_up(
                    "the optimizer holds no parameter of the model that was trained, and none with a gradient (was it "
                    "made before the model was moved to the device?)"
                )
            return
        if self.loss is None:
            self._give_up("no backward pass was seen before the optimizer's step")
            return
        if self.recorder.on_gradients:
            self._give_up(
                f"{self.recorder.on_gradients} runs on gradients between backward() and the optimizer's step "
                "(clipping?)"
            )
            return
        self.planning = True
        try:
            self._plan(optimizer)
        finally:
            self.planning = False

    # Planning.

    def _plan(self, optimizer: Any) -> None:
        import torch
        import torch_xla

        from autoshard import api
        from autoshard.plan_cache import cached_plan

        assert self.model is not None
        assert self.recorder is not None
        assert self.loss is not None
        model, options = self.model, dict(self.options)
        loss_fn, targets = self.recorder.loss_fn(self.loss)
        loss_fn.bind(lambda: dict(model.named_parameters()))  # type: ignore[attr-defined]
        sample = {**self.inputs, **{name: tensor.detach() for name, tensor in targets.items()}}
        keep = options.pop("cache", True)
        meshes = _meshes(options)
        context = (
            torch.autocast("xla", dtype=self.autocast)
            if self.autocast is not None
            else torch.autocast("xla", enabled=False)
        )
        with torch.enable_grad(), context:
            program = api.capture(model, sample, loss_fn=loss_fn, optimizer=optimizer, frontend="torch_xla")
        self.recorder, self.loss, self.inputs = None, None, {}
        plan_of = cached_plan if keep else api.plan_program
        plan = plan_of(program, meshes, **options)
        torch_xla.sync(wait=True)  # the first step, before its results are moved
        _unsplit(model, optimizer, plan)
        plan.apply(model, optimizer)
        self.plan, self.optimizer = plan, optimizer
        global _LAST
        _LAST = plan

    def _begin_step(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        if module is not self.model or _shapes(args, kwargs) != self.shapes:
            return
        if self.step is not None:
            step, self.step = self.step, None
            step.__exit__(AutoShardingError, AutoShardingError("another pass began"), None)
            self._give_up("the model is called again before the optimizer's step")
            return
        assert self.plan is not None
        self.step = self.plan.annotate()
        self.step.__enter__()

    def _give_up(self, why: str) -> None:
        self.stack.close()
        self.recorder, self.inputs, self.given_up = None, {}, True
        warnings.warn(
            f"autoshard leaves this training loop to XLA's propagation: {why}; plan the step with autoshard.plan and "
            "use plan.apply and plan.annotate",
            stacklevel=3,
        )


def _meshes(options: dict[str, Any]) -> list[Mesh]:
    """The meshes to plan for, taken out of the options."""
    import torch_xla.runtime as xr

    from autoshard.meshes import candidate_meshes

    mesh, axes, device = options.pop("mesh", None), options.pop("axes", None), options.pop("device", None)
    if isinstance(mesh, str):
        mesh = Mesh.parse(mesh, axes, device or _kind())
        return candidate_meshes(mesh, None, None)
    if mesh is None:
        return candidate_meshes(None, xr.global_runtime_device_count(), device or _kind())
    return candidate_meshes(mesh, None, device or (None if isinstance(mesh, Mesh) else _kind()))


def _check_size(options: Mapping[str, Any]) -> None:
    """Refuse a mesh of another number of devices than there are."""
    import torch_xla.runtime as xr

    there = xr.global_runtime_device_count()
    if options.get("mesh") is not None and (wrong := [m for m in _meshes(dict(options)) if m.size != there]):
        shape = "x".join(map(str, wrong[0].shape))
        raise AutoShardingError(
            f"the mesh {shape} has {wrong[0].size} devices, and this program runs on {there}: the automatic mode plans "
            "for all of them"
        )


def _bound(module: torch.nn.Module, args: Any, kwargs: Any) -> dict[str, Any]:
    """The arguments of a call by name."""
    bound = inspect.signature(module.forward).bind(*args, **kwargs)
    found: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = inspect.signature(module.forward).parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            found.update(value)
        elif kind is inspect.Parameter.VAR_POSITIONAL:
            raise AutoShardingError("the model's forward takes *args: give it named arguments to have it planned")
        else:
            found[name] = value
    return found


def _shapes(args: Any, kwargs: Any) -> Any:
    import torch
    from torch.utils._pytree import tree_map

    def shape(leaf: Any) -> Any:
        return (str(leaf.dtype), tuple(leaf.shape)) if isinstance(leaf, torch.Tensor) else repr(leaf)

    return repr(tree_map(shape, (args, dict(kwargs))))


def _split_evenly(model: torch.nn.Module) -> None:
    """Place a model's parameters and buffers on the devices, each split on its longest dim that divides evenly.

    So no step needs the whole model on one device. Tensors that are sharded already are left as they are. Buffers of
    64-bit integers stay whole: they are indices (positions), and XLA ends the process on a scatter whose indices lie
    unevenly over devices, as a slice of split ones does.
    """
    import torch
    import torch_xla
    import torch_xla.distributed.spmd as xs
    import torch_xla.runtime as xr

    from autoshard.lower import place, runtime

    count = xr.global_runtime_device_count()
    mesh = xs.Mesh(list(range(count)), (count,), ("all",))
    with place.free_of_weak_references(model):
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_meta:
                raise AutoShardingError(
                    "the model has no weights (it is on meta): initialize it before it is distributed"
                )
            if tensor.device.type == "xla" and torch_xla._XLAC._get_xla_sharding_spec(runtime.plain(tensor)):
                continue
            dims = [dim for dim, size in enumerate(tensor.shape) if size % count == 0 and size > 0]
            spec: list[Any] = [None] * tensor.dim()
            if dims and tensor.dtype != torch.int64:
                spec[max(dims, key=lambda dim: tensor.shape[dim])] = "all"
            if tensor.device.type == "xla":
                torch_xla._XLAC._xla_mark_sharding(runtime.plain(tensor), mesh.get_op_sharding(tuple(spec)))
                continue
            moved = tensor.detach().to("xla")
            torch_xla._XLAC._xla_mark_sharding(runtime.plain(moved), mesh.get_op_sharding(tuple(spec)))
            if isinstance(tensor, torch.nn.Parameter):
                moved = torch.nn.Parameter(moved, tensor.requires_grad)
            torch.utils.swap_tensors(tensor, moved)


def _unsplit(model: torch.nn.Module, optimizer: Any, plan: Plan) -> None:
    """Take through the host what lies on the devices already: torch_xla moves no shards between devices."""
    import torch
    import torch_xla

    from autoshard.lower import place, runtime

    arguments = {**plan.parameters, **plan.buffers, **plan.optimizer_state}
    tensors = [*model.named_parameters(), *model.named_buffers()]
    tensors += [(name, value) for name, _, _, value in place.states(model, optimizer)]
    for name, tensor in tensors:
        if tensor.device.type != "xla" or name not in arguments:
            continue
        if torch_xla._XLAC._get_xla_sharding_spec(runtime.plain(tensor)):
            fresh = runtime.plain(tensor.detach()).cpu().to("xla")
            inner = torch._from_functional_tensor(fresh) if torch._is_functional_tensor(fresh) else fresh
            runtime.replace_value(runtime.plain(tensor), inner)
