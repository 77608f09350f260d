"""Capture through torch_xla: a model's forward, or its whole training step, as StableHLO, without running it.

Every parameter, buffer, input and optimizer state is replaced by a *placeholder*, a lazy tensor that has a shape and no
data; the step is traced once, and torch_xla lowers the trace. Each aten op runs under a label (`op<k>`), and each
floating-point output is marked by a replicated `custom_call @Sharding` labelled `op<k>.out<j>`: so every HLO op knows
the aten op it came from, and every output that lowering can annotate is one value of the module.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch.utils._pytree import tree_flatten_with_path, tree_map

from autoshard.capture import refusals, switches
from autoshard.capture.hlo_proto import signature, with_ids_from_one, without_stacks
from autoshard.capture.inputs import Inputs, input_names, split_inputs
from autoshard.capture.modules import ModulePaths, tensor_parallel_plan
from autoshard.capture.optimizer import make_optimizer, seed_state, state_tensors, step
from autoshard.capture.program import Argument, ArgumentRole, AtenOp, Output, OutputRole, Program, TensorType
from autoshard.capture.sequence import AtenSequence, Call, is_xla, tensor_id
from autoshard.errors import CaptureError

DTYPES: Mapping[torch.dtype, str] = {
    torch.float64: "f64", torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16",
    torch.int64: "i64", torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "ui8",
    torch.bool: "i1", torch.complex64: "complex<f32>", torch.complex128: "complex<f64>",
}  # fmt: skip
"""torch dtype -> StableHLO's word for it."""


