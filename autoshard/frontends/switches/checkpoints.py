"""`torch.utils.checkpoint` on the capture device, with the barriers that make XLA recompute.

Without a barrier XLA would CSE the recomputation with the first pass. As in jax's `checkpoint`, everything that the
second pass reads and did not make itself (inputs, parameters, closed-over tensors) passes one `optimization_barrier`,
together with the first gradient of a result of the block, so the second pass starts no earlier than that exists. Saved
tensors and the gradient are read behind the barrier too: XLA drops operands of a barrier whose results nothing reads.

torch_xla's own checkpoint already has barriers.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from autoshard.frontends.switches.autocast import DEVICE as AUTOCAST
from autoshard.frontends.tracing import ops
from autoshard.frontends.tracing.device import current, is_xla, tensor_id
from autoshard.frontends.tracing.sequence import ALIAS_OPS, computes, name_of, tensors_in


@contextlib.contextmanager
def recomputed() -> Iterator[None]:
    """Record torch's checkpoints, of both kinds, as recomputed."""
    import torch.utils.checkpoint as library

    saved = {name: getattr(library, name) for name in _REPLACED}
    regions: WeakKeyDictionary[Any, _Region] = WeakKeyDictionary()
    body = inspect.unwrap(library.checkpoint).__code__
    first: Any = saved["_checkpoint_hook"]
    again: Any = saved["_recomputation_hook"]

    class First(first):  # type: ignore[misc]
        """Context of the first pass."""

        def __init__(self, frame: Any) -> None:
            super().__init__(frame)
            self.region = regions[frame] = _Region()

        def __enter__(self) -> None:
            super().__enter__()
            self.watch = _Watch(self.region)
            self.watch.__enter__()

        def __exit__(self, *raised: Any) -> None:
            self.watch.__exit__(*raised)
            super().__exit__(*raised)
            if raised[0] is None:
                self.region.follow(_returned(body))

    class Again(again):  # type: ignore[misc]
        """Context of the second pass."""

        def __init__(self, frame: Any, task: int) -> None:
            super().__init__(frame, task)
            hide = self.hide = _Hide(regions[frame()])  # a cycle through self would keep the step's tensors alive
            save = self.__dict__["pack_hook"]
            self.pack_hook = lambda tensor: save(hide.saved(tensor))

        def __enter__(self) -> None:
            self.stack = contextlib.ExitStack()
            self.stack.enter_context(self.hide.beginning())
            self.stack.enter_context(self.hide.region.autocast())
            super().__enter__()
            self.stack.enter_context(self.hide)

        def __exit__(self, *raised: Any) -> None:
            super().__exit__(*raised)
            self.stack.__exit__(None, None, None)

    library.CheckpointFunction = _reentrant(saved["CheckpointFunction"])
    library._checkpoint_hook, library._recomputation_hook = First, Again
    library._infer_device_type = lambda *args: (
        saved["_infer_device_type"](*args) if any(isinstance(leaf, torch.Tensor) for leaf in args) else current().type
    )
    library.SAC_IGNORED_OPS = _AndViews(saved["SAC_IGNORED_OPS"])
    for name in ("_CachingTorchDispatchMode", "_CachedTorchDispatchMode"):
        setattr(library, name, _asking_for_aten(saved[name]))
    had = getattr(torch, "xla", None)
    if had is None:
        torch.xla = _Device()
    try:
        yield
    finally:
        for name, own in saved.items():
            setattr(library, name, own)
        if had is None:
            del torch.xla


_REPLACED = (
    "CheckpointFunction", "_checkpoint_hook", "_recomputation_hook", "_infer_device_type", "SAC_IGNORED_OPS",
    "_CachingTorchDispatchMode", "_CachedTorchDispatchMode",
)  # fmt: skip
"""Replaced attributes of `torch.utils.checkpoint`."""


