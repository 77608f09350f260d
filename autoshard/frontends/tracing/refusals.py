"""Recognises ops that cannot be captured before the runtime runs them, with error messages.

A captured program has no values. An op that needs one (to branch, or for its result's shape), or that torch_xla
computes on the CPU, would crash the process by reading a placeholder's data.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from autoshard.dtypes import NO_FP8
from autoshard.errors import CaptureError
from autoshard.frontends.tracing.by_values import SHAPED_BY_VALUES
from autoshard.frontends.tracing.device import current, is_xla, names_it
from autoshard.frontends.tracing.exact import is_mask, masked_write
from autoshard.frontends.tracing.sequence import COPY_OPS, READS_VALUE

_ONE_DTYPE = frozenset(
    {
        *(f"aten.{name}.default" for name in ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "convolution")),
        "autoshard.einsum.default",
    }
)
"""Ops for which torch refuses mixed dtypes, while torch_xla would promote."""
_TAKES_CLASSES = ("aten.nll_loss_forward.default", "aten.nll_loss2d_forward.default")


@cache
def may_take_values(name: str) -> bool:
    """Whether an op may read tensor values on the host."""
    return name in READS_VALUE or name in COPY_OPS or name.startswith(("aten._copy_from", "aten._to_cpu"))


def takes_values(name: str, tensors: tuple[torch.Tensor, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether an op reads values of an XLA tensor on the host."""
    if not may_take_values(name) or not any(is_xla(t) for t in tensors):
        return False
    asked = kwargs.get("device")
    to_host = name in COPY_OPS and asked is not None and not names_it(asked)
    if name.startswith("aten._copy_from"):
        to_host = len(tensors) > 1 and not is_xla(tensors[1])
    return name in READS_VALUE or name == "aten._to_cpu.default" or to_host


def reads_value(name: str, where: str, of: str) -> CaptureError:
    """The error for a host read that depends on `of`, not known at capture."""
    return CaptureError(
        f"{where} reads the value of a tensor ({_short(name)}: `.item()`, `.tolist()`, `.cpu()`, `float(t)` or "
        f"`if t:`){source()}. Capture records the program without running it, and this value follows from {of}. "
        "Decide with tensors instead (torch.where, a mask), or keep this out of the training step."
    )


def on_host(name: str, where: str, of: str, indexed: str) -> CaptureError:
    """The error for an op computed on the host from values that depend on `of`.

    `indexed` is the op for which it finds the positions of a boolean mask, if any.
    """
    if indexed:
        return _shape_by_value("indexes with a boolean mask", indexed, where, of)
    if name in SHAPED_BY_VALUES:
        return _shape_by_value("makes a tensor whose shape depends on values", name, where, of)
    return no_lowering(name, where)


def is_fp8(tensor: torch.Tensor) -> bool:
    """Whether elements are floats of 8 bits."""
    return bool(tensor.dtype.itemsize == 1 and tensor.is_floating_point())


def refuse(name: str, func: Any, tensors: tuple[torch.Tensor, ...], where: Callable[[], str]) -> None:
    """Raise CaptureError if an op has a data-dependent shape or no lowering."""
    for tensor in filter(is_fp8, tensors):
        raise CaptureError(f"{where()} computes in {tensor.dtype}{source()}: {NO_FP8}")
    if current().falls_back(func.name()):
        raise no_lowering(name, where())
    if name in _ONE_DTYPE and len({t.dtype for t in tensors}) > 1:
        found = ", ".join(str(t.dtype).removeprefix("torch.") for t in tensors)
        raise CaptureError(
            f"{where()} multiplies tensors of different dtypes ({_short(name)} of {found}){source()}, which torch "
            "refuses. Give the model inputs of its parameters' dtype, or convert one of them."
        )
    if name in _TAKES_CLASSES and tensors[1].is_floating_point():
        raise CaptureError(
            f"{where()} takes classes as whole numbers ({_short(name)}), and was given {tensors[1].dtype}{source()}; "
            "pass the targets as torch.long"
        )


@contextlib.contextmanager
def refuse_scalers(where: Callable[[], str]) -> Iterator[None]:
    """Refuse `GradScaler` while it is enabled; `where` names what is running."""
    kind = torch.amp.GradScaler
    own = {name: getattr(kind, name) for name in ("scale", "unscale_", "step")}

    def refusing(name: str) -> Callable[..., Any]:
        def refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.is_enabled():
                return own[name](self, *args, **kwargs)
            raise CaptureError(
                f"{where()} calls GradScaler.{name}{source()}. A GradScaler reads on the host whether gradients are "
                "finite, and skips steps. Leave it out: bf16 needs no scaling. In f16 let loss_fn multiply the loss by "
                "a number, and the optimizer's step divide gradients by it, with torch.where for those not finite."
            )

        return refuse

    for name in own:
        setattr(kind, name, refusing(name))
    try:
        yield
    finally:
        for name, method in own.items():
            setattr(kind, name, method)


