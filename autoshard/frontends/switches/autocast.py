"""`torch.autocast` of a captured step: `cuda`'s counts as `xla`'s; without torch_xla a function mode does its casts.

torch has autocast for `xla` without torch_xla, but the casts are kernels of torch_xla
(`torch_xla/csrc/autocast_mode.cpp` lists the ops). The mode does the same, also above autograd.
"""

from __future__ import annotations

import contextlib
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from autoshard.frontends.tracing.device import current, is_xla

DEVICE = "xla"

LOWER = frozenset({
    "conv1d", "conv2d", "conv3d", "conv_tbc", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "bmm", "mm",
    "baddbmm", "addmm", "addbmm", "linear", "matmul", "__matmul__", "__rmatmul__", "prelu", "relu", "max_pool2d",
    "_max_pool2d", "einsum",
})  # fmt: skip
"""Functions whose floating-point operands autocast casts to its dtype."""

FULL = frozenset({
    "batch_norm", "softmax", "log_softmax", "binary_cross_entropy", "binary_cross_entropy_with_logits", "prod", "pow",
    "__pow__", "__rpow__", "cdist", "trace", "cholesky", "cholesky_inverse", "cholesky_solve", "inverse",
    "linalg_inv_ex", "svd", "linalg_svd", "qr", "triangular_solve", "mse_loss", "cosine_embedding_loss", "nll_loss",
    "hinge_embedding_loss", "smooth_l1_loss", "cross_entropy", "l1_loss", "margin_ranking_loss", "soft_margin_loss",
    "triplet_margin_loss", "multi_margin_loss", "multilabel_margin_loss", "ctc_loss", "kl_div",
})  # fmt: skip
"""Functions whose operands autocast casts to float32."""

WIDEST = frozenset({"stack", "cat", "concat", "concatenate", "index_copy"})
"""Functions whose operands autocast casts to the widest dtype among them."""


