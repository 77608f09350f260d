"""Shared by all front ends: puts a model on placeholders, traces its step once, and builds the `Program`.

A *placeholder*, a tensor without data, replaces every parameter, buffer, input and optimizer state. The step runs once
on these; a front end (`torch_xla/program.py`, `torchax/program.py`) implements placeholders and lowers the trace.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar
from weakref import ref

import torch
from torch.utils._pytree import tree_flatten_with_path, tree_leaves, tree_map

from autoshard.attention.form import FUSED
from autoshard.dtypes import NO_FP8, torch_dtypes
from autoshard.errors import CaptureError
from autoshard.experts.form import ONE_OP
from autoshard.frontends.switches import table as switches
from autoshard.frontends.switches.handlers import ATTENTION, CLIPS, EXPERTS, MICRO_BATCHES, noting
from autoshard.frontends.tracing import refusals
from autoshard.frontends.tracing.attributes import Attributes
from autoshard.frontends.tracing.copies import Copies
from autoshard.frontends.tracing.device import is_xla, tensor_id, tensor_type
from autoshard.frontends.tracing.inputs import Inputs, input_names, key_name, split_inputs
from autoshard.frontends.tracing.known import SHAPING, Kinds, KnownValues, UnknownValueError, described
from autoshard.frontends.tracing.leftovers import nothing_left
from autoshard.frontends.tracing.modules import ModulePaths, tensor_parallel_plan
from autoshard.frontends.tracing.next_step import Pass, draw_again
from autoshard.frontends.tracing.optimizer import make_optimizer, seed_state, state_tensors, state_values, step
from autoshard.frontends.tracing.sequence import (
    ALIAS_OPS,
    CLEARS,
    COPY_OPS,
    AtenSequence,
    Call,
    Producer,
    name_of,
    on_cpu,
    tensors_in,
)
from autoshard.program import (
    Argument,
    ArgumentRole,
    AtenOp,
    MicroSteps,
    Output,
    OutputRole,
    Program,
    TensorType,
    ValueRead,
    of_micro_step,
)
from autoshard.version import version_of


def trace_step(
    tracing: Callable[[torch.nn.Module, Any, tuple[str, ...]], Tracing],
    model: torch.nn.Module,
    sample_inputs: Any,
    loss_fn: Callable[..., Any] | None,
    optimizer: Any,
    train: bool | None,
    switches: Sequence[str],
) -> Program:
    """Trace a program by a frontend's `Tracing`; the other arguments as in `capture.torch_xla.capture`."""
    train = bool(loss_fn is not None or optimizer is not None) if train is None else train
    if optimizer is not None and not train:
        raise CaptureError("an optimizer was given, but train=False: a forward pass makes no step")
    if loss_fn is not None and not callable(loss_fn):
        raise CaptureError(f"loss_fn is a callable from the model's output to a number, not {type(loss_fn).__name__}")
    count, most = int(_said(switches, MICRO_BATCHES) or 1), _said(switches, CLIPS)
    if count > 1 and not train:
        raise CaptureError(f"micro_batches={count} is of a training step, and this is a forward pass")
    if most and not train:
        raise CaptureError(f"clip_grad_norm={most} is of a training step, and this is a forward pass")
    with contextlib.ExitStack() as behind, nothing_left() as made:
        inputs = split_inputs(model, sample_inputs, loss_fn)
        with tracing(model, loss_fn, tuple(switches)) as traced:
            made.append(traced.lazy())
            behind.callback(put_back, traced.labels.moved)
            program = traced.step(inputs, loss_fn, optimizer, train, count, float(most) if most else None)
        del traced
        return program


