"""Capture through torch_xla: a model's forward, or its whole training step, as StableHLO, without running it.

A placeholder (`frontends/tracing/trace.py`) is a lazy tensor without data; the step is traced once and torch_xla lowers
it.
Each aten op runs under a label (`op<k>`), and each floating-point output is marked by a replicated `custom_call
@Sharding` labelled `op<k>.out<j>`, unless the label suffices (`WRITTEN_LAST`): so every HLO op carries its aten op, and
every annotatable output is one value of the module.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_map

from autoshard.errors import CaptureError
from autoshard.frontends.switches import table as switches
from autoshard.frontends.torch_xla import probe
from autoshard.frontends.torch_xla.inplace_shapes import quick_inplace_shapes
from autoshard.frontends.torch_xla.python_frames import no_python_frames
from autoshard.frontends.tracing import refusals
from autoshard.frontends.tracing.device import is_xla, tensor_type
from autoshard.frontends.tracing.modules import ModulePaths
from autoshard.frontends.tracing.regions import as_custom_call, executed_by
from autoshard.frontends.tracing.sequence import Call, draws
from autoshard.frontends.tracing.trace import (
    Labels,
    Lowered,
    Result,
    Tracing,
    check_placeable,
    trace_step,
)
from autoshard.program import WRITTEN_LAST, Argument, Program, TensorType
from autoshard.stablehlo.hlo_proto import drop_stacks, number_from_one, parse, signature
from autoshard.stablehlo.unread import with_arguments

UNMARKABLE = frozenset({"aten.view_as_real_copy.default"})
"""torch_xla's layout of the result has too few dims, and XLA refuses to copy it."""


def prepare_runtime(devices: int | None = None) -> None:
    """Prepare torch_xla for capture (and, with `devices`, for running on that many virtual CPU devices).

    Sets `PJRT_DEVICE=CPU` unless the user has chosen a device, `CPU_NUM_DEVICES` if `devices` is given, and switches
    SPMD on. Works after torch_xla's import; once its runtime has started, the number of devices is fixed.

    Raises:
        CaptureError: torch_xla is not installed, or its runtime already runs with fewer devices.
    """
    os.environ.setdefault("PJRT_DEVICE", "CPU")
    if not any(name in os.environ for name in ("PT_XLA_DEBUG", "PT_XLA_DEBUG_LEVEL")):
        os.environ.setdefault(
            "PT_XLA_DEBUG_FILE", os.devnull
        )  # suppresses its report on every value that capture refuses to read
    if devices is not None and os.environ["PJRT_DEVICE"] == "CPU":
        os.environ.setdefault("CPU_NUM_DEVICES", str(devices))
    try:
        import torch_xla
        import torch_xla.runtime as runtime
    except ImportError as error:
        raise CaptureError(
            f"capture needs torch_xla, which could not be imported ({error}); install autoshard[xla]"
        ) from error
    if not runtime.is_spmd():
        runtime.use_spmd()
    if devices is not None and torch_xla._XLAC._xla_num_runtime_devices() < devices:
        have = torch_xla._XLAC._xla_num_runtime_devices()
        raise CaptureError(
            f"torch_xla's runtime has {have} device{'s' if have > 1 else ''}, {devices} are needed; "
            f"set CPU_NUM_DEVICES={devices} before anything uses an XLA device"
        )


def capture(
    model: torch.nn.Module,
    sample_inputs: Any,
    *,
    loss_fn: Callable[..., Any] | None = None,
    optimizer: Any = None,
    train: bool | None = None,
    switches: Sequence[str] = switches.DEFAULT,
) -> Program:
    """Capture a program without running it and without memory for its weights.

    Args:
        model: on meta or with weights, in the mode (train or eval) to run in. Not modified.
        sample_inputs: a tensor, a tuple of positional arguments or a dict of named ones; shapes and dtypes count,
            values do not. Those that the model does not take go to `loss_fn` (see `inputs.split_inputs`).
        loss_fn: from the model's output (and further inputs) to a scalar. Without one, a training step takes the
            output's `loss`, or the output if it is a scalar.
        optimizer: a torch optimizer over the model's parameters, or a callable from parameters to one.
        train: whether to capture backward and step too; by default with a `loss_fn` or an `optimizer`. Without
            optimizer a training step outputs the gradients.
        switches: see `autoshard.frontends.switches.table`.

    Raises:
        CaptureError: the inputs do not fit, the program depends on values, or torch_xla cannot lower an op.
    """
    return trace(XlaLabels, model, sample_inputs, loss_fn=loss_fn, optimizer=optimizer, train=train, switches=switches)


