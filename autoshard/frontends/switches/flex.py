"""PyTorch's FlexAttention: one op where its mask is one that a kernel has, else written out.

`score_mod` and `mask_mod` are functions of single scores and indices. They run on the CPU alone: on values, to see what
they mask, and on fake tensors under `vmap`, to find the ops that compute all scores at once.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from autoshard.errors import CaptureError
from autoshard.frontends.switches import attention
from autoshard.frontends.switches.handlers import ATTENTION, note
from autoshard.frontends.switches.windows import Window, sampled, window_of
from autoshard.frontends.tracing.device import current, is_xla, tensor_id

_LARGE = 1e9
"""A score beyond every soft cap."""
_FEW = 4
"""Queries of every head, and of every row of the batch, that a function is tried with."""
_DOCUMENTS = 3
"""How many documents there are in the random segments that a mask is tried with."""


@contextlib.contextmanager
def flex_traced() -> Iterator[None]:
    """Have `flex_attention` and `create_block_mask` captured; blocks are not looked at."""
    library: Any = sys.modules.get("torch.nn.attention.flex_attention")
    if library is None:
        yield
        return
    names = (
        "create_mask", "_convert_mask_to_block_mask", "_create_sparse_block_from_block_mask",
        "_create_empty_block_mask", "_validate_device", "flex_attention_hop",
    )  # fmt: skip
    own = {name: getattr(library, name) for name in names}
    asked: list[torch.device] = []

    def create_mask(mod: Any, batch: Any, heads: Any, queries: int, keys: int, device: Any = "cuda") -> Any:
        device = torch.device(device or "cuda")
        if device.type != current().type and (device.type != "cuda" or torch.cuda.is_available()):
            return own["create_mask"](mod, batch, heads, queries, keys, device)
        sizes = (batch or 1, heads or 1, queries, keys)
        return _Mods(library, sizes, torch.device(current().type)).applied(mod).expand(sizes)

    def to_blocks(mask: torch.Tensor, *given: Any, **named: Any) -> Any:
        if is_xla(mask):
            asked.append(mask.device)
            mask = torch.ones(*mask.shape[:2], 1, 1, dtype=torch.bool)
        return own["_convert_mask_to_block_mask"](mask, *given, **named)

    def sparse(*given: Any) -> Any:
        made = own["_create_sparse_block_from_block_mask"](*given)
        return made.to(asked.pop()) if asked else made

    def empty(query: torch.Tensor, key: torch.Tensor) -> Any:
        made = own["_create_empty_block_mask"](torch.empty(0) if is_xla(query) else query, key)
        return made.to(query.device) if is_xla(query) else made

    def validate(query: torch.Tensor, *given: Any) -> None:
        if not is_xla(query):
            own["_validate_device"](query, *given)

    def called(query: torch.Tensor, *given: Any, **named: Any) -> Any:
        if not is_xla(query):
            return own["flex_attention_hop"](query, *given, **named)
        return _flex(library, query, *given, **named)

    setting = "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG"
    own[setting] = getattr(library, setting)
    replaced = dict(zip(own, (create_mask, to_blocks, sparse, empty, validate, called, True), strict=True))
    with contextlib.ExitStack() as stack:
        for name, value in replaced.items():
            stack.callback(setattr, library, name, own[name])
            setattr(library, name, value)
        if "torch._dynamo" in sys.modules:  # `torch.compile(flex_attention)` is how it is used
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


def _flex(
    library: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Any,
    block_mask: Sequence[Any],
    scale: float,
    options: Any = None,
    *_: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What PyTorch's higher-order op computes: results, and in base 2 log-sum-exps and highest scores."""
    if key.shape[0] != query.shape[0]:
        key, value = (each.expand(query.shape[0], *each.shape[1:]) for each in (key, value))
    mods = _Mods(library, (*query.shape[:3], key.shape[2]), query.device)
    mask_mod = block_mask[-1]
    if attention.kernels():
        known, soft_cap = mods.scores(score_mod)
        if not known:
            note(ATTENTION, "its score_mod changes the scores")
        elif (options or {}).get("OUTPUT_MAX"):
            note(ATTENTION, "its highest scores are asked for")
        else:
            kept = attention.as_one_op(query, key, value, _ways(mods, mask_mod, scale, soft_cap))
            if kept is not None:
                out, lse = kept
                return out, lse / math.log(2), lse.new_empty(0)
    grouped = query.unflatten(1, (key.shape[1], -1))
    scores = torch.matmul(grouped, key.unsqueeze(2).transpose(-2, -1)).flatten(1, 2)
    scores = mods.applied(score_mod, scores.to(torch.promote_types(scores.dtype, torch.float32)) * scale)
    scores = scores.masked_fill(~mods.applied(mask_mod), -math.inf)
    lse, highest = scores.logsumexp(-1), scores.amax(-1)
    weights = torch.exp(scores - lse.masked_fill(lse == -math.inf, 0.0).unsqueeze(-1)).to(query.dtype)
    out = torch.matmul(weights.unflatten(1, (key.shape[1], -1)), value.unsqueeze(2)).flatten(1, 2)
    return out, lse / math.log(2), highest / math.log(2)


