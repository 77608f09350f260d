"""Attention kept as one op, `autoshard::attention`; what no kernel computes is written out (`dots.py`)."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from autoshard.attention.form import FORWARD, Form
from autoshard.attention.kernels import Part, kernel_name
from autoshard.cost.machine.device import load_device
from autoshard.dtypes import torch_dtypes
from autoshard.errors import CaptureError
from autoshard.frontends.switches import dots
from autoshard.frontends.switches.handlers import ATTENTION, note, replaces
from autoshard.frontends.switches.transformers_library import masked_as
from autoshard.frontends.tracing import attention as fused
from autoshard.frontends.tracing.device import is_xla
from autoshard.program import TensorType
from autoshard.regions.kernel import Platform

_kinds: list[tuple[Platform, str]] = []


@contextlib.contextmanager
def kernels_of(kind: str) -> Iterator[None]:
    """Keep those attentions as one op that this kind of device, `tpu-v5e`, or platform, has a fused kernel for."""
    platforms: dict[str, Platform] = {"gpu": "gpu", "tpu": "tpu"}
    _kinds.append((platforms.get(kind) or load_device(kind).target, kind))
    try:
        yield
    finally:
        _kinds.pop()


def kernels() -> bool:
    """Whether attentions that some device has a kernel for are kept as one op."""
    return bool(_kinds)


@replaces("attention", F.scaled_dot_product_attention)
def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    causal, window, segments = masked_as(attn_mask) or (is_causal, None, None)
    bias = attn_mask if masked_as(attn_mask) is None else None
    documents = None if segments is None else (segments, segments)
    ways = [Asked(causal, scale, window, documents, bias, dropout_p, enable_gqa)]
    if attn_mask is not bias:  # a kernel without such windows or documents may take the mask itself
        ways.append(Asked(is_causal, scale, None, None, attn_mask, dropout_p, enable_gqa))
    kept = as_one_op(query, key, value, ways)
    if kept is not None:
        return kept[0]
    return dots.attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


@dataclass(frozen=True)
class Asked:
    """What is asked of an attention.

    Attributes:
        scale: of the scores; None: by the features.
        window: as `Form.window`.
        segments: of queries and of keys, `(batch, tokens)`.
        bias: added to the scores, or true where they count.
        grouped: whether several query heads may share one of keys.
        sinks: per query head the score of one more key, whose value is 0.
        soft_cap: as `Form.soft_cap`.
    """

    causal: bool
    scale: float | None
    window: int | None = None
    segments: tuple[torch.Tensor, torch.Tensor] | None = None
    bias: torch.Tensor | None = None
    dropout: float = 0.0
    grouped: bool = False
    sinks: torch.Tensor | None = None
    soft_cap: float | None = None


def as_one_op(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ways: Iterable[Asked]
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The attention as one op and its log-sum-exps, in the first way that a kernel computes; None where there is none.

    The reason that holds of the first way is noted then.
    """
    reasons = []
    for asked in ways:
        made = _kept(query, key, value, asked)
        if not isinstance(made, str):
            return made
        reasons.append(made)
    if reasons[0]:
        note(ATTENTION, reasons[0])
    return None


def _kept(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, asked: Asked
) -> tuple[torch.Tensor, torch.Tensor] | str:
    """The attention as one op and its log-sum-exps, or why no kernel computes it; empty of other shapes."""
    if query.dim() not in (3, 4) or query.dim() != key.dim() or key.shape[:-1] != value.shape[:-1]:
        return ""
    why = _why_written_out(query, key, asked)
    if why:
        return why
    scale = 1 / math.sqrt(query.shape[-1]) if asked.scale is None else asked.scale
    form = Form(scale, asked.causal, asked.window, asked.bias is not None, asked.segments is not None, asked.soft_cap)
    types = _types(query, key, value, asked)
    platform, kind = _kinds[-1]
    why = kernel_name(Part(FORWARD, form, types, query.shape[-2], 1, platform, kind))[1]
    if why:  # nothing is traced before this is known
        return why
    query, key, value = dots.same_dtype(query, key, value)
    q = query.reshape(types[0].shape)
    k, v = (each if each.dim() == 4 else each.unsqueeze(1) for each in (key, value))
    bias = None if asked.bias is None else _bias(asked.bias, types[3].shape, q.dtype, query.dim() == 4)
    documents = asked.segments and (asked.segments[0].to(torch.int32), asked.segments[1].to(torch.int32))
    sinks = None if asked.sinks is None else asked.sinks.to(torch.float32).reshape(types[0].shape[1:3])
    out, lse = fused.attention(q, k, v, form, bias, documents, sinks)
    return out.reshape(*query.shape[:-1], value.shape[-1]), lse.reshape(query.shape[:-1])


