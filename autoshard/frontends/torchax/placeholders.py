"""Tensors without data that record ops: the counterpart of XLA's lazy tensors without torch_xla.

A `Placeholder` is on the device `meta`. Functionalization runs above it, as above torch_xla's tensors, so that autograd
gives both the same aten ops: views are `_copy` ops, in-place writes make new tensors. Tensors from factories
(`torch.zeros`) inside the step are not functionalized, there as here; views of those, and writes into them, are tracked
here.

Shapes come from torch's `meta` kernels. Strides are those of a new tensor, for views too, as in torch_xla: they decide
where `reshape` copies.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

META = torch.device("meta")
FIRST_RNG_SEED = 42
"""Seed of the first random op: an argument of the program; each op passes the next seed on."""
_DISPATCH = torch._C.DispatchKey
_BIJECTIVE = frozenset({"view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "t", "transpose", "permute"})
"""Views that contain every element of their base."""
_SCATTERS = {"select": "select_scatter", "slice": "slice_scatter", "diagonal": "diagonal_scatter"}
_ALIAS_NAMES = frozenset({"detach", "alias", "lift_fresh", "lift", "detach_copy", "alias_copy", "lift_fresh_copy"})


class UnlowerableError(Exception):
    """An op has no lowering; the message is its name."""


class NoDataError(Exception):
    """A value was read outside of any op."""


@dataclass(frozen=True)
class Ref:
    """Stands for a tensor in the arguments of a recorded op: its index among the op's operands."""

    position: int