def _asking_for_aten(mode: Any) -> Any:
    """A mode of selective checkpoints whose policy is asked for aten's products and attentions where ours run."""

    class Asking(mode):  # type: ignore[misc]
        def __init__(self, policy: Any, *args: Any, **kwargs: Any) -> None:
            def asked(context: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
                found = policy(context, op, *args, **kwargs)
                others, tensors = ops.instead_of(op, args)
                for other in others:
                    if not _saves(found):
                        found = policy(context, other, *tensors)
                return found

            super().__init__(asked, *args, **kwargs)

    return Asking


def _saves(found: Any) -> bool:
    return found is True or getattr(found, "name", "") in ("MUST_SAVE", "PREFER_SAVE")


class _AndViews(set[Any]):
    """Ops that selective policies ignore, and views: functionalization repeats these as it likes, in either pass."""

    def __contains__(self, op: object) -> bool:
        return super().__contains__(op) or torch.Tag.view_copy in getattr(op, "tags", ())


def _returned(body: Any) -> Any:
    """The checkpointed function's result, from `torch.utils.checkpoint.checkpoint`, which called it."""
    frame = sys._getframe()
    while frame is not None and frame.f_code is not body:
        frame = frame.f_back  # type: ignore[assignment]
    return None if frame is None else frame.f_locals.get("ret")


class _Region:
    """The operands of a checkpointed function.

    Attributes:
        reads: tensors read and not made inside, by id.
        behind: the same behind the barrier, once there is a gradient of a result.
        gradient: that gradient, behind the barrier.
        random: state of the device's random numbers at its beginning.
    """

    def __init__(self) -> None:
        self.reads: dict[int, torch.Tensor] = {}
        self.behind: dict[int, torch.Tensor] = {}
        self.gradient: list[torch.Tensor] = []
        self.random = current().random_state()
        self.autocasts = {
            "dtype": torch.get_autocast_dtype(AUTOCAST),
            "enabled": torch.is_autocast_enabled(AUTOCAST),
            "cache_enabled": torch.is_autocast_cache_enabled(),
        }

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Autocast of the first pass; torch looks at the device of the function's tensors."""
        found: contextlib.AbstractContextManager[Any] = torch.autocast(AUTOCAST, **self.autocasts)
        return found

    def follow(self, results: Any) -> None:
        """Wait for a gradient of these results."""
        for leaf in tree_leaves(results):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad and leaf.grad_fn is not None and is_xla(leaf):
                leaf.register_hook(self._hold)

    def _hold(self, gradient: torch.Tensor) -> torch.Tensor | None:
        """Put the operands behind a barrier with the first gradient; returns it as the backward pass reads it."""
        if self.gradient:
            return None
        with torch.no_grad():
            *behind, held = ops.barrier([*self.reads.values(), _bare(gradient.detach())], [])
        self.behind, self.gradient = dict(zip(self.reads, behind, strict=True)), [held]
        held = _wrapped(held, gradient)
        found: torch.Tensor = _Behind.apply(gradient, held) if gradient.requires_grad else held
        return found


class _Behind(torch.autograd.Function):  # type: ignore[misc]
    """A gradient as it is behind a barrier, for what differentiates gradients again."""

    @staticmethod
    def forward(ctx: Any, gradient: torch.Tensor, behind: torch.Tensor) -> torch.Tensor:
        return behind

    @staticmethod
    def backward(ctx: Any, slope: torch.Tensor) -> tuple[torch.Tensor, None]:
        return slope, None


def _bare(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without functionalization's wrapper, as dispatch modes see it."""
    if torch._is_functional_tensor(tensor):
        torch._sync(tensor)
        return torch._from_functional_tensor(tensor)
    return tensor


def _wrapped(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A tensor in functionalization's wrapper, where another one is."""
    if torch._is_functional_tensor(like) and not torch._is_functional_tensor(tensor):
        found: torch.Tensor = torch._to_functional_tensor(tensor)
        return found
    return tensor


def _hidden(tensor: torch.Tensor) -> bool:
    """Whether a tensor passes a barrier when read; not integers and single numbers."""
    return is_xla(tensor) and tensor.is_floating_point() and tensor.dim() > 0


class _Watch(TorchDispatchMode):  # type: ignore[misc]
    """Records tensors read and not made inside."""

    def __init__(self, region: _Region) -> None:
        super().__init__()
        self.reads = region.reads
        self.made: set[int] = set()
        self.aliases: dict[int, int] = {}

    def number(self, tensor: torch.Tensor) -> int:
        """The id of a tensor, or of the one that it aliases."""
        own = tensor_id(tensor)
        return self.aliases.get(own, own)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if computes(func, tensors_in((args, kwargs)), kwargs):
            args, kwargs = self.read(args, kwargs)
        given = [tensor for tensor in tensors_in((args, kwargs)) if is_xla(tensor)]
        before = set(map(tensor_id, given))
        result = func(*args, **kwargs)
        after = (*given, *(tensor for tensor in tensors_in((result,)) if is_xla(tensor)))
        new = [number for number in map(tensor_id, after) if number not in before]
        if name_of(func) in ALIAS_OPS and given and self.number(given[0]) not in self.made:
            self.aliases.update(dict.fromkeys(new, self.number(given[0])))
        else:
            self.made.update(new)
        return result

    def read(self, args: Any, kwargs: Any) -> Any:
        """Record an op's operands and return them."""
        for tensor in tensors_in((args, kwargs)):
            if _hidden(tensor) and self.number(tensor) not in self.made:
                self.reads.setdefault(self.number(tensor), tensor)
        return args, kwargs


class _Hide(_Watch):
    """Replaces operands made outside by the same behind a barrier."""

    def __init__(self, region: _Region) -> None:
        super().__init__(region)
        self.region = region
        self.behind: dict[int, torch.Tensor] = {}

    @contextlib.contextmanager
    def beginning(self) -> Iterator[None]:
        """Put all operands of the first pass behind one barrier, and replay its random numbers."""
        random = current().random_state()
        current().set_random_state(self.region.random)
        self.behind |= self.region.behind
        self._put({number: each for number, each in self.reads.items() if number not in self.behind})
        try:
            yield
        finally:
            current().set_random_state(random)

    def _put(self, tensors: Mapping[int, torch.Tensor]) -> None:
        if tensors:
            with torch.no_grad():
                behind = ops.barrier([*tensors.values()], self.region.gradient)
            self.behind |= dict(zip(tensors, behind, strict=True))

    def read(self, args: Any, kwargs: Any) -> Any:
        """An op's operands, behind barriers."""
        read = {self.number(tensor): tensor for tensor in tensors_in((args, kwargs)) if _hidden(tensor)}
        known = self.made, self.behind
        self._put({number: each for number, each in read.items() if all(number not in those for those in known)})
        return tree_map(self._instead, (args, kwargs))

    def _instead(self, leaf: Any) -> Any:
        known = isinstance(leaf, torch.Tensor) and is_xla(leaf)
        return self.behind.get(self.number(leaf), leaf) if known else leaf

    def saved(self, tensor: torch.Tensor) -> torch.Tensor:
        """A saved tensor, as the backward pass reads it.

        A view is saved by its value: functionalization would make it again of its base, not of what is behind.
        """
        behind = self._instead(tensor)
        if behind is not tensor:
            return _wrapped(behind, tensor)
        return _wrapped(_bare(tensor), tensor) if is_xla(tensor) and tensor._is_view() else tensor


def _reentrant(native: Any) -> Any:
    """torch's reentrant checkpoint, which runs the second pass and its backward pass at once."""

    class Reentrant(native):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, function: Any, preserve: bool, *args: Any) -> Any:
            region = ctx.region = _Region()

            def run(*given: Any) -> Any:
                with region.autocast():
                    return function(*given)

            with _Watch(region):
                return native.forward(ctx, run, preserve, *args)

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            for gradient in tensors_in(gradients):
                ctx.region.reads[tensor_id(gradient)] = _bare(gradient)
            hide = _Hide(ctx.region)
            with hide.beginning(), hide:
                return native.backward(ctx, *gradients)

    return Reentrant


class _Device:
    """The interface of `torch.<device>` that torch needs to replay random numbers."""

    _initialized = True

    @staticmethod
    def device(_: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    @staticmethod
    def device_count() -> int:
        return 1

    @staticmethod
    def get_rng_state(_: Any = None) -> Any:
        import torch_xla.core.xla_model as xla_model

        return xla_model.get_rng_state()

    @staticmethod
    def set_rng_state(state: Any, _: Any = None) -> None:
        import torch_xla.core.xla_model as xla_model

        xla_model.set_rng_state(state)
