"""Hooks on a training loop: its first step is planned, the steps after it are annotated.

Nothing here ends a loop. A step that cannot be planned runs under propagation, from evenly split tensors; so does a
part of a later step that differs from the planned one (`lower.follower`). In either case one `AutoShardingWarning` says
what and where. Errors of the loop's own code pass unchanged.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch_xla
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_map

from autoshard import api
from autoshard.api import Plan
from autoshard.auto.plan_cache import cached_plan
from autoshard.auto.recorded_loss import LossRecorder
from autoshard.errors import AutoshardError, AutoShardingError, AutoShardingWarning, CaptureError
from autoshard.frontends.switches import table as switches
from autoshard.lower.torch_xla.annotator import Annotator
from autoshard.lower.torch_xla.beneath import Beneath
from autoshard.lower.torch_xla.even import split_evenly, unsplit
from autoshard.lower.torch_xla.follower import Follower
from autoshard.lower.torch_xla.mark_sharding import annotate
from autoshard.mesh import Mesh

_IN_A_CLOSURE = "the model is called in optimizer.step(closure)"
MOST_PASSES = 10
"""Most passes of the model that are watched for a first step of an optimizer."""


def _never_ends_the_loop(hook: Callable[..., None]) -> Callable[..., None]:
    """Wrap a hook: where it fails, it warns and disables the watch."""

    @functools.wraps(hook)
    def guarded(self: Watch, *args: Any, **kwargs: Any) -> None:
        if self.given_up or self.planning:
            return
        try:
            hook(self, *args, **kwargs)
        except Exception as error:
            self.give_up(_said(error))

    return guarded


class Watch:
    """Watches one model's training loop, plans its first step and annotates the others.

    Args:
        options: of `autoshard.plan`, and `cache`.
        meshes: the meshes to plan for; called where a step is planned.
        planned: called with the plan.
    """

    def __init__(
        self, options: Mapping[str, Any], meshes: Callable[[], list[Mesh]], planned: Callable[[Plan], None]
    ) -> None:
        """Watch nothing yet."""
        self.options, self.meshes, self.planned = dict(options), meshes, planned
        self.handles: list[Any] = []
        self.restore: Callable[[], None] = lambda: None
        self.open = Beneath()
        """Contexts held open from the model's forward to the optimizer's step."""
        self.model: torch.nn.Module | None = None
        self.inputs: dict[str, Any] = {}
        self.recorder: LossRecorder | None = None
        self.autocast: Any = None
        self.shapes: Any = None
        self.plan: Plan | None = None
        self.step: Annotator | None = None
        self.closure = False
        self.passes = 0
        self.planning = self.given_up = self.warned = False

    # Hooks.

    def everywhere(self) -> None:
        """Watch the first model on the device that trains: the outermost module called."""
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
            LoweringError: the model has no weights.
        """
        _check_size(self.meshes() if self.options.get("mesh") is not None else [])
        try:
            split_evenly(model)
        except AutoshardError:
            raise
        except Exception as error:
            self.give_up(f"its parameters cannot be split ({_said(error)})")
            return
        self.model = model
        self.handles = [
            model.register_forward_pre_hook(self.called, with_kwargs=True),
            model.register_forward_hook(self.leaves),
            register_optimizer_step_pre_hook(self.steps),
            register_optimizer_step_post_hook(self.stepped),
        ]

    def remove(self) -> None:
        """Remove every hook."""
        self.restore()
        self.open.close()
        for handle in self.handles:
            handle.remove()
        self.handles = []

    @_never_ends_the_loop
    def called(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        """Hook: the model begins a forward pass."""
        if not torch.is_grad_enabled() or not module.training:
            return
        if self.closure:
            self.give_up(_IN_A_CLOSURE)
        elif self.plan is not None:
            self.open.close()  # a step that the loop has skipped is still open
            self.step = None
            if _shapes(args, kwargs) == self.shapes:
                self.step = self.open.enter(annotate(self.plan, self.differs))
        elif self.recorder is not None and self.recorder.losses and any(_has_gradient(p) for p in module.parameters()):
            self.give_up("the model is called more than once before the optimizer's step (gradient accumulation?)")
        else:
            self._begin(module, args, kwargs)

    def _begin(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        """Record a pass; forget an earlier one that came to no optimizer step."""
        self.open.close()
        self.recorder, self.inputs = None, {}
        self.passes += 1
        if self.passes > MOST_PASSES:
            self.give_up(f"no optimizer has made a step in {MOST_PASSES} passes of the model")
            return
        # Computed as in planned steps: torch_xla's own batch norm, say, keeps another running variance.
        self.open.enter(switches.active(switches.DEFAULT, module))
        self.inputs = _bound(module, args, kwargs)
        self.shapes = _shapes(args, kwargs)
        self.autocast = torch.get_autocast_dtype("xla") if torch.is_autocast_enabled("xla") else None

    @_never_ends_the_loop
    def leaves(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        """Hook: the model ends its forward pass; the loss follows."""
        if self.inputs and self.recorder is None and self.plan is None:
            self.recorder = LossRecorder(output, dict(module.named_parameters()))
            self.open.enter(self.recorder)

    @_never_ends_the_loop
    def steps(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Hook: an optimizer begins its step."""
        self.closure = any(callable(each) for each in (*args[1:], *kwargs.values()))
        if self.plan is None:
            self.open.close()

    @_never_ends_the_loop
    def stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Hook: an optimizer has stepped: plan, or end the annotated step."""
        self.closure = False
        assert self.model is not None
        mine = {id(parameter) for parameter in self.model.parameters()}
        theirs = [p for group in optimizer.param_groups for p in group["params"]]
        if not any(id(p) in mine for p in theirs):
            if self.plan is None and self.recorder is not None and all(p.grad is None for p in theirs):
                self.give_up(
                    "the optimizer holds no parameter of the model that was trained, and none with a gradient (was it "
                    "made before the model was moved to the device?)"
                )
        elif self.step is not None:
            step, self.step = self.step, None
            self.open.close()
            if isinstance(step, Follower):
                step.complete()
        elif self.plan is None and self.open:  # no hook of this step's beginning was there
            self.give_up(_IN_A_CLOSURE)
        elif self.plan is None and self.recorder is not None:
            self._plan_after(optimizer, self.recorder)

    # Planning.

    def _plan_after(self, optimizer: Any, recorder: LossRecorder) -> None:
        if not recorder.losses:
            self.give_up("no backward pass was seen before the optimizer's step")
            return
        if len(recorder.losses) > 1:
            self.give_up(f"backward() is called {len(recorder.losses)} times before the optimizer's step")
            return
        self.planning = True
        try:
            self._plan(optimizer, recorder)
        finally:
            self.planning = False

    def _plan(self, optimizer: Any, recorder: LossRecorder) -> None:
        assert self.model is not None
        model, options = self.model, dict(self.options)
        loss_fn, targets = recorder.loss_fn(recorder.losses[0])
        if any(tensor.grad_fn is not None for tensor in targets.values()):
            raise CaptureError("the loss follows from more than one pass of the model, or from another model's")
        loss_fn.bind(lambda: dict(model.named_parameters()))  # type: ignore[attr-defined]
        sample = {**self.inputs, **{name: tensor.detach() for name, tensor in targets.items()}}
        self.recorder, self.inputs = None, {}
        for name in ("mesh", "axes", "device"):
            options.pop(name, None)
        plan_of = cached_plan if options.pop("cache", True) else api.plan_program
        context = (
            torch.autocast("xla", dtype=self.autocast)
            if self.autocast is not None
            else torch.autocast("xla", enabled=False)
        )
        gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
        with torch.enable_grad(), context:
            meshes = self.meshes()
            program = api.capture(
                model, sample, loss_fn=loss_fn, optimizer=optimizer, frontend="torch_xla", device=meshes[0].device
            )
        plan = plan_of(program, meshes, **options)
        torch_xla.sync(wait=True)  # the first step, before its results are moved
        try:
            unsplit(model, optimizer, plan)
            plan.apply(model, optimizer)
        finally:
            for parameter, gradient in gradients:  # another optimizer's step may want them
                parameter.grad = gradient
        self.plan = plan
        self.planned(plan)

    # Giving up.

    def differs(self, what: str) -> None:
        """Warn that a part of a step differs from the planned one."""
        if not self.warned:
            self._warn(
                f"autoshard leaves a part of this training loop to XLA's propagation: {what}; the rest of its steps "
                "runs as planned"
            )

    def give_up(self, why: str) -> None:
        """Disable the watch: the loop runs without annotations from here on."""
        self.given_up = True
        self.recorder, self.inputs, self.step = None, {}, None
        self._warn(
            f"autoshard leaves this training loop to XLA's propagation: {why}; plan the step with autoshard.plan and "
            "use plan.apply and plan.annotate"
        )
        self.open.close()

    def _warn(self, text: str) -> None:
        """Warn, once per loop, at the current line of the loop's own code."""
        if self.warned:
            return
        self.warned = True
        file, _, line = _here().rpartition(":")
        warnings.warn_explicit(f"{text} ({Path(file).name}:{line})", AutoShardingWarning, file, int(line))


_NOT_THE_LOOPS = tuple(
    f"{folder}{os.sep}"
    for folder in (Path(torch.__file__).parent, Path(torch_xla.__file__).parent, Path(__file__).parents[1])
)


def _here() -> str:
    """FILE:LINE of the innermost frame that is neither torch's nor autoshard's."""
    frame = sys._getframe()
    while frame.f_back is not None and (
        frame.f_code.co_filename.startswith(_NOT_THE_LOOPS) or not Path(frame.f_code.co_filename).suffix
    ):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _said(error: Exception) -> str:
    """An error in one line."""
    line = next(iter(str(error).splitlines()), "")
    return line if isinstance(error, AutoshardError) else f"{type(error).__name__}: {line}"


def _check_size(meshes: list[Mesh]) -> None:
    """Refuse a mesh whose size differs from the number of devices."""
    import torch_xla.runtime as xr

    there = xr.global_runtime_device_count()
    for mesh in meshes:
        if mesh.size != there:
            raise AutoShardingError(
                f"the mesh {'x'.join(map(str, mesh.shape))} has {mesh.size} devices, and this program runs on {there}: "
                "the automatic mode plans for all of them"
            )


def _has_gradient(parameter: torch.nn.Parameter) -> bool:
    return parameter.grad is not None


def _bound(module: torch.nn.Module, args: Any, kwargs: Any) -> dict[str, Any]:
    """The arguments of a call by name."""
    signature = inspect.signature(module.forward)
    found: dict[str, Any] = {}
    for name, value in signature.bind(*args, **kwargs).arguments.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            found.update(value)
        elif kind is inspect.Parameter.VAR_POSITIONAL:
            raise CaptureError("the model's forward takes *args: give it named arguments to have it planned")
        else:
            found[name] = value
    return found


def _shapes(args: Any, kwargs: Any) -> Any:
    """Shapes and types of a call, to recognise the calls that the plan is for."""

    def shape(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return str(leaf.dtype), tuple(leaf.shape)
        return repr(leaf) if isinstance(leaf, int | float | str | None) else type(leaf).__name__

    return repr(tree_map(shape, (args, dict(kwargs))))
