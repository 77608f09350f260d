"""Optimizers whose first steps are other programs than the later, planned ones.

RAdam takes a plainer step at first, SGD with dampening does not dampen its first one. In such a step forward and
backward pass are planned, and the optimizer's ops run without annotations; parameters and states keep their planned
shardings, and new state gets its own.

Such steps are detected by a twin of the optimizer on CPU parameters of one element, which takes the next step: its ops
are compared with those of a later step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from autoshard.frontends.tracing.optimizer import STEADY_STEP, optimizers_in
from autoshard.lower.host_scalars import counted, ops_of_a_step, small_twin
from autoshard.lower.torch_xla.annotator import Annotator


class FirstSteps:
    """Whether an optimizer is still in its first steps.

    Args:
        optimizer: not held.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        """Nothing is tried yet."""
        self.over = not _can_be_tried(optimizer)

    def has_one_to_take(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the optimizer's next step is another program than its later ones."""
        if self.over:
            return False
        try:
            twin = small_twin(optimizer, begun=False)
            now, _ = ops_of_a_step(twin)
            for each in (*twin.state.values(), *twin.param_groups):
                counted(each, STEADY_STEP)
            self.over = ops_of_a_step(twin)[0] == now
        except Exception:  # a user's optimizer may need what a twin lacks: assume its steps are the planned ones
            self.over = True
        return not self.over

    @contextlib.contextmanager
    def watched(
        self, optimizer: torch.optim.Optimizer | None, annotator: Annotator, ended: Callable[[], None]
    ) -> Iterator[None]:
        """Tell the annotator of first steps; `ended` is called after each, before anything runs on the devices."""
        if optimizer is None or self.over:
            yield
            return

        def before(*_: Any) -> None:
            if self.has_one_to_take(optimizer):
                annotator.leave_alone()

        def after(*_: Any) -> None:
            if annotator.left_alone:
                ended()
                annotator.finish()

        hooks = optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def _can_be_tried(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a twin's step has no side effect on the optimizer and reads nothing from a device."""
    kept = [value for name, value in optimizer.__dict__.items() if name not in ("state", "param_groups", "defaults")]
    settings = [value for group in optimizer.param_groups for key, value in group.items() if key != "params"]
    steps = [state.get("step") for state in optimizer.state.values()]
    on_device = any(
        isinstance(leaf, torch.Tensor) and leaf.device.type != "cpu" for leaf in tree_leaves((settings, steps))
    )
    return not on_device and not any(optimizers_in(value) for value in kept)