class Autocast(TorchFunctionMode):  # type: ignore[misc]
    """Casts the operands of torch functions while autocast of XLA devices is on."""

    def __init__(self, body_of_functional: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
        """`body_of_functional`: makes torch.nn.functional run its own code instead of dispatching to a mode."""
        super().__init__()
        self.body_of_functional = body_of_functional
        self.cast: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Cast the operands, or pass them on."""
        kwargs = kwargs or {}
        if not torch.is_autocast_enabled(DEVICE):
            self.cast.clear()
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name in LOWER:
            dtype = torch.get_autocast_dtype(DEVICE)
        elif name in FULL or (func is F.pad and _mode(args, kwargs) in ("reflect", "replicate")):
            dtype = torch.float32
        elif name in WIDEST:
            found = [t.dtype for t in tree_leaves((args, kwargs)) if _eligible(t)]
            dtype = torch.float32 if torch.float32 in found else torch.get_autocast_dtype(DEVICE)
        elif isinstance(func, types.FunctionType) and func.__module__ == F.__name__:
            with self, self.body_of_functional():
                return func(*args, **kwargs)
        else:
            return func(*args, **kwargs)
        leaves, structure = tree_flatten((args, kwargs))
        cast = [self.to(leaf, dtype) for leaf in reversed(leaves)]  # the last operand's first, as torch_xla does
        args, kwargs = tree_unflatten(cast[::-1], structure)
        with torch.autocast(DEVICE, enabled=False):  # the ops inside a function are not cast again
            return func(*args, **kwargs)

    def to(self, value: Any, dtype: torch.dtype) -> Any:
        """Cast a tensor; a weight is cast once per autocast region."""
        if not _eligible(value) or value.dtype == dtype:
            return value
        keeps = value.is_leaf and value.requires_grad and value.dtype == torch.float32
        if not keeps:
            return value.to(dtype)
        if id(value) not in self.cast:
            self.cast[id(value)] = value, value.to(dtype)
        return self.cast[id(value)][1]


def _mode(args: Any, kwargs: Any) -> Any:
    """The `mode` of a call of `F.pad`."""
    return args[2] if len(args) > 2 else kwargs.get("mode", "constant")


def _eligible(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and is_xla(value)
        and value.is_floating_point()
        and value.dtype != torch.float64
    )  # fmt: skip


@contextlib.contextmanager
def autocast_on(device: str = DEVICE) -> Iterator[None]:
    """Have autocast of CUDA (f16 where no dtype is given), XLA and placeholders be autocast of `device`, xla or cpu.

    Of CUDA that is not here too; contexts and decorators made before as well. torch_xla's own acts as on a TPU.
    """
    autocast: Any = torch.amp.autocast_mode.autocast
    own_init, own_enter, own_cast = autocast.__init__, autocast.__enter__, torch.amp.autocast_mode._cast
    own_enabled, own_dtype = torch.is_autocast_enabled, torch.get_autocast_dtype
    moved: list[tuple[Any, str]] = []
    others = {"meta", "cuda", DEVICE} - {device}

    def init(self: Any, device_type: str, dtype: Any = None, *args: Any, **kwargs: Any) -> None:
        asked = DEVICE if device_type == "meta" else device_type
        dtype = own_dtype(asked) if dtype is None else dtype
        own_init(self, device if device_type in others else device_type, dtype, *args, **kwargs)
        self.__dict__.update(device=asked, autoshard_made=True)

    def enter(self: Any) -> Any:
        if not hasattr(self, "device"):  # torch_xla's, made where there is no TPU
            init(self, DEVICE, enabled=self._enabled)
        if self.device in others:
            made_here = self._enabled or hasattr(self, "autoshard_made")
            if not made_here and torch.cuda.amp.common.amp_definitely_not_available():
                warnings.warn(_OFF, stacklevel=3)
            moved.append((self, self.device))
            self.device = device
        return own_enter(self)

    def enabled(asked: str = "cuda") -> bool:
        return bool(own_enabled(device if asked in others else asked))

    def dtype_of(asked: str) -> Any:
        return own_dtype(device if asked in others and own_enabled(device) else asked)

    def cast(value: Any, asked: str, dtype: torch.dtype) -> Any:
        """What `custom_fwd(cast_inputs=…)` casts."""
        tensors = current().type if device == DEVICE else device
        return own_cast(value, tensors if asked in others else asked, dtype)

    def restore() -> None:
        for each, own in moved:
            each.device = own

    with contextlib.ExitStack() as stack:
        stack.callback(restore)
        stack.enter_context(_replaced(autocast, __init__=init, __enter__=enter))
        stack.enter_context(_replaced(torch, is_autocast_enabled=enabled, get_autocast_dtype=dtype_of))
        stack.enter_context(_replaced(torch.amp.autocast_mode, _cast=cast))
        stack.enter_context(_of_transformers(autocast, lambda asked: device if asked in others else asked))
        if "torch_xla" in sys.modules:
            library = import_module("torch_xla.amp.autocast_mode")
            runtime = types.SimpleNamespace(xla_device_hw=lambda _: "TPU")
            stack.enter_context(_replaced(library, xm=runtime))
            own = library.autocast.__init__
            stack.enter_context(
                _replaced(library.autocast, __init__=lambda self, _, *a, **k: own(self, DEVICE, *a, **k))
            )
        if own_enabled("cuda") and not own_enabled(device):
            stack.enter_context(autocast(device, own_dtype("cuda")))
        yield


_OFF = (
    'a torch.autocast("cuda") that was made before the capture, such as a decorator, is off, as PyTorch turns it off '
    "where it finds no CUDA: nothing is cast under it. Make it in the forward pass, or run the command line on the file"
)


@contextlib.contextmanager
def _replaced(owner: Any, **attributes: Any) -> Iterator[None]:
    """Replace attributes of a class or module."""
    own = {name: getattr(owner, name) for name in attributes}
    for name, value in attributes.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in own.items():
            setattr(owner, name, value)


@contextlib.contextmanager
def _of_transformers(autocast: Any, counts_as: Callable[[str], str]) -> Iterator[None]:
    """Replace transformers' own, which takes `meta` for a device where nothing is computed."""

    def maybe(device_type: str, dtype: Any = None, enabled: bool = True, cache_enabled: Any = None) -> Any:
        if not enabled and not torch.is_autocast_enabled(counts_as(device_type)):
            return contextlib.nullcontext()
        return autocast(device_type, dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)

    with contextlib.ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            if name.startswith("transformers.") and "maybe_autocast" in getattr(module, "__dict__", {}):
                stack.enter_context(_replaced(module, maybe_autocast=maybe))
        yield