def prepare_runtime(devices: int | None = None) -> None:
    """Make torch_xla ready to capture (and, with `devices`, to run on that many virtual CPU devices).

    Sets `PJRT_DEVICE=CPU` unless the user has chosen a device, `CPU_NUM_DEVICES` if `devices` is given, and switches
    SPMD on. Needs nothing to be set before torch_xla is imported; once its runtime has started, the number of devices
    is what it is.

    Raises:
        CaptureError: torch_xla is not installed, or its runtime already runs with fewer devices.
    """
    os.environ.setdefault("PJRT_DEVICE", "CPU")
    if not any(name in os.environ for name in ("PT_XLA_DEBUG", "PT_XLA_DEBUG_LEVEL")):
        os.environ.setdefault("PT_XLA_DEBUG_FILE", os.devnull)  # its page on every value that capture refuses to read
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
        model: on meta or with weights, in the mode (train or eval) it is to run in. It is left as it is.
        sample_inputs: a tensor, a tuple of positional arguments or a dict of named ones; shapes and dtypes count,
            values do not. Those that the model does not take go to `loss_fn` (see `inputs.split_inputs`).
        loss_fn: from the model's output (and further inputs) to a scalar. Without one, a training step takes the
            output's `loss`, or the output if it is a scalar.
        optimizer: a torch optimizer over the model's parameters, or a callable from parameters to one.
        train: whether to capture backward and step too; by default if there is a `loss_fn` or an `optimizer`. A
            training step without optimizer gives the gradients as outputs.
        switches: see `autoshard.capture.switches`.

    Raises:
        CaptureError: the inputs do not fit, the program depends on values, or torch_xla cannot lower an op.
    """
    return trace(Labels, model, sample_inputs, loss_fn=loss_fn, optimizer=optimizer, train=train, switches=switches)


def trace(
    labels: Callable[[Any, ModulePaths], Labels],
    model: torch.nn.Module,
    sample_inputs: Any,
    *,
    loss_fn: Callable[..., Any] | None = None,
    optimizer: Any = None,
    train: bool | None = None,
    switches: Sequence[str] = switches.DEFAULT,
) -> Program:
    """`capture` under another sequence than `Labels`: lowering has one that annotates."""
    prepare_runtime()
    with _nothing_left():
        return _trace(labels, model, sample_inputs, loss_fn, optimizer, train, switches)


@contextlib.contextmanager
def _nothing_left() -> Iterator[None]:
    """Leave no lazy tensor of a capture alive, also when it fails.

    torch_xla's next sync runs every lazy tensor that is alive, and a placeholder among them, which has no data, ends
    the process. What could keep one is a cycle that waits for the collector, or the frames of an error that somebody
    keeps (a notebook keeps the last one); of the errors behind that one only what they say is kept.
    """
    enabled = gc.isenabled()
    gc.disable()
    gc.freeze()  # so that the collection below looks at nothing older than the capture
    try:
        yield
    except BaseException as error:
        failures: list[BaseException | None] = [error]
        seen: set[int] = set()
        while failures:
            failure = failures.pop()
            if failure is not None and id(failure) not in seen:
                seen.add(id(failure))
                traceback.clear_frames(failure.__traceback__)
                failures += [failure.__cause__, failure.__context__]
                if failure is not error:
                    failure.__traceback__ = None
        raise
    finally:
        gc.collect()
        gc.unfreeze()
        if enabled:
            gc.enable()


def _trace(
    labels: Callable[[Any, ModulePaths], Labels],
    model: torch.nn.Module,
    sample_inputs: Any,
    loss_fn: Callable[..., Any] | None,
    optimizer: Any,
    train: bool | None,
    switches: Sequence[str],
) -> Program:
    train = bool(loss_fn is not None or optimizer is not None) if train is None else train
    if optimizer is not None and not train:
        raise CaptureError("an optimizer was given, but train=False: a forward pass makes no step")
    inputs = split_inputs(model, sample_inputs, loss_fn)
    with _Tracing(model, loss_fn, tuple(switches), labels) as tracing:
        loss_or_output = tracing.forward(inputs, loss_fn, train)
        if train:
            tracing.backward(loss_or_output, optimizer)
        return tracing.program(loss_or_output, train)


def _placeholder(like: torch.Tensor) -> torch.Tensor:
    import torch_xla.core.xla_builder as xla_builder

    if like.dtype not in DTYPES:
        raise CaptureError(f"tensors of dtype {like.dtype} cannot be captured")
    if like.layout is not torch.strided:
        raise CaptureError(f"tensors of layout {like.layout} cannot be captured; only dense ones (`.to_dense()`)")
    made: torch.Tensor = xla_builder.create_placeholder_tensor(tuple(like.shape), like.dtype)
    return made


def _annotated(tensor: torch.Tensor) -> str:
    """The GSPMD sharding that `mark_sharding` left on a tensor, in HLO's words; empty where there is none."""
    import torch_xla

    whole = getattr(tensor, "global_tensor", tensor)
    return str(torch_xla._XLAC._get_xla_sharding_spec(whole) or "") if whole.device.type == "xla" else ""


@dataclass
class _Known:
    """A tensor that is an argument: what it was first, and what `Program` says of it."""

    name: str
    role: ArgumentRole
    tensor: torch.Tensor
    first: int
    of: str | None = None
    annotated: str = ""


@dataclass
class _Result:
    name: str
    role: OutputRole
    tensor: torch.Tensor
    updates: str | None = None


