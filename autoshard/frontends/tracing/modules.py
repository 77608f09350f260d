"""Attributes aten ops to modules, in forward and backward pass, without changing the model."""

from __future__ import annotations

import contextlib
import sys
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.nn.modules import module as nn_module


class ModulePaths:
    """In this context, tracks the running module, or the one whose forward is being differentiated.

    Forward: hooks on all modules keep a stack. Backward: autograd numbers nodes in the order of the forward, so the
    numbers at which modules began and ended identify the current node's module.

    Args:
        roots: prefix -> module; the path of a module is the prefix and its name, joined by a dot.
        parameters: id of a parameter tensor -> its name, for gradients that autograd accumulates.
    """

    def __init__(self, roots: Mapping[str, torch.nn.Module], parameters: Mapping[int, str]) -> None:
        """Name the modules under `roots`; nothing is hooked yet."""
        self._paths: dict[int, str] = {}
        self._kinds: dict[str, str] = {}
        for prefix, root in roots.items():
            for name, module in root.named_modules():
                path = ".".join(part for part in (prefix, name) if part)
                self._paths.setdefault(id(module), path)
                self._kinds.setdefault(path, type(module).__name__)
        self._parameters = parameters
        self._stack: list[str] = []
        self._starts: list[int] = [0]
        self._owners: list[str] = [""]
        self._hooks: list[Any] = []
        self._failed = ""
        self.backward = False
        self.outside = "the program"
        """Path where no module runs."""

    def __enter__(self) -> ModulePaths:
        """Hook every module's forward."""
        _active.append(self)
        self._hooks = [
            nn_module.register_module_forward_pre_hook(self._enter),
            nn_module.register_module_forward_hook(self._leave, always_call=True),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        """Unhook."""
        _active.remove(self)
        for hook in self._hooks:
            hook.remove()

    def _enter(self, module: torch.nn.Module, args: Any) -> None:
        self._failed = ""
        path = self._paths.get(id(module))
        self._stack.append(path if path is not None else (self._stack[-1] if self._stack else ""))
        self._mark()

    def _leave(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if sys.exc_info()[0] is not None and not self._failed:
            self._failed = self.describe()
        if self._stack:
            self._stack.pop()
        self._mark()

    def _mark(self) -> None:
        """Attribute autograd nodes made from here on to the module on top of the stack."""
        if not self.backward:  # a checkpoint's second forward runs on another thread with its own numbers
            self._starts.append(torch.autograd._get_sequence_nr())
            self._owners.append(self._stack[-1] if self._stack else "")

    def current(self) -> str:
        """Path of the module that is running, or being differentiated; `""` when none is known."""
        if self._stack:
            return self._stack[-1]
        node = torch._C._current_autograd_node() if self.backward else None
        if node is None:
            return ""
        variable = getattr(node, "variable", None)
        if variable is not None:
            return self._parameters.get(id(variable), "").rpartition(".")[0]
        return self._owners[max(bisect_right(self._starts, node._sequence_nr()) - 1, 0)]

    def failed(self) -> str:
        """Where the exception in flight was raised, described."""
        return self._failed or self.describe()

    def describe(self) -> str:
        """The current module for an error message: `module transformer.h.0.attn (GPT2Attention)`."""
        path = self.current()
        kind = self._kinds.get(path)
        if not path:
            return f"the model ({kind})" if kind and self._stack else self.outside
        return f"module {path} ({kind})" if kind else f"module {path}"


_active: list[ModulePaths] = []


@contextlib.contextmanager
def running(module: torch.nn.Module) -> Iterator[None]:
    """Ops in this context are the module's, as if it had been called."""
    paths = list(_active)
    for each in paths:
        each._enter(module, ())
    try:
        yield
    finally:
        for each in paths:
            each._leave(module, (), None)


def tensor_parallel_plan(root: torch.nn.Module) -> dict[str, str]:
    """The tensor parallel plan of `root`, or of the outermost modules in it that have one: path -> style.

    transformers' models merge theirs from `base_model_tp_plan` of their configurations' classes and from what the
    classes of the models themselves add. Numbers in paths are written as `*`, as there.
    """
    found: dict[str, str] = {}
    carriers: list[str] = []
    for path, module in root.named_modules():
        if any(not carrier or path == carrier or path.startswith(f"{carrier}.") for carrier in carriers):
            continue
        plan = getattr(module, "tp_plan", None)
        if isinstance(plan, Mapping) and plan:
            carriers.append(path)
            prefix = "".join(f"{'*' if part.isdigit() else part}." for part in path.split(".") if part)
            found.update({f"{prefix}{name}": str(style) for name, style in plan.items()})
    return found
