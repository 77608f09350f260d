"""Capture without torch_xla, on current torch: records the step on placeholders, and lowers its aten ops by jax.

The aten ops are those that torch_xla would get (`placeholders.py`), with the same numbers. Each distinct one, by
operand shapes and options, is lowered once: by `aten.py` and its companions, else by torchax. The module calls these
functions in program order, and inlines them; labels and marks are as in torch_xla's captures.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from autoshard.dtypes import numpy_dtype, torch_dtypes
from autoshard.errors import CaptureError
from autoshard.frontends.switches import table as switches
from autoshard.frontends.switches.autocast import Autocast
from autoshard.frontends.torchax.library import check_versions, jax_function_of
from autoshard.frontends.torchax.placeholders import (
    META,
    NoDataError,
    Recorded,
    Recorder,
    Ref,
    Signature,
    UnlowerableError,
    inner,
)
from autoshard.frontends.tracing import refusals
from autoshard.frontends.tracing.device import captured_on, names_it
from autoshard.frontends.tracing.modules import ModulePaths
from autoshard.frontends.tracing.sequence import Call, tensors_in
from autoshard.frontends.tracing.trace import (
    Labels,
    Lowered,
    Result,
    Tracing,
    check_placeable,
    trace_step,
)
from autoshard.program import Argument, Program, TensorType
from autoshard.stablehlo.context import bytecode, entry_block, functions_of, mlir_context, ops_inside
from autoshard.stablehlo.inline import drop_uncalled, inline_calls

FRONTEND = "torchax"


def capture(
    model: torch.nn.Module,
    sample_inputs: Any,
    *,
    loss_fn: Callable[..., Any] | None = None,
    optimizer: Any = None,
    train: bool | None = None,
    switches: Sequence[str] = switches.DEFAULT,
) -> Program:
    """Capture a program without running it; arguments and errors as those of `capture.torch_xla.capture`."""
    check_versions()
    return trace_step(_Tracing, model, sample_inputs, loss_fn, optimizer, train, switches)


class _Meta:
    """The device that placeholders are on."""

    type = "meta"
    holds = staticmethod(attrgetter("is_meta"))

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def tensor_id(self, tensor: torch.Tensor) -> int:
        found = inner(tensor)
        return found.ident if found is not None else -id(tensor)

    def reads_data(self, tensor: torch.Tensor) -> bool:
        found = inner(tensor)
        return found is None or found.recorder.reads[found.recorder.value_of(found)]

    def falls_back(self, op: str) -> bool:
        return False  # ops without a lowering are reported when recorded

    def random_state(self) -> int | None:
        return self.recorder.seed

    def set_random_state(self, state: int | None) -> None:
        self.recorder.seed = state


class _Tracing(Tracing):
    """A capture on placeholders of our own."""

    frontend = FRONTEND
    packages = ("torch", "torchax", "jaxlib")

    def begin(self) -> None:
        self.recorder = Recorder(lambda func: lowering_of(func) is not None, _takes_numbers)
        self.stack.enter_context(captured_on(_Meta(self.recorder)))

    def begin_step(self) -> None:
        self.stack.enter_context(_KeepsData())
        self.stack.enter_context(Autocast(switches.body_of_functional))

    def make_labels(self, paths: ModulePaths) -> Labels:
        self.recording = _Recording(self.recorder, paths)
        return self.recording

    def placeholder(self, like: torch.Tensor) -> torch.Tensor:
        check_placeable(like)
        return self.recorder.argument(like)

    def annotated(self, tensor: torch.Tensor) -> str:
        return ""

    def explain(self, error: Exception, first: str, where: str) -> CaptureError | None:
        if isinstance(error, UnlowerableError):
            return refusals.no_lowering(first, where, refusals.line_of(error), by="torchax")
        if isinstance(error, NoDataError) or "on meta tensors" in first or "out of meta tensor" in first:
            return refusals.execution(where, refusals.line_of(error))
        return None

    def lower(self, results: Sequence[Result]) -> Lowered:
        found = [inner(result.tensor) for result in results]
        values = [self.recorder.value_of(each) for each in found if each is not None]
        names = {self.recording.arguments[k.name]: k for k in self.known.values()}
        module = _Module(self.recorder, self.recording.marks, values)
        arguments, scalars = [], 0
        for value in module.given:
            kind = _type(*self.recorder.types[value])
            if value in names:
                known = names[value]
                arguments.append(Argument(known.name, known.role, kind, known.of))
            else:
                self.values[f"scalar{scalars}"] = self.recorder.constants[value]
                arguments.append(Argument(f"scalar{scalars}", "scalar", kind))
                scalars += 1
        unread = self.unread(results, arguments)
        module.given += [self.recording.arguments[a.name] for a in unread]
        kinds = tuple(_type(*self.recorder.types[value]) for value in values)
        return Lowered(module.stablehlo(), (*arguments, *unread), kinds)


def _type(shape: tuple[int, ...], dtype: torch.dtype) -> TensorType:
    return TensorType(shape, torch_dtypes()[dtype])


class _Recording(Labels):
    """Labels the calls recorded for an op, and notes its marks."""

    def __init__(self, recorder: Recorder, paths: ModulePaths) -> None:
        self.recorder = recorder
        self.arguments: dict[str, int] = {}
        self.marks: dict[int, tuple[int, int]] = {}
        super().__init__(paths)

    def name(self, tensor: torch.Tensor, name: str) -> None:
        """Record an argument, and its value in the lowered program."""
        super().name(tensor, name)
        found = inner(tensor)
        assert found is not None
        self.arguments[name] = found.value

    def labelled(self, call: Call) -> Any:
        """Run the op, and label what it records with its number."""
        self.recorder.label = call.index
        try:
            return self.execute(call.func, call.args, call.kwargs)
        except UnlowerableError as error:
            raise refusals.no_lowering(str(error), self.paths.describe(), by="torchax") from None
        finally:
            self.recorder.label = None

    def mark(self, call: Call, outputs: tuple[torch.Tensor, ...]) -> None:
        """Note the annotatable values."""
        for j, tensor in self.marked(call, outputs):
            found = inner(tensor)
            assert found is not None
            self.marks.setdefault(self.recorder.value_of(found), (call.index, j))

    def execute(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run an op on placeholders, or a factory."""
        on_meta = any(each.device == META for each in tensors_in((args, kwargs)))
        return self.recorder.dispatch(func, args, kwargs) if on_meta or names_it(kwargs.get("device")) else func(
            *args, **kwargs
        )  # fmt: skip