class _Tracing(contextlib.AbstractContextManager["_Tracing"]):
    """One capture: the model on placeholders while it is entered, restored when it is left, however that is."""

    def __init__(
        self,
        model: torch.nn.Module,
        loss_fn: Any,
        names: tuple[str, ...],
        labels: Callable[[Any, ModulePaths], Labels],
    ) -> None:
        self.model = model
        self.make_labels = labels
        self.switches = names
        self.known: dict[str, _Known] = {}
        self.results: list[_Result] = []
        self.values: dict[str, torch.Tensor] = {}
        self.parameters: dict[int, torch.Tensor] = {}
        self.memo: dict[int, torch.Tensor] = {}
        self.roots = {"": model}
        if isinstance(loss_fn, torch.nn.Module):
            self.roots["loss_fn"] = loss_fn
        self.saved: list[tuple[torch.nn.Module, dict[str, Any]]] = []
        self.stack = contextlib.ExitStack()

    def __enter__(self) -> _Tracing:
        import torch_xla

        self.xla = torch_xla._XLAC
        self.stack.callback(self._restore)
        try:
            self.stack.enter_context(
                torch.inference_mode(False)
            )  # the caller's would keep gradients from being recorded
            for prefix, root in self.roots.items():
                self._replace(prefix, root)
            names = {id(k.tensor): k.name for k in self.known.values()}
            self.paths = self.stack.enter_context(ModulePaths(self.roots, names))
            self.labels = self.make_labels(self.xla, self.paths)
            debug, execution = self.xla._get_ir_debug(), self.xla._get_allow_execution()
            self.stack.callback(self.xla._set_ir_debug, debug)
            self.stack.callback(self.xla._set_allow_execution, execution)
            self.xla._set_ir_debug(True)
            self.xla._set_allow_execution(False)
            self.stack.enter_context(torch.random.fork_rng(devices=[]))
            self.stack.enter_context(switches.active(self.switches, self.model))
            self.stack.enter_context(refusals.RefuseMasks(self.paths.describe))
        except BaseException:
            self.stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.close()

    # The model on placeholders.

    def _replace(self, prefix: str, root: torch.nn.Module) -> None:
        """Put placeholders in the place of parameters and buffers, in dicts of their own."""
        for path, module in root.named_modules():
            self.saved.append((module, dict(module.__dict__)))
            where = ".".join(part for part in (prefix, path) if part)
            for table in ("_parameters", "_buffers"):
                tensors = module.__dict__.get(table) or {}
                module.__dict__[table] = {
                    name: None if t is None else self._stand_in(t, f"{where}.{name}" if where else name)
                    for name, t in tensors.items()
                }
        for module, attributes in self.saved:
            for name, value in attributes.items():
                if name[:1] == "_" and isinstance(value, list) and value and all(id(v) in self.memo for v in value):
                    module.__dict__[name] = [self.memo[id(v)] for v in value]  # such as an RNN's _flat_weights

    def _stand_in(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        if id(tensor) not in self.memo:
            made, role = _placeholder(tensor), "buffer"
            if isinstance(tensor, torch.nn.Parameter):
                made, role = torch.nn.Parameter(made, requires_grad=tensor.requires_grad), "parameter"
                made.__dict__.update(tensor.__dict__)
                self.parameters[id(tensor)] = made
            self.memo[id(tensor)] = made
            self._know(name, "parameter" if role == "parameter" else "buffer", made, like=tensor)
        return self.memo[id(tensor)]

    def _restore(self) -> None:
        for module, attributes in self.saved:
            module.__dict__.clear()
            module.__dict__.update(attributes)

    def _know(
        self,
        name: str,
        role: ArgumentRole,
        tensor: torch.Tensor,
        of: str | None = None,
        like: torch.Tensor | None = None,
    ) -> None:
        while name in self.known:
            name += "_"
        annotated = "" if like is None else _annotated(like)
        self.known[name] = _Known(name, role, tensor, tensor_id(tensor), of, annotated)

    # The step.

    def forward(self, inputs: Inputs, loss_fn: Callable[..., Any] | None, train: bool) -> Any:
        """Run the forward pass on placeholders; returns the loss of a training step, else the output."""
        by_id: dict[int, torch.Tensor] = {}
        for name, value in input_names(self.model, inputs, loss_fn):
            for path, leaf in tree_flatten_with_path(value)[0]:
                if isinstance(leaf, torch.Tensor) and id(leaf) not in by_id:
                    made = _placeholder(leaf).requires_grad_(leaf.requires_grad)
                    by_id[id(leaf)] = made
                    self._know(".".join([name, *(_key(k) for k in path)]), "input", made, like=leaf)

        def swap(value: Any) -> Any:
            return tree_map(lambda leaf: by_id[id(leaf)] if isinstance(leaf, torch.Tensor) else leaf, value)

        self.labels.restart({k.name: k.tensor for k in self.known.values()})
        with torch.set_grad_enabled(train), self._explained(inputs), self.labels:
            output = self.model(*swap(inputs.args), **swap(dict(inputs.kwargs)))
            if not train:
                return output
            self.paths.outside = "loss_fn"
            if loss_fn is not None:
                loss = loss_fn(output, *swap(inputs.loss_args), **swap(dict(inputs.loss_kwargs or {})))
            else:
                loss = _loss_of(output)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise CaptureError(
                "a training step needs a loss: one differentiable number. "
                + (f"{'loss_fn' if loss_fn is not None else 'The model'} returned {_brief(loss)}.")
                + (
                    ""
                    if loss_fn is not None
                    else " Pass loss_fn, or inputs (labels) with which the model has a `.loss`."
                )
            )
        return loss

    def backward(self, loss: torch.Tensor, optimizer: Any) -> None:
        """Differentiate, and take the optimizer's step."""
        self.labels.phase, self.paths.backward = "backward", True
        self.paths.outside = "the backward pass"
        with self._explained(None), self.labels:
            loss.backward()
        self.paths.backward = False
        if optimizer is None:
            for known in [k for k in self.known.values() if k.role == "parameter" and k.tensor.grad is not None]:
                self.results.append(_Result(f"{known.name}.grad", "output", known.tensor.grad))
            return
        self.paths.outside = "the optimizer"
        made = make_optimizer(optimizer, self.parameters)
        names = {id(k.tensor): k.name for k in self.known.values() if k.role == "parameter"}
        with self._explained(None):
            seeded = seed_state(made, names, _placeholder, _Refusing(self.labels))
        for name, (tensor, of) in seeded.items():
            self._know(name, "optimizer_state", tensor, of)
            self.labels.name(tensor, name)
        self.labels.phase = "optimizer"
        with self._explained(None), self.labels:
            step(made)
        for p, state in made.state.items():
            if id(p) in names:
                for name, tensor in state_tensors(state, names[id(p)]):
                    if name not in self.known or tensor_id(tensor) != self.known[name].first:
                        updates = name if name in self.known else None
                        self.results.append(_Result(name, "optimizer_state", tensor, updates))

    @contextlib.contextmanager
    def _explained(self, inputs: Inputs | None) -> Iterator[None]:
        """Turn what goes wrong inside the program into one clear error."""
        try:
            yield
        except CaptureError:
            raise
        except Exception as error:
            where = self.paths.failed()
            first = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
            if refusals.asks_for_data(first):
                running, line = self.labels.running, refusals.line_of(error)
                raise (
                    refusals.no_lowering(running, where, line) if running else refusals.execution(where, line)
                ) from error
            if first.startswith("Expected XLA tensor. Got: XLA"):
                raise refusals.apart(where, refusals.line_of(error)) from error
            if "device_ready_queues_" in first:  # autograd counts devices once, at its first backward pass
                raise CaptureError(
                    "this process ran a backward pass before torch_xla was loaded, and autograd has no queue for XLA "
                    "devices now: import torch_xla before the first backward pass, or plan in a new process"
                ) from error
            if first == "module 'torch' has no attribute 'xla'":  # torch.utils.checkpoint looks for torch.<device>
                first += "; for gradient checkpointing, XLA devices have torch_xla.utils.checkpoint.checkpoint"
            given = f" The sample inputs were {inputs.describe()}." if inputs is not None else ""
            raise CaptureError(f"{where} failed with {type(error).__name__}: {first.rstrip('.')}.{given}") from error

    # The program.

    def program(self, loss_or_output: Any, train: bool) -> Program:
        """Lower what was traced."""
        results = self._results(loss_or_output, train)
        first = {k.first: k.name for k in self.known.values()}
        tensors = [self._own(r.tensor, first) for r in results]
        with self._explained(None):
            proto = self.xla._get_xla_tensors_hlo_proto(tensors)
            _, data = self.xla._get_tensors_xla_device_data_node(tensors)
        parameter_types, result_types = signature(proto)
        arguments = self._arguments(data, parameter_types)
        if len(result_types) != len(results):
            raise CaptureError(f"torch_xla lowered {len(result_types)} results of {len(results)}")
        index = {a.name: i for i, a in enumerate(arguments)}
        assert len(first) == len(self.known), "one tensor is known under two names"
        outputs = tuple(
            Output(r.name, r.role, type_, index.get(r.updates) if r.updates is not None else None)
            for r, type_ in zip(results, result_types, strict=True)
        )
        from jaxlib._jax import mlir

        return Program(
            kind="train" if train else "forward",
            frontend="torch_xla",
            versions=_versions(),
            switches=self.switches,
            stablehlo=mlir.hlo_to_stablehlo(without_stacks(with_ids_from_one(proto))),
            arguments=arguments,
            outputs=outputs,
            ops=tuple(self.labels.ops),
            values=self.values,
            annotated={known.name: known.annotated for known in self.known.values() if known.annotated},
            tp_plan=tensor_parallel_plan(self.model),
        )

    def _results(self, loss_or_output: Any, train: bool) -> list[_Result]:
        """Loss or outputs first, then what the step changed, in the order of the arguments."""
        results = []
        if train:
            results.append(_Result("loss", "loss", loss_or_output))
        else:
            for path, leaf in tree_flatten_with_path(loss_or_output)[0]:
                if isinstance(leaf, torch.Tensor) and is_xla(leaf):
                    results.append(_Result(".".join(_key(k) for k in path) or "output", "output", leaf))
            if not results:
                raise CaptureError(f"the model's output holds no tensor ({_brief(loss_or_output)})")
        for known in self.known.values():
            if known.role == "parameter" or known.role == "buffer":
                now = self._current(known)
                if tensor_id(now) != known.first:
                    results.append(_Result(known.name, known.role, now, known.name))
        return results + self.results

    def _current(self, known: _Known) -> torch.Tensor:
        """What stands now where a parameter or buffer stood: a module may have assigned another tensor."""
        for prefix, root in self.roots.items():
            if known.name.startswith(f"{prefix}." if prefix else ""):
                path, _, leaf = known.name.removeprefix(f"{prefix}." if prefix else "").rpartition(".")
                try:
                    now = getattr(root.get_submodule(path), leaf, None)
                except AttributeError:
                    continue
                if isinstance(now, torch.Tensor) and is_xla(now):
                    return now
        return known.tensor

    def _own(self, tensor: torch.Tensor, arguments: Mapping[int, str]) -> torch.Tensor:
        """A tensor that is an argument as it is (the model returned its input) becomes a value of its own."""
        return tensor.detach().clone() if tensor_id(tensor) in arguments else tensor

    def _arguments(self, data: list[torch.Tensor], types: tuple[TensorType, ...]) -> tuple[Argument, ...]:
        by_data = {self.labels.data_ids[k.name]: k for k in self.known.values() if k.name in self.labels.data_ids}
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
"""Ops, with their options, that torch_xla is known to compute without data."""


def _expression(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor like this one that is computed."""
    if not is_xla(tensor):
        return tensor
    return torch.logical_not(tensor) if tensor.dtype == torch.bool else torch.add(tensor, 0)


class Labels(AtenSequence):
    """Runs each aten op under its label, marks its outputs, records it; refuses what cannot be captured."""

    def __init__(self, xla: Any, paths: ModulePaths) -> None:
        """Before the first op."""
        super().__init__()
        self.xla = xla
        self.paths = paths
        self.phase = "forward"
        self.ops: list[AtenOp] = []
        self.data_ids: dict[str, int] = {}
        self.running = ""
        self.replicated = xla.OpSharding([], [], [], 0)

    def name(self, tensor: torch.Tensor, name: str) -> None:
        """Know an argument, and the data that stands for it in what is lowered."""
        super().name(tensor, name)
        self.data_ids[name] = self.xla._unique_id_for_ir_and_data(tensor)

    def run(self, call: Call) -> Any:
        """Run an op that torch_xla can lower, under its label."""
        refusals.refuse_values(call.name, call.tensors, call.kwargs, self.paths.describe())
        refusals.refuse(call.name, call.func, call.tensors, self.paths.describe())
        self.running = call.name
        self._try(call)
        scope = self.xla.profiler.scope_pusher(f"op{call.index}")
        try:
            result = call.func(*call.args, **call.kwargs)
        finally:
            del scope
        self.running = ""
        return result

    def _try(self, call: Call) -> None:
        """Meet an op for the first time with operands that have no data to be asked for.

        Some of torch_xla's own kernels compute on the CPU after all, some for some options only (addmm's beta). On an
        expression that is an execution, which is off; on a placeholder itself it would end the process. So the first
        call sees expressions only.
        """
        if torch.Tag.nondeterministic_seeded in call.func.tags:
            return
        bare = {id(t) for t, maker in zip(call.tensors, call.inputs, strict=True) if isinstance(maker, str)}
        if not bare:
            return
        options = tree_map(lambda x: x.dtype if isinstance(x, torch.Tensor) else x, (call.args, dict(call.kwargs)))
        way = f"{call.name}{options!r}"
        if way in _TRIED:
            return
        args, kwargs = tree_map(lambda x: _expression(x) if id(x) in bare else x, (call.args, dict(call.kwargs)))
        call.func(*args, **kwargs)
        _TRIED.add(way)

    def mark(self, call: Call, outputs: tuple[torch.Tensor, ...]) -> None:
        """Mark the outputs that lowering can annotate."""
        inputs = {tensor_id(t) for t in call.tensors if is_xla(t)}
        for j, tensor in enumerate(outputs):
            if is_xla(tensor) and tensor.is_floating_point() and tensor_id(tensor) not in inputs:
                scope = self.xla.profiler.scope_pusher(f"op{call.index}.out{j}")
                self._mark(tensor)
                del scope

    def _mark(self, tensor: torch.Tensor) -> None:
        try:
            self.xla._xla_mark_sharding(tensor, self.replicated)
        except RuntimeError:  # the copy of an argument is no expression yet, and has no data to be marked
            self.xla._xla_annotate_custom_sharding(tensor, self.replicated)

    def after(self, call: Call, outputs: tuple[torch.Tensor, ...]) -> None:
        """Record the op."""
        types = [tensor_type(tensor) for tensor in outputs]
        self.mark(call, outputs)
        path = self.paths.current()
        self.ops.append(AtenOp(call.index, call.name, path, self.phase, tuple(types), call.inputs))

    def uncounted(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Refuse what reads values."""
        name = str(func)
        tensors = tuple(t for t in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor))
        refusals.refuse_values(name, tensors, kwargs, self.paths.describe())
        return func(*args, **kwargs)


