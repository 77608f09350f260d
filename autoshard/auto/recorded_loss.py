"""Records a loss as a function: the computation of a training loop between its model's output and `backward()`.

torch functions are recorded as they are called, above autograd, and replayed on other tensors. Uses of values on the
host (`loss.item()`) are not part of it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from autoshard.errors import CaptureError

_BACKWARD = frozenset({torch.Tensor.backward, torch.autograd.backward})


class LossRecorder(TorchFunctionMode):  # type: ignore[misc]
    """Records from the model's output until a backward pass begins.

    Args:
        output: what the model returned.
        parameters: of the model, by name.
    """

    def __init__(self, output: Any, parameters: Mapping[str, torch.Tensor]) -> None:
        """An empty recorder; the mode starts recording when entered."""
        super().__init__()
        self.losses: list[Any] = []
        """Tensors on which `backward()` was called."""
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self.outputs = {id(leaf): i for i, leaf in enumerate(tree_leaves(output)) if isinstance(leaf, torch.Tensor)}
        self.parameters = {id(tensor): name for name, tensor in parameters.items()}
        self.kept: list[Any] = [output]  # keeps objects alive, so that ids stay unique

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record a call that makes tensors on the device."""
        kwargs = kwargs or {}
        if func in _BACKWARD and any(map(_on_device, tree_leaves((args, kwargs)))):
            self.losses.append(args[0] if args else kwargs["tensors"])
        result = func(*args, **kwargs)
        if not self.losses and (any(map(_on_device, tree_leaves(result))) or _writes(func, args)):
            self.calls.append((func, args, kwargs, result))
        return result

    def _behind(self, loss: torch.Tensor) -> list[tuple[Any, Any, Any, Any]]:
        """The recorded calls that the loss depends on, without others in the loop (logging, say)."""
        wanted, kept = {id(loss)}, []
        for call in reversed(self.calls):
            func, args, kwargs, result = call
            if _writes(func, args) or any(id(leaf) in wanted for leaf in tree_leaves(result)):
                wanted.update(id(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
                kept.append(call)
        return kept[::-1]

    def loss_fn(self, loss: torch.Tensor) -> tuple[Callable[..., Any], dict[str, torch.Tensor]]:
        """The loss as a function of the model's output and further inputs, and these by name."""
        made: dict[int, tuple[int, int]] = {}
        others: dict[int, str] = {}
        inputs: dict[str, torch.Tensor] = {}
        calls = self._behind(loss)
        for number, (_, args, kwargs, result) in enumerate(calls):
            for leaf in tree_leaves((args, kwargs)):
                known = id(leaf) in made or id(leaf) in self.outputs or id(leaf) in self.parameters
                if known or id(leaf) in others or not _on_device(leaf):
                    continue
                others[id(leaf)] = f"target{len(others)}"
                inputs[others[id(leaf)]] = leaf
            for place, leaf in enumerate(tree_leaves(result)):
                if isinstance(leaf, torch.Tensor):
                    made.setdefault(id(leaf), (number, place))
        if id(loss) not in made and id(loss) not in self.outputs:
            raise CaptureError("the loss is not made from the model's output by torch's functions")
        replay = _Replay(calls, made, self.outputs, self.parameters, others, id(loss))

        def loss_fn(output: Any, **targets: torch.Tensor) -> Any:
            return replay(output, targets)

        names = [inspect.Parameter("output", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
        names += [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in inputs]
        loss_fn.__signature__ = inspect.Signature(names)  # type: ignore[attr-defined]
        loss_fn.bind = replay.bind  # type: ignore[attr-defined]
        return loss_fn, inputs


def _writes(func: Any, args: Any) -> bool:
    """Whether a function updates device tensors in place, by its name."""
    name = getattr(func, "__name__", "")
    return (name == "__setitem__" or name.endswith("_")) and any(map(_on_device, tree_leaves(args[:1])))


def _on_device(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.device.type == "xla"


class _Replay:
    def __init__(
        self,
        calls: list[tuple[Any, Any, Any, Any]],
        made: Mapping[int, tuple[int, int]],
        outputs: Mapping[int, int],
        parameters: Mapping[int, str],
        others: Mapping[int, str],
        loss: int,
    ) -> None:
        self.calls, self.made, self.outputs, self.parameters = calls, made, outputs, parameters
        self.others, self.loss = others, loss
        self.named: Callable[[], Mapping[str, torch.Tensor]] = dict

    def bind(self, named: Callable[[], Mapping[str, torch.Tensor]]) -> None:
        """Set the function that returns the model's parameters at the time of the loss."""
        self.named = named

    def __call__(self, output: Any, targets: Mapping[str, torch.Tensor]) -> Any:
        leaves = tree_leaves(output)
        results: list[list[Any]] = []
        parameters = self.named() if self.parameters else {}

        def find(leaf: Any) -> Any:
            key = id(leaf)
            if key in self.outputs:
                return leaves[self.outputs[key]]
            if key in self.made and self.made[key][0] < len(results):
                number, place = self.made[key]
                return results[number][place]
            if key in self.others:
                return targets[self.others[key]]
            if key in self.parameters:
                return parameters[self.parameters[key]]
            return leaf

        for func, args, kwargs, _ in self.calls:
            args, kwargs = tree_map(find, (args, kwargs))
            results.append(tree_leaves(func(*args, **kwargs)))
        if self.loss in self.outputs:
            return leaves[self.outputs[self.loss]]
        number, place = self.made[self.loss]
        return results[number][place]
