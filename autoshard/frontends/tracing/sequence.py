"""Dispatch mode that numbers a program's aten ops, the same way at capture and in every training step.

`AtenSequence` gives op k its number, and each of its operands a producer: an argument of the program, output j of op i,
or unknown. Capture labels HLO by it, lowering annotates outputs by it. torch_xla functionalizes above it: no op writes
in place, and views are `_copy` ops.

**Counted** are ops with an operand on the XLA device, or that create a tensor there, except:

- aliases (`detach_copy`, `alias_copy`, `lift_fresh`), which keep their operand's producer, and write-backs
  (`_propagate_xla_data`);
- transfers between host and device (a loader's `.to(device)`, logging's `.cpu()`), and host reads (`.item()`);
- clearing (`zero`, as in `zero_grad(set_to_none=False)`), ops on cleared tensors only, and `add` of a term to a cleared
  tensor: with gradients None autograd would pass the term on. The sum, and views of it, keep the term's producer;
- ops computed on the host (`by_values.py`: `nonzero`, ops without a lowering in torch_xla): the result is a host
  constant, and a boolean mask as index becomes the positions of its true elements;
- a repeated view of one tensor: torch recreates views of a tensor once that was written, as parameters are from the
  second step on. The first view, annotation included, is reused.

Ops on CPU tensors alone (step counters of optimizers, schedulers, a loader's collate) are never counted.

**Outputs** are the tensors that an op returns, in order, then those it writes in place without returning them
(`native_batch_norm` writes its running statistics).

**Identity.** A tensor's key is torch_xla's tensor id, or its counterpart (`device.py`). It survives autograd's saved
tensors, `detach` and `.data`, which are new Python objects; an in-place write gives a new one; none is reused. So this
mode keeps no tensor alive.

**Order.** Of ready nodes, autograd runs the one created last, and each thread counts for itself. A backward pass whose
result is differentiated again creates nodes on its own thread, so their order would depend on the process's history:
under the mode, backward passes run on the calling thread.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten
from torch.utils.weak import TensorWeakRef

from autoshard.frontends.tracing.by_values import by_positions, may_index, on_host
from autoshard.frontends.tracing.decompositions import BY_ARGUMENTS, decomposition_of, functional_form, instead_of
from autoshard.frontends.tracing.device import current, is_xla, names_it, tensor_id

Producer = tuple[int, int] | str | None
"""Producer of a tensor: `(k, j)` for output j of op k, the name of an argument, or None if unknown."""

ALIAS_OPS = frozenset(
    f"aten.{name}.default"
    for name in ("detach", "detach_copy", "alias", "alias_copy", "lift_fresh", "lift_fresh_copy", "lift")
)
WRITES_BACK = frozenset({"aten._propagate_xla_data.default"})
COPY_OPS = frozenset({"aten._to_copy.default", "aten.copy_.default", "aten.copy.default", "aten._copy_from.default"})
CLEARS = frozenset(f"aten.{name}.default" for name in ("zero", "zero_", "_foreach_zero", "_foreach_zero_"))
ACCUMULATES = frozenset({"aten.add.Tensor", "aten.add_.Tensor"})
READS_VALUE = frozenset(
    f"aten.{name}.default" for name in ("_local_scalar_dense", "item", "equal", "is_nonzero", "allclose")
)
SAID_BY_SHAPES = frozenset({"size", "implicit"})
"""Arguments of ops that follow from the shapes of results."""
_VIEWS = frozenset({"aten._unsafe_view.default"})
"""Ops that functionalization replays like views, and that are not tagged as such."""
TAKES_ONE_RESULT = frozenset(
    f"aten.{name}"
    for name in (
        *("index_select.default", "index_select_backward.default", "embedding.default"),
        *("index_add.default", "index_copy.default", "index_fill.int_Scalar", "index_fill.int_Tensor"),
        *("index_add_.default", "index_copy_.default", "index_fill_.int_Scalar", "index_fill_.int_Tensor"),
    )
)
"""Ops on which torch_xla crashes for an index that is one of several results of its node (`topk`'s positions): it asks
the
node for its shape, a tuple. They get a view of it."""
OF_PAIRS = "aten.view_as_real_copy.default"
TURNS = frozenset({"aten.permute_copy.default", "aten.transpose_copy.int", "aten.t_copy.default"})
"""Ops that end the process where they read `OF_PAIRS` directly: torch_xla gives that a layout of one dim less. They get
a view of it.
"""
UNDECLARED_WRITES = {"aten.native_batch_norm.default": ("running_mean", "running_var")}


@dataclass(frozen=True)
class Call:
    """One counted op, before it runs.

    Attributes:
        index: k, its number.
        func: the overload; `str(func)` is its name, such as `aten.addmm.default`.
        tensors: its operands, in the order of its flattened arguments.
        inputs: the producer of each operand.
        args, kwargs: as dispatched.
    """

    index: int
    func: Any
    tensors: tuple[torch.Tensor, ...]
    inputs: tuple[Producer, ...]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Such as `aten.addmm.default`."""
        return name_of(self.func)

    @property
    def options(self) -> str:
        """Arguments of the op other than tensors, as in `AtenOp.options`."""
        said = []
        for position, name, default in _options(self.func):
            value = self.args[position] if position < len(self.args) else self.kwargs.get(name, default)
            value = list(value) if isinstance(value, tuple) else value
            if value != default and _tells(value):
                said.append(f"{name}={value}")
        return ", ".join(said)


class AtenSequence(TorchDispatchMode):  # type: ignore[misc]
    """Numbers the aten ops that run under it, and tracks the producer of each tensor.

    Hooks: `run` around an op (capture enters a label), `after` on its outputs (lowering annotates them), `skip` to
    leave further ops out of the numbering, `uncounted` for the rest.

    Args:
        arguments: name -> tensor, the tensors that exist before the step: parameters, buffers, inputs, states.
    """

    def __init__(self, arguments: Mapping[str, torch.Tensor] | None = None) -> None:
        """Start at op 0 with these arguments."""
        super().__init__()
        self.producers: dict[int, Producer] = {}
        self._cleared: set[int] = set()
        self._cleared_before: set[int] = set()
        self._accumulated: set[int] = set()
        self._views: dict[str, _Made] = {}
        self._of_several: set[int] = set()
        self._of_pairs: set[int] = set()
        self._threads: list[Any] = []
        self._inside = 0
        self.indexing = ""
        self.next_index = 0
        self.restart(arguments or {})

    def restart(self, arguments: Mapping[str, torch.Tensor]) -> None:
        """Begin a step: count from 0, forget producers, and name these tensors as arguments."""
        self.producers.clear()
        self._accumulated.clear()
        self._views.clear()
        self._of_several.clear()
        self._of_pairs.clear()
        # A loop may clear gradients before or after it begins the step in which autograd accumulates into them.
        self._cleared_before, self._cleared = self._cleared, set()
        self.next_index = 0
        for name, tensor in arguments.items():
            self.name(tensor, name)

    def name(self, tensor: torch.Tensor, name: str) -> None:
        """Name a tensor's present value as an argument; the first name of a shared tensor stays."""
        self.producers.setdefault(tensor_id(tensor), name)

    def producer(self, tensor: torch.Tensor) -> Producer:
        """Producer of a tensor's present value."""
        return self.producers.get(tensor_id(tensor)) if is_xla(tensor) else None

    def __enter__(self) -> Any:
        """Enter the mode, with backward passes on this thread."""
        self._threads.append(torch.autograd.set_multithreading_enabled(False))
        return super().__enter__()

    def __exit__(self, *raised: Any) -> Any:
        """Leave the mode, and restore the thread of backward passes."""
        result = super().__exit__(*raised)
        self._threads.pop().__exit__(None, None, None)
        return result

    # What a subclass may override.

    def run(self, call: Call) -> Any:
        """Run one counted op and return what it returns."""
        return call.func(*call.args, **call.kwargs)

    def after(self, call: Call, outputs: tuple[torch.Tensor, ...]) -> None:
        """Handle the outputs of a counted op (annotating one in place keeps its identity)."""

    def skip(self, func: Any, inputs: tuple[Producer, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether to leave this op, otherwise counted, out of the numbering."""
        return False

    def made(self, call: Call, outputs: tuple[torch.Tensor, ...]) -> None:
        """Record the outputs of a counted op."""
        for j, tensor in enumerate(outputs):
            if is_xla(tensor):
                self.producers[tensor_id(tensor)] = (call.index, j)

    def uncounted(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run an op that is not counted and return what it returns."""
        return func(*args, **kwargs)

    def alone(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run an op outside this mode."""
        return self._wrapped(name_of(func), tensors_in((args, kwargs)), kwargs, func(*args, **kwargs))

    def host(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Compute an op on the host."""
        return func(*on_cpu(args, torch.Tensor.cpu), **on_cpu(dict(kwargs), torch.Tensor.cpu))

    # The mode.

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Number the op, or run it uncounted."""
        kwargs = kwargs or {}
        tensors = tensors_in((args, kwargs)) if kwargs else tensors_in(args)
        if not _on_xla(tensors, kwargs):
            return self.uncounted(func, args, kwargs)
        kind = _kind(func)
        instead = instead_of(func, args, kwargs) if kind.by_arguments else kind.instead
        if instead is not None:
            made_by = self._view_key(func, args, kwargs) if kind.views else ""
            if made_by in self._views and (again := self._views[made_by].again()) is not None:
                return again
            with self._once_more():
                result = instead(*args, **kwargs)
            if made_by:
                self._views[made_by] = _Made(result)
            return result
        indexed = by_positions(func, args) if kind.indexes else None
        if indexed is not None:
            self.indexing = kind.name
            with self._once_more():
                result = indexed(*args, **kwargs)
            self.indexing = ""
            return result
        takes_view = (kind.takes_one_result and any(self.is_of_several(t) for t in tensors)) or (
            kind.turns and self._of_pairs and any(self._is_of_pairs(t) for t in tensors)
        )
        if takes_view:
            with self._once_more():
                return func(*tree_map(self._viewed, args), **tree_map(self._viewed, dict(kwargs)))
        if self._inside and (functional := functional_form(func)) is not None:
            with self._once_more():
                return functional(*args, **kwargs)
        if kind.on_host:
            made = self.host(func, args, kwargs)
            with self._once_more():
                return tree_map(_to_device, made)
        name = kind.name
        if (
            kind.uncounted
            or (kind.transfers and not _stays(tensors, kwargs))
            or ((self._cleared or self._cleared_before or self._accumulated) and self._only_clears(func, name, tensors))
        ):
            result = self.uncounted(func, args, kwargs)
            if name == "aten._to_copy.default":
                result = _functionalized(result)
            self._follow(name, tensors, result)
            return result
        view = self._view_key(func, args, kwargs) if kind.views else None
        if view is not None and view in self._views:
            again = self._views[view].again()
            if again is not None:
                return again
        inputs = tuple(self.producer(t) for t in tensors)
        if self.skip(func, inputs, args, kwargs):
            return self._wrapped(name, tensors, kwargs, self.uncounted(func, args, kwargs))
        call = Call(self.next_index, func, tensors, inputs, args, kwargs)
        self.next_index += 1
        result = self._wrapped(name, tensors, kwargs, self.run(call))
        outputs = outputs_of(call, result)
        if len(outputs) > 1 or (self._of_several and self._passes_on(call, outputs)):
            self._of_several.add(call.index)
        if call.name == OF_PAIRS:
            self._of_pairs.add(call.index)
        self.after(call, outputs)
        self.made(call, outputs)
        if view is not None:
            self._views[view] = _Made(result)
        return result

    @contextlib.contextmanager
    def _once_more(self) -> Iterator[None]:
        """Number ops inside an op, without entering the mode itself, which would begin a new step in lowering."""
        TorchDispatchMode.__enter__(self)
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1
            TorchDispatchMode.__exit__(self, None, None, None)

    def _passes_on(self, call: Call, outputs: tuple[torch.Tensor, ...]) -> bool:
        """Whether an op may return one of several results unchanged: a copy, a full slice, a permutation."""
        if call.name == "aten.view_copy.default":
            return False
        shapes = {each.shape for each in outputs}
        return any(t.shape in shapes and self.is_of_several(t) for t in call.tensors)

    def is_of_several(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor may be one of several results of a torch_xla node."""
        made = self.producer(tensor)
        return isinstance(made, tuple) and made[0] in self._of_several

    def _is_of_pairs(self, tensor: torch.Tensor) -> bool:
        made = self.producer(tensor)
        return isinstance(made, tuple) and made[0] in self._of_pairs

    def _viewed(self, leaf: Any) -> Any:
        """A view of a tensor that may be one of several results, or of pairs, so that it has a node of its own."""
        if not isinstance(leaf, torch.Tensor) or not (self.is_of_several(leaf) or self._is_of_pairs(leaf)):
            return leaf
        return torch.ops.aten.view_copy.default(leaf, list(leaf.shape))

    def _wrapped(self, name: str, tensors: tuple[torch.Tensor, ...], kwargs: Mapping[str, Any], result: Any) -> Any:
        """Wrap an op's results for functionalization, as outside the mode: else writes through views are lost."""
        copied = name == "aten._to_copy.default" and current().type != "xla"  # PyTorch wraps copies on XLA only,
        copied = copied and (kwargs.get("layout") is None or kwargs.get("device") is not None)  # and none of its own
        if not self._inside and (copied or not any(is_xla(t) for t in tensors)):
            return tree_map(_functionalized, result)
        return result

    def _view_key(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        """A key of a view of a tensor."""
        return f"{name_of(func)}{_by_id(args)!r}{_by_id(kwargs)!r}" if kwargs else f"{name_of(func)}{_by_id(args)!r}"

    def _is_cleared(self, tensor: torch.Tensor) -> bool:
        if not (self._cleared or self._cleared_before) or not is_xla(tensor):
            return False
        known = tensor_id(tensor)
        return known in self._cleared or known in self._cleared_before

    def _only_clears(self, func: Any, name: str, tensors: tuple[torch.Tensor, ...]) -> bool:
        """Whether the op only reads cleared tensors, accumulates into one, or views an accumulated one."""
        if not tensors or not is_xla(tensors[0]):
            return False
        if self._accumulated and torch.Tag.view_copy in func.tags:
            return tensor_id(tensors[0]) in self._accumulated or self._is_cleared(tensors[0])
        if not self._is_cleared(tensors[0]):
            return False
        return name in ACCUMULATES or all(self._is_cleared(t) for t in tensors)

    def _follow(self, name: str, tensors: tuple[torch.Tensor, ...], result: Any) -> None:
        """Track tensors through an uncounted op."""
        made = [t for t in tensors_in((result,)) if is_xla(t)]
        if name in CLEARS or (tensors and all(self._is_cleared(t) for t in tensors)):
            self._cleared.update(tensor_id(t) for t in made)
            return
        if not made or not tensors or not is_xla(tensors[0]):
            return
        accumulates = name in ACCUMULATES and self._is_cleared(tensors[0])
        of_accumulated = tensor_id(tensors[0]) in self._accumulated
        if accumulates or of_accumulated:
            self._accumulated.update(tensor_id(t) for t in made)
        if accumulates or of_accumulated or name in ALIAS_OPS:
            producer = self.producer(tensors[-1] if accumulates else tensors[0])
            if producer is not None:
                self.producers.setdefault(tensor_id(made[0]), producer)


def _by_id(part: Any) -> Any:
    """An op's arguments with ids for tensors."""
    kind = type(part)
    if isinstance(part, torch.Tensor):
        return f"%{tensor_id(part)}"
    if kind is tuple or kind is list:
        return kind(map(_by_id, part))
    return {key: _by_id(each) for key, each in part.items()} if isinstance(part, Mapping) else part


class _Made:
    """Results of a view op, held weakly: a tensor kept alive would be another result of the step."""

    def __init__(self, result: Any) -> None:
        self.leaves, self.structure = tree_flatten(result)
        self.refs = [TensorWeakRef(leaf) for leaf in self.leaves]
        del self.leaves

    def again(self) -> Any:
        """The results, or None when any has been freed."""
        leaves = [ref() for ref in self.refs]
        return None if any(leaf is None for leaf in leaves) else tree_unflatten(leaves, self.structure)


@cache
def _options(func: Any) -> tuple[tuple[int, str, Any], ...]:
    """(position, name, default) of an overload's integer, bool and string arguments."""
    return tuple(
        (position, argument.name, argument.default_value)
        for position, argument in enumerate(func._schema.arguments)
        if re.search(r"\b(int|bool|str)\b", str(argument.type)) and argument.name not in SAID_BY_SHAPES
    )


def _tells(value: Any) -> bool:
    """Whether a value identifies an op: dtypes and devices show in results, floats may change."""
    several = value if isinstance(value, list) else [value]
    return all(each is None or isinstance(each, int | str) for each in several)


def on_cpu(arguments: Any, value_of: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Arguments of an op with CPU values for device tensors, and the CPU for the device."""

    def placed(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return value_of(leaf) if is_xla(leaf) else leaf
        return torch.device("cpu") if isinstance(leaf, torch.device) and names_it(leaf) else leaf

    return tree_map(placed, arguments)


def _to_device(leaf: Any) -> Any:
    """Move a host result to the device, without functionalization's wrapper for op results."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    moved = leaf.to(current().type)
    return torch._from_functional_tensor(moved) if torch._is_functional_tensor(moved) else moved


def _functionalized(result: Any) -> Any:
    """Wrap a tensor from the host or a factory for functionalization, as outside a mode.

    Without the wrapper, ops on it would differ from those on a parameter: a write to a slice of it, which XLA copies,
    would not reach it.
    """
    if isinstance(result, torch.Tensor) and is_xla(result) and not torch._is_functional_tensor(result):
        return torch._to_functional_tensor(result)
    return result


def _on_xla(tensors: tuple[torch.Tensor, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether an op reads or makes XLA tensors."""
    return any(is_xla(t) for t in tensors) or names_it(kwargs.get("device"))


def _stays(tensors: tuple[torch.Tensor, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether an op that may transfer tensors keeps all on one device."""
    asked = kwargs.get("device")
    return len({t.device.type for t in tensors} | ({torch.device(asked).type} if asked is not None else set())) == 1


class _Kind(NamedTuple):
    """Properties of an overload on a device.

    Attributes:
        func: the overload, kept alive because it is cached by id.
        name: such as `aten.addmm.default`.
        instead: its decomposition.
        by_arguments: whether it is decomposed for some arguments.
        indexes: whether it may take a mask as index.
        on_host: whether the host computes it.
        uncounted: whether it is never counted (module docstring; clearing apart).
        transfers: whether it is counted only if all tensors are on one device.
        views: whether it makes a view.
        takes_one_result, turns: whether it is one of `TAKES_ONE_RESULT`, of `TURNS`.
        draws: whether it draws random numbers.
    """

    func: Any
    name: str
    instead: Callable[..., Any] | None
    by_arguments: bool
    indexes: bool
    on_host: bool
    uncounted: bool
    transfers: bool
    views: bool
    takes_one_result: bool
    turns: bool
    draws: bool


_KINDS: dict[str, dict[int, _Kind]] = {}


def _kind(func: Any) -> _Kind:
    """Properties of an overload on the capture device. (Cached by id: hashing an overload is slower.)"""
    kinds = _KINDS.setdefault(current().type, {})
    found = kinds.get(id(func))
    if found is None:
        name = name_of(func)
        instead = decomposition_of(func)
        found = kinds[id(func)] = _Kind(
            func,
            name,
            instead,
            by_arguments=func in BY_ARGUMENTS,
            indexes=may_index(func),
            on_host=instead is None and on_host(func),
            uncounted=name in ALIAS_OPS or name in WRITES_BACK or name in CLEARS or name in READS_VALUE,
            transfers=name in COPY_OPS,
            views=torch.Tag.view_copy in func.tags or name in _VIEWS,
            takes_one_result=name in TAKES_ONE_RESULT,
            turns=name in TURNS,
            draws=torch.Tag.nondeterministic_seeded in func.tags,
        )
    return found


def computes(func: Any, tensors: tuple[torch.Tensor, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether an overload computes values from its operands on their device, without writing to them."""
    kind = _kind(func)
    if kind.uncounted or func._schema.is_mutable or kind.name in UNDECLARED_WRITES:
        return False
    return not kind.transfers or (kind.name != "aten._copy_from.default" and _stays(tensors, kwargs))


def draws(func: Any) -> bool:
    """Whether an overload draws random numbers. (Searching tags is slow.)"""
    return _kind(func).draws


def outputs_of(call: Call, result: Any) -> tuple[torch.Tensor, ...]:
    """The outputs of an op: returned tensors, then those written in place and not returned."""
    outputs = list(tensors_in((result,)))
    seen = {id(t) for t in outputs}
    for t in _written(call):
        if id(t) not in seen:
            seen.add(id(t))
            outputs.append(t)
    return tuple(outputs)


def _written(call: Call) -> list[torch.Tensor]:
    """The arguments written in place, in schema order."""
    written: list[torch.Tensor] = []
    for position, name in _writes(call.func):
        value = call.args[position] if position < len(call.args) else call.kwargs.get(name)
        written += tensors_in((value,))
    return written


@cache
def _writes(func: Any) -> tuple[tuple[int, str], ...]:
    """(position, name) of arguments written in place."""
    undeclared = UNDECLARED_WRITES.get(name_of(func), ())
    arguments = enumerate(func._schema.arguments)
    return tuple((place, each.name) for place, each in arguments if each.is_write or each.name in undeclared)


@cache
def name_of(func: Any) -> str:
    """The name of an op overload, such as `aten.addmm.default`."""
    return str(func)


_NO_TREES = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


def tensors_in(tree: Any) -> tuple[torch.Tensor, ...]:
    """The tensors in an op's arguments or results, in the order of `tree_leaves`.

    `tree_leaves` itself takes longer than recording most ops.
    """
    found: list[torch.Tensor] = []
    for part in tree.values() if type(tree) is dict else tree:
        if isinstance(part, torch.Tensor):
            found.append(part)
        elif type(part) in (tuple, list, dict):
            found += tensors_in(part)
        elif type(part) not in _NO_TREES:
            found += (leaf for leaf in tree_leaves(part) if isinstance(leaf, torch.Tensor))
    return tuple(found)