class _Refusing(AtenSequence):
    """Only refuses."""

    def __init__(self, labels: Labels) -> None:
        super().__init__()
        self.labels = labels
        self.labels.running = ""

    def run(self, call: Call) -> Any:
        refusals.refuse_values(call.name, call.tensors, call.kwargs, "the optimizer")
        refusals.refuse(call.name, call.func, call.tensors, "the optimizer")
        self.labels.running = call.name
        result = call.func(*call.args, **call.kwargs)
        self.labels.running = ""
        return result

    def uncounted(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        tensors = tuple(t for t in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor))
        refusals.refuse_values(str(func), tensors, kwargs, "the optimizer")
        return func(*args, **kwargs)


def tensor_type(tensor: torch.Tensor) -> TensorType:
    """Shape and dtype in the words of `Program`."""
    return TensorType(tuple(tensor.shape), DTYPES.get(tensor.dtype, str(tensor.dtype).removeprefix("torch.")))


def _key(key: Any) -> str:
    """One step of a pytree path."""
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def _loss_of(output: Any) -> Any:
    if isinstance(output, Mapping) and output.get("loss") is not None:
        return output["loss"]
    return getattr(output, "loss", output)


def _brief(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        grad = "" if value.requires_grad else ", which requires no gradient"
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {tuple(value.shape)}{grad}"
    return f"a {type(value).__name__}"


def _versions() -> dict[str, str]:
    found = {}
    for package in ("torch", "torch_xla", "jaxlib", *(["transformers"] if "transformers" in sys.modules else [])):
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


__all__ = ["DTYPES", "Labels", "capture", "prepare_runtime", "tensor_type", "trace"]