@dataclass(frozen=True)
class Signature:
    """Key of an op's lowering.

    Attributes:
        func: the overload.
        args, kwargs: as called, with `Ref` in the place of tensors and of numbers that are operands.
        operands, outputs: (shape, dtype) of each.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    operands: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    outputs: tuple[tuple[tuple[int, ...], torch.dtype], ...]


@dataclass
class Recorded:
    """A recorded op: its signature, the values it reads and makes, and its aten op."""

    signature: Signature
    operands: list[int]
    outputs: list[int]
    label: int | None


class Placeholder(torch.Tensor):  # type: ignore[misc]
    """A tensor of the step without data."""

    value: int
    ident: int
    root: Placeholder | None
    chain: tuple[Callable[[Placeholder], Placeholder], ...]
    version: int
    seen: int
    recorder: Recorder
    functional: bool = False
    """Whether functionalization wraps it: arguments and what is computed from them, not factories' results."""

    @staticmethod
    def make(recorder: Recorder, value: int, like: torch.Tensor) -> Placeholder:
        """A placeholder like a tensor for a value of the step."""
        made: Placeholder = torch.Tensor._make_wrapper_subclass(Placeholder, like.shape, dtype=like.dtype, device=META)
        made.recorder, made.value, made.ident = recorder, value, next(recorder.idents)
        made.root, made.chain, made.version, made.seen = None, (), 0, 0
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record an op."""
        kwargs = kwargs or {}
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Placeholder):
                return leaf.recorder.dispatch(func, args, kwargs)
        raise NoDataError(str(func))

    def __repr__(self, **_: Any) -> str:
        """A repr without values."""
        return f"Placeholder({tuple(self.shape)}, {self.dtype})"


def inner(tensor: torch.Tensor) -> Placeholder | None:
    """The placeholder that a tensor is, or that its functionalization wrapper contains."""
    if torch._is_functional_tensor(tensor):
        torch._sync(tensor)
        tensor = torch._from_functional_tensor(tensor)
    return tensor if isinstance(tensor, Placeholder) else None


class Recorder:
    """Records the ops on the placeholders of one capture.

    Args:
        lowers: whether an op has a lowering.
        takes_numbers: whether an op's numbers are operands, like tensors without dims.
    """

    def __init__(self, lowers: Callable[[Any], bool], takes_numbers: Callable[[Any], bool]) -> None:
        """An empty recording."""
        self.lowers, self.takes_numbers = lowers, takes_numbers
        self.idents = itertools.count(1)
        self.types: list[tuple[tuple[int, ...], torch.dtype]] = []
        self.calls: list[Recorded] = []
        self.constants: dict[int, torch.Tensor] = {}
        self.reads: list[bool] = []
        self.label: int | None = None
        self.seed: int | None = None
        self._known: dict[Any, int] = {}
        self._inferred: dict[Any, tuple[Signature, Any]] = {}

    def argument(self, like: torch.Tensor) -> torch.Tensor:
        """A functionalized tensor that exists before the step."""
        value = self._value(tuple(like.shape), like.dtype, reads=True)
        bare = Placeholder.make(self, value, like)
        bare.functional = True
        made: torch.Tensor = torch._to_functional_tensor(bare)
        return made

    def constant(self, tensor: torch.Tensor) -> int:
        """The value of a host tensor; equal ones share one."""
        tensor = tensor.detach().contiguous()
        key = (tuple(tensor.shape), tensor.dtype, tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
        if key not in self._known:
            self._known[key] = self._value(tuple(tensor.shape), tensor.dtype, reads=tensor.numel() > 1)
            self.constants[self._known[key]] = tensor.clone()
        return self._known[key]

    def _value(self, shape: tuple[int, ...], dtype: torch.dtype, reads: bool) -> int:
        self.types.append((shape, dtype))
        self.reads.append(reads)
        return len(self.types) - 1

    # Ops.

    def dispatch(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Record an op and its writes; return its results."""
        schema = func._schema
        if _composite(func):
            with _OwnTensors(self):
                return func.decompose(*args, **kwargs)
        if schema.is_mutable:
            return self._write(func, args, kwargs)
        base = schema.name.partition("::")[2]
        if base in _ALIAS_NAMES or func.is_view:
            return self._view(func, base, args, kwargs)
        if base == "_to_copy" and not any(isinstance(a, Placeholder) for a in args):  # from the host
            moved = args[0].to(kwargs.get("dtype") or args[0].dtype)
            return Placeholder.make(self, self.constant(moved), moved)
        return self._run(func, args, kwargs)

    def _run(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        if not self.lowers(func):
            return self._in_other_ops(func, args, kwargs)
        operands: list[int] = []
        types: list[tuple[tuple[int, ...], torch.dtype]] = []
        of_number = _number_dtype(args) if self.takes_numbers(func) else None

        def place(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                read = self.value_of(value)
            elif of_number is not None and type(value) in (int, float) and value not in (0, 1, -1):
                read = self.constant(torch.tensor(value, dtype=of_number(value)))
            else:
                return value
            operands.append(read)
            types.append(self.types[read])
            return Ref(len(operands) - 1)

        placed, placed_kwargs = _mapped(place, args), _mapped(place, dict(kwargs))
        random = torch.Tag.nondeterministic_seeded in func.tags
        if random:
            operands.append(self.constant(torch.tensor(FIRST_RNG_SEED)) if self.seed is None else self.seed)
            types.append(((), torch.int64))
            placed_kwargs["seed"] = Ref(len(operands) - 1)
        key = (func, _frozen(placed), _frozen(placed_kwargs), tuple(types))
        if key not in self._inferred:
            self._inferred[key] = self._infer(func, args, kwargs, placed, placed_kwargs, tuple(types))
        signature, result = self._inferred[key]
        reads = any(self.reads[value] for value in operands)
        outputs = [self._value(shape, dtype, reads) for shape, dtype in signature.outputs]
        if random:
            self.seed = outputs[-1]
        self.calls.append(Recorded(signature, operands, outputs, self.label))
        made = iter(outputs)
        functional = any(isinstance(t, Placeholder) and t.functional for t in tree_leaves((args, kwargs)))

        def placeholder(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            one = Placeholder.make(self, next(made), leaf)
            one.functional = functional
            return one

        return tree_map(placeholder, result)

    def _infer(self, func: Any, args: Any, kwargs: Any, placed: Any, placed_kwargs: Any, types: Any) -> Any:
        result = func(*tree_map(_plain, args), **tree_map(_plain, dict(kwargs)))
        outputs = tuple((tuple(t.shape), t.dtype) for t in tree_leaves(result) if isinstance(t, torch.Tensor))
        if "seed" in placed_kwargs:
            outputs += (((), torch.int64),)
        return Signature(func, placed, placed_kwargs, types, outputs), result

    def _in_other_ops(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Decompose an op by torch's own decomposition."""
        from torch._decomp import decomposition_table

        instead = decomposition_table.get(func)
        if instead is None and func.has_kernel_for_dispatch_key(_DISPATCH.CompositeExplicitAutograd):

            def instead(*args: Any, **kwargs: Any) -> Any:
                return func._op_dk(_DISPATCH.CompositeExplicitAutograd, *args, **kwargs)

        if instead is None:
            raise UnlowerableError(str(func))
        with torch.no_grad(), _OwnTensors(self):
            return instead(*args, **kwargs)

    # Views and writes.

    def value_of(self, tensor: torch.Tensor) -> int:
        """The present value of a tensor."""
        if not isinstance(tensor, Placeholder):
            if tensor.device == META:
                raise NoDataError("a tensor that was made without its data")
            return self.constant(tensor)
        root = tensor.root
        if root is not None and tensor.seen != root.version:
            again = root
            for step in tensor.chain:
                again = step(again)
            tensor.value, tensor.seen = again.value, root.version
        return tensor.value

    def _view(self, func: Any, base: str, args: Any, kwargs: Mapping[str, Any]) -> Any:
        source = args[0]
        if not isinstance(source, Placeholder):  # lift_fresh of a constant
            return Placeholder.make(self, self.constant(source), source)
        made: list[Placeholder] = []
        copies = func if base in _ALIAS_NAMES or base.endswith("_copy") else _copy_of(func)
        results = source if base in _ALIAS_NAMES else self._run(copies, args, kwargs)
        many = isinstance(results, list | tuple)
        for index, shown in enumerate(results if many else [results]):
            each = Placeholder.make(self, self.value_of(shown), shown)
            each.functional = source.functional
            if not base.endswith("_copy"):
                each.root = source.root if source.root is not None else source
                each.seen = each.root.version
                each.chain = (*source.chain, _Step(self, copies, base, args[1:], kwargs, index if many else None))
            made.append(each)
        return made if many else made[0]

    def _write(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Record an op that writes its first argument."""
        target, functional = args[0], _functional(func)
        if functional is None or not isinstance(target, Placeholder):
            return self._in_other_ops(func, args, kwargs)
        if functional is torch.ops.aten.zero.default:
            functional, args = torch.ops.aten.fill.Scalar, (target, 0)
        result = self.dispatch(functional, args, kwargs)
        if result.dtype != target.dtype:
            result = self._run(torch.ops.aten._to_copy.default, (result,), {"dtype": target.dtype})
        if result.shape != target.shape:
            raise UnlowerableError(str(func))
        self._set(target, self.value_of(result))
        return target

    def _set(self, target: Placeholder, value: int) -> None:
        target.value, target.ident = value, next(self.idents)
        root = target.root
        if root is None:
            target.version += 1
            return
        bases = [root]
        for step in target.chain[:-1]:
            bases.append(step(bases[-1]))
        written = Placeholder.make(self, value, target)
        for step, base in zip(reversed(target.chain), reversed(bases), strict=True):
            written = step.back(base, written)  # type: ignore[attr-defined]
        root.value = written.value
        root.version += 1
        target.seen = root.version


class _Step:
    """A view, to be replayed on another tensor of the same shape."""

    def __init__(self, recorder: Recorder, copies: Any, base: str, args: Any, kwargs: Any, index: int | None) -> None:
        self.recorder, self.copies, self.base = recorder, copies, base
        self.args, self.kwargs, self.index = args, kwargs, index

    def __call__(self, source: Placeholder) -> Placeholder:
        if self.base in _ALIAS_NAMES:
            return source
        result = self.recorder._run(self.copies, (source, *self.args), self.kwargs)
        made: Placeholder = result if self.index is None else result[self.index]
        return made

    def back(self, base: Placeholder, written: Placeholder) -> Placeholder:
        """`base` updated by what was written into this view of it."""
        run, aten = self.recorder._run, torch.ops.aten
        if self.base in _ALIAS_NAMES:
            return written
        if self.base in ("t", "transpose"):
            dims = self.args if self.base == "transpose" else (0, 1)
            turned: Placeholder = run(aten.transpose_copy.int, (written, *dims), {}) if base.dim() > 1 else written
            return turned
        if self.base == "permute":
            order = [d % base.dim() for d in self.args[0]]
            back = [order.index(d) for d in range(base.dim())]
            turned = run(aten.permute_copy.default, (written, back), {})
            return turned
        if self.base in _BIJECTIVE:
            turned = run(aten.view_copy.default, (written, list(base.shape)), {})
            return turned
        if self.base in _SCATTERS:
            name = _SCATTERS[self.base]
            overload = getattr(getattr(aten, name), "int" if name == "select_scatter" else "default", None)
            scatter = overload or aten.select_scatter.default
            turned = run(scatter, (base, written, *self.args), self.kwargs)
            return turned
        raise UnlowerableError(f"a write into aten.{self.base} of a tensor made in the step")


def _plain(value: Any) -> Any:
    """An argument's stand-in for shape inference."""
    if not isinstance(value, torch.Tensor) or (not isinstance(value, Placeholder) and value.dim() == 0):
        return value
    return torch.empty(value.shape, dtype=value.dtype, device=META)


def _mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """Map a function over arguments, in order."""
    if isinstance(value, list | tuple):
        return tuple(_mapped(change, each) for each in value)
    if isinstance(value, dict):
        return {key: _mapped(change, each) for key, each in value.items()}
    return change(value)


def _frozen(value: Any) -> Any:
    """A hashable key of arguments: 1, 1.0 and True differ."""
    if isinstance(value, tuple):
        return tuple(_frozen(each) for each in value)
    if isinstance(value, dict):
        return tuple((key, _frozen(each)) for key, each in value.items())
    return value if isinstance(value, Ref) else (type(value), repr(value))


def _number_dtype(args: Sequence[Any]) -> Callable[[Any], torch.dtype]:
    """number -> the dtype it takes next to the first tensor among the arguments."""
    first = next((each for each in tree_leaves(args) if isinstance(each, torch.Tensor)), None)

    def of(number: Any) -> torch.dtype:
        if first is None:
            return torch.get_default_dtype() if isinstance(number, float) else torch.int64
        return torch.result_type(torch.empty((1,), dtype=first.dtype, device=META), number)

    return of


@cache
def _composite(func: Any) -> bool:
    """Whether an op is a composite that autograd has not decomposed here, so that its decomposition runs."""
    return bool(func.has_kernel_for_dispatch_key(_DISPATCH.CompositeImplicitAutograd))


@cache
def _copy_of(view: Any) -> Any:
    """The op that copies a view."""
    name, overload = view._schema.name.partition("::")[2], view._overloadname
    if name in ("_unsafe_view", "reshape", "_reshape_alias"):
        return torch.ops.aten.view_copy.default
    return getattr(getattr(torch.ops.aten, f"{name}_copy"), overload)


@cache
def _functional(func: Any) -> Any:
    """The functional overload of an in-place one, or None."""
    namespace, _, name = func._schema.name.partition("::")
    arguments = func._schema.arguments
    if not name.endswith("_") or not arguments[0].is_write or any(a.is_write for a in arguments[1:]):
        return None
    packet = getattr(getattr(torch.ops, namespace), name[:-1], None)
    return getattr(packet, func._overloadname, None) if packet is not None else None


class _OwnTensors(TorchDispatchMode):  # type: ignore[misc]
    """Records tensors that a decomposition creates: the numbers that it selects from."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        made = kwargs.get("device")
        if made is not None and torch.device(made) == META:
            return self.recorder.dispatch(func, args, kwargs)
        return func(*args, **kwargs)