def _types(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, asked: Asked) -> tuple[TensorType, ...]:
    """Types of the operands of the op: `form.py`."""
    batch, (heads, kv_heads) = query.shape[0], ((query.shape[1], key.shape[1]) if query.dim() == 4 else (1, 1))
    dtype = torch.get_autocast_dtype("xla") if dots.autocasts() else query.dtype
    shapes: list[Sequence[int]] = [(batch, kv_heads, heads // kv_heads, *query.shape[-2:])]
    shapes += [(batch, kv_heads, *each.shape[-2:]) for each in (key, value)]
    if asked.bias is not None:
        of = asked.bias.shape
        own = of[-3] if len(of) > 3 or (len(of) == 3 and query.dim() == 4) else 1
        rows = of[0] if len(of) > 3 or (len(of) == 3 and query.dim() == 3) else 1
        shapes.append((rows, *((1, 1) if own == 1 else shapes[0][1:3]), *((1, 1, *of)[-2:])))
    found = [TensorType(tuple(shape), torch_dtypes().get(dtype, str(dtype))) for shape in shapes]
    return (*found, *(TensorType(tuple(each.shape), "i32") for each in asked.segments or ()))


@contextlib.contextmanager
def of_transformers() -> Iterator[None]:
    """Have attentions of transformers with sinks or soft caps, which PyTorch itself lacks, captured as one op."""
    library: Any = getattr(sys.modules.get("transformers.modeling_utils"), "AttentionInterface", None)
    if library is None:
        yield
        return
    own = library.get_interface

    def get_interface(table: Any, name: str, default: Callable[..., Any]) -> Callable[..., Any]:
        found: Callable[..., Any] = own(table, name, default)
        return partial(_of_transformers, found) if found is default else found

    library.get_interface = get_interface
    try:
        yield
    finally:
        library.get_interface = own


def _of_transformers(
    written_out: Callable[..., Any],
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    *rest: Any,
    **options: Any,
) -> Any:
    """An attention of transformers as one op; `written_out` if it has neither sinks nor cap, or no kernel does it."""
    sinks, soft_cap = options.get("s_aux"), options.get("softcap")
    of_positions = options.get("position_bias") is not None  # added to the scores by functions of a model's own
    if (sinks is not None or soft_cap is not None) and not rest and not of_positions and is_xla(query):
        causal, window, segments = masked_as(mask) or (False, None, None)
        bias = mask if masked_as(mask) is None else None
        documents = None if segments is None else (segments, segments)
        scale, dropout = options.get("scaling"), options.get("dropout", 0.0)
        ways = [Asked(causal, scale, window, documents, bias, dropout, True, sinks, soft_cap)]
        if mask is not bias:
            ways.append(Asked(False, scale, None, None, mask, dropout, True, sinks, soft_cap))
        kept = as_one_op(query, key, value, ways)
        if kept is not None:
            return kept[0].transpose(1, 2).contiguous(), None
    return written_out(module, query, key, value, mask, *rest, **options)


@contextlib.contextmanager
def of_torch_xla() -> Iterator[None]:
    """Have torch_xla's `flash_attention` and `splash_attention` captured as the same attention of other sources.

    Their own kernels cannot be traced without a TPU, and are split by their arguments alone, which are passed over.
    """
    functions: dict[tuple[str, str], Callable[..., Any]] = {
        ("custom_kernel", "FlashAttention"): _flash_attention,
        ("splash_attention", "SplashAttention"): _splash_attention,
    }
    with contextlib.ExitStack() as stack:
        for (file, name), function in functions.items():
            if "torch_xla" in sys.modules:
                library = import_module(f"torch_xla.experimental.{file}")
                own = getattr(library, name)
                stack.callback(setattr, library, name, own)
                setattr(library, name, SimpleNamespace(apply=partial(_on_xla, own.apply, function)))
        yield


def _on_xla(own: Callable[..., Any], function: Callable[..., Any], query: torch.Tensor, *rest: Any) -> Any:
    return (function if is_xla(query) else own)(query, *rest)


def _flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    causal: bool,
    q_segments: torch.Tensor | None,
    kv_segments: torch.Tensor | None,
    scale: float,
    bias: torch.Tensor | None,
    *_: Any,
) -> Any:
    segments = None if q_segments is None or kv_segments is None else (q_segments, kv_segments)
    return _masked(query, key, value, Asked(causal, scale, None, segments, bias, grouped=True))


def _splash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    config: str,
    segments: torch.Tensor | None,
    causal: bool,
    soft_cap: float | None,
) -> Any:
    """torch_xla's, whose scores are not scaled; windows are of so many tokens to both sides, and the token itself."""
    asked = json.loads(config)
    window = asked["slide_window_size"] + 1 if asked["attentiontype_local_sliding"] else None
    documents = None if segments is None else (segments, segments)
    return _masked(query, key, value, Asked(causal, 1.0, window, documents, grouped=True, soft_cap=soft_cap))