def trace(
    labels: Callable[[Any, ModulePaths], XlaLabels], model: torch.nn.Module, sample_inputs: Any, **asked: Any
) -> Program:
    """`capture` under another sequence than `XlaLabels`, with the same keywords; lowering's annotates."""
    prepare_runtime()
    return trace_step(partial(_XlaTracing, labels), model, sample_inputs, **asked)


class _XlaTracing(Tracing):
    """A capture through torch_xla."""

    frontend = "torch_xla"
    packages = ("torch", "torch_xla", "jaxlib")

    def __init__(self, labels: Callable[[Any, ModulePaths], XlaLabels], *what: Any) -> None:
        super().__init__(*what)
        self.labels_of = labels

    def begin(self) -> None:
        import torch_xla

        self.xla = torch_xla._XLAC
        self.stack.callback(self.xla._set_use_eager_mode, self.xla._get_use_eager_mode())
        self.xla._set_use_eager_mode(False)  # it would run each op at once, on placeholders
        self.xla._xla_wait_device_ops([])  # lowering crashes on what a step that is running makes

    def begin_step(self) -> None:
        debug, execution = self.xla._get_ir_debug(), self.xla._get_allow_execution()
        self.stack.callback(self.xla._set_ir_debug, debug)
        self.stack.callback(self.xla._set_allow_execution, execution)
        self.xla._set_ir_debug(True)
        self.xla._set_allow_execution(False)
        self.stack.enter_context(executed_by(as_custom_call))
        self.stack.enter_context(no_python_frames())
        self.stack.enter_context(quick_inplace_shapes())

    def make_labels(self, paths: ModulePaths) -> Labels:
        self.xla_labels = self.labels_of(self.xla, paths)
        return self.xla_labels

    def placeholder(self, like: torch.Tensor) -> torch.Tensor:
        import torch_xla.core.xla_builder as xla_builder

        check_placeable(like)
        made: torch.Tensor = xla_builder.create_placeholder_tensor(tuple(like.shape), like.dtype)
        return made

    def annotated(self, tensor: torch.Tensor) -> str:
        whole = getattr(tensor, "global_tensor", tensor)
        return str(self.xla._get_xla_sharding_spec(whole) or "") if whole.device.type == "xla" else ""

    @staticmethod
    def data_of(like: torch.Tensor) -> torch.Tensor:
        if like.device.type != "xla":
            return like.detach().cpu()
        import torch_xla

        torch_xla._XLAC._set_allow_execution(True)  # device tensors may have to be computed
        try:
            return like.detach().cpu()
        finally:
            torch_xla._XLAC._set_allow_execution(False)

    def lazy(self) -> Mapping[int, object]:
        return self.labels.producers

    def explain(self, error: Exception, first: str, where: str) -> CaptureError | None:
        if first.startswith("Expected XLA tensor. Got: XLA"):
            return refusals.apart(where, refusals.line_of(error))
        kind = first.removeprefix("Expected XLA tensor. Got: ")
        return None if kind == first else refusals.of_host(where, kind.rstrip("."), refusals.line_of(error))

    def lower(self, results: Sequence[Result]) -> Lowered:
        tensors = [self._own(r.tensor) for r in results]
        module = parse(self.xla._get_xla_tensors_hlo_proto(tensors))
        _, data = self.xla._get_tensors_xla_device_data_node(tensors)
        parameter_types, result_types = signature(module)
        from jaxlib._jax import mlir

        read = self._arguments(data, parameter_types)
        unread = self.unread(results, read)
        number_from_one(module)
        drop_stacks(module)
        stablehlo = mlir.hlo_to_stablehlo(module.SerializeToString())
        return Lowered(with_arguments(stablehlo, [a.type for a in unread]), (*read, *unread), result_types)

    def _own(self, tensor: torch.Tensor) -> torch.Tensor:
        """Make a tensor that no op made, an argument or a host constant, a value of its own."""
        return tensor if isinstance(self.labels.producer(tensor), tuple) else tensor.detach().clone()

    def _arguments(self, data: list[torch.Tensor], types: tuple[TensorType, ...]) -> tuple[Argument, ...]:
        by_data = {
            self.xla_labels.data_ids[k.name]: k for k in self.known.values() if k.name in self.xla_labels.data_ids
        }
        if len(data) != len(types):
            raise CaptureError(f"torch_xla lowered {len(types)} arguments of {len(data)}")
        arguments, scalars = [], 0
        for tensor, type_ in zip(data, types, strict=True):
            known = by_data.get(self.xla._unique_id_for_ir_and_data(tensor))
            if known is not None:
                arguments.append(Argument(known.name, known.role, type_, known.of))
            else:
                self.values[f"scalar{scalars}"] = tensor.cpu()
                arguments.append(Argument(f"scalar{scalars}", "scalar", type_))
                scalars += 1
        return tuple(arguments)