def leaves(loss: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors whose gradients a backward pass accumulates."""
    seen: set[Any] = {None}
    found = [loss.grad_fn]
    while found:
        node: Any = found.pop()
        if node in seen:
            continue
        seen.add(node)
        found += [each for each, _ in node.next_functions]
        if type(node).__name__ == "AccumulateGrad":
            yield node.variable


def put_back(moved: Iterable[tuple[ref[torch.Tensor], torch.Tensor]]) -> None:
    """Put tensors of the host back where objects keep what a pass has moved to the device (a noise schedule).

    Args:
        moved: tensors on the device, and those of the host that they were.
    """
    left = {id(now): (now, was) for made, was in moved if (now := made()) is not None}
    for holder in gc.get_referrers(*(now for now, _ in left.values())) if left else ():
        held = holder if isinstance(holder, list | dict) else getattr(holder, "__dict__", None)
        places = list(held.items()) if isinstance(held, dict) else enumerate(held) if isinstance(held, list) else ()
        for place, value in places:
            if held is not None and id(value) in left:
                held[place] = left[id(value)][1]


def check_placeable(like: torch.Tensor) -> None:
    """Refuse a tensor without a possible placeholder."""
    if refusals.is_fp8(like):
        raise CaptureError(f"tensors of dtype {like.dtype} cannot be captured: {NO_FP8}")
    if like.dtype not in torch_dtypes():
        raise CaptureError(f"tensors of dtype {like.dtype} cannot be captured")
    if like.layout is not torch.strided:
        dense = ".to_padded_tensor(0.0)" if like.is_nested else ".to_dense()"
        raise CaptureError(f"tensors of layout {like.layout} cannot be captured; only dense ones (`{dense}`)")


@dataclass
class Known:
    """A tensor that is an argument: its initial value, and its `Program` entry."""

    name: str
    role: ArgumentRole
    tensor: torch.Tensor
    first: int
    type: TensorType
    of: str | None = None
    annotated: str = ""


@dataclass
class Result:
    """A result of the step before lowering."""

    name: str
    role: OutputRole
    tensor: torch.Tensor
    updates: str | None = None


@dataclass
class Lowered:
    """A lowered trace.

    Attributes:
        stablehlo: as `Program.stablehlo`.
        arguments: of its main function.
        result_types: one per requested result.
    """

    stablehlo: bytes
    arguments: tuple[Argument, ...]
    result_types: tuple[TensorType, ...]


class Tracing(contextlib.AbstractContextManager["Tracing"], ABC):
    """A capture: on entry the model is put on placeholders, on exit restored."""

    frontend: ClassVar[str]
    packages: ClassVar[tuple[str, ...]]
    """Packages whose versions a program records."""

    def __init__(self, model: torch.nn.Module, loss_fn: Any, names: tuple[str, ...]) -> None:
        """Nothing is replaced yet; `names` are switches."""
        self.model = model
        self.switches = names
        self.known: dict[str, Known] = {}
        self.results: list[Result] = []
        self.values: dict[str, torch.Tensor] = {}
        self.parameters: dict[int, torch.Tensor] = {}
        self.trained: dict[str, str] = {}
        self.memo: dict[int, torch.Tensor] = {}
        self.roots = {"": model}
        if isinstance(loss_fn, torch.nn.Module):
            self.roots["loss_fn"] = loss_fn
        self.attributes = Attributes()
        self.stack = contextlib.ExitStack()
        self.data = KnownValues(self.data_of)
        self.written_out: list[tuple[str, str, str]] = []
        self.micro_steps: MicroSteps | None = None

    # Implemented by a front end.

    @abstractmethod
    def placeholder(self, like: torch.Tensor) -> torch.Tensor:
        """A tensor of this shape and dtype without data."""

    @abstractmethod
    def annotated(self, tensor: torch.Tensor) -> str:
        """The GSPMD sharding on a user's tensor, as HLO text; empty where there is none."""

    @abstractmethod
    def make_labels(self, paths: ModulePaths) -> Labels:
        """The dispatch mode that the step runs under."""

    @abstractmethod
    def lower(self, results: Sequence[Result]) -> Lowered:
        """The trace as StableHLO; of its arguments those that are read, then those only written."""

    @staticmethod
    def data_of(like: torch.Tensor) -> torch.Tensor:
        """The data of a user's tensor that is not on meta, on the CPU."""
        return like.detach().cpu()

    def lazy(self) -> Mapping[int, object]:
        """The ids of the lazy tensors of the trace; what is computed by no runtime is none."""
        return {}

    def begin(self) -> None:
        """Prepare for placeholders; callbacks on `self.stack` undo it."""

    def begin_step(self) -> None:
        """Prepare for the step, once the model is on placeholders."""

    def explain(self, error: Exception, first: str, where: str) -> CaptureError | None:
        """The meaning of an error of the front end, if it is one; `first` is its first line."""
        return None

    # The model on placeholders.

    def __enter__(self) -> Tracing:
        """Put placeholders in place."""
        self.stack.callback(self.attributes.restore)
        try:
            self.stack.enter_context(
                torch.inference_mode(False)
            )  # the caller's inference mode would keep gradients from being recorded
            self.begin()
            for prefix, root in self.roots.items():
                self._replace(prefix, root)
            names = {id(k.tensor): k.name for k in self.known.values()}
            self.paths = self.stack.enter_context(ModulePaths(self.roots, names))
            self.labels = self.make_labels(self.paths)
            self.labels.values = self.data
            self.begin_step()
            self.stack.enter_context(torch.random.fork_rng(devices=[]))
            self.stack.enter_context(
                noting(lambda switch, why: self.written_out.append((switch, self.paths.current(), why)))
            )
            self.stack.enter_context(switches.active(self.switches, self.model))
            self.stack.enter_context(refusals.refuse_scalers(self.paths.describe))
            self.stack.enter_context(refusals.RefuseMasks(self.paths.describe, self.labels.unknown))
        except BaseException:
            self.stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Put the model's own tensors back."""
        self.stack.close()

    def _replace(self, prefix: str, root: torch.nn.Module) -> None:
        """Replace parameters and buffers by placeholders, in dicts of their own."""
        for path, module in root.named_modules():
            self.attributes.save(module)
            where = ".".join(part for part in (prefix, path) if part)
            for table in ("_parameters", "_buffers"):
                tensors = module.__dict__.get(table) or {}
                module.__dict__[table] = {
                    name: None if t is None else self._stand_in(t, f"{where}.{name}" if where else name)
                    for name, t in tensors.items()
                }
        for module, name, value in self.attributes.lists():
            if value and all(id(v) in self.memo for v in value):
                module.__dict__[name] = [self.memo[id(v)] for v in value]  # such as an RNN's _flat_weights

    def _stand_in(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        if id(tensor) not in self.memo:
            made, role = self.placeholder(tensor), "buffer"
            if isinstance(tensor, torch.nn.Parameter):
                made, role = torch.nn.Parameter(made, requires_grad=tensor.requires_grad), "parameter"
                made.__dict__.update(tensor.__dict__)
                self.parameters[id(tensor)] = made
            self.memo[id(tensor)] = made
            self._know(name, "parameter" if role == "parameter" else "buffer", made, like=tensor)
        return self.memo[id(tensor)]

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
        annotated = "" if like is None else self.annotated(like)
        self.known[name] = Known(name, role, tensor, tensor_id(tensor), tensor_type(tensor), of, annotated)
        self.data.argument(name, role, like)

    # The step.

    def step(
        self,
        inputs: Inputs,
        loss_fn: Callable[..., Any] | None,
        optimizer: Any,
        train: bool,
        micro_batches: int,
        clip_grad_norm: float | None,
    ) -> Program:
        """Run the step on placeholders, and lower it."""
        loss_or_output = self.forward(inputs, loss_fn, train)
        if train:
            self.backward(loss_or_output)
            if micro_batches > 1:
                self.second_micro_step(inputs, loss_fn, micro_batches)
            self.update(optimizer, clip_grad_norm)
        program = self.program(loss_or_output, train)
        return replace(program, once=self.another_program(program, inputs, loss_fn))

    def forward(self, inputs: Inputs, loss_fn: Callable[..., Any] | None, train: bool) -> Any:
        """Run the forward pass on placeholders; returns the loss of a training step, else the output."""
        placed = self._place(inputs, loss_fn)
        self.labels.restart({k.name: k.tensor for k in self.known.values()})
        self.first = Pass(self.roots)
        loss = self._pass(inputs, placed, loss_fn, train)
        self.differs = self.first.ran(self.labels, self.data, self._given(loss))
        self.read = self.data.read
        if not train:
            return loss
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise CaptureError(
                "a training step needs a loss: one differentiable number. "
                + (f"{'loss_fn' if loss_fn is not None else 'The model'} returned {_brief(loss)}.")
                + self._why_none(loss)
                + (
                    ""
                    if loss_fn is not None
                    else " Pass loss_fn, or inputs (labels) with which the model has a `.loss`."
                )
            )
        return loss

    def _place(self, inputs: Inputs, loss_fn: Callable[..., Any] | None, number: int = 1) -> list[torch.Tensor]:
        """Placeholders of micro-step `number`, one per argument: what is passed twice may differ another time."""
        placed = []
        for name, value in input_names(self.model, inputs, loss_fn):
            for path, leaf in tree_flatten_with_path(value)[0]:
                if isinstance(leaf, torch.Tensor):
                    placed.append(self.placeholder(leaf).requires_grad_(leaf.requires_grad))
                    full = of_micro_step(".".join([name, *(key_name(k) for k in path)]), number)
                    self._know(full, "input", placed[-1], like=leaf)
        return placed

    def _pass(self, inputs: Inputs, placed: Sequence[torch.Tensor], loss_fn: Any, train: bool) -> Any:
        """Run the forward pass once: the loss, or the output without training."""
        in_order = iter(placed)

        def swap(value: Any) -> Any:
            return tree_map(lambda leaf: next(in_order) if isinstance(leaf, torch.Tensor) else leaf, value)

        args, kwargs = swap(inputs.args), swap(dict(inputs.kwargs))
        copies = Copies(self.paths.describe)
        with torch.set_grad_enabled(train), self._explained(inputs), copies, self.labels:
            output = self.model(*args, **kwargs)
            if train:
                self.paths.outside = "loss_fn"
                if loss_fn is None:
                    output = _loss_of(output)
                else:
                    output = loss_fn(output, *swap(inputs.loss_args), **swap(dict(inputs.loss_kwargs or {})))
            copies.check(self._given(output))
            return output

    def _given(self, output: Any) -> list[torch.Tensor]:
        """Results of a pass: the returned tensors, then the present buffers."""
        returned = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and is_xla(leaf)]
        return returned + [self._current(known) for known in self.known.values() if known.role == "buffer"]

    def another_program(self, program: Program, inputs: Inputs, loss_fn: Any) -> str:
        """Why the next step is another program than the traced one, or nothing (`next_step.py`); after lowering."""
        updated = {program.arguments[each.updates].name for each in program.outputs if each.updates is not None}
        known = next((known for name, known in self.known.items() if name in self.read and name in updated), None)
        if known is not None:
            return (
                f"the forward pass reads the value of {known.role} {known.name} (.item(), float(), an index of one "
                "number), and the step changes it. Compute with the tensor itself: index_copy_, torch.where, a product"
            )
        if not self.differs:
            return ""
        passes = [anew for anew, needed in ((False, self.first.changes), (True, self.first.draws)) if needed]
        return next(filter(None, (self._again(program, inputs, loss_fn, updated, anew) for anew in passes)), "")

    def _again(self, program: Program, inputs: Inputs, loss_fn: Any, updated: set[str], anew: bool) -> str:
        """What the forward pass computes else when it runs again; `anew`: with other random numbers of the host."""
        read = [known for known in self.known.values() if known.role != "optimizer_state"]
        arguments = {known.name: self._anew(self._current(known)) for known in read}
        placed = [arguments[known.name] for known in read if known.role == "input"]  # the first micro-step's first
        held = [known for known in read if known.role != "input"]
        self._put_anew({id(self._current(known)): arguments[known.name] for known in held})
        self.data = self.labels.values = self.data.as_given()
        self.labels.phase, self.paths.outside = "forward", "the program"
        self.labels.restart(arguments)
        for name, (_, tensor, _) in self.first.kept.items():
            self.labels.name(tensor, name)
        drawn = draw_again(self.first.after if anew else self.first.drawn)
        try:
            output = self._pass(inputs, placed, loss_fn, program.kind == "train")
        except CaptureError as error:
            return f"once more, {error}"
        finally:
            draw_again(drawn)
        return self.first.compare(self.labels, self.data, self._given(output), updated, program.inputs, anew)

    def _anew(self, tensor: torch.Tensor) -> torch.Tensor:
        """A fresh placeholder: a tensor written in the step has more than one id."""
        made = self.placeholder(tensor)
        if isinstance(tensor, torch.nn.Parameter):
            made = torch.nn.Parameter(made, requires_grad=tensor.requires_grad)
            made.__dict__.update(tensor.__dict__)
            return made
        return made.requires_grad_(tensor.requires_grad and tensor.is_leaf)

    def _put_anew(self, made: Mapping[int, torch.Tensor]) -> None:
        """Replace tensors by id, in modules and where the pass has left them."""
        for root in self.roots.values():
            for module in root.modules():
                for table in (module._parameters, module._buffers):
                    table.update({name: made.get(id(t), t) for name, t in table.items()})
        for module, name, _, value in list(self.first.before.changes()):
            if isinstance(value, list):
                value[:] = [made.get(id(each), each) for each in value]
            elif id(value) in made:
                module.__dict__[name] = made[id(value)]

    def _why_none(self, loss: Any) -> str:
        """Why a loss is not differentiable, if the model is the cause."""
        if not isinstance(loss, torch.Tensor) or loss.requires_grad:
            return ""
        if not self.parameters:
            return " The model has no parameters to train."
        if not any(parameter.requires_grad for parameter in self.parameters.values()):
            return " No parameter of the model requires a gradient: requires_grad_(True) on what is to be trained."
        return ""

    def backward(self, loss: torch.Tensor) -> None:
        """Run the backward pass."""
        self.labels.phase, self.paths.backward = "backward", True
        self.paths.outside = "the backward pass"
        outside = next((leaf for leaf in leaves(loss) if self.labels.producer(leaf) is None), None)
        if outside is not None:
            raise refusals.of_outside(outside)
        with self._explained(None), self.labels:
            loss.backward()
        self.paths.backward = False
        self.read = self.data.read

    def second_micro_step(self, inputs: Inputs, loss_fn: Callable[..., Any] | None, count: int) -> None:
        """Run forward and backward pass once more, on inputs of their own; gradients are added to those there are."""
        begun, second = self._accumulated(), self.labels.next_index
        self.labels.phase, self.paths.outside = "forward", "the program"
        placed = self._place(inputs, loss_fn, 2)
        for known in self.known.values():
            if any(known.tensor is each for each in placed):
                self.labels.name(known.tensor, known.name)
        loss = self._pass(inputs, placed, loss_fn, train=True)
        self.backward(loss)
        self.results.append(Result(of_micro_step("loss", 2), "loss", loss))
        ended = self._accumulated()
        changed = ((begun[name], made) for name, made in ended.items() if name in begun and begun[name] != made)
        self.micro_steps = MicroSteps(count, second, self.labels.next_index, tuple(dict.fromkeys(changed)))

    def _accumulated(self) -> dict[str, tuple[int, int]]:
        """Producers of all gradients and buffers that the step has made so far."""
        found: dict[str, Producer] = {}
        for known in self.known.values():
            if known.role == "parameter" and known.tensor.grad is not None:
                found[f"{known.name}.grad"] = self.labels.producer(known.tensor.grad)
            elif known.role == "buffer":
                found[known.name] = self.labels.producer(self._current(known))
        return {name: made for name, made in found.items() if isinstance(made, tuple)}

    def update(self, optimizer: Any, clip_grad_norm: float | None = None) -> None:
        """Clip gradients and run the optimizer's step; without one, gradients are results."""
        if optimizer is None:
            self._clip(clip_grad_norm)
            for known in [k for k in self.known.values() if k.role == "parameter" and k.tensor.grad is not None]:
                self.results.append(Result(f"{known.name}.grad", "output", known.tensor.grad))
            return
        self.paths.outside = "the optimizer"
        made = make_optimizer(optimizer, self.parameters)
        names = {id(k.tensor): k.name for k in self.known.values() if k.role == "parameter"}
        with self._explained(None):
            seeded = seed_state(made, names, self.placeholder, _Trial(self.labels))
        for name, (tensor, of) in seeded.items():
            self._know(name, "optimizer_state", tensor, of)
            self.labels.name(tensor, name)
        graded = {id(p): names[id(p)] for p in self.parameters.values() if p.grad is not None and id(p) in names}
        self.data.states = lambda like: state_values(made, graded, like)
        held = {id(p) for group in made.param_groups for p in group["params"]}
        self.trained = {name: type(made).__name__ for key, name in graded.items() if key in held}
        self._clip(clip_grad_norm)
        self.labels.phase = "optimizer"
        with self._explained(None), self.labels:
            step(made)
        for p, state in made.state.items():
            if id(p) in names:
                for name, tensor in state_tensors(state, names[id(p)]):
                    if name not in self.known or tensor_id(tensor) != self.known[name].first:
                        updates = name if name in self.known else None
                        self.results.append(Result(name, "optimizer_state", tensor, updates))

    def _clip(self, norm: float | None) -> None:
        if norm is not None:
            self.labels.phase = "optimizer"
            with self._explained(None), self.labels:
                torch.nn.utils.clip_grad_norm_(self.roots[""].parameters(), norm)

    @contextlib.contextmanager
    def _explained(self, inputs: Inputs | None) -> Iterator[None]:
        """Turn an error inside the program into one clear error."""
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
            explained = self.explain(error, first, where)
            if explained is not None:
                raise explained from error
            given = f" The sample inputs were {inputs.describe()}." if inputs is not None else ""
            raise CaptureError(f"{where} failed with {type(error).__name__}: {first.rstrip('.')}.{given}") from error

    # The program.

    def program(self, loss_or_output: Any, train: bool) -> Program:
        """Lower the trace."""
        results = self._results(loss_or_output, train)
        assert len({k.first for k in self.known.values()}) == len(self.known), "one tensor is known under two names"
        with self._explained(None):
            lowered = self.lower(results)
        if len(lowered.result_types) != len(results):
            raise CaptureError(f"{self.frontend} lowered {len(lowered.result_types)} results of {len(results)}")
        index = {a.name: i for i, a in enumerate(lowered.arguments)}
        outputs = tuple(
            Output(r.name, r.role, type_, index.get(r.updates) if r.updates is not None else None)
            for r, type_ in zip(results, lowered.result_types, strict=True)
        )
        return Program(
            kind="train" if train else "forward",
            frontend=self.frontend,
            versions=_versions(self.packages),
            switches=self._switches_used(),
            stablehlo=lowered.stablehlo,
            arguments=lowered.arguments,
            outputs=outputs,
            ops=tuple(self.labels.ops),
            values=self.values,
            annotated={known.name: known.annotated for known in self.known.values() if known.annotated},
            tp_plan=tensor_parallel_plan(self.model),
            reads=tuple(self.labels.reads),
            inputs=tuple(known.name for known in self.known.values() if known.role == "input"),
            written_out=tuple(self.written_out),
            micro_steps=self.micro_steps,
        )

    def _switches_used(self) -> tuple[str, ...]:
        """The switches, without those of a device's attentions and experts where none is kept as one op."""
        made = {op.name for op in self.labels.ops}
        unused = {switch for switch, name in ((ATTENTION, FUSED), (EXPERTS, ONE_OP)) if name not in made}
        return tuple(name for name in self.switches if name.partition(":")[0] not in unused)

    def unread(self, results: Sequence[Result], read: Sequence[Argument]) -> list[Argument]:
        """Arguments that are updated and never read."""
        names = {argument.name for argument in read}
        written = [self.known[r.updates] for r in results if r.updates is not None and r.updates not in names]
        return [Argument(k.name, k.role, k.type, k.of) for k in written]

    def _results(self, loss_or_output: Any, train: bool) -> list[Result]:
        """Loss or outputs first, then updated arguments, in argument order."""
        results = []
        if train:
            results.append(Result("loss", "loss", loss_or_output))
        else:
            for path, leaf in tree_flatten_with_path(loss_or_output)[0]:
                if isinstance(leaf, torch.Tensor) and is_xla(leaf):
                    results.append(Result(".".join(key_name(k) for k in path) or "output", "output", leaf))
            if not results:
                raise CaptureError(f"the model's output holds no tensor ({_brief(loss_or_output)})")
        for known in self.known.values():
            if known.role == "parameter" or known.role == "buffer":
                now = self._current(known)
                if tensor_id(now) != known.first:
                    results.append(Result(known.name, known.role, now, known.name))
        results += self.results
        self._check_updates(results)
        return results

    def _check_updates(self, results: Sequence[Result]) -> None:
        """Refuse a parameter without gradient, and updates that make the next step another program."""
        updated = {result.updates for result in results}
        left = next((name for name in self.trained if name not in updated), None)
        if left is not None:
            raise CaptureError(
                f"the step of {self.trained[left]} leaves {left} as it was, though it has a gradient. It skips it, or "
                "writes it where capture does not see it: write it with torch's ops (p.add_, p.copy_), or freeze it, "
                "requires_grad_(False), or leave it out of the optimizer"
            )
        held = {k.first: k.name for k in self.known.values() if k.role != "input" and k.name not in updated}
        for result in (result for result in results if result.updates is not None):
            was, now = self.known[str(result.updates)].type, tensor_type(result.tensor)
            if now != was:
                raise CaptureError(
                    f"the step leaves {now} in {result.name}, which was {was}: the next step "
                    "would be another program. Write values of the shape and dtype that it has"
                )
            other = held.setdefault(tensor_id(result.tensor), result.name)
            if other != result.name:
                raise CaptureError(
                    f"{other} and {result.name} are one tensor after the step (assigned, set_ or .data =), and the "
                    "next step would write both at once. Copy the values instead: copy_(…), or .clone()"
                )

    def _current(self, known: Known) -> torch.Tensor:
        """The present tensor of a parameter or buffer: a module may have assigned another one."""
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


class _Followed:
    """Known values of tensors, and the kinds that the values read depend on."""

    def __init__(self, values: KnownValues, producer: Callable[[torch.Tensor], Producer]) -> None:
        self.values, self.producer = values, producer
        self.kinds: Kinds = frozenset()

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        value, kinds = self.values.of(self.producer(tensor), tensor)
        self.kinds |= kinds
        return value


MOST_FOLLOWED = 1 << 16
"""Elements of a cleared tensor, above which its values are not followed: gradients are cleared too."""


class Labels(AtenSequence, ABC):
    """Runs each aten op under its label, marks its outputs, records it; refuses ops that cannot be captured.

    A front end implements labels (`labelled`) and marks (`mark`).
    """

    def __init__(self, paths: ModulePaths) -> None:
        """Before the first op."""
        super().__init__()
        self.paths = paths
        self.phase = "forward"
        self.ops: list[AtenOp] = []
        self.running = ""
        self.values = KnownValues(torch.Tensor.cpu)
        self.reads: list[ValueRead] = []
        self.moved: list[tuple[ref[torch.Tensor], torch.Tensor]] = []

    def run(self, call: Call) -> Any:
        """Run an op that can be lowered, under its label."""
        refusals.refuse(call.name, call.func, call.tensors, self.paths.describe)
        self.values.keep(call)
        self.running = call.name
        result = self.labelled(call)
        self.running = ""
        return result

    def host(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The result of a host op, from known values."""
        values = _Followed(self.values, self.producer)
        try:
            placed, named = on_cpu(args, values), on_cpu(dict(kwargs), values)
            if not values.kinds <= SHAPING:
                raise UnknownValueError(_in_words(values.kinds - SHAPING))
        except UnknownValueError as error:
            raise refusals.on_host(str(func), self.paths.describe(), str(error), self.indexing) from None
        result = func(*placed, **named)
        self._note(func, result, values.kinds)
        return result

    def unknown(self, tensor: torch.Tensor) -> str:
        """What a tensor depends on that no shape may depend on; empty if nothing."""
        try:
            _, kinds = self.values.of(self.producer(tensor), tensor)
        except UnknownValueError as error:
            return str(error)
        return _in_words(kinds - SHAPING) if kinds - SHAPING else ""

    def read(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The result of an op that reads values on the host."""
        values = _Followed(self.values, self.producer)
        try:
            result = func(*on_cpu(args, values), **on_cpu(dict(kwargs), values))
        except UnknownValueError as error:
            raise refusals.reads_value(str(func), self.paths.describe(), str(error)) from None
        self._note(func, result, values.kinds)
        return result.clone() if isinstance(result, torch.Tensor) else result

    def _note(self, func: Any, result: Any, found: Kinds) -> None:
        if found:
            what = (self.next_index, str(func), self.paths.current(), described(result), tuple(sorted(found)))
            self.reads.append(ValueRead(*what))

    def execute(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run an op on the device."""
        return func(*args, **kwargs)

    @abstractmethod
    def labelled(self, call: Call) -> Any:
        """Run the op under its label."""

    @abstractmethod
    def mark(self, call: Call, outputs: tuple[torch.Tensor, ...]) -> None:
        """Mark the annotatable outputs."""

    def marked(self, call: Call, outputs: tuple[torch.Tensor, ...]) -> Iterator[tuple[int, torch.Tensor]]:
        """(j, tensor) of each output to mark."""
        inputs: set[int] | None = None
        for j, tensor in enumerate(outputs):
            if is_xla(tensor) and tensor.is_floating_point():
                inputs = {tensor_id(t) for t in call.tensors if is_xla(t)} if inputs is None else inputs
                if tensor_id(tensor) not in inputs:
                    yield j, tensor

    def after(self, call: Call, outputs: tuple[torch.Tensor, ...]) -> None:
        """Record the op."""
        types = [tensor_type(tensor) for tensor in outputs]
        self.mark(call, outputs)
        path = self.paths.current()
        self.ops.append(AtenOp(call.index, call.name, path, self.phase, tuple(types), call.inputs, call.options))

    def uncounted(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Answer host reads; follow what is cleared, which counts as of the host."""
        if takes_values(func, args, kwargs):
            return self.read(func, args, kwargs)
        result = self.execute(func, args, kwargs)
        if isinstance(result, torch.Tensor) and is_xla(result) and result.numel() <= MOST_FOLLOWED:
            tensors = tensors_in((args, kwargs))
            if name_of(func) in CLEARS:
                self.values.from_host(result, torch.zeros(result.shape, dtype=result.dtype))
            elif not func._schema.is_mutable and tensors and all(map(self._is_of_host, tensors)):
                made = func(*on_cpu(args, self._of_host), **on_cpu(dict(kwargs), self._of_host))
                self.values.from_host(result, made)
        return result

    def _is_of_host(self, tensor: torch.Tensor) -> bool:
        return is_xla(tensor) and tensor_id(tensor) in self.values.host

    def _of_host(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.values.host[tensor_id(tensor)]

    def _follow(self, name: str, tensors: tuple[torch.Tensor, ...], result: Any) -> None:
        """Record tensors from the host."""
        super()._follow(name, tensors, result)
        if isinstance(result, torch.Tensor) and is_xla(result) and tensors:
            source = tensors[-1] if name.startswith("aten.copy") else tensors[0]
            if name in COPY_OPS and not is_xla(source):
                self.values.from_host(result, source)
                self.moved.append((ref(result), source))
            elif name in ALIAS_OPS and is_xla(source) and self.producer(source) is None:
                known = self.values.same(result, source)
                if not known and name == "aten.lift_fresh.default":  # `torch.tensor([1, 2], device="xla")`
                    self.values.from_host(result, self.values.data_of(source))


def takes_values(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether an op reads values of device tensors on the host."""
    name = name_of(func)
    return refusals.may_take_values(name) and refusals.takes_values(name, tensors_in((args, kwargs)), kwargs)


def _in_words(kinds: Kinds) -> str:
    """`the parameters and inputs of floats`."""
    words = {"floats": "inputs that are no whole numbers", "optimizer_state": "the optimizer's state"}
    return " and ".join(words.get(kind, f"the model's {kind}s") for kind in sorted(kinds))


class _Trial(AtenSequence):
    """An optimizer's trial step, to find its state; host reads return ones."""

    def __init__(self, labels: Labels) -> None:
        super().__init__()
        self.labels = labels
        self.labels.running = ""

    def run(self, call: Call) -> Any:
        refusals.refuse(call.name, call.func, call.tensors, _the_optimizer)
        self.labels.running = call.name
        result = self.labels.execute(call.func, call.args, call.kwargs)
        self.labels.running = ""
        return result

    def host(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        raise refusals.on_host(str(func), "the optimizer", "the optimizer's state", self.indexing)

    def uncounted(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if takes_values(func, args, kwargs):
            return func(*on_cpu(args, _ones), **on_cpu(dict(kwargs), _ones))
        return self.labels.execute(func, args, kwargs)


def _ones(tensor: torch.Tensor) -> torch.Tensor:
    return torch.ones(tensor.shape, dtype=tensor.dtype)


def _the_optimizer() -> str:
    return "the optimizer"


def _loss_of(output: Any) -> Any:
    if isinstance(output, Mapping) and output.get("loss") is not None:
        return output["loss"]
    return getattr(output, "loss", output)


def _said(names: Sequence[str], switch: str) -> str:
    """What follows the colon of a switch, `micro_batches:4`; empty where it is off."""
    return next((name.removeprefix(f"{switch}:") for name in names if name.startswith(f"{switch}:")), "")


def _brief(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        grad = "" if value.requires_grad else ", which requires no gradient"
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {tuple(value.shape)}{grad}"
    return f"a {type(value).__name__}"


def _versions(packages: Sequence[str]) -> dict[str, str]:
    found = {package: version_of(package) for package in (*packages, *{"transformers"} & {*sys.modules})}
    return {package: version for package, version in found.items() if version is not None}