class _KeepsData(TorchFunctionMode):  # type: ignore[misc]
    """Keeps the data of host constants, which would have none if made on `meta`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.tensor, torch.as_tensor, torch.asarray) and names_it(kwargs.get("device")):
            if isinstance(args[0] if args else kwargs.get("data"), torch.Tensor):
                return func(*args, **kwargs)
            asked = {key: value for key, value in kwargs.items() if key not in ("device", "requires_grad")}
            return func(*args, **asked).to(META).requires_grad_(bool(kwargs.get("requires_grad")))
        if func in _WINDOWS and names_it(kwargs.get("device")):
            return func(*args, **{**kwargs, "device": None}).to(META)
        if func is torch.Tensor.new_tensor and args[0].device == META:
            asked = {"dtype": args[0].dtype if args[0].is_floating_point() else None} | kwargs
            asked.pop("device", None)
            return torch.tensor(*args[1:], **asked).to(META)
        if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__):
            args = (args[0], _indices(args[1]), *args[2:])
        return func(*args, **kwargs)


_WINDOWS = frozenset(
    {torch.hann_window, torch.hamming_window, torch.blackman_window, torch.bartlett_window, torch.kaiser_window}
)
"""Factories that torch writes out in C++, where no dispatch mode sees the ops."""


def _indices(index: Any) -> Any:
    """An index with host tensors for its lists."""
    if isinstance(index, tuple):
        return tuple(_indices(each) for each in index)
    if isinstance(index, list) and not any(isinstance(leaf, torch.Tensor) for leaf in index):
        return torch.tensor(index)
    return index


# Lowering.


def lowering_of(func: Any) -> Callable[..., Any] | None:
    """The lowering of an overload, `(output types, *args, **kwargs) -> arrays`, or None."""
    from autoshard.frontends.torchax import aten as aten_jax
    from autoshard.frontends.torchax import aten_index as aten_jax_index  # noqa: F401
    from autoshard.frontends.torchax import aten_losses as aten_jax_losses  # noqa: F401
    from autoshard.frontends.torchax import aten_window as aten_jax_window  # noqa: F401

    return aten_jax.LOWERINGS.get(str(func)) or jax_function_of(func)


def _takes_numbers(func: Any) -> bool:
    from autoshard.frontends.torchax.aten import NUMBERS_ARE_OPERANDS

    return str(func) in NUMBERS_ARE_OPERANDS


class _Module:
    """Builds a StableHLO module from the recorded calls that results depend on.

    `given` are main's parameters in order: the arguments and constants that are read.
    """

    def __init__(self, recorder: Recorder, marks: Mapping[int, tuple[int, int]], results: Sequence[int]) -> None:
        self.recorder, self.marks, self.results = recorder, marks, results
        self.calls = _needed(recorder.calls, results)
        self.given = _leaves(self.calls, results)

    def stablehlo(self) -> bytes:
        """MLIR bytecode."""
        with mlir_context(), jax_types():
            module = _parsed(self._text())
            _inline(module)
            drop_uncalled(module)
            main = entry_block(functions_of(module)["main"])
            _concatenate_at_once(main)
            _without_index_dim(main, {f"op{c.label}" for c in self.calls if str(c.signature.func) in INDEXED_BY_ROW})
            _in_post_order(main)
            return bytecode(module)

    def _text(self) -> str:
        names = {value: f"%a{i}" for i, value in enumerate(self.given)}
        types = [_mlir(*each) for each in self.recorder.types]
        functions: dict[int, str] = {}
        texts: list[str] = []
        lines = []
        for number, call in enumerate(self.calls):
            function = functions.get(id(call.signature))
            if function is None:
                function = functions[id(call.signature)] = f"f{len(functions)}"
                texts.append(_function_text(call.signature, function))
            reads = ", ".join(names[value] for value in call.operands)
            kinds = ", ".join(types[value] for value in call.operands)
            made = [types[value] for value in call.outputs]
            several = f":{len(made)}" if len(made) > 1 else ""
            where = f' loc("op{call.label}")' if call.label is not None else ""
            lines.append(f"  %c{number}{several} = call @{function}({reads}) : ({kinds}) -> ({', '.join(made)}){where}")
            for j, value in enumerate(call.outputs):
                names[value] = f"%c{number}#{j}" if several else f"%c{number}"
                if value in self.marks:
                    k, output = self.marks[value]
                    lines.append(
                        f"  %m{value} = stablehlo.custom_call @Sharding({names[value]}) {_REPLICATED}"
                        f' : ({types[value]}) -> {types[value]} loc("op{k}.out{output}")'
                    )
                    names[value] = f"%m{value}"
        given = ", ".join(f"{names[value]}: {types[value]}" for value in self.given)
        made = [types[value] for value in self.results]
        lines.append(f"  return {', '.join(names[value] for value in self.results)} : {', '.join(made)}")
        main = f"func.func public @main({given}) -> ({', '.join(made)}) {{\n" + "\n".join(lines) + "\n}\n"
        return "module {\n" + main + "".join(texts) + "}\n"


INDEXED_BY_ROW = frozenset({"aten.index_select.default", "aten.index_add.default"})
"""Ops with one index, for one dim."""

_REPLICATED = '{mhlo.sharding = "{replicated}"}'


def _needed(calls: Sequence[Recorded], results: Sequence[int]) -> list[Recorded]:
    """The calls that results depend on, in recorded order."""
    live = set(results)
    kept = []
    for call in reversed(calls):
        if not live.isdisjoint(call.outputs):
            live.update(call.operands)
            kept.append(call)
    return kept[::-1]


def _leaves(calls: Sequence[Recorded], results: Sequence[int]) -> list[int]:
    """Leaf values in the order in which torch_xla reaches them: last operands first."""
    maker = {value: call for call in calls for value in call.outputs}
    leaves: dict[int, None] = {}
    entered: set[int] = set()
    for result in results:
        stack = [result]
        while stack:
            value = stack.pop()
            call = maker.get(value)
            if call is None:
                leaves.setdefault(value)
            elif id(call) not in entered:
                entered.add(id(call))
                stack += call.operands
    return list(leaves)


def _concatenate_at_once(block: Any) -> None:
    """Merge concatenations of more than 16 operands, which jax writes as a tree."""
    from jaxlib.mlir import ir

    for view in list(block.operations):
        op = view.operation
        if op.name != "stablehlo.concatenate":
            continue
        parts: list[Any] = []
        for value in op.operands:
            made: Any = value.owner.operation if isinstance(value.owner, ir.OpView | ir.Operation) else None
            own = made is not None and made.name == op.name and made.location == op.location
            once = own and len(list(value.uses)) == 1 and made.attributes["dimension"] == op.attributes["dimension"]
            parts += made.operands if once else [value]
        if len(parts) == len(op.operands):
            continue
        whole = ir.Operation.create(
            op.name, results=[op.results[0].type], operands=parts,
            attributes={"dimension": op.attributes["dimension"]}, loc=op.location, ip=ir.InsertionPoint(op),
        )  # fmt: skip
        op.results[0].replace_all_uses_with(whole.results[0])
        op.erase()


def _without_index_dim(block: Any, labels: set[str]) -> None:
    """Drop the last index dim, of size 1, from gathers and scatters of some ops.

    jax always has that dim; torch_xla has none where an aten op takes one index for one dim.
    """
    from jaxlib.mlir.dialects import stablehlo

    for view in block.operations:
        op = view.operation
        indices = op.operands[1].owner if op.name in ("stablehlo.gather", "stablehlo.scatter") else None
        if indices is None or getattr(op.location, "name_str", "") not in labels or "reshape" not in indices.name:
            continue
        kind, index = op.name.removeprefix("stablehlo."), indices.operands[0]
        name = "dimension_numbers" if kind == "gather" else "scatter_dimension_numbers"
        if kind == "gather":
            had = stablehlo.GatherDimensionNumbers(op.attributes[name])
            made = stablehlo.GatherDimensionNumbers.get(
                had.offset_dims, had.collapsed_slice_dims, had.operand_batching_dims, had.start_indices_batching_dims,
                had.start_index_map, index.type.rank,
            )  # fmt: skip
        else:
            had = stablehlo.ScatterDimensionNumbers(op.attributes[name])
            made = stablehlo.ScatterDimensionNumbers.get(
                had.update_window_dims, had.inserted_window_dims, had.input_batching_dims,
                had.scatter_indices_batching_dims, had.scattered_dims_to_operand_dims, index.type.rank,
            )  # fmt: skip
        op.attributes[name] = made
        op.operands[1] = index


def _in_post_order(block: Any) -> None:
    """Sort the ops of a block into XLA's post-order, as in torch_xla's captures.

    Operands come before their op, the first operand's first. Fusion and combining depend on program order, and so does
    the plan: both front ends need the same.
    """
    *ops, last = [view.operation for view in block.operations]
    number = {result: i for i, op in enumerate(ops) for result in op.results}
    reads = [[number[value] for value in _reads(op) if value in number] for op in (*ops, last)]
    entered, left = [False] * len(reads), [False] * len(reads)
    stack = [len(ops)]
    while stack:
        i = stack[-1]
        if not entered[i]:
            entered[i] = True
            stack += [each for each in reversed(reads[i]) if not entered[each]]
            continue
        stack.pop()
        if not left[i]:
            left[i] = True
            if i < len(ops):
                ops[i].move_before(last)
    for i in reversed(range(len(ops))):
        if not left[i]:
            ops[i].erase()


def _reads(op: Any) -> Iterator[Any]:
    """The values that an op reads, also in its regions."""
    return (value for each in (op, *ops_inside(op)) for value in each.operands)


def _mlir(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"tensor<{''.join(f'{n}x' for n in shape)}{torch_dtypes()[dtype]}>"


def _parsed(text: str) -> Any:
    from jaxlib.mlir import ir

    try:
        return ir.Module.parse(text)
    except ir.MLIRError as error:  # pragma: no cover
        raise CaptureError(f"the StableHLO that was put together cannot be read: {error}") from error


def _inline(module: Any) -> None:
    """Inline the ops' functions, with the caller's label on each op."""
    from jaxlib.mlir import ir

    def of(op: Any, caller: Any) -> Any:
        return caller if caller is not None else (op.location if op.name == "func.call" else None)

    def note(op: Any, context: Any) -> None:
        if context is not None:
            op.location = context

    inline_calls(module, of, note)
    assert isinstance(module, ir.Module)


@contextlib.contextmanager
def jax_types() -> Iterator[None]:
    """Enable 64-bit types in jax."""
    import jax

    logger = logging.getLogger("jax._src.xla_bridge")  # warns of plugins for absent devices
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with jax.enable_x64(True):
            yield
    finally:
        logger.setLevel(level)


def _function_text(signature: Signature, name: str) -> str:
    """MLIR text of the function of one op, and of functions that it calls."""
    import jax

    lowering = lowering_of(signature.func)
    assert lowering is not None
    out = tuple(jax.ShapeDtypeStruct(shape, numpy_dtype(torch_dtypes()[dtype])) for shape, dtype in signature.outputs)

    def function(*operands: Any) -> Any:
        def placed(value: Any) -> Any:
            if isinstance(value, Ref):
                return operands[value.position]
            if isinstance(value, tuple):
                return tuple(placed(each) for each in value)
            return value

        made = lowering(out, *placed(signature.args), **{k: placed(v) for k, v in signature.kwargs.items()})
        made = list(made) if isinstance(made, list | tuple) else [made]
        return [jax.lax.convert_element_type(m, o.dtype).reshape(o.shape) for m, o in zip(made, out, strict=True)]

    given = [jax.ShapeDtypeStruct(shape, numpy_dtype(torch_dtypes()[dtype])) for shape, dtype in signature.operands]
    try:
        text = jax.jit(function, keep_unused=True).trace(*given).lower().as_text()
    except Exception as error:
        first = next(iter(str(error).splitlines()), type(error).__name__)
        raise CaptureError(
            f"{signature.func} could not be lowered by jax ({type(error).__name__}: {first}); operands "
            + ", ".join(_mlir(*each) for each in signature.operands)
        ) from error
    body = text[text.index("\n") + 1 : text.rindex("}")]
    for own in re.findall(r"func\.func (?:public|private) @([\w.]+|\"[^\"]+\")\(", body):
        plain = re.sub(r"\W", "_", own)
        body = re.sub(rf"@{re.escape(own)}(?=\()", f"@{name}" if own == "main" else f"@{name}_{plain}", body)
    private: str = body.replace("func.func public", "func.func private")
    return private