class RefuseMasks(TorchFunctionMode):  # type: ignore[misc]
    """Refuses `x[mask] = …` and `index_put` with a boolean mask, for which torch_xla reads the mask.

    Writes that `exact.masked_write` handles are left to it.
    """

    def __init__(self, where: Callable[[], str], unknown: Callable[[torch.Tensor], str]) -> None:
        """`where` names the running module, `unknown` what a tensor depends on that is not known, or nothing."""
        super().__init__()
        self.where = where
        self.unknown = unknown

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Check writes through an index."""
        if func in _WRITES_BY_INDEX and len(args) > 1:
            indices = args[1] if isinstance(args[1], tuple | list) else (args[1],)
            if any(is_mask(i) and is_xla(i) for i in indices):
                if func is torch.Tensor.__setitem__ and masked_write(*args) is not NotImplemented:
                    return None
                of = next((of for i in indices if is_mask(i) and is_xla(i) and (of := self.unknown(i))), "")
                if of:
                    raise _shape_by_value("writes through a boolean mask", "aten.index_put", self.where(), of)
        return func(*args, **(kwargs or {}))


_WRITES_BY_INDEX = frozenset(
    {torch.Tensor.__setitem__, torch.Tensor.index_put, torch.Tensor.index_put_, torch.index_put, torch.index_put_}
)


def _shape_by_value(what: str, name: str, where: str, of: str) -> CaptureError:
    return CaptureError(
        f"{where} {what} ({_short(name)}){source()}. XLA needs every shape before it runs, and this one follows from "
        f"{of}. {_INSTEAD.get(name.removesuffix('.default'), _MASKED)}"
    )


_MASKED = "Keep the whole tensor and mask it: torch.where(mask, a, b), or multiply by the mask."
_INSTEAD = {"aten.bincount": "Count into as many places as there can be: F.one_hot(x, n).sum(0)."}


def asks_for_data(message: str) -> bool:
    """Whether an error of torch or torch_xla means a read of data, which does not exist here."""
    return any(
        text in message
        for text in (
            "nexpected execution",
            "Trying to access XLA data",
            "Attempted to access the data pointer",
            "device type tensor to numpy",
        )
    )


def execution(where: str, line: str) -> CaptureError:
    """The error for a read outside any op; `line` from `line_of`."""
    return CaptureError(
        f"{where} needs the value of a tensor{line}, and capture records the program without running it. "
        "Decide with tensors instead (torch.where, a mask)."
    )


def apart(where: str, line: str) -> CaptureError:
    """The error for a body that torch traces separately; `line` from `line_of`."""
    return CaptureError(
        f"{where} has torch trace a function apart (torch.cond, while_loop, torch.compile, torch.func){line}, "
        "which cannot be captured. Compute both sides and choose with torch.where, write a loop whose count is known "
        "in Python (or as torch_xla's scan), and leave torch.compile to the training loop."
    )


def of_host(where: str, kind: str, line: str) -> CaptureError:
    """The error for an op with a host tensor of `kind` (`torch.LongTensor`) among the step's own."""
    return CaptureError(
        f"{where} gives an op a {kind} of the host beside tensors of the step{line}. A tensor that the step only finds "
        "(a target that the loss closes over, a table made on the CPU) is no part of its program. Give it with the "
        "sample inputs (what the model does not take goes to loss_fn), make it a buffer, or make it on the inputs' "
        "device."
    )


def of_outside(leaf: torch.Tensor) -> CaptureError:
    """The error for a loss with a gradient that the step does not have."""
    return CaptureError(
        f"the loss depends on a tensor of shape {tuple(leaf.shape)} that requires a gradient and is no parameter of "
        "the model (nor of a loss_fn that is a module). Make it part of the model, give loss_fn as the module that has "
        "it, or detach it."
    )


def no_lowering(name: str, where: str, line: str | None = None, by: str = "torch_xla") -> CaptureError:
    """The error for an op without a lowering to XLA; `line` from `line_of`, or the running one."""
    line = source() if line is None else line
    how = " (it would copy the tensor to the CPU)" if by == "torch_xla" else ""
    return CaptureError(
        f"{where} uses {_short(name)}, which {by} cannot lower to XLA{how}{line}. Write it with other operations, "
        "or leave that module out of the captured program."
    )


def ends_process(name: str, tensors: tuple[torch.Tensor, ...], how: str, where: str) -> CaptureError:
    """The error for an op on which torch_xla crashes; `how` from `probe.ends_process`."""
    of = ", ".join(f"{str(t.dtype).removeprefix('torch.')}[{','.join(map(str, t.shape))}]" for t in tensors)
    return CaptureError(
        f"{where} uses {_short(name)}, which torch_xla cannot take: alone, on {of or 'no tensors'}, it ends the "
        f"process ({how}){source()}. Write it with other operations, or leave that module out of the captured program."
    )


def _short(name: str) -> str:
    """`aten.mm` of `aten.mm.default`."""
    return name.removesuffix(".default")


_NOT_THE_USERS = ("torch", "torch_xla", "autoshard")


def source() -> str:
    """` at file:line`, the innermost line of the user's program; else nothing."""
    frame = sys._getframe(1)
    while frame is not None and not frame.f_code.co_qualname.startswith(
        "Tracing."
    ):  # frames further out belong to the caller of `plan`
        if _users(frame):
            return f" at {frame.f_code.co_filename}:{frame.f_lineno}"
        if frame.f_back is None:
            break
        frame = frame.f_back
    return ""


def line_of(error: BaseException) -> str:
    """` at file:line`, the innermost line of the user's program that the error passed; else nothing."""
    line, trace = "", error.__traceback__
    while trace is not None:
        if _users(trace.tb_frame):
            line = f" at {trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
        trace = trace.tb_next
    return line


def _users(frame: FrameType) -> bool:
    module = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    return module not in _NOT_THE_USERS and module not in sys.stdlib_module_names