def _masked(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, asked: Asked) -> Any:
    """An attention as one op where a kernel computes it, else written out with its mask."""
    kept = as_one_op(query, key, value, [asked]) if _kinds else None
    if kept is not None:
        return kept[0]
    if asked.soft_cap is not None:
        raise CaptureError(
            "splash_attention(attn_logits_soft_cap=…) cannot be captured for this device: write the attention out"
        )
    rows = torch.arange(query.shape[2], device=query.device).unsqueeze(1)
    columns = torch.arange(key.shape[2], device=query.device)
    allowed = [columns <= rows] if asked.causal else []
    if asked.window is not None:
        allowed += [rows - columns < asked.window, columns - rows < asked.window]
    if asked.segments is not None:
        allowed.append(asked.segments[0][:, None, :, None] == asked.segments[1][:, None, None, :])
    mask = functools.reduce(torch.logical_and, allowed) if allowed else None
    if asked.bias is not None:
        mask = asked.bias if mask is None else asked.bias.masked_fill(~mask, -math.inf)
    return dots.attention(query, key, value, mask, 0.0, False, asked.scale, query.shape[1] != key.shape[1])


def _why_written_out(query: torch.Tensor, key: torch.Tensor, asked: Asked) -> str:
    """Why no kernel computes an attention; empty if one does."""
    if asked.dropout > 0:
        return "dropout of its weights: the kernels draw other random numbers than PyTorch"
    if asked.bias is not None and asked.bias.requires_grad:
        return "its bias has a gradient, which the kernels do not compute"
    if query.shape[0] != key.shape[0]:
        return "queries and keys have different batches"
    shares = asked.grouped or key.shape[1] == 1
    if query.dim() == 4 and (query.shape[1] % key.shape[1] if shares else query.shape[1] != key.shape[1]):
        return "heads of queries are no multiple of those of keys"
    return ""


def _bias(mask: torch.Tensor, shape: Sequence[int], dtype: torch.dtype, heads: bool) -> torch.Tensor:
    """A mask or bias as it is added to scores: `(batch, kv heads, group, queries, keys)`, any dim may be 1.

    Args:
        heads: whether queries were given with a dim of heads; else a mask of three dims begins with the batch.
    """
    if mask.dim() == 3 and not heads:
        mask = mask.unsqueeze(1)
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, -math.inf)
    return mask.to(dtype).reshape(shape)