def _ways(mods: _Mods, mask_mod: Any, scale: float, soft_cap: float | None) -> Iterator[attention.Asked]:
    """The attention with its mask as a window and documents, if it is that, and with the mask as it is."""
    found = mods.described(mask_mod)
    if found is not None:
        window, segments = found
        documents = None if segments is None else (segments, segments)
        yield attention.Asked(window.causal, scale, window.window, documents, grouped=True, soft_cap=soft_cap)
    if found is None or found != (Window(False, None), None):
        yield attention.Asked(False, scale, bias=mods.applied(mask_mod), grouped=True, soft_cap=soft_cap)


class _Lift(TorchFunctionMode):  # type: ignore[misc]
    """Puts stand-ins on the CPU in the place of the step's tensors that a function closes over.

    Attributes:
        seen: by id a tensor and its stand-in.
    """

    def __init__(self, stand_in: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.seen: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._stand_in = stand_in

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(self._lifted, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _lifted(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not is_xla(value) or tensor_id(value) < 0:  # of `vmap`, fake tensors
            return value
        if id(value) not in self.seen:
            self.seen[id(value)] = value, self._stand_in(value)
        return self.seen[id(value)][1]


def _zeros(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros(tensor.shape, dtype=tensor.dtype)


def _apart(function: Callable[[], Any]) -> Any:
    """Call a function in a thread of its own, outside all modes that record the step."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(function).result()


class _Mods:
    """The functions of an attention of these sizes, `(batch, heads, queries, keys)`."""

    def __init__(self, library: Any, sizes: Sequence[int], device: torch.device) -> None:
        self.library, self.sizes, self.device = library, tuple(sizes), device

    def scores(self, score_mod: Any) -> tuple[bool, float | None]:
        """Whether a `score_mod` does no more than cap scores as `Form.soft_cap` says, and that cap."""
        if score_mod is self.library._identity:
            return True, None
        zero, lift, tried = torch.zeros(1, dtype=torch.long), _Lift(_zeros), []
        for at in self._places():
            shape = [len(each) for each in at]
            scores = torch.randn(shape) * torch.logspace(-2, 3, shape[3])[torch.randperm(shape[3])]
            tried.append((scores, self._probed(score_mod, (scores,), at, lift)))
        most = self._probed(score_mod, (torch.full((1, 1, 1, 1), _LARGE),), [zero] * 4, lift)
        if lift.seen or most is None or any(made is None for _, made in tried):
            return False, None
        if all(torch.equal(made, scores) for scores, made in tried):
            return True, None
        cap = float(most)
        return 0 < cap < _LARGE and all(
            torch.allclose(made, cap * (scores / cap).tanh()) for scores, made in tried
        ), cap

    def described(self, mask_mod: Any) -> tuple[Window, torch.Tensor | None] | None:
        """A mask as a window inside documents, `(batch, tokens)`; None of other masks."""
        lift, zero = _Lift(_zeros), torch.zeros(1, dtype=torch.long)

        def allowed(rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
            found = self._probed(mask_mod, (), (zero, zero, rows[:, 0], columns), lift)
            return torch.zeros(1, 1, dtype=torch.bool) if found is None else found[0, 0]

        window = window_of(allowed, *self.sizes[2:])
        if window is None or not self._is(mask_mod, window, lift):
            return None
        closed = [tensor for tensor, _ in lift.seen.values()]
        if not closed:
            return window, None
        return self._inside_documents(mask_mod, window, closed[0]) if len(closed) == 1 else None

    def _inside_documents(
        self, mask_mod: Any, window: Window, ids: torch.Tensor
    ) -> tuple[Window, torch.Tensor | None] | None:
        """A mask that is a window where `ids` are zeros: whether they are documents, which it keeps apart."""
        batch, _, queries, keys = self.sizes
        whole = queries == keys and ids.shape in ((queries,), (1, queries), (batch, queries))
        if not whole or ids.dtype not in (torch.int32, torch.int64):
            return None
        tried = torch.randint(_DOCUMENTS, ids.shape, dtype=ids.dtype)
        same = self._is(mask_mod, window, _Lift(lambda _: tried), tried.expand(batch, queries))
        return (window, ids.expand(batch, queries)) if same else None

    def _places(self) -> Iterator[list[torch.Tensor]]:
        """Where a function is tried: many queries of one head and row of the batch, a few of all of these."""
        batch, heads, queries, keys = self.sizes
        zero, columns = torch.zeros(1, dtype=torch.long), torch.arange(keys)
        rows = sampled(queries, keys)[:, 0]
        yield [zero, zero, rows, columns]
        few = rows[torch.linspace(0, len(rows) - 1, min(_FEW, len(rows))).long()]
        yield [torch.arange(batch), zero, few, columns]
        yield [zero, torch.arange(heads), few, columns]

    def _is(self, mask_mod: Any, window: Window, lift: _Lift, documents: torch.Tensor | None = None) -> bool:
        """Whether a mask is this window, inside documents `(batch, tokens)` if they are given."""
        for at in self._places():
            wanted = window.mask(at[2].unsqueeze(1), at[3]).expand([len(each) for each in at])
            if documents is not None:
                of = documents[at[0]]
                wanted = wanted & (of[:, at[2], None] == of[:, None, at[3]]).unsqueeze(1)
            found = self._probed(mask_mod, (), at, lift)
            if found is None or not torch.equal(found.expand_as(wanted), wanted):
                return False
        return True

    def _probed(
        self, mod: Any, scores: Sequence[torch.Tensor], at: Sequence[torch.Tensor], lift: _Lift
    ) -> torch.Tensor | None:
        """What a function makes of these scores and indices, computed on the CPU; None where it fails."""
        try:
            made: torch.Tensor = _apart(lambda: self._of_all(mod, (*scores, *at), lift))
        except Exception:  # `applied` says what is wrong with it
            return None
        return made

    def _of_all(self, mod: Any, given: Sequence[torch.Tensor], lift: _Lift) -> torch.Tensor:
        """A function of single scores and indices under `vmap`, as PyTorch calls it."""
        from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

        with TransformGetItemToIndex(), lift:
            made: torch.Tensor = self.library._vmap_for_bhqkv(mod, prefix=(0,) * (len(given) - 4))(*given)
            return made

    def applied(self, mod: Any, *scores: torch.Tensor) -> torch.Tensor:
        """The ops of a function of all scores and indices, recorded in the step.

        Raises:
            CaptureError: it cannot be traced.
        """
        if mod is self.library._identity:
            return scores[0]
        lift = _Lift(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype))

        def trace() -> tuple[list[torch.Tensor], Any]:
            with FakeTensorMode():
                given = [torch.empty(each.shape, dtype=each.dtype) for each in scores]
                given += map(torch.arange, self.sizes)
                self._of_all(mod, given, lift)  # to see what it closes over
                closed, made = zip(*lift.seen.values(), strict=True) if lift.seen else ((), ())

                def traced(*args: torch.Tensor) -> torch.Tensor:
                    stand_ins = {id(tensor): args[len(given) + n] for n, tensor in enumerate(closed)}
                    return self._of_all(mod, args[: len(given)], _Lift(lambda tensor: stand_ins[id(tensor)]))

                return list(closed), make_fx(traced, tracing_mode="fake")(*given, *made)

        try:
            closed, graph = _apart(trace)
        except Exception as error:
            name = getattr(mod, "__qualname__", str(mod))
            raise CaptureError(
                f"flex_attention's {name} cannot be captured: {type(error).__name__}: {error}. A score_mod or mask_mod "
                "computes with its indices and with tensors of the step, given as inputs or buffers."
            ) from error
        for node in graph.graph.nodes:
            if "device" in node.kwargs:
                node.kwargs = {**node.kwargs, "device": self.device}
        graph.recompile()
        indices = [torch.arange(size, device=self.device) for size in self.sizes]
        made: torch.Tensor = graph(*scores, *indices, *closed)
        return made.expand(self.sizes) if scores else made