_TRIED: set[str] = set()
"""Ops, with their options, that torch_xla is known to run without data."""


def _options(tree: Any) -> Any:
    """A tree of arguments, with dtypes for tensors."""
    kind = type(tree)
    if isinstance(tree, torch.Tensor):
        return tree.dtype
    if kind is tuple or kind is list:
        return kind(map(_options, tree))
    return {key: _options(value) for key, value in tree.items()} if kind is dict else tree


def _expression(tensor: torch.Tensor) -> torch.Tensor:
    """A computed tensor like this one."""
    if not is_xla(tensor):
        return tensor
    return torch.logical_not(tensor) if tensor.dtype == torch.bool else torch.add(tensor, 0)


class XlaLabels(Labels):
    """Labels as scopes of torch_xla's IR; marks as its annotations."""

    def __init__(self, xla: Any, paths: ModulePaths) -> None:
        """Before the first op."""
        self.xla = xla
        self.data_ids: dict[str, int] = {}
        self.replicated = xla.OpSharding([], [], [], 0)
        super().__init__(paths)

    def name(self, tensor: torch.Tensor, name: str) -> None:
        """Record an argument, and the data that stands for it in the lowered program."""
        super().name(tensor, name)
        self.data_ids[name] = self.xla._unique_id_for_ir_and_data(tensor)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Number the op; in a backward pass, without dispatching attribute reads to switches."""
        if not torch._C._len_torch_function_stack():
            return super().__torch_dispatch__(func, types, args, kwargs)
        with torch._C.DisableTorchFunction():
            return super().__torch_dispatch__(func, types, args, kwargs)

    @contextlib.contextmanager
    def _once_more(self) -> Iterator[None]:
        """Re-enter the switches."""
        with torch._C._EnableTorchFunction(), super()._once_more():
            yield

    def labelled(self, call: Call) -> Any:
        """Run the op in a scope of its label."""
        how = probe.ends_process(call, self.is_of_several, self.xla)
        if how:
            raise refusals.ends_process(call.name, call.tensors, how, self.paths.describe())
        self._try(call)
        scope = self.xla.profiler.scope_pusher(f"op{call.index}")
        try:
            return call.func(*call.args, **call.kwargs)
        finally:
            del scope

    def _try(self, call: Call) -> None:
        """Run an op for the first time, with operands that have no data to read.

        Some of torch_xla's kernels fall back to the CPU, some for certain options only (addmm's beta). On a computed
        tensor that is an execution, which is disabled; on a placeholder it would crash. So the first call gets computed
        tensors only.
        """
        bare = {id(t) for t, maker in zip(call.tensors, call.inputs, strict=True) if isinstance(maker, str)}
        if not bare or draws(call.func):
            return
        way = f"{call.name}{_options((call.args, dict(call.kwargs)))!r}"
        if way in _TRIED:
            return
        args, kwargs = tree_map(lambda x: _expression(x) if id(x) in bare else x, (call.args, dict(call.kwargs)))
        call.func(*args, **kwargs)
        _TRIED.add(way)

    def mark(self, call: Call, outputs: tuple[torch.Tensor, ...]) -> None:
        """Mark the annotatable outputs."""
        if call.name in UNMARKABLE or call.name in WRITTEN_LAST:
            return
        for j, tensor in self.marked(call, outputs):
            scope = self.xla.profiler.scope_pusher(f"op{call.index}.out{j}")
            self._mark(tensor)
            del scope

    def _mark(self, tensor: torch.Tensor) -> None:
        try:
            self.xla._xla_mark_sharding(tensor, self.replicated)
        except RuntimeError:  # the copy of an argument has no IR yet, and no data to mark
            self.xla._xla_annotate_custom_sharding(tensor, self.replicated)


__all__ = ["XlaLabels", "capture", "prepare_runtime", "tensor_type", "trace"]
